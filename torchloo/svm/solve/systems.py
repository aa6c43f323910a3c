"""Linear systems: K + diag(theta) of the interior point, dense or of low rank; those of free sets.

And products summed as if in twice the precision: what is left where large coefficients cancel.

Note [long and short points]
Where inputs are not scaled some points are longer than others by orders of magnitude, and what a short
one adds to K is lost beside a mean diagonal or a constant. But Cholesky is as accurate as if every row
had been divided by the length of its point: rounding of k_ij is relative to the lengths of i and j. So
nothing of a common size may be added to K, and a pivot is compared to the diagonal entry of its own row.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchloo.memory import cholesky_in_place
from torchloo.svm.stacked import block_of, rows_of, times_vector
from torchloo.svm.tolerances import RIDGES

__all__ = [
    "Bordered",
    "Dense",
    "Lifted",
    "LowRank",
    "Parts",
    "Rough",
    "accurate_product",
    "bordered_matrix",
    "in_parts",
]


class Lifted:
    """Cholesky factors of K + diag(theta) for K (..., m, m), symmetric, and one theta after another.

    All in the same memory, since pages of the system are costly.
    """

    def __init__(self, K: Tensor) -> None:
        self.K = K
        self.L = torch.empty_like(K, memory_format=torch.contiguous_format)
        self.diagonal = self.L.diagonal(dim1=-2, dim2=-1)

    def factor(self, theta: Tensor) -> Tensor:
        """Write the factor to L; returns info, 0 where there is one, (...)."""
        self.L.copy_(self.K)
        self.diagonal.add_(theta)
        return cholesky_in_place(self.L)[1]


def _solved(L: Tensor, rhs: Tensor) -> Tensor:
    """(L L^T)^-1 times the rows of rhs (..., c, m), as rows."""
    if L.ndim > 2 and rhs.shape[-2] > 1:
        # Threads of LAPACK would wait for each other in every one of many small matrices.
        return torch.cat([_solved(L, row) for row in rhs.split(1, -2)], -2)
    # Unlike cholesky_solve this copies no L.
    half = torch.linalg.solve_triangular(L, rhs.mT, upper=False)
    return torch.linalg.solve_triangular(L.mT, half, upper=True).mT


class Dense:
    """Solves (K + diag(theta)) x = rhs by Cholesky, for K (m, m) or several, (B, m, m).

    The `ridges` are tried where that fails.
    """

    def __init__(self, K: Tensor, ridges: tuple[float, ...] = RIDGES) -> None:
        self.K, self.ridges = K, ridges
        self._lifted = Lifted(K)
        self.L = self._lifted.L

    def product(self, a: Tensor) -> Tensor:
        """K a."""
        return times_vector(self.K, a)

    def factor(self, theta: Tensor) -> Tensor | bool:
        """Whether it could be done, for several machines (B,)."""
        if self.K.ndim > 2:
            return self._factor_several(theta)
        if not self._lifted.factor(theta):
            return True
        diagonal = self.K.diagonal()
        return any(not self._lifted.factor(theta + ridge * diagonal) for ridge in self.ridges)

    def _factor_several(self, theta: Tensor) -> Tensor:
        """Those that fail are lifted together."""
        info = self._lifted.factor(theta)
        for ridge in self.ridges:
            failed = info.nonzero()[:, 0]
            if not len(failed):
                break
            lifted = Lifted(self.K[failed])
            diagonal = self.K.diagonal(dim1=1, dim2=2)[failed]
            info[failed] = lifted.factor(theta[failed] + ridge * diagonal)
            self.L[failed] = lifted.L
        return info == 0

    def solve(self, rhs: Tensor) -> Tensor:
        """Right-hand sides and solutions are the rows, (..., c, m)."""
        return _solved(self.L, rhs)

    def take(self, keep: Tensor) -> "Dense":
        """That of the variables in `keep`, (v,) of one machine or (B, v)."""
        if keep.ndim > 1:
            return Dense(block_of(self.K, keep), self.ridges)
        return Dense(self.K.index_select(0, keep).index_select(1, keep), self.ridges)

    def machines(self, rows: Tensor) -> "Dense":
        """Those of the machines at `rows`."""
        return Dense(self.K.index_select(0, rows), self.ridges)

    def float(self) -> "Dense":
        """The same in float32."""
        return Dense(self.K.float(), self.ridges)


class LowRank:
    """The same for K = F F^T by the Woodbury identity, F (m, p) or several, (B, m, p): O(m p^2) each."""

    def __init__(self, F: Tensor) -> None:
        self.F = F

    def product(self, a: Tensor) -> Tensor:
        """K a."""
        return times_vector(self.F, times_vector(self.F.mT, a))

    def factor(self, theta: Tensor) -> Tensor | bool:
        """Whether it could be done, for several machines (B,)."""
        self.theta = theta[..., None, :]
        M = self.F.mT @ (self.F / theta[..., None])
        M.diagonal(dim1=-2, dim2=-1).add_(1)
        self.L, info = cholesky_in_place(M)
        return info == 0 if info.ndim else not bool(info)

    def solve(self, rhs: Tensor) -> Tensor:
        """Right-hand sides and solutions are the rows, (..., c, m)."""
        near = rhs / self.theta
        inner = _solved(self.L, near @ self.F)
        return near - (inner @ self.F.mT).div_(self.theta)

    def take(self, keep: Tensor) -> "Dense | LowRank":
        """That of the variables in `keep`, (v,) of one machine or (B, v)."""
        F = rows_of(self.F, keep) if keep.ndim > 1 else self.F.index_select(0, keep)
        return Dense(F @ F.mT) if F.shape[-2] <= F.shape[-1] else LowRank(F)

    def machines(self, rows: Tensor) -> "LowRank":
        """Those of the machines at `rows`."""
        return LowRank(self.F.index_select(0, rows))

    def float(self) -> "LowRank":
        """The same in float32."""
        return LowRank(self.F.float())


class Rough:
    """Systems of several machines solved in float32, which takes half the time; if one fails, as given.

    Good enough for the first steps of an interior point: what they miss is in the next residuals.
    """

    def __init__(self, system: Dense | LowRank) -> None:
        self.exact, self.rough = system, system.float()

    def factor(self, theta: Tensor) -> Tensor | bool:
        """Whether it could be done, (B,)."""
        self.system, regular = self.rough, self.rough.factor(theta.float())
        if bool(torch.as_tensor(regular).all()):
            return regular
        self.system = self.exact
        return self.exact.factor(theta)

    def solve(self, rhs: Tensor) -> Tensor:
        """Right-hand sides and solutions are the rows, (..., c, m)."""
        dtype = torch.float32 if self.system is self.rough else rhs.dtype
        return self.system.solve(rhs.to(dtype)).to(rhs)


def bordered_matrix(K: Tensor, real: Tensor) -> Tensor:
    """[0 1^T; 1 K_SS], (B, s + 1, s + 1), for the points in `real` (B, s) of K_SS (B, s, s).

    A point that does not count has an equation of its own, with 1 on the diagonal.
    """
    M = pad(K * (real[:, :, None] & real[:, None]), (1, 0, 1, 0))
    M[:, 0, 1:] = M[:, 1:, 0] = real.to(M)
    M.diagonal(dim1=1, dim2=2)[:, 1:].add_((~real).to(M))
    return M


class Bordered:
    """Solves [0 1^T; 1 K_SS] [b; a] = [top; rhs] for a free set S of each of B kernel matrices.

    K_SS is centred at the shortest point j, g_ik = k_ik - k_ij - k_jk + k_jj, which leaves a as it is and is
    positive definite for the others if the system is regular: nothing of a short point is lost, Note
    [long and short points]. Row and column j of G are 0, as are those of points that do not count; their
    diagonal entries are replaced.
    """

    def __init__(self, K: Tensor, real: Tensor | None = None) -> None:
        """K_SS (B, s, s), of which the points in `real` (B, s) count; default all."""
        k = K.diagonal(dim1=1, dim2=2)
        self.real = real
        shortest = k if real is None else k.masked_fill(~real, torch.inf)
        self.j = shortest.argmin(1, keepdim=True)  # (B, 1)
        self.K_j = K.gather(1, self.j[:, :, None].expand(-1, 1, k.shape[1]))[:, 0]
        self.k_j = k.gather(1, self.j)
        self.above_j = self.K_j - self.k_j  # (B, s)
        tiny = torch.finfo(K.dtype).tiny  # copies of the origin have no length
        self.size = (k + self.k_j).clamp_min(tiny)
        self.G = (K - self.K_j[:, None]).sub_(self.above_j[:, :, None])
        diagonal = self.G.diagonal(dim1=1, dim2=2)
        if real is not None:
            self.G.masked_fill_(~(real[:, :, None] & real[:, None]), 0)
            diagonal.add_(self.size.masked_fill(real, 0))
        diagonal.scatter_(1, self.j, self.size.gather(1, self.j))
        self.L, self.info = torch.linalg.cholesky_ex(self.G)

    def with_factors(self) -> "Bordered":
        """The same with 1 for a factor that there is not, where nothing that follows has a meaning."""
        unit = torch.eye(self.L.shape[1], dtype=self.L.dtype, device=self.L.device)
        self.L = torch.where((self.info == 0)[:, None, None], self.L, unit)
        return self

    def regular(self, tolerance: float) -> Tensor:
        """Whether every pivot is more than `tolerance` of its diagonal entry, (B,)."""
        pivot = self.L.diagonal(dim1=1, dim2=2).square()
        return (self.info == 0) & (pivot > tolerance * self.size).all(1)

    def independent(self, tolerance: float, rows: Tensor | None = None) -> Tensor:
        """Mask of points, j among them, that pivoted Cholesky keeps in the matrices at `rows`, (R, s)."""
        counts = torch.ones_like(self.size, dtype=torch.bool) if self.real is None else self.real
        G, size, real = (x if rows is None else x[rows] for x in (self.G, self.size, counts))
        length = size.sqrt()
        G, done = G / length[:, None] / length[:, :, None], ~real
        for _ in range(G.shape[1]):
            pivot, i = G.diagonal(dim1=1, dim2=2).masked_fill(done, -1).max(1, keepdim=True)
            found = pivot > tolerance
            if not bool(found.any()):
                break
            done.scatter_(1, i, found | done.gather(1, i))
            column = G.gather(2, i[:, :, None].expand(-1, G.shape[1], 1))  # (B, s, 1)
            divisor = pivot.masked_fill(~found, torch.inf)[:, :, None]
            G.addcmul_(column, (column / divisor).mT, value=-1)
        return done & real

    def solve(self, top: Tensor, rhs: Tensor) -> tuple[Tensor, Tensor]:
        """b (B, c) and a (B, c, s), 0 at points that do not count, for top (B, c) and rhs (B, c, s)."""
        j = self.j[:, None].expand(-1, rhs.shape[1], 1)
        rhs_j = rhs.gather(2, j)
        rest = rhs - rhs_j - self.above_j[:, None] * top[:, :, None]  # 0 at j
        if self.real is not None:
            rest.masked_fill_(~self.real[:, None], 0)
        a = torch.cholesky_solve(rest.mT, self.L).mT
        a = a.scatter(2, j, top[:, :, None] - a.sum(2, keepdim=True))
        return rhs_j[:, :, 0] - times_vector(a, self.K_j), a

    def inverse(self) -> tuple[Tensor, Tensor, Tensor]:
        """Blocks of the inverse: corner (B,), edge (B, s), inner (B, s, s), 0 where points do not count.

        An error if a factor has a 0 on its diagonal, see `with_factors`.
        """
        inner = torch.cholesky_inverse(self.L)
        diagonal = inner.diagonal(dim1=1, dim2=2)
        if self.real is not None:
            diagonal.masked_fill_(~self.real, 0)
        diagonal.scatter_(1, self.j, 0.0)
        row = inner.sum(2)
        edge = -times_vector(inner, self.above_j)
        edge.scatter_(1, self.j, 1 - edge.sum(1, keepdim=True))
        at_j = self.j[:, :, None]
        inner.scatter_(1, at_j.expand(-1, 1, inner.shape[2]), -row[:, None])
        inner.scatter_(2, at_j.expand(-1, inner.shape[1], 1), -row[:, :, None])
        diagonal.scatter_(1, self.j, row.sum(1, keepdim=True))
        return -torch.linalg.vecdot(edge, self.K_j), edge, inner


class Parts(NamedTuple):
    """Rows (..., m) as a sum of two parts; sums of products of two leading ones are exact."""

    lead: Tensor
    """The leading bits, (..., m)."""

    rest: Tensor
    """The others, (..., m)."""

    largest: Tensor
    """The largest size of an entry of each row, (..., 1)."""

    most: Tensor
    """What no entry of `rest` exceeds in size, (..., 1)."""


def in_parts(x: Tensor) -> Parts:
    """Rows (..., m) in two parts: so many leading bits that products of two rows are summed exactly."""
    bits = (53 - math.ceil(math.log2(x.shape[-1]))) // 2
    largest = torch.maximum(x.amax(-1, keepdim=True), -x.amin(-1, keepdim=True))
    _, exponent = torch.frexp(largest)
    step = torch.ldexp(torch.ones_like(largest), exponent - bits)
    lead = (x / step).round_().mul_(step)
    return Parts(lead, x - lead, largest, step / 2)


def accurate_product(K: Tensor, a: Tensor) -> Tensor:
    """K a for K (..., n, m) and a (..., m): the sum over the leading bits is exact, the rest is small."""
    K_parts, a_parts = in_parts(K), in_parts(a)
    small = times_vector(K_parts.rest, a_parts.lead) + times_vector(K, a_parts.rest)
    return times_vector(K_parts.lead, a_parts.lead) + small
