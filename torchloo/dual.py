"""The dual closed form: coefficients and blocks of P from one Cholesky factorisation.

Note [dual form]
With M = K + diag(ridge), ridge_i = reg / weight_i, the machine without a bias has P = M^{-1}. An
unpenalised bias borders M with a column of ones, and P is the block of the inverse of the bordered
matrix that belongs to the rows. It is found from differences to one row p, the pivot: coefficients that
sum to zero are a = E x with E = I - e_p 1^T, so

    P = E A^{-1} E^T,    A = E^T M E with 1 in place of the zero A_pp.

A_ij = (K_ij - K_pj) - (K_ip - K_pp) + ridge_p, and ridge_i more on the diagonal, subtracted in this
order: constants in K cancel exactly. (M^{-1} minus the square of M^{-1} 1 is the same P, but inaccurate
where K 1 is small, as for centred features.) The pivot is a central row of small ridge. With
A = L L^T and T = L^{-1} E^T (without a bias: E = I, A = M),

    P = T^T T,    a = P Y,    b = Y_p - (M a)_p,    Y - Yhat = ridge * a,

and Note [held-out residual] in smoothers.py needs only a and diagonal blocks of P. No 1 - h appears, so
nothing cancels as h -> 1.

Note [dual backward]
dP = -P dM P, with or without a bias, since P is a block of the inverse of the (bordered) M; the column
of that inverse that gives b = q^T Y is q = e_p - P M e_p. So cotangents abar of a, bbar of b and D
(block-diagonal, symmetric) of the blocks of P give

    U = P abar + q bbar^T,    Ybar = U,    Mbar = -P D P - (U a^T + a U^T) / 2,
    Kbar = Mbar,              ridgebar = diag(Mbar).

Every term is symmetric: K is treated as a symmetric matrix. With create_graph the same formulas are
evaluated by differentiable operations, so derivatives of every order exist.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import Function

from torchloo.autograd import apply
from torchloo.blocks import NOT_DEFINITE, Root, solve_blocks
from torchloo.clusters import Partition
from torchloo.factors import ILL_CONDITIONED, condition, lower_factor
from torchloo.guards import Guard, values_visible
from torchloo.leave_out_sets import LeaveOutSets, leave_out_by_annihilator
from torchloo.memory import cholesky_in_place, keep_freed_memory
from torchloo.panels import WIDE, mirrored, panels, triangular_inverse
from torchloo.precision import full_precision

__all__ = ["Dual", "add_product", "congruence", "dual"]

Other = TypeVar("Other")


def _pivot(K: Tensor, ridge: Tensor) -> Tensor:
    """The row p of Note [dual form], (..., 1): least ridge_p + |phi_p - mean of phi|^2."""
    distance = torch.sub(K.diagonal(dim1=-2, dim2=-1), K.mean(-1), alpha=2)
    return (distance + ridge).argmin(-1, keepdim=True)


def _along(pivot: Tensor, values: Tensor, dim: int) -> Tensor:
    """The pivot (..., 1) as an index along an axis of values (..., n), (..., n, c) or (..., c, n)."""
    shape = list(values.shape)
    shape[dim] = 1
    index = pivot if values.ndim == pivot.ndim else pivot.unsqueeze(-1)
    return index.expand(shape)


def _at(values: Tensor, pivot: Tensor, dim: int) -> Tensor:
    """The entry p along the last axis, or the last but one; the axis is kept with size 1."""
    return values.gather(dim, _along(pivot, values, dim))


def _put(values: Tensor, pivot: Tensor, dim: int, entry: Tensor | float) -> Tensor:
    """The values with another entry p along an axis: in place, except in transforms, which cannot."""
    scatter = values.scatter_ if values_visible(values, pivot) else values.scatter
    return scatter(dim, _along(pivot, values, dim), entry)


def _matrix(K: Tensor, ridge: Tensor, pivot: Tensor | None) -> Tensor:
    """A of Note [dual form], in one copy of K."""
    if pivot is None:
        diagonal = K.diagonal(dim1=-2, dim2=-1) + ridge
        return torch.diagonal_scatter(K, diagonal, dim1=-2, dim2=-1)
    row = _at(K, pivot, -2)
    A = (K - row).sub_(_pivot_column(row, ridge, pivot))
    A = _put(A, pivot, -1, 0.0)
    A.diagonal(dim1=-2, dim2=-1).add_(ridge.scatter(-1, pivot, 1.0))
    return A


def _pivot_column(row: Tensor, ridge: Tensor, pivot: Tensor) -> Tensor:
    """E^T M e_p, (..., n, 1): K_ip - K_pp - ridge_p, and 0 in row p, from the row K_p (..., 1, n)."""
    column = (row - _at(row, pivot, -1)) - _at(ridge, pivot, -1).unsqueeze(-1)
    return _put(column, pivot, -1, 0.0).mT


def _factor(K: Tensor, ridge: Tensor, pivot: Tensor | None) -> tuple[Tensor, Tensor]:
    """L with A = L L^T, and `info` of the factorisation, (...); on a CPU large ones use the memory of A."""
    A = _matrix(K, ridge, pivot)
    if K.shape[-1] <= WIDE or K.device.type != "cpu" or not values_visible(K, ridge):
        return torch.linalg.cholesky_ex(A.mT)  # column-major, as LAPACK needs
    keep_freed_memory()
    return cholesky_in_place(A)


def _factor_of_rows(Z: Tensor, ridge: Tensor, pivot: Tensor | None) -> Tensor:
    """The same L for K = Z Z^T, from features Z (..., n, d): K would square their condition number."""
    root = ridge.sqrt()
    if pivot is None:
        return lower_factor(torch.cat([Z.mT, torch.diag_embed(root)], -2))
    ones = _put(torch.ones_like(root), pivot, -1, 0.0)
    common = (_at(root, pivot, -1) * ones).unsqueeze(-2)  # ridge_p, shared by all differences to row p
    own = torch.diag_embed(root.scatter(-1, pivot, 1.0))
    differences = Z - _at(Z, pivot, -2)
    return lower_factor(torch.cat([differences.mT, common, own], -2))


def _differences(V: Tensor, pivot: Tensor | None) -> Tensor:
    """E^T V for V (..., n, c)."""
    return V if pivot is None else V - _at(V, pivot, -2)


def _solution(L: Tensor, differences: Tensor, pivot: Tensor | None) -> tuple[Tensor, Tensor]:
    """L^{-1} V and E A^{-1} V for V (..., n, c), whose row p is zero if there is a pivot."""
    half = torch.linalg.solve_triangular(L, differences, upper=False)
    x = torch.linalg.solve_triangular(L.mT, half, upper=True)  # unlike cholesky_solve, no copy of L
    if pivot is None:
        return half, x
    sum_of_others = x.sum(-2, keepdim=True)
    return half, x.scatter(-2, _along(pivot, x, -2), -sum_of_others)


def _annihilator(A: Tensor, pivot: Tensor | None) -> Tensor:
    """P = E A^{-1} E^T, by differentiable operations."""
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(A))
    if pivot is None:
        return inverse
    e_p = _put(torch.zeros_like(A[..., :1]), pivot, -2, 1.0)
    sums = inverse.sum(-1, keepdim=True)
    border = sums - e_p * (sums.sum(-2, keepdim=True) / 2)
    return inverse - e_p @ border.mT - border @ e_p.mT


def _gram(T: Tensor, pivot: Tensor | None) -> Tensor:
    """T^T T for T lower triangular except for column p, skipping its zeros: n^3/3 operations."""
    if T.shape[-1] <= WIDE:
        return T.mT @ T
    product = T.new_empty(T.shape)
    for start, stop in panels(T.shape[-1], WIDE):
        rows = T[..., start:, start:stop].mT
        torch.matmul(rows, T[..., start:, :stop], out=product[..., start:stop, :stop])
    mirrored(product, WIDE)
    if pivot is not None:
        column = T.mT @ _at(T, pivot, -1)
        _put(_put(product, pivot, -1, column), pivot, -2, column.mT)
    return product


def congruence(B: Tensor, D: list[Tensor], partition: Partition) -> Tensor:
    """B^T D B for block-diagonal symmetric D, computing half of it."""
    if B.shape[-1] <= WIDE:
        return B.mT @ partition.block_diagonal_times(D, B)
    product = B.new_empty(B.shape)
    for start, stop in panels(B.shape[-1], WIDE):
        rows = partition.block_diagonal_times(D, B[..., start:stop]).mT  # (..., panel, n)
        torch.matmul(rows, B[..., :stop], out=product[..., start:stop, :stop])
    return mirrored(product, WIDE)


def add_product(M: Tensor, left: Tensor, right: Tensor, factor: float = 1.0) -> Tensor:
    """M + factor left right^T, in place, for M (..., n, n) and thin left, right (..., n, k)."""
    n, k = left.shape[-2:]
    left, right = left.reshape(-1, n, k), right.reshape(-1, n, k)
    M.view(-1, n, n).baddbmm_(left, right.mT, alpha=factor)
    return M


class _Coefficients(Function):
    """(K, ridge, Y) -> coefficients a, bias b; see Note [dual backward]."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        K: Tensor, ridge: Tensor, Y: Tensor, pivot: Tensor | None, L: Tensor
    ) -> tuple[Tensor, Tensor]:
        with full_precision(K):
            _, a = _solution(L, _differences(Y, pivot), pivot)
            if pivot is None:
                return a, torch.zeros_like(a[..., 0, :])
            ridge_p = _at(ridge, pivot, -1).unsqueeze(-1)  # (..., 1, 1)
            b = _at(Y, pivot, -2) - _at(K, pivot, -2) @ a - ridge_p * _at(a, pivot, -2)
            return a, b[..., 0, :]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        K, ridge, _, pivot, L = inputs
        ctx.save_for_backward(K, ridge, pivot, output[0], L)

    @staticmethod
    def backward(ctx: Any, abar: Tensor, bbar: Tensor) -> tuple[Tensor | None, ...]:
        K, ridge, pivot, a, L = ctx.saved_tensors
        with full_precision(K):
            if torch.is_grad_enabled():
                L = torch.linalg.cholesky(_matrix(K, ridge, pivot))
            right = _differences(abar, pivot)
            if pivot is not None:
                bbar = bbar.unsqueeze(-2)  # (..., 1, c)
                right = right - _pivot_column(_at(K, pivot, -2), ridge, pivot) * bbar
            _, U = _solution(L, right, pivot)  # (..., n, c)
            if pivot is not None:
                U = U.scatter(-2, _along(pivot, U, -2), _at(U, pivot, -2) + bbar)
            Kbar = _outer(U, a) if ctx.needs_input_grad[0] else None
            return Kbar, -(U * a).sum(-1), U, None, None


def _root(L: Tensor, pivot: Tensor | None) -> Tensor:
    """T of Note [dual form], (..., n, n)."""
    T = triangular_inverse(L)
    if pivot is None:
        return T
    column = _at(T, pivot, -1) - T.sum(-1, keepdim=True)
    return _put(T, pivot, -1, column)


class _Rows(Function):
    """(K, ridge, Y) -> r_i = a_i / P_ii and 1 / P_ii for every row i, and T; see Note [dual backward].

    With v_i = 1 / P_ii, cotangents rbar and vbar give abar = v rbar and D = -diag(abar . r + v^2 vbar).
    T has no derivative. The last argument is a, if it is already computed.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        K: Tensor, ridge: Tensor, Y: Tensor, pivot: Tensor | None, L: Tensor, a: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        if a is None:
            _, a = _solution(L, _differences(Y, pivot), pivot)
        T = _root(L, pivot)
        v = torch.linalg.vector_norm(T, dim=-2).pow(-2).unsqueeze(-1)  # (..., n, 1)
        return v * a, v, T

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        K, ridge, _, pivot, *_ = inputs
        r, v, T = output
        ctx.mark_non_differentiable(T)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(K, ridge, pivot, r, v, T)

    @staticmethod
    def backward(ctx: Any, rbar: Tensor | None, vbar: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        K, ridge, pivot, r, v, T = ctx.saved_tensors
        abar = torch.zeros_like(r) if rbar is None else v * rbar
        negative = (abar * r).sum(-1, keepdim=True)  # (..., n, 1)
        if vbar is not None:
            negative = negative + v.square() * vbar
        single = Partition.single(r.shape[-2], r.device)
        bars = _cotangents(ctx, K, ridge, pivot, T, r / v, abar, [negative.unsqueeze(-1)], single)
        return *bars, None, None, None


class _Blocks(Function):
    """(K, ridge, Y) -> T and T Y, a, and the diagonal blocks of P, (..., g, s, s) for each size s.

    One backward for a and the blocks; see Note [dual backward]. T and T Y have no derivative.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        K: Tensor, ridge: Tensor, Y: Tensor, pivot: Tensor | None, L: Tensor, *index: Tensor
    ) -> tuple[Tensor, ...]:
        TY, a = _solution(L, _differences(Y, pivot), pivot)
        T = _root(L, pivot)
        blocks = []
        for rows in index:
            if rows.shape[-1] == 1:  # the squared norms of all columns, without a copy
                block = torch.linalg.vector_norm(T, dim=-2).square()[..., rows].unsqueeze(-1)
            elif rows.shape[-1] == T.shape[-1] and values_visible(T):  # all of P
                block = _gram(T, pivot).unsqueeze(-3)
            else:
                columns = T.mT[..., rows, :]  # (..., g, s, n)
                block = columns @ columns.mT
            blocks.append(block)
        return T, TY, a, *blocks

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        K, ridge, _, pivot, _, *index = inputs
        T, TY, a, *_ = output
        ctx.mark_non_differentiable(T, TY)
        ctx.save_for_backward(K, ridge, pivot, T, a, *index)

    @staticmethod
    def backward(ctx: Any, _: Tensor, __: Tensor, abar: Tensor, *D: Tensor) -> tuple[Tensor | None, ...]:
        K, ridge, pivot, T, a, *index = ctx.saved_tensors
        negative = [(block + block.mT) / -2 for block in D]
        bars = _cotangents(ctx, K, ridge, pivot, T, a, abar, negative, Partition(tuple(index)))
        return *bars, *[None] * (2 + len(index))


def _cotangents(
    ctx: Any,
    K: Tensor,
    ridge: Tensor,
    pivot: Tensor | None,
    T: Tensor,
    a: Tensor,
    abar: Tensor,
    negative: list[Tensor],
    partition: Partition,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Kbar, ridgebar and Ybar of Note [dual backward] from abar and -D, for the sets of a partition."""
    with full_precision(K):
        if torch.is_grad_enabled() or not values_visible(abar, *negative):
            P = _annihilator(_matrix(K, ridge, pivot), pivot)
            U = P @ abar
            Mbar = P @ partition.block_diagonal_times(negative, P) + _outer(U, a)
        else:
            P = _gram(T, pivot)
            U = P @ abar
            Mbar = congruence(P, negative, partition)
            del P
            add_product(add_product(Mbar, U, a, -0.5), a, U, -0.5)
    return Mbar if ctx.needs_input_grad[0] else None, Mbar.diagonal(dim1=-2, dim2=-1), U


def _outer(U: Tensor, a: Tensor) -> Tensor:
    """-(U a^T + a U^T) / 2."""
    return torch.cat([U, a], -1) @ (-0.5 * torch.cat([a, U], -1)).mT


@dataclass
class Dual:
    """A factorised dual problem: its solution, and P by blocks, on demand."""

    K: Tensor
    ridge: Tensor
    Y: Tensor
    pivot: Tensor | None
    """The row p of Note [dual form], (..., 1); None without a bias."""
    factor: Tensor
    _solution: tuple[Tensor, Tensor] | None = None

    @property
    def solution(self) -> tuple[Tensor, Tensor]:
        """a = P Y, (..., n, c), and b, (..., c)."""
        if self._solution is None:
            self._solution = apply(_Coefficients, self.K, self.ridge, self.Y, self.pivot, self.factor)
        return self._solution

    @property
    def dual(self) -> Tensor:
        """a = P Y, (..., n, c)."""
        return self.solution[0]

    @property
    def bias(self) -> Tensor:
        """b, (..., c); zeros without a bias."""
        return self.solution[1]

    @property
    def noise(self) -> Tensor:
        """The ridge as a column, (..., n, 1)."""
        return self.ridge.unsqueeze(-1)

    def blocks(self, partition: Partition) -> tuple[Tensor, list[Tensor]]:
        """a = P Y, and diagonal blocks of P, (..., g, s, s) for each size; both differentiable."""
        with full_precision(self.K):
            _, _, a, *blocks = self._blocks(partition)
        return a, blocks

    def _blocks(self, partition: Partition) -> tuple[Tensor, ...]:
        return apply(_Blocks, self.K, self.ridge, self.Y, self.pivot, self.factor, *partition.groups)

    def held_out(self, partition: Partition, guard: Guard) -> tuple[Tensor, Tensor, Tensor]:
        """Held-out residuals (..., n, c), variances (..., n, 1), and refitted rows, of which there are none.

        To be called in `full_precision`.
        """
        if partition.only_single(self.Y.shape[-2]):
            known = None if self._solution is None else self._solution[0].detach()
            r, variance, _ = apply(_Rows, self.K, self.ridge, self.Y, self.pivot, self.factor, known)
            guard.expect_finite(variance, NOT_DEFINITE)
            guard.implied(r, self.K, self.Y, variance)
        else:
            T, TY, a, *blocks = self._blocks(partition)
            root = Root(lambda: (T, TY), partition.groups)
            solved = solve_blocks(partition.gather(a), blocks, guard, root)
            r, variance = (partition.scatter(part, a.shape[-2]) for part in solved)
        return r, variance, torch.zeros(r.shape[:-1], dtype=torch.bool, device=r.device)

    def left_out(self, sets: LeaveOutSets, guard: Guard) -> tuple[Tensor, Tensor, Tensor]:
        """Held-out residuals (..., m, c) and variances (..., m, 1) of rows to predict; none is refitted.

        To be called in `full_precision`.
        """
        T, TY, a, P = self._blocks(Partition.whole(self.Y.shape[-2], self.Y.device))
        return leave_out_by_annihilator(sets, P[..., 0, :, :], a, lambda: (T, TY), guard)

    def with_targets(self, Y: Tensor) -> "Dual":
        """The same factorisation with other targets (..., n, c')."""
        return Dual(self.K, self.ridge, Y, self.pivot, self.factor)

    def leave_out(self, sets: Tensor, guard: Guard) -> Tensor:
        """Held-out residuals (..., g, s, c) of sets (g, s) of rows, from the columns P_{:L} only.

        Differentiable; cost n^2 g s. To be called in `full_precision`.
        """
        c = self.Y.shape[-1]
        shape = (self.Y.shape[-2], sets.numel())
        unit = torch.zeros(shape, dtype=self.Y.dtype, device=self.Y.device)
        unit = unit.scatter(0, sets.reshape(1, -1), 1.0)
        right = torch.cat([self.Y, unit.expand(*self.Y.shape[:-1], -1)], -1)
        solved, _ = apply(_Coefficients, self.K, self.ridge, right, self.pivot, self.factor)
        known = solved.index_select(-2, sets.flatten())  # (..., g s, c + g s): a_L and rows of P_{:L}
        a = known[..., :c].unflatten(-2, sets.shape)
        P = known[..., c:].unflatten(-1, sets.shape).unflatten(-3, sets.shape)  # (..., g, s, g, s)
        blocks = P.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)

        def root() -> tuple[Tensor, Tensor]:
            half, _ = _solution(self.factor, _differences(right.detach(), self.pivot), self.pivot)
            return half[..., c:], half[..., :c]

        columns = torch.arange(sets.numel(), device=sets.device).reshape(sets.shape)
        residuals, _ = solve_blocks([a], [blocks], guard, Root(root, (columns,)))
        return residuals[0]

    def weights_at(self, k: Tensor) -> Tensor:
        """w (..., q, n) of Note [weights at a new point], for kernel rows k (..., q, n)."""
        _, weights = self._against(k)
        if self.pivot is not None:
            one = weights.gather(-2, _along(self.pivot, weights, -2)) + 1
            weights = weights.scatter(-2, _along(self.pivot, weights, -2), one)
        return weights.mT

    def variance_at(self, k: Tensor, own: Tensor) -> Tensor:
        """Note [variance at a new point], (..., q), for kernel rows k (..., q, n) and k(x,x) (..., q)."""
        c, weights = self._against(k)
        if self.pivot is not None:
            k_p = _at(k, self.pivot, -1)[..., 0]
            K_pp = _at(_at(self.K, self.pivot, -2), self.pivot, -1)[..., 0]
            M_pp = K_pp + _at(self.ridge, self.pivot, -1)
            own = (own - k_p) - (k_p - M_pp)
        return own - (c * weights).sum(-2)

    def _against(self, k: Tensor) -> tuple[Tensor, Tensor]:
        """c of Note [variance at a new point], without a bias k itself, and P c, (..., n, q) both."""
        c = k.to(self.K.dtype).mT
        if self.pivot is not None:
            column = _pivot_column(_at(self.K, self.pivot, -2), self.ridge, self.pivot)
            c = (c - _at(c, self.pivot, -2)) - column
        Pc, _ = apply(_Coefficients, self.K, self.ridge, c, self.pivot, self.factor)
        return c, Pc


def dual(
    K: Tensor,
    ridge: Tensor,
    Y: Tensor,
    bias: bool,
    guard: Guard,
    otherwise: Callable[[], Other] | None = None,
    features: Tensor | None = None,
) -> "Dual | Other":
    """Solve (K + diag(ridge)) a + b 1 = Y, 1^T a = 0 if there is a bias; Note [dual form].

    Args:
        K: (..., n, n), ridge: (..., n) and Y: (..., n, c), with equal batch dimensions.
        bias: whether there is an unpenalised bias.
        guard: checks of the values, to which the success of the factorisation is added.
        otherwise: called, and its result returned, if K + diag(ridge) is badly conditioned.
        features: Z (..., n, d) with K = Z Z^T, factorised instead of K if it is badly conditioned and there
            is no `otherwise`.

    Differentiable in K, ridge and Y, to every order. Cost n^3/3 for the factor and as much again
    for the diagonal of P; memory 2.2 n^2 numbers, 4.3 n^2 with the backward.
    """
    with torch.no_grad(), full_precision(K):
        pivot = _pivot(K, ridge) if bias else None
        L, info = _factor(K, ridge, pivot)
        has_alternative = otherwise is not None or features is not None
        well_conditioned = True
        if has_alternative and values_visible(K):
            well_conditioned = guard.read_flag(condition(L) < ILL_CONDITIONED)
    if otherwise is not None and not well_conditioned:
        return otherwise()
    if features is not None and not well_conditioned:
        with torch.no_grad(), full_precision(K):
            L = _factor_of_rows(features, ridge, pivot)
    else:
        guard.factored(info, NOT_DEFINITE)
    return Dual(K, ridge, Y, pivot, L)
