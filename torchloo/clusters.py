"""Partitions of the rows into sets that are left out together."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from torchloo.guards import host_labels, is_whole, on_host, whole_number

__all__ = ["PaddedSets", "Partition", "by_size", "folds", "random_order", "row_sets"]

# Multiplications that may be wasted on rows of padding to save the operations of one more group.
_WASTED = 1 << 18


class Partition:
    """Rows sorted into the sets that are left out together, gathered by the size of the set.

    Every size is one batch of equal problems, so ragged clusters cost a loop over the distinct
    sizes and never one over the clusters. Leave-one-out is the partition into single rows.

    Attributes:
        labels: host labels (n,), or None for single rows.
        padding: the row number that fills up sets shorter than their group, one more than the last row;
            None if all sets of a group have its size.
    """

    def __init__(
        self,
        groups: tuple[Tensor, ...],
        labels: Tensor | None = None,
        padding: int | None = None,
    ) -> None:
        self._groups = groups
        self._single: tuple[int, torch.device] | None = None
        self.labels, self.padding = labels, padding

    @classmethod
    def single(cls, rows: int, device: torch.device) -> "Partition":
        """Every row alone."""
        partition = cls(())
        partition._single = rows, device
        return partition

    @classmethod
    def whole(cls, rows: int, device: torch.device) -> "Partition":
        """All rows in one block."""
        return cls((torch.arange(rows, device=device).unsqueeze(0),))

    @classmethod
    def of(
        cls,
        function: str,
        clusters: object | None,
        rows: int,
        device: torch.device,
        alone: bool = True,
    ) -> "Partition":
        """The partition given by cluster labels; None for every row alone.

        One set must not hold all rows, unless other processes have more (`alone` is False).
        """
        if clusters is None:
            if rows < 2 and alone:
                raise ValueError(f"{function}: leave-one-out needs at least 2 rows, got {rows}")
            return cls.single(rows, device)
        labels = host_labels(function, clusters, rows)
        _, members, counts = np.unique(labels, return_inverse=True, return_counts=True)
        if len(counts) < 2 and alone:
            raise ValueError(
                f"{function}: a cluster holds all {rows} rows, so no training rows remain; clusters must "
                "have at least 2 distinct labels"
            )
        by_cluster = np.argsort(members, kind="stable")  # (n,) rows, cluster after cluster
        groups = []
        for positions in by_size(counts):
            members_of = by_cluster[positions]
            members_of = members_of[members_of[:, 0].argsort()]  # single rows keep their order
            groups.append(torch.from_numpy(members_of).to(device))
        return cls(tuple(groups), torch.from_numpy(labels))

    @property
    def groups(self) -> tuple[Tensor, ...]:
        """An index tensor (g, s) for each size s: the rows of g clusters; for single rows made on demand."""
        if self._single is None:
            return self._groups
        rows, device = self._single
        return (torch.arange(rows, device=device).unsqueeze(-1),)

    def chunks(self, size: int) -> list[Tensor]:
        """Sets (g, s) of one group each: of at most `size` rows together, or a single one."""
        return [sets for rows in self.groups for sets in rows.split(max(1, size // rows.shape[1]))]

    def padded(self, n: int, width: int) -> "Partition":
        """The same sets of n rows in fewer groups: sets of like size are padded to the largest of them.

        Only where the operations that this saves take longer than the padding, of which every row costs
        `width` multiplications for each row of its set.
        """
        if self._single is not None or len(self._groups) == 1:
            return self
        merged: list[list[Tensor]] = []
        for rows in reversed(self._groups):
            largest = merged[-1][0].shape[1] if merged else 0
            missing = len(rows) * (largest - rows.shape[1])
            if not merged or missing * largest * width > _WASTED:
                merged.append([])
            merged[-1].append(rows)
        if len(merged) == len(self._groups):
            return self
        groups = [_filled_up(sets, n) for sets in reversed(merged)]
        return Partition(tuple(groups), self.labels, n)

    def only_single(self, n: int) -> bool:
        """Whether each of n rows is a set of its own; they are then in order."""
        if self._single is not None:
            return True
        return len(self._groups) == 1 and self._groups[0].shape == (n, 1)

    @property
    def index(self) -> Tensor:
        """All rows, set after set, group after group."""
        return torch.cat([rows.flatten() for rows in self.groups])

    def gather(self, values: Tensor, fill: float = 0.0) -> list[Tensor]:
        """Rows of (..., n, c) by group: (..., g, s, c) each, with a number for rows of padding."""
        if self.only_single(values.shape[-2]):
            return [values.unsqueeze(-2)]
        if self.padding is not None:
            values = torch.nn.functional.pad(values, (0, 0, 0, 1), value=fill)
        # One gather for all sizes: each would have a gradient of all n rows, to be added up.
        numbers = [rows.numel() for rows in self.groups]
        parts = values.index_select(-2, self.index).split(numbers, -2)
        return [part.unflatten(-2, rows.shape) for part, rows in zip(parts, self.groups, strict=True)]

    def scatter(self, parts: list[Tensor], n: int) -> Tensor:
        """The inverse of `gather`: (..., g, s, c) of each group to (..., n, c), zero in other rows."""
        if self.only_single(n):
            return parts[0].squeeze(-2)
        values = torch.cat([part.flatten(-3, -2) for part in parts], -2)
        rows = n if self.padding is None else n + 1
        blank = values.new_zeros((*values.shape[:-2], rows, values.shape[-1]))
        return blank.index_copy(-2, self.index, values)[..., :n, :]

    def block_diagonal_times(self, blocks: list[Tensor], V: Tensor) -> Tensor:
        """D V for the block-diagonal matrix D of blocks (..., g, s, s) and V (..., n, m)."""
        if self.only_single(V.shape[-2]):
            return blocks[0][..., 0] * V
        pairs = zip(blocks, self.gather(V), strict=True)
        parts = [block @ part for block, part in pairs]
        return self.scatter(parts, V.shape[-2])


class PaddedSets:
    """Some sets (g, s) of a group, and how what is known of their rows (b,) is laid out with padding.

    Attributes:
        shape: (g, s).
        rows: the rows without padding, (b,), set after set.
    """

    def __init__(self, sets: Tensor, n: int) -> None:
        self.sets = sets
        self.shape = sets.shape
        self._n = n
        flat = sets.flatten()
        place = (flat < n).nonzero()[:, 0]
        self.rows = flat[place]
        self._place = None if len(place) == len(flat) else place

    def laid_out(self, values: Tensor, fill: Tensor | float = 0.0) -> Tensor:
        """(..., b) as (..., g, s), with a number for rows of padding."""
        if self._place is None:
            return values.unflatten(-1, self.shape)
        blank = torch.as_tensor(fill, dtype=values.dtype, device=values.device)
        blank = blank.expand(*values.shape[:-1], self.shape.numel())
        place = self._place.to(values.device)
        return blank.index_copy(-1, place, values).unflatten(-1, self.shape)

    def taken(self, values: Tensor) -> Tensor:
        """(..., g, s) as (..., b), without padding."""
        values = values.flatten(-2)
        if self._place is None:
            return values
        return values.index_select(-1, self._place.to(values.device))

    def __getitem__(self, k: int) -> Tensor:
        """The rows (s,) of one set."""
        rows = self.sets[k]
        return rows[rows < self._n]


def by_size(sizes: np.ndarray) -> Iterator[np.ndarray]:
    """Positions (g, s) of the rows of all sets of a size, for each size s; sets follow one another."""
    starts = sizes.cumsum() - sizes
    for size in np.unique(sizes):
        yield starts[sizes == size, None] + np.arange(size)


def _filled_up(groups: list[Tensor], padding: int) -> Tensor:
    """Sets (g, s) of several sizes s, the largest first, as one group (g, s) with a row number to fill up."""
    largest = groups[0].shape[1]
    filled = [torch.nn.functional.pad(rows, (0, largest - rows.shape[1]), value=padding) for rows in groups]
    return torch.cat(filled)


def row_sets(function: str, rows: object, n: int) -> tuple[Tensor, bool]:
    """Disjoint sets (g, s) of the rows 0 to n - 1, none with all rows, and whether `rows` has the axis g."""
    try:
        given = on_host(rows)
    except ValueError:
        raise TypeError(
            f"{function}: rows must be integers, got a ragged list; call it for each set"
        ) from None
    if given.dtype.kind not in "iu":
        raise TypeError(f"{function}: rows must be integers, got {given.dtype}")
    shape = given.shape if given.ndim == 2 else (1, -1)
    sets = given.astype(np.int64).reshape(shape)
    if given.ndim > 2 or sets.size == 0 or sets.size // len(sets) >= n:
        raise ValueError(
            f"{function}: rows must be one row, (s,) or (g, s), with 1 to {n - 1} of the {n} rows in a set, "
            f"got shape {given.shape}"
        )
    if sets.min() < 0 or sets.max() >= n:
        raise ValueError(f"{function}: rows must be from 0 to {n - 1}, got from {sets.min()} to {sets.max()}")
    if len(np.unique(sets)) < sets.size:
        raise ValueError(f"{function}: rows must be distinct, within and between sets; call it for each set")
    return torch.from_numpy(sets), given.ndim == 2


def folds(n: int, k: int, generator: torch.Generator | None = None) -> Tensor:
    """Random labels (n,) of k folds whose sizes differ by at most one, on the host: k-fold through `lco`.

    Args:
        n: number of rows.
        k: number of folds, from 2 to n.
        generator: random number generator; None uses torch's global one.

    Example:
        >>> torch.bincount(folds(10, 3))
        tensor([4, 3, 3])
    """
    n = whole_number("folds", "n", n)
    if not is_whole(k) or not 2 <= k <= n:
        raise ValueError(f"folds: k must be an integer from 2 to n = {n}, got {k}")
    return random_order(n, generator) % k


def random_order(n: int, generator: torch.Generator | None) -> Tensor:
    """A random permutation of 0 to n - 1, drawn on the device of the generator, on the host."""
    device = "cpu" if generator is None else generator.device
    return torch.randperm(n, generator=generator, device=device).cpu()
