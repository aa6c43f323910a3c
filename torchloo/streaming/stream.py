"""Rows that need not fit in memory: tensors, memory-mapped arrays or a DataLoader, block by block."""

import copy
from collections.abc import Iterable, Iterator
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from torchloo.classes import coded, is_label, require_few, require_two
from torchloo.guards import Guard, full_dtype, require_inputs, whole_number
from torchloo.primal.block import Block, RowSource
from torchloo.primal.files import Field, mapped_files
from torchloo.streaming.sources import Array, Arrays, Batches, Raw

__all__ = ["Stream"]


class Stream(RowSource):
    """Rows for a least-squares machine, read in blocks, once for every pass over them.

    Give it to `fit`, `solve`, `loo`, `lco` or `path` of a machine in place of X; `StreamFit` says what
    is computed and in which memory. Held-out rows are differentiable in whatever the machine depends on:
    regularisation, parameters of the kernel, a trainable basis, a network; not in the rows.

    Args:
        X: inputs (n, d), or (n, *event) for a kernel with that `event_dim`, as a tensor or a NumPy array,
            memory-mapped or not; or an iterable of batches (X, y) or (X, y, weight), such as a DataLoader,
            that brings the same rows in the same order every time it is iterated. No row may change between
            `solve` and the passes that come later (`held_out`, `path`, `fit`): these raise ValueError if one
            has.
        y: targets (n,) or (n, c), of the dtype of X, or integer class labels (n,); None where the batches
            bring them. To find out which labels batches have takes a pass over them, unless the machine
            was given `classes=`.
        weight: row weights (n,), positive.
        block: rows read at once; None takes as many as make 8 MB of features.
        device: where the blocks are computed on; None leaves them where they are.
        progress: show a bar with rows per second for every pass that takes longer than a second.

    Example:
        >>> X = torch.arange(8.0).reshape(4, 2).numpy()  # np.load("X.npy", mmap_mode="r") of a large file
        >>> Stream(X, X[:, 0], block=3)
        Stream(4 rows, block=3)
    """

    def __init__(
        self,
        X: Array | Iterable[Any],
        y: Array | None = None,
        weight: Array | None = None,
        *,
        block: int | None = None,
        device: torch.device | str | None = None,
        progress: bool = True,
    ) -> None:
        self.block = None if block is None else whole_number("Stream", "block", block)
        self.device, self.progress = device, progress
        self._source = Arrays(X, y, weight) if isinstance(X, Array) else Batches(X, y, weight)
        self._classes: Tensor | None = None

    @property
    def n(self) -> int | None:
        """Number of rows; of batches, None until the first pass has counted them."""
        return self._source.n

    @property
    def flat(self) -> bool:
        """Whether outputs have no output axis; of batches, known after the first block."""
        return self._source.flat if self.classes is None else len(self.classes) == 2

    @property
    def classes(self) -> Tensor | None:
        """The classes (c,) of labels, in the order of their columns; None where targets are numbers.

        The sorted labels of all rows, or those of `with_classes`. Of batches, known after the first block.
        """
        if not self._source.labelled:
            return None
        if self._classes is None:
            found = self.labels("Stream")
            assert found is not None
            assert self.n is not None
            require_two("Stream", "y", found)
            require_few("Stream", found, self.n)
            self._classes = found
        return self._classes

    def with_classes(self, classes: Tensor | None) -> Self:
        """The same rows with classes that are known already, in their order."""
        twin = copy.copy(self)
        twin._classes = classes
        return twin

    def labels(self, function: str) -> Tensor | None:
        """The different labels there are, ascending, which takes a pass over batches; None of numbers."""
        with self.bar("class labels") as bar:
            return self._source.labels(function, bar.update)

    def __repr__(self) -> str:
        return f"Stream({'rows not yet counted' if self.n is None else f'{self.n} rows'}, block={self.block})"

    def bar(self, what: str) -> "tqdm[Any]":
        """A progress bar of all rows that says what is done with them."""
        return tqdm(
            total=self.n, desc=what, unit="row", unit_scale=True, delay=1.0, disable=not self.progress
        )

    def blocks(self, function: str, size: int, what: str) -> Iterator[Block]:
        """All rows, `size` at a time, under a bar that says what is done with them.

        Args:
            function: name that errors carry.
            size: rows at once; the stream's own `block` goes before it.
            what: label of the progress bar.
        """
        with self.bar(what) as bar:
            for start, raw in self._source.blocks(function, self.block or size):
                yield self._checked(function, raw, start)
                bar.update(len(raw[0]))

    def sample(self, function: str, count: int) -> Block:
        """The first rows, at most so many."""
        parts, found = [], 0
        for start, raw in self._source.blocks(function, self.block or count):
            part = self._checked(function, raw, start)
            parts.append([t[: count - found].clone() for t in part[1:]])
            found += len(parts[-1][0])
            if found == count:
                break
        X, Y, weight = (torch.cat(values) for values in zip(*parts, strict=True))
        return Block(0, X, Y, weight)

    def take(self, function: str, index: Tensor) -> Block:
        """The rows of an index (b,), in its order; batches are spooled first, see `spool`."""
        assert isinstance(self._source, Arrays)
        return self._checked(function, self._source.pick(index.cpu()), index)

    def spool(self, function: str, parts: Iterator[Block]) -> None:
        """Write batches, if that is what there is, to temporary files, whose rows `take` can reach.

        Args:
            function: name that errors carry.
            parts: all rows, in a pass over this stream.
        """
        if isinstance(self._source, Arrays):
            return
        device, arrays = self.device, list[np.ndarray]()
        for part in parts:
            device = device or part.X.device  # files are on the host, rows stay where they were
            values = [part.X, self._as_given(part.Y), part.weight]
            if not arrays:
                assert self.n is not None
                fields = [Field("", (self.n, *v.shape[1:]), v.dtype) for v in values]
                arrays = mapped_files(function, "spooling the batches", None, fields)
            for array, v in zip(arrays, values, strict=True):
                array[part.rows] = (v.view(torch.int16) if v.dtype == torch.bfloat16 else v).numpy(force=True)
        X, y, weight = arrays
        bits = X.dtype == np.int16
        rows = torch.from_numpy(X).view(torch.bfloat16) if bits else X
        self._source, self.device = Arrays(rows, y, weight), device

    def _as_given(self, Y: Tensor) -> Tensor:
        """Targets (b, c) as they came: (b,) or (b, c), or labels, which another order of classes may code."""
        if self.classes is None:
            return Y[:, 0] if self.flat else Y
        column = Y.argmax(1) if Y.shape[1] > 1 else (Y[:, 0] > 0).long()
        return self.classes.long().to(Y.device)[column]

    def _checked(self, function: str, raw: Raw, place: int | Tensor) -> Block:
        """A block of rows with a first number, or with a number for each."""
        X, y, weight = raw
        if self.device is not None:
            X, y, weight = (None if t is None else t.to(self.device) for t in raw)  # type: ignore[assignment]
        guard = Guard(function)
        y = self._coded(guard, X, y)
        require_inputs(function, X=X, y=y, **({} if weight is None else {"weight": weight}))
        dtype = full_dtype(X.dtype)
        zeta = X.new_ones(len(X), dtype=dtype) if weight is None else weight.to(dtype)
        Y = (y.unsqueeze(-1) if y.ndim == 1 else y).to(dtype)
        guard.finite(X=X, y=y)
        guard.positive(weight=zeta)
        try:
            guard.check()
        except ValueError as error:
            fine = X.flatten(1).isfinite().all(1) & Y.isfinite().all(1) & (zeta > 0) & (zeta < torch.inf)
            bad = (~fine).nonzero()[:, 0].cpu()
            if not len(bad):  # entries so large that their sum is not finite
                raise
            numbers = place[bad].tolist() if isinstance(place, Tensor) else (bad + place).tolist()
            shown = ", ".join(str(k) for k in numbers[:5]) + (", ..." if len(numbers) > 5 else "")
            within = (
                "" if isinstance(place, Tensor) else f" in the block of rows {place} to {place + len(X) - 1}"
            )
            raise ValueError(f"{error} at row {shown}{within}") from None
        return Block(place if isinstance(place, int) else 0, X, Y, zeta)

    def _coded(self, guard: Guard, X: Tensor, y: Tensor) -> Tensor:
        """Columns in place of class labels (b,); targets that are numbers as they are."""
        if not is_label(y):
            return y
        require_inputs(guard.function, X=X)
        if y.ndim > 1:
            raise ValueError(
                f"{guard.function}: integer y are class labels, (n,), got shape {tuple(y.shape)}; columns of "
                f"numbers must be {full_dtype(X.dtype)}"
            )
        assert self.classes is not None
        return coded(guard, "y", y, self.classes, full_dtype(X.dtype))
