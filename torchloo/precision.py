"""Linear algebra that autocast leaves alone."""

import torch
from torch import Tensor

__all__ = ["full_precision"]


def full_precision(like: Tensor) -> torch.autocast:
    """A context in which products keep the dtype of their inputs, whatever autocast says outside."""
    kind = like.device.type
    return torch.autocast(kind if torch.amp.is_autocast_available(kind) else "cpu", enabled=False)
