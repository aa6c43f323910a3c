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
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from torchloo.blocks import NOT_DEFINITE
from torchloo.factors import root_of, triangle, with_derivatives
from torchloo.guards import Guard
from torchloo.primal.block import Block
from torchloo.primal.collective import Alone
from torchloo.primal.machines import Machines
from torchloo.primal.sink import Sink

if TYPE_CHECKING:
    from torchloo.primal.solved import StreamFit

__all__ = ["Lost", "Refitted", "refit", "refit_at_once"]

# So many rows in sets that are refitted together: each set is refitted with those of the others.
_CHUNK = 1 << 8

Lost = dict[tuple[int, int], list[tuple[Tensor, bool]]]
"""Sets of rows, and whether they have no more rows than features, by regularisation and output."""


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
    """Targets, (s, c)."""
    spread: Tensor
    """C_L^{-1} X, (p', s)."""


class _Set(NamedTuple):
    """Rows that are left out together."""

    D: Tensor
    """Features about the mean, and a row of ones for the bias, (p', s)."""
    zeta: Tensor
    """Weights, (s,)."""
    Y: Tensor
    """Targets, (s, c)."""

    @property
    def weighted(self) -> Tensor:
        """sqrt(zeta) (x, y), (s, p' + c)."""
        return self.zeta.sqrt().unsqueeze(-1) * torch.cat([self.D.mT, self.Y], -1)


class _Left(NamedTuple):
    """What is left to learn from without a set: the triangle of some rows, and other rows (z, 1, y)."""

    outside: Tensor
    """(m, p + bias + c)."""
    Z: Tensor
    """Features, (k, p)."""
    root: Tensor
    """Square roots of the weights, (k, 1)."""
    Y: Tensor
    """(k, c)."""
    bias: bool

    def mean(self) -> Tensor:
        """That of the features, (1, p), with the weights; zeros without a bias."""
        p = self.Z.shape[-1]
        if not self.bias:
            return torch.zeros_like(self.outside[:1, :p])
        zeta, ones = self.root.square(), self.outside[:, p : p + 1]
        total = zeta.sum() + ones.square().sum()
        return (zeta.mT @ self.Z + ones.mT @ self.outside[:, :p]) / total

    def solve(self, mean: Tensor, guard: Guard) -> tuple[Tensor, Tensor]:
        """F (p', p') and coefficients (p', c) of Note [refits by triangles], for features about a mean."""
        p, outside = self.Z.shape[-1], self.outside.clone()
        parts = [self.Z - mean, self.Y]
        if self.bias:
            outside[:, :p] -= outside[:, p : p + 1] * mean
            parts.insert(1, torch.ones_like(self.root))
        F = triangle(torch.cat([outside, self.root * torch.cat(parts, -1)]))
        p = p + self.bias
        F, d = F[:p, :p], F[:p, p:]
        limit = p * torch.finfo(F.dtype).eps * torch.linalg.vector_norm(F, dim=0)
        guard.require(F.diagonal().abs() > limit, NOT_DEFINITE)
        return F, torch.linalg.solve_triangular(F, d, upper=True)


def _mean(Z: Tensor, zeta: Tensor) -> Tensor:
    """Mean (1, p) of features (n, p) with weights (n, 1); zeros where all are 0."""
    total = zeta.sum()
    return zeta.mT @ Z / torch.where(total > 0, total, 1.0)


def _about(X: Tensor, mean: Tensor) -> Tensor:
    """Features (n, p) about a mean (1, p); rows with a bias, (z, 1), keep it."""
    return X - torch.nn.functional.pad(mean, (0, X.shape[-1] - mean.shape[-1]))


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
            origin = _mean(Z, others.square()) if bias else torch.zeros_like(Z[:1])
            outside = triangle(torch.cat([others * torch.cat([_about(X, origin), Y], -1), penalty]))
        for rows in some:
            with torch.no_grad():
                kept = union[~torch.isin(union, rows)]
                left = _Left(outside, Z[kept] - origin, root[kept], Y[kept], bias)
                mean = left.mean()
                F, coef = left.solve(mean, guard)
                unit = torch.eye(len(F), dtype=F.dtype, device=F.device)
                T = torch.linalg.solve_triangular(F.mT, unit, upper=False)
            V_L = _about(_about(X[rows], origin), mean)
            e = Y[rows] - V_L @ coef
            if torch.is_grad_enabled() and any(t.requires_grad for t in (Z, R, root, Y)):
                V = root.index_fill(0, rows, 0.0) * _about(X, origin + mean)
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
        outputs, sets = machines.outputs_of(j), lost.get((r, j), [])
        for some, large in _rounds(sets, max(solved.size, len(solved.moments.S) + 1), others):
            work = _Round(solved, machines.regs[r, j], outputs, some, large)
            for rows, own, residuals, variance, spread in work.solve():
                sink.overwrite(rows, r, j, outputs, residuals, variance)
                refitted.append(Refitted(r, j, rows, own.D, own.zeta, own.Y, spread))
            others.together(work.guard.check)
    return refitted


def _rounds(
    sets: list[tuple[Tensor, bool]], limit: int, others: Alone
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
        self, solved: "StreamFit", reg: Tensor, outputs: slice, sets: list[Tensor], large: bool
    ) -> None:
        self.solved, self.reg, self.outputs, self.rows, self.large = solved, reg, outputs, sets, large
        n, p = solved.stream.n, len(solved.moments.S)
        assert n is not None
        self.guard = Guard(solved.function)
        self.number = torch.full((n,), -1, dtype=torch.int32, device="cpu")  # which set a row is in
        for k, rows in enumerate(sets):
            self.number[rows] = k
        self.p = p + solved.moments.centre
        columns = self.p + solved.moments.T[:, outputs].shape[1]
        self.outside = solved.moments.S.new_zeros(columns, columns)
        self.origin = solved.moments.S.new_zeros(p, 1)  # from the mean of all rows to that of those in no set
        if solved.others.rank == 0:  # the penalty counts once, whatever the number of processes
            self.outside.diagonal()[:p] = reg.sqrt()

    def _set_of(self, part: Block) -> _Set:
        expansion, moments = self.solved.expansion, self.solved.moments
        D = expansion.features(expansion.columns(part.X)).sub_(moments.mean_z).sub_(self.origin)
        if moments.centre:
            D = torch.cat([D, torch.ones_like(D[:1])])
        return _Set(D, part.weight.double(), part.Y.double()[:, self.outputs])

    def _move_origin(self) -> None:
        """Find the mean of the rows in no set."""
        sums = torch.zeros_like(self.outside[:1, : self.p].mT)
        for part in self.solved.blocks("refits"):
            rows = self._set_of(part)
            outside = self.number[part.rows].to(part.X.device) < 0
            sums += rows.D @ (rows.zeta * outside).unsqueeze(-1)
        self.origin = sums[:-1] / torch.where(sums[-1] > 0, sums[-1], 1.0)

    def _pass(self) -> list[_Set]:
        """The triangle of the rows in no set, and the sets themselves."""
        found: list[list[_Set]] = [[] for _ in self.rows]
        for part in self.solved.blocks("refits"):
            number, rows = self.number[part.rows].to(part.X.device), self._set_of(part)
            for k in [] if self.large else number[number >= 0].unique().tolist():
                at = number == k
                found[k].append(_Set(rows.D[:, at], rows.zeta[at], rows.Y[at]))
            weighted = rows.weighted * (number < 0).unsqueeze(-1)
            self.outside = triangle(torch.cat([self.outside, weighted]))
        parts = (zip(*parts, strict=True) for parts in found if parts)
        return [_Set(torch.cat(D, 1), torch.cat(zeta), torch.cat(Y)) for D, zeta, Y in parts]

    def _gather(self) -> tuple[list[_Set], int]:
        """The sets of all processes, and how many come before those of this one; triangles are joined."""
        others, device = self.solved.others, self.outside.device
        if self.solved.moments.centre:
            others.together(self._move_origin)
            if others.count > 1:
                self.origin = others.gather(self.origin.cpu())[0].to(device)  # any will do, if it is the same
        own = others.together(self._pass)
        if others.count == 1:
            return own, 0
        everyone = others.gather((self.outside.cpu(), [_Set(*(t.cpu() for t in s)) for s in own]))
        self.outside = triangle(torch.cat([outside.to(device) for outside, _ in everyone]))
        first = sum(len(sets) for _, sets in everyone[: others.rank])
        return [_Set(*(t.to(device) for t in s)) for _, sets in everyone for s in sets], first

    def solve(self) -> Iterator[tuple[Tensor, _Set, Tensor, Tensor, Tensor]]:
        """Rows (s,) of this process, their features, residuals (s, c), variances (s, 1) and C_L^{-1} X."""
        sets, first = self._gather()
        for k, rows in enumerate(self.rows, first):
            left = self._without(sets, k)
            mean = left.mean()
            F, coef = left.solve(mean, self.guard)
            own = self._set_of(self.solved.stream.take(self.solved.function, rows)) if self.large else sets[k]
            X = _about(own.D.mT, mean)  # (s, p')
            half = torch.linalg.solve_triangular(F.mT, X.mT, upper=False)
            variance = self.reg * (half.square().sum(0) + 1 / own.zeta)
            spread = torch.linalg.solve_triangular(F, half, upper=True)
            if left.bias:  # back to features about the mean of all rows
                spread[-1] -= ((self.origin.mT + mean) @ spread[:-1])[0]
            order = rows if self.large else rows.sort().values  # that of the passes
            all_rows = own._replace(D=_about(own.D.mT, -self.origin.mT).mT)
            yield order, all_rows, own.Y - X @ coef, variance.unsqueeze(-1), spread

    def _without(self, sets: list[_Set], k: int) -> _Left:
        """What is left without set k."""
        bias, D = bool(self.solved.moments.centre), self.outside[:0, : self.p].mT
        kept = [s for other, s in enumerate(sets) if other != k]
        Z = torch.cat([D, *(s.D for s in kept)], 1).mT
        zeta = torch.cat([self.outside.new_zeros(0), *(s.zeta for s in kept)])
        Y = torch.cat([self.outside[:0, self.p :], *(s.Y for s in kept)])
        return _Left(self.outside, Z[:, : self.p - bias], zeta.sqrt().unsqueeze(-1), Y, bias)
