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

from torchloo.svm.stacked import columns_of, rows_of
from torchloo.svm.tolerances import FAR, INDEPENDENT, MISSING, UNITS, UNITS_MISSING

__all__ = ["InDouble", "in_double", "low_rank_factors"]

_PLACES = 16  # columns chosen at once
_PATIENCE = 60  # columns that may bring nothing: a linear kernel is complete all at once
_PACE = 8  # digits by which what is missing must shrink for all the columns that there may be


def low_rank_factors(K: Tensor, tolerance: float = MISSING) -> list[Tensor | None]:
    """For each of K (T, m, m) an F (m, p) with p at most m / 3 and K = F F^T, or None.

    To `tolerance` of the mean diagonal. Cholesky with pivots, sixteen columns at a time: those with the
    largest of the diagonal of K - F F^T, which is positive semi-definite, so that its diagonal proves that
    nothing is missing.

    Cost 2 m p^2 for each. Memory m^2 / 3.
    """
    T, m = K.shape[:2]
    factors: list[Tensor | None] = [None] * T
    if m < 3 * _PLACES:
        return factors
    most, left = m // 3, K.diagonal(dim1=1, dim2=2).clone()
    mean = left.mean(1)
    F = K.new_zeros(T, most + 2 * _PLACES, m)  # by rows
    machine, p = torch.arange(T, device=K.device), torch.zeros_like(mean, dtype=torch.long)
    places = torch.linspace(0, m - 1, _PLACES, device=K.device).long().expand(T, -1)
    number, known = list(range(T)), 0  # which of the T are left, and how many rows of F any of them has
    while number:
        so_far = F[:, :known]
        at_places = columns_of(so_far, places)
        G = torch.baddbmm(rows_of(K, places, machine), at_places.mT, so_far, alpha=-1)  # (L, 16, m)
        w, V = torch.linalg.eigh(columns_of(G, places))
        keep = w > torch.maximum(INDEPENDENT * w[:, -1:], 0.1 * tolerance * mean[:, None])
        scale = torch.where(keep, w.clamp_min(torch.finfo(w.dtype).tiny).rsqrt(), 0.0)
        found = (V * scale[:, None]).flip(2).mT @ G  # what is kept comes first
        own = torch.arange(len(F), device=K.device)[:, None] * F.shape[1] + p[:, None]
        own = own + torch.arange(_PLACES, device=K.device)
        F.view(-1, m).index_copy_(0, own.flatten(), found.flatten(0, 1))
        left = left - found.square().sum(1)
        count = keep.sum(1)
        p = p + count
        largest, places = left.topk(_PLACES)
        missing = largest[:, 0] / mean
        slow = (p > _PATIENCE) & (missing > 10 ** (-_PACE * p / most))
        complete = missing <= tolerance
        ended = complete | (p > most) | (count == 0) | slow
        ranks, whole, over = torch.stack([p, complete, ended]).tolist()
        known = max(ranks)
        if not any(over):
            continue
        for t, rank in enumerate(ranks):
            if whole[t]:
                factors[number[t]] = F[t, :rank].T.contiguous()
        rest = torch.tensor([t for t, end in enumerate(over) if not end], dtype=torch.long, device=K.device)
        number = [number[t] for t, end in enumerate(over) if not end]
        F, left, mean, machine, p, places = (x[rest] for x in (F, left, mean, machine, p, places))
    return factors


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
    moved = torch.zeros_like(matrices[:, 0, 0])
    by_rank: dict[int, dict[int, Tensor]] = {}
    for t, factor in enumerate(low_rank_factors(matrices, UNITS_MISSING * unit)):
        if factor is not None:
            by_rank.setdefault(factor.shape[1], {})[t] = factor
    nearest = matrices
    for factors in by_rank.values():
        every = len(factors) == len(matrices)
        rows = torch.tensor(list(factors), device=double.device)
        K = matrices if every else matrices[rows]
        Q = torch.linalg.qr(torch.stack(list(factors.values())))[0]
        w, V = torch.linalg.eigh(Q.mT @ (K @ Q))
        rounding = unit * K.diagonal(dim1=1, dim2=2).amax(1)
        # Rounding of all entries has a norm of n^(1/2) units.
        w = torch.where(w > 2 * K.shape[-1] ** 0.5 * rounding[:, None], w, 0.0)
        half = (Q @ V) * w.sqrt()[:, None]
        near = half @ half.mT
        apart = (near - K).abs_().amax((1, 2))
        far = (apart > UNITS * rounding).nonzero()[:, 0]
        if far.numel():
            near[far], apart[far] = K[far], 0.0
        moved[rows] = apart
        nearest = near if every else nearest.index_copy(0, rows, near)
    return nearest.view_as(double), moved.view(double.shape[:-2])
