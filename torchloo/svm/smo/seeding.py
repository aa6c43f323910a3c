"""Feasible starts without some rows, from the full machine (alpha seeding, DeCoste and Wagstaff 2000)."""

import torch
from torch import Tensor

from torchloo.svm.smo.working_sets import snapped

__all__ = ["seed_without"]


def seed_without(alpha: Tensor, y: Tensor, box: Tensor, near: Tensor) -> Tensor:
    """A feasible start without some rows, from the full solution; all (B, n), `box` 0 at those rows.

    What the rows held goes to rows whose a = alpha * y can take it, nearest in kernel (`near`)
    first: by growing same-class ones, then by shrinking the others. That always completes while
    both classes remain; with one class the only feasible point, zero, comes out.
    """
    left = alpha.minimum(box)
    surplus = ((alpha - left) * y).sum(1)  # (B,) to be put back
    same = y * surplus[:, None].sign() > 0
    grow = torch.where(same, box - left, 0.0)
    left = left + _pour(surplus.abs(), grow, near)
    rest = surplus.abs() - (left - alpha.minimum(box)).sum(1)
    shrink = torch.where(same, 0.0, left)
    left = left - _pour(rest.clamp_min(0), shrink, near)
    return snapped(left, torch.zeros_like(box), box)


def _pour(amount: Tensor, room: Tensor, near: Tensor) -> Tensor:
    """Fill rooms (B, n) in the order of nearness until the amount (B,) is spent."""
    order = near.masked_fill(room <= 0, -torch.inf).argsort(1, descending=True)
    sorted_room = room.gather(1, order)
    before = sorted_room.cumsum(1) - sorted_room
    given = (amount[:, None] - before).clamp_min(0).minimum(sorted_room)
    return torch.zeros_like(room).scatter(1, order, given)
