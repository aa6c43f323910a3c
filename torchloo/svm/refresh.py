"""From the final active sets of perturbed paths to the coefficients of the true data."""

from copy import copy

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag, pad

from torchloo.svm.exact import Exact
from torchloo.svm.layout import Layout
from torchloo.svm.merge import Problem
from torchloo.svm.state import Ends, times
from torchloo.svm.tableau import Tableau

__all__ = ["Finish"]

_ROUGH = 1e-10  # of the largest |u|: free variables that miss margin 0 by more are refined


class Finish:
    """Where the B paths of one machine ended, over the a variables that any of them has moved."""

    def __init__(
        self, problem: Problem, full: Exact, tableau: Tableau, ends: Ends, target: Tensor, gone: Tensor
    ) -> None:
        """`gone` (B,) is how far alpha of each target went down."""
        self.tableau, self.target, self.gone, self.failed = tableau, target, gone, ends.failed
        self.P, self.H, self.row = ends.P, ends.H, ends.row[:, None] % tableau.A.shape[1]
        sign = tableau.sign[0]
        self.pad, self.free_before = len(sign) - 2, int((sign < 0).sum())
        self.of_free = tableau.A[0][:, : self.free_before].contiguous()
        upper_before = pad(full.upper[tableau.order[0, : self.pad]], (0, 2))
        changed = torch.zeros_like(ends.upper).scatter_(1, ends.P, True)
        # From bound to bound; r is nobody's business here.
        jumped = (ends.upper ^ upper_before).logical_and_(~changed).scatter_(1, ends.target[:, None], False)
        moved = (changed | jumped).any(0)
        moved[: self.free_before] = True
        moved[self.pad :] = False
        columns = moved.nonzero()[:, 0]
        self.columns = pad(columns, (0, 1), value=self.pad)  # (a + 1,)
        self.layout = Layout(problem, full, tableau.order[0][columns])
        place = torch.full_like(upper_before, len(columns), dtype=torch.long)
        place[columns] = torch.arange(len(columns), device=columns.device)
        self.place = place[ends.P]  # (B, k)
        self.changed, self.jumped, self.upper = (
            x.index_select(1, self.columns) for x in (changed, jumped, ends.upper)
        )
        self.own = self.layout.place[target][:, None]
        self.alpha = self._coefficients()
        self._refine()
        self.stray = self._put_inside()

    def free(self) -> Tensor:
        """Mask of the free variables, (B, a + 1); r is not among them."""
        free = self.changed.clone()
        free[:, : self.free_before] ^= True
        free[:, -1] = False
        return free.scatter_(1, self.own, False)

    def inside(self) -> Tensor:
        """Which coefficients lie between their bounds, but for that of r, (B, a + 1)."""
        width = 1e-7 * self.layout.box
        inside = (self.alpha > width) & (self.alpha < self.layout.box - width)
        return inside.scatter_(1, self.own, False)

    def _take(self, rows: Tensor) -> "Finish":
        """The paths at `rows`."""
        few = copy(self)
        for name in ("P", "H", "row", "place", "target", "gone", "changed", "own", "alpha"):
            setattr(few, name, getattr(self, name)[rows])
        return few

    def _coefficients(self) -> Tensor:
        """alpha of each final active set on the unperturbed data, (B, a + 1).

        The inputs that differ from the full solution are those of P, unknown, and the coefficients of r
        and of variables that went from bound to bound, known.
        """
        A, sign, alpha0 = self.tableau.A[0], self.tableau.sign[0][self.P], self.layout.alpha
        bound = torch.where(self.upper, self.layout.box, 0.0)
        bound.scatter_(1, self.own, alpha0[self.own] - self.gone[:, None])
        row = self.row
        own_column = self.columns[self.own]
        weight = -self.gone[:, None].masked_fill(self.tableau.sign[0][own_column] < 0, 0)
        most = int(self.jumped.sum(1).max())
        if most:
            known = (bound - alpha0).mul_(self.jumped)
            others = known.abs().topk(most, 1).indices
            row = torch.cat([row, self.columns[others]], 1)
            weight = torch.cat([weight, known.gather(1, others)], 1)
        change = embedding_bag(row, self.of_free, per_sample_weights=weight, mode="sum")
        at_P = (weight[:, None] @ A[row[:, :, None], self.P[:, None]])[:, 0]
        margin = self.layout.full.margin.masked_fill(self.layout.full.free, 0)
        bound_P, alpha_P = bound.gather(1, self.place), alpha0[self.place]
        wanted = torch.where(sign < 0, bound_P - alpha_P, -self.layout.of_moved(margin)[self.place])
        c, change = self._respond(at_P, sign * wanted, change)
        bound[:, : self.free_before] = alpha0[: self.free_before] - change
        return self._entered(bound, torch.where(sign < 0, bound_P, alpha_P + c))

    def _respond(self, at_P: Tensor, wanted: Tensor, change: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs c (B, k) of P that bring A c there from `at_P` to `wanted`; A c of what was free, too."""
        rhs = (wanted - at_P).masked_fill_(self.pad <= self.P, 0)
        c = times(self.H, rhs)
        after = embedding_bag(self.P, self.of_free, per_sample_weights=c, mode="sum", padding_idx=self.pad)
        return c, change + after

    def _entered(self, x: Tensor, of_P: Tensor) -> Tensor:
        """With other values of P; those of the dummy stay 0."""
        x.scatter_(1, self.place, of_P)[:, -1] = 0
        return x

    def _refine(self) -> None:
        """Refine where K itself says it is needed.

        The tableau of a nearly singular free set has lost digits. Residuals are taken from K: margins of
        free variables that are not 0, and y^T alpha; the tableau then only has to correct them.
        """
        layout, free = self.layout, self.free()
        self.u = layout.pull(self.alpha, self.target, self.gone)
        weight = free.to(self.u)
        count = weight.sum(1).clamp_min(1)
        for _ in range(2):
            miss = (layout.y - self.u).mul_(weight)
            bias = miss.sum(1) / count
            residual = miss.addcmul_(bias[:, None], weight, value=-1).mul_(layout.y)
            size, scale = residual.abs().amax(1), self.u.abs().amax(1)
            rows = ((size > _ROUGH * (1 + scale)) & ~self.failed).nonzero()[:, 0]
            if not len(rows):
                return
            few = self._take(rows)
            step = few._correction(residual[rows]) * weight[rows]
            self.alpha[rows] += step
            self.u[rows] = layout.pull(self.alpha[rows], few.target, few.gone)

    def _put_inside(self) -> Tensor:
        """Put coefficients beyond their bounds there, and say by how much in all, (B,).

        The true data may ask for more than a box holds where the perturbed path has missed an event; a
        gap proves something of feasible coefficients only.
        """
        inside = self.alpha.clamp_min(0).minimum(self.layout.box)
        stray = (self.alpha - inside).abs_().sum(1)
        rows = stray.nonzero()[:, 0]
        if len(rows):
            self.alpha[rows] = inside[rows]
            self.u[rows] = self.layout.pull(inside[rows], self.target[rows], self.gone[rows])
        return stray

    def _correction(self, residual: Tensor) -> Tensor:
        """Change of the free alpha that gives margins `residual` (B, a + 1) back and makes y^T alpha 0."""
        A, sign, S = self.tableau.A[0], self.tableau.sign[0][self.P], self.free_before
        y = self.layout.problem.y
        imbalance = (self.layout.whole(self.alpha, self.target, self.gone) @ y)[:, None]
        known = residual.masked_fill(self.changed, 0)[:, :S]
        change = known @ A[:S] - imbalance * (self.tableau.equality[0] * self.tableau.sign[0])
        wanted = torch.where(sign < 0, 0.0, residual.gather(1, self.place))
        c, after = self._respond(change.gather(1, self.P), wanted, change[:, :S])
        step = torch.zeros_like(residual)
        step[:, :S] = -after
        return self._entered(step, c)
