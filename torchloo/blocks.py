"""Held-out residuals from diagonal blocks of P; see Note [held-out residual] in smoothers.py.

Note [solving blocks]
A block P_LL is badly conditioned where the rows of L resemble each other, or where little is left to
learn from, and a_L = (P Y)_L then knows r_L = P_LL^{-1} a_L to few digits. Where P = T^T T, as in the
dual form, r_L is the least-squares solution of T_L r = T Y, and T_L has only the square root of that
condition: one step of refinement from the residual T Y - T_L r restores the digits, and blocks too
close to singular for that are solved by a QR factorisation of T_L. Both work on columns of unit length.
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
    "take a larger reg, float64, or a positive semi-definite kernel"
)

# The least squared Cholesky pivot, once the diagonal is scaled to 1, of a well conditioned block.
_WELL = 1e-3


@dataclass
class Root:
    """Where P is a product P = T^T T: the factor T, and what it makes of the targets."""

    make: Callable[[], tuple[Tensor, Tensor]]
    """T (..., n, n) and T Y (..., n, c), computed where they are asked for."""
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
        width = max(1, self.T.shape[-1] // r.shape[-1])
        parts = []
        for rows_L, r_L in zip(rows.split(width), r.split(width, -3), strict=True):
            columns = self.T.mT[..., rows_L, :]  # T_L^T, (..., g, s, n)
            parts.append(columns @ (self.TY.unsqueeze(-3) - columns.mT @ r_L))
        return torch.cat(parts, -3)


class _Solved(Function):
    """(a_L, P_LL) -> r_L = P_LL^{-1} a_L and diag(P_LL^{-1}) as they were found, with their derivatives.

    W has P_LL^{-1} = W W^T. Under create_graph the inverse is computed anew, from P_LL.
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
        return abar, -abar @ r.mT - inverse @ (variancebar * inverse), None, None


def _inverse_root(scale: Tensor, R: Tensor) -> Tensor:
    """W of `_Solved` for P_LL = scale^{-1} R^T R scale^{-1}, R upper triangular."""
    unit = torch.eye(R.shape[-1], dtype=R.dtype, device=R.device)
    return scale * torch.linalg.solve_triangular(R, unit, upper=True)


class _Sets:
    """The sets of one size s > 1: their r (..., g, s, c) and W (..., g, s, s), and which are doubtful."""

    def __init__(self, a: Tensor, block: Tensor) -> None:
        self.scale = block.diagonal(dim1=-2, dim2=-1).rsqrt().unsqueeze(-1)  # (..., g, s, 1)
        L, info = torch.linalg.cholesky_ex(self.scale * block * self.scale.mT)
        least = L.diagonal(dim1=-2, dim2=-1).amin(-1).square()
        self.definite = info == 0  # (..., g)
        self.well = self.definite & (least > _WELL)
        self.safe = self.definite & (least > torch.finfo(least.dtype).eps ** 0.5)
        self.W = _inverse_root(self.scale, L.mT)
        self.r = self.W @ (self.W.mT @ a)

    def refine(self, root: Root, rows: Tensor) -> None:
        """One step from the residual, for the sets (g, s)."""
        self.r = self.r + self.W @ (self.W.mT @ root.gradient(rows, self.r))

    def solve_doubtful(self, root: Root, rows: Tensor, guard: Guard) -> None:
        """By QR those of the sets (g, s) for which one step is not enough; n^2 numbers at once."""
        doubtful = (~self.safe).nonzero(as_tuple=True)
        width = max(1, root.T.shape[-1] // rows.shape[1])
        for index in zip(*(axis.split(width) for axis in doubtful), strict=True):
            self._solve_by_qr(root, rows, index, guard)

    def _solve_by_qr(self, root: Root, rows: Tensor, index: tuple[Tensor, ...], guard: Guard) -> None:
        *batch, which = index
        place = (*(i.unsqueeze(-1) for i in batch), rows[which])
        columns = root.T.mT[place]  # (k, s, n)
        scale = self.scale[index]
        Q, R = torch.linalg.qr((scale * columns).mT)
        limit = Q.shape[-2] * torch.finfo(R.dtype).eps
        guard.require(R.diagonal(dim1=-2, dim2=-1).abs() > limit, NOT_DEFINITE)
        W = _inverse_root(scale, R)
        TY = root.TY[tuple(batch)] if batch else root.TY
        self.W = self.W.index_put(index, W)
        self.r = self.r.index_put(index, W @ (Q.mT @ TY))


def solve_blocks(
    a: list[Tensor], blocks: list[Tensor], guard: Guard, root: Root | None = None
) -> tuple[list[Tensor], list[Tensor]]:
    """P_LL^{-1} a_L and diag(P_LL^{-1}) for the sets L of every size; Note [solving blocks].

    Args:
        a: rows of P Y, (..., g, s, c) for each size s.
        blocks: diagonal blocks of P, (..., g, s, s) for each size s.
        guard: takes note of blocks that are not positive definite.
        root: where P is a product, its factor, which saves the digits of badly conditioned blocks.

    Returns:
        held-out residuals (..., g, s, c) and variances (..., g, s, 1) for each size.

    Differentiable in a and the blocks, to every order.
    """
    solved = []
    several = iter(()) if all(P_LL.shape[-1] == 1 for P_LL in blocks) else _several(a, blocks, guard, root)
    for a_L, P_LL in zip(a, blocks, strict=True):
        if P_LL.shape[-1] == 1:
            guard.expect(P_LL.detach().amin(), lambda least: least > 0, NOT_DEFINITE)
            solved.append((a_L / P_LL, P_LL.reciprocal()))
        else:
            sets = next(several)
            solved.append(apply(_Solved, a_L, P_LL, sets.r, sets.W))
    return [r for r, _ in solved], [variance for _, variance in solved]


@torch.no_grad()
def _several(a: list[Tensor], blocks: list[Tensor], guard: Guard, root: Root | None) -> Iterator[_Sets]:
    """The sets of every size but 1, solved; values are looked at once, or twice if some are doubtful."""
    parts = [_Sets(a_L, P_LL) for a_L, P_LL in zip(a, blocks, strict=True) if P_LL.shape[-1] > 1]
    if root is not None:
        groups = [rows for rows in root.groups if rows.shape[-1] > 1]
        visible = bool(parts) and values_visible(*a)
        if visible and root.spare_well and guard.asks(torch.stack([part.well.all() for part in parts])):
            return iter(parts)
        for part, rows in zip(parts, groups, strict=True):
            part.refine(root, rows)
        if visible:
            if not guard.asks(torch.stack([part.safe.all() for part in parts])):
                for part, rows in zip(parts, groups, strict=True):
                    part.solve_doubtful(root, rows, guard)
            return iter(parts)
    for part in parts:
        guard.require(part.definite, NOT_DEFINITE)
    return iter(parts)
