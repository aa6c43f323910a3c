"""Rows that are one point: identical (x, y) rows become one variable with a larger box."""

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Problem", "merge_duplicates"]

_SMALL = 1e-6  # boxes for which the tolerances of the solvers are too coarse
_SAME = 1e-13  # of the lengths of two points: how far apart entries of K are that count as equal


class Problem(NamedTuple):
    """An SVM whose rows are all different, scaled to a kernel with mean diagonal 1, or to boxes of 1 if less.

    Dividing K by a number and multiplying the boxes by it leaves every decision value as it is, and
    lets absolute tolerances mean something.
    """

    K: Tensor
    """Kernel matrix of the m variables, divided by `scale`, (m, m)."""

    y: Tensor
    """Labels, (m,)."""

    box: Tensor
    """Upper bounds: the sum of C over the rows of a variable, times `scale`, (m,)."""

    row_box: Tensor
    """C of each row times `scale`, (n,)."""

    variable: Tensor
    """Which variable each row belongs to, (n,)."""

    scale: Tensor
    """What the kernel matrix that came in was divided by, ()."""

    rounding: Tensor
    """e of Note [rounding of K], of K as it is here, (m,)."""


def _scale(K: Tensor, C: Tensor) -> Tensor:
    """What K is divided by: its mean diagonal, or less if no box would come near 1 then."""
    mean, largest = K.diagonal().mean(), C.amax()
    mean = torch.where(mean > 0, mean, 1.0)  # K = 0 is a kernel too
    return torch.where(mean * largest < _SMALL, 1 / largest, mean)


def merge_duplicates(K: Tensor, y: Tensor, C: Tensor, rounding: Tensor) -> list[Problem]:
    """Merge rows with the same label and, to rounding, the same row of K, for each of the boxes C (B, n).

    `rounding` (n,) is e of Note [rounding of K].

    A random projection of the rows of K brings candidates side by side; each is then compared in
    full with the first of its run. Titanic's 150 rows become 19 variables, and the ties between
    copies, which make exact paths cycle, are gone.
    """
    n = K.shape[-1]
    scale = _scale(K, C)
    generator = torch.Generator("cpu").manual_seed(0)
    probe = torch.randn(n, generator=generator, dtype=K.dtype, device="cpu").to(K.device)
    low, high = torch.aminmax(K)
    key, order = torch.sort(K @ probe)
    tolerance = 1e-13 * n * torch.maximum(high, -low)
    starts = torch.ones(n, dtype=torch.bool, device=K.device)
    starts[1:] = key[1:] - key[:-1] > tolerance
    if bool(starts.all()):
        every = torch.arange(n, device=K.device)
        K, rounding = K / scale, rounding / scale.sqrt()
        return [Problem(K, y, box, box, every, scale, rounding) for box in C * scale]
    run = torch.cumsum(starts, 0) - 1
    first = order[starts][run]  # (n,) a representative of each run
    same = order == first
    doubt = (~same).nonzero()[:, 0]
    length = K.diagonal().clamp_min(0).sqrt()  # rounding of k_ij is relative to both
    shorter = 1 / length.clamp_min(torch.finfo(K.dtype).tiny)  # a point at 0 differs by 0 from its copies
    apart = K.index_select(0, order[doubt]).sub_(K.index_select(0, first[doubt]))
    apart = apart.abs_().mul_(shorter).amax(-1).mul_(shorter[first[doubt]])
    differs = apart > _SAME
    same[doubt] = ~differs
    moved = apart.masked_fill(differs, 0).amax()  # entries of K, by merging
    label = torch.empty(n, dtype=torch.long, device=K.device)
    label[order] = torch.where(same, first, order)
    label = 2 * label + (y > 0)
    _, variable = torch.unique(label, return_inverse=True)
    m = int(variable.max()) + 1
    chosen = torch.full((m,), n, device=K.device).scatter_reduce_(
        0, variable, torch.arange(n, device=K.device), "amin"
    )
    rounding = rounding[chosen] + 2 * moved.sqrt() * length[chosen]
    K, y, rounding = K[chosen][:, chosen] / scale, y[chosen], rounding / scale.sqrt()
    boxes = torch.zeros(len(C), m, dtype=K.dtype, device=K.device).index_add_(1, variable, C * scale)
    return [
        Problem(K, y, box, row_box, variable, scale, rounding)
        for box, row_box in zip(boxes, C * scale, strict=True)
    ]
