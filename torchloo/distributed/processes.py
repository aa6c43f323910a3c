"""The processes of torch.distributed: sums, gathering, and errors that reach everyone.

Note [sums over processes]
Every process has rows and a loss of its own; what is descended is the sum of the losses. A tensor that
is added up over the processes enters all losses, so its cotangent is the sum of theirs: the backward of
an all-reduce is an all-reduce. All processes must therefore call backward, on losses made in the same way.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import Function

from torchloo.streaming.collective import Alone

__all__ = ["Processes"]

T = TypeVar("T")


class _Sum(Function):
    """Sum over the processes; Note [sums over processes]."""

    @staticmethod
    def forward(ctx: Any, group: Any, tensor: Tensor) -> Tensor:
        ctx.group = group
        total = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, bar: Tensor) -> tuple[None, Tensor]:
        return None, _Sum.apply(ctx.group, bar)


class _Rows(Function):
    """Rows of all processes, one after another, of which each has its own in the backward.

    `shared` says that the loss is one and the same in all processes, so that the own part of its
    cotangent is all; else the cotangents are added up first.
    """

    @staticmethod
    def forward(ctx: Any, processes: "Processes", shared: bool, counts: list[int], rows: Tensor) -> Tensor:
        ctx.processes, ctx.shared, ctx.counts = processes, shared, counts
        return processes.padded(rows, counts)

    @staticmethod
    def backward(ctx: Any, bar: Tensor) -> tuple[None, None, None, Tensor]:
        total = bar if ctx.shared else _Sum.apply(ctx.processes.group, bar)
        return None, None, None, total.split(ctx.counts)[ctx.processes.rank]


class Processes(Alone):
    """The processes of a group, each with rows of its own.

    Args:
        function: name that errors carry.
        group: a process group; None: all processes.
    """

    def __init__(self, function: str, group: Any = None) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError(
                f"{function}: torch.distributed is not initialised; call "
                "torch.distributed.init_process_group first, and start the script with torchrun"
            )
        if dist.get_rank(group) < 0:
            raise RuntimeError(f"{function}: this process is not in the group")
        self.function, self.group = function, group
        self.rank, self.count = dist.get_rank(group), dist.get_world_size(group)

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes, in their order."""
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value, group=self.group)
        return values

    def together(self, work: Callable[[], T]) -> T:
        """What the work of this process gives; an error in any of them is raised in all.

        Whoever fails raises its own error; the others say whose it was.
        """
        failure: Exception | None = None
        try:
            value = work()
        except Exception as error:
            failure = error
        messages = self.gather(None if failure is None else f"{type(failure).__name__}: {failure}")
        if failure is not None:
            raise failure
        for rank, message in enumerate(messages):
            if message is not None:
                raise RuntimeError(f"{self.function}: process {rank} failed with {message}")
        return value

    def sums(self, *tensors: Tensor) -> list[Tensor]:
        """Each tensor added up over the processes, differentiably, by one all-reduce of them all."""
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        parts = _Sum.apply(self.group, flat).split([tensor.numel() for tensor in tensors])
        return [part.reshape(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]

    def rows(self, rows: Tensor, shared: bool) -> Tensor:
        """Rows (n_r, ...) of all processes one after another, differentiably; see `_Rows`."""
        return _Rows.apply(self, shared, self.gather(len(rows)), rows)

    def padded(self, rows: Tensor, counts: list[int]) -> Tensor:
        """Rows of all processes, of which each has another number."""
        longest = max(counts)
        own = rows.new_zeros((longest, *rows.shape[1:]))
        own[: len(rows)] = rows
        parts = [torch.empty_like(own) for _ in counts]
        dist.all_gather(parts, own, group=self.group)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])
