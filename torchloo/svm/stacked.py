"""Stacked problems: a set of variables for each, padded to the largest; and solutions of each of them.

The host may read values of them at no cost on a CPU; on an accelerator it has to wait for them.
"""

from functools import cached_property

import torch
from torch import Tensor

from torchloo.guards import may_look

__all__ = [
    "Tables",
    "at_once",
    "block_of",
    "columns_of",
    "dot",
    "entries",
    "rounds_per_look",
    "rows_of",
    "set_of",
    "subset",
    "take_rows",
    "times_vector",
    "weighted_rows",
]

_ROUNDS = 8  # of a loop on an accelerator between two looks at values
_ELSEWHERE = 2**25  # numbers worked on at once on an accelerator: a few GiB, with all that they lead to
_LARGE = 200  # columns of matrices of which each is worth a product of its own, where sizes may be read
_TOGETHER = 2**18  # numbers of solutions of several problems worked on at once: more leave a CPU's cache
_LARGEST = 2**20  # the same for solutions of one problem
_FEW = 2**14  # places for solutions in tables of stacked problems that cost less than to wait
_SMALL = 400  # entries of matrices: up to so many `torch.bmm` has loops of its own


def rounds_per_look(x: Tensor) -> int:
    """After how many rounds a loop over x may look at values again."""
    return 1 if may_look(x) else _ROUNDS


def at_once(x: Tensor, numbers: int) -> int:
    """How many numbers like x to work on at once: so many on a CPU, as suits its cache, else all that may."""
    return numbers if may_look(x) else _ELSEWHERE


def take_rows(x: Tensor, rows: Tensor | slice) -> Tensor:
    """x at `rows` of its first axis; a view if they are a slice."""
    return x[rows] if isinstance(rows, slice) else x.index_select(0, rows)


def subset(mask: Tensor) -> Tensor:
    """Indices that include those where the mask (B,) is true: just these where it may be read, else all."""
    if may_look(mask):
        return mask.nonzero()[:, 0]
    return torch.arange(len(mask), device=mask.device)


def set_of(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Indices (B, s) where the mask (B, m) is true, in order, padded with others; and which are true.

    s is the size of the largest set.
    """
    if len(mask) == 1:
        S = mask[0].nonzero()[:, 0][None]
        return S, torch.ones_like(S, dtype=torch.bool)
    order = mask.to(torch.uint8).argsort(dim=1, descending=True, stable=True)
    S = order[:, : int(mask.sum(1).max())]
    return S, mask.gather(1, S)


def _select(x: Tensor, rows: Tensor) -> Tensor:
    """Rows of x (T, l, m), numbered from 0 to T l, in the shape of their numbers.

    Several times faster than an index by tensors, which goes entry by entry.
    """
    return x.reshape(-1, x.shape[-1]).index_select(0, rows.reshape(-1)).view(*rows.shape, -1)


def _row_numbers(K: Tensor, S: Tensor, which: Tensor | None) -> Tensor:
    """Rows S (B, s) of K (B, m, m), or of `which` (B,) of several K (G, m, m), counted through all of K."""
    which = torch.arange(len(K), device=K.device) if which is None else which
    return torch.add(S, which[:, None], alpha=K.shape[1])


def rows_of(K: Tensor, S: Tensor, which: Tensor | None = None) -> Tensor:
    """Rows S (B, s) of K (B, m, m), or of `which` (B,) of several K (G, m, m): (B, s, m)."""
    if len(S) == 1 and which is None:
        return K[0].index_select(0, S[0])[None]
    return _select(K, _row_numbers(K, S, which))


def columns_of(x: Tensor, S: Tensor) -> Tensor:
    """Columns S (B, s) of x (B, l, m), (B, l, s)."""
    if len(x) == 1:
        return x[0].index_select(1, S[0])[None]
    return x.gather(2, S[:, None].expand(-1, x.shape[1], -1))


def entries(x: Tensor, index: Tensor) -> Tensor:
    """Entries of x, numbered through, in the shape of their numbers."""
    return x.reshape(-1).index_select(0, index.reshape(-1)).view_as(index)


def block_of(K: Tensor, S: Tensor, T: Tensor | None = None, which: Tensor | None = None) -> Tensor:
    """Columns T (B, t), or S again, of what `rows_of` gives: (B, s, t)."""
    T, m = S if T is None else T, K.shape[2]
    if (len(S) == 1 and which is None) or 2 * T.shape[1] > m:
        return columns_of(rows_of(K, S, which), T)
    # Entry by entry, which takes half of the time where most columns are not wanted.
    rows = _row_numbers(K, S, which)
    return entries(K, torch.add(T[:, None], rows[:, :, None], alpha=m))


def times_vector(K: Tensor, a: Tensor) -> Tensor:
    """K a for K (..., s, m) and a (..., m): (..., s); rounded for one of several as for it alone."""
    if K.ndim == 2:
        return K @ a
    if K.shape[-1] * K.shape[-2] < _SMALL:
        return (K @ a[..., None])[..., 0]
    return (a[..., None, :] @ K.mT)[..., 0, :]  # as rows, several times faster


def weighted_rows(x: Tensor, rows: Tensor, weight: Tensor, none: int, bags: Tensor | None = None) -> Tensor:
    """Sums of the `rows` (B, k) of x (R, l) by weights (B, k), (B, l); a row `none` costs, and adds, nothing.

    `bags` (B,) are the multiples of k, if known.
    """
    if bags is None:
        bags = torch.arange(0, rows.numel(), rows.shape[1], device=x.device)
    by_frequency, total, sparse, last_bag = False, 0, False, False  # mode 0 is the sum
    terms = weight.reshape(-1)
    return torch.embedding_bag(x, rows.reshape(-1), bags, by_frequency, total, sparse, terms, last_bag, none)[
        0
    ]


def dot(x: Tensor, z: Tensor) -> Tensor:
    """The inner product of each x (B, m) with z (m,), or with its own, (B, m); (B,)."""
    return x @ z if z.ndim == 1 else (x * z).sum(-1)


class Tables:
    """Which of T stacked problems each of N solutions belongs to, in ascending order."""

    def __init__(self, table: Tensor, count: int, most: int | None = None) -> None:
        """`table` (N,) holds numbers below `count`, T; a problem has at most `most` solutions, if known."""
        self.table, self.count, self._most = table, count, most

    def take(self, rows: Tensor | slice) -> "Tables":
        """Those of the solutions at `rows`, which ascend."""
        return Tables(self.table[rows], self.count, self._most)

    @cached_property
    def sizes(self) -> Tensor:
        """How many solutions each problem has, (T,)."""
        sizes = torch.zeros(self.count, dtype=torch.long, device=self.table.device)
        return sizes.index_add_(0, self.table, torch.ones_like(self.table))

    @cached_property
    def _padded(self) -> tuple[int, Tensor]:
        """How many solutions a problem has at most, and places (N,) in a table of so many for each problem.

        Where that number is not known and cannot be had without waiting, that of all if there are few.
        """
        table = self.table
        rank = torch.arange(len(table), device=table.device) - torch.searchsorted(table, table)
        most = len(table) if self._most is None else self._most
        too_many = self._most is None and most * self.count > _FEW
        if len(table) and (may_look(table) or too_many):
            most = int(rank.max()) + 1
        return most, rank + table * most

    def parts(self, width: int) -> list[tuple[slice, slice]]:
        """Some of the problems, and their solutions, that are worked on at once at `width` numbers each."""
        parts: list[tuple[slice, slice]] = []
        begin = first = last = 0
        most, together = (max(1, at_once(self.table, numbers) // width) for numbers in (_LARGEST, _TOGETHER))
        if len(self.table) <= (most if self.count == 1 else together):
            return [(slice(0, self.count), slice(0, len(self.table)))]
        for t, size in enumerate(self.sizes.tolist()):
            if last > first and last + size - first > together:
                parts.append((slice(begin, t), slice(first, last)))
                begin, first = t, last
            last += size
            while last - first > most:  # one problem has too many
                parts.append((slice(t, t + 1), slice(first, first + most)))
                begin, first = t, first + most
        return [*parts, (slice(begin, self.count), slice(first, last))]

    def part(self, problems: slice, solutions: slice) -> "Tables":
        """One of the parts, its problems numbered anew."""
        return Tables(self.table[solutions] - problems.start, problems.stop - problems.start, self._most)

    def each(self, x: Tensor) -> Tensor:
        """What the problem of each solution has, (N, ...) of (T, ...); of one problem without the axis."""
        return x[0] if self.count == 1 else x.index_select(0, self.table)

    def pick(self, x: Tensor, index: Tensor) -> Tensor:
        """Entries (N, k) of what the problems have, (T, l)."""
        if self.count == 1:
            return x[0][index]
        return entries(x, torch.add(index, self.table[:, None], alpha=x.shape[1]))

    def select(self, x: Tensor, columns: Tensor) -> Tensor:
        """The columns (T, a) of the problem of each solution, out of x (N, l): (N, a)."""
        return x.index_select(1, columns[0]) if self.count == 1 else x.gather(1, self.each(columns))

    def insert(self, x: Tensor, columns: Tensor, values: Tensor) -> Tensor:
        """x (N, l) with values (N, a) in the columns (T, a), in place."""
        if self.count == 1:
            return x.index_copy_(1, columns[0], values)
        return x.scatter_(1, self.each(columns), values)

    def any(self, mask: Tensor) -> Tensor:
        """Whether the mask (N, l) is true for any solution of each problem, (T, l)."""
        if self.count == 1:
            return mask.any(0, keepdim=True)
        found = torch.zeros(self.count, mask.shape[1], device=mask.device)
        return found.index_add_(0, self.table, mask.to(found)) > 0

    def rows(self, K: Tensor, index: Tensor) -> Tensor:
        """Row index[i] (N,) of the K of each solution, (N, m) of (T, m, m)."""
        if self.count == 1:
            return K[0].index_select(0, index)
        return _select(K, torch.add(index, self.table, alpha=K.shape[1]))

    def product(self, x: Tensor, M: Tensor) -> Tensor:
        """x (N, a) times the M of each solution, (T, a, l): (N, l)."""
        if self.count == 1:
            return x @ M[0]
        if may_look(x) and M.shape[-1] >= _LARGE:
            parts = zip(x.split(self.sizes.tolist()), M, strict=True)
            return torch.cat([part @ own for part, own in parts])
        most, place = self._padded
        padded = x.new_zeros(self.count * most, x.shape[1]).index_copy_(0, place, x)
        products = padded.view(self.count, most, -1) @ M  # (T, most, l)
        return products.flatten(0, 1).index_select(0, place)
