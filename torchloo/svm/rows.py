"""Outcomes by rows: from what is known of each problem of a batch to one SVMHeldOut."""

from typing import NamedTuple

import torch
from torch import Tensor

from torchloo.svm.gradient import Deferred, outputs_with_gradient
from torchloo.svm.held_out import SVMHeldOut

__all__ = ["OneProblem", "RowOutcome", "assembled", "taken_apart"]

OneProblem = tuple[Tensor, Tensor, Tensor]


class RowOutcome(NamedTuple):
    """Outcome for each of the n rows of one problem."""

    outputs: Tensor
    certified: Tensor
    resolved_by: Tensor
    iterations: Tensor
    columns: Tensor
    machines: Deferred | None
    """The held-out machines for the backward; None if not asked for."""


def taken_apart(K: Tensor, y: Tensor, box: Tensor) -> list[OneProblem]:
    """The problems K (n, n), y (n,), box (n,) of a batch, whose shape y has and K may broadcast to.

    Problems that share a kernel matrix have the same tensor, and add to the same gradient.
    """
    n, batch = y.shape[-1], K.shape[:-2]
    matrices = K.reshape(-1, n, n).unbind()
    own = torch.arange(len(matrices)).reshape(batch).expand(y.shape[:-1]).flatten().tolist()
    return list(zip([matrices[k] for k in own], y.reshape(-1, n), box.reshape(-1, n), strict=True))


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
    rows = ((f, *outcome[1:5]) for f, outcome in zip(outputs, outcomes, strict=True))
    f, certified, by, iterations, columns = (
        torch.stack(field).reshape(y.shape) for field in zip(*rows, strict=True)
    )
    return SVMHeldOut.build(y, weight, f, certified, by, iterations, columns, clusters, values)


def _with_gradient(K: Tensor, box: Tensor, outcome: RowOutcome) -> Tensor:
    outputs = outcome.outputs.to(K.dtype)
    if outcome.machines is None or not torch.is_grad_enabled():
        return outputs
    return outputs_with_gradient(K, box, outputs, outcome.machines)
