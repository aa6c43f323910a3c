"""The processes of torch.distributed: sums, gathering, and errors that reach everyone.

Note [sums over processes]
Every process has rows and a loss of its own; what is descended is the sum of the losses. A tensor that
is added up over the processes enters all losses, so its cotangent is the sum of theirs: the backward of
an all-reduce is an all-reduce. All processes must therefore call backward, on losses made in the same way.
"""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import Function

from torchloo.primal.collective import Peers

__all__ = ["Processes"]

T = TypeVar("T")


class _Told(NamedTuple):
    """What a process tells the others."""

    call: str
    value: Any


class _Sum(Function):
    """Sum over the processes; Note [sums over processes]."""

    @staticmethod
    def forward(ctx: Any, processes: "Processes", tensor: Tensor) -> Tensor:
        ctx.processes = processes.backward()
        total = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=processes.group)
        return total

    @staticmethod
    def backward(ctx: Any, bar: Tensor) -> tuple[None, Tensor]:
        ctx.processes.meet()
        return None, _Sum.apply(ctx.processes, bar)


class _Rows(Function):
    """Rows of all processes, one after another, of which each has its own in the backward.

    `shared` says that the loss is one and the same in all processes, so that the own part of its
    cotangent is all; else the cotangents are added up first.
    """

    @staticmethod
    def forward(ctx: Any, processes: "Processes", shared: bool, counts: list[int], rows: Tensor) -> Tensor:
        ctx.processes, ctx.shared, ctx.counts = processes.backward(), shared, counts
        return processes.padded(rows, counts)

    @staticmethod
    def backward(ctx: Any, bar: Tensor) -> tuple[None, None, None, Tensor]:
        if not ctx.shared:
            ctx.processes.meet()
            bar = _Sum.apply(ctx.processes, bar)
        return None, None, None, bar.split(ctx.counts)[ctx.processes.rank]


class Processes(Peers):
    """The processes of a group, each with rows of its own.

    What they gather carries the name of the public call that asks for it: processes that have made different
    calls all raise ValueError, which names them, instead of taking the values of one for those of another.

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
        self.function, self.call, self.group = function, function, group
        self.rank, self.count = dist.get_rank(group), dist.get_world_size(group)

    def named(self, call: str) -> Self:
        """The same processes in another public call."""
        twin = copy.copy(self)
        twin.call = call
        return twin

    def backward(self) -> Self:
        """The same processes in the backward of the call."""
        return self.named(f"backward of {self.call}")

    def meet(self) -> None:
        """Raise, in all processes, unless they have all come to the same call."""
        self.gather(None)

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes, in their order."""
        told: list[Any] = [None] * self.count
        dist.all_gather_object(told, _Told(self.call, value), group=self.group)
        calls = [one.call if isinstance(one, _Told) else "something else" for one in told]
        for rank, call in enumerate(calls):
            if call != calls[0]:
                raise ValueError(
                    f"{self.function}: all processes must make the same calls in the same order, but process "
                    f"0 called {calls[0]} and process {rank} called {call}"
                )
        return [one.value for one in told]

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
        parts = _Sum.apply(self, flat).split([tensor.numel() for tensor in tensors])
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
