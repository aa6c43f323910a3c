"""Machines whose rows, points, grids or splits are shared out over the processes of torch.distributed.

Start the processes with torchrun and call torch.distributed.init_process_group in each; then all of them
call the same functions, with rows of their own and machines that are alike. An error in one process is
raised in all of them: in the one by its own name, in the others with its rank and message.
"""

from torchloo.distributed.rows import fit, gather, lco, loo, path, solve, sum_gradients
from torchloo.distributed.shared_out import select, share, svc_loo, validate

__all__ = [
    "fit", "gather", "lco", "loo", "path", "select", "share", "solve", "sum_gradients", "svc_loo", "validate",
]  # fmt: skip
