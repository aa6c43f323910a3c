"""Sets of rows left out of a solved primal problem: the formulas, for any batch of sets of one size.

Note [leaving sets out]
Let C = F F^T be the normal matrix of Note [primal form], and B = Omega^{1/2} Z_L F^{-T} the whitened rows of
a set L. Then P_LL = Omega^{1/2} (I - B B^T) Omega^{1/2}, so that

    P_LL^{-1} = Omega^{-1/2} (I - B B^T)^{-1} Omega^{-1/2},    r_L = P_LL^{-1} Omega e_L.

A set with more rows than features takes the other side, of the size of the features:
(I - B B^T)^{-1} = I + B (I - B^T B)^{-1} B^T. Either way the eigenvalues are the 1 - h of the set, whatever
the condition of C. Where the smallest pivot is lost to rounding, the set is refitted.

All rows at once (whole.py) and rows in blocks (sets.py) call the same functions, differentiable to every
order. In the coordinates of Note [rotated features], B has the rows (zeta f)^{1/2} u.
"""

import torch
from torch import Tensor

from torchloo.guards import values_visible

__all__ = [
    "LeftOut",
    "block_of_rest",
    "factor_of_rest",
    "leave_out_large",
    "leave_out_small",
    "rows_of_large",
]

LeftOut = tuple[Tensor, Tensor, Tensor]
"""Held-out residuals (..., g, s, c), diag(P_LL^{-1}), (..., g, s, 1), and which sets (..., g) are lost."""


def block_of_rest(B: Tensor) -> Tensor:
    """I - B B^T, (..., g, s, s), for whitened rows (..., g, s, p)."""
    if B.shape[-2] == 1:
        return 1 - B.square().sum(-1, keepdim=True)
    return torch.eye(B.shape[-2], dtype=B.dtype, device=B.device) - B @ B.mT


def factor_of_rest(rest: Tensor, least: Tensor) -> tuple[Tensor, Tensor]:
    """The Cholesky factor of I - B B^T or I - B^T B, (..., g, k, k), and which sets (..., g) are lost.

    The smallest pivot must be above `least`, which broadcasts with (..., g). A lost set has the factor of
    the identity: what comes of it is thrown away, and so is its gradient. None is lost where values cannot
    be looked at: then nothing is refitted.
    """
    if not values_visible(rest):
        return torch.linalg.cholesky_ex(rest).L, torch.zeros_like(rest[..., 0, 0], dtype=torch.bool)
    unit = torch.eye(rest.shape[-1], dtype=rest.dtype, device=rest.device)
    with torch.no_grad():
        L, info = torch.linalg.cholesky_ex(rest)
        lost = (info != 0) | ~(L.diagonal(dim1=-2, dim2=-1).square().amin(-1) > least)
    if rest.requires_grad:
        return torch.linalg.cholesky_ex(torch.where(lost[..., None, None], unit, rest)).L, lost
    return torch.where(lost[..., None, None], unit, L), lost


def leave_out_small(B: Tensor, scale: Tensor, e: Tensor, least: Tensor) -> LeftOut:
    """Sets of no more rows than features; Note [leaving sets out].

    Args:
        B: whitened rows, (..., g, s, p).
        scale: square roots of their weights, (..., g, s, 1).
        e: training residuals, (..., g, s, c).
        least: the 1 - h below which a set is lost to rounding; broadcasts with (..., g).
    """
    if B.shape[-2] == 1:
        one = block_of_rest(B)  # (..., g, 1, 1)
        lost = torch.zeros_like(one[..., 0, 0], dtype=torch.bool)
        if values_visible(one):
            lost = ~(one[..., 0, 0] > least)
            one = torch.where(lost[..., None, None], 1.0, one)
        return e / one, 1 / (one * scale.square()), lost
    L, lost = factor_of_rest(block_of_rest(B), least)
    unit = torch.eye(B.shape[-2], dtype=B.dtype, device=B.device)
    W = torch.linalg.solve_triangular(L, unit, upper=False) / scale.mT  # P_LL^{-1} = W^T W
    return W.mT @ (W @ (scale.square() * e)), W.square().sum(-2).unsqueeze(-1), lost


def leave_out_large(B: Tensor, scale: Tensor, e: Tensor, least: Tensor, total: Tensor) -> LeftOut:
    """Sets of more rows than features; arguments as in `leave_out_small`, but for one.

    `total` is F^{-1} C F^{-T} as it is found, (..., p, p): the identity but for the rounding of F, which so
    does no harm.
    """
    L, lost = factor_of_rest(total.unsqueeze(-3) - B.mT @ B, least)
    return *rows_of_large(B, scale, e, L, B.mT @ (scale * e)), lost


def rows_of_large(B: Tensor, scale: Tensor, e: Tensor, L: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """Held-out residuals and diag(P_LL^{-1}) of some rows of large sets.

    L is the factor of I - B^T B, (..., g, p, p), and t = B^T Omega^{1/2} e, (..., g, p, c), of all rows.
    """
    half = torch.linalg.solve_triangular(L, B.mT, upper=False)  # (..., g, p, s)
    shift = half.mT @ torch.linalg.solve_triangular(L, t, upper=False)
    return e + shift / scale, (1 + half.square().sum(-2).unsqueeze(-1)) / scale.square()
