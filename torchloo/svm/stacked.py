"""Parts of stacked kernel matrices: a set of variables for each, padded to the largest."""

import torch
from torch import Tensor

__all__ = ["block_of", "dot", "rows_of", "set_of", "times_vector"]


def set_of(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Indices (B, s) where the mask (B, m) is true, in order, padded with others; and which are true.

    s is the size of the largest set.
    """
    if len(mask) == 1:
        S = mask[0].nonzero()[:, 0][None]
        return S, torch.ones_like(S, dtype=torch.bool)
    S = mask.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, : int(mask.sum(1).max())]
    return S, mask.gather(1, S)


def rows_of(K: Tensor, S: Tensor) -> Tensor:
    """Rows S (B, s) of K (B, m, m), (B, s, m)."""
    if len(K) == 1:  # much faster than an index by tensors
        return K[0].index_select(0, S[0])[None]
    return K[torch.arange(len(K), device=K.device)[:, None], S]


def block_of(K: Tensor, S: Tensor, T: Tensor | None = None) -> Tensor:
    """Rows S (B, s) and columns T (B, t), or S again, of K (B, m, m): (B, s, t)."""
    T = S if T is None else T
    if len(K) == 1:
        return K[0].index_select(0, S[0]).index_select(1, T[0])[None]
    return K[torch.arange(len(K), device=K.device)[:, None, None], S[:, :, None], T[:, None, :]]


def times_vector(K: Tensor, a: Tensor) -> Tensor:
    """K a for K (..., s, m) and a (..., m): (..., s)."""
    return (K @ a[..., None])[..., 0]


def dot(x: Tensor, z: Tensor) -> Tensor:
    """The inner product of each x (B, m) with z (m,), or with its own, (B, m); (B,)."""
    return x @ z if z.ndim == 1 else (x * z).sum(-1)
