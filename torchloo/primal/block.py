"""Blocks of rows, what brings them, and rows in memory as a source of them."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, NamedTuple, Self

from torch import Tensor
from tqdm import tqdm

from torchloo.primal.collective import Peers

__all__ = ["Block", "Memory", "RowSource", "Rows", "Shard", "Source", "require_alone"]


class Rows:
    """What machines take in place of X: rows that bring their targets and weights."""

    others = Peers()
    """The processes that hold the other rows."""

    def shared(self, others: Peers) -> Self:
        """The same rows beside those of other processes."""
        twin = copy.copy(self)
        twin.others = others
        return twin


def require_alone(function: str, y: object, weight: object) -> None:
    """Raise where targets or weights are given beside rows that bring them."""
    if y is not None or weight is not None:
        raise TypeError(f"{function}: a stream includes y and weight; leave them None")


class Shard(Rows):
    """Tensors X (n_r, d), y and weight of this process, which keep their graph."""

    def __init__(self, X: Tensor, y: Any, weight: Tensor | None) -> None:
        self.X, self.y, self.weight = X, y, weight


class Block(NamedTuple):
    """Rows, looked at and found good; those of a batch of problems have one more axis in front."""

    start: int
    """Number of the first row, where they are consecutive."""
    X: Tensor
    """Inputs, (..., b, *event)."""
    Y: Tensor
    """Targets, (..., b, c)."""
    weight: Tensor
    """Row weights, (..., b); ones where none were given."""

    @property
    def rows(self) -> slice:
        """The numbers of consecutive rows."""
        return slice(self.start, self.start + self.Y.shape[-2])

    @property
    def zeta(self) -> Tensor:
        """Row weights in float64, with axes for regularisations and outputs, (..., 1, 1, b)."""
        return self.weight.double()[..., None, None, :]


class Source(ABC):
    """Rows that come in blocks, as often as there are passes over them."""

    block: int | None = None
    """Rows in a block; None leaves the choice to the machine."""
    lasting = False
    """Whether the rows are sure to be the same in every pass."""
    graph: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None)
    """X, Y and weight of all rows with the graph that they belong to, where they are in memory."""
    known: tuple[Tensor, Tensor] | None = None
    """Targets (..., n, c) and weights (..., n) of all rows, where they are in memory."""
    batch: tuple[int, ...] = ()
    """Shape of a batch of problems, of which blocks have one axis."""

    @property
    @abstractmethod
    def n(self) -> int | None:
        """Number of rows; None until the first pass has counted them."""

    @property
    @abstractmethod
    def flat(self) -> bool:
        """Whether outputs have no output axis; may be known only after the first block."""

    @property
    @abstractmethod
    def classes(self) -> Tensor | None:
        """The classes (c,) of labels, in the order of their columns; None where targets are numbers."""

    @abstractmethod
    def blocks(self, function: str, size: int, what: str) -> Iterator[Block]:
        """All rows, `size` at a time, under a bar that says what is done with them.

        Args:
            function: name that errors carry.
            size: rows at once; the source's own `block` goes before it.
            what: label of the progress bar.
        """

    @abstractmethod
    def take(self, function: str, index: Tensor) -> Block:
        """The rows of an index (b,), in its order, after `spool`."""

    @abstractmethod
    def spool(self, function: str, parts: Iterator[Block]) -> None:
        """Make all rows, given in a pass over them, ready for `take`."""

    @abstractmethod
    def bar(self, what: str) -> "tqdm[Any]":
        """A progress bar of all rows that says what is done with them."""


class RowSource(Rows, Source):
    """A source of rows that machines take in place of X, such as a `Stream`."""

    @abstractmethod
    def with_classes(self, classes: Tensor | None) -> Self:
        """The same rows with classes that are known already, in their order."""

    @abstractmethod
    def labels(self, function: str) -> Tensor | None:
        """The different labels there are, ascending; None where targets are numbers."""

    @abstractmethod
    def sample(self, function: str, count: int) -> Block:
        """The first rows, at most so many."""

    def head(self, function: str, count: int) -> Tensor:
        """The first rows of X, (count, d)."""
        rows = self.sample(function, count).X
        if len(rows) < count:
            raise ValueError(
                f"{function}: basis must be at most the number of rows, {len(rows)}, got {count}"
            )
        return rows


class Memory(Source):
    """Rows that are in memory, looked at already: X (..., n, *event), Y (..., n, c) and weight (..., n)."""

    lasting = True
    n = 0
    flat = False
    classes: Tensor | None = None

    def __init__(
        self, X: Tensor, Y: Tensor, weight: Tensor, flat: bool, classes: Tensor | None = None
    ) -> None:
        self.batch = weight.shape[:-1]
        self.graph = (X, Y, weight)
        if len(self.batch) > 1:
            last = len(self.batch) - 1
            self.graph = (X.flatten(0, last), Y.flatten(0, last), weight.flatten(0, last))
        self.X, self.Y, weight = (t.detach() for t in self.graph)
        self.weight = weight.double()
        self.known = self.Y, self.weight
        self.n, self.flat, self.classes = weight.shape[-1], flat, classes

    def problems(self, index: Tensor | int) -> "Memory":
        """Some problems of a batch, (B',), or a single one, with the graph of their rows."""
        X, Y, weight = (t[index] for t in self.graph if t is not None)
        return Memory(X, Y, weight, self.flat, self.classes)

    def blocks(self, function: str, size: int, what: str) -> Iterator[Block]:
        """All rows, `size` at a time."""
        if size >= self.n:
            yield Block(0, self.X, self.Y, self.weight)
            return
        for start in range(0, self.n, size):
            yield self._rows(start, slice(start, start + size))

    def take(self, function: str, index: Tensor) -> Block:
        """The rows of an index (b,), in its order."""
        return self._rows(0, index.to(self.X.device))

    def _rows(self, start: int, rows: slice | Tensor) -> Block:
        at = (slice(None), rows) if self.batch else rows
        return Block(start, self.X[at], self.Y[at], self.weight[at])

    def spool(self, function: str, parts: Iterator[Block]) -> None:
        """Nothing is to be done."""

    def bar(self, what: str) -> "tqdm[Any]":
        """None that is shown."""
        return tqdm(disable=True)
