"""The primal closed form: ridge regression on explicit features, and blocks of its P.

Note [primal form]
min over p of sum_i zeta_i |y_i - z_i^T p|^2 + p^T R p. With Omega = diag(zeta):

    C = R + Z^T Omega Z,    p = C^{-1} Z^T Omega Y,    e = Y - Z p,
    P = Omega - Omega Z C^{-1} Z^T Omega,    a = P Y = Omega e.

This P plays the part of the dual one (Note [dual form]; it is reg times it where both exist), so
Note [held-out residual] holds as it stands. Here P_ii = zeta_i (1 - h_i) does cancel as h -> 1:
everything is computed in float64, and rows whose 1 - h is too small for that are refitted.

All rows stand together here, and a batch of problems is a leading axis. Every operation is one that torch
differentiates, to every order and under its transforms; backward.py has the gradient of order one by blocks.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from torchloo.blocks import NOT_DEFINITE
from torchloo.clusters import Partition
from torchloo.factors import (
    ILL_CONDITIONED,
    REFIT_BELOW,
    condition,
    lower_factor,
    root_of,
    trusted,
    whitened,
    with_derivatives,
)
from torchloo.guards import Guard, values_visible
from torchloo.leave_out_sets import LeaveOutSets, Parts
from torchloo.precision import full_precision
from torchloo.primal.leaving_out import LeftOut, block_of_rest, leave_out_large, leave_out_small
from torchloo.primal.refit import refit_at_once

__all__ = ["Primal", "centred", "normal", "primal", "with_ones"]


class Primal(NamedTuple):
    """A factorised primal problem: its solution, and P by blocks on demand.

    `dual` and the blocks are divided by `reg`, which makes them those of the dual form.
    """

    Z: Tensor
    R: Tensor
    weight: Tensor
    Y: Tensor
    reg: Tensor
    coef: Tensor
    dual: Tensor
    factor: Tensor
    least: Tensor
    """Sets whose 1 - h is below this are refitted, (...)."""

    def _rows(self) -> tuple[Tensor, Tensor, Tensor]:
        """Whitened rows (..., n, p), roots of weights (..., n, 1) and residuals; Note [leaving sets out]."""
        scale = self.weight.sqrt().unsqueeze(-1)
        return scale * whitened(self.factor, self.Z.mT).mT, scale, self.dual * self.noise

    @property
    def noise(self) -> Tensor:
        """reg / weight, (..., n, 1)."""
        return self.reg[..., None, None] / self.weight.unsqueeze(-1)

    def blocks(self, partition: Partition) -> tuple[Tensor, list[Tensor]]:
        """a = P Y, and diagonal blocks of P, (..., g, s, s) for each size; both differentiable."""
        B, scale, _ = self._rows()
        blocks = []
        for B_L, scale_L in zip(partition.gather(B), partition.gather(scale), strict=True):
            block = scale_L * block_of_rest(B_L) * scale_L.mT
            blocks.append(block / self.reg[..., None, None, None])
        return self.dual, blocks

    def left_out(self, sets: LeaveOutSets, guard: Guard) -> Parts:
        """Held-out residuals (..., m, c), variances (..., m, 1) of rows to predict, and the refitted ones.

        Of sets that may overlap. Cost n p^2, and s p min(s, p) for each set; memory 4 n p numbers.
        """
        reg = self.reg[..., None, None]

        def one(rows: Tensor, B: Tensor, scale: Tensor, e: Tensor, total: Tensor) -> Parts:
            B_L, scale_L, e_L = (t[..., rows, :] for t in (B, scale, e))
            r, inverse, lost = self._left_out(B_L, scale_L, e_L, total)
            if values_visible(lost) and bool(lost.any()):
                index = lost.nonzero(as_tuple=True)
                found = []
                for *problem, number in zip(*(axis.tolist() for axis in index), strict=True):
                    Z, R, weight, Y = (t[tuple(problem)] for t in (self.Z, self.R, self.weight, self.Y))
                    found.append(refit_at_once(Z, R, weight, Y, [rows[number]], guard))
                r, inverse = (
                    t.index_put(index, torch.stack(part))
                    for t, part in zip((r, inverse), zip(*found, strict=True), strict=True)
                )
            return r, inverse, lost

        B, scale, e = self._rows()
        r, inverse, refitted = sets.leave_out(B, B.shape[-1], one, B, scale, e, self._total(B))
        return r, inverse * reg, refitted

    def _total(self, B: Tensor) -> Tensor:
        """F^{-1} C F^{-T} as it is found; see `leave_out_large`."""
        return whitened(self.factor, whitened(self.factor, self.R).mT) + B.mT @ B

    def _left_out(self, B: Tensor, scale: Tensor, e: Tensor, total: Tensor | None) -> LeftOut:
        """Sets of one size, (..., g, s, p), (..., g, s, 1) and (..., g, s, c); Note [leaving sets out]."""
        least = self.least.unsqueeze(-1)
        if total is None or B.shape[-2] <= B.shape[-1]:
            return leave_out_small(B, scale, e, least)
        return leave_out_large(B, scale, e, least, total)

    def with_targets(self, Y: Tensor, guard: Guard) -> "Primal":
        """The same factorisation with other targets (..., n, c')."""
        other = primal(self.Z, self.R, self.weight, Y, self.reg, guard, self.factor)
        return other._replace(least=self.least)

    def leave_out(self, sets: Tensor, guard: Guard) -> Tensor:
        """Held-out residuals (..., g, s, c) of disjoint sets (g, s) of rows; see `held_out`."""
        return self.held_out(Partition((sets,)), guard)[0][..., sets, :]

    def weights_at(self, z: Tensor) -> Tensor:
        """w (..., q, n) of Note [weights at a new point], for features z (..., q, p)."""
        return (self.weight.unsqueeze(-1) * (self.Z @ _solve(self.factor, z.mT))).mT

    def variance_at(self, z: Tensor) -> Tensor:
        """Note [variance at a new point], (..., q), for features z (..., q, p)."""
        return self.reg.unsqueeze(-1) * whitened(self.factor, z.mT).square().sum(-2)

    def held_out(self, partition: Partition, guard: Guard) -> tuple[Tensor, Tensor, Tensor]:
        """Held-out residuals (..., n, c), variances (..., n, 1), and which rows (..., n) were refitted.

        By Note [leaving sets out]; where 1 - h is lost to rounding, by Note [refits by triangles].
        """
        n, p = self.Z.shape[-2:]
        B, scale, e = self._rows()
        total = self._total(B) if partition.groups[-1].shape[-1] > p else None
        found = [
            self._left_out(B_L, scale_L, e_L, total)
            for B_L, scale_L, e_L in zip(*map(partition.gather, (B, scale, e)), strict=True)
        ]
        residuals, inverses, lost = map(list, zip(*found, strict=True))
        marks = [
            flag[..., None, None].expand(*flag.shape, rows.shape[-1], 1)
            for flag, rows in zip(lost, partition.groups, strict=True)
        ]
        refitted = partition.scatter(marks, n)[..., 0]
        r = partition.scatter(residuals, n)
        variance = partition.scatter(inverses, n) * self.reg[..., None, None]
        if values_visible(self.Y) and bool(refitted.any()):
            r, variance = self._refitted(partition, lost, r, variance, guard)
        return r, variance, refitted

    def _refitted(
        self, partition: Partition, lost: list[Tensor], r: Tensor, variance: Tensor, guard: Guard
    ) -> tuple[Tensor, Tensor]:
        """Residuals (..., n, c) and variances (..., n, 1), the lost sets (..., g) of each size refitted."""
        flat = [t.reshape(-1, *t.shape[self.reg.ndim :]) for t in (self.Z, self.R, self.weight, self.Y)]
        residuals, variances = (t.reshape(-1, *t.shape[-2:]) for t in (r, variance))
        flags, reg = [flag.reshape(-1, flag.shape[-1]) for flag in lost], self.reg.flatten()
        for problem in torch.stack([flag.any(-1) for flag in flags]).any(0).nonzero()[:, 0].tolist():
            sets = [
                rows_L
                for rows, flag in zip(partition.groups, flags, strict=True)
                for rows_L in rows[flag[problem]]
            ]
            Z, R, weight, Y = (t[problem] for t in flat)
            r_L, inverse = refit_at_once(Z, R, weight, Y, sets, guard)
            rows = torch.cat(sets)
            index = (torch.full_like(rows, problem), rows)
            residuals = residuals.index_put(index, r_L)
            variances = variances.index_put(index, reg[problem] * inverse)
        return residuals.reshape(r.shape), variances.reshape(variance.shape)


def normal(Z: Tensor, R: Tensor, weight: Tensor) -> Tensor:
    """C = R + Z^T Omega Z, (..., p, p)."""
    return R + Z.mT @ (weight.unsqueeze(-1) * Z)


def _factor(C: Tensor, Z: Tensor, R: Tensor, weight: Tensor, guard: Guard) -> tuple[Tensor, Tensor]:
    """The Cholesky factor of C, (..., p, p), and the 1 - h that it can still tell from 0, (...)."""
    L, info = torch.linalg.cholesky_ex(C)
    with torch.no_grad():
        estimate = condition(L)
        if values_visible(L) and not guard.asks(estimate < ILL_CONDITIONED):
            rows = torch.cat([weight.sqrt().unsqueeze(-1) * Z, root_of(R, guard)], -2)
            better = lower_factor(rows, guard)
            least = trusted(condition(better).sqrt())
        else:
            guard.require(info == 0, NOT_DEFINITE)
            return L, trusted(estimate)
    return with_derivatives(better, C), least


def primal(
    Z: Tensor,
    R: Tensor,
    weight: Tensor,
    Y: Tensor,
    reg: Tensor,
    guard: Guard,
    factor: Tensor | None = None,
) -> Primal:
    """Solve Note [primal form] in float64.

    Args:
        Z: (..., n, p), R: (..., p, p), weight: (..., n), Y: (..., n, c) and reg: (...), with equal
            batch dimensions. reg only sets the units of `dual` and of the blocks.
        guard: demands on the values; that the factorisation succeeds becomes one of them.
        factor: the Cholesky factor of C where it is known, (..., p, p), or (..., p) if diagonal.

    Differentiable in all of them but the factor, to every order. Cost n p^2, or n p with a diagonal
    factor and without a graph; memory 2 n p + p^2 numbers, twice that and more with a graph.
    """
    Z, R, weight, Y, reg = (t.double() for t in (Z, R, weight, Y, reg))
    least, zeta = torch.full_like(reg, REFIT_BELOW), weight.unsqueeze(-1)
    with full_precision(Z):
        if factor is None or not factor.requires_grad:
            C = normal(Z, R, weight)
            if factor is None:
                factor, least = _factor(C, Z, R, weight, guard)
            else:
                factor = with_derivatives(factor, C)
        # A step of refinement takes the squared condition of C out of p, for two thin products; as it goes
        # to the solution from anywhere, the first one needs no graph.
        with torch.no_grad():
            first = _solve(factor, Z.mT @ (zeta * Y))
        p = first + _solve(factor, Z.mT @ (zeta * (Y - Z @ first)) - R @ first)
        a = zeta * (Y - Z @ p)
    return Primal(Z, R, weight, Y, reg, p, a / reg[..., None, None], factor, least)


def _solve(L: Tensor, V: Tensor) -> Tensor:
    """C^{-1} V from the factor L of C = L L^T; a diagonal factor comes as a vector (..., p)."""
    if L.ndim < V.ndim:
        return V / L.square().unsqueeze(-1)
    return torch.cholesky_solve(V, L)


def centred(Z: Tensor, weight: Tensor | None, bias: bool) -> tuple[Tensor, Tensor]:
    """Features (..., n, d) about their weighted mean (..., 1, d), which is held constant, both in float64.

    An unpenalised bias absorbs any shift of the features, so this changes no output and no
    gradient; it keeps features far from the origin from losing their digits. Without a bias the
    shift is zero.
    """
    if not bias:
        zero = torch.zeros((), dtype=torch.float64, device=Z.device)
        return Z.double(), zero.expand(*Z.shape[:-2], 1, Z.shape[-1])
    if weight is None:
        mean = Z.detach().mean(-2, keepdim=True, dtype=torch.float64)
    else:
        zeta = weight.detach().unsqueeze(-1)
        mean = (zeta * Z.detach()).sum(-2, keepdim=True) / zeta.sum(-2, keepdim=True)
    return Z - mean, mean


def with_ones(Z: Tensor, reg: Tensor, bias: bool) -> tuple[Tensor, Tensor]:
    """Features with a column of ones for the bias, and the penalty R = reg diag(1, ..., 1, 0)."""
    penalised = torch.ones_like(Z[..., 0, :])
    if bias:
        Z = torch.cat([Z, torch.ones_like(Z[..., :1])], -1)
        penalised = torch.cat([penalised, torch.zeros_like(penalised[..., :1])], -1)
    return Z, torch.diag_embed(reg.unsqueeze(-1) * penalised)
