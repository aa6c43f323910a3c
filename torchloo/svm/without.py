"""The exact machine without some rows, by an SMO that starts from the full machine."""

import torch
from torch import Tensor

from torchloo.svm.exact import Exact, solve_exactly, solve_from
from torchloo.svm.merge import Problem
from torchloo.svm.smo import SMOState, seed_without, smo

__all__ = ["left_of", "solve_without"]

_CLOSE = 1e-6  # violation at which the sets of an SMO are nearly always the optimal ones
_ROUNDS = 200  # of the SMO; what needs more is left to the interior point
_NOTHING = 1e-9  # of a box: rounding, once its rows are gone


def left_of(box: Tensor, gone: Tensor) -> Tensor:
    """What is left of boxes when `gone` of them goes, 0 where only rounding is left."""
    left = (box - gone).clamp_min(0)
    return torch.where(left < _NOTHING * box, 0.0, left)


def solve_without(problem: Problem, full: Exact, boxes: Tensor, near: Tensor) -> tuple[Tensor, Tensor]:
    """Coefficients (B, m) for smaller boxes (B, m), exactly, and the kernel columns that it took (B,).

    Every problem has both classes left. All are seeded from the full machine (`near` (B, m) tells
    which variables take what goes first), solved nearly by one batched SMO, and then exactly.
    """
    if not len(boxes):
        return boxes, torch.zeros(0, dtype=torch.long, device=boxes.device)
    y = problem.y.expand_as(boxes)
    start = seed_without(full.alpha.clamp_min(0).expand_as(boxes), y, boxes, near)
    end = smo(problem.K[None], y.contiguous(), boxes, start, _CLOSE, most_rounds=_ROUNDS)
    return torch.stack([_exactly(problem, end, b) for b in range(len(boxes))]), end.columns


def _exactly(problem: Problem, end: SMOState, b: int) -> Tensor:
    """The exact solution (m,) near that of problem b of the SMO."""
    box = end.box[b]
    some = box > 0
    smaller = problem._replace(K=problem.K[some][:, some], y=problem.y[some], box=box[some])
    near, limit = end.alpha[b][some], box[some]
    solution = None
    if end.violation[b] <= _CLOSE:
        free, upper = (near > 0) & (near < limit), near >= limit
        solution = solve_from(smaller, near, end.bias[b], free, upper)
    if solution is None or not solution.optimal:
        (solution,) = solve_exactly([smaller])
    return torch.zeros_like(box).masked_scatter(some, solution.alpha.clamp_min(0).minimum(limit))
