"""Criteria of the class that the largest of several held-out outputs predicts."""

from torch import Tensor

from torchloo.criteria.criterion import criterion
from torchloo.criteria.rows import Rows, Weight
from torchloo.held_out import HeldOut

__all__ = ["multiclass_error"]


@criterion(lower_is_better=True, differentiable=False, targets="one-vs-rest")
def multiclass_error(held_out: HeldOut, weight: Weight = "own", per_output: bool = False) -> Tensor:
    """Rate of rows whose own class does not have the largest output: sum_i w_i [wrong class] / sum_i w_i.

    Targets (..., n, c), c > 1, have one positive column in each row, that of its class. Of equally large
    outputs the first counts. There is nothing for each output, so per_output must be False.
    Lower is better. Not differentiable: `press` is its differentiable companion in a search.

    >>> import torch
    >>> f = torch.tensor([[0.2, 0.5, -1.0], [0.1, -0.3, -0.9]])
    >>> y, one = torch.tensor([[-1.0, 1.0, -1.0], [-1.0, 1.0, -1.0]]), torch.ones(2)
    >>> multiclass_error(HeldOut(f, y - f, y, one, None, torch.ones_like(f), one > 1))
    tensor(0.5000)
    """
    rows = Rows("multiclass_error", held_out, weight, per_output, classes="column", steps=True)
    wrong = (rows.predicted_class != rows.own_class).to(rows.outputs.dtype)  # (..., n)
    return rows.over_outputs(rows.mean(wrong.unsqueeze(-2)))
