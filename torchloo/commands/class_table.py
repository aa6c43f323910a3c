"""What the command tells of every class: its rows, how many were right, and what others were taken for."""

from typing import NamedTuple

import numpy as np
import torch

import torchloo as tl
from torchloo.held_out import HeldOut

__all__ = ["ClassTable"]


class ClassTable(NamedTuple):
    """Held-out answers by class, every row counting once; errors are standard errors, by clusters if any."""

    confusion: np.ndarray
    """Rows of a class (row) of which a class (column) was said, whole numbers (c, c)."""
    right: np.ndarray
    """Share of right answers, (c,)."""
    error: np.ndarray
    """Of each share, (c,)."""
    all_right: float
    all_error: float

    @classmethod
    def of(cls, held_out: HeldOut) -> "ClassTable":
        """From columns of several classes, or one of two."""
        several = held_out.targets.ndim > 1
        criterion = tl.criteria.multiclass_error if several else tl.criteria.error_rate
        positive = held_out.targets > 0
        members = positive if several else torch.stack([~positive, positive], -1)  # (n, c)
        weights = members.to(held_out.outputs.dtype).unbind(-1)
        errors = [float(tl.standard_error(criterion, held_out, weight)) for weight in weights]
        return cls(
            tl.criteria.confusion(held_out, weight=None).long().cpu().numpy(),
            tl.criteria.class_accuracy(held_out, weight=None).cpu().numpy(),
            np.array(errors),
            1 - float(criterion(held_out, weight=None)),
            float(tl.standard_error(criterion, held_out, None)),
        )

    def mistaken_for(self, k: int, labels: tuple[str, ...], most: int = 3) -> str:
        """The classes that rows of class k are most often taken for, with their numbers."""
        counts = self.confusion[k].copy()
        counts[k] = 0
        order = [j for j in np.argsort(-counts, kind="stable") if counts[j]]
        taken = ", ".join(f"{labels[j]} ({counts[j]})" for j in order[:most])
        return taken + ", ..." * (len(order) > most) or "·"
