"""standard_error: how much a held-out mean owes to the rows that happened to be drawn."""

from typing import Any

import torch
from torch import Tensor

from torchloo.criteria.score import Score
from torchloo.criteria.scored_rows import ScoredRows, Weight
from torchloo.held_out import HeldOut, require_held_out

__all__ = ["standard_error"]


@torch.no_grad()
def standard_error(criterion: Any, held_out: HeldOut, weight: Weight = "own") -> Tensor:
    """Standard error of a criterion that is a mean over rows, such as mse, error_rate or multiclass_error.

    With losses l_i and m = sum_i w_i l_i / sum_i w_i it is the root of n / (n - 1) sum_i d_i^2, where
    d_i = w_i (l_i - m) / sum_i w_i, n being the number of rows with a weight: s / sqrt(n) where all weights
    are one. Under leave-cluster-out the d_i of a cluster are added up first, and n is the number of clusters:
    rows of one cluster are not independent. It does not tell what the machine owes to its rows.

    Args:
        criterion: one of tl.criteria that is a mean over rows, its name, or a functools.partial of it.
        held_out: of leave-one-out or leave-cluster-out.
        weight: as criteria take it.

    Returns:
        Batch shape; NaN where there is one row, or one cluster, only. Not differentiable.

    >>> f, y, one = torch.tensor([0.5, -2.0, 1.0]), torch.tensor([1.0, -1.0, 1.0]), torch.ones(3)
    >>> standard_error("mse", HeldOut(f, y - f, y, one, None, one, one > 1))
    tensor(0.3005)
    """
    score = Score("standard_error", "criterion", criterion)
    require_held_out("standard_error", held_out, signs=True)
    if not score.mean_over_rows:
        raise ValueError(
            "standard_error: criterion must be a mean over rows, such as mse, error_rate, smooth_error, "
            f"multiclass_error or cross_entropy, got {score.name}"
        )
    mean = score(held_out, weight).unsqueeze(-1)  # (..., 1), its checks made
    # Signs are enough here: whether they are enough for the criterion, it has said itself.
    w = ScoredRows("standard_error", held_out, weight, False, signs=True).weight[..., 0, :]  # (..., n)
    deviation = w * (score(_rows_alone(held_out), None) - mean) / w.sum(-1, keepdim=True)
    weighed = (w > 0).to(w.dtype)
    if held_out.clusters is not None:
        labels, own = held_out.clusters.unique(return_inverse=True)
        deviation, weighed = (_summed(t, own.to(w.device), len(labels)) for t in (deviation, weighed))
    n = (weighed > 0).sum(-1).to(w.dtype)
    return (n / (n - 1) * deviation.square().sum(-1)).sqrt()


def _summed(values: Tensor, own: Tensor, count: int) -> Tensor:
    """Sums over clusters, (..., n) -> (..., count), by the cluster (n,) of each row."""
    return values.new_zeros(*values.shape[:-1], count).index_add_(-1, own, values)


def _rows_alone(held_out: Any) -> Any:
    """Every row a problem of its own: a batch (..., n) of one row each."""
    axis = held_out.weight.ndim
    names = [name for name in HeldOut._fields if name != "clusters"]
    fields = {name: getattr(held_out, name).unsqueeze(axis) for name in names}
    return held_out._replace(**fields, clusters=None)
