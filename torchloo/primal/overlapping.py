"""Sets of rows that may overlap, left out by their explicit features.

Note [overlapping sets of features]
With F F^T = C the normal matrix of all rows and U = Omega^{1/2} Z F^{-T} (Note [primal form]),

    P_LL = Omega_L^{1/2} (I - U_L U_L^T) Omega_L^{1/2},
    (I - U_L U_L^T)^{-1} = I + U_L (I - U_L^T U_L)^{-1} U_L^T,

so a set takes a matrix of its own size or, on the other side, of the number of features, whichever is
smaller. F is held constant, and the derivatives are those of F^{-1} C F^{-T}, the identity in value: see
Note [large sets]. Sets whose 1 - h is lost to rounding are refitted one by one (Note [leaving out by sums]).
"""

import torch
from torch import Tensor

from torchloo.blocks import solve_blocks
from torchloo.guards import Guard, values_visible
from torchloo.leave_out_sets import LeaveOutSets, Parts
from torchloo.primal.sums import is_lost, leave_out_lost, whitened

__all__ = ["leave_out_by_features"]


def leave_out_by_features(
    sets: LeaveOutSets,
    given: tuple[Tensor, Tensor, Tensor, Tensor],
    a: Tensor,
    factor: Tensor,
    least: Tensor,
    guard: Guard,
) -> Parts:
    """Held-out rows from Z (..., n, p), R, weights and Y, by Note [overlapping sets of features].

    Args:
        sets: what is left out.
        given: Z (..., n, p), R (..., p, p), weight (..., n) and Y (..., n, c).
        a: P Y, (..., n, c).
        factor: of C, (..., p, p), or (..., p) if diagonal; held constant.
        least: the 1 - h below which a set is lost to rounding, (...).
        guard: demands on the values.

    Differentiable to every order. Cost n p^2, and s p min(s, p) for each set; memory 4 n p numbers.
    """
    Z, R, weight, _ = given
    scale = weight.sqrt().unsqueeze(-1)
    V = whitened(factor, (scale * Z).mT).mT  # (..., n, p)
    C = whitened(factor, whitened(factor, R).mT) + V.mT @ V  # the identity, in value
    U = torch.linalg.solve_triangular(torch.linalg.cholesky(C), V.mT, upper=False).mT
    p = Z.shape[-1]

    def one(rows: Tensor, U: Tensor, b: Tensor, scale: Tensor) -> Parts:
        U_L, b_L, scale_L = (t[..., rows, :] for t in (U, b, scale))  # (..., g, s, p)
        small = rows.shape[-1] <= p
        remainder = U_L @ U_L.mT if small else U_L.mT @ U_L
        remainder = torch.diag_embed(torch.ones_like(remainder[..., 0])) - remainder
        lost = is_lost(remainder, least)
        # A harmless matrix in place of a lost one: what comes of it is thrown away, and so is its gradient.
        unit = torch.diag_embed(torch.ones_like(remainder[..., 0]))
        remainder = torch.where(lost[..., None, None], unit, remainder)
        if small:
            (r,), (variance,) = solve_blocks([b_L], [remainder], guard)
        else:
            half = torch.linalg.solve_triangular(torch.linalg.cholesky(remainder), U_L.mT, upper=False)
            r, variance = b_L + half.mT @ (half @ b_L), 1 + half.square().sum(-2).unsqueeze(-1)
        r, variance = r / scale_L, variance / scale_L.square()
        if values_visible(lost) and bool(lost.any()):
            r, variance = _refitted(given, rows, lost, r, variance, guard)
        return r, variance, lost

    return sets.leave_out(U, p, one, U, a / scale, scale)


def _refitted(
    given: tuple[Tensor, ...], rows: Tensor, lost: Tensor, r: Tensor, variance: Tensor, guard: Guard
) -> tuple[Tensor, Tensor]:
    """Residuals (..., g, s, c) and variances (..., g, s, 1) of sets (g, s), the lost ones refitted."""
    index = lost.nonzero(as_tuple=True)
    residuals, variances = [], []
    for *problem, number in zip(*(axis.tolist() for axis in index), strict=True):
        Z, R, weight, Y = (t[tuple(problem)] for t in given)
        _, r_L, variance_L = leave_out_lost(Z, R, weight, Y, [rows[number].unsqueeze(0)], guard)
        residuals.append(r_L)
        variances.append(variance_L)
    return r.index_put(index, torch.stack(residuals)), variance.index_put(index, torch.stack(variances))
