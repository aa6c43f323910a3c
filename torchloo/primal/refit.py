"""Sets of rows refitted where their closed form would cancel.

Note [refits by triangles]
Where 1 - h is lost, little is left to learn from without the set L, so that the normal matrix C_L of the
other rows is badly conditioned. It is never formed. A QR factorisation of the weighted rows
[sqrt(zeta) (z, y)] and of a root of the penalty leaves a triangle [F d; 0 .], with F^T F = C_L and
coefficients F^{-1} d, and squares no condition. The triangle of the rows in no set is found block by block,
once for all sets; each of these adds the rows of the others to it. Then
P_LL^{-1} = Omega_L^{-1} + Z_L C_L^{-1} Z_L^T.

A bias is one more feature, which is 1. Features are taken about the mean of the rows that are left to learn
from: about another point, such as the mean of all rows where L outweighs the others, a feature that these
share would be like a second bias, and all that tells the two apart would be a tiny penalty. The differences
come before the weights, so that rows that are equal stay so; rows in no set are taken about their own mean.
A mean is that of the differences to the heaviest row, and so exact where rows are equal or one is left: an
ulp of rounding, divided by a tiny penalty, would be a coefficient.

Note [derivatives of refits]
The residuals of a refitted set are Y_L - Z_L p for the coefficients p without it, of the other rows alone,
and its variances reg (1 / zeta + diag(Z_L H)) with H = C_L^{-1} Z_L^T. With cotangents rbar and vbar of the
two, v = H rbar, G = diag(reg vbar), and the residuals e of that machine, for features z about the mean of the
other rows,

    zbar = -p rbar^T + 2 H G,                      Ybar = rbar,         zetabar = -G / zeta^2,
    zbar = zeta (p v^T z - v e^T - 2 H G H^T z),   Ybar = -zeta v^T z,  zetabar = -(v^T z) e - z^T H G H^T z

in the set and outside of it, and the cotangent of the penalty is (v p^T + p v^T) / 2 - H G H^T.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from torchloo.blocks import NOT_DEFINITE
from torchloo.factors import root_of, triangle, with_derivatives
from torchloo.guards import Guard
from torchloo.primal.block import Block
from torchloo.primal.collective import Peers
from torchloo.primal.machines import Machines
from torchloo.primal.sink import Sink

if TYPE_CHECKING:
    from torchloo.primal.solved import StreamFit

__all__ = ["Effect", "Lost", "Refitted", "refit", "refit_at_once"]

# So many rows in sets that are refitted together: each set is refitted with those of the others.
_CHUNK = 1 << 8

Lost = dict[tuple[int, int], list[tuple[Tensor, bool]]]
"""Sets of rows, ascending, and whether they have no more rows than features, by regularisation and output."""


class Refitted(NamedTuple):
    """A set that was refitted, for one regularisation r and output j (0 if outputs share theirs)."""

    r: int
    j: int
    rows: Tensor
    """Numbers of the rows, (s,)."""
    X: Tensor
    """Features about the mean, and ones for the bias, (p', s)."""
    zeta: Tensor
    """Weights, (s,)."""
    Y: Tensor
    """Targets about their mean, (s, c)."""
    centre: tuple[Tensor, Tensor]
    """Means (1, p') of the rows in no set, and of those outside this one about it; taken off one by one."""
    coef: Tensor
    """Coefficients without the set, (p', c), for features about these means, with a 1 for the bias."""
    spread: Tensor
    """C_L^{-1} X_L^T, (p', s), likewise."""


class Effect(NamedTuple):
    """How the machine without a refitted set depends on the other rows; Note [derivatives of refits]."""

    j: int
    """The output, or 0 if outputs share a regularisation."""
    centre: tuple[Tensor, Tensor]
    """Means (1, p') of the features, taken off one after the other."""
    coef: Tensor
    """p, (p', c)."""
    v: Tensor
    """(p', c)."""
    H: Tensor
    """(p', s)."""
    g: Tensor
    """The diagonal of G, (s,)."""

    def to(self, like: Tensor) -> "Effect":
        """The same on the device of a tensor."""
        origin, mean = self.centre
        return Effect(self.j, (origin.to(like), mean.to(like)), *(t.to(like) for t in self[2:]))

    def penalty(self) -> Tensor:
        """Cotangent of the penalty, (p', p')."""
        outer = self.v @ self.coef.mT
        return (outer + outer.mT) / 2 - self.H * self.g @ self.H.mT

    def on(self, features: Tensor, Y: Tensor, zeta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Cotangents of features (p', b), targets (b, c) and weights (b,) of rows outside the set."""
        z = features
        for part in self.centre:
            z = z - part.mT
        e, vz, Hz = Y - z.mT @ self.coef, self.v.mT @ z, self.H.mT @ z  # (b, c), (c, b), (s, b)
        GHz = self.g.unsqueeze(-1) * Hz
        zbar = zeta * (self.coef @ vz - self.v @ e.mT - 2 * self.H @ GHz)
        return zbar, -(zeta * vz).mT, -(vz.mT * e).sum(-1) - (Hz * GHz).sum(0)


class _Left(NamedTuple):
    """What there is to learn from: the triangle of the rows in no set, and the rows that are in some.

    Features are those of `Refitted`, about the mean of the rows in no set.
    """

    outside: Tensor
    """(m, p' + c)."""
    X: Tensor
    """Features, (k, p')."""
    root: Tensor
    """Square roots of the weights, (k, 1)."""
    Y: Tensor
    """(k, c)."""
    bias: bool

    def without(self, inside: Tensor, guard: Guard) -> tuple[Tensor, Tensor, Tensor]:
        """Mean (1, p') of the features without some rows (k,), then F (p', p') and coefficients (p', c).

        The last two are those of Note [refits by triangles], for features about the mean.
        """
        X, root, Y = (t[~inside] for t in self[1:4])
        p, outside = X.shape[-1], self.outside.clone()
        mean = torch.zeros_like(outside[:1, :p])
        if self.bias:
            zeta, ones = root.square(), outside[:, p - 1 : p]
            if len(X):
                mean = _heaviest(X, zeta)
            inner, outer = zeta.mT @ (X - mean), ones.mT @ (outside[:, :p] - ones * mean)
            mean = mean + _mean(inner + outer)
            outside[:, : p - 1] -= ones * mean[:, :-1]
        F = triangle(torch.cat([outside, root * torch.cat([X - mean, Y], -1)]))
        F, d = F[:p, :p], F[:p, p:]
        limit = p * torch.finfo(F.dtype).eps * torch.linalg.vector_norm(F, dim=0)
        guard.require(F.diagonal().abs() > limit, NOT_DEFINITE)
        return mean, F, torch.linalg.solve_triangular(F, d, upper=True)


def _heaviest(X: Tensor, zeta: Tensor) -> Tensor:
    """The features (1, p') of the row with the largest weight, of (k, p') and (k, 1); 0 for the bias."""
    row = X[zeta[:, 0].argmax()].unsqueeze(0).clone()
    row[:, -1] = 0
    return row


def _mean(sums: Tensor) -> Tensor:
    """Mean (1, p') of features from their weighted sums, whose last is the weight; 0 where there is none."""
    mean = torch.zeros_like(sums)
    mean[:, :-1] = sums[:, :-1] / torch.where(sums[:, -1:] > 0, sums[:, -1:], 1.0)
    return mean


def refit_at_once(
    Z: Tensor, R: Tensor, root: Tensor, Y: Tensor, sets: list[Tensor], bias: bool, guard: Guard
) -> tuple[Tensor, Tensor]:
    """Held-out residuals (l, c) and diag(P_LL^{-1}), (l, 1), of the rows of sets, one set after another.

    Differentiable to every order: a step of refinement, by the factor with its derivatives, goes to the
    solution from anywhere; its value is not used, as the normal equations know it less well. Cost n p^2 for
    each chunk of sets, n p and p^3 for each set.

    Args:
        Z: features (n, p) and Y: targets (n, c) of a single problem.
        R: penalty (p, p).
        root: square roots of the weights, (n, 1).
        sets: rows (s,) of each.
        bias: whether there is an unpenalised bias.
        guard: demands on the values.
    """
    X = torch.cat([Z, torch.ones_like(root)], -1) if bias else Z
    R = torch.nn.functional.pad(R, (0, bias, 0, bias))
    with torch.no_grad():
        penalty = torch.nn.functional.pad(root_of(R, guard), (0, Y.shape[-1]))
    residuals, inverses = [], []
    for some in _together(sets, _CHUNK):
        union = torch.cat(some).unique()
        with torch.no_grad():
            others = root.index_fill(0, union, 0.0)
            zeta = others.square()
            origin = torch.zeros_like(X[:1])
            if bias:
                near = _heaviest(X, zeta)
                origin = near + _mean(zeta.mT @ (X - near))
            outside = triangle(torch.cat([others * torch.cat([X - origin, Y], -1), penalty]))
            left = _Left(outside, X[union] - origin, root[union], Y[union], bias)
        for rows in some:
            with torch.no_grad():
                mean, F, coef = left.without(torch.isin(union, rows), guard)
                unit = torch.eye(len(F), dtype=F.dtype, device=F.device)
                T = torch.linalg.solve_triangular(F.mT, unit, upper=False)
            V_L = X[rows] - origin - mean
            e = Y[rows] - V_L @ coef
            if torch.is_grad_enabled() and any(t.requires_grad for t in (Z, R, root, Y)):
                V = root.index_fill(0, rows, 0.0) * (X - (origin + mean))
                T = with_derivatives(T, R + V.mT @ V)
                gradient = V.mT @ (root * Y - V @ coef) - R @ coef
                e = e - V_L @ (T.mT @ (T @ (gradient - gradient.detach())))
            half = T @ V_L.mT  # (p, s)
            residuals.append(e)
            inverses.append(1 / root[rows].square() + half.square().sum(0).unsqueeze(-1))
    return torch.cat(residuals), torch.cat(inverses)


def _together(sets: list[Tensor], limit: int) -> list[list[Tensor]]:
    """The sets in lists, each of at most so many rows, or of one set."""
    together: list[list[Tensor]] = []
    for rows in sets:
        if not together or sum(map(len, together[-1])) + len(rows) > limit:
            together.append([])
        together[-1].append(rows)
    return together


def refit(solved: "StreamFit", machines: Machines, sink: Sink, lost: Lost) -> list[Refitted]:
    """Write the rows of lost sets: a pass for as many small sets as a block has rows, or for one large."""
    others, refitted = solved.others, []
    for r, j in sorted({key for keys in others.gather(list(lost)) for key in keys}):
        limit = max(solved.size, len(solved.moments.S) + 1)
        for some, large in _rounds(lost.get((r, j), []), limit, others):
            work = _Round(solved, machines, r, j, some, large)
            for one, residuals, variance in work.solve():
                sink.overwrite(one.rows, r, j, work.outputs, residuals, variance)
                refitted.append(one)
            others.run(work.guard.check)
    return refitted


def _rounds(
    sets: list[tuple[Tensor, bool]], limit: int, others: Peers
) -> Iterator[tuple[list[Tensor], bool]]:
    """Small sets, together of at most so many rows; then, process after process, one large set at a time."""
    together = _together([rows for rows, small in sets if small], limit)
    for k in range(max(others.gather(len(together)))):
        yield (together[k] if k < len(together) else []), False
    large = [rows for rows, small in sets if not small]
    for rank, count in enumerate(others.gather(len(large))):
        for k in range(count):
            yield ([large[k]] if rank == others.rank else []), True


class _Round:
    """Refits of a few sets of this process, and of those of the others, by one pass.

    A large set is the only one of all processes: its rows are read again at last.
    """

    def __init__(
        self, solved: "StreamFit", machines: Machines, r: int, j: int, sets: list[Tensor], large: bool
    ) -> None:
        self.solved, self.r, self.j, self.rows, self.large = solved, r, j, sets, large
        self.reg, self.outputs = machines.regs[r, j], machines.outputs_of(j)
        n, p, self.bias = solved.stream.n, len(solved.moments.S), solved.moments.centre
        assert n is not None
        self.guard = Guard(solved.function)
        self.number = torch.full((n,), -1, dtype=torch.int32, device="cpu")  # which set a row is in
        for k, rows in enumerate(sets):
            self.number[rows] = k
        columns = p + self.bias + solved.moments.T[:, self.outputs].shape[1]
        self.outside = solved.moments.S.new_zeros(columns, columns)
        if solved.others.rank == 0:  # the penalty counts once, whatever the number of processes
            self.outside.diagonal()[:p] = self.reg.sqrt()
        # From the mean of all rows to that of the rows in no set.
        self.origin = torch.zeros_like(self.outside[:1, : p + self.bias])

    def _read(self, part: Block) -> tuple[Tensor, Tensor, Tensor]:
        """Features (b, p'), square roots of weights (b, 1) and targets (b, c) as in `_Left`."""
        features, Y = self.solved.about_means(part)
        X = features.mT
        if self.bias:
            X = torch.cat([X, torch.ones_like(X[:, :1])], -1)
        root = part.weight.double().sqrt().unsqueeze(-1)
        return X - self.origin, root, Y[:, self.outputs]

    def _move_origin(self) -> None:
        """Find the mean of the rows in no set."""
        sums, near = torch.zeros_like(self.origin), None
        for part in self.solved.blocks("refits"):
            X, root, _ = self._read(part)
            outside = self.number[part.rows] < 0
            zeta = root.square() * outside.unsqueeze(-1).to(root.device)
            if near is None and bool(outside.any()):
                near = _heaviest(X, zeta)
            if near is not None:
                sums += zeta.mT @ (X - near)
        self.origin = _mean(sums) if near is None else near + _mean(sums)

    def _pass(self) -> list[Tensor]:
        """The triangle of the rows in no set; the others with the numbers of their sets."""
        found = []
        for part in self.solved.blocks("refits"):
            number, rows = self.number[part.rows].to(part.X.device), self._read(part)
            X, root, Y = rows
            weighted = root * torch.cat([X, Y], -1) * (number < 0).unsqueeze(-1)
            self.outside = triangle(torch.cat([self.outside, weighted]))
            inside = (number >= 0) & (not self.large)
            found.append([t[inside] for t in (number, *rows)])
        return [torch.cat(parts) for parts in zip(*found, strict=True)]

    def _gather(self) -> tuple[_Left, Tensor, int]:
        """The rows of all processes, the number of the set of each, and the first of this process."""
        others, device = self.solved.others, self.outside.device
        host = device if others.count == 1 else torch.device("cpu")
        if self.bias:
            others.run(self._move_origin)
            self.origin = others.gather(self.origin.to(host))[0].to(device)  # any will do, if it is the same
        number, *rows = others.run(self._pass)
        first = sum(others.gather(len(self.rows))[: others.rank])
        own = [t.to(host) for t in (self.outside, number + first, *rows)]
        everyone = (torch.cat(t).to(device) for t in zip(*others.gather(own), strict=True))
        outside, number, X, root, Y = everyone
        return _Left(triangle(outside), X, root, Y, self.bias), number, first

    def solve(self) -> Iterator[tuple[Refitted, Tensor, Tensor]]:
        """The sets of this process, refitted, with their residuals (s, c) and variances (s, 1)."""
        left, number, first = self._gather()
        for k, rows in enumerate(self.rows, first):
            inside = number == k
            mean, F, coef = left.without(inside, self.guard)
            own = tuple(t[inside] for t in left[1:4])
            if self.large:
                own = self._read(self.solved.stream.take(self.solved.function, rows))
            X, root, Y = own
            V, zeta = X - mean, root.square()
            half = torch.linalg.solve_triangular(F.mT, V.mT, upper=False)
            variance = self.reg * (half.square().sum(0).unsqueeze(-1) + 1 / zeta)
            spread = torch.linalg.solve_triangular(F, half, upper=True)
            features, centre = (X + self.origin).mT, (self.origin, mean)
            one = Refitted(self.r, self.j, rows, features, zeta[:, 0], Y, centre, coef, spread)
            yield one, Y - V @ coef, variance
