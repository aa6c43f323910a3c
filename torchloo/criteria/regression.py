"""Criteria of the held-out residuals."""

import math

import torch
from torch import Tensor

from torchloo.criteria.declared import criterion
from torchloo.criteria.scored_rows import ScoredRows, Weight
from torchloo.held_out import HeldOut

__all__ = ["log_density", "mse", "press"]


@criterion(
    "PRESS",
    "the sum of the squared residuals",
    lower_is_better=True,
    differentiable=True,
)
def press(held_out: HeldOut, weight: Weight = "own", per_output: bool = False) -> Tensor:
    """Predicted residual sum of squares: sum_i w_i r_i^2.

    Lower is better. Differentiable. Reference: Allen 1974; Cawley 2006, II-G.

    >>> f, y, one = torch.tensor([0.5, -2.0]), torch.tensor([1.0, -1.0]), torch.ones(2)
    >>> press(HeldOut(f, y - f, y, one, None, one, one > 1))
    tensor(1.2500)
    """
    rows = ScoredRows("press", held_out, weight, per_output)
    return rows.over_outputs(rows.total(_squares(rows, held_out)))


@criterion(
    "mean squared error",
    "the mean of the squared residuals",
    lower_is_better=True,
    differentiable=True,
    mean_over_rows=True,
)
def mse(held_out: HeldOut, weight: Weight = "own", per_output: bool = False) -> Tensor:
    """Mean squared held-out residual: sum_i w_i r_i^2 / sum_i w_i.

    Lower is better. Differentiable.
    """
    rows = ScoredRows("mse", held_out, weight, per_output)
    return rows.over_outputs(rows.mean(_squares(rows, held_out)))


def _squares(rows: ScoredRows, held_out: HeldOut) -> Tensor:
    """Squared residuals, (..., c, n)."""
    return rows.turn("residuals", held_out.residuals).square()


@criterion(
    "log density",
    "the mean log predictive density of the targets",
    lower_is_better=False,
    differentiable=True,
    needs_variance=True,
)
def log_density(
    held_out: HeldOut,
    weight: Weight = "own",
    per_output: bool = False,
    *,
    noise: Tensor | float | None = None,
) -> Tensor:
    """Mean held-out log predictive density under Gaussian noise.

    sum_i w_i log N(r_i; 0, s^2 v_i) / sum_i w_i, with v the variance of the HeldOut. Training weights
    are precisions and already in v; here they average.

    Additional argument: noise, the variance s^2 > 0, a number or a tensor that broadcasts with
    batch + (c,), or with the batch if there is no output axis. None uses the s^2 that maximises the
    result, the mean of r^2 / v with the same weights, one for each output. Rasmussen and Williams sum
    over rows and have every scale in the kernel: n times this with noise=1. With clusters v is the
    marginal variance of a row given all other clusters.
    Higher is better. Differentiable. Reference: Rasmussen, Williams 2006, eq. 5.10 to 5.12.
    """
    rows = ScoredRows("log_density", held_out, weight, per_output)
    v = rows.turn("variance", held_out.variance)
    rows.guard.require(~v.isnan().any(), "variance must not be NaN; this machine has no predictive variance")
    ratio = rows.mean(_squares(rows, held_out) / v)  # (..., c)
    if noise is None:
        s2 = ratio
        rows.guard.require(s2 > 0, "residuals must not all be zero if noise is None; give noise=")
    else:
        rows.guard.positive(noise=noise)
        s2 = torch.as_tensor(noise, dtype=v.dtype, device=v.device)
        s2 = s2 if rows.output_axis else s2.unsqueeze(-1)
    rows.guard.check()
    log_variance = math.log(2 * math.pi) + s2.log() + rows.mean(v.log())
    return rows.over_outputs(-0.5 * (log_variance + ratio / s2))
