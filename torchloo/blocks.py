"""Held-out residuals from diagonal blocks of P; see Note [held-out residual] in smoothers.py."""

import torch
from torch import Tensor

from torchloo.guards import Guard

__all__ = ["NOT_DEFINITE", "solve_blocks"]

NOT_DEFINITE = (
    "the regularised matrix is not positive definite to working precision; "
    "take a larger reg, float64, or a positive semi-definite kernel"
)


def solve_blocks(a: list[Tensor], blocks: list[Tensor], guard: Guard) -> tuple[list[Tensor], list[Tensor]]:
    """P_LL^{-1} a_L and diag(P_LL^{-1}) for the sets L of every size.

    Args:
        a: rows of P Y, (..., g, s, c) for each size s.
        blocks: diagonal blocks of P, (..., g, s, s) for each size s.
        guard: takes note of blocks that are not positive definite.

    Returns:
        held-out residuals (..., g, s, c) and variances (..., g, s, 1) for each size.
    """
    residuals, variances = [], []
    for a_L, P_LL in zip(a, blocks, strict=True):
        if P_LL.shape[-1] == 1:
            guard.require(P_LL > 0, NOT_DEFINITE)
            residuals.append(a_L / P_LL)
            variances.append(1 / P_LL)
            continue
        L, info = torch.linalg.cholesky_ex(P_LL)
        guard.require(info == 0, NOT_DEFINITE)
        residuals.append(torch.cholesky_solve(a_L, L))
        variances.append(torch.cholesky_inverse(L).diagonal(dim1=-2, dim2=-1).unsqueeze(-1))
    return residuals, variances
