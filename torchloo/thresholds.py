"""threshold: the decision threshold of a machine, chosen on held-out predictions."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchloo.criteria.classification import balanced_error_rate, error_rate
from torchloo.criteria.score import Score
from torchloo.held_out import HeldOut, require_held_out

__all__ = ["shift_score", "shifted", "threshold"]

_ENTRIES = 1 << 22  # outputs that are scored at once


def shifted(held_out: Any, shift: Tensor | float) -> Any:
    """The same HeldOut with outputs + shift."""
    outputs = held_out.outputs + shift
    return held_out._replace(outputs=outputs, residuals=held_out.targets - outputs)


def threshold(held_out: HeldOut, metric: Any = "error_rate") -> Tensor:
    """The shift of a machine's outputs that optimises a held-out metric.

    A metric that counts errors changes only where an output changes its sign, so one of the shifts half way
    between neighbouring outputs, or beyond all of them, is optimal. Of equally good shifts the smallest is
    returned, and 0 if no shift improves the metric. For a metric that is not constant in between, the
    result is the best of these shifts. Cawley 2006, I-A, adapts the bias for the balanced error rate.

    Args:
        held_out: of leave-one-out or leave-cluster-out, outputs (..., n) or (..., n, c).
        metric: one of tl.criteria, its name, or a callable of a HeldOut, which is minimised, or maximised if
            higher is better. By default the error rate, for several classes that of each one-vs-rest column.

    Returns:
        Shifts, of batch shape (...), or (..., c), each optimal for the metric of its column.
        Cost O(n log n) for each by error_rate and balanced_error_rate, unless very many shifts are equally
        good, else O(n^2); memory a few times 2^22 numbers.

    >>> f, one = torch.tensor([-3.0, -2.0, -1.0, 1.0]), torch.ones(4)
    >>> y = torch.tensor([-1.0, -1.0, 1.0, 1.0])
    >>> threshold(HeldOut(f, y - f, y, one, None, one, one > 1), "balanced_error_rate")
    tensor(1.5000)
    """
    score = shift_score("threshold", "metric", metric)
    require_held_out("threshold", held_out)
    return _threshold(held_out, score)


def shift_score(function: str, argument: str, metric: Any) -> Score:
    """The metric that a shift optimises; it must be computed from a single column of outputs."""
    score = Score(function, argument, metric)
    if score.takes_fit:
        raise ValueError(
            f"{function}: {argument} must be of held-out outputs, got {score.name}, which takes a Fit"
        )
    if score.targets == "one-vs-rest":
        raise ValueError(
            f"{function}: {argument} must be of one column, as every column gets its own shift, got "
            f"{score.name}, which compares columns; use error_rate or balanced_error_rate"
        )
    return score


@torch.no_grad()
def _threshold(held_out: Any, score: Score) -> Tensor:
    f, weight = held_out.outputs, held_out.weight
    if weight.ndim > 1:
        entries = [_entry(held_out, i) for i in range(len(weight))]
        return torch.stack([_threshold(entry, score) for entry in entries])
    if f.ndim > 1:
        columns = [_output(held_out, j) for j in range(f.shape[1])]
        return torch.stack([_threshold(column, score) for column in columns])
    levels = f.unique()  # ascending
    edge = 1 + levels.abs().max()
    between = (levels[1:] + levels[:-1]) / 2
    zero = torch.zeros_like(levels[:1])
    below = levels[:1] - edge
    above = levels[-1:] + edge
    shifts = -torch.cat([zero, between, below, above])
    shifts = shifts[shifts.abs().argsort(stable=True)]  # the smallest first, which wins ties
    shifts = shifts[_may_be_best(held_out, shifts, score)]
    at_once = max(1, _ENTRIES // len(f))
    values = [score.sign * _scored(held_out, some, score) for some in shifts.split(at_once)]
    losses = torch.cat(values)
    losses = torch.where(losses.isnan(), torch.inf, losses)
    return shifts[losses.argmin()]


def _may_be_best(held_out: Any, shifts: Tensor, score: Score) -> Tensor:
    """Which shifts (s,) are best up to rounding, for a metric that counts errors; all for other metrics."""
    positive = held_out.targets > 0
    if score.criterion is error_rate:
        cost = held_out.weight.double()
    elif score.criterion is balanced_error_rate:
        class_size = torch.where(positive, positive.sum(), (~positive).sum())
        cost = 1 / class_size.double()
    else:
        return torch.ones_like(shifts, dtype=torch.bool)

    def cost_below(rows: Tensor) -> Tensor:
        return _cost_below(held_out.outputs[rows], cost[rows], -shifts)

    errors = cost_below(positive) - cost_below(~positive)  # up to a constant: the cost of all negatives
    worse = errors > errors.min() + 1e-12 * cost.sum()
    return ~worse  # so that NaN is kept


def _cost_below(outputs: Tensor, cost: Tensor, cuts: Tensor) -> Tensor:
    """The cost of all rows whose outputs lie below each of the cuts, (s,)."""
    ascending, order = outputs.sort()
    total = torch.nn.functional.pad(cost[order].cumsum(0), (1, 0))  # (n + 1,), of the first 0 .. n rows
    return total[torch.searchsorted(ascending, cuts)]


def _each(held_out: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same HeldOut with a change made to every field that has a batch shape."""
    fields = {
        name: change(value)
        for name, value in held_out._asdict().items()
        if isinstance(value, Tensor) and name != "clusters"
    }
    return held_out._replace(**fields)


def _scored(held_out: Any, shifts: Tensor, score: Score) -> Tensor:
    """The metric for shifts (s,) of outputs (n,), as one batch."""
    batch = _each(held_out, lambda values: values.expand(len(shifts), *values.shape))
    return score(shifted(batch, shifts.unsqueeze(-1)))


def _entry(held_out: Any, i: int) -> Any:
    """Entry i of the first batch dimension."""
    return _each(held_out, lambda values: values[i])


def _output(held_out: Any, j: int) -> Any:
    """Output j of a HeldOut with an output axis."""
    fields = {
        name: value[:, j]
        for name, value in held_out._asdict().items()
        if isinstance(value, Tensor) and value.ndim == 2  # weight, clusters and refitted have none
    }
    return held_out._replace(**fields)
