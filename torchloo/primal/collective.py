"""What passes over rows ask of the processes that share them, and the answers where there is only one."""

from collections.abc import Callable
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from torchloo.classes import require_few, require_two
from torchloo.clusters import Partition

__all__ = ["Peers", "require_own", "require_same", "shared_labels"]


T = TypeVar("T")


class Peers:
    """The processes that share the rows: here this one alone; torchloo.distributed has several."""

    rank = 0
    count = 1
    call = ""

    def named(self, call: str) -> Self:
        """The same in another public call, whose name goes with what is gathered."""
        return self

    def backward(self) -> Self:
        """The same in the backward of the call."""
        return self

    def require_same_call(self) -> None:
        """Raise, in all processes, unless they have all come to the same call."""

    def run(self, work: Callable[[], T]) -> T:
        """What the work of this process gives; an error in any of them is raised in all."""
        return work()

    def sums(self, *tensors: Tensor) -> list[Tensor]:
        """Each tensor added up over the processes."""
        return list(tensors)

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes, in their order."""
        return [value]


def require_same(function: str, others: Peers, what: str, value: Any) -> None:
    """Raise, in all processes, if they do not all have the same value."""
    values = others.gather(value)
    if any(other != values[0] for other in values):
        raise ValueError(f"{function}: {what} must be the same in all processes, got {values}")


def shared_labels(function: str, others: Peers, own: Tensor | None, rows: int) -> Tensor | None:
    """The class labels of all processes, ascending, from those of this one; None where y are numbers."""
    found = others.gather((None if own is None else own.tolist(), rows))
    if any((labels is None) != (own is None) for labels, _ in found):
        raise ValueError(f"{function}: y must be class labels in all processes or in none")
    if own is None:
        return None
    classes = torch.tensor(sorted({label for labels, _ in found for label in labels}), device="cpu")
    require_two(function, "y", classes)
    require_few(function, classes, sum(count for _, count in found))
    return classes


def require_own(function: str, others: Peers, partition: Partition) -> None:
    """Raise, in all processes, if a cluster has rows in two of them, or holds all rows of all."""
    if others.count == 1:
        return
    assert partition.labels is not None
    seen: dict[int, int] = {}
    for rank, labels in enumerate(others.gather(partition.labels.unique().tolist())):
        for label in labels:
            if seen.setdefault(label, rank) != rank:
                raise ValueError(
                    f"{function}: all rows of a cluster must be in one process, but cluster {label} has some "
                    f"in process {seen[label]} and in process {rank}"
                )
    if len(seen) < 2:
        raise ValueError(f"{function}: a cluster holds all rows, so no training rows remain")
