"""Outcomes by rows: a batch in stacks that fit, and from what is known of each to one SVMHeldOut."""

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from torchloo.guards import may_look
from torchloo.memory import keep_freed_memory
from torchloo.svm.gradient import Deferred, matrix_numbers, outputs_with_gradient
from torchloo.svm.records import Exact, RowOutcome, Solved, SVMProblem
from torchloo.svm.result import UNASKED, SVMHeldOut, rounded

__all__ = ["Stack", "assembled", "by_groups", "in_stacks", "stacks"]

_TOGETHER = 2**20  # entries of the kernel matrices of a stack, on a CPU
_SHARING = 8  # problems of a stack for each kernel matrix that fits
_WORK = 2**30  # cubes of rows of a stack: the larger problems are, the less they gain from others beside them
_EQUATIONS = 96  # of the system that each row of a problem may have on an accelerator
_SYSTEMS = 2**27  # entries of the systems of all rows of a stack there
_WORTH_THREADS = 2**18  # entries of all kernel matrices
_THREADS = 4  # two take 0.76 of the time of one, so that half of it is the interpreter's: more gain little

Stack = tuple[Tensor, Tensor, Tensor, Tensor | None]
"""K (G, n, n), y and box (B, n) in float64, and which K each problem has, ascending, (B,); None: its own."""

Found = TypeVar("Found")


def in_stacks(
    work: Callable[[Stack], Found],
    K: Tensor,
    y: Tensor,
    box: Tensor,
    trace: bool = True,
) -> list[Found]:
    """What `work` finds in each of the `stacks`, without a graph, in their order.

    `trace` says whether a backward will follow. On a CPU, stacks of small problems are worked on in as many
    threads as torch may use: operations on them are too small to be divided, but run beside each other.
    """
    keep_freed_memory()
    problems, n, threads = y.numel() // y.shape[-1], y.shape[-1], torch.get_num_threads()
    small = n**2 <= _TOGETHER and problems * n**2 >= _WORTH_THREADS
    # A mode that observes operations belongs to the thread that has entered it.
    workers = min(threads, _THREADS) if small and may_look(K) and not is_in_torch_dispatch_mode() else 1
    parts = list(stacks(K, y, box, math.ceil(problems / workers)))

    def found(stack: Stack) -> Found:
        # Where no machines are kept for a backward, less work for each operation.
        with torch.no_grad() if trace else torch.inference_mode():
            return work(stack)

    if workers == 1 or len(parts) == 1:
        return [found(stack) for stack in parts]
    try:
        with ThreadPoolExecutor(workers, "svm", torch.set_num_threads, (threads // workers,)) as pool:
            return list(pool.map(found, parts))
    finally:
        torch.set_num_threads(threads)  # which a worker has also set for threads that are still to start


def stacks(K: Tensor, y: Tensor, box: Tensor, most: int) -> Iterator[Stack]:
    """The problems of a batch, whose shape y and box have and K broadcasts to, in order, in stacks.

    Of so many problems as fit, and of at most `most`.
    """
    n = y.shape[-1]
    matrices = K.detach().reshape(-1, n, n)
    labels, boxes = y.detach().reshape(-1, n), box.detach().reshape(-1, n)
    number = matrix_numbers(K, y.shape[:-1]).tolist()
    first = 0
    for last in _ends(number, *_room_of_stacks(K, most)):
        begin, end = number[first], number[last - 1] + 1
        kernel = None
        if end - begin < last - first:
            kernel = torch.tensor(number[first:last], device=K.device) - begin
        yield matrices[begin:end], labels[first:last].double(), boxes[first:last].double(), kernel
        first = last


def _room_of_stacks(K: Tensor, most: int) -> tuple[int, int]:
    """How many kernel matrices and machines a stack may have; of these, at most so many."""
    n = K.shape[-1]
    if may_look(K):
        matrices = max(1, _TOGETHER // n**2)
        return matrices, max(1, min(_SHARING * matrices, _WORK // n**3, most))
    machines = max(1, min(_SYSTEMS // (n * min(n, _EQUATIONS) ** 2), most))
    return machines, machines


def _ends(number: list[int], matrices: int, machines: int) -> Iterator[int]:
    """Where stacks end, of at most so many machines and matrices; the numbers of these ascend in each.

    They never rise by more than 1.
    """
    first = 0
    for i in range(1, len(number)):
        full = number[i] - number[first] >= matrices or i - first >= machines
        if full or number[i] < number[i - 1]:
            yield i
            first = i
    yield len(number)


def by_groups(groups: list[Solved], leave_out: Callable[[SVMProblem, Exact], RowOutcome]) -> RowOutcome:
    """Outcomes of groups of problems as one, in the order of the problems' numbers."""
    found = [leave_out(problem, full) for _, problem, full in groups]
    if len(found) == 1:
        return found[0]
    numbers = [own for own, _, _ in groups]
    order = torch.cat(numbers).argsort()
    *fields, machines = zip(*found, strict=True)
    return RowOutcome.of([torch.cat(field)[order] for field in fields], _among(numbers, machines) or None)


def _among(numbers: Sequence[Tensor], machines: Sequence[list[Deferred] | None]) -> list[Deferred]:
    """The machines of all groups of problems, whose places in the whole batch are given."""
    return [one.among(own) for own, part in zip(numbers, machines, strict=True) for one in part or ()]


def assembled(
    K: Tensor,
    y: Tensor,
    box: Tensor,
    weight: Tensor,
    outcomes: list[RowOutcome],
    clusters: Tensor | None = None,
    values: bool = True,
    asked: Tensor | None = None,
) -> SVMHeldOut:
    """The outcomes of all stacks in the shape of y (..., n), outputs with their gradients.

    Nothing comes back of rows that are not `asked` for (n,).
    """
    *fields, machines = zip(*outcomes, strict=True)
    f, certified, by, iterations, columns, newton = (torch.cat(field).reshape(y.shape) for field in fields)
    f = rounded(f, K.dtype)
    if any(machines) and torch.is_grad_enabled():
        numbers = torch.arange(box.numel() // y.shape[-1], device=K.device)
        own = numbers.split([len(part.outputs) for part in outcomes])
        f = outputs_with_gradient(K, box, f, _among(own, machines))
    if asked is not None:
        f, certified, by = f.where(asked, torch.nan), certified & asked, by.where(asked, UNASKED)
    return SVMHeldOut.build(y, weight, f, certified, by, iterations, columns, newton, clusters, values)
