"""Held-out residuals from diagonal blocks of P; see Note [held-out residual] in smoothers.py.

Note [solving blocks]
A block P_LL is badly conditioned if the rows of L resemble each other, or if few training rows remain,
and r_L = P_LL^{-1} a_L, with a_L = (P Y)_L, then has few correct digits. Where P = T^T T, as in the dual
form, r_L is the least-squares solution of T_L r = T Y, and T_L has only the square root of that condition
number: one step of refinement from the residual T Y - T_L r restores the digits, and blocks too close to
singular for that are solved by a QR factorisation of T_L. Both work on columns of unit length.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from torchloo.autograd import apply
from torchloo.guards import Guard, values_visible

__all__ = ["NOT_DEFINITE", "Root", "solve_blocks"]

NOT_DEFINITE = (
    "the regularised matrix is not positive definite to working precision; "
    "use a larger reg, float64, or a positive semi-definite kernel"
)

# The least squared Cholesky pivot, with the diagonal scaled to 1, of a well conditioned block.
_WELL = 1e-3


@dataclass
class Root:
    """Where P is a product P = T^T T: the factor T, and its product with the targets."""

    make: Callable[[], tuple[Tensor, Tensor]]
    """T (..., n, n) and T Y (..., n, c), computed on demand."""
    groups: tuple[Tensor, ...]
    """The rows (g, s) of the sets of each size, as in a Partition."""
    spare_well: bool = False
    """Whether a_L is accurate enough for well conditioned blocks, so that only others are refined."""

    @functools.cached_property
    def _made(self) -> tuple[Tensor, Tensor]:
        return self.make()

    @property
    def T(self) -> Tensor:  # noqa: N802
        """(..., n, n)."""
        return self._made[0]

    @property
    def TY(self) -> Tensor:  # noqa: N802
        """T Y, (..., n, c)."""
        return self._made[1]

    def gradient(self, rows: Tensor, r: Tensor) -> Tensor:
        """T_L^T (T Y - T_L r), (..., g, s, c), for rows (g, s) and r (..., g, s, c); n^2 numbers at once."""
        sets_at_once = max(1, self.T.shape[-1] // r.shape[-1])
        gradients = []
        chunks = zip(rows.split(sets_at_once), r.split(sets_at_once, -3), strict=True)
        for rows_L, r_L in chunks:
            T_L_mT = self.T.mT[..., rows_L, :]  # (..., g, s, n)
            residual = self.TY.unsqueeze(-3) - T_L_mT.mT @ r_L
            gradients.append(T_L_mT @ residual)
        return torch.cat(gradients, -3)


class _Solved(Function):
    """(a_L, P_LL) -> r_L = P_LL^{-1} a_L and diag(P_LL^{-1}), already computed, with their derivatives.

    P_LL^{-1} = W W^T. With create_graph the inverse is computed again, from P_LL.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, block: Tensor, r: Tensor, W: Tensor) -> tuple[Tensor, Tensor]:
        return r.clone(), W.square().sum(-1, keepdim=True)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        _, block, _, W = inputs
        ctx.save_for_backward(block, W, output[0])

    @staticmethod
    def backward(ctx: Any, rbar: Tensor, variancebar: Tensor) -> tuple[Tensor | None, ...]:
        block, W, r = ctx.saved_tensors
        if torch.is_grad_enabled():
            inverse = torch.cholesky_inverse(torch.linalg.cholesky(block))
        else:
            inverse = W @ W.mT
        abar = inverse @ rbar
        blockbar = -abar @ r.mT - inverse @ (variancebar * inverse)
        return abar, blockbar, None, None


def _inverse_root(scale: Tensor, R: Tensor) -> Tensor:
    """W of `_Solved` for P_LL = scale^{-1} R^T R scale^{-1}, R upper triangular."""
    unit = torch.eye(R.shape[-1], dtype=R.dtype, device=R.device)
    return scale * torch.linalg.solve_triangular(R, unit, upper=True)


class _Sets:
    """The sets of one size s > 1: their r (..., g, s, c) and W (..., g, s, s), and their conditioning."""

    def __init__(self, a: Tensor, block: Tensor) -> None:
        self.scale = block.diagonal(dim1=-2, dim2=-1).rsqrt().unsqueeze(-1)  # (..., g, s, 1)
        L, info = torch.linalg.cholesky_ex(self.scale * block * self.scale.mT)
        least_pivot = L.diagonal(dim1=-2, dim2=-1).amin(-1).square()
        root_eps = torch.finfo(least_pivot.dtype).eps ** 0.5
        self.definite = info == 0  # (..., g)
        self.well_conditioned = self.definite & (least_pivot > _WELL)
        self.refinable = self.definite & (least_pivot > root_eps)  # one step of refinement is enough
        self.W = _inverse_root(self.scale, L.mT)
        self.r = self.W @ (self.W.mT @ a)

    def refine(self, root: Root, rows: Tensor) -> None:
        """One step from the residual, for the sets (g, s)."""
        gradient = root.gradient(rows, self.r)
        self.r = self.r + self.W @ (self.W.mT @ gradient)

    def solve_others_by_qr(self, root: Root, rows: Tensor, guard: Guard) -> None:
        """Solve the sets (g, s) for which refinement is not enough by QR; n^2 numbers at once."""
        others = (~self.refinable).nonzero(as_tuple=True)
        sets_at_once = max(1, root.T.shape[-1] // rows.shape[1])
        for index in zip(*(axis.split(sets_at_once) for axis in others), strict=True):
            self._solve_by_qr(root, rows, index, guard)

    def _solve_by_qr(self, root: Root, rows: Tensor, index: tuple[Tensor, ...], guard: Guard) -> None:
        *batch, which = index
        batch_index = [i.unsqueeze(-1) for i in batch]
        columns = root.T.mT[(*batch_index, rows[which])]  # (k, s, n)
        scale = self.scale[index]
        Q, R = torch.linalg.qr((scale * columns).mT)
        limit = Q.shape[-2] * torch.finfo(R.dtype).eps
        guard.require(R.diagonal(dim1=-2, dim2=-1).abs() > limit, NOT_DEFINITE)
        W = _inverse_root(scale, R)
        TY = root.TY[tuple(batch)] if batch else root.TY
        self.W = self.W.index_put(index, W)
        self.r = self.r.index_put(index, W @ (Q.mT @ TY))


def solve_blocks(
    a: list[Tensor],
    blocks: list[Tensor],
    guard: Guard,
    root: Root | None = None,
) -> tuple[list[Tensor], list[Tensor]]:
    """P_LL^{-1} a_L and diag(P_LL^{-1}) for the sets L of every size; Note [solving blocks].

    Args:
        a: rows of P Y, (..., g, s, c) for each size s.
        blocks: diagonal blocks of P, (..., g, s, s) for each size s.
        guard: records blocks that are not positive definite.
        root: the factor of P, if P is a product, for the accuracy of badly conditioned blocks.

    Returns:
        held-out residuals (..., g, s, c) and variances (..., g, s, 1) for each size.

    Differentiable in a and the blocks, to every order.
    """
    residuals, variances = [], []
    several: Iterator[_Sets] = iter(())
    if any(P_LL.shape[-1] > 1 for P_LL in blocks):
        several = _several(a, blocks, guard, root)
    for a_L, P_LL in zip(a, blocks, strict=True):
        if P_LL.shape[-1] == 1:
            guard.expect(P_LL.detach().amin(), lambda least: least > 0, NOT_DEFINITE)
            r_L, variance_L = a_L / P_LL, P_LL.reciprocal()
        else:
            sets = next(several)
            r_L, variance_L = apply(_Solved, a_L, P_LL, sets.r, sets.W)
        residuals.append(r_L)
        variances.append(variance_L)
    return residuals, variances


@torch.no_grad()
def _several(a: list[Tensor], blocks: list[Tensor], guard: Guard, root: Root | None) -> Iterator[_Sets]:
    """The sets of every size but 1, solved; values are read once, or twice if some need QR."""
    by_size = zip(a, blocks, strict=True)
    sizes = [_Sets(a_L, P_LL) for a_L, P_LL in by_size if P_LL.shape[-1] > 1]
    if root is None:
        for sets in sizes:
            guard.require(sets.definite, NOT_DEFINITE)
        return iter(sizes)
    groups = [rows for rows in root.groups if rows.shape[-1] > 1]
    visible = bool(sizes) and values_visible(*a)
    if visible and root.spare_well:
        well_conditioned = torch.stack([sets.well_conditioned.all() for sets in sizes])
        if guard.read_flag(well_conditioned):
            return iter(sizes)
    for sets, rows in zip(sizes, groups, strict=True):
        sets.refine(root, rows)
    if not visible:
        for sets in sizes:
            guard.require(sets.definite, NOT_DEFINITE)
        return iter(sizes)
    refinable = torch.stack([sets.refinable.all() for sets in sizes])
    if not guard.read_flag(refinable):
        for sets, rows in zip(sizes, groups, strict=True):
            sets.solve_others_by_qr(root, rows, guard)
    return iter(sizes)
