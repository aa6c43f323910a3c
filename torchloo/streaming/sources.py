"""Where the rows of a stream come from: arrays that can be indexed, or batches that come in order."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler

from torchloo.classes import is_label
from torchloo.guards import warn_of_cut_graph

__all__ = ["Array", "Arrays", "Batches", "Raw"]

Array = Tensor | np.ndarray
"""Rows in a tensor or in an array, memory-mapped or not."""

Raw = tuple[Tensor, Tensor, Tensor | None]
"""X (b, *event), y (b,) or (b, c), and the weights (b,) where there are any."""


def _pick(array: Array, index: slice | Tensor) -> Tensor:
    """Rows of a tensor, or a copy of those of an array."""
    if isinstance(array, Tensor):
        return array.detach()[index.to(array.device) if isinstance(index, Tensor) else index]
    return torch.from_numpy(np.array(array[index.numpy() if isinstance(index, Tensor) else index]))


def _check_shapes(function: str, X: Array, y: Array, weight: Array | None, where: str = "") -> None:
    if X.ndim < 2 or 0 in X.shape:
        raise ValueError(
            f"{function}: X must be (n, d) or (n, *event) with at least one row, got {tuple(X.shape)}{where}"
        )
    if y.ndim not in (1, 2) or len(y) != len(X) or 0 in y.shape:
        raise ValueError(
            f"{function}: y must have {len(X)} rows to match X, (n,) or (n, c), got {tuple(y.shape)}{where}"
        )
    if weight is not None and tuple(weight.shape) != (len(X),):
        raise ValueError(
            f"{function}: weight must have {len(X)} entries to match X, got {tuple(weight.shape)}{where}"
        )


class Arrays:
    """X, y and weight as tensors or arrays."""

    def __init__(self, X: Array, y: Array | None, weight: Array | None = None) -> None:
        for name, given in (("y", y), ("weight", weight)):
            if not isinstance(given, Array) and (name == "y" or given is not None):
                raise TypeError(f"Stream: {name} must be a tensor or an array, got {type(given).__name__}")
        if isinstance(X, Tensor) and X.layout is not torch.strided:
            raise TypeError(f"Stream: X must be dense, got layout {X.layout}")
        assert y is not None
        _check_shapes("Stream", X, y, weight)
        warn_of_cut_graph(
            "Stream: no gradient reaches its rows, some of which require one; give the tensors to the "
            "machine itself, or detach them",
            *(X, y, weight),
            stacklevel=3,
        )
        self.X, self.y, self.weight = X, y, weight
        self.n: int | None = len(X)
        self.flat = y.ndim == 1
        self.labelled = y.dtype.kind in "iub" if isinstance(y, np.ndarray) else is_label(y)

    def labels(self, function: str, seen: Callable[[int], object]) -> Tensor | None:
        """The different labels there are, ascending; None where targets are numbers."""
        if not self.labelled:
            return None
        return self.y.detach().unique() if isinstance(self.y, Tensor) else torch.from_numpy(np.unique(self.y))

    def pick(self, index: slice | Tensor) -> Raw:
        """The rows of an index on the host, in its order."""
        weight = None if self.weight is None else _pick(self.weight, index)
        return _pick(self.X, index), _pick(self.y, index), weight

    def blocks(self, function: str, size: int) -> Iterator[tuple[int, Raw]]:
        """Number of the first row, and rows."""
        for rows in (self.X, self.y, self.weight):
            if rows is not None:
                _require_rows(function, len(rows), self.n)
        for start in range(0, len(self.X), size):
            yield start, self.pick(slice(start, start + size))


class Batches:
    """Batches (X, y) or (X, y, weight) of any sizes, as many rows in every pass."""

    def __init__(self, batches: Any, y: object, weight: object) -> None:
        if not isinstance(batches, Iterable):
            raise TypeError(
                "Stream: X must be a tensor, an array or an iterable of batches, "
                f"got {type(batches).__name__}"
            )
        if isinstance(batches, Iterator):
            raise TypeError(
                "Stream: X must be iterable again for every pass, got an iterator, usable only once"
            )
        if y is not None or weight is not None:
            raise TypeError(
                "Stream: y and weight must be None for an iterable of batches, which includes them"
            )
        if isinstance(batches, DataLoader) and isinstance(batches.sampler, RandomSampler):
            raise ValueError("Stream: the DataLoader must keep the order of rows; use shuffle=False")
        self.batches = batches
        self.n: int | None = None
        self._first: Tensor | None = None

    @property
    def flat(self) -> bool:
        """Whether the targets come without an output axis."""
        assert self._first is not None, "known after the first block"
        return self._first.ndim == 1

    @property
    def labelled(self) -> bool:
        """Whether the targets are class labels; not so before the first block is known."""
        return is_label(self._first)

    def labels(self, function: str, seen: Callable[[int], object]) -> Tensor | None:
        """The different labels there are, ascending; None, after one batch, where targets are numbers."""
        found: list[Tensor] = []
        count = 0
        for _, y, _ in self._each(function):
            if not is_label(y):
                return None
            found = [torch.cat([*found, y.unique()]).unique()]
            count += len(y)
            seen(len(y))
        self.n = _require_rows(function, count, self.n)
        return found[0]

    def blocks(self, function: str, size: int) -> Iterator[tuple[int, Raw]]:
        """Number of the first row, and rows, `size` of them but for the last."""
        start, count, waiting = 0, 0, []
        for batch in self._each(function):
            waiting.append(batch)
            count += len(batch[0])
            while count >= size:
                X, y, weight = _joined(waiting)
                yield start, (X[:size], y[:size], _part(weight, 0, size))
                start, count = start + size, count - size
                waiting = [(X[size:], y[size:], _part(weight, size, None))] if count else []
            waiting[-1:] = map(_copied, waiting[-1:])  # the source may fill the same memory with the next one
        if count:
            yield start, _joined(waiting)
        self.n = _require_rows(function, start + count, self.n)

    def _each(self, function: str) -> Iterator[Raw]:
        """The batches as tensors of equal kinds; a failing source is told where it failed."""
        source, row, first = iter(self.batches), 0, None
        while True:
            try:
                batch = next(source)
            except StopIteration:
                return
            except Exception as error:
                raise RuntimeError(
                    f"{function}: the stream failed after {row} rows, with {type(error).__name__}: {error}"
                ) from error
            raw = _as_raw(function, batch, row)
            kind = [None if t is None else (t.shape[1:], t.dtype) for t in raw]
            first = first or kind
            if kind != first:
                raise ValueError(
                    f"{function}: batches must agree in columns, outputs, weights and dtypes, "
                    f"but that from row {row}, X {tuple(raw[0].shape)} and y {tuple(raw[1].shape)}, "
                    "differs from the first"
                )
            self._first = raw[1][:1] if self._first is None else self._first
            yield raw
            row += len(raw[0])


def _require_rows(function: str, count: int, before: int | None) -> int:
    """The number of rows of a pass, the same as before, where that is known."""
    if before not in (None, count):
        raise ValueError(
            f"{function}: every pass over the stream must give the same rows, got {count} after {before} in "
            "the first"
        )
    if not count:
        raise ValueError(f"{function}: the stream must hold at least one row, got none")
    return count


def _as_raw(function: str, batch: Any, row: int) -> Raw:
    if not isinstance(batch, tuple | list) or len(batch) not in (2, 3):
        raise TypeError(
            f"{function}: batches must be (X, y) or (X, y, weight), got {type(batch).__name__} at row {row}"
        )
    tensors: list[Any] = [torch.from_numpy(np.array(t)) if isinstance(t, np.ndarray) else t for t in batch]
    for name, tensor in zip(("X", "y", "weight"), tensors, strict=False):
        if not isinstance(tensor, Tensor):
            kind = type(tensor).__name__
            raise TypeError(f"{function}: {name} must be a tensor or an array, got {kind} at row {row}")
    X, y, weight = (*(t.detach() for t in tensors), None)[:3]
    _check_shapes(function, X, y, weight, f" at row {row}")
    return X, y, weight


def _part(tensor: Tensor | None, start: int, stop: int | None) -> Tensor | None:
    return None if tensor is None else tensor[start:stop]


def _copied(raw: Raw) -> Raw:
    X, y, weight = raw
    return X.clone(), y.clone(), None if weight is None else weight.clone()


def _joined(waiting: list[Raw]) -> Raw:
    if len(waiting) == 1:
        return waiting[0]
    X, y, weight = zip(*waiting, strict=True)
    return torch.cat(X), torch.cat(y), None if weight[0] is None else torch.cat(weight)
