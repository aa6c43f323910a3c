"""Exact machines without whole clusters, by an SMO that starts from the full machine."""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from torchloo.svm.smo.rounds import seed_without, smo
from torchloo.svm.solve.exact import ATTEMPTS, Exact, Sets, solve_from
from torchloo.svm.solve.merge import Problem
from torchloo.svm.solve.smaller import solve_smaller
from torchloo.svm.tolerances import CLOSE, between_bounds

__all__ = ["Without", "solve_without"]

_EXACT = 1e-12  # violation of an SMO that counts as none: rounding
_ROUNDS = 200  # of the SMO; what needs more is left to the interior point
_PATIENCE = 4  # rounds that may fail to halve the violation; then too


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
    """The machines of one problem for smaller boxes (B, m), exactly; each has both classes left.

    All are seeded from the full machine (`near` (B, m) tells which variables take what goes first), solved
    nearly by one batched SMO, and then exactly from its sets, or anew where it has not come close. For 50
    clusters of diabetis, RBF, C = 1 this takes a tenth of the time of solving each anew.
    """
    y, before = (x.expand_as(boxes) for x in (problem.y, full.alpha.clamp_min(0)))
    table = torch.zeros(len(boxes), dtype=torch.long, device=boxes.device)
    start = seed_without(before, y, boxes, near)
    end = smo(problem.K, y, boxes, start, CLOSE, table=table, most_rounds=_ROUNDS, patience=_PATIENCE)
    # Where homotopies have failed the full machine they would fail these too, and take their time.
    attempts = ATTEMPTS if bool(full.optimal) else 1

    def from_sets(rows: Tensor, smaller: Problem, part: Tensor, V: Tensor) -> Exact:
        alpha, box = end.alpha[rows[part]].gather(1, V), smaller.box
        sets = Sets(alpha, end.bias[rows[part]], between_bounds(alpha, box), alpha >= box)
        return solve_from(smaller, sets, attempts)

    alpha, close = end.alpha, end.violation <= CLOSE
    for which, solve in ((close & (end.violation > _EXACT), from_sets), (~close, None)):
        rows = which.nonzero()[:, 0]
        if len(rows):
            known = alpha[rows], end.violation[rows]
            exact = solve_smaller(problem, table[rows], boxes[rows], *known, solve and partial(solve, rows))
            alpha = alpha.index_copy(0, rows, exact)
    return Without(alpha, end.steps, end.columns + (start != before).sum(1), end.newton)
