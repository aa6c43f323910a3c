"""Selectors with an order of the rows that is known beforehand."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from torchloo.basis.pivots import Basis, Factor, Proposal
from torchloo.basis.selector import BLOCK, Propose, Seeded, Selector
from torchloo.guards import Guard, values_visible
from torchloo.kernels import Kernel
from torchloo.smoothers import solve_dual

__all__ = ["all", "pruned", "random"]


class _InOrder(Selector):
    """Rows in a given order, without those that depend on earlier ones; Note [least pivot]."""

    def _order(self, factor: Factor, y: Tensor | None, weight: Tensor | None) -> Tensor:
        """All rows, (..., n)."""
        raise NotImplementedError

    def _rule(self, factor: Factor, y: Tensor | None, weight: Tensor | None) -> Propose:
        order = self._order(factor, y, weight).expand_as(factor.rest)
        blocks = iter(order.split(BLOCK, dim=-1))

        def propose() -> Proposal | None:
            rows = next(blocks, None)
            return None if rows is None else (rows, None)

        return propose


@dataclass(frozen=True)
class pruned(_InOrder):  # noqa: N801
    """What is left when the rows of smallest coefficients are dropped from an LS-SVM, again and again.

    Starts with an LS-SVM of all rows and retrains it on those left after each round. Rows are ranked by how
    long they stay (in one round, by the size of their coefficients), and the basis is the top of the ranking.
    It needs y, with several outputs the norm of the coefficients of a row counts.

    Args:
        reg: regularisation of the LS-SVM, a positive number or tensor of batch shape.
        drop: part of the rows dropped in each round.

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
        K, n = factor.gram.matrix(), factor.rest.shape[-1]
        Y = self._targets(y, n, factor.gram.ndim)
        if weight is not None and (weight.ndim < 1 or weight.shape[-1] != n):
            raise ValueError(f"pruned: weight must have {n} entries, got shape {tuple(weight.shape)}")
        left = torch.arange(n, device=K.device).expand_as(factor.rest)
        dropped: list[Tensor] = []
        while left.shape[-1] > 1:
            size = self._coefficients(K, Y, weight, left).square().sum(-1)  # (..., r)
            left = left.take_along_dim(size.argsort(dim=-1, descending=True, stable=True), -1)
            stay = left.shape[-1] - max(1, int(self.drop * left.shape[-1]))
            dropped.append(left[..., stay:])
            left = left[..., :stay]
        return torch.cat([left, *reversed(dropped)], -1)

    @staticmethod
    def _targets(y: Tensor | None, n: int, ndim: int) -> Tensor:
        if y is None:
            raise ValueError("pruned: y must be given, as coefficients depend on the targets; got None")
        Y = y.unsqueeze(-1) if y.ndim == ndim - 1 else y
        if Y.ndim != ndim or Y.shape[-2] != n:
            raise ValueError(f"pruned: y must have {n} rows to match X, got shape {tuple(y.shape)}")
        return Y

    def _coefficients(self, K: Tensor, Y: Tensor, weight: Tensor | None, rows: Tensor) -> Tensor:
        K = K.take_along_dim(rows.unsqueeze(-1), -2).take_along_dim(rows.unsqueeze(-2), -1)
        Y = Y.expand(*rows.shape[:-1], *Y.shape[-2:]).take_along_dim(rows.unsqueeze(-1), -2)
        if weight is not None:
            weight = weight.expand(*rows.shape[:-1], -1).take_along_dim(rows, -1)
        return solve_dual(Guard("pruned"), K, Y, self.reg, weight, bias=True).checked().columns


@dataclass(frozen=True)
class random(Seeded, _InOrder):  # noqa: N801
    """Rows drawn alike, without those that depend on others already drawn. Time n m^2, memory n m."""

    def _order(self, factor: Factor, y: Tensor | None, weight: Tensor | None) -> Tensor:
        return self._draw()(factor.rest.shape[-1]).argsort().to(factor.rest.device)


@dataclass(frozen=True)
class all(_InOrder):  # noqa: N801
    """Every row in its order, also those that depend on others. Time n^3, memory n^2.

    The errors are those of the rows that do not depend on earlier ones to about half the digits of a number,
    Note [least pivot]: bounds from above, as the others may still help.
    """

    m: None = field(default=None, init=False)

    def __call__(
        self, kernel: Kernel, X: Tensor, y: Tensor | None = None, weight: Tensor | None = None
    ) -> Basis:
        """All rows of X (..., n, d), or the first ones until the error is small enough."""
        chosen = super().__call__(kernel, X, y, weight)
        if not values_visible(chosen.indices):
            return chosen
        enough, n = chosen.errors[..., -1] <= self.tolerance, X.shape[-kernel.event_dim - 1]
        size = torch.where(enough & (self.tolerance > 0), chosen.indices[..., -1] + 1, n)
        last = size.unsqueeze(-1) - 1
        place = torch.arange(int(size.max()), device=size.device).minimum(last)  # (..., k)
        before = torch.searchsorted(chosen.indices, place, right=True) - 1  # the last one that counts
        errors = chosen.errors.take_along_dim(before.clamp(min=0), -1)
        empty = kernel.diagonal(X).gt(0).to(errors).mean(-1, keepdim=True)  # the error without any vector
        errors = torch.where(before < 0, empty, errors).detach()
        return Basis(place, errors, size, "tolerance" if chosen.stopped == "tolerance" else "size")

    def _order(self, factor: Factor, y: Tensor | None, weight: Tensor | None) -> Tensor:
        return torch.arange(factor.rest.shape[-1], device=factor.rest.device)
