"""The dual closed form: coefficients and blocks of P from one Cholesky factorisation.

Note [dual form]
With M = K + diag(ridge), ridge_i = reg / weight_i, the machine without a bias has P = M^{-1}. An
unpenalised bias borders M with a column of ones; eliminating it leaves

    P = M^{-1} - e e^T,    e = M^{-1} 1 / sqrt(1^T M^{-1} 1),    b = q^T Y,    q = e / 1^T e.

In both, a = P Y are the coefficients, Y - Yhat = ridge * a, and Note [held-out residual] in
smoothers.py needs nothing but a and diagonal blocks of P. No 1 - h appears, so nothing cancels.

Note [dual backward]
dP = -P dM P, with or without a bias, since P is a block of the inverse of the (bordered) M. So
cotangents abar of a, bbar of b and D (block-diagonal, symmetric) of the blocks of P give

    U = P abar + q bbar^T,    Ybar = U,    Mbar = -P D P - (U a^T + a U^T) / 2,
    Kbar = Mbar,              ridgebar = diag(Mbar).

Every term is symmetric: K is read as a symmetric matrix. Under create_graph the same formulas
are evaluated on differentiable operations, so derivatives of every order exist.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import Function

from torchloo.clusters import Partition
from torchloo.precision import full_precision

__all__ = ["Dual", "congruence", "dual"]

# Width of the panels in which triangular and symmetric products skip the half that is not needed.
_PANEL = 256


def _panels(n: int) -> list[tuple[int, int]]:
    return [(start, min(start + _PANEL, n)) for start in range(0, n, _PANEL)]


def _shifted(K: Tensor, ridge: Tensor) -> Tensor:
    """M = K + diag(ridge), in one copy."""
    diagonal = K.diagonal(dim1=-2, dim2=-1) + ridge
    return torch.diagonal_scatter(K, diagonal, dim1=-2, dim2=-1)


def _border(L: Tensor, bias: bool) -> Tensor:
    """e of Note [dual form], (..., n, 1); zeros without a bias."""
    ones = torch.ones_like(L[..., :1])
    if not bias:
        return torch.zeros_like(ones)
    eta = torch.cholesky_solve(ones, L)
    return eta / eta.sum(-2, keepdim=True).sqrt()


def _apply(L: Tensor, e: Tensor, V: Tensor) -> Tensor:
    """P V for V (..., n, c)."""
    return torch.cholesky_solve(V, L) - e @ (e.mT @ V)


def _offset(e: Tensor, bias: bool) -> Tensor:
    """q of Note [dual form], (..., n, 1)."""
    return e / e.sum(-2, keepdim=True) if bias else e


def _triangular_inverse(L: Tensor) -> Tensor:
    """L^{-1} by panels of columns, n^3/3 operations: each panel skips the rows that are zero."""
    n = L.shape[-1]
    S = torch.zeros_like(L)
    for start, stop in _panels(n):
        unit = torch.eye(n - start, stop - start, dtype=L.dtype, device=L.device)
        tail = L[..., start:, start:]
        S[..., start:, start:stop] = torch.linalg.solve_triangular(tail, unit, upper=False)
    return S


def _mirror(upper: Tensor) -> Tensor:
    """Fill the blocks below the diagonal from those above, in place."""
    for start, stop in _panels(upper.shape[-1]):
        upper[..., start:stop, :start] = upper[..., :start, start:stop].mT
    return upper


def _annihilator(S: Tensor, e: Tensor) -> Tensor:
    """P = S^T S - e e^T for lower triangular S, skipping its zeros: n^3/3 operations."""
    P = torch.empty_like(S)
    for start, stop in _panels(S.shape[-1]):
        panel = S[..., start:, :stop].mT @ S[..., start:, start:stop]
        P[..., :stop, start:stop] = panel - e[..., :stop, :] @ e[..., start:stop, :].mT
    return _mirror(P)


def congruence(B: Tensor, D: list[Tensor], partition: Partition) -> Tensor:
    """B^T D B for block-diagonal symmetric D, computing half of it."""
    product = torch.empty_like(B)
    for start, stop in _panels(B.shape[-1]):
        DB = partition.block_diagonal_times(D, B[..., start:stop])  # (..., n, panel)
        product[..., :stop, start:stop] = B[..., :stop].mT @ DB
    return _mirror(product)


class _Coefficients(Function):
    """(K, ridge, Y) -> coefficients a, bias b; see Note [dual backward]."""

    generate_vmap_rule = True

    @staticmethod
    def forward(K: Tensor, ridge: Tensor, Y: Tensor, bias: bool) -> tuple[Tensor, ...]:
        with full_precision(K):
            L, info = torch.linalg.cholesky_ex(_shifted(K, ridge))
            e = _border(L, bias)
            return _apply(L, e, Y), (_offset(e, bias).mT @ Y)[..., 0, :], L, e, info

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        K, ridge, _, ctx.bias = inputs
        a, _, L, e, info = output
        ctx.mark_non_differentiable(L, e, info)
        ctx.save_for_backward(K, ridge, a, L, e)

    @staticmethod
    def backward(ctx: Any, abar: Tensor, bbar: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        K, ridge, a, L, e = ctx.saved_tensors
        with full_precision(K):
            if torch.is_grad_enabled():
                L = torch.linalg.cholesky(_shifted(K, ridge))
                e = _border(L, ctx.bias)
            U = _apply(L, e, abar) + _offset(e, ctx.bias) @ bbar.unsqueeze(-2)  # (..., n, c)
            Kbar = None
            if ctx.needs_input_grad[0]:
                Kbar = torch.cat([U, a], -1) @ (-0.5 * torch.cat([a, U], -1)).mT
            return Kbar, -(U * a).sum(-1), U, None


class _Blocks(Function):
    """(K, ridge) -> diagonal blocks of P, (..., g, s, s) for each size s; see Note [dual backward]."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        K: Tensor, ridge: Tensor, L: Tensor, e: Tensor, bias: bool, partition: Partition
    ) -> tuple[Tensor, ...]:
        with full_precision(L):
            S = _triangular_inverse(L)
            blocks = []
            for rows in partition.groups:
                if rows.shape[-1] == 1:  # the squared norms of all columns, without a copy
                    block = torch.linalg.vector_norm(S, dim=-2).square()[..., rows].unsqueeze(-1)
                else:
                    columns = S.mT[..., rows, :]  # (..., g, s, n)
                    block = columns @ columns.mT
                border = e[..., rows, :]  # (..., g, s, 1)
                blocks.append(block - border @ border.mT)
            return S, *blocks

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        K, ridge, _, e, ctx.bias, ctx.partition = inputs
        ctx.mark_non_differentiable(output[0])
        ctx.save_for_backward(K, ridge, e, output[0])

    @staticmethod
    def backward(ctx: Any, _: Tensor, *D: Tensor) -> tuple[Tensor | None, ...]:
        K, ridge, e, S = ctx.saved_tensors
        symmetric = [(block + block.mT) / 2 for block in D]
        with full_precision(K):
            if torch.is_grad_enabled():
                L = torch.linalg.cholesky(_shifted(K, ridge))
                e = _border(L, ctx.bias)
                P = torch.cholesky_inverse(L) - e @ e.mT
                Mbar = -(P @ ctx.partition.block_diagonal_times(symmetric, P))
            else:
                Mbar = congruence(_annihilator(S, e), symmetric, ctx.partition).neg_()
        ridgebar = Mbar.diagonal(dim1=-2, dim2=-1)
        return Mbar if ctx.needs_input_grad[0] else None, ridgebar, None, None, None, None


class Dual(NamedTuple):
    """A factorised dual problem: its solution, and P by blocks on demand."""

    K: Tensor
    ridge: Tensor
    dual: Tensor
    bias: Tensor
    factor: Tensor
    border: Tensor
    info: Tensor
    has_bias: bool

    def blocks(self, partition: Partition) -> list[Tensor]:
        """Diagonal blocks of P, (..., g, s, s) for each size of the partition, differentiable."""
        _, *blocks = _Blocks.apply(self.K, self.ridge, self.factor, self.border, self.has_bias, partition)
        return blocks


def dual(K: Tensor, ridge: Tensor, Y: Tensor, bias: bool) -> Dual:
    """Solve (K + diag(ridge)) a + b 1 = Y, 1^T a = 0 if there is a bias; Note [dual form].

    Args:
        K: (..., n, n), ridge: (..., n) and Y: (..., n, c), with equal batch dimensions.
        bias: whether there is an unpenalised bias.

    Differentiable in K, ridge and Y, to every order. Cost n^3/3 for the factor and as much again
    for the diagonal of P; memory 2 n^2 numbers.
    """
    a, b, L, e, info = _Coefficients.apply(K, ridge, Y, bias)
    return Dual(K, ridge, a, b, L, e, info, bias)
