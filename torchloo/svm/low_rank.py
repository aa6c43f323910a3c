"""K = F F^T for kernel matrices of low rank: linear kernels, smooth ones in few dimensions.

Note [rounded kernels]
A kernel matrix of rank p that was rounded to float32 has n directions: n - p of them are rounding, of
both signs, and paths that follow these take for ever and end where C times the rounding leads them.
So if a positive semi-definite matrix of low rank lies within rounding of K, that one is used: the
projection of K on the leading columns, without eigenvalues that rounding alone may have made. The
decision values come nearer to those of the K that was rounded, too.
"""

import torch
from torch import Tensor

__all__ = ["in_double", "low_rank_factor"]

_PLACES = 16  # columns chosen at once
_MISSING = 1e-10  # of the mean diagonal may be missing from F F^T
_ROUNDED, _NEAR = 64, 8  # units of rounding that may be missing; and between K and what replaces it
_PATIENCE = 60  # columns that may bring nothing: a linear kernel is complete all at once
_PACE = 8  # digits by which what is missing must shrink for all the columns that there may be
_INDEPENDENT = 1e-7  # eigenvalues of a block of columns, relative to the largest


def low_rank_factor(K: Tensor, tolerance: float = _MISSING) -> Tensor | None:
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
        keep = w > torch.maximum(_INDEPENDENT * w[-1], 0.1 * tolerance * mean)
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


def in_double(K: Tensor) -> tuple[Tensor, Tensor]:
    """K (n, n) in float64, and e of Note [rounding of K], (n,).

    A K of less precision and of low rank is replaced, Note [rounded kernels].

    Cost 4 n^2 p for a K of rank p. Memory 3 n^2.
    """
    double, unit = K.double(), torch.finfo(K.dtype).eps
    rounding = (unit * double.diagonal().clamp_min(0)).sqrt()
    if K.dtype == torch.float64:
        return double, rounding
    near = _of_low_rank(double, unit)
    if near is None:
        return double, rounding
    return near, rounding + (near - double).abs().amax().sqrt()


def _of_low_rank(double: Tensor, unit: float) -> Tensor | None:
    """What Note [rounded kernels] takes for a K that was rounded to so many units; None if it is K itself."""
    factor = low_rank_factor(double, _ROUNDED * unit)
    if factor is None:
        return None
    Q = torch.linalg.qr(factor)[0]
    w, V = torch.linalg.eigh(Q.T @ (double @ Q))
    rounding = unit * double.diagonal().amax()
    keep = w > 2 * len(double) ** 0.5 * rounding  # rounding of all entries has a norm of n^(1/2) units
    F = (Q @ V[:, keep]) * w[keep].sqrt()
    near = F @ F.T
    return near if bool((near - double).abs().amax() <= _NEAR * rounding) else None
