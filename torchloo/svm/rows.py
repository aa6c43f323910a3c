"""Outcomes by rows: from what is known of each problem of a batch to one SVMHeldOut."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchloo.svm.gradient import Deferred, outputs_with_gradient
from torchloo.svm.held_out import SVMHeldOut, rounded

__all__ = ["OneProblem", "RowOutcome", "assembled", "families", "stacks", "taken_apart"]

_TOGETHER = 2**20  # entries of the kernel matrices of a stack

OneProblem = tuple[Tensor, Tensor, Tensor]


class RowOutcome(NamedTuple):
    """Outcome for each of the n rows of one problem, (n,), or of several, (T, n)."""

    outputs: Tensor
    certified: Tensor
    resolved_by: Tensor
    iterations: Tensor
    columns: Tensor
    newton: Tensor
    machines: Deferred | None
    """The held-out machines for the backward; None if not asked for."""

    def by_problem(self) -> "list[RowOutcome]":
        """Of an outcome of T problems, (T, n), each on its own."""
        fields = zip(*self[:6], strict=True)
        return [RowOutcome(*(*of_one, self.machines)) for of_one in fields]


def taken_apart(K: Tensor, y: Tensor, box: Tensor) -> list[OneProblem]:
    """The problems K (n, n), y (n,), box (n,) of a batch, whose shape y and box have and K broadcasts to.

    Problems that share a kernel matrix have the same tensor, and add to the same gradient; likewise labels.
    """
    # No reshape: it would copy what is expanded, and hide what problems share.
    matrices = _entries(K)
    number = torch.arange(len(matrices), device="cpu").reshape(K.shape[:-2]).expand(y.shape[:-1])
    own = [matrices[k] for k in number.flatten().tolist()]
    labels: dict[tuple[object, ...], Tensor] = {}
    shared = [labels.setdefault((x.data_ptr(), x.stride()), x) for x in _entries(y, 1)]
    return list(zip(own, shared, _entries(box, 1), strict=True))


def _entries(batch: Tensor, ndim: int = 2) -> list[Tensor]:
    """The entries of a batch as views, in order; `ndim` is how many dimensions each has."""
    if batch.ndim == ndim:
        return [batch]
    return [entry for part in batch.unbind() for entry in _entries(part, ndim)]


def stacks(K: Tensor, y: Tensor, box: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """The problems of a batch, in order, as stacks K (B, n, n), y and box (B, n) that fit."""
    n = y.shape[-1]
    matrices, labels, boxes = K.detach().reshape(-1, n, n), y.reshape(-1, n), box.detach().reshape(-1, n)
    number = torch.arange(len(matrices), device="cpu").reshape(K.shape[:-2]).expand(y.shape[:-1]).flatten()
    size = max(1, _TOGETHER // n**2)
    for part, y_part, box_part in zip(number.split(size), labels.split(size), boxes.split(size), strict=True):
        first = int(part[0])
        # A copy only where matrices are not one after the other.
        follows = bool((part == torch.arange(first, first + len(part), device="cpu")).all())
        K_part = matrices[first : first + len(part)] if follows else matrices[part.to(K.device)]
        yield K_part, y_part, box_part


def families(problems: Sequence[OneProblem]) -> list[list[int]]:
    """Numbers of the problems that share K and y and differ in their boxes only."""
    same: dict[tuple[int, int], list[int]] = {}
    for number, (K, y, _) in enumerate(problems):
        same.setdefault((id(K), id(y)), []).append(number)
    return list(same.values())


def assembled(
    problems: list[OneProblem],
    outcomes: list[RowOutcome],
    y: Tensor,
    weight: Tensor,
    clusters: Tensor | None = None,
    values: bool = True,
) -> SVMHeldOut:
    """The outcomes of all problems in the shape of y (..., n), outputs with their gradients."""
    outputs = [_with_gradient(K, box, x) for (K, _, box), x in zip(problems, outcomes, strict=True)]
    rows = ((f, *outcome[1:6]) for f, outcome in zip(outputs, outcomes, strict=True))
    f, certified, by, iterations, columns, newton = (
        torch.stack(field).reshape(y.shape) for field in zip(*rows, strict=True)
    )
    return SVMHeldOut.build(y, weight, f, certified, by, iterations, columns, newton, clusters, values)


def _with_gradient(K: Tensor, box: Tensor, outcome: RowOutcome) -> Tensor:
    outputs = rounded(outcome.outputs, K.dtype)
    if outcome.machines is None or not torch.is_grad_enabled():
        return outputs
    return outputs_with_gradient(K, box, outputs, outcome.machines)
