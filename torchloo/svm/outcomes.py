"""Outcomes by rows: a batch in stacks that fit, and from what is known of each to one SVMHeldOut."""

from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from torchloo.memory import keep_freed_memory
from torchloo.svm.gradient import matrix_numbers, outputs_with_gradient
from torchloo.svm.records import RowOutcome
from torchloo.svm.result import SVMHeldOut, rounded

__all__ = ["Stack", "assembled", "stacks", "without_graph"]

_TOGETHER = 2**20  # entries of the kernel matrices of a stack
_SHARING = 8  # problems of a stack for each kernel matrix that fits
_WORK = 2**30  # cubes of rows of a stack: the larger problems are, the less they gain from others beside them

Stack = tuple[Tensor, Tensor, Tensor, Tensor | None]
"""K (G, n, n), y and box (B, n), and which K each problem has, ascending, (B,); None: each its own."""


def stacks(K: Tensor, y: Tensor, box: Tensor, most: int | None = None) -> Iterator[Stack]:
    """The problems of a batch, whose shape y and box have and K broadcasts to, in order, in stacks.

    Of so many problems as fit, and of at most `most`.
    """
    keep_freed_memory()
    n = y.shape[-1]
    matrices = K.detach().reshape(-1, n, n)
    labels, boxes = y.reshape(-1, n), box.detach().reshape(-1, n)
    number = matrix_numbers(K, y.shape[:-1]).tolist()
    first = 0
    fit = max(1, _TOGETHER // n**2)
    machines = max(1, min(_SHARING * fit, _WORK // n**3)) if most is None else most
    for last in _ends(number, fit, machines):
        begin, end = number[first], number[last - 1] + 1
        kernel = None
        if end - begin < last - first:
            kernel = torch.tensor(number[first:last], device=K.device) - begin
        K_part = matrices[begin:end]
        yield K_part, labels[first:last], boxes[first:last], kernel
        first = last


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


def without_graph(trace: bool) -> AbstractContextManager[object]:
    """No gradients; where no machines are kept for a backward, less work for each operation, too."""
    return torch.no_grad() if trace else torch.inference_mode()


def assembled(
    K: Tensor,
    y: Tensor,
    box: Tensor,
    weight: Tensor,
    outcomes: list[RowOutcome],
    clusters: Tensor | None = None,
    values: bool = True,
) -> SVMHeldOut:
    """The outcomes of all stacks in the shape of y (..., n), outputs with their gradients."""
    *fields, machines = zip(*outcomes, strict=True)
    f, certified, by, iterations, columns, newton = (torch.cat(field).reshape(y.shape) for field in fields)
    f = rounded(f, K.dtype)
    deferred = [machine for part in machines if part is not None for machine in part]
    if deferred and torch.is_grad_enabled():
        f = outputs_with_gradient(K, box, f, deferred)
    return SVMHeldOut.build(y, weight, f, certified, by, iterations, columns, newton, clusters, values)
