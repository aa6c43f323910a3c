"""Exact machines of problems with smaller boxes: what is left when rows go."""

from collections.abc import Callable

import torch
from torch import Tensor

from torchloo.svm.records import Exact, SVMProblem
from torchloo.svm.solve.exact import solve_exactly
from torchloo.svm.stacked import at_once, block_of
from torchloo.svm.tolerances import NOTHING

__all__ = ["left_of", "solve_smaller"]

_TOGETHER = 2**22  # entries of the kernel matrices that are solved at once


def left_of(box: Tensor, gone: Tensor) -> Tensor:
    """What is left of boxes when `gone` of them goes, 0 where only rounding is left."""
    left = (box - gone).clamp_min(0)
    return torch.where(left < NOTHING * box, 0.0, left)


def solve_smaller(
    problem: SVMProblem,
    table: Tensor,
    boxes: Tensor,
    near: Tensor,
    violation: Tensor | None = None,
    solve: Callable[[SVMProblem, Tensor, Tensor], Exact] | None = None,
) -> Tensor:
    """Coefficients (B, m) of machines for smaller boxes (B, m), each on the variables that are left.

    Args:
        problem: T stacked problems.
        table: which of them each machine is of, (B,).
        boxes: upper bounds; each leaves something of both classes.
        near: other coefficients, kept where no exact ones are found, (B, m).
        violation: of the optimality conditions by these, (B,): nothing worse takes their place.
        solve: solves problems on the variables (R, v) that are left of the machines (R,); default anew.
    """
    alpha, size = near.clone(), (boxes > 0).sum(1)
    most = max(1, at_once(boxes, _TOGETHER) // boxes.shape[1] ** 2)
    parts = [part for s in size.unique() for part in (size == s).nonzero()[:, 0].split(most)]
    while parts:
        rows = parts.pop()
        V = (boxes[rows] > 0).nonzero()[:, 1].view(len(rows), -1)
        smaller = _restricted(problem, table[rows], boxes[rows], V)
        try:
            found = solve_exactly(smaller) if solve is None else solve(smaller, rows, V)
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            parts += rows.chunk(2) if len(rows) > 1 else ()
            continue
        inside = found.alpha.clamp_min(0).minimum(smaller.box)
        exact = torch.zeros_like(near[rows]).scatter_(1, V, inside)
        if violation is not None:
            exact = torch.where((found.slip <= violation[rows])[:, None], exact, near[rows])
        alpha[rows] = exact
    return alpha


def _restricted(problem: SVMProblem, table: Tensor, boxes: Tensor, V: Tensor) -> SVMProblem:
    """Problems (R,) of a table on the variables V (R, v) only, each a row, with boxes (R, m)."""
    K = block_of(problem.K, V, which=problem.kernels(table).table)
    y, rounding = (x.index_select(0, table).gather(1, V) for x in (problem.y, problem.rounding))
    box, variable = boxes.gather(1, V), torch.arange(V.shape[1], device=V.device).expand_as(V)
    return SVMProblem(K, y, box, box, variable, problem.scale[table], rounding)
