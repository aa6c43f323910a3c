"""What the command tells of predictions: a few measures for each task, and what guessing would give.

A measure is called as a criterion of tl.criteria is, with a HeldOut, and returns the batch shape.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

import torchloo as tl
from torchloo.held_out import HeldOut

__all__ = ["Measure", "guess", "measures"]


class Measure(NamedTuple):
    """A name, the function, and how its values are shown."""

    name: str
    of: Callable[[HeldOut], Tensor]
    percent: bool = False

    def show(self, value: float) -> str:
        """A value of the measure as text."""
        if value != value:
            return "-"
        return f"{100 * value:.1f} %" if self.percent else f"{value:.4g}"

    def show_mean(self, mean: float, error: float) -> str:
        """A mean and its standard error as text."""
        if self.percent:
            return f"{100 * mean:.1f} ± {100 * error:.1f} %"
        return f"{mean:.4g} ± {error:.2g}"


def measures(classes: int) -> list[Measure]:
    """The measures of a task, the one that is estimated by the outer loop first."""
    if not classes:
        return [Measure("RMSE", _rmse), Measure("mean absolute error", _absolute), Measure("R²", _r_squared)]
    if classes == 2:
        return [
            Measure("error rate", tl.criteria.error_rate, percent=True),
            Measure("balanced error rate", tl.criteria.balanced_error_rate, percent=True),
            Measure("area under the ROC curve", tl.criteria.auc),
        ]
    return [
        Measure("error rate", _wrong_class, percent=True),
        Measure("balanced error rate", _wrong_class_balanced, percent=True),
    ]


def _rmse(held_out: HeldOut) -> Tensor:
    return tl.criteria.mse(held_out).sqrt()


def _mean(values: Tensor, weight: Tensor) -> Tensor:
    return (weight * values).sum(-1) / weight.sum(-1)


def _absolute(held_out: HeldOut) -> Tensor:
    return _mean(held_out.residuals.abs(), held_out.weight)


def _r_squared(held_out: HeldOut) -> Tensor:
    """1 - the squared residuals over those of the mean."""
    y, weight = held_out.targets, held_out.weight
    spread = _mean((y - _mean(y, weight).unsqueeze(-1)).square(), weight)
    return 1 - tl.criteria.mse(held_out) / spread


def _wrong(held_out: HeldOut) -> Tensor:
    """Rows (..., n) whose largest output is not that of their class."""
    wrong = held_out.outputs.argmax(-1) != held_out.targets.argmax(-1)
    return wrong.to(held_out.outputs.dtype)


def _wrong_class(held_out: HeldOut) -> Tensor:
    return _mean(_wrong(held_out), held_out.weight)


def _wrong_class_balanced(held_out: HeldOut) -> Tensor:
    """The mean of the error rates of the classes that are there."""
    member = (held_out.targets > 0).to(held_out.outputs.dtype)  # (..., n, c)
    count = member.sum(-2)
    rate = (_wrong(held_out).unsqueeze(-1) * member).sum(-2) / count.clamp(min=1)
    return rate.sum(-1) / (count > 0).sum(-1)


def guess(y: Tensor, weight: Tensor) -> HeldOut:
    """Always saying the mean of the targets, which for classes is to name the commonest one."""
    w = weight if y.ndim == 1 else weight.unsqueeze(-1)
    outputs = ((w * y).sum(0) / w.sum(0)).expand_as(y)
    never = torch.zeros_like(weight, dtype=torch.bool)
    return HeldOut(outputs, y - outputs, y, weight, None, torch.ones_like(y), never)
