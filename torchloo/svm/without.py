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
_TOGETHER = 2**22  # entries of the kernel matrices that are solved at once
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


def solve_without(problem: Problem, full: Exact, table: Tensor, boxes: Tensor, near: Tensor) -> Without:
    """Machines for smaller boxes (B, m), exactly; `table` (B,) says of which of the problems, ascending.

    Every problem has both classes left. All are seeded from the full machines (`near` (B, m) tells
    which variables take what goes first), solved nearly by one batched SMO, and then exactly.
    """
    if not len(boxes):
        nothing = torch.zeros(0, dtype=torch.long, device=boxes.device)
        return Without(boxes, nothing, nothing, nothing)
    y, before = problem.y[table], full.alpha.clamp_min(0)[table]
    start = seed_without(before, y, boxes, near)
    end = smo(problem.K, y, boxes, start, _CLOSE, table=table, most_rounds=_ROUNDS, patience=_PATIENCE)
    alpha = end.alpha.clone()
    # Where homotopies have failed the full machine they would fail these too, and take their time.
    may_follow, close = full.optimal[table], end.violation <= _CLOSE
    size = (boxes > 0).sum(1)
    going = (end.violation > _EXACT).nonzero()[:, 0]
    kinds = torch.stack([size, may_follow, close], 1)[going]
    for kind in kinds.unique(dim=0):
        rows = going[(kinds == kind).all(1)]
        attempts = ATTEMPTS if bool(kind[1]) else 1
        for part in rows.split(max(1, _TOGETHER // boxes.shape[1] ** 2)):
            alpha[part] = _exactly(problem, end, table, part, attempts)
    return Without(alpha, end.steps, end.columns + (start != before).sum(1), end.newton)


def _exactly(problem: Problem, end: SMOState, table: Tensor, rows: Tensor, attempts: int) -> Tensor:
    """The exact solutions (R, m) near those of the SMO at `rows`; those if rounding leaves no better.

    They have as many variables and are close, or none is.
    """
    box, violation, near = end.box[rows], end.violation[rows], end.alpha[rows]
    V = (box > 0).nonzero()[:, 1].view(len(rows), -1)
    its = table[rows]
    K = problem.K[its[:, None, None], V[:, :, None], V[:, None, :]]
    some = problem.take(its)
    smaller = some._replace(K=K, y=some.y.gather(1, V), box=box.gather(1, V))
    inside, limit = near.gather(1, V), smaller.box
    try:
        if bool(violation[0] <= _CLOSE):
            free, upper = (inside > 0) & (inside < limit), inside >= limit
            solution = solve_from(smaller, Sets(inside, end.bias[rows], free, upper), attempts)
        else:
            solution = solve_exactly(smaller)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        if len(rows) == 1:
            return near
        return torch.cat([_exactly(problem, end, table, half, attempts) for half in rows.chunk(2)])
    exact = torch.zeros_like(near).scatter_(1, V, solution.alpha.clamp_min(0).minimum(limit))
    return torch.where((solution.slip <= violation)[:, None], exact, near)
