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

from torchloo.clusters import Partition
from torchloo.precision import full_precision

__all__ = ["Primal", "primal"]

# Below this 1 - h the form has lost too many of the 16 digits, and the rows are refitted.
_REFIT_BELOW = 1e-8


def _normal(Z: Tensor, R: Tensor, weight: Tensor) -> Tensor:
    """C = R + Z^T Omega Z, (..., p, p)."""
    return R + Z.mT @ (weight.unsqueeze(-1) * Z)


def _solve(L: Tensor, V: Tensor) -> Tensor:
    """C^{-1} V from the factor L of C = L L^T; a diagonal factor comes as a vector (..., p)."""
    if L.ndim < V.ndim:
        return V / L.square().unsqueeze(-1)
    return torch.cholesky_solve(V, L)


def _graph_factor(Z: Tensor, R: Tensor, weight: Tensor, L: Tensor) -> Tensor:
    """The factor that was saved, or one on differentiable operations where a graph is wanted."""
    return torch.linalg.cholesky(_normal(Z, R, weight)) if torch.is_grad_enabled() else L


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
            if L.ndim < Z.ndim:
                root = Z / L.unsqueeze(-2)
            else:
                root = torch.linalg.solve_triangular(L, Z.mT, upper=False).mT  # (..., n, p)
            blocks = []
            for rows in Partition.from_index(index).groups:
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
        partition = Partition.from_index(tuple(index))
        zeta = weight.unsqueeze(-1)
        symmetric = [(block + block.mT) / 2 for block in D]
        diagonals = [block.diagonal(dim1=-2, dim2=-1).unsqueeze(-1) for block in D]
        with full_precision(Z):
            L = _graph_factor(Z, R, weight, L)
            N = zeta * _solve(L, Z.mT).mT  # (..., n, p)
            G = partition.block_diagonal_times(symmetric, N)
            Q = N.mT @ G
            ZQ = Z @ Q
            zetabar = partition.scatter(diagonals)[..., 0] - (Z * (2 * G - ZQ)).sum(-1)
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
    info: Tensor

    def blocks(self, partition: Partition) -> tuple[Tensor, list[Tensor]]:
        """a = P Y, and diagonal blocks of P, (..., g, s, s) for each size; both differentiable."""
        blocks = _Blocks.apply(self.Z, self.R, self.weight, self.factor, *partition.index)
        return self.dual, [block / self.reg[..., None, None, None] for block in blocks]

    def cancelled(self, blocks: list[Tensor], partition: Partition) -> list[Tensor]:
        """Which sets (..., g) of each size have lost their 1 - h to rounding.

        For larger sets, 1 - h is the smallest pivot of I - H_LL.
        """
        flags = []
        for rows, block in zip(partition.groups, blocks, strict=True):
            root = (self.reg[..., None, None] / self.weight[..., rows]).sqrt().unsqueeze(-1)
            remainder = (root * block * root.mT).detach()  # (..., g, s, s), I - H_LL
            L, info = torch.linalg.cholesky_ex(remainder)
            pivot = L.diagonal(dim1=-2, dim2=-1).square().amin(-1)
            flags.append((info != 0) | ~(pivot > _REFIT_BELOW))
        return flags

    def refit(self, problem: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Held-out residuals (s, c) and variances (s, 1) of rows of one problem of the batch, refitted.

        With C the normal matrix of the other rows, P_LL^{-1} = reg (Omega_L^{-1} + Z_L C^{-1} Z_L^T):
        nothing cancels. Differentiable by autograd.
        """
        Z, R, weight, Y = (
            t.reshape(-1, *t.shape[1 - k :])[problem]
            for t, k in ((self.Z, 3), (self.R, 3), (self.weight, 2), (self.Y, 3))
        )
        reg = self.reg.flatten()[problem]
        others = weight * torch.ones_like(weight).index_fill(0, rows, 0.0)  # (n,)
        L = torch.linalg.cholesky(_normal(Z, R, others))
        p = torch.cholesky_solve(Z.mT @ (others.unsqueeze(-1) * Y), L)
        root = torch.linalg.solve_triangular(L, Z[rows].mT, upper=False)  # (p, s)
        variance = reg * (root.square().sum(0) + 1 / weight[rows])
        return Y[rows] - Z[rows] @ p, variance.unsqueeze(-1)


def primal(
    Z: Tensor, R: Tensor, weight: Tensor, Y: Tensor, reg: Tensor, factor: Tensor | None = None
) -> Primal:
    """Solve Note [primal form] in float64.

    Args:
        Z: (..., n, p), R: (..., p, p), weight: (..., n), Y: (..., n, c) and reg: (...), with equal
            batch dimensions. reg only sets the units of `dual` and of the blocks.
        factor: the Cholesky factor of C where it is known, (..., p, p), or (..., p) if diagonal.

    Differentiable in all of them but the factor, to every order. Cost n p^2, or n p with a diagonal
    factor; memory n p + p^2 numbers.
    """
    Z, R, weight, Y, reg = (t.double() for t in (Z, R, weight, Y, reg))
    info = torch.zeros_like(reg, dtype=torch.int32)
    if factor is None:
        with torch.no_grad(), full_precision(Z):
            factor, info = torch.linalg.cholesky_ex(_normal(Z, R, weight))
    p, a = _Coefficients.apply(Z, R, weight, Y, factor)
    return Primal(Z, R, weight, Y, reg, p, a / reg[..., None, None], factor, info)
