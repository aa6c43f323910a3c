"""K = F F^T for kernel matrices of low rank: linear kernels, smooth ones in few dimensions."""

import torch
from torch import Tensor

__all__ = ["low_rank_factor"]

_WORTH = 256  # rows: below, nothing is gained
_PLACES = 16  # columns chosen at once
_MISSING = 1e-10  # of the mean diagonal may be missing from F F^T
_PATIENCE = 60  # columns that may bring nothing: a linear kernel is complete all at once
_PACE = 8  # digits by which what is missing must shrink for all the columns that there may be
_INDEPENDENT = 1e-7  # eigenvalues of a block of columns, relative to the largest


def low_rank_factor(K: Tensor) -> Tensor | None:
    """F (m, p) with K = F F^T to 1e-10 of its diagonal and p at most m / 3, if there is one, else None.

    Cholesky with pivots, sixteen columns at a time: those with the largest of the diagonal of
    K - F F^T, which is positive semi-definite, so that its diagonal proves that nothing is missing.

    Cost 2 m p^2. Memory m p.
    """
    m = K.shape[-1]
    if m < _WORTH:
        return None
    most, mean = m // 3, K.diagonal().mean()
    F = K.new_zeros(m, most + _PLACES)
    left, p = K.diagonal().clone(), 0
    places = torch.linspace(0, m - 1, _PLACES, device=K.device).long()
    while True:
        G = torch.addmm(K[:, places], F[:, :p], F[places, :p].T, alpha=-1)  # (m, 16)
        w, V = torch.linalg.eigh(G[places])
        keep = w > torch.maximum(_INDEPENDENT * w[-1], 0.1 * _MISSING * mean)
        V, w = V[:, keep], w[keep]
        torch.mm(G, V / w.sqrt(), out=F[:, p : p + len(w)])
        left -= F[:, p : p + len(w)].square().sum(1)
        p += len(w)
        largest, places = left.topk(_PLACES)
        missing = float(largest[0] / mean)
        if missing <= _MISSING:
            return F[:, :p].contiguous()
        if p > most or not len(w) or (p > _PATIENCE and missing > 10 ** (-_PACE * p / most)):
            return None
