"""Problems of one shape that are searched together, and checks of the data of a search.

Note [clusters of a batch]
Leave-cluster-out takes one label vector (n,) for a whole batch. Problems with the same cluster sizes share
one: sorted by the size of their cluster, and then by cluster, the rows of all problems have the same labels.
A closed form does not depend on the order of the rows, so the criterion is the same. What does depend on it
uses the original order: the start of a search, and the choice of a basis among the rows. A user-defined
criterion gets rows and labels in the original order.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchloo.classes import is_label
from torchloo.criteria.score import Score
from torchloo.guards import Guard, host_labels, require_floating
from torchloo.kernels import Kernel
from torchloo.primal.block import RowSource

__all__ = [
    "Clusters",
    "ProblemBatch",
    "StreamRows",
    "Weighting",
    "check_clusters",
    "check_rows",
    "in_order",
    "sizes",
    "stack",
    "streamed",
    "weight_of",
]

Weighting = Tensor | Callable[[Tensor], Tensor] | None
"""Row weights, or a function of the targets that gives them, such as `balanced_weight`."""


class Clusters(NamedTuple):
    """Clusters of P problems; see Note [clusters of a batch]."""

    labels: Tensor
    """Original labels, (P, n), on the CPU."""
    order: Tensor | None
    """Original row numbers of the sorted rows, (P, n), on the CPU; None for a single problem."""
    shared: Tensor
    """Labels (n,) of the sorted rows, the same in all problems, on the CPU."""

    @classmethod
    def of(cls, function: str, clusters: Sequence[object], rows: int) -> "Clusters":
        """From labels (n,) of each problem, whose `sizes` must agree."""
        labels = np.stack([host_labels(function, given, rows) for given in clusters])
        if len(labels) == 1:
            return cls(torch.from_numpy(labels), None, torch.from_numpy(labels[0]))
        order = np.stack([_order(of_problem) for of_problem in labels])
        counts = np.array(sizes(labels[0]))
        shared = np.repeat(np.arange(len(counts)), counts)
        return cls(torch.from_numpy(labels), torch.from_numpy(order), torch.from_numpy(shared))

    def own_order(self, held_out: Any, problem: Tensor) -> Any:
        """A HeldOut (..., B, n) of sorted rows in their original order, B for problem (B,)."""
        assert self.order is not None
        original = self.order[problem].argsort(-1)
        batch = held_out.weight.shape[:-1]
        fields = {
            name: in_order(value, original, len(batch))
            for name, value in held_out._asdict().items()
            if isinstance(value, Tensor) and name != "clusters"
        }
        labels = self.labels[problem]
        return held_out._replace(**fields, clusters=labels.expand(*batch, labels.shape[-1]))


def sizes(labels: np.ndarray) -> tuple[int, ...]:
    """Sizes of all clusters, ascending."""
    _, counts = np.unique(labels, return_counts=True)
    return tuple(sorted(counts.tolist()))


def _order(labels: np.ndarray) -> np.ndarray:
    """Rows sorted by the size of their cluster, then by cluster, stably."""
    _, member, counts = np.unique(labels, return_inverse=True, return_counts=True)
    return np.lexsort((member, counts[member]))


def in_order(values: Tensor, order: Tensor, axis: int) -> Tensor:
    """Entries of values (..., n, ...) along an axis, by numbers (n,) or (B, n) with B the axis before."""
    axes_behind = [1] * (values.ndim - axis - 1)
    order = order.to(values.device).reshape(*order.shape, *axes_behind)
    axes_before = [1] * (values.ndim - order.ndim)
    return values.take_along_dim(order.expand(*axes_before, *order.shape), axis)


class StreamRows:
    """The rows of a stream as the inputs of one problem."""

    ndim = 3

    def __init__(self, stream: RowSource, first: Tensor) -> None:
        self.stream = stream
        self.device = first.device
        self.first = first

    def __len__(self) -> int:
        return 1

    @property
    def shape(self) -> tuple[int, int, int]:
        """(1, n, d); a pass counts the rows if their number is unknown."""
        if self.stream.n is None:
            for _ in self.stream.blocks("select", 1 << 14, "counting rows"):
                pass
        assert self.stream.n is not None
        return 1, self.stream.n, self.first.shape[-1]

    def __getitem__(self, problem: object) -> RowSource:
        return self.stream

    def __iter__(self) -> Iterator[Tensor]:
        """Some rows, for the start of a search."""
        yield self.first


class ProblemBatch(NamedTuple):
    """P problems of one shape that are searched together."""

    X: Tensor | StreamRows
    """(P, n, d)."""
    y: Tensor
    """(P, n) or (P, n, c); of a stream, those of its first rows."""
    weight: Tensor | None
    """Training weights, (P, n)."""
    criterion_weight: Any
    """Weights of the criterion, (P, n); "own" for the training weights, None for equal weights."""
    clusters: Clusters | None
    """Clusters, of the same sizes in all problems; None for leave-one-out."""
    joined: tuple["ProblemBatch", ...] = ()
    """Further data sets, each a single problem as this one is: the criterion is the mean over them all."""


def check_rows(function: str, kernel: Kernel, X: Tensor, y: Tensor) -> None:
    """Check inputs (n, d), or as the kernel takes them, and targets (n,) or (n, c)."""
    require_floating(function, X=X, y=y)
    if X.layout != torch.strided:
        raise TypeError(f"{function}: X must be dense, got layout {X.layout}; use X.to_dense()")
    if X.ndim != 1 + kernel.event_dim or 0 in X.shape or len(X) < 3:
        expected = kernel.input_shape.replace("..., ", "")
        raise ValueError(f"{function}: X must be {expected} with at least 3 rows, got shape {tuple(X.shape)}")
    if y.ndim not in (1, 2) or len(y) != len(X) or 0 in y.shape:
        raise ValueError(
            f"{function}: y must be (n,) or (n, c) with the {len(X)} rows of X, got shape {tuple(y.shape)}"
        )
    guard = Guard(function)
    guard.finite(X=X, y=y)
    guard.check()


def check_clusters(function: str, score: Score, clusters: object | None) -> None:
    """Raise if clusters are given for a criterion of the Fit, which would ignore them."""
    if clusters is not None and score.takes_fit:
        raise ValueError(f"{function}: clusters must be None for {score.name}, which leaves out pairs")


def weight_of(
    function: str,
    name: str,
    weight: Any,
    y: Tensor,
    targets: Tensor,
    rows: Tensor | None = None,
) -> Any:
    """Weights (n,), given or computed by a function of y; "own" and None are returned as they are.

    y are the given targets, possibly class labels, `targets` the encoded ones. If `rows` (m,) are given, the
    weights (m,) of these rows; a function of y is called with the y of these rows only.
    """
    if rows is not None:
        if isinstance(weight, Tensor):
            weight = weight_of(function, name, weight, y, targets)[rows]
        return weight_of(function, name, weight, y[rows], targets[rows])
    if weight is None or (isinstance(weight, str) and weight == "own" and name == "criterion_weight"):
        return weight
    values = weight(y) if callable(weight) else weight
    if not isinstance(values, Tensor):
        raise TypeError(
            f"{function}: {name} must be a tensor or a callable of y, got {type(values).__name__}"
        )
    if callable(weight) and is_label(y) and values.is_floating_point():
        values = values.to(targets.dtype)  # a function of integer labels does not know the dtype of X
    require_floating(function, y=targets, **{name: values})
    if values.shape != y.shape[:1]:
        raise ValueError(f"{function}: {name} must have shape ({len(y)},), got {tuple(values.shape)}")
    return values


def stack(
    function: str,
    X: list[Tensor],
    y: list[Tensor],
    weight: list[Any],
    criterion_weight: list[Any],
    clusters: list[Any],
) -> ProblemBatch:
    """One batch of problems of one shape, with clusters for all or for none; a single one is not copied."""

    def together(values: list[Any]) -> Any:
        if not isinstance(values[0], Tensor):
            return values[0]
        if len(values) == 1:
            return values[0].unsqueeze(0)
        return torch.stack(values)

    labels = None
    if clusters[0] is not None:
        labels = Clusters.of(function, clusters, len(X[0]))
    return ProblemBatch(
        X=together(X),
        y=together(y),
        weight=together(weight),
        criterion_weight=together(criterion_weight),
        clusters=labels,
    )


# Rows of a stream that determine the start of a search.
_FIRST = 2000


def streamed(function: str, stream: RowSource, clusters: object | None) -> ProblemBatch:
    """The one problem of a stream."""
    first = stream.sample(function, _FIRST)
    y = first.Y[:, 0] if stream.flat else first.Y
    rows = StreamRows(stream, first.X)
    labels = None
    if clusters is not None:
        labels = Clusters.of(function, [clusters], rows.shape[1])
    return ProblemBatch(rows, y.unsqueeze(0), first.weight.unsqueeze(0), "own", labels)
