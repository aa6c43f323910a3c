"""The exact machine without some rows, by an SMO that starts from the full machine."""

from typing import NamedTuple

import torch
from torch import Tensor

from torchloo.svm.smo.rounds import SMOState, seed_without, smo
from torchloo.svm.solve.exact import ATTEMPTS, Exact, Sets, solve_exactly, solve_from
from torchloo.svm.solve.merge import Problem

__all__ = ["Without", "left_of", "solve_without"]

_EXACT = 1e-12  # violation of an SMO that counts as none: rounding
_CLOSE = 1e-6  # violation at which its sets are nearly always the optimal ones
_ROUNDS = 200  # of the SMO; what needs more is left to the interior point
_PATIENCE = 4  # rounds that may fail to halve the violation; then too
_NOTHING = 1e-9  # of a box: rounding, once its rows are gone


def left_of(box: Tensor, gone: Tensor) -> Tensor:
    """What is left of boxes when `gone` of them goes, 0 where only rounding is left."""
    left = (box - gone).clamp_min(0)
    return torch.where(left < _NOTHING * box, 0.0, left)


class Without(NamedTuple):
    """B machines without some rows."""

    alpha: Tensor
    """Coefficients, (B, m)."""

    iterations: Tensor
    """Pairs that the SMO has changed, (B,)."""

    columns: Tensor
    """Kernel columns that it has read, those of its seeds among them, (B,)."""

    newton: Tensor
    """Newton steps that it has taken, (B,)."""


def solve_without(problem: Problem, full: Exact, boxes: Tensor, near: Tensor) -> Without:
    """Machines for smaller boxes (B, m), exactly.

    Every problem has both classes left. All are seeded from the full machine (`near` (B, m) tells
    which variables take what goes first), solved nearly by one batched SMO, and then exactly.
    """
    if not len(boxes):
        nothing = torch.zeros(0, dtype=torch.long, device=boxes.device)
        return Without(boxes, nothing, nothing, nothing)
    y = problem.y.expand_as(boxes)
    before = full.alpha.clamp_min(0)
    start = seed_without(before.expand_as(boxes), y, boxes, near)
    end = smo(problem.K[None], y.contiguous(), boxes, start, _CLOSE, most_rounds=_ROUNDS, patience=_PATIENCE)
    # Where homotopies have failed the full machine they would fail these too, and take their time.
    attempts = ATTEMPTS if full.optimal else 1
    alpha = torch.stack([_exactly(problem, end, b, attempts) for b in range(len(boxes))])
    return Without(alpha, end.steps, end.columns + (start != before).sum(1), end.newton)


def _exactly(problem: Problem, end: SMOState, b: int, attempts: int) -> Tensor:
    """The exact solution (m,) near that of problem b of the SMO; that one if rounding leaves no better."""
    box, violation = end.box[b], float(end.violation[b])
    if violation <= _EXACT:
        return end.alpha[b]
    some = box > 0
    K, y = problem.K[some][:, some][None], problem.y[some][None]
    smaller = Problem(*(x[None] for x in problem))._replace(K=K, y=y, box=box[some][None])
    near, limit = end.alpha[b][some], box[some]
    try:
        if violation <= _CLOSE:
            free, upper = (near > 0) & (near < limit), near >= limit
            sets = Sets(near[None], end.bias[b][None], free[None], upper[None])
            solution = solve_from(smaller, sets, attempts)
        else:
            solution = solve_exactly(smaller)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        return end.alpha[b]
    if not solution.slip <= violation:
        return end.alpha[b]
    return torch.zeros_like(box).masked_scatter(some, solution.alpha[0].clamp_min(0).minimum(limit))
