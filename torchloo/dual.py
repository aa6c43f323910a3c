"""The dual closed form: coefficients and blocks of P from one Cholesky factorisation.

Note [dual form]
With M = K + diag(ridge), ridge_i = reg / weight_i, the machine without a bias has P = M^{-1}. An
unpenalised bias borders M with a column of ones; eliminating it leaves

    P = M^{-1} - e e^T,    e = M^{-1} 1 / sqrt(1^T M^{-1} 1),    b = q^T Y,    q = e / 1^T e.

In both, a = P Y are the coefficients, Y - Yhat = ridge * a, and Note [held-out residual] in
smoothers.py needs nothing but a and diagonal blocks of P. No 1 - h appears, so nothing cancels as h -> 1.

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

from torchloo.blocks import solve_blocks
from torchloo.clusters import Partition
from torchloo.guards import Guard, values_visible
from torchloo.precision import full_precision

__all__ = ["Dual", "add_product", "congruence", "dual"]

# Width of the panels in which triangular and symmetric products skip the half that is not needed.
_PANEL = 192


def _panels(n: int, width: int = _PANEL) -> list[tuple[int, int]]:
    return [(start, min(start + width, n)) for start in range(0, n, width)]


def _shifted(K: Tensor, ridge: Tensor) -> Tensor:
    """M = K + diag(ridge), in one copy."""
    diagonal = K.diagonal(dim1=-2, dim2=-1) + ridge
    return torch.diagonal_scatter(K, diagonal, dim1=-2, dim2=-1)


def _factor(K: Tensor, ridge: Tensor) -> tuple[Tensor, Tensor]:
    """L with M = L L^T, and where the factorisation failed, (...); on a CPU in the memory of M."""
    M = _shifted(K, ridge).mT  # column by column, as LAPACK wants it
    if K.device.type != "cpu" or not values_visible(K, ridge):
        return torch.linalg.cholesky_ex(M)
    info = torch.empty(M.shape[:-2], dtype=torch.int32, device=K.device)
    return torch.linalg.cholesky_ex(M, out=(M, info))


def _solve(L: Tensor, V: Tensor) -> Tensor:
    """M^{-1} V; unlike cholesky_solve, without a copy of L."""
    half = torch.linalg.solve_triangular(L, V, upper=False)
    return torch.linalg.solve_triangular(L.mT, half, upper=True)


def _solution(L: Tensor, Y: Tensor, bias: bool) -> tuple[Tensor, Tensor]:
    """a = P Y, (..., n, c), and e of Note [dual form], (..., n, 1), which is zero without a bias."""
    ones = torch.ones_like(Y[..., :1])
    if not bias:
        return _solve(L, Y), torch.zeros_like(ones)
    solved = _solve(L, torch.cat([Y, ones], -1))
    eta = solved[..., -1:]
    e = eta / eta.sum(-2, keepdim=True).sqrt()
    return solved[..., :-1] - e @ (e.mT @ Y), e


def _offset(e: Tensor, bias: bool) -> Tensor:
    """q of Note [dual form], (..., n, 1)."""
    return e / e.sum(-2, keepdim=True) if bias else e


def _triangular_inverse(L: Tensor) -> Tensor:
    """S = L^{-1} by panels of rows, n^3/3 operations: panel J is -S_JJ L_J S of the rows above it."""
    if not values_visible(L):  # transforms cannot write into slices
        unit = torch.eye(L.shape[-1], dtype=L.dtype, device=L.device)
        return torch.linalg.solve_triangular(L, unit, upper=False)
    S = torch.zeros_like(L)
    for start, stop in _panels(L.shape[-1]):
        corner = L[..., start:stop, start:stop]
        unit = torch.eye(stop - start, dtype=L.dtype, device=L.device)
        S_JJ = torch.linalg.solve_triangular(corner, unit, upper=False)
        S[..., start:stop, start:stop] = S_JJ
        X = -S_JJ @ L[..., start:stop, :start]  # (..., panel, start)
        for left, right in _panels(start, 2 * _PANEL):  # each skips the rows of S that are zero
            torch.matmul(X[..., left:], S[..., left:start, left:right], out=S[..., start:stop, left:right])
    return S


def _mirror(lower: Tensor) -> Tensor:
    """Fill the blocks above the diagonal from those below, in place."""
    for start, stop in _panels(lower.shape[-1]):
        lower[..., :start, start:stop] = lower[..., start:stop, :start].mT
    return lower


def _gram(S: Tensor) -> Tensor:
    """S^T S for lower triangular S, skipping its zeros: n^3/3 operations."""
    product = S.new_empty(S.shape)
    for start, stop in _panels(S.shape[-1]):
        rows = S[..., start:, start:stop].mT
        torch.matmul(rows, S[..., start:, :stop], out=product[..., start:stop, :stop])
    return _mirror(product)


def congruence(B: Tensor, D: list[Tensor], partition: Partition) -> Tensor:
    """B^T D B for block-diagonal symmetric D, computing half of it."""
    product = B.new_empty(B.shape)
    for start, stop in _panels(B.shape[-1]):
        rows = partition.block_diagonal_times(D, B[..., start:stop]).mT  # (..., panel, n)
        torch.matmul(rows, B[..., :stop], out=product[..., start:stop, :stop])
    return _mirror(product)


def add_product(M: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """M + left right^T, in place, for M (..., n, n) and thin left, right (..., n, k)."""
    n, k = left.shape[-2:]
    M.view(-1, n, n).baddbmm_(left.reshape(-1, n, k), right.reshape(-1, n, k).mT)
    return M


class _Coefficients(Function):
    """(K, ridge, Y) -> coefficients a, bias b; see Note [dual backward]."""

    generate_vmap_rule = True

    @staticmethod
    def forward(K: Tensor, ridge: Tensor, Y: Tensor, bias: bool) -> tuple[Tensor, ...]:
        with full_precision(K):
            L, info = _factor(K, ridge)
            a, e = _solution(L, Y, bias)
            return a, (_offset(e, bias).mT @ Y)[..., 0, :], L, e, info

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
                Pabar, e = _solution(L, abar, ctx.bias)
            else:
                Pabar = _solve(L, abar) - e @ (e.mT @ abar)
            U = Pabar + _offset(e, ctx.bias) @ bbar.unsqueeze(-2)  # (..., n, c)
            Kbar = _outer(U, a) if ctx.needs_input_grad[0] else None
            return Kbar, -(U * a).sum(-1), U, None


class _Blocks(Function):
    """(K, ridge, Y) -> a again, and the diagonal blocks of P, (..., g, s, s) for each size s.

    The factor, e and a are those of `_Coefficients`; a comes out once more so that one backward
    serves both. See Note [dual backward].
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        K: Tensor, ridge: Tensor, Y: Tensor, a: Tensor, L: Tensor, e: Tensor, bias: bool, *index: Tensor
    ) -> tuple[Tensor, ...]:
        with full_precision(L):
            S = _triangular_inverse(L)
            blocks = []
            for rows in index:
                if rows.shape[-1] == 1:  # the squared norms of all columns, without a copy
                    block = torch.linalg.vector_norm(S, dim=-2).square()[..., rows].unsqueeze(-1)
                else:
                    columns = S.mT[..., rows, :]  # (..., g, s, n)
                    block = columns @ columns.mT
                border = e[..., rows, :]  # (..., g, s, 1)
                blocks.append(block - border @ border.mT)
            return S, a.clone(), *blocks

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        K, ridge, _, _, _, e, ctx.bias, *index = inputs
        S, a, *_ = output
        ctx.mark_non_differentiable(S)
        ctx.save_for_backward(K, ridge, e, S, a, *index)

    @staticmethod
    def backward(ctx: Any, _: Tensor, abar: Tensor, *D: Tensor) -> tuple[Tensor | None, ...]:
        K, ridge, e, S, a, *index = ctx.saved_tensors
        partition = Partition(tuple(index))
        negative = [(block + block.mT) / -2 for block in D]
        with full_precision(K):
            if torch.is_grad_enabled() or not values_visible(abar, *D):
                L = torch.linalg.cholesky(_shifted(K, ridge))
                _, e = _solution(L, a, ctx.bias)
                P = torch.cholesky_inverse(L) - e @ e.mT
                U = P @ abar
                Mbar = P @ partition.block_diagonal_times(negative, P) + _outer(U, a)
            else:
                P = add_product(_gram(S), -e, e)
                U = P @ abar
                Mbar = congruence(P, negative, partition)
                del P
                add_product(Mbar, torch.cat([U, a], -1), -0.5 * torch.cat([a, U], -1))
        ridgebar = Mbar.diagonal(dim1=-2, dim2=-1)
        Kbar = Mbar if ctx.needs_input_grad[0] else None
        return Kbar, ridgebar, U, *[None] * (4 + len(index))


def _outer(U: Tensor, a: Tensor) -> Tensor:
    """-(U a^T + a U^T) / 2."""
    return torch.cat([U, a], -1) @ (-0.5 * torch.cat([a, U], -1)).mT


class Dual(NamedTuple):
    """A factorised dual problem: its solution, and P by blocks on demand."""

    K: Tensor
    ridge: Tensor
    Y: Tensor
    dual: Tensor
    bias: Tensor
    factor: Tensor
    border: Tensor
    info: Tensor
    has_bias: bool

    def blocks(self, partition: Partition) -> tuple[Tensor, list[Tensor]]:
        """a = P Y, and diagonal blocks of P, (..., g, s, s) for each size; both differentiable."""
        _, a, *blocks = _Blocks.apply(
            self.K,
            self.ridge,
            self.Y,
            self.dual.detach(),
            self.factor,
            self.border,
            self.has_bias,
            *partition.groups,
        )
        return a, blocks

    def held_out(self, partition: Partition, guard: Guard) -> tuple[Tensor, Tensor, Tensor]:
        """Held-out residuals (..., n, c), variances (..., n, 1), and which rows were refitted: none."""
        a, blocks = self.blocks(partition)
        n = a.shape[-2]
        r, variance = (
            partition.scatter(part, n) for part in solve_blocks(partition.gather(a), blocks, guard)
        )
        return r, variance, torch.zeros_like(r[..., 0], dtype=torch.bool)


def dual(K: Tensor, ridge: Tensor, Y: Tensor, bias: bool) -> Dual:
    """Solve (K + diag(ridge)) a + b 1 = Y, 1^T a = 0 if there is a bias; Note [dual form].

    Args:
        K: (..., n, n), ridge: (..., n) and Y: (..., n, c), with equal batch dimensions.
        bias: whether there is an unpenalised bias.

    Differentiable in K, ridge and Y, to every order. Cost n^3/3 for the factor and as much again
    for the diagonal of P; memory 2.2 n^2 numbers, 4.3 n^2 with the backward.
    """
    a, b, L, e, info = _Coefficients.apply(K, ridge, Y, bias)
    return Dual(K, ridge, Y, a, b, L, e, info, bias)
