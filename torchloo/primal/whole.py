"""The primal closed form: ridge regression on explicit features, and blocks of its P.

Note [primal form]
min over p of sum_i zeta_i |y_i - z_i^T p|^2 + p^T R p. With Omega = diag(zeta):

    C = R + Z^T Omega Z,    p = C^{-1} Z^T Omega Y,    e = Y - Z p,
    P = Omega - Omega Z C^{-1} Z^T Omega,    a = P Y = Omega e.

This P plays the part of the dual one (Note [dual form]; it is reg times it where both exist), so
Note [held-out residual] holds as it stands. Here P_ii = zeta_i (1 - h_i) does cancel as h -> 1:
everything is computed in float64, and rows whose 1 - h is too small for that are refitted.

Note [primal backward]
By the envelope theorem applied to Y^T P Y, with E = I - Z C^{-1} Z^T Omega and N = Omega Z C^{-1},

    dP = E^T dOmega E - P dZ N^T - N dZ^T P + N dR N^T.

A cotangent D (block-diagonal, symmetric) of the blocks of P, with G = D N and Q = N^T G, gives

    Zbar = -2 Omega (G - Z Q),  Rbar = Q,  zetabar = diag(D) - rowsum(Z * (2 G - Z Q)).

Cotangents pbar of p and abar of a, with v = C^{-1} (pbar - Z^T Omega abar) and s = abar + Z v, give

    Zbar = a v^T - Omega s p^T,  Rbar = -(v p^T + p v^T) / 2,  zetabar = rowsum(s * e),  Ybar = Omega s.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import Function

from torchloo.autograd import apply
from torchloo.blocks import NOT_DEFINITE, solve_blocks
from torchloo.clusters import Partition
from torchloo.factors import ILL_CONDITIONED, REFIT_BELOW, condition, lower_factor, trusted
from torchloo.guards import Guard, values_visible
from torchloo.leave_out_sets import LeaveOutSets
from torchloo.precision import full_precision
from torchloo.primal.overlapping import leave_out_by_features
from torchloo.primal.sums import (
    is_lost,
    leave_out_large,
    leave_out_lost,
    normal,
    root_of,
    whitened,
    with_derivatives,
)

__all__ = ["Primal", "centred", "primal", "with_ones"]

_Parts = tuple[list[Tensor], list[Tensor], list[Tensor]]
"""Held-out residuals (..., g, s, c), variances (..., g, s, 1) and lost sets (..., g) for each size."""


def _solve(L: Tensor, V: Tensor) -> Tensor:
    """C^{-1} V from the factor L of C = L L^T; a diagonal factor comes as a vector (..., p)."""
    if L.ndim < V.ndim:
        return V / L.square().unsqueeze(-1)
    return torch.cholesky_solve(V, L)


def _graph_factor(Z: Tensor, R: Tensor, weight: Tensor, L: Tensor) -> Tensor:
    """The factor that was saved, or one on differentiable operations where a graph is wanted."""
    return torch.linalg.cholesky(normal(Z, R, weight)) if torch.is_grad_enabled() else L


class _Coefficients(Function):
    """(Z, R, weight, Y) -> p, a; see Note [primal backward]."""

    generate_vmap_rule = True

    @staticmethod
    def forward(Z: Tensor, R: Tensor, weight: Tensor, Y: Tensor, L: Tensor) -> tuple[Tensor, Tensor]:
        with full_precision(Z):
            zeta = weight.unsqueeze(-1)
            p = _solve(L, Z.mT @ (zeta * Y))
            # One step of refinement takes the squared condition of C out of p, for two thin products.
            p = p + _solve(L, Z.mT @ (zeta * (Y - Z @ p)) - R @ p)
            return p, zeta * (Y - Z @ p)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        Z, R, weight, _, L = inputs
        ctx.save_for_backward(Z, R, weight, L, *output)

    @staticmethod
    def backward(ctx: Any, pbar: Tensor, abar: Tensor) -> tuple[Tensor | None, ...]:
        Z, R, weight, L, p, a = ctx.saved_tensors
        zeta = weight.unsqueeze(-1)
        with full_precision(Z):
            L = _graph_factor(Z, R, weight, L)
            v = _solve(L, pbar - Z.mT @ (zeta * abar))  # (..., p, c)
            s = abar + Z @ v  # (..., n, c)
            Ybar = zeta * s
            outer = v @ p.mT
            Zbar = a @ v.mT - Ybar @ p.mT
            return Zbar, -(outer + outer.mT) / 2, (s * a / zeta).sum(-1), Ybar, None


class _Blocks(Function):
    """(Z, R, weight) -> diagonal blocks of P; see Note [primal backward]."""

    generate_vmap_rule = True

    @staticmethod
    def forward(Z: Tensor, R: Tensor, weight: Tensor, L: Tensor, *index: Tensor) -> tuple[Tensor, ...]:
        with full_precision(Z):
            root = whitened(L, Z.mT).mT  # (..., n, p)
            blocks = []
            for rows in index:
                zeta = weight[..., rows]  # (..., g, s)
                if rows.shape[-1] == 1:
                    h = zeta * root.square().sum(-1)[..., rows]
                    block = (zeta * (1 - h)).unsqueeze(-1)
                else:
                    T = zeta.unsqueeze(-1) * root[..., rows, :]  # (..., g, s, p)
                    block = torch.diag_embed(zeta) - T @ T.mT
                blocks.append(block)
            return tuple(blocks)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *D: Tensor) -> tuple[Tensor | None, ...]:
        Z, R, weight, L, *index = ctx.saved_tensors
        partition = Partition(tuple(index))
        zeta = weight.unsqueeze(-1)
        symmetric = [(block + block.mT) / 2 for block in D]
        diagonals = [block.diagonal(dim1=-2, dim2=-1).unsqueeze(-1) for block in D]
        with full_precision(Z):
            L = _graph_factor(Z, R, weight, L)
            N = zeta * _solve(L, Z.mT).mT  # (..., n, p)
            G = partition.block_diagonal_times(symmetric, N)
            Q = N.mT @ G
            ZQ = Z @ Q
            zetabar = partition.scatter(diagonals, Z.shape[-2])[..., 0] - (Z * (2 * G - ZQ)).sum(-1)
            return -2 * zeta * (G - ZQ), Q, zetabar, *[None] * (1 + len(index))


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

    @property
    def noise(self) -> Tensor:
        """reg / weight, (..., n, 1)."""
        return self.reg[..., None, None] / self.weight.unsqueeze(-1)

    def blocks(self, partition: Partition) -> tuple[Tensor, list[Tensor]]:
        """a = P Y, and diagonal blocks of P, (..., g, s, s) for each size; both differentiable."""
        blocks = apply(_Blocks, self.Z, self.R, self.weight, self.factor, *partition.groups)
        return self.dual, [block / self.reg[..., None, None, None] for block in blocks]

    def left_out(self, sets: LeaveOutSets, guard: Guard) -> tuple[Tensor, Tensor, Tensor]:
        """Held-out residuals (..., m, c), variances (..., m, 1) of rows to predict, and the refitted ones."""
        reg = self.reg[..., None, None]
        given = (self.Z, self.R, self.weight, self.Y)
        r, variance, refitted = leave_out_by_features(
            sets, given, self.dual * reg, self.factor, self.least, guard
        )
        return r, variance * reg, refitted

    def with_targets(self, Y: Tensor, guard: Guard) -> "Primal":
        """The same factorisation with other targets (..., n, c')."""
        other = primal(self.Z, self.R, self.weight, Y, self.reg, guard, self.factor)
        return other._replace(least=self.least)

    def leave_out(self, sets: Tensor, guard: Guard) -> Tensor:
        """Held-out residuals (..., g, s, c) of disjoint sets (g, s) of rows; see `held_out`."""
        return self.held_out(Partition((sets,)), guard)[0][..., sets, :]

    def weights_at(self, z: Tensor) -> Tensor:
        """w (..., q, n) of Note [weights at a new point], for features z (..., q, p)."""
        L = self._graph_factor()
        spread = torch.linalg.solve_triangular(L.mT, whitened(L, z.mT), upper=True)  # (..., p, q)
        return (self.weight.unsqueeze(-1) * (self.Z @ spread)).mT

    def variance_at(self, z: Tensor) -> Tensor:
        """Note [variance at a new point], (..., q), for features z (..., q, p)."""
        return self.reg.unsqueeze(-1) * whitened(self._graph_factor(), z.mT).square().sum(-2)

    def _graph_factor(self) -> Tensor:
        """The factor, with its derivatives where a graph is wanted."""
        inputs = (self.Z, self.R, self.weight)
        if not torch.is_grad_enabled() or not any(t.requires_grad for t in inputs):
            return self.factor
        return with_derivatives(self.factor, normal(*inputs))

    def held_out(self, partition: Partition, guard: Guard) -> tuple[Tensor, Tensor, Tensor]:
        """Held-out residuals (..., n, c), variances (..., n, 1), and which rows (..., n) were refitted.

        Sets of up to p rows by their blocks, larger ones by Note [large sets]; where their 1 - h is
        lost to rounding, by Note [leaving out by sums].
        """
        small, large = partition.split(self.Z.shape[-1])
        residuals, variances, lost = self._by_blocks(small, guard) if small.groups else ([], [], [])
        if large.groups:
            for parts, more in zip((residuals, variances, lost), self._by_sums(large), strict=True):
                parts += more
        n = self.Z.shape[-2]
        marks = [
            flag[..., None, None].expand(*flag.shape, rows.shape[-1], 1)
            for flag, rows in zip(lost, partition.groups, strict=True)
        ]
        refitted = partition.scatter(marks, n)[..., 0]
        r, variance = partition.scatter(residuals, n), partition.scatter(variances, n)
        if values_visible(self.Y) and bool(refitted.any()):
            r, variance = self._refitted(partition, lost, r, variance, guard)
        return r, variance, refitted

    def _by_blocks(self, partition: Partition, guard: Guard) -> _Parts:
        a, blocks = self.blocks(partition)
        lost = self._cancelled(blocks, partition)
        # A harmless block in place of a lost one: its quotient is thrown away, and so is its gradient.
        safe = [
            torch.where(flag[..., None, None], torch.diag_embed(torch.ones_like(block[..., 0])), block)
            for flag, block in zip(lost, blocks, strict=True)
        ]
        return *solve_blocks(partition.gather(a), safe, guard), lost

    def _by_sums(self, large: Partition) -> _Parts:
        reg = self.reg[..., None, None]
        residuals, variances, lost = leave_out_large(
            self.Z, self.R, self.weight, self.dual * reg, self.factor, self.least, large
        )
        return residuals, [variance * reg.unsqueeze(-1) for variance in variances], lost

    def _cancelled(self, blocks: list[Tensor], partition: Partition) -> list[Tensor]:
        """Which sets (..., g) of each size have lost their 1 - h."""
        flags = []
        for rows, block in zip(partition.groups, blocks, strict=True):
            root = (self.reg[..., None, None] / self.weight[..., rows]).detach().sqrt().unsqueeze(-1)
            flags.append(is_lost(root * block.detach() * root.mT, self.least))  # (..., g, s, s), I - H_LL
        return flags

    def _refitted(
        self, partition: Partition, lost: list[Tensor], r: Tensor, variance: Tensor, guard: Guard
    ) -> tuple[Tensor, Tensor]:
        """Residuals (..., n, c) and variances (..., n, 1), the lost sets (..., g) of each size refitted."""
        flat = [t.reshape(-1, *t.shape[self.reg.ndim :]) for t in (self.Z, self.R, self.weight, self.Y)]
        residuals, variances = (t.reshape(-1, *t.shape[-2:]) for t in (r, variance))
        flags, reg = [flag.reshape(-1, flag.shape[-1]) for flag in lost], self.reg.flatten()
        for problem in torch.stack([flag.any(-1) for flag in flags]).any(0).nonzero()[:, 0].tolist():
            sets = [rows[flag[problem]] for rows, flag in zip(partition.groups, flags, strict=True)]
            Z, R, weight, Y = (t[problem] for t in flat)
            rows, r_L, variance_L = leave_out_lost(Z, R, weight, Y, sets, guard)
            index = (torch.full_like(rows, problem), rows)
            residuals = residuals.index_put(index, r_L)
            variances = variances.index_put(index, reg[problem] * variance_L)
        return residuals.reshape(r.shape), variances.reshape(variance.shape)


def _factor(Z: Tensor, R: Tensor, weight: Tensor, guard: Guard) -> tuple[Tensor, Tensor]:
    """The Cholesky factor of C, (..., p, p), and the 1 - h that it can still tell from 0, (...)."""
    L, info = torch.linalg.cholesky_ex(normal(Z, R, weight))
    estimate = condition(L)
    if values_visible(L) and not guard.asks(estimate < ILL_CONDITIONED):
        L = lower_factor(torch.cat([weight.sqrt().unsqueeze(-1) * Z, root_of(R, guard)], -2), guard)
        return L, trusted(condition(L).sqrt())
    guard.require(info == 0, NOT_DEFINITE)
    return L, trusted(estimate)


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
    factor; memory 2 n p + p^2 numbers, 5 n p with the backward.
    """
    Z, R, weight, Y, reg = (t.double() for t in (Z, R, weight, Y, reg))
    least = torch.full_like(reg, REFIT_BELOW)
    if factor is None:
        with torch.no_grad(), full_precision(Z):
            factor, least = _factor(Z, R, weight, guard)
    p, a = apply(_Coefficients, Z, R, weight, Y, factor)
    return Primal(Z, R, weight, Y, reg, p, a / reg[..., None, None], factor, least)


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
