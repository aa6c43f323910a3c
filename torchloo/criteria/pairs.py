"""Counting over pairs of rows: ranks by sorting, logistic sums in blocks, pairs held out together."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchloo.guards import values_visible

__all__ = ["PAIRS", "by_class", "fraction_above", "logistic_sum", "pair_terms", "tau_b"]

PAIRS = 1 << 21
"""How many (positive, negative) pairs are computed at once."""


def fraction_above(outputs: Tensor, positive: Tensor) -> Tensor:
    """Fraction of (positive, negative) pairs with the positive above, ties half: (..., n) -> (...)."""
    ascending, order = outputs.contiguous().sort(-1)
    positive = positive.gather(-1, order)
    before = pad(positive.logical_not().cumsum(-1), (1, 0))  # (..., n + 1): negatives among the first k
    below = before.gather(-1, torch.searchsorted(ascending, ascending))  # negatives ranked below
    up_to = before.gather(-1, torch.searchsorted(ascending, ascending, right=True))  # or tied
    twice_above = ((below + up_to) * positive).sum(-1)
    positives = positive.sum(-1)
    negatives = outputs.shape[-1] - positives
    return twice_above.to(outputs.dtype) / (2 * positives * negatives).to(outputs.dtype)


class Side(NamedTuple):
    """The rows of one class, padded to the largest count in the batch."""

    row: Tensor
    """Row numbers, (..., size)."""

    mask: Tensor
    """1 for rows of the class, 0 for padding, (..., size)."""


def by_class(positive: Tensor, dtype: torch.dtype) -> tuple[Side, Side]:
    """Positive and negative rows of every problem of a batch: (..., n) boolean -> two sides."""
    n = positive.shape[-1]
    order = positive.to(torch.int8).argsort(dim=-1, descending=True, stable=True)  # positives first
    count = positive.sum(-1, keepdim=True)
    most_positive, most_negative = n, n  # padding, if the counts cannot be read
    if values_visible(count):
        most_positive, fewest_positive = torch.stack([count.max(), count.min()]).tolist()
        most_negative = n - fewest_positive
    position = torch.arange(n, device=positive.device)
    positive_mask = (position[:most_positive] < count).to(dtype)
    negative_mask = (position[:most_negative] < n - count).to(dtype)
    negatives_first = order.flip(-1)
    return (
        Side(order[..., :most_positive], positive_mask),
        Side(negatives_first[..., :most_negative], negative_mask),
    )


class _LogisticSum(torch.autograd.Function):
    """R_i = sum_j w_j phi(g_j - f_i), phi the `order`-th derivative of the logistic, in blocks of rows.

    Its derivatives are sums of the same form, one order up, so that backward calls it again: memory
    stays at a block in every derivative. f (..., p), g (..., q), w (..., q) -> R (..., p).
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(f: Tensor, g: Tensor, w: Tensor, order: int) -> Tensor:
        polynomial = [0.0, 1.0]  # phi as a polynomial in the logistic s; s' = s - s^2
        for _ in range(order):
            slopes = [power * factor for power, factor in enumerate(polynomial)]
            polynomial = [a - b for a, b in zip([*slopes, 0.0], [0.0, *slopes], strict=True)]
        sums = []
        rows_at_once = max(1, PAIRS // max(1, g.numel()))
        for block in f.split(rows_at_once, dim=-1):
            s = torch.sigmoid(g.unsqueeze(-2) - block.unsqueeze(-1))  # (..., block, q)
            phi = torch.full_like(s, polynomial[-1])
            for factor in polynomial[-2::-1]:
                phi = phi.mul_(s).add_(factor)
            sums.append((phi @ w.unsqueeze(-1))[..., 0])
        return torch.cat(sums, -1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, int], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:3])
        ctx.order = inputs[3]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        f, g, w = ctx.saved_tensors
        (upstream,) = grads
        order = ctx.order
        apply = _LogisticSum.apply
        f_bar = -upstream * apply(f, g, w, order + 1)
        g_bar = w * apply(-g, -f, upstream, order + 1)
        w_bar = apply(-g, -f, upstream, order) if ctx.needs_input_grad[2] else None
        return f_bar, g_bar, w_bar, None


def logistic_sum(f: Tensor, g: Tensor, w: Tensor) -> Tensor:
    """sum_j w_j / (1 + exp(f_i - g_j)), (..., p), for f (..., p), g and w (..., q); differentiable."""
    return _LogisticSum.apply(f, g, w, 0)


# Note [Kendall's tau by integers]
# Every row gets an integer rank in its cluster, plus n times the number of the cluster: such keys order
# the rows by cluster first, so that counting over all rows never counts a pair across clusters, and
# key // n says whose count it is. With x, z the keys of targets and outputs and xz those of both
# (lexicographic), Knight (1966): let n0, nx, nz, nxz be the number of all pairs, of those tied in x, in z
# and in both, and q the number of inversions of z once sorted by xz. Then
#     tau_b = (n0 - nx - nz + nxz - 2 q) / sqrt((n0 - nx) (n0 - nz)).


def _keys(values: Tensor, cluster: Tensor) -> Tensor:
    """Integers that order rows by cluster, then value, equal where both are: (..., n) -> (..., n)."""
    ascending, order = values.sort(-1)
    larger_than_previous = ascending[..., 1:] != ascending[..., :-1]
    rank_in_order = pad(larger_than_previous.long(), (1, 0)).cumsum(-1)
    rank = torch.empty_like(order).scatter_(-1, order, rank_in_order)
    return rank + cluster * values.shape[-1]


def _tied_pairs(keys: Tensor, clusters: int) -> Tensor:
    """Number of pairs of equal keys in each cluster: (..., n) -> (..., clusters)."""
    n = keys.shape[-1]
    ascending = keys.sort(-1).values
    earlier = torch.arange(n, device=keys.device) - torch.searchsorted(ascending, ascending)
    pairs = keys.new_zeros(*keys.shape[:-1], clusters)
    return pairs.scatter_add_(-1, ascending // n, earlier)


def _inversions(keys: Tensor, clusters: int) -> Tensor:
    """Number of pairs in descending order in each cluster, by merging: (..., n) -> (..., clusters)."""
    n = keys.shape[-1]
    size = 1 << (n - 1).bit_length()
    keys = pad(keys, (0, size - n), value=clusters * n)  # the padding ends up in a cluster of its own
    counts = keys.new_zeros(*keys.shape[:-1], clusters + 1)
    width = 1
    while width < size:
        halves = keys.unflatten(-1, (-1, 2, width))  # (..., size / (2 width), 2, width), halves sorted
        left, right = (half.contiguous() for half in halves.unbind(-2))
        greater = width - torch.searchsorted(left, right, right=True)
        counts.scatter_add_(-1, right.flatten(-2) // n, greater.flatten(-2))
        keys = halves.flatten(-2).sort(-1).values.flatten(-2)
        width *= 2
    return counts[..., :clusters]


def tau_b(targets: Tensor, outputs: Tensor, cluster: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """tau_b in each cluster, 0 where it has none, and whether the targets differ there.

    targets, outputs (..., n); cluster (n,), numbers below k; sizes (k,) -> (..., k), (..., k).
    """
    n = targets.shape[-1]
    k = len(sizes)
    x = _keys(targets.contiguous(), cluster)  # (..., n)
    z = _keys(outputs.contiguous(), cluster)
    rank_x, rank_z = x - cluster * n, z - cluster * n
    xz = _keys(rank_x * n + rank_z, cluster)
    n0 = sizes * (sizes - 1) // 2
    nx = _tied_pairs(x, k)  # (..., k)
    nz = _tied_pairs(z, k)
    nxz = _tied_pairs(xz, k)
    q = _inversions(z.gather(-1, xz.argsort(-1)), k)
    untied_x, untied_z = n0 - nx, n0 - nz
    scale = (untied_x.double() * untied_z.double()).sqrt()
    tau = (untied_x - nz + nxz - 2 * q) / scale.clamp(min=1)  # 0 / 1 where scale is 0
    return tau, untied_x > 0


def pair_terms(P: Tensor, Y: Tensor, a: Tensor, i: Tensor, j: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """f_i - f_j with both rows held out, the size of its terms, and det P_LL: each (..., c, p, q).

    P (..., c, n, n); Y, a (..., c, n); rows i (..., c, p) against rows j (..., c, q).
    """
    *batch, n = Y.shape
    p, q = i.shape[-1], j.shape[-1]
    P_i = P.gather(-2, i.unsqueeze(-1).expand(*batch, p, n))
    P_ij = P_i.gather(-1, j.unsqueeze(-2).expand(*batch, p, q))
    d = P.diagonal(dim1=-2, dim2=-1)  # (..., c, n)
    d_i, y_i, a_i = (t.gather(-1, i).unsqueeze(-1) for t in (d, Y, a))  # (..., c, p, 1)
    d_j, y_j, a_j = (t.gather(-1, j).unsqueeze(-2) for t in (d, Y, a))  # (..., c, 1, q)
    det = d_i * d_j - P_ij.square()
    r_i = (d_j * a_i - P_ij * a_j) / det
    r_j = (d_i * a_j - P_ij * a_i) / det
    size = y_i.abs() + y_j.abs() + r_i.abs() + r_j.abs()
    return (y_i - r_i) - (y_j - r_j), size, det
