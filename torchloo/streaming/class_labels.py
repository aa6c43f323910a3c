"""Streams of class labels: columns of -1 and +1 in their place, batch by batch."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from torchloo.classes import is_label, one_vs_rest, require_two
from torchloo.streaming.sources import Arrays, Batches, Rows, pick
from torchloo.streaming.stream import Stream

__all__ = ["coded_stream"]


def coded_stream(function: str, stream: Stream) -> tuple[Stream, Tensor | None]:
    """A stream whose class labels are columns, of two classes one without an axis, and the sorted classes.

    A stream of numbers comes back as it is, with None. Labels of batches are found by a pass over them.
    """
    classes = _sorted_classes(function, stream._source)
    if classes is None:
        return stream, None
    require_two(function, "y", classes)
    options: Any = {"block": stream.block, "device": stream.device, "progress": stream.progress}
    source = stream._source
    if isinstance(source, Batches):
        return Stream(_CodedBatches(source.batches, classes), **options), classes
    columns = _columns(source.X, source.y, classes)
    return Stream(source.X, columns, source.weight, **options), classes


def _sorted_classes(function: str, source: Arrays | Batches) -> Tensor | None:
    if isinstance(source, Arrays):
        y = pick(source.y, slice(None))
        return y.unique() if is_label(y) and y.ndim == 1 else None
    found = None
    for _, (_, y, _) in source.blocks(function, 1 << 14):
        if not is_label(y) or y.ndim > 1:
            return None
        found = y.unique() if found is None else torch.cat([found, y]).unique()
    return found


def _columns(X: Rows, labels: Rows, classes: Tensor) -> Tensor:
    """The targets that a machine makes of labels, in the dtype of X."""
    dtype = pick(X, slice(1)).dtype
    columns = one_vs_rest(pick(labels, slice(None)), classes, dtype=dtype)
    return columns if len(classes) > 2 else columns[:, 0]


class _CodedBatches:
    """Batches (X, labels) or (X, labels, weight) with columns for labels, iterable anew for every pass."""

    def __init__(self, batches: Any, classes: Tensor) -> None:
        self.batches, self.classes = batches, classes

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        for X, labels, *weight in self.batches:
            yield X, _columns(X, labels, self.classes), *weight
