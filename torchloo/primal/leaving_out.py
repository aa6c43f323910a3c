"""Sets of rows left out of a solved primal problem: the formulas, for any batch of sets of one size.

Note [leaving sets out]
Let C = F F^T be the normal matrix of Note [primal form], and B = Omega^{1/2} Z_L F^{-T} the whitened rows of
a set L. Then P_LL = Omega^{1/2} (I - B B^T) Omega^{1/2}, so that

    P_LL^{-1} = Omega^{-1/2} (I - B B^T)^{-1} Omega^{-1/2},    r_L = P_LL^{-1} Omega e_L.

A set with more rows than features takes the other side, of the size of the features:
(I - B B^T)^{-1} = I + B (I - B^T B)^{-1} B^T. Either way the eigenvalues are the 1 - h of the set, whatever
the condition of C. Where the smallest of them is lost to rounding, the set is refitted. It is judged by the
diagonal of the inverse, which is 1 / (1 - h) at most and not much less; pivots may all be harmless when their
product is not. A light row beside heavy ones takes r = e + Omega^{-1/2} B B^T (I - B B^T)^{-1} Omega^{1/2} e,
so that what is rounding for the heavy ones is not divided by its own small weight.

Sets of like size make one batch: a set is padded with rows whose B and e are zero, for which I - B B^T has
the identity and nothing is left out.

All rows at once (whole.py) and rows in blocks (sets.py) call the same functions, differentiable to every
order. In the coordinates of Note [rotated features], B has the rows (zeta f)^{1/2} u.
"""

import torch
from torch import Tensor

from torchloo.guards import values_visible

__all__ = ["LeftOut", "block_of_rest", "leave_out", "root_of_rest", "rows_of_large"]

LeftOut = tuple[Tensor, Tensor, Tensor]
"""Held-out residuals (..., g, s, c), diag(P_LL^{-1}), (..., g, s, 1), and which sets (..., g) are lost."""


def block_of_rest(B: Tensor) -> Tensor:
    """I - B B^T, (..., g, s, s), for whitened rows (..., g, s, p)."""
    if B.shape[-2] == 1:
        return 1 - B.square().sum(-1, keepdim=True)
    return torch.eye(B.shape[-2], dtype=B.dtype, device=B.device) - B @ B.mT


def root_of_rest(rest: Tensor, least: Tensor) -> tuple[Tensor, Tensor]:
    """W with W^T W the inverse of I - B B^T or I - B^T B, (..., g, k, k), and which sets (..., g) are lost.

    The smallest 1 - h must be above `least`, which broadcasts with (..., g). A lost set has the identity
    for W: what comes of it is thrown away, and so is its gradient. None is lost where values cannot be
    looked at: then nothing is refitted.
    """
    unit = torch.eye(rest.shape[-1], dtype=rest.dtype, device=rest.device)
    if not values_visible(rest):
        L = torch.linalg.cholesky_ex(rest).L
        return torch.linalg.solve_triangular(L, unit, upper=False), torch.zeros_like(
            rest[..., 0, 0], dtype=torch.bool
        )
    with torch.no_grad():
        L, info = torch.linalg.cholesky_ex(rest)
        W = torch.linalg.solve_triangular(L, unit, upper=False)
        lost = (info != 0) | ~(W.square().sum(-2).amax(-1) * least < 1)
    if rest.requires_grad:
        L = torch.linalg.cholesky_ex(torch.where(lost[..., None, None], unit, rest)).L
        return torch.linalg.solve_triangular(L, unit, upper=False), lost
    return torch.where(lost[..., None, None], unit, W), lost


def leave_out(B: Tensor, scale: Tensor, e: Tensor, least: Tensor, total: Tensor | None = None) -> LeftOut:
    """What sets of one size leave out; Note [leaving sets out].

    Args:
        B: whitened rows, (..., g, s, p).
        scale: square roots of their weights, (..., g, s, 1).
        e: training residuals, (..., g, s, c).
        least: the 1 - h below which a set is lost to rounding; broadcasts with (..., g).
        total: F^{-1} C F^{-T} as it is found, (..., p, p): the identity but for the rounding of F, which so
            does no harm to sets of more rows than features. None for the identity.
    """
    if B.shape[-2] > B.shape[-1]:
        rest = block_of_rest(B.mT) if total is None else total.unsqueeze(-3) - B.mT @ B
        W, lost = root_of_rest(rest, least)
        return *rows_of_large(B, scale, e, W, B.mT @ (scale * e)), lost
    if B.shape[-2] == 1:
        one = block_of_rest(B)  # (..., g, 1, 1)
        lost = torch.zeros_like(one[..., 0, 0], dtype=torch.bool)
        if values_visible(one):
            lost = ~(one[..., 0, 0] > least)
            one = torch.where(lost[..., None, None], 1.0, one)
        return e / one, 1 / (one * scale.square()), lost
    W, lost = root_of_rest(block_of_rest(B), least)
    shift = B @ (B.mT @ (W.mT @ (W @ (scale * e))))
    return e + shift / scale, W.square().sum(-2).unsqueeze(-1) / scale.square(), lost


def rows_of_large(B: Tensor, scale: Tensor, e: Tensor, W: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """Held-out residuals and diag(P_LL^{-1}) of some rows of large sets.

    W^T W is the inverse of I - B^T B, (..., g, p, p), and t = B^T Omega^{1/2} e, (..., g, p, c), of all rows.
    """
    half = W @ B.mT  # (..., g, p, s)
    shift = half.mT @ (W @ t)
    return e + shift / scale, (1 + half.square().sum(-2).unsqueeze(-1)) / scale.square()
