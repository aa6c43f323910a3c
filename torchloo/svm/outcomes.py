"""Outcomes by rows: a batch in stacks that fit, and from what is known of each to one SVMHeldOut."""

from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from torchloo.svm.gradient import matrix_numbers, outputs_with_gradient
from torchloo.svm.records import RowOutcome
from torchloo.svm.result import SVMHeldOut, rounded

__all__ = ["Stack", "assembled", "stacks", "without_graph"]

_TOGETHER = 2**20  # entries of the kernel matrices of a stack

Stack = tuple[Tensor, Tensor, Tensor]
"""Problems K (B, n, n), y (B, n), box (B, n)."""


def stacks(K: Tensor, y: Tensor, box: Tensor, most: int | None = None) -> Iterator[Stack]:
    """The problems of a batch, whose shape y and box have and K broadcasts to, in order, in stacks.

    Of so many problems as fit, and of at most `most`.
    """
    n = y.shape[-1]
    matrices = K.detach().reshape(-1, n, n)
    labels, boxes = y.reshape(-1, n), box.detach().reshape(-1, n)
    number = matrix_numbers(K, y.shape[:-1])
    size = max(1, _TOGETHER // n**2)
    size = size if most is None else min(size, most)
    parts = (x.split(size) for x in (number, labels, boxes))
    for part, y_part, box_part in zip(*parts, strict=True):
        first, last = int(part[0]), int(part[0]) + len(part)
        # A copy only where matrices are not one after the other.
        in_order = bool((part == torch.arange(first, last, device="cpu")).all())
        K_part = matrices[first:last] if in_order else matrices[part.to(K.device)]
        yield K_part, y_part, box_part


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
