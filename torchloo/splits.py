"""Splits of an outer loop: pairs of training and test row numbers.

>>> for train, test in k_fold(5, 2, generator=torch.Generator().manual_seed(0)):
...     print(len(train), "training rows and", len(test), "test rows")
2 training rows and 3 test rows
3 training rows and 2 test rows
"""

import math
import numbers
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchloo.clusters import folds, random_order
from torchloo.guards import host_labels, is_whole, whole_number

__all__ = [
    "LeaveOut",
    "Split",
    "h_block",
    "hold_out",
    "k_fold",
    "leave_cluster_out",
    "require_whole_clusters",
    "resolve",
]


class LeaveOut(NamedTuple):
    """A set of `lso`: rows to predict, and rows to leave out, which include them; int64 on the host."""

    predict: Tensor
    leave_out: Tensor


class Split(NamedTuple):
    """Training rows and test rows, int64 on the host."""

    train: Tensor
    test: Tensor


def hold_out(
    n: int,
    repeats: int = 100,
    fraction: float = 0.1,
    *,
    clusters: object | None = None,
    generator: torch.Generator | None = None,
) -> list[Split]:
    """Repeated hold-out: `repeats` splits with a random `fraction` of the n rows as test rows.

    Args:
        clusters: labels (n,); if given, this fraction of the clusters is held out, each as a whole, so that
            no test row has its cluster in the training rows. Splits then differ in size.
        generator: random number generator; None uses torch's global one.

    Reference: Cawley (2006), IV.
    """
    n = whole_number("hold_out", "n", n, 0)
    repeats = whole_number("hold_out", "repeats", repeats)
    if not 0 < fraction < 1:
        raise ValueError(f"hold_out: fraction must be between 0 and 1, got {fraction!r}")
    labels = np.arange(n) if clusters is None else host_labels("hold_out", clusters, n)
    _, inverse = np.unique(labels, return_inverse=True)
    member = torch.from_numpy(inverse)  # (n,)
    units = int(member.max()) + 1 if n else 0
    if units < 2:
        raise ValueError(f"hold_out: needs at least 2 rows or clusters, got {units}")
    held = min(units - 1, max(1, round(fraction * units)))
    splits = []
    for _ in range(repeats):
        chosen = torch.zeros(units, dtype=torch.bool, device="cpu")
        chosen[random_order(units, generator)[:held]] = True
        splits.append(_split(chosen[member]))
    return splits


def k_fold(n: int, k: int, repeats: int = 1, *, generator: torch.Generator | None = None) -> list[Split]:
    """`repeats` times k-fold: every row is a test row once; the sizes of the folds differ by at most one."""
    repeats = whole_number("k_fold", "repeats", repeats)
    labels = [folds(n, k, generator) for _ in range(repeats)]
    return [_split(label == fold) for label in labels for fold in range(k)]


def leave_cluster_out(clusters: object) -> list[Split]:
    """Every cluster is the test set once, by labels (n,)."""
    rows = len(clusters) if hasattr(clusters, "__len__") else 0
    labels = torch.from_numpy(host_labels("leave_cluster_out", clusters, rows))
    distinct = labels.unique()
    if len(distinct) < 2:
        raise ValueError(f"leave_cluster_out: clusters must have at least 2 labels, got {len(distinct)}")
    return [_split(labels == label) for label in distinct]


def h_block(times: Any, buffer: float) -> list[LeaveOut]:
    """Sets for `machine.lso`: each row is left out together with all rows near it (h-block).

    Rows close in time or space resemble each other, so that leave-one-out, which trains on the neighbours of
    the held-out row, is optimistic for predictions farther away.

    Args:
        times: times (n,) or coordinates (n, d) of the rows, in any order; tensor, array or list.
        buffer: a row is left out with all rows at this distance or nearer (Euclidean, to rounding); 0
            leaves out only rows of the same time or place.

    Returns:
        n sets in the order of the rows: set i predicts row i.

    Cost n log n for times, n^2 d for coordinates; memory n s numbers for s rows in a buffer.

    Reference: Burman, Chow and Nolan (1994), "A cross-validatory method for dependent data".

    Example:
        >>> for _, left in h_block([0.0, 1.0, 2.0, 5.0], buffer=1.0):
        ...     print(*left.tolist())
        0 1
        0 1 2
        1 2
        3
    """
    places = torch.as_tensor(times, device="cpu").detach().double()
    finite = bool(places.isfinite().all())
    if places.ndim not in (1, 2) or not len(places) or not finite:
        received = f"shape {tuple(places.shape)}"
        if not finite:
            received += " with NaN or infinity"
        raise ValueError(f"h_block: times must be finite, (n,) or (n, d), got {received}")
    is_number = isinstance(buffer, numbers.Real) and not isinstance(buffer, bool)
    if not is_number or not 0 <= buffer < math.inf:
        raise ValueError(f"h_block: buffer must be a number, 0 or more, got {buffer!r}")
    rounding = 4 * torch.finfo(places.dtype).eps * float(places.abs().max())
    reach = float(buffer) * (1 + 1e-12) + rounding
    near = _near_times(places, reach) if places.ndim == 1 else _near_places(places, reach)
    for row, rows in enumerate(near):
        if len(rows) == len(places):
            raise ValueError(
                f"h_block: buffer must leave some training rows, but all {len(places)} are within {buffer} "
                f"of row {row}"
            )
    return [LeaveOut(torch.tensor([row], device="cpu"), rows) for row, rows in enumerate(near)]


def _near_times(times: Tensor, reach: float) -> list[Tensor]:
    """The rows (s,) near each of n times, ascending."""
    order = times.argsort(stable=True)
    ordered = times[order]
    first = torch.searchsorted(ordered, times - reach)
    last = torch.searchsorted(ordered, times + reach, right=True)
    spans = zip(first.tolist(), last.tolist(), strict=True)
    return [order[start:stop].sort().values for start, stop in spans]


def _near_places(places: Tensor, reach: float) -> list[Tensor]:
    """The rows (s,) near each of n places (n, d)."""
    near: list[Tensor] = []
    rows_at_once = max(1, (1 << 22) // len(places))
    for some in places.split(rows_at_once):
        distance = torch.cdist(some, places, compute_mode="donot_use_mm_for_euclid_dist")
        near += [row.nonzero()[:, 0] for row in distance <= reach]
    return near


def resolve(
    splits: Any,
    n: int,
    clusters: object | None,
    generator: torch.Generator | None,
    function: str = "validate",
) -> list[Split]:
    """The splits given by an argument `splits`, checked."""
    if is_whole(splits):
        return hold_out(n, splits, clusters=clusters, generator=generator)
    if isinstance(splits, str):
        if splits != "leave-cluster-out" or clusters is None:
            raise ValueError(
                f"{function}: splits must be a number, 'leave-cluster-out' with clusters given, or pairs "
                f"(train, test), got {splits!r}"
            )
        return leave_cluster_out(clusters)
    try:
        pairs = [Split(*(_index(rows, n) for rows in pair)) for pair in splits]
    except (TypeError, ValueError) as fault:
        raise ValueError(f"{function}: splits must be pairs (train, test) of row numbers: {fault}") from None
    if not pairs:
        raise ValueError(f"{function}: splits must hold at least one pair (train, test), got none")
    for number, pair in enumerate(pairs):
        if len(pair.train) < 3 or not len(pair.test):
            raise ValueError(f"{function}: split {number} must have at least 3 training rows and 1 test row")
        if bool(torch.isin(pair.test, pair.train).any()):
            raise ValueError(f"{function}: split {number} has test rows among its training rows")
        if clusters is None:
            _require_distinct(function, number, pair.train)
    return pairs


def _require_distinct(function: str, number: int, train: Tensor) -> None:
    """Raise for duplicate training rows without clusters: a row would be predicted from its own copy."""
    rows, counts = train.unique(return_counts=True)
    repeated = rows[counts > 1]
    if len(repeated):
        raise ValueError(
            f"{function}: split {number} must contain each training row once, but repeats row "
            f"{int(repeated[0])}, so that leave-one-out would train on its copy; with "
            "clusters=torch.arange(n) all copies are left out together"
        )


def require_whole_clusters(pairs: list[Split], clusters: object, n: int) -> None:
    """Raise if a split of `validate` has a cluster with both training and test rows."""
    labels = host_labels("validate", clusters, n)
    for number, pair in enumerate(pairs):
        train = labels[pair.train.numpy()]
        test = labels[pair.test.numpy()]
        cut = np.intersect1d(train, test)
        if len(cut):
            raise ValueError(
                f"validate: split {number} must not cut clusters, but cluster {cut[0]} ({len(cut)} such) has "
                "both training and test rows; use splits='leave-cluster-out' or "
                "tl.splits.hold_out(n, clusters=...), or allow_cut_clusters=True to score known clusters"
            )


def _index(rows: Any, n: int) -> Tensor:
    index = torch.as_tensor(rows, device="cpu").detach()
    if index.ndim != 1 or index.is_floating_point() or index.dtype == torch.bool:
        raise ValueError(f"expected integer row numbers, got {index.dtype} of shape {tuple(index.shape)}")
    if len(index) and not 0 <= int(index.min()) <= int(index.max()) < n:
        raise ValueError(f"row numbers must be between 0 and {n - 1}")
    return index.long()


def _split(is_test: Tensor) -> Split:
    train = (~is_test).nonzero()[:, 0]
    test = is_test.nonzero()[:, 0]
    return Split(train, test)
