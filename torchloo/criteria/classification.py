"""Criteria of the class that a held-out output predicts, and of its margin."""

from typing import Any

import torch
from torch import Tensor

from torchloo.classes import as_classes, is_label, is_member, sorted_labels
from torchloo.criteria.declared import criterion
from torchloo.criteria.scored_rows import (
    Average,
    ScoredRows,
    Weight,
    no_weight,
    one_positive,
    require_classes,
)
from torchloo.guards import Guard, require_floating, values_visible
from torchloo.held_out import HeldOut

__all__ = [
    "balanced_error_rate",
    "balanced_weight",
    "error_rate",
    "hinge",
    "smooth_error",
    "squared_hinge",
]


@criterion(
    "error rate",
    "the fraction of wrong predictions",
    lower_is_better=True,
    differentiable=False,
    targets="signs",
    mean_over_rows=True,
    smooth="smooth_error",
    counterpart="multiclass_error",
)
def error_rate(
    held_out: HeldOut, weight: Weight = "own", per_output: bool = False, *, average: Average = None
) -> Tensor:
    """Rate of held-out errors: sum_i w_i [f_i on the wrong side] / sum_i w_i.

    For several classes see `multiclass_error`. Lower is better. Not differentiable.
    """
    rows = ScoredRows(
        "error_rate", held_out, weight, per_output, average=average, classes="sign", steps=True, signs=True
    )
    return rows.over_outputs(rows.mean(rows.wrong))


@criterion(
    "balanced error rate",
    "the mean of the error rates of the two classes",
    lower_is_better=True,
    differentiable=False,
    targets="signs",
    smooth="smooth_error with criterion_weight=tl.balanced_weight",
    counterpart="balanced_multiclass_error",
)
def balanced_error_rate(
    held_out: HeldOut, weight: Weight = "own", per_output: bool = False, *, average: Average = None
) -> Tensor:
    """Mean of the error rates of the two classes: `error_rate` under the weights of `balanced_weight`.

    The training weights are not used. Lower is better. Not differentiable.
    """
    no_weight("balanced_error_rate", weight)
    rows = ScoredRows(
        "balanced_error_rate",
        held_out,
        None,
        per_output,
        average=average,
        classes="both signs",
        steps=True,
        signs=True,
    )

    def error_rate_of(member: Tensor) -> Tensor:
        return (rows.wrong * member).sum(-1) / member.sum(-1)

    rates = error_rate_of(rows.positive) + error_rate_of(rows.targets < 0)
    return rows.over_outputs(rates / 2)


def balanced_weight(y: Tensor, classes: Any = None, *, dtype: torch.dtype | None = None) -> Tensor:
    """Weights n / (k n_class), (..., n), that give each of the k classes the same sum, n / k.

    Ones if the classes are balanced. As `weight=` of a machine they give a rare class the same total weight
    as a frequent one; for an SVC they multiply C row by row.

    Args:
        y: integer or bool labels (..., n); or one positive and one negative value, (..., n); or columns
            (..., n, c) with one positive entry in each row, as from `tl.one_vs_rest`, (..., n, 1) for two
            classes. A batch (B, n) of numbers with a single positive one in each problem is ambiguous, and is
            read as columns: use integer labels instead.
        classes: all classes, for integer labels; None takes them from the values of y. k is the number of
            classes that are present, in each problem separately.
        dtype: of the weights; None for that of y, or torch's default for integer labels. Machines need the
            dtype of X.

    Memory: n c numbers. Reference: Cawley 2006, eq. 18, for two classes.

    >>> balanced_weight(torch.tensor([1.0, -1.0, -1.0, -1.0]))
    tensor([2.0000, 0.6667, 0.6667, 0.6667])
    >>> balanced_weight(torch.tensor([7, 7, 3, 5, 5, 5]))
    tensor([1.0000, 1.0000, 2.0000, 0.6667, 0.6667, 0.6667])
    """
    guard = Guard("balanced_weight")
    member = _members(guard, y, classes)  # (..., n, c)
    counts = member.sum(-2, keepdim=True)  # (..., 1, c)
    present = (counts > 0).sum(-1)  # (..., 1)
    guard.require(present >= 2, "y must hold at least two classes in every problem, got one only")
    guard.check()
    if dtype is None:
        dtype = y.dtype if y.is_floating_point() else torch.get_default_dtype()
    n = member.shape[-2]
    own_count = (member * counts).sum(-1)
    return n / (present * own_count).to(dtype)


def _members(guard: Guard, y: Tensor, classes: Any) -> Tensor:
    """Membership of each row in each class, boolean (..., n, c)."""
    function = guard.function
    if not is_label(y):
        require_floating(function, y=y)
    if y.ndim == 0 or y.shape[-1] == 0 or y.numel() == 0:
        raise ValueError(f"{function}: y must be (..., n) with n > 0, got shape {tuple(y.shape)}")
    if is_label(y):
        known = sorted_labels(function, "y", y) if classes is None else as_classes(function, classes)
        return is_member(guard, "y", y, known)
    guard.finite(y=y)
    may_be_columns = y.ndim > 1 and y.shape[-1] > 1 and values_visible(y)
    if may_be_columns and bool(one_positive(y.mT).all()):
        return y > 0
    if y.ndim > 1 and y.shape[-1] == 1:
        y = y[..., 0]
    require_classes(guard, "y", y)
    return torch.stack([y < 0, y > 0], -1)


@criterion(
    "smooth error rate",
    "the fraction of wrong predictions, with a smooth step",
    lower_is_better=True,
    differentiable=True,
    targets="signs",
    mean_over_rows=True,
)
def smooth_error(
    held_out: HeldOut,
    weight: Weight = "own",
    per_output: bool = False,
    *,
    average: Average = None,
    gamma: float = 10.0,
) -> Tensor:
    """`error_rate` with a logistic step: sum_i w_i / (1 + exp(gamma t_i f_i)) / sum_i w_i.

    Additional argument: gamma > 0, the steepness; as gamma grows this tends to the error rate and its
    gradient to zero almost everywhere. Lower is better. Differentiable.
    Reference: Bo, Wang, Jiao 2005; Cawley 2006, eq. 20.
    """
    Guard("smooth_error").positive(gamma=gamma)
    rows = ScoredRows("smooth_error", held_out, weight, per_output, average=average, classes="sign")
    losses = torch.sigmoid(-gamma * rows.margin)
    return rows.over_outputs(rows.mean(losses))


@criterion(
    "hinge loss",
    "the sum of max(0, 1 - margin)",
    lower_is_better=True,
    differentiable=True,
    targets="signs",
)
def hinge(
    held_out: HeldOut, weight: Weight = "own", per_output: bool = False, *, average: Average = None
) -> Tensor:
    """Held-out hinge loss: sum_i w_i max(0, 1 - t_i f_i).

    Lower is better. Differentiable except at the kink.
    """
    rows = ScoredRows("hinge", held_out, weight, per_output, average=average, classes="sign")
    losses = (1 - rows.margin).clamp(min=0)
    return rows.over_outputs(rows.total(losses))


@criterion(
    "squared hinge loss",
    "the sum of max(0, 1 - margin) squared",
    lower_is_better=True,
    differentiable=True,
    targets="signs",
)
def squared_hinge(
    held_out: HeldOut, weight: Weight = "own", per_output: bool = False, *, average: Average = None
) -> Tensor:
    """Held-out squared hinge loss: sum_i w_i max(0, 1 - t_i f_i)^2.

    Lower is better. Differentiable.
    """
    rows = ScoredRows("squared_hinge", held_out, weight, per_output, average=average, classes="sign")
    losses = (1 - rows.margin).clamp(min=0).square()
    return rows.over_outputs(rows.total(losses))
