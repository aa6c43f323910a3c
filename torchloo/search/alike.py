"""Clusters of problems that are searched together: one label vector, once their rows are put in order.

Note [clusters of a batch]
What is left out together has one label vector (n,) for a whole batch. Problems with equally many clusters
of every size can share one: with the rows of each sorted by the size of their cluster, and then by cluster,
they differ in no label. A closed form does not know the order of its rows, so the criterion is the same. What
does know it is done before in the problem's own order: the start of a search, and the choice of a basis among
the rows. A criterion of the user's sees the rows and labels of the split as they are.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchloo.guards import host_labels

__all__ = ["Clusters", "in_order", "sizes"]


class Clusters(NamedTuple):
    """What is left out together in each of P problems; see Note [clusters of a batch]."""

    labels: Tensor
    """Their own labels, (P, n), on the host."""
    order: Tensor | None
    """Own numbers of the sorted rows, (P, n), on the host; None for a single problem, left as it is."""
    shared: Tensor
    """Labels (n,) of the sorted rows, the same in all problems, on the host."""

    @classmethod
    def of(cls, function: str, clusters: Sequence[object], rows: int) -> "Clusters":
        """From labels (n,) of each problem, whose `sizes` must agree."""
        labels = np.stack([host_labels(function, own, rows) for own in clusters])
        if len(labels) == 1:
            return cls(torch.from_numpy(labels), None, torch.from_numpy(labels[0]))
        order = np.stack([_order(own) for own in labels])
        counts = np.array(sizes(labels[0]))
        shared = np.repeat(np.arange(len(counts)), counts)
        return cls(*(torch.from_numpy(array) for array in (labels, order, shared)))

    def own_order(self, held_out: Any, problem: Tensor) -> Any:
        """A HeldOut (..., B, n) of sorted rows, B for problem (B,), with rows and labels as they came."""
        assert self.order is not None
        back, batch = self.order[problem].argsort(-1), held_out.weight.shape[:-1]
        fields = {
            name: in_order(value, back, len(batch))
            for name, value in held_out._asdict().items()
            if isinstance(value, Tensor) and name != "clusters"
        }
        labels = self.labels[problem]
        return held_out._replace(**fields, clusters=labels.expand(*batch, labels.shape[-1]))


def sizes(labels: np.ndarray) -> tuple[int, ...]:
    """Sizes of all clusters, ascending."""
    return tuple(np.sort(np.unique(labels, return_counts=True)[1]).tolist())


def _order(labels: np.ndarray) -> np.ndarray:
    """Rows by the size of their cluster, then by cluster; of one cluster, as they came."""
    _, member, counts = np.unique(labels, return_inverse=True, return_counts=True)
    return np.lexsort((member, counts[member]))


def in_order(values: Tensor, order: Tensor, axis: int) -> Tensor:
    """Entries of values (..., n, ...) along an axis, by numbers (n,) or (B, n) with B the axis before."""
    order = order.to(values.device).reshape(*order.shape, *[1] * (values.ndim - axis - 1))
    return values.take_along_dim(order.expand(*[1] * (values.ndim - order.ndim), *order.shape), axis)
