"""Partial Cholesky factorisation of a kernel matrix by chosen rows, never the matrix itself.

Note [reconstruction error]
Over the vectors S, the best approximation of phi(x_i) has the squared length K_Si^T K_SS^{-1} K_Si, so what
is left of k_ii relative to it,

    error(S) = 1 - mean_i K_Si^T K_SS^{-1} K_Si / k_ii = 1 - J(S),

is the mean over i of r_i, the diagonal of what is left of the normalised kernel matrix
k_ij / sqrt(k_ii k_jj). Scaling the vectors does not change what they span: everything here works on the
normalised matrix, where all rows count alike whatever their length. A row with k_ii = 0 is reconstructed by
any basis: it has r_i = 0 and is never chosen. With L (k, n) the factor, L^T L = K_:S K_SS^{-1} K_S: and
r = 1 - the column sums of L^2; adding a vector adds a row to L.

Note [least pivot]
Let rounding be eps (in fact some multiple of it) and r the largest r_i. With v = K_SS^{-1} K_Si the
coefficients of row i, r_i is known to eps (1 + |v|^2), which is eps unless rows are extrapolated from others
that are close to one another. A vector of which p is left takes h^2 / p from every other: an error of
eps (1 + |v|^2) r / p. It is not taken where this exceeds p, which is for p < sqrt(eps r (1 + |v|^2)), nor
where p is less than the error that others have made. Rules that take large pivots have |v| of order one,
which is what is assumed of rows taken one at a time; rows taken in blocks may come in any order.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from torchloo import csr
from torchloo.guards import Guard, require_inputs, values_visible
from torchloo.kernels import Kernel, Precomputed

__all__ = ["Basis", "Factor", "NormalisedKernel", "Proposal"]

Proposal = tuple[Tensor, Tensor | None]
"""Rows (..., b) to add in turn, and what each must have left by then, (..., b); None: more than rounding."""

_ROUNDING = 32  # in units of the machine's precision: errors of a column, which is a sum of many products


class Basis(NamedTuple):
    """Rows chosen as basis vectors, in the order of choice.

    In a batch, a problem that stops before the others repeats its last row, which changes nothing: a
    sparse machine drops vectors that depend on others.
    """

    indices: Tensor
    """Integers (..., k); `X[indices]` is the basis, without batch dimensions."""

    errors: Tensor
    """Mean relative reconstruction error after each vector, (..., k); Note [reconstruction error]."""

    size: Tensor
    """How many vectors were chosen, (...)."""

    stopped: str
    """Why there are no more of them, in a batch for the largest: "size" (m reached), "tolerance" (the error
    is small enough) or "singular" (what is left of every row is rounding)."""


class NormalisedKernel:
    """k(x_i, x_j) / sqrt(k_ii k_jj) for rows of X, whatever part of it is asked for; no graph is kept.

    The features of the kernel are computed once.
    """

    def __init__(self, guard: Guard, kernel: Kernel, X: Tensor) -> None:
        if not isinstance(kernel, Kernel):
            raise TypeError(
                f"{guard.function}: kernel must be a torchloo kernel, got {type(kernel).__name__}"
            )
        require_inputs(guard.function, X=X)
        event = kernel.event_dim
        if X.ndim <= event or 0 in X.shape:
            raise ValueError(
                f"{guard.function}: X must be (..., n, d) with at least one row, got shape {tuple(X.shape)}"
            )
        self.kernel, self.given = kernel, isinstance(kernel, Precomputed)
        self.n, self.ndim = X.shape[-event - 1], X.ndim - event + 1  # of a matrix (..., n, p)
        if self.given and X.shape[-1] != X.shape[-2]:
            raise ValueError(
                f"{guard.function}: X must be a square kernel matrix, got shape {tuple(X.shape)}"
            )
        guard.finite(X=X)
        points = kernel.embed(X)
        diagonal = kernel.diagonal(points, embedded=True)  # (..., n)
        guard.require(diagonal >= 0, "kernel must be positive semi-definite, got a negative k(x, x)")
        guard.finite(kernel=diagonal)
        self.rest = (diagonal > 0).to(diagonal.dtype)  # the diagonal of the normalised matrix
        self.scale = torch.where(diagonal > 0, diagonal, 1).rsqrt() * self.rest
        batch = diagonal.shape[:-1]
        self._event = event if kernel.is_embedding_inside else 1
        if not csr.is_csr(points):
            points = points.expand(*batch, *points.shape[-self._event - 1 :])
        self.points = points

    def __call__(self, rows: Tensor | None, columns: Tensor) -> Tensor:
        """Entries (..., a, b) of the rows (..., a), or of all, and the columns (..., b)."""
        right = _take(self.scale, columns).unsqueeze(-2)
        left = (self.scale if rows is None else _take(self.scale, rows)).unsqueeze(-1)
        X = self.points if rows is None else csr.take(self.points, rows, self._event)
        if self.given:
            K = X.take_along_dim(columns.unsqueeze(-2), -1)
        else:
            K = self.kernel.between(X, csr.take(self.points, columns, self._event))
        return (K * left).mul_(right)

    def matrix(self) -> Tensor:
        """The kernel matrix itself, (..., n, n), as it is, not normalised."""
        return self.points if self.given else self.kernel.between(self.points)


def _take(values: Tensor, rows: Tensor) -> Tensor:
    return values.take_along_dim(rows, -1)


def _independent(H: Tensor, V: Tensor, demand: Tensor, floor: Tensor) -> Tensor:
    """Which of b vectors, in turn, have enough left after those before; Note [least pivot].

    Args:
        H: what is left of their matrix, (..., b, b).
        V: their coefficients over the vectors taken before the block, (..., k, b).
        demand: what each must have left, (..., b).
        floor: what each must have left for a unit of sqrt(1 + |v|^2), (..., b).
    """
    H, kept = H.clone(), torch.empty_like(demand, dtype=torch.bool)
    V = torch.cat([V, torch.zeros_like(H)], -2)  # (..., k + b, b)
    for i in range(demand.shape[-1]):
        pivot, v = H[..., i, i].clone(), V[..., :, i].clone()
        needed = torch.maximum(demand[..., i], floor[..., i] * (1 + v.square().sum(-1)).sqrt())
        kept[..., i] = pivot > needed
        h = H[..., :, i].clone()  # (..., b)
        share = h * torch.where(kept[..., i], pivot, torch.inf).reciprocal().unsqueeze(-1)
        H -= h.unsqueeze(-1) * share.unsqueeze(-2)
        V -= v.unsqueeze(-1) * share.unsqueeze(-2)
        V[..., i - demand.shape[-1], :] = share
    return kept


class Factor:
    """The factor L of Note [reconstruction error] while it grows.

    Memory: L, (m, n) numbers. Adding b vectors to k costs one product (b, k) x (k, n).
    """

    def __init__(self, guard: Guard, gram: NormalisedKernel, m: int, tolerance: float) -> None:
        guard.require(gram.rest.any(-1), "kernel must not vanish on all rows of X")
        guard.check()
        self.guard, self.gram, self.m, self.tolerance = guard, gram, m, tolerance
        self.rest = gram.rest.clone()  # (..., n), r
        self.rounding = _ROUNDING * torch.finfo(self.rest.dtype).eps
        self.visible = values_visible(self.rest)
        self.count = 0  # rows of L, of which a batch may have some that are zero
        self._L = self.rest.new_empty((*self.rest.shape[:-1], m, self.rest.shape[-1]))
        self._chosen: list[tuple[Tensor, Tensor, Tensor]] = []
        self._known = torch.full_like(self.rest[..., :1], self.rounding)  # to which r is known, (..., 1)
        self.size = torch.zeros_like(self.rest[..., 0], dtype=torch.int64)
        self.error = self.rest.mean(-1)

    @property
    def L(self) -> Tensor:  # noqa: N802
        """(..., k, n)."""
        return self._L[..., : self.count, :]

    @property
    def least(self) -> Tensor:
        """What a row must have left to be taken, (..., 1); Note [least pivot]."""
        largest = self.rest.amax(-1, keepdim=True)
        return torch.maximum(self._known, (self.rounding * largest).sqrt())

    @property
    def open(self) -> Tensor:
        """Rows that may be taken, (..., n)."""
        return self.rest > self.least

    def _going(self) -> Tensor:
        wanted = (self.error > self.tolerance) | (self.size == 0)
        return wanted & (self.size < self.m) & self.open.any(-1)

    def grow(self, propose: Callable[[], Proposal | None], added: Callable[[int], object]) -> "Basis":
        """Add what is proposed until a reason to stop is met; `added` hears how many rows L has gained."""
        while self.count < self.m if not self.visible else bool(self._going().any()):
            proposal = propose()
            if proposal is None:
                break
            before = self.count
            self._add(*proposal)
            added(self.count - before)
        root = torch.finfo(self.rest.dtype).eps ** 0.5
        self.guard.require(self._least >= -root, "kernel must be positive semi-definite")
        self.guard.check()
        return self._basis()

    def _add(self, rows: Tensor, least: Tensor | None) -> None:
        """Add those of the rows (..., b) that have enough left when their turn comes."""
        kept, H = self._kept(rows, least)
        order = kept.logical_not().to(torch.int8).argsort(dim=-1, stable=True)
        width = int(kept.sum(-1).max()) if self.visible else min(kept.shape[-1], self.m - self.count)
        if width == 0:
            return
        order = order[..., :width]
        rows, kept = _take(rows, order), _take(kept, order)  # (..., w)
        H = H.take_along_dim(order.unsqueeze(-1), -2).take_along_dim(order.unsqueeze(-2), -1)
        pairs = kept.unsqueeze(-1) & kept.unsqueeze(-2)
        eye = torch.eye(width, dtype=H.dtype, device=H.device)
        W = self.gram(None, rows).mT - self._at(rows).mT @ self.L  # (..., w, n)
        T, info = torch.linalg.cholesky_ex(torch.where(pairs, H, eye))
        self.guard.require(info == 0, "kernel must be positive semi-definite")
        W = torch.linalg.solve_triangular(T, W * kept.unsqueeze(-1), upper=False)
        pivots = torch.where(kept, T.diagonal(dim1=-2, dim2=-1).square(), torch.inf)
        ratio = self.rest.amax(-1, keepdim=True) / pivots.amin(-1, keepdim=True)
        self._known = torch.maximum(self._known, self.rounding * ratio)
        self._append(rows, kept, W)

    def _at(self, rows: Tensor) -> Tensor:
        """Columns of L, (..., k, b)."""
        return self.L.take_along_dim(rows.unsqueeze(-2), -1)

    def _kept(self, rows: Tensor, demand: Tensor | None) -> tuple[Tensor, Tensor]:
        """Which rows (..., b) to add, and what is left of their matrix, (..., b, b)."""
        left, floor = _take(self.rest, rows), self.least.expand_as(rows)
        demand = torch.zeros_like(left) if demand is None else demand
        if rows.shape[-1] == 1:
            enough = left > torch.maximum(demand, floor)
            return enough & self._going().unsqueeze(-1), left.unsqueeze(-1)
        L = self._at(rows)  # (..., k, b)
        H = torch.diagonal_scatter(self.gram(rows, rows) - L.mT @ L, left, dim1=-2, dim2=-1)
        kept = _independent(H, self._coefficients(L), demand, floor) & self._going().unsqueeze(-1)
        room = (self.m - self.size).unsqueeze(-1)
        return kept & (kept.cumsum(-1) <= room), H

    def _coefficients(self, L: Tensor) -> Tensor:
        """K_SS^{-1} K_Si over the vectors taken, (..., k, b), from columns (..., k, b) of the factor."""
        if not self._chosen:
            return L
        taken, kept, _ = (torch.cat(parts, -1) for parts in zip(*self._chosen, strict=True))  # (..., k)
        pairs = kept.unsqueeze(-1) & kept.unsqueeze(-2)
        eye = torch.eye(self.count, dtype=L.dtype, device=L.device)
        return torch.linalg.solve_triangular(torch.where(pairs, self._at(taken).triu(), eye), L, upper=True)

    def _append(self, rows: Tensor, kept: Tensor, W: Tensor) -> None:
        width, n = W.shape[-2:]
        if self.count + width > self._L.shape[-2]:  # only in a batch, whose problems keep different rows
            more = self._L.new_empty((*self._L.shape[:-2], width + self.m, n))
            self._L = torch.cat([self.L, more], -2)
        self._L[..., self.count : self.count + width, :] = W
        self.count += width
        gains = W.square()
        rest = self.rest - gains.sum(-2)
        self._least = rest.amin(-1)
        # Zero what was chosen; rows that were not have the same index twice, hence a product.
        chosen = torch.ones_like(rest).scatter_reduce(-1, rows, (~kept).to(rest.dtype), "amin")
        self.rest = rest.clamp(min=0) * chosen
        self.error = self.rest.mean(-1)
        gain = gains.mean(-1)  # (..., w)
        later = torch.nn.functional.pad(gain[..., 1:].flip(-1).cumsum(-1).flip(-1), (0, 1))
        errors = self.error.unsqueeze(-1) + later
        self._chosen.append((rows, kept, errors))
        self.size = self.size + kept.sum(-1)

    def _basis(self) -> Basis:
        indices, kept, errors = (torch.cat(parts, -1) for parts in zip(*self._chosen, strict=True))
        order = kept.logical_not().to(torch.int8).argsort(dim=-1, stable=True)
        size = kept.sum(-1)
        errors = _take(errors, order)
        last = (size - 1).unsqueeze(-1)
        place = torch.arange(errors.shape[-1], device=errors.device)
        enough = (errors <= self.tolerance) & (place <= last)
        first = torch.where(enough, place, last).amin(-1, keepdim=True)
        size = first[..., 0] + 1
        longest = int(size.max()) if self.visible else self.count
        place = place[:longest].minimum(first)  # (..., k), the last one again where a problem is over
        indices, errors = _take(_take(indices, order), place), _take(errors, place)
        return Basis(indices, errors, size, self._reason(size, errors))

    def _reason(self, size: Tensor, errors: Tensor) -> str:
        if not self.visible:
            return "size"
        longest = size == size.max()
        if self.tolerance > 0 and bool((errors[..., -1] <= self.tolerance)[longest].any()):
            return "tolerance"
        return "size" if int(size.max()) == self.m else "singular"
