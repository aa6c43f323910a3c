"""Linear algebra that autocast leaves alone."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

__all__ = ["full_precision"]


_NOTHING = nullcontext()


def full_precision(like: Tensor) -> AbstractContextManager[object]:
    """A context in which products keep the dtype of their inputs, even under autocast."""
    if not torch._C._is_any_autocast_enabled():
        return _NOTHING
    kind = like.device.type
    if kind != "cpu" and not torch.amp.is_autocast_available(kind):
        kind = "cpu"
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else _NOTHING
