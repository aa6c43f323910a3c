"""Rows that are one point: identical (x, y) rows become one variable with a larger box."""

import torch
from torch import Tensor

from torchloo.svm.records import SVMProblem
from torchloo.svm.stacked import block_of, rows_of, set_of
from torchloo.svm.tolerances import SAME, SMALL_BOX

__all__ = ["merge_duplicates"]


def _scale(mean: Tensor, C: Tensor) -> Tensor:
    """What each K is divided by: its mean diagonal (B,), or less if no box (B, n) would come near 1; (B,)."""
    largest = C.amax(1)
    mean = torch.where(mean > 0, mean, 1.0)  # K = 0 is a kernel too
    return torch.where(mean * largest < SMALL_BOX, 1 / largest, mean)


def merge_duplicates(
    K: Tensor, y: Tensor, C: Tensor, rounding: Tensor, kernel: Tensor | None = None
) -> list[tuple[Tensor, SVMProblem]]:
    """Merge rows with the same label and, to rounding, the same row of K.

    For G kernel matrices (G, n, n) with `rounding` (G, n), e of Note [rounding of K], y and C (B, n), and
    which K each of the B problems has, (B,); default its own. Comes back by size: which of the B are in each
    SVMProblem, and that one. Problems without copies go on sharing their K.

    A random projection of the rows of K brings candidates side by side; each is then compared in
    full with the first of its run. Titanic's 150 rows become 19 variables, and the ties between
    copies, which make exact paths cycle, are gone.
    """
    n = K.shape[-1]
    generator = torch.Generator("cpu").manual_seed(0)
    probe = torch.randn(n, generator=generator, dtype=K.dtype, device="cpu").to(K.device)
    key, order = torch.sort(K @ probe)
    diagonal = K.diagonal(dim1=1, dim2=2)  # with the largest entry of K
    tolerance = SAME * n * diagonal.amax(1)
    starts = torch.ones_like(order, dtype=torch.bool)
    starts[:, 1:] = key[:, 1:] - key[:, :-1] > tolerance[:, None]
    plain, mean = starts.all(1), diagonal.mean(1)
    if kernel is not None:
        plain, mean, rounding, order, starts = (x[kernel] for x in (plain, mean, rounding, order, starts))
    scale = _scale(mean, C)
    if kernel is not None and bool((scale != mean).any()):
        K, kernel = K[kernel], None
    with_copies = (~plain).nonzero()[:, 0]
    groups = []
    if len(with_copies) < len(y):
        rows = plain.nonzero()[:, 0]
        own = (_some(x, rows) for x in (y, C, rounding, scale))
        which, matrices = (None, _some(K, rows)) if kernel is None else (_some(kernel, rows), K)
        groups.append((rows, _unmerged(which, matrices, *own)))
    if len(with_copies):
        parts = (_some(x, with_copies) for x in (y, C, rounding, scale, order, starts))
        matrices = _some(K, with_copies) if kernel is None else K[kernel[with_copies]]
        groups += [(with_copies[rows], problem) for rows, problem in _merged(matrices, *parts)]
    return groups


def _some(x: Tensor, rows: Tensor) -> Tensor:
    """The entries at `rows`, without a copy where these are all."""
    return x if rows.shape[0] == x.shape[0] else x.index_select(0, rows)


def _unmerged(
    kernel: Tensor | None, K: Tensor, y: Tensor, C: Tensor, rounding: Tensor, scale: Tensor
) -> SVMProblem:
    """Problems without copies; those that share a K have one scale."""
    box = C * scale[:, None]
    variable = torch.arange(K.shape[-1], device=K.device).expand_as(box)
    rounding = rounding / scale.sqrt()[:, None]
    divisor = scale if kernel is None else torch.ones_like(K[:, 0, 0]).index_copy_(0, kernel, scale)
    return SVMProblem(K / divisor[:, None, None], y, box, box, variable, scale, rounding, kernel)


def _merged(
    K: Tensor, y: Tensor, C: Tensor, rounding: Tensor, scale: Tensor, order: Tensor, starts: Tensor
) -> list[tuple[Tensor, SVMProblem]]:
    """Problems with copies by numbers of variables; `order` and `starts` (B, n) are runs of candidates."""
    n = K.shape[-1]
    place = torch.arange(n, device=K.device).expand_as(order)
    first = order.gather(1, place.masked_fill(~starts, 0).cummax(1).values)  # of each run, (B, n)
    length = K.diagonal(dim1=1, dim2=2).clamp_min(0).sqrt()  # rounding of k_ij is relative to both
    shorter = 1 / length.clamp_min(torch.finfo(K.dtype).tiny)  # a point at 0 differs by 0 from its copies
    doubt, _ = set_of(order != first)  # (B, d)
    others, firsts = order.gather(1, doubt), first.gather(1, doubt)
    difference = rows_of(K, others).sub_(rows_of(K, firsts)).abs_()  # (B, d, n)
    apart = difference.mul_(shorter[:, None]).amax(2)
    apart *= shorter.gather(1, firsts)
    differs = apart > SAME
    same = torch.ones_like(starts).scatter_(1, doubt, ~differs)
    moved = apart.masked_fill(differs, 0).amax(1, keepdim=True)  # entries of K, by merging
    label = torch.empty_like(order).scatter_(1, order, torch.where(same, first, order))
    label = 2 * label + (y > 0)
    chosen = torch.full((len(K), 2 * n), n, device=K.device).scatter_reduce_(1, label, place, "amin")
    own = chosen.gather(1, label) == place  # the first row of each variable, (B, n)
    number = own.cumsum(1) - 1
    variable = number.gather(1, chosen.gather(1, label))
    rounding = (rounding + 2 * moved.sqrt() * length) / scale.sqrt()[:, None]
    sizes, groups = own.sum(1), []
    for m in sorted(set(sizes.tolist())):
        rows = (sizes == m).nonzero()[:, 0]
        parts = (K, y, C, rounding, scale, own, variable)
        K_m, y_m, C_m, rounding_m, scale_m, own_m, variable_m = (_some(x, rows) for x in parts)
        firsts = own_m.nonzero()[:, 1].view(-1, m)
        row_box = C_m * scale_m[:, None]
        box = row_box.new_zeros(len(rows), m).scatter_add_(1, variable_m, row_box)
        K_m = block_of(K_m, firsts) / scale_m[:, None, None]
        y_m, rounding_m = y_m.gather(1, firsts), rounding_m.gather(1, firsts)
        groups.append((rows, SVMProblem(K_m, y_m, box, row_box, variable_m, scale_m, rounding_m)))
    return groups
