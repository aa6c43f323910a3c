"""K = F F^T for kernel matrices of low rank: linear kernels, smooth ones in few dimensions.

Note [rounded kernels]
A kernel matrix of rank p that was rounded to float32 has n directions: n - p of them are rounding, of
both signs, and paths that follow these hardly end, and where they do, C times the rounding decides.
So if a positive semi-definite matrix of low rank lies within rounding of K, that one is used: the
projection of K on the leading columns, without eigenvalues that rounding alone may have made. The
decision values come nearer to those of the K that was rounded, too.

Note [kernels far from 0]
An SVM with a bias is that of the points phi_i - c, whatever c is: only the bias changes when s_i + s_j is
taken from every k_ij, s_i = <phi_i, c> - |c|^2 / 2. Where entries hardly differ, as those of rows far from
the origin, tolerances that are relative to k_ii take the differences, on which everything depends, for
rounding. So c is then the mean of the points. The rounding of the K that came in stays, Note [rounding of K],
and is counted eight times: what a power of inner products, or a sum of many terms, has lost counts now.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from torchloo.svm.tolerances import FAR, INDEPENDENT, MISSING, UNITS, UNITS_MISSING

__all__ = ["InDouble", "in_double", "low_rank_factor"]

_PLACES = 16  # columns chosen at once
_PATIENCE = 60  # columns that may bring nothing: a linear kernel is complete all at once
_PACE = 8  # digits by which what is missing must shrink for all the columns that there may be


def low_rank_factor(K: Tensor, tolerance: float = MISSING) -> Tensor | None:
    """F (m, p) with p at most m / 3 and K = F F^T to `tolerance` of its mean diagonal, or None.

    Cholesky with pivots, sixteen columns at a time: those with the largest of the diagonal of
    K - F F^T, which is positive semi-definite, so that its diagonal proves that nothing is missing.

    Cost 2 m p^2. Memory m p.
    """
    m = K.shape[-1]
    if m < 3 * _PLACES:
        return None
    most, mean = m // 3, K.diagonal().mean()
    F = K.new_zeros(m, most + _PLACES)
    left, p = K.diagonal().clone(), 0
    places = torch.linspace(0, m - 1, _PLACES, device=K.device).long()
    while True:
        G = torch.addmm(K[:, places], F[:, :p], F[places, :p].T, alpha=-1)  # (m, 16)
        w, V = torch.linalg.eigh(G[places])
        keep = w > torch.maximum(INDEPENDENT * w[-1], 0.1 * tolerance * mean)
        V, w = V[:, keep], w[keep]
        torch.mm(G, V / w.sqrt(), out=F[:, p : p + len(w)])
        left -= F[:, p : p + len(w)].square().sum(1)
        p += len(w)
        largest, places = left.topk(_PLACES)
        missing = float(largest[0] / mean)
        if missing <= tolerance:
            return F[:, :p].contiguous()
        if p > most or not len(w) or (p > _PATIENCE and missing > 10 ** (-_PACE * p / most)):
            return None


class InDouble(NamedTuple):
    """A kernel matrix as the solvers want it."""

    K: Tensor
    """In float64, (..., n, n)."""

    rounding: Tensor
    """e of Note [rounding of K], (..., n)."""

    shift: Tensor | None
    """What was taken from K: K + shift_i + shift_j is the one that came in, (..., n); None: nothing."""


def in_double(K: Tensor) -> InDouble:
    """K (..., n, n) in float64.

    A K of less precision and of low rank is replaced, Note [rounded kernels]; one whose entries hardly differ
    is centred, Note [kernels far from 0].

    Cost 4 n^2 p for a K of rank p. Memory 3 n^2.
    """
    double, unit = K.double(), torch.finfo(K.dtype).eps
    diagonal = double.diagonal(dim1=-2, dim2=-1)
    rounding = (unit / 2 * diagonal.clamp_min(0)).sqrt()
    if K.dtype != torch.float64:
        double, moved = _of_low_rank(double, unit)
        rounding = rounding + moved[..., None].sqrt()
        diagonal = double.diagonal(dim1=-2, dim2=-1)
    far = double.mean((-2, -1)) > FAR * diagonal.mean(-1)
    if not bool(far.any()):
        return InDouble(double, rounding, None)
    rows = double.mean(-1)
    shift = (rows - rows.mean(-1, keepdim=True) / 2) * far[..., None]
    rounding = torch.where(far[..., None], UNITS**0.5 * rounding, rounding)
    return InDouble(double - (shift[..., None] + shift[..., None, :]), rounding, shift)


def _of_low_rank(double: Tensor, unit: float) -> tuple[Tensor, Tensor]:
    """What Note [rounded kernels] takes for each K rounded to so many units, and how far it is from K."""
    matrices = double.reshape(-1, *double.shape[-2:])
    nears = [_nearest_of_low_rank(k, unit) for k in matrices]
    moved = torch.stack([(near - k).abs().amax() for near, k in zip(nears, matrices, strict=True)])
    return torch.stack(nears).view_as(double), moved.view(double.shape[:-2])


def _nearest_of_low_rank(double: Tensor, unit: float) -> Tensor:
    """That of one K (n, n); K itself if there is none."""
    factor = low_rank_factor(double, UNITS_MISSING * unit)
    if factor is None:
        return double
    Q = torch.linalg.qr(factor)[0]
    w, V = torch.linalg.eigh(Q.T @ (double @ Q))
    rounding = unit * double.diagonal().amax()
    keep = w > 2 * len(double) ** 0.5 * rounding  # rounding of all entries has a norm of n^(1/2) units
    F = (Q @ V[:, keep]) * w[keep].sqrt()
    near = F @ F.T
    return near if bool((near - double).abs().amax() <= UNITS * rounding) else double
