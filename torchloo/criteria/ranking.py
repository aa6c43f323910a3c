"""Criteria of the order in which held-out outputs put the rows."""

from typing import Protocol

import torch
from torch import Tensor

from torchloo.criteria import pairs
from torchloo.criteria.declared import criterion
from torchloo.criteria.scored_rows import (
    Average,
    ScoredRows,
    Weight,
    no_weight,
    require_average,
    require_classes,
)
from torchloo.guards import Guard, host_labels, require_floating
from torchloo.held_out import HeldOut

__all__ = ["auc", "kendall_tau", "leave_pair_out_auc", "smooth_wmw", "wmw"]


def _fraction_of_pairs(
    function: str,
    held_out: HeldOut,
    weight: Weight,
    per_output: bool,
    average: Average,
    *,
    wrong: bool = False,
) -> Tensor:
    """Fraction of (positive, negative) pairs in the right order, or in the wrong one; ties count half."""
    no_weight(function, weight)
    rows = ScoredRows(function, held_out, None, per_output, average=average, classes="both signs", steps=True)
    outputs = -rows.outputs if wrong else rows.outputs
    return rows.over_outputs(pairs.fraction_above(outputs, rows.positive))


@criterion(
    "AUC",
    "the area under the ROC curve",
    lower_is_better=False,
    differentiable=False,
    targets="signs",
    smooth="smooth_wmw",
)
def auc(
    held_out: HeldOut, weight: Weight = "own", per_output: bool = False, *, average: Average = None
) -> Tensor:
    """Area under the ROC curve: the fraction of (positive, negative) pairs with f_+ > f_-, ties half.

    Unweighted. Higher is better. Not differentiable. By sorting, O(n log n), in exact integers.
    """
    return _fraction_of_pairs("auc", held_out, weight, per_output, average)


@criterion(
    "WMW",
    "the fraction of pairs ranked wrongly",
    lower_is_better=True,
    differentiable=False,
    targets="signs",
    smooth="smooth_wmw",
)
def wmw(
    held_out: HeldOut, weight: Weight = "own", per_output: bool = False, *, average: Average = None
) -> Tensor:
    """Modified Wilcoxon-Mann-Whitney statistic: the fraction of pairs ranked wrongly, 1 - `auc`.

    Unweighted. Lower is better. Not differentiable. O(n log n).
    """
    return _fraction_of_pairs("wmw", held_out, weight, per_output, average, wrong=True)


@criterion(
    "smooth WMW",
    "the fraction of pairs ranked wrongly, with a smooth step",
    lower_is_better=True,
    differentiable=True,
    targets="signs",
)
def smooth_wmw(
    held_out: HeldOut,
    weight: Weight = "own",
    per_output: bool = False,
    *,
    average: Average = None,
    gamma: float = 10.0,
) -> Tensor:
    """`wmw` with a logistic step: mean over pairs of 1 / (1 + exp(gamma (f_+ - f_-))).

    Additional argument: gamma > 0, the steepness. Unweighted. Lower is better. Differentiable, any
    number of times. O(n_+ n_-) time; forward and backward compute blocks of about two million pairs,
    so memory is O(n) and a few such blocks.
    """
    no_weight("smooth_wmw", weight)
    Guard("smooth_wmw").positive(gamma=gamma)
    rows = ScoredRows("smooth_wmw", held_out, None, per_output, average=average, classes="both signs")
    positive, negative = pairs.by_class(rows.positive, rows.outputs.dtype)
    f = gamma * rows.outputs.gather(-1, positive.row)  # (..., c, p)
    g = gamma * rows.outputs.gather(-1, negative.row)  # (..., c, q)
    above = pairs.logistic_sum(f, g, negative.mask)  # (..., c, p)
    wrong = (positive.mask * above).sum(-1)
    count = positive.mask.sum(-1) * negative.mask.sum(-1)
    return rows.over_outputs(wrong / count)


@criterion(
    "Kendall's tau",
    "the rank correlation with the targets",
    lower_is_better=False,
    differentiable=False,
    smooth="mse",
)
def kendall_tau(
    held_out: HeldOut,
    weight: Weight = "own",
    per_output: bool = False,
    *,
    clusters: object = "own",
) -> Tensor:
    """Kendall's tau_b between targets and held-out outputs within each cluster, averaged over clusters.

    Additional argument: clusters, integer labels (n,); "own" uses those of the HeldOut; None, like a
    HeldOut of leave-one-out, makes all rows one group. A cluster whose targets are all tied, such as a
    single row, has no tau_b and is ignored in the average; if none has one, an error is raised. A
    cluster whose outputs only are all tied counts 0. Unweighted. Higher is better. Not differentiable.
    O(n log^2 n) time, all clusters and the whole batch together. See Note [Kendall's tau by integers].
    Reference: Kendall 1970; Knight 1966; Pahikkala, Boberg, Salakoski 2006, section 4.
    """
    no_weight("kendall_tau", weight)
    rows = ScoredRows("kendall_tau", held_out, None, per_output, steps=True)
    n = rows.outputs.shape[-1]
    device = rows.outputs.device
    if isinstance(clusters, str) and clusters == "own":
        clusters = held_out.clusters
    if clusters is None:
        cluster = torch.zeros(n, dtype=torch.int64, device="cpu")
        sizes = torch.tensor([n], device="cpu")
    else:
        labels = torch.from_numpy(host_labels("kendall_tau", clusters, n))
        _, cluster, sizes = torch.unique(labels, return_inverse=True, return_counts=True)
    cluster, sizes = cluster.to(device), sizes.to(device)
    tau, defined = pairs.tau_b(rows.targets, rows.outputs, cluster, sizes)  # (..., c, k)
    count = defined.sum(-1)
    rows.guard.require(count > 0, "targets must differ within at least one cluster, got only ties")
    rows.guard.check()
    mean = tau.sum(-1) / count
    return rows.over_outputs(mean.to(rows.outputs.dtype))


class _PairFit(Protocol):
    """The part of a Fit that `leave_pair_out_auc` uses."""

    @property
    def targets(self) -> Tensor: ...

    @property
    def dual(self) -> Tensor: ...

    def annihilator(self) -> Tensor: ...


def _pair_problem(
    function: str, fit: _PairFit, per_output: bool, average: Average
) -> tuple[Guard, Tensor, Tensor, Tensor]:
    """A guard, P (..., c, n, n) without a copy for each output, and targets and dual (..., c, n)."""
    if not hasattr(fit, "annihilator"):
        got = type(fit).__name__
        raise TypeError(
            f"{function}: fit must be a Fit of a least-squares machine, as returned by solve(X, y), got {got}"
        )
    P = fit.annihilator()  # (..., n, n) or (..., c, n, n)
    a = fit.dual.mT  # (..., c, n)
    require_floating(function, dual=a, targets=fit.targets, annihilator=P)
    n = a.shape[-1]
    if n < 3 or P.shape[-2:] != (n, n):
        raise ValueError(
            f"{function}: fit must have P (n, n) and n > 2 rows, got {tuple(P.shape)} and n = {n}"
        )
    Y = fit.targets.mT.expand(a.shape)
    guard = Guard(function)
    guard.finite(targets=Y, dual=a, annihilator=P)
    require_classes(guard, "targets", Y)
    require_average(guard, Y, per_output, average)
    guard.check()
    P = P if P.ndim > a.ndim else P.unsqueeze(-3)
    return guard, P.expand(*a.shape, n), Y, a


@criterion(
    "leave-pair-out AUC",
    "the share of pairs, left out together, in the right order",
    lower_is_better=False,
    differentiable=False,
    takes_fit=True,
    targets="signs",
    smooth="smooth_wmw",
)
def leave_pair_out_auc(
    fit: _PairFit,
    weight: Weight = "own",
    per_output: bool = False,
    *,
    average: Average = None,
    tolerance: float | None = None,
) -> Tensor:
    """AUC in which every (positive, negative) pair is ranked by the machine trained without both, ties half.

    The held-out residual of L = {i, j} is P_LL^{-1} a_L, a closed 2 x 2 solve for each pair.

    Args:
        fit: a Fit, with targets and dual (..., n, c) and annihilator() -> P (..., n, n), or
            (..., c, n, n) where every output has its own regularisation.
        tolerance: outputs that differ by less than this, relative to their targets and residuals, are tied;
            equal rows of both classes tie only up to rounding. None for the root of the machine precision.

    Unweighted. Higher is better. Not differentiable. O(n_+ n_-) given P, for each output, in blocks of
    about two million entries. Reference: Pahikkala, Airola, Boberg, Salakoski 2008.
    """
    no_weight("leave_pair_out_auc", weight)
    guard, P, Y, a = _pair_problem("leave_pair_out_auc", fit, per_output, average)
    tolerance = torch.finfo(a.dtype).eps ** 0.5 if tolerance is None else tolerance
    positive, negative = pairs.by_class(Y > 0, a.dtype)
    block = max(1, pairs.PAIRS // a.numel())
    right = a.new_zeros(a.shape[:-1], dtype=torch.float64)  # (..., c)
    rows = positive.row.split(block, -1)
    masks = positive.mask.split(block, -1)
    for i, mask in zip(rows, masks, strict=True):
        gap, size, det = pairs.pair_terms(P, Y, a, i, negative.row)
        is_pair = mask.unsqueeze(-1) * negative.mask.unsqueeze(-2)  # (..., c, p, q)
        regular = (det > 0) | (is_pair == 0)
        guard.require(regular, "fit is singular in a pair of rows; raise reg or use float64")
        tied = gap.abs() <= tolerance * size
        in_order = torch.where(tied, 0.5, (gap > 0).to(a.dtype))
        right += (is_pair * in_order).sum((-2, -1), dtype=torch.float64)
    guard.check()
    count = positive.mask.sum(-1) * negative.mask.sum(-1)
    value = right / count
    has_output_axis = not getattr(fit, "flat", False)
    if not (per_output and has_output_axis):
        value = value.mean(-1)
    return value.to(a.dtype)
