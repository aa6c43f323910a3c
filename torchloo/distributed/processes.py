"""The processes of torch.distributed: sums, gathering, and errors that are raised in all of them.

Note [sums over processes]
Every process has its own rows and its own loss; gradients are those of the sum of the losses. A tensor that
is summed over the processes enters all losses, so its gradient is the sum of the gradients of all processes:
the backward of an all-reduce is an all-reduce. Therefore all processes must call backward, and their losses
must be computed by the same operations.
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


class _Message(NamedTuple):
    """A value sent to the other processes, with the name of the call that sends it."""

    call: str
    value: Any


class _Sum(Function):
    """The sum over the processes; Note [sums over processes]."""

    @staticmethod
    def forward(ctx: Any, processes: "Processes", tensor: Tensor) -> Tensor:
        ctx.processes = processes.backward()
        total = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=processes.group)
        return total

    @staticmethod
    def backward(ctx: Any, bar: Tensor) -> tuple[None, Tensor]:
        ctx.processes.require_same_call()
        return None, _Sum.apply(ctx.processes, bar)


class _Rows(Function):
    """The rows of all processes, concatenated; in the backward every process takes the part of its own rows.

    If `shared`, all processes compute the same loss of all rows, so that this part is the whole gradient;
    otherwise the gradients of all processes are summed first.
    """

    @staticmethod
    def forward(ctx: Any, processes: "Processes", shared: bool, counts: list[int], rows: Tensor) -> Tensor:
        ctx.processes = processes.backward()
        ctx.shared = shared
        ctx.counts = counts
        return processes.padded(rows, counts)

    @staticmethod
    def backward(ctx: Any, bar: Tensor) -> tuple[None, None, None, Tensor]:
        if not ctx.shared:
            ctx.processes.require_same_call()
            bar = _Sum.apply(ctx.processes, bar)
        return None, None, None, bar.split(ctx.counts)[ctx.processes.rank]


class Processes(Peers):
    """The processes of a group, each with its own rows.

    Gathered values carry the name of the public call that gathers them. If processes make different calls,
    all raise a ValueError that names the calls, instead of mixing up their values.

    Args:
        function: name of the function for errors.
        group: a process group; None for all processes.
    """

    def __init__(self, function: str, group: Any = None) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError(
                f"{function}: torch.distributed is not initialised; call "
                "torch.distributed.init_process_group first, and start the script with torchrun"
            )
        if dist.get_rank(group) < 0:
            raise RuntimeError(f"{function}: this process is not in the group")
        self.function = function
        self.call = function
        self.group = group
        self.rank = dist.get_rank(group)
        self.count = dist.get_world_size(group)

    def named(self, call: str) -> Self:
        """The same processes within another public call."""
        twin = copy.copy(self)
        twin.call = call
        return twin

    def backward(self) -> Self:
        """The same processes within the backward of the call."""
        return self.named(f"backward of {self.call}")

    def require_same_call(self) -> None:
        """Raise, in all processes, unless all have made the same call."""
        self.gather(None)

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes, in the order of their ranks."""
        messages: list[Any] = [None] * self.count
        dist.all_gather_object(messages, _Message(self.call, value), group=self.group)
        calls = [each.call if isinstance(each, _Message) else "something else" for each in messages]
        for rank, call in enumerate(calls):
            if call != calls[0]:
                raise ValueError(
                    f"{self.function}: all processes must make the same calls in the same order, but process "
                    f"0 called {calls[0]} and process {rank} called {call}"
                )
        return [each.value for each in messages]

    def run(self, work: Callable[[], T]) -> T:
        """The result of the work of this process; an error in one process is raised in all.

        The process that fails raises its own error, the others a RuntimeError with its rank and message.
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
        """Each tensor summed over the processes, by a single all-reduce; differentiable."""
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        parts = _Sum.apply(self, flat).split([tensor.numel() for tensor in tensors])
        return [part.reshape(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]

    def rows(self, rows: Tensor, shared: bool) -> Tensor:
        """Rows (n_r, ...) of all processes, concatenated; differentiable, see `_Rows`."""
        return _Rows.apply(self, shared, self.gather(len(rows)), rows)

    def padded(self, rows: Tensor, counts: list[int]) -> Tensor:
        """Rows of all processes, concatenated, for different numbers of rows."""
        longest = max(counts)
        own = rows.new_zeros((longest, *rows.shape[1:]))
        own[: len(rows)] = rows
        parts = [torch.empty_like(own) for _ in counts]
        dist.all_gather(parts, own, group=self.group)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])
