"""From the final active sets of perturbed paths to the coefficients of the true data."""

from copy import copy
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag, pad

from torchloo.svm.exact import Exact
from torchloo.svm.merge import Problem
from torchloo.svm.state import Ends
from torchloo.svm.tableau import Tableau

__all__ = ["Finish", "Solution", "final_solution"]

_ROUGH = 1e-10  # of the largest |u|: free variables that miss margin 0 by more are refined


class Finish:
    """Where the B paths of one machine ended; all over the w = l + 2 columns of its tableau."""

    def __init__(self, problem: Problem, full: Exact, tableau: Tableau, ends: Ends, gone: Tensor) -> None:
        """`gone` (B,) is how far alpha of each target went down."""
        self.problem, self.full, self.tableau = problem, full, tableau
        self.P, self.H, self.target, self.gone = ends.P, ends.H, ends.target[:, None], gone[:, None]
        self.row = ends.row[:, None] % tableau.A.shape[1]
        self.failed = ends.failed
        self.columns = tableau.order[0, : tableau.sign.shape[1] - 2]
        self.sign = tableau.sign[0]
        self.upper = ends.upper
        self.changed = torch.zeros_like(self.upper).scatter_(1, self.P, True)

    def take(self, rows: Tensor) -> "Finish":
        """The paths at `rows`."""
        few = copy(self)
        for name in ("P", "H", "target", "gone", "row", "failed", "upper", "changed"):
            setattr(few, name, getattr(self, name)[rows])
        return few

    def coefficients(self) -> Tensor:
        """alpha of each final active set on the unperturbed data, (B, w); of r only if it has a column.

        The inputs that differ from the full solution are those of P, unknown, and the coefficients of r
        and of variables that went from bound to bound, known.
        """
        sign, P, A = self.sign, self.P, self.tableau.A[0]
        alpha0 = self._of_columns(self.full.alpha)
        g0 = self._of_columns(torch.where(self.full.free, 0.0, self.full.margin))
        bound = torch.where(self.upper, self._of_columns(self.problem.box), 0.0)
        bound.scatter_(1, self.target, alpha0[self.target] - self.gone)
        known = (bound - alpha0).masked_fill_(self.changed | (sign < 0), 0).scatter_(1, self.target, 0.0)
        row, weight = self.row, -self.gone.masked_fill(sign[self.target] < 0, 0)
        most = int(known.count_nonzero(1).max())
        if most:
            others = known.abs().topk(most, 1).indices
            row, weight = torch.cat([row, others], 1), torch.cat([weight, known.gather(1, others)], 1)
        change = sign * embedding_bag(row, A, per_sample_weights=weight, mode="sum")
        wanted = torch.where(sign < 0, bound - alpha0, -g0).gather(1, P)
        change, c = self._respond(change, wanted)
        alpha = torch.where(sign < 0, alpha0 + change, bound)
        return alpha.scatter_(1, P, torch.where(sign[P] < 0, bound.gather(1, P), alpha0[P] + c))

    def correction(self, residual: Tensor, imbalance: Tensor) -> Tensor:
        """Change of the free alpha that gives margins `residual` (B, w) back and makes y^T alpha 0."""
        sign, P = self.sign, self.P
        S = (sign < 0).nonzero()[:, 0]
        known = residual.masked_fill(self.changed, 0)[:, S]
        change = sign * (known @ self.tableau.A[0][S]) - imbalance[:, None] * self.tableau.equality[0]
        wanted = torch.where(sign < 0, 0.0, residual).gather(1, P)
        change, c = self._respond(change, wanted)
        return change.scatter(1, P, c)

    def free(self) -> Tensor:
        """Mask of the free variables, (B, w); r is not among them."""
        free = self.changed ^ (self.sign < 0)
        free[:, -2:] = False
        return free.scatter_(1, self.target, False)

    def inside(self, near: Tensor) -> Tensor:
        """Which coefficients (B, w) lie between their bounds, but for that of r, (B, l)."""
        box = self._of_columns(self.problem.box)
        width = 1e-7 * box
        return ((near > width) & (near < box - width)).scatter_(1, self.target, False)[:, :-2]

    def whole(self, near: Tensor, target: Tensor) -> Tensor:
        """Coefficients (B, m) of all variables from those with a column (B, w) and those of r."""
        alpha = self.full.alpha.repeat(len(target), 1)
        alpha.index_copy_(1, self.columns, near[:, :-2])
        return alpha.scatter_(1, target[:, None], self.full.alpha[target][:, None] - self.gone)

    def _of_columns(self, x: Tensor) -> Tensor:
        """Values of the variables (m,) as those of the columns (w,)."""
        return pad(x[self.columns], (0, 2))

    def _respond(self, change: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs c (B, k) of P that bring its outputs from `change` to `wanted`, and all outputs then."""
        A, sign, P = self.tableau.A[0], self.sign, self.P
        padded = len(self.columns) <= P
        rhs = (sign[P] * (wanted - change.gather(1, P))).masked_fill(padded, 0)[:, :, None]
        c = (self.H @ rhs)[:, :, 0]
        after = embedding_bag(P, A, per_sample_weights=c, mode="sum", padding_idx=len(self.columns))
        return torch.addcmul(change, sign, after), c


class Solution(NamedTuple):
    """Machines at the ends of B paths."""

    alpha: Tensor
    """Coefficients, (B, m)."""

    u: Tensor
    """K (alpha * y), (B, m)."""

    miss: Tensor
    """y - u of the variables with a column, (B, l)."""

    inside: Tensor
    """Which of them, but for r, lie between their bounds, (B, l) bool."""


def final_solution(finish: Finish, target: Tensor) -> Solution:
    """The machines, refined where K itself says it is needed.

    The tableau of a nearly singular free set has lost digits. Residuals are taken from K: margins of
    free variables that are not 0, and y^T alpha; the tableau then only has to correct them.
    """
    K, y, columns = finish.problem.K, finish.problem.y, finish.columns
    near = finish.coefficients()
    u = _pull(finish, target, near)
    free = finish.free()[:, :-2].to(u)
    count = free.sum(1).clamp_min(1)
    y_near, u_near = y[columns], u.index_select(1, columns)
    for _ in range(2):
        miss = (y_near - u_near).mul_(free)
        bias = miss.sum(1) / count
        residual = miss.sub_(bias[:, None] * free).mul_(y_near)
        size, scale = residual.abs().amax(1), u_near.abs().amax(1)
        rows = ((size > _ROUGH * (1 + scale)) & ~finish.failed).nonzero()[:, 0]
        if not len(rows):
            break
        few = finish.take(rows)
        imbalance = few.whole(near[rows], target[rows]) @ y
        step = few.correction(pad(residual[rows], (0, 2)), imbalance)
        near[rows] += pad(step[:, :-2] * free[rows], (0, 2))
        u[rows] = (few.whole(near[rows], target[rows]) * y) @ K
        u_near[rows] = u[rows][:, columns]
    return Solution(finish.whole(near, target), u, y_near - u_near, finish.inside(near))


def _pull(finish: Finish, target: Tensor, near: Tensor) -> Tensor:
    """u = K (alpha * y), (B, m): what the full solution has, and the changes of few columns and of r."""
    K, y, columns, full = finish.problem.K, finish.problem.y, finish.columns, finish.full.alpha
    change = (
        near.scatter(1, finish.target, full[target][:, None])[:, :-2].sub_(full[columns]).mul_(y[columns])
    )
    moved = change.count_nonzero(0).nonzero()[:, 0]
    u = torch.addmm(K @ (full * y), change[:, moved], K[columns[moved]])
    return u.addcmul_(K[target], y[target][:, None] * finish.gone, value=-1)
