"""standard_error: the sampling error of a held-out mean over rows."""

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
    d_i = w_i (l_i - m) / sum_i w_i, and n is the number of rows with positive weight: s / sqrt(n) if all
    weights are one. For leave-cluster-out the d_i of a cluster are added up first, and n is the number of
    clusters: rows of one cluster are not independent. The variation of the machine with its training rows is
    not included.

    Args:
        criterion: one of tl.criteria that is a mean over rows, its name, or a functools.partial of it.
        held_out: of leave-one-out or leave-cluster-out.
        weight: as in criteria.

    Returns:
        Batch shape; NaN if there is only one row, or one cluster. Not differentiable.

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
    mean = score(held_out, weight).unsqueeze(-1)  # (..., 1)
    # Signs suffice for the weights; the criterion, called above, has checked what it needs itself.
    rows = ScoredRows("standard_error", held_out, weight, False, signs=True)
    w = rows.weight[..., 0, :]  # (..., n)
    losses = score(_rows_as_batch(held_out), None)
    deviation = w * (losses - mean) / w.sum(-1, keepdim=True)
    counted = (w > 0).to(w.dtype)
    if held_out.clusters is not None:
        labels, inverse = held_out.clusters.unique(return_inverse=True)
        cluster = inverse.to(w.device)
        deviation = _summed(deviation, cluster, len(labels))
        counted = _summed(counted, cluster, len(labels))
    n = (counted > 0).sum(-1).to(w.dtype)
    squares = deviation.square().sum(-1)
    return (n / (n - 1) * squares).sqrt()


def _summed(values: Tensor, cluster: Tensor, count: int) -> Tensor:
    """Sums over clusters, (..., n) -> (..., count), by the cluster (n,) of each row."""
    return values.new_zeros(*values.shape[:-1], count).index_add_(-1, cluster, values)


def _rows_as_batch(held_out: Any) -> Any:
    """Every row as a problem of its own: a batch (..., n) of one row each."""
    axis = held_out.weight.ndim
    names = [name for name in HeldOut._fields if name != "clusters"]
    fields = {name: getattr(held_out, name).unsqueeze(axis) for name in names}
    return held_out._replace(**fields, clusters=None)
