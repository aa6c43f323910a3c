"""Selectors that take the rows in an order fixed beforehand."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from torchloo.basis.pivots import Basis, Factor, Proposal, submatrix
from torchloo.basis.selector import BLOCK, Propose, Seeded, Selector
from torchloo.guards import Guard, values_visible
from torchloo.kernels import Kernel
from torchloo.smoothers import solve_dual

__all__ = ["all", "pruned", "random"]


class _InOrder(Selector):
    """Rows in a given order, without those that depend linearly on earlier ones; Note [least pivot]."""

    def _order(self, factor: Factor, y: Tensor | None, weight: Tensor | None) -> Tensor:
        """All rows, (..., n)."""
        raise NotImplementedError

    def _rule(self, factor: Factor, y: Tensor | None, weight: Tensor | None) -> Propose:
        order = self._order(factor, y, weight).expand_as(factor.residual)
        blocks = iter(order.split(BLOCK, dim=-1))

        def propose() -> Proposal | None:
            rows = next(blocks, None)
            return None if rows is None else (rows, None)

        return propose


@dataclass(frozen=True)
class pruned(_InOrder):  # noqa: N801
    """Rows that remain when those with the smallest coefficients of an LS-SVM are dropped repeatedly.

    Starts with an LS-SVM of all rows and retrains it on the remaining ones after each round. Rows are ranked
    by how long they remain (within a round, by the size of their coefficients), and the basis is the top of
    the ranking. It needs y; for several outputs, the size is the norm of the coefficients of a row.

    Args:
        reg: regularisation of the LS-SVM, a positive number or tensor of batch shape.
        drop: fraction of the rows dropped in each round.

    Time: 7 trainings on all rows for drop = 0.05, n^3/3 each. Memory n^2.

    Reference: Suykens, De Brabanter, Lukas and Vandewalle (2002), "Weighted least squares support vector
    machines", 4; Cawley and Talbot (2004), 2.4.
    """

    reg: Tensor | float = field(default=1.0, kw_only=True)
    drop: float = field(default=0.05, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.drop, float) or not 0 < self.drop < 1:
            raise ValueError(f"pruned: drop must be between 0 and 1, got {self.drop}")

    def _order(self, factor: Factor, y: Tensor | None, weight: Tensor | None) -> Tensor:
        K = factor.gram.matrix()
        n = factor.residual.shape[-1]
        Y = self._targets(y, n, factor.gram.ndim)
        if weight is not None and (weight.ndim < 1 or weight.shape[-1] != n):
            raise ValueError(f"pruned: weight must have {n} entries, got shape {tuple(weight.shape)}")
        remaining = torch.arange(n, device=K.device).expand_as(factor.residual)
        dropped: list[Tensor] = []
        while remaining.shape[-1] > 1:
            coefficients = self._coefficients(K, Y, weight, remaining)
            size = coefficients.square().sum(-1)  # (..., r)
            largest_first = size.argsort(dim=-1, descending=True, stable=True)
            remaining = remaining.take_along_dim(largest_first, -1)
            count = remaining.shape[-1]
            kept = count - max(1, int(self.drop * count))
            dropped.append(remaining[..., kept:])
            remaining = remaining[..., :kept]
        return torch.cat([remaining, *reversed(dropped)], -1)

    @staticmethod
    def _targets(y: Tensor | None, n: int, ndim: int) -> Tensor:
        if y is None:
            raise ValueError("pruned: y must be given, as coefficients depend on the targets; got None")
        Y = y.unsqueeze(-1) if y.ndim == ndim - 1 else y
        if Y.ndim != ndim or Y.shape[-2] != n:
            raise ValueError(f"pruned: y must have {n} rows to match X, got shape {tuple(y.shape)}")
        return Y

    def _coefficients(self, K: Tensor, Y: Tensor, weight: Tensor | None, rows: Tensor) -> Tensor:
        batch = rows.shape[:-1]
        K = submatrix(K, rows)
        Y = Y.expand(*batch, *Y.shape[-2:])
        Y = Y.take_along_dim(rows.unsqueeze(-1), -2)
        if weight is not None:
            weight = weight.expand(*batch, -1).take_along_dim(rows, -1)
        fit = solve_dual(Guard("pruned"), K, Y, self.reg, weight, bias=True)
        return fit.checked().columns


@dataclass(frozen=True)
class random(Seeded, _InOrder):  # noqa: N801
    """Rows drawn uniformly, without those that depend on rows drawn before. Time n m^2, memory n m."""

    def _order(self, factor: Factor, y: Tensor | None, weight: Tensor | None) -> Tensor:
        draw = self._draw()
        n = factor.residual.shape[-1]
        return draw(n).argsort().to(factor.residual.device)


@dataclass(frozen=True)
class all(_InOrder):  # noqa: N801
    """Every row in the given order, including rows that depend on others. Time n^3, memory n^2.

    The errors are those of the rows that are independent of earlier ones to about half of the digits, Note
    [least pivot]: upper bounds, as the other rows may lower them a little.
    """

    m: None = field(default=None, init=False)

    def __call__(
        self, kernel: Kernel, X: Tensor, y: Tensor | None = None, weight: Tensor | None = None
    ) -> Basis:
        """All rows of X (..., n, d), or the first ones until the error is small enough."""
        chosen = super().__call__(kernel, X, y, weight)
        if not values_visible(chosen.indices):
            return chosen
        n = X.shape[-kernel.event_dim - 1]
        accurate = (chosen.errors[..., -1] <= self.tolerance) & (self.tolerance > 0)
        size = torch.where(accurate, chosen.indices[..., -1] + 1, n)
        last = size.unsqueeze(-1) - 1
        indices = torch.arange(int(size.max()), device=size.device).minimum(last)  # (..., k)
        # The last independent row up to each index; -1 if there is none yet.
        independent = torch.searchsorted(chosen.indices, indices, right=True) - 1
        errors = chosen.errors.take_along_dim(independent.clamp(min=0), -1)
        nonzero = kernel.diagonal(X) > 0
        error_of_empty_basis = nonzero.to(errors).mean(-1, keepdim=True)
        errors = torch.where(independent < 0, error_of_empty_basis, errors).detach()
        stopped = "tolerance" if chosen.stopped == "tolerance" else "size"
        return Basis(indices, errors, size, stopped)

    def _order(self, factor: Factor, y: Tensor | None, weight: Tensor | None) -> Tensor:
        return torch.arange(factor.residual.shape[-1], device=factor.residual.device)
