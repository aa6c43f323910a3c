"""Blocks of rows, what brings them, and rows in memory as a source of them."""

import copy
from collections.abc import Iterator
from typing import Any, NamedTuple, Self

from torch import Tensor
from tqdm import tqdm

from torchloo.primal.collective import Peers

__all__ = ["Block", "Memory", "Rows", "Shard", "require_alone"]


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
        raise TypeError(f"{function}: a stream brings its own y and weight; leave them None")


class Shard(Rows):
    """Tensors X (n_r, d), y and weight of this process, which keep their graph."""

    def __init__(self, X: Tensor, y: Any, weight: Tensor | None) -> None:
        self.X, self.y, self.weight = X, y, weight


class Block(NamedTuple):
    """Rows, looked at and found good."""

    start: int
    """Number of the first row, where they are consecutive."""
    X: Tensor
    """Inputs, (b, *event)."""
    Y: Tensor
    """Targets, (b, c)."""
    weight: Tensor
    """Row weights, (b,); ones where none were given."""

    @property
    def rows(self) -> slice:
        """Where consecutive rows stand among all."""
        return slice(self.start, self.start + len(self.X))


class Memory:
    """Rows that are in memory, looked at already; a Stream has the same members."""

    block: int | None = None
    """Rows in a block; None leaves the choice to the machine."""
    lasting = True
    """Whether the rows are sure to be the same in every pass."""
    graph: tuple[Tensor | None, Tensor | None, Tensor | None]
    """X, Y and weight of all rows with the graph that they belong to, where they are in memory."""

    def __init__(
        self, X: Tensor, Y: Tensor, weight: Tensor, flat: bool, classes: Tensor | None = None
    ) -> None:
        self.graph = (X, Y, weight)
        self.X, self.Y, self.weight = (t.detach() for t in self.graph)
        self.flat, self.classes = flat, classes
        self.n: int | None = len(X)

    @property
    def known(self) -> tuple[Tensor, Tensor] | None:
        """Targets (n, c) and weights (n,) of all rows, where they are in memory."""
        return self.Y, self.weight

    def blocks(self, function: str, size: int, what: str) -> Iterator[Block]:
        """All rows, `size` at a time."""
        for start in range(0, len(self.X), size):
            rows = slice(start, start + size)
            yield Block(start, self.X[rows], self.Y[rows], self.weight[rows])

    def take(self, function: str, index: Tensor) -> Block:
        """The rows of an index (b,), in its order."""
        index = index.to(self.X.device)
        return Block(0, self.X[index], self.Y[index], self.weight[index])

    def spool(self, function: str, parts: Iterator[Block]) -> None:
        """Nothing is to be done."""

    def bar(self, what: str) -> "tqdm[Any]":
        """None that is shown."""
        return tqdm(disable=True)
