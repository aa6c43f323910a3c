"""Partial Cholesky factorisation of a kernel matrix by chosen rows, without forming the matrix.

Note [reconstruction error]
The best approximation of phi(x_i) by the vectors of S has the squared length K_Si^T K_SS^{-1} K_Si. The mean
of the squared errors relative to k_ii,

    error(S) = 1 - mean_i K_Si^T K_SS^{-1} K_Si / k_ii = 1 - J(S),

is the mean over i of r_i, the diagonal of the residual of the normalised kernel matrix
k_ij / sqrt(k_ii k_jj). Scaling vectors does not change their span: everything here works on the normalised
matrix, where all rows have the same weight, independent of their length. A row with k_ii = 0 is reconstructed
by any basis: it has r_i = 0 and is never chosen. With L (k, n) the factor, L^T L = K_:S K_SS^{-1} K_S: and
r = 1 - the column sums of L^2; adding a vector adds a row to L.

Note [least pivot]
Let eps be the rounding error (some multiple of the machine precision) and r the largest r_i. With
v = K_SS^{-1} K_Si the coefficients of row i, the error of r_i is eps (1 + |v|^2), which is about eps unless
rows are extrapolated from others that are close to one another. A vector with residual p subtracts h^2 / p
from every other residual, with an error of eps (1 + |v|^2) r / p. It is rejected where this exceeds p, that
is for p < sqrt(eps r (1 + |v|^2)), or where p is less than the errors made so far. Rules that choose large
pivots have |v| of order one, which is assumed for rows added one at a time; rows added in blocks may come in
any order.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from torchloo import csr
from torchloo.guards import Guard, require_inputs, values_visible
from torchloo.kernels import Kernel, Precomputed

__all__ = ["Basis", "Factor", "NormalisedKernel", "Proposal", "submatrix"]

Proposal = tuple[Tensor, Tensor | None]
"""Rows (..., b) to add in turn, and the residual that each needs when its turn comes, (..., b), if any."""

_ROUNDING = 32  # error of a column, a sum of many products, in units of the machine precision


class Basis(NamedTuple):
    """Rows chosen as basis vectors, in the order of choice.

    In a batch, a problem that stops before the others repeats its last row, which has no effect: a sparse
    machine drops vectors that depend on others.
    """

    indices: Tensor
    """Integers (..., k); `X[indices]` is the basis, without batch dimensions."""

    errors: Tensor
    """Mean relative reconstruction error after each vector, (..., k); Note [reconstruction error]."""

    size: Tensor
    """Number of vectors chosen, (...)."""

    stopped: str
    """Why selection stopped, in a batch for the largest basis: "size" (m reached), "tolerance" (the error is
    small enough) or "singular" (the residual of every row is rounding error)."""


class NormalisedKernel:
    """k(x_i, x_j) / sqrt(k_ii k_jj) for rows of X, evaluated entry by entry on demand, without a graph.

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
        self.kernel = kernel
        self.precomputed = isinstance(kernel, Precomputed)
        self.n = X.shape[-event - 1]
        self.ndim = X.ndim - event + 1  # of a matrix (..., n, p)
        if self.precomputed and X.shape[-1] != X.shape[-2]:
            raise ValueError(
                f"{guard.function}: X must be a square kernel matrix, got shape {tuple(X.shape)}"
            )
        guard.finite(X=X)
        points = kernel.embed(X)
        diagonal = kernel.diagonal(points, embedded=True)  # (..., n)
        guard.require(diagonal >= 0, "kernel must be positive semi-definite, got a negative k(x, x)")
        guard.finite(kernel=diagonal)
        self.diagonal = (diagonal > 0).to(diagonal.dtype)  # of the normalised matrix
        self.scale = torch.where(diagonal > 0, diagonal, 1).rsqrt() * self.diagonal
        batch = diagonal.shape[:-1]
        self._event = event if kernel.is_embedding_inside else 1
        if not csr.is_csr(points):
            points = points.expand(*batch, *points.shape[-self._event - 1 :])
        self.points = points

    def __call__(self, rows: Tensor | None, columns: Tensor) -> Tensor:
        """Entries (..., a, b) of the rows (..., a), or of all rows, and the columns (..., b)."""
        X, row_scale = self.points, self.scale
        if rows is not None:
            X = csr.take(X, rows, self._event)
            row_scale = _take(row_scale, rows)
        if self.precomputed:
            K = X.take_along_dim(columns.unsqueeze(-2), -1)
        else:
            K = self.kernel.between(X, csr.take(self.points, columns, self._event))
        column_scale = _take(self.scale, columns)
        return (K * row_scale.unsqueeze(-1)).mul_(column_scale.unsqueeze(-2))

    def matrix(self) -> Tensor:
        """The kernel matrix (..., n, n) itself, not normalised."""
        return self.points if self.precomputed else self.kernel.between(self.points)


def _take(values: Tensor, rows: Tensor) -> Tensor:
    return values.take_along_dim(rows, -1)


def submatrix(H: Tensor, rows: Tensor) -> Tensor:
    """Entries (..., b, b) of H (..., n, n) in the given rows (..., b) and in the same columns."""
    of_rows = H.take_along_dim(rows.unsqueeze(-1), -2)
    return of_rows.take_along_dim(rows.unsqueeze(-2), -1)


def _accepted_first(accepted: Tensor) -> Tensor:
    """The order (..., b) that puts accepted entries before the others and else keeps them as they are."""
    return accepted.logical_not().to(torch.int8).argsort(dim=-1, stable=True)


def _identity_elsewhere(H: Tensor, accepted: Tensor) -> Tensor:
    """H (..., b, b), with the rows and columns that are not accepted those of the identity."""
    pairs = accepted.unsqueeze(-1) & accepted.unsqueeze(-2)
    eye = torch.eye(H.shape[-1], dtype=H.dtype, device=H.device)
    return torch.where(pairs, H, eye)


def _independent(H: Tensor, V: Tensor, threshold: Tensor, least: Tensor) -> Tensor:
    """Which of b vectors, in turn, have a large enough residual; Note [least pivot].

    Args:
        H: residual of their matrix, (..., b, b).
        V: their coefficients over the vectors taken before the block, (..., k, b).
        threshold: the residual that each must exceed, (..., b).
        least: the same in units of sqrt(1 + |v|^2), (..., b).
    """
    b = threshold.shape[-1]
    H = H.clone()
    V = torch.cat([V, torch.zeros_like(H)], -2)  # (..., k + b, b)
    accepted = torch.empty_like(threshold, dtype=torch.bool)
    for i in range(b):
        pivot = H[..., i, i].clone()
        h = H[..., :, i].clone()  # (..., b)
        v = V[..., :, i].clone()  # (..., k + b)
        growth = (1 + v.square().sum(-1)).sqrt()
        needed = torch.maximum(threshold[..., i], least[..., i] * growth)
        accepted[..., i] = pivot > needed
        divisor = torch.where(accepted[..., i], pivot, torch.inf)  # a rejected vector changes nothing
        share = h * divisor.reciprocal().unsqueeze(-1)
        H -= h.unsqueeze(-1) * share.unsqueeze(-2)
        V -= v.unsqueeze(-1) * share.unsqueeze(-2)
        V[..., i - b, :] = share
    return accepted


class Factor:
    """The factor L of Note [reconstruction error] while it grows.

    Memory: L, (m, n) numbers. Adding b vectors to k costs one product (b, k) x (k, n).
    """

    def __init__(self, guard: Guard, gram: NormalisedKernel, m: int, tolerance: float) -> None:
        guard.require(gram.diagonal.any(-1), "kernel must not vanish on all rows of X")
        guard.check()
        self.guard, self.gram = guard, gram
        self.m, self.tolerance = m, tolerance
        self.residual = gram.diagonal.clone()  # r, (..., n)
        self.error = self.residual.mean(-1)
        *batch, n = self.residual.shape
        self.rounding = _ROUNDING * torch.finfo(self.residual.dtype).eps
        self.visible = values_visible(self.residual)
        self.count = 0  # rows of L, of which a batch may have some that are zero
        self.size = torch.zeros_like(self.residual[..., 0], dtype=torch.int64)
        self._L = self.residual.new_empty((*batch, m, n))
        self._chosen: list[tuple[Tensor, Tensor, Tensor]] = []  # rows, accepted, errors: each (..., w)
        self._uncertainty = torch.full_like(self.residual[..., :1], self.rounding)  # of r, (..., 1)

    @property
    def L(self) -> Tensor:  # noqa: N802
        """(..., k, n)."""
        return self._L[..., : self.count, :]

    @property
    def least(self) -> Tensor:
        """The residual that a row must exceed to be added, (..., 1); Note [least pivot]."""
        largest = self.residual.amax(-1, keepdim=True)
        return torch.maximum(self._uncertainty, (self.rounding * largest).sqrt())

    @property
    def eligible(self) -> Tensor:
        """Rows that may be added, (..., n)."""
        return self.residual > self.least

    def columns(self, rows: Tensor) -> Tensor:
        """Columns (..., k, b) of L that belong to the rows (..., b)."""
        return self.L.take_along_dim(rows.unsqueeze(-2), -1)

    def _unfinished(self) -> Tensor:
        """Problems of a batch that need more vectors, (...)."""
        inaccurate = (self.error > self.tolerance) | (self.size == 0)
        return inaccurate & (self.size < self.m) & self.eligible.any(-1)

    def grow(self, propose: Callable[[], Proposal | None], added: Callable[[int], object]) -> "Basis":
        """Add proposed rows until a condition to stop is met; calls `added` with the number of rows added."""
        while bool(self._unfinished().any()) if self.visible else self.count < self.m:
            proposal = propose()
            if proposal is None:
                break
            before = self.count
            self._add(*proposal)
            added(self.count - before)
        root = torch.finfo(self.residual.dtype).eps ** 0.5
        self.guard.require(self._smallest >= -root, "kernel must be positive semi-definite")
        self.guard.check()
        return self._basis()

    def _add(self, rows: Tensor, threshold: Tensor | None) -> None:
        """Add those of the rows (..., b) whose residual is large enough when their turn comes."""
        accepted, H = self._accepted(rows, threshold)
        if self.visible:
            width = int(accepted.sum(-1).max())
        else:
            width = min(accepted.shape[-1], self.m - self.count)
        if width == 0:
            return
        order = _accepted_first(accepted)[..., :width]
        rows = _take(rows, order)  # (..., w)
        accepted = _take(accepted, order)
        H = submatrix(H, order)
        W = self.gram(None, rows).mT - self.columns(rows).mT @ self.L  # (..., w, n)
        T, info = torch.linalg.cholesky_ex(_identity_elsewhere(H, accepted))
        self.guard.require(info == 0, "kernel must be positive semi-definite")
        W = torch.linalg.solve_triangular(T, W * accepted.unsqueeze(-1), upper=False)
        pivots = T.diagonal(dim1=-2, dim2=-1).square()
        least_pivot = torch.where(accepted, pivots, torch.inf).amin(-1, keepdim=True)
        ratio = self.residual.amax(-1, keepdim=True) / least_pivot
        self._uncertainty = torch.maximum(self._uncertainty, self.rounding * ratio)
        self._append(rows, accepted, W)

    def _accepted(self, rows: Tensor, threshold: Tensor | None) -> tuple[Tensor, Tensor]:
        """Which rows (..., b) to add, and the residual of their matrix, (..., b, b)."""
        residual = _take(self.residual, rows)
        least = self.least.expand_as(rows)
        threshold = torch.zeros_like(residual) if threshold is None else threshold
        unfinished = self._unfinished().unsqueeze(-1)
        if rows.shape[-1] == 1:
            large_enough = residual > torch.maximum(threshold, least)
            return large_enough & unfinished, residual.unsqueeze(-1)
        L = self.columns(rows)  # (..., k, b)
        H = self.gram(rows, rows) - L.mT @ L
        H = torch.diagonal_scatter(H, residual, dim1=-2, dim2=-1)
        accepted = _independent(H, self._coefficients(L), threshold, least) & unfinished
        room = (self.m - self.size).unsqueeze(-1)
        return accepted & (accepted.cumsum(-1) <= room), H

    def _coefficients(self, L: Tensor) -> Tensor:
        """K_SS^{-1} K_Si over the vectors chosen, (..., k, b), from columns (..., k, b) of the factor."""
        if not self._chosen:
            return L
        chosen, accepted, _ = self._all_chosen()
        T = _identity_elsewhere(self.columns(chosen).triu(), accepted)
        return torch.linalg.solve_triangular(T, L, upper=True)

    def _all_chosen(self) -> list[Tensor]:
        """Rows, which of them were accepted, and errors, each (..., k)."""
        return [torch.cat(blocks, -1) for blocks in zip(*self._chosen, strict=True)]

    def _append(self, rows: Tensor, accepted: Tensor, W: Tensor) -> None:
        width, n = W.shape[-2:]
        if self.count + width > self._L.shape[-2]:  # only in a batch, whose problems accept different rows
            batch = self._L.shape[:-2]
            more = self._L.new_empty((*batch, width + self.m, n))
            self._L = torch.cat([self.L, more], -2)
        self._L[..., self.count : self.count + width, :] = W
        self.count += width
        gains = W.square()
        residual = self.residual - gains.sum(-2)
        self._smallest = residual.amin(-1)
        # Exactly 0 at accepted rows; an index may occur twice, once accepted and once not, hence amin.
        not_accepted = accepted.logical_not().to(residual.dtype)
        factor = torch.ones_like(residual).scatter_reduce(-1, rows, not_accepted, "amin")
        self.residual = residual.clamp(min=0) * factor
        self.error = self.residual.mean(-1)
        gain = gains.mean(-1)  # (..., w)
        later_gains = gain[..., 1:].flip(-1).cumsum(-1).flip(-1)
        later_gains = torch.nn.functional.pad(later_gains, (0, 1))  # none after the last
        errors = self.error.unsqueeze(-1) + later_gains
        self._chosen.append((rows, accepted, errors))
        self.size = self.size + accepted.sum(-1)

    def _basis(self) -> Basis:
        indices, accepted, errors = self._all_chosen()
        order = _accepted_first(accepted)
        indices = _take(indices, order)
        errors = _take(errors, order)
        last = accepted.sum(-1, keepdim=True) - 1
        position = torch.arange(errors.shape[-1], device=errors.device)
        accurate = (errors <= self.tolerance) & (position <= last)
        last = torch.where(accurate, position, last).amin(-1, keepdim=True)
        size = last[..., 0] + 1
        longest = int(size.max()) if self.visible else self.count
        position = position[:longest].minimum(last)  # (..., k), the last one repeated in smaller bases
        indices = _take(indices, position)
        errors = _take(errors, position)
        return Basis(indices, errors, size, self._reason(size, errors))

    def _reason(self, size: Tensor, errors: Tensor) -> str:
        if not self.visible:
            return "size"
        largest = size == size.max()
        accurate = errors[..., -1] <= self.tolerance
        if self.tolerance > 0 and bool(accurate[largest].any()):
            return "tolerance"
        return "size" if int(size.max()) == self.m else "singular"
