"""Criteria of the class that the largest of several held-out outputs predicts.

Those that also take two classes in one column f (`cross_entropy`, `class_accuracy`, `confusion`) use -f as
the output of the first class, with negative targets, and f as that of the second: the outputs of a
least-squares machine for two columns.
"""

import torch
from torch import Tensor

from torchloo.criteria.declared import criterion
from torchloo.criteria.scored_rows import ScoredRows, Weight, no_weight
from torchloo.held_out import HeldOut

__all__ = ["balanced_multiclass_error", "class_accuracy", "confusion", "cross_entropy", "multiclass_error"]


@criterion(
    "misclassification rate (largest output)",
    "the fraction of rows whose true class does not have the largest output",
    lower_is_better=True,
    differentiable=False,
    targets="one-vs-rest",
    mean_over_rows=True,
    smooth="press or tl.criteria.cross_entropy",
    counterpart="error_rate",
)
def multiclass_error(held_out: HeldOut, weight: Weight = "own", per_output: bool = False) -> Tensor:
    """Fraction of rows whose true class does not have the largest output: sum_i w_i [wrong] / sum_i w_i.

    Targets (..., n, c), c > 1, have one positive column in each row, that of its class. Of equally large
    outputs the first is the predicted class. It is not defined per output, so per_output must be False.
    Lower is better. Not differentiable: `cross_entropy` and `press` are differentiable substitutes.

    >>> import torch
    >>> f = torch.tensor([[0.2, 0.5, -1.0], [0.1, -0.3, -0.9]])
    >>> y, one = torch.tensor([[-1.0, 1.0, -1.0], [-1.0, 1.0, -1.0]]), torch.ones(2)
    >>> multiclass_error(HeldOut(f, y - f, y, one, None, torch.ones_like(f), one > 1))
    tensor(0.5000)
    """
    rows = ScoredRows("multiclass_error", held_out, weight, per_output, classes="column", steps=True)
    return rows.mean(1 - _right(rows))[..., 0]


@criterion(
    "balanced misclassification rate",
    "the mean misclassification rate of the classes",
    lower_is_better=True,
    differentiable=False,
    targets="one-vs-rest",
    smooth="cross_entropy with criterion_weight=tl.balanced_weight",
    counterpart="balanced_error_rate",
)
def balanced_multiclass_error(held_out: HeldOut, weight: Weight = "own", per_output: bool = False) -> Tensor:
    """Mean misclassification rate over the classes that are present.

    This is `multiclass_error` under the weights of `balanced_weight`, with the same targets. The training
    weights are not used. Lower is better. Not differentiable.
    """
    no_weight("balanced_multiclass_error", weight)
    rows = ScoredRows("balanced_multiclass_error", held_out, None, per_output, classes="column", steps=True)
    return 1 - _class_accuracy(rows).nanmean(-1)


@criterion(
    "cross-entropy",
    "the mean of -log p, p the softmax of the outputs at the true class",
    lower_is_better=True,
    differentiable=True,
    targets="classes",
    mean_over_rows=True,
)
def cross_entropy(
    held_out: HeldOut, weight: Weight = "own", per_output: bool = False, *, scale: Tensor | float = 1.0
) -> Tensor:
    """Held-out log loss of the softmax of scaled outputs: sum_i w_i (-log p_i) / sum_i w_i.

    p_i is the entry of softmax(scale f_i) for the row's own class. Of two classes in one column,
    p_i = 1 / (1 + exp(-2 scale t_i f_i)), that of the columns -f and f.

    Additional argument: scale > 0, a number or a tensor of batch shape. Outputs of machines are about -1
    and +1, so that the probabilities are not far from uniform for scale = 1; it may be trained with the
    machine. Lower is better. Differentiable, also in the scale.
    """
    rows = ScoredRows("cross_entropy", held_out, weight, per_output, classes="any")
    rows.guard.positive(scale=scale)
    rows.guard.check()
    if isinstance(scale, Tensor):
        scale = scale.to(rows.outputs)[..., None, None]
    logits = scale * rows.scores  # (..., k, n)
    own = (logits * rows.members).sum(-2, keepdim=True)  # (..., 1, n)
    return rows.mean(logits.logsumexp(-2, keepdim=True) - own)[..., 0]


@torch.no_grad()
def class_accuracy(held_out: HeldOut, weight: Weight = "own") -> Tensor:
    """Accuracy within each class (its recall), batch + (k,); NaN for a class without rows.

    One number per class, so this is not a criterion for a search. Of two classes in one column, the negative
    one comes first. Weights as in criteria. Not differentiable.

    >>> f, one = torch.tensor([0.3, -0.5, 1.0]), torch.ones(3)
    >>> y = torch.tensor([-1.0, -1.0, 1.0])
    >>> class_accuracy(HeldOut(f, y - f, y, one, None, one, one > 1))
    tensor([0.5000, 1.0000])
    """
    return _class_accuracy(ScoredRows("class_accuracy", held_out, weight, False, classes="any", steps=True))


@torch.no_grad()
def confusion(held_out: HeldOut, weight: Weight = "own") -> Tensor:
    """Confusion matrix, batch + (k, k): the weight of rows of class i (row) predicted as class j (column).

    With weight=None the number of rows. Of two classes in one column, the negative one comes first. Not
    differentiable.

    >>> f, one = torch.tensor([0.3, -0.5, 1.0]), torch.ones(3)
    >>> y = torch.tensor([-1.0, -1.0, 1.0])
    >>> confusion(HeldOut(f, y - f, y, one, None, one, one > 1))
    tensor([[1., 1.],
            [0., 1.]])
    """
    rows = ScoredRows("confusion", held_out, weight, False, classes="any", steps=True)
    return (rows.weight * rows.members) @ rows.predicted.mT


def _right(rows: ScoredRows) -> Tensor:
    """Rows that are classified correctly, 0 or 1, (..., 1, n)."""
    return (rows.members * rows.predicted).sum(-2, keepdim=True)


def _class_accuracy(rows: ScoredRows) -> Tensor:
    """(..., k)."""
    return rows.total(rows.members * rows.predicted) / rows.total(rows.members)
