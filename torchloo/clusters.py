"""What is left out together: labels of rows, gathered by cluster size."""

import numpy as np
import torch
from torch import Tensor

from torchloo.guards import host_labels

__all__ = ["Partition", "folds"]


class Partition:
    """Rows sorted into the sets that are left out together, gathered by the size of the set.

    Every size is one batch of equal problems, so ragged clusters cost a loop over the distinct
    sizes and never one over the clusters. Leave-one-out is the partition into single rows.

    Attributes:
        groups: one index tensor (g, s) for each size s: the rows of g clusters.
        order: (n,) where each row stands in the concatenation of the groups.
        labels: host labels (n,), or None for single rows.
    """

    def __init__(self, groups: tuple[Tensor, ...], order: Tensor, labels: Tensor | None) -> None:
        self.groups = groups
        self.order = order
        self.labels = labels

    @property
    def index(self) -> tuple[Tensor, ...]:
        """All index tensors, as arguments of an autograd Function: transforms see only those."""
        return self.order, *self.groups

    @classmethod
    def from_index(cls, index: tuple[Tensor, ...]) -> "Partition":
        """The partition whose `index` this is, without labels."""
        return cls(index[1:], index[0], None)

    @classmethod
    def single(cls, rows: int, device: torch.device) -> "Partition":
        """Every row alone."""
        index = torch.arange(rows, device=device)
        return cls((index.unsqueeze(-1),), index, None)

    @classmethod
    def whole(cls, rows: int, device: torch.device) -> "Partition":
        """All rows in one block."""
        index = torch.arange(rows, device=device)
        return cls((index.unsqueeze(0),), index, None)

    @classmethod
    def of(cls, function: str, clusters: object | None, rows: int, device: torch.device) -> "Partition":
        """The partition that the labels describe; None leaves every row out alone."""
        if clusters is None:
            if rows < 2:
                raise ValueError(f"{function}: leave-one-out needs at least 2 rows, got {rows}")
            return cls.single(rows, device)
        labels = host_labels(function, clusters, rows)
        _, members, counts = np.unique(labels, return_inverse=True, return_counts=True)
        if len(counts) < 2:
            raise ValueError(
                f"{function}: a cluster holds all {rows} rows, so nothing is left to learn from; "
                f"clusters must have at least 2 distinct labels"
            )
        by_cluster = np.argsort(members, kind="stable")  # (n,) rows, cluster after cluster
        starts = counts.cumsum() - counts
        groups = []
        for size in np.unique(counts):
            rows_of = by_cluster[starts[counts == size, None] + np.arange(size)]  # (g, s)
            groups.append(rows_of[rows_of[:, 0].argsort()])  # single rows keep their order
        order = np.argsort(np.concatenate([rows_of.ravel() for rows_of in groups]))
        on_device = [torch.from_numpy(index).to(device) for index in (*groups, order)]
        return cls(tuple(on_device[:-1]), on_device[-1], torch.from_numpy(labels))

    def gather(self, values: Tensor) -> list[Tensor]:
        """Rows of (..., n, c) by group: (..., g, s, c) each."""
        return [values[..., rows, :] for rows in self.groups]

    def scatter(self, parts: list[Tensor]) -> Tensor:
        """Put (..., g, s, c) of each group back in the order of the rows: (..., n, c)."""
        return torch.cat([part.flatten(-3, -2) for part in parts], dim=-2)[..., self.order, :]

    def block_diagonal_times(self, blocks: list[Tensor], V: Tensor) -> Tensor:
        """D V for the block-diagonal matrix D of blocks (..., g, s, s) and V (..., n, m)."""
        if len(blocks) == 1 and blocks[0].shape[-1] == 1:  # single rows: nothing to gather
            return blocks[0][..., 0] * V
        return self.scatter([block @ part for block, part in zip(blocks, self.gather(V), strict=True)])


def folds(n: int, k: int, generator: torch.Generator | None = None) -> Tensor:
    """Random labels (n,) of k folds whose sizes differ by at most one: plain k-fold through `lco`.

    Args:
        n: number of rows.
        k: number of folds, from 2 to n.
        generator: source of randomness; None takes torch's global one.

    Example:
        >>> torch.bincount(folds(10, 3))
        tensor([4, 3, 3])
    """
    if not 2 <= k <= n:
        raise ValueError(f"folds: k must be from 2 to n = {n}, got {k}")
    return (torch.arange(n) % k)[torch.randperm(n, generator=generator)]
