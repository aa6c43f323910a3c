"""Rows, grids, splits and points of an SVM, distributed over the processes of torch.distributed.

Start the processes with torchrun and call torch.distributed.init_process_group in each. All processes must
call the same functions in the same order, each with its own rows and with equal machines. An error in one
process is raised in all of them: in that process as it is, in the others as a RuntimeError with its rank and
message.
"""

from torchloo.distributed.sharded_rows import fit, gather, lco, loo, path, solve, sum_gradients
from torchloo.distributed.shared_work import select, share, svc_loo, validate

__all__ = [
    "fit", "gather", "lco", "loo", "path", "select", "share", "solve", "sum_gradients", "svc_loo", "validate",
]  # fmt: skip
