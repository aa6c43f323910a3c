"""Criteria of the class that a held-out output predicts, and of its margin."""

import torch
from torch import Tensor

from torchloo.criteria.criterion import criterion
from torchloo.criteria.rows import Average, Rows, Weight, no_weight, require_classes
from torchloo.guards import Guard, require_floating
from torchloo.held_out import HeldOut

__all__ = [
    "balanced_error_rate",
    "balanced_weight",
    "error_rate",
    "hinge",
    "smooth_error",
    "squared_hinge",
]


@criterion(lower_is_better=True, differentiable=False, targets="signs")
def error_rate(
    held_out: HeldOut, weight: Weight = "own", per_output: bool = False, *, average: Average = None
) -> Tensor:
    """Rate of held-out errors: sum_i w_i [f_i on the wrong side] / sum_i w_i.

    Of several classes `multiclass_error`. Lower is better. Not differentiable.
    """
    rows = Rows(
        "error_rate", held_out, weight, per_output, average=average, classes="sign", steps=True, signs=True
    )
    return rows.over_outputs(rows.mean(rows.wrong))


@criterion(lower_is_better=True, differentiable=False, targets="signs")
def balanced_error_rate(
    held_out: HeldOut, weight: Weight = "own", per_output: bool = False, *, average: Average = None
) -> Tensor:
    """Mean of the error rates of the two classes: `error_rate` under the weights of `balanced_weight`.

    Unweighted otherwise, whatever the training weights. Lower is better. Not differentiable.
    """
    no_weight("balanced_error_rate", weight)
    rows = Rows(
        "balanced_error_rate",
        held_out,
        None,
        per_output,
        average=average,
        classes="both signs",
        steps=True,
        signs=True,
    )
    of_class = [rows.positive, rows.targets < 0]
    rates = [(rows.wrong * member).sum(-1) / member.sum(-1) for member in of_class]
    return rows.over_outputs((rates[0] + rates[1]) / 2)


def balanced_weight(y: Tensor) -> Tensor:
    """Weights n / (2 n_class) that give both classes the same sum, n / 2; ones where they are balanced.

    Args: y, labels (..., n), one positive and one negative value. Returns: shape and dtype of y.
    Reference: Cawley 2006, eq. 18.

    >>> balanced_weight(torch.tensor([1.0, -1.0, -1.0, -1.0]))
    tensor([2.0000, 0.6667, 0.6667, 0.6667])
    """
    require_floating("balanced_weight", y=y)
    if y.ndim == 0 or y.shape[-1] == 0:
        raise ValueError(f"balanced_weight: y must be (..., n) with n > 0, got shape {tuple(y.shape)}")
    guard, positive = Guard("balanced_weight"), y > 0
    guard.finite(y=y)
    require_classes(guard, "y", y)
    guard.check()
    count = positive.sum(-1, keepdim=True)  # (..., 1)
    return y.shape[-1] / (2 * torch.where(positive, count, y.shape[-1] - count).to(y.dtype))


@criterion(lower_is_better=True, differentiable=True, targets="signs")
def smooth_error(
    held_out: HeldOut,
    weight: Weight = "own",
    per_output: bool = False,
    *,
    average: Average = None,
    gamma: float = 10.0,
) -> Tensor:
    """`error_rate` with a logistic step: sum_i w_i / (1 + exp(gamma t_i f_i)) / sum_i w_i.

    Args beyond the usual: gamma > 0, the steepness; as gamma grows this tends to the error rate and its
    gradient to zero almost everywhere. Lower is better. Differentiable.
    Reference: Bo, Wang, Jiao 2005; Cawley 2006, eq. 20.
    """
    Guard("smooth_error").positive(gamma=gamma)
    rows = Rows("smooth_error", held_out, weight, per_output, average=average, classes="sign")
    return rows.over_outputs(rows.mean(torch.sigmoid(-gamma * rows.margin)))


@criterion(lower_is_better=True, differentiable=True, targets="signs")
def hinge(
    held_out: HeldOut, weight: Weight = "own", per_output: bool = False, *, average: Average = None
) -> Tensor:
    """Held-out hinge loss: sum_i w_i max(0, 1 - t_i f_i).

    Lower is better. Differentiable but at the kink.
    """
    rows = Rows("hinge", held_out, weight, per_output, average=average, classes="sign")
    return rows.over_outputs(rows.total((1 - rows.margin).clamp(min=0)))


@criterion(lower_is_better=True, differentiable=True, targets="signs")
def squared_hinge(
    held_out: HeldOut, weight: Weight = "own", per_output: bool = False, *, average: Average = None
) -> Tensor:
    """Held-out squared hinge loss: sum_i w_i max(0, 1 - t_i f_i)^2.

    Lower is better. Differentiable.
    """
    rows = Rows("squared_hinge", held_out, weight, per_output, average=average, classes="sign")
    return rows.over_outputs(rows.total((1 - rows.margin).clamp(min=0).square()))
