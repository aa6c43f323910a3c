"""Where the host may read values: on a CPU at no cost, on an accelerator only by waiting for it."""

import torch
from torch import Tensor

__all__ = ["may_look", "rounds_per_look", "subset"]

_AT_NO_COST = {"cpu"}
_ROUNDS = 8  # of a loop on an accelerator between two looks at values


def may_look(x: Tensor) -> bool:
    """Whether values of x can be read without waiting."""
    return x.device.type in _AT_NO_COST


def rounds_per_look(x: Tensor) -> int:
    """After how many rounds a loop over x may look at values again."""
    return 1 if may_look(x) else _ROUNDS


def subset(mask: Tensor) -> Tensor:
    """Indices that include those where the mask (B,) is true: just these where it may be read, else all."""
    if may_look(mask):
        return mask.nonzero()[:, 0]
    return torch.arange(len(mask), device=mask.device)
