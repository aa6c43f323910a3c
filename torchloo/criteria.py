"""Criteria: numbers from a HeldOut, losses to descend and scores to report.

Every criterion is called alike, ``criterion(held_out, weight="own", per_output=False)``:

* ``held_out``: outputs f, targets, residuals r = targets - f, (..., n) or (..., n, c).
* ``weight``: "own" takes the training weights of the HeldOut, None counts every row once, and a tensor
  (n,) or (..., n), not negative, weighs the rows by itself. A criterion that is said to be unweighted
  takes no tensor.
* ``per_output``: False averages over the c outputs and returns the batch shape; True returns
  batch + (c,). Without an output axis both return the batch shape.

Classification criteria see t = sign(targets), so that coded targets fit too; an output f = 0 predicts +1.

Code asks ``criterion.lower_is_better`` and ``criterion.differentiable``. Those that are not
differentiable return values without a graph. Options of a criterion (gamma, noise, clusters) are
keyword arguments; ``functools.partial`` fixes them. Memory is O(n) a batch entry and output, but for
the blocks of `smooth_wmw` and `leave_pair_out_auc`.
"""

import math
from collections.abc import Callable
from typing import Literal, ParamSpec, Protocol, cast

import torch
from torch import Tensor

from torchloo import ranking
from torchloo.guards import Guard, host_labels, require_floating
from torchloo.held_out import HeldOut
from torchloo.ranking import by_class, fraction_above, logistic_sum, pair_terms, tau_b

__all__ = [
    "Criterion",
    "auc",
    "balanced_error_rate",
    "balanced_weight",
    "error_rate",
    "hinge",
    "kendall_tau",
    "leave_pair_out_auc",
    "log_density",
    "mse",
    "press",
    "smooth_error",
    "smooth_wmw",
    "squared_hinge",
    "wmw",
]

Weight = Tensor | Literal["own"] | None
P = ParamSpec("P")


class Criterion(Protocol[P]):
    """A function of a HeldOut that knows its own direction."""

    lower_is_better: bool
    differentiable: bool
    takes_fit: bool
    """True where the argument is a Fit instead of a HeldOut."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Tensor:
        """The criterion, one number for each entry of the batch."""
        ...


def _criterion(
    *, lower_is_better: bool, differentiable: bool, takes_fit: bool = False
) -> Callable[[Callable[P, Tensor]], Criterion[P]]:
    """Put direction and differentiability on a function; without gradient it keeps no graph."""

    def mark(function: Callable[P, Tensor]) -> Criterion[P]:
        criterion = cast("Criterion[P]", function if differentiable else torch.no_grad()(function))
        criterion.lower_is_better = lower_is_better
        criterion.differentiable = differentiable
        criterion.takes_fit = takes_fit
        return criterion

    return mark


def _require_classes(guard: Guard, name: str, y: Tensor, both: bool = True) -> None:
    """Demand that every label of y (..., n) has a sign, and that both signs are there."""
    guard.require(y != 0, f"{name} must be positive or negative labels, got 0")
    if both:
        positive = y > 0
        held = positive.any(-1) & (y < 0).any(-1)
        guard.require(held, f"{name} must hold both classes, positive and negative, got one class only")


class _Rows:
    """A HeldOut checked and turned so that rows come last: (..., c, n), c = 1 without output axis.

    labels: targets must have a sign; both: and both signs; steps: NaN would go unseen, so look for it;
    signs: the signs of the outputs are enough, where a HeldOut has no more (its `values` is False).
    """

    def __init__(
        self,
        function: str,
        held_out: HeldOut,
        weight: Weight,
        labels: bool = False,
        both: bool = False,
        steps: bool = False,
        signs: bool = False,
    ) -> None:
        if not all(hasattr(held_out, name) for name in HeldOut._fields):
            raise TypeError(f"{function}: held_out must be a HeldOut, got {type(held_out).__name__}")
        if not signs and not getattr(held_out, "values", True):
            raise ValueError(
                f"{function}: held_out must hold decision values, got only their signs; use values=True"
            )
        f, y, own = held_out.outputs, held_out.targets, held_out.weight
        require_floating(function, outputs=f, targets=y, weight=own)
        self.output_axis = f.ndim == own.ndim + 1
        if own.ndim == 0 or f.numel() == 0 or own.shape != (f.shape[:-1] if self.output_axis else f.shape):
            raise ValueError(
                f"{function}: outputs must be (..., n) or (..., n, c) for weight (..., n) and not empty, "
                f"got outputs {tuple(f.shape)} and weight {tuple(own.shape)}"
            )
        self.function, self.guard, self.shape = function, Guard(function), f.shape
        self.outputs, self.targets = self.turn("outputs", f), self.turn("targets", y)
        self.weight = self._weight(weight, own).unsqueeze(-2)  # (..., 1, n)
        if labels or both:
            _require_classes(self.guard, "targets", self.targets, both)
        if steps:
            self.guard.finite(outputs=f, targets=y)
        self.guard.check()

    def turn(self, name: str, tensor: Tensor) -> Tensor:
        """(..., n) or (..., n, c) -> (..., c, n)."""
        if not isinstance(tensor, Tensor) or tensor.shape != self.shape:
            got = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ValueError(
                f"{self.function}: {name} must have the outputs' shape {tuple(self.shape)}, got {got}"
            )
        return tensor.mT if self.output_axis else tensor.unsqueeze(-2)

    def _weight(self, weight: Weight, own: Tensor) -> Tensor:
        """The row weights asked for, in the shape of the HeldOut's own."""
        if weight is None:
            return torch.ones_like(own)
        if isinstance(weight, str):
            if weight != "own":
                raise ValueError(f"{self.function}: weight must be 'own', None or a tensor, got {weight!r}")
            return own
        require_floating(self.function, outputs=self.outputs, weight=weight)
        if weight.ndim == 0 or own.shape[-weight.ndim :] != weight.shape:
            expected = f"({own.shape[-1]},) or {tuple(own.shape)}"
            raise ValueError(f"{self.function}: weight must be {expected}, got shape {tuple(weight.shape)}")
        self.guard.require((weight >= 0) & (weight < torch.inf), "weight must be finite and not negative")
        self.guard.require(weight.sum(-1) > 0, "weight must be positive in one row at least")
        return weight.expand(own.shape)

    @property
    def positive(self) -> Tensor:
        """Rows of the positive class, boolean (..., c, n)."""
        return self.targets > 0

    @property
    def margin(self) -> Tensor:
        """t f, (..., c, n)."""
        return self.targets.sign() * self.outputs

    @property
    def wrong(self) -> Tensor:
        """Rows whose class is predicted wrongly, in the dtype of the outputs, (..., c, n)."""
        return ((self.outputs >= 0) != self.positive).to(self.outputs.dtype)

    def total(self, losses: Tensor) -> Tensor:
        """Weighted sum over the rows: (..., c, n) -> (..., c)."""
        return (self.weight * losses).sum(-1)

    def mean(self, losses: Tensor) -> Tensor:
        """Weighted mean over the rows: (..., c, n) -> (..., c)."""
        return self.total(losses) / self.weight.sum(-1)

    def over_outputs(self, value: Tensor, per_output: bool) -> Tensor:
        """(..., c) -> the shape that the caller wants."""
        if not self.output_axis:
            return value[..., 0]
        return value if per_output else value.mean(-1)


def _no_weight(function: str, weight: Weight) -> None:
    """An unweighted criterion refuses a weight rather than leave it out."""
    if weight is not None and not (isinstance(weight, str) and weight == "own"):
        got = weight if isinstance(weight, str) else type(weight).__name__
        raise ValueError(f"{function}: weight must be left out, the criterion is unweighted; got {got}")


@_criterion(lower_is_better=True, differentiable=True)
def press(held_out: HeldOut, weight: Weight = "own", per_output: bool = False) -> Tensor:
    """Predicted residual sum of squares: sum_i w_i r_i^2.

    Lower is better. Differentiable. Reference: Allen 1974; Cawley 2006, II-G.

    >>> f, y, one = torch.tensor([0.5, -2.0]), torch.tensor([1.0, -1.0]), torch.ones(2)
    >>> press(HeldOut(f, y - f, y, one, None, one, one > 1))
    tensor(1.2500)
    """
    rows = _Rows("press", held_out, weight)
    return rows.over_outputs(rows.total(rows.turn("residuals", held_out.residuals).square()), per_output)


@_criterion(lower_is_better=True, differentiable=True)
def mse(held_out: HeldOut, weight: Weight = "own", per_output: bool = False) -> Tensor:
    """Mean squared held-out residual: sum_i w_i r_i^2 / sum_i w_i.

    Lower is better. Differentiable.
    """
    rows = _Rows("mse", held_out, weight)
    return rows.over_outputs(rows.mean(rows.turn("residuals", held_out.residuals).square()), per_output)


@_criterion(lower_is_better=True, differentiable=False)
def error_rate(held_out: HeldOut, weight: Weight = "own", per_output: bool = False) -> Tensor:
    """Rate of held-out errors: sum_i w_i [f_i on the wrong side] / sum_i w_i.

    Lower is better. Not differentiable.
    """
    rows = _Rows("error_rate", held_out, weight, labels=True, steps=True, signs=True)
    return rows.over_outputs(rows.mean(rows.wrong), per_output)


@_criterion(lower_is_better=True, differentiable=False)
def balanced_error_rate(held_out: HeldOut, weight: Weight = "own", per_output: bool = False) -> Tensor:
    """Mean of the error rates of the two classes: `error_rate` under the weights of `balanced_weight`.

    Unweighted otherwise, whatever the training weights. Lower is better. Not differentiable.
    """
    _no_weight("balanced_error_rate", weight)
    rows = _Rows("balanced_error_rate", held_out, None, both=True, steps=True, signs=True)
    of_class = [rows.positive, rows.targets < 0]
    rates = [(rows.wrong * member).sum(-1) / member.sum(-1) for member in of_class]
    return rows.over_outputs((rates[0] + rates[1]) / 2, per_output)


@_criterion(lower_is_better=True, differentiable=True)
def smooth_error(
    held_out: HeldOut, weight: Weight = "own", per_output: bool = False, *, gamma: float = 10.0
) -> Tensor:
    """`error_rate` with a logistic step: sum_i w_i / (1 + exp(gamma t_i f_i)) / sum_i w_i.

    Args beyond the usual: gamma > 0, the steepness; as gamma grows this tends to the error rate and its
    gradient to zero almost everywhere. Lower is better. Differentiable.
    Reference: Bo, Wang, Jiao 2005; Cawley 2006, eq. 20.
    """
    Guard("smooth_error").positive(gamma=gamma)
    rows = _Rows("smooth_error", held_out, weight, labels=True)
    return rows.over_outputs(rows.mean(torch.sigmoid(-gamma * rows.margin)), per_output)


@_criterion(lower_is_better=True, differentiable=True)
def hinge(held_out: HeldOut, weight: Weight = "own", per_output: bool = False) -> Tensor:
    """Held-out hinge loss: sum_i w_i max(0, 1 - t_i f_i).

    Lower is better. Differentiable but at the kink.
    """
    rows = _Rows("hinge", held_out, weight, labels=True)
    return rows.over_outputs(rows.total((1 - rows.margin).clamp(min=0)), per_output)


@_criterion(lower_is_better=True, differentiable=True)
def squared_hinge(held_out: HeldOut, weight: Weight = "own", per_output: bool = False) -> Tensor:
    """Held-out squared hinge loss: sum_i w_i max(0, 1 - t_i f_i)^2.

    Lower is better. Differentiable.
    """
    rows = _Rows("squared_hinge", held_out, weight, labels=True)
    return rows.over_outputs(rows.total((1 - rows.margin).clamp(min=0).square()), per_output)


class _PairFit(Protocol):
    """What `leave_pair_out_auc` asks of a Fit."""

    @property
    def targets(self) -> Tensor: ...

    @property
    def dual(self) -> Tensor: ...

    def annihilator(self) -> Tensor: ...


@_criterion(lower_is_better=False, differentiable=False)
def auc(held_out: HeldOut, weight: Weight = "own", per_output: bool = False) -> Tensor:
    """Area under the ROC curve: the fraction of (positive, negative) pairs with f_+ > f_-, ties half.

    Unweighted. Higher is better. Not differentiable. By sorting, O(n log n), in exact integers.
    """
    _no_weight("auc", weight)
    rows = _Rows("auc", held_out, None, both=True, steps=True)
    return rows.over_outputs(fraction_above(rows.outputs, rows.positive), per_output)


@_criterion(lower_is_better=True, differentiable=False)
def wmw(held_out: HeldOut, weight: Weight = "own", per_output: bool = False) -> Tensor:
    """Modified Wilcoxon-Mann-Whitney statistic: the fraction of pairs ranked wrongly, 1 - `auc`.

    Unweighted. Lower is better. Not differentiable. O(n log n).
    """
    _no_weight("wmw", weight)
    rows = _Rows("wmw", held_out, None, both=True, steps=True)
    return rows.over_outputs(fraction_above(-rows.outputs, rows.positive), per_output)


@_criterion(lower_is_better=True, differentiable=True)
def smooth_wmw(
    held_out: HeldOut, weight: Weight = "own", per_output: bool = False, *, gamma: float = 10.0
) -> Tensor:
    """`wmw` with a logistic step: mean over pairs of 1 / (1 + exp(gamma (f_+ - f_-))).

    Args beyond the usual: gamma > 0, the steepness. Unweighted. Lower is better. Differentiable, any
    number of times. O(n_+ n_-) time; forward and backward look at blocks of about two million pairs,
    so memory is O(n) and a few such blocks.
    """
    _no_weight("smooth_wmw", weight)
    Guard("smooth_wmw").positive(gamma=gamma)
    rows = _Rows("smooth_wmw", held_out, None, both=True)
    positive, negative = by_class(rows.positive, rows.outputs.dtype)
    f = gamma * rows.outputs.gather(-1, positive.row)  # (..., c, p)
    g = gamma * rows.outputs.gather(-1, negative.row)  # (..., c, q)
    wrong = (positive.mask * logistic_sum(f, g, negative.mask)).sum(-1)
    return rows.over_outputs(wrong / (positive.mask.sum(-1) * negative.mask.sum(-1)), per_output)


@_criterion(lower_is_better=False, differentiable=False)
def kendall_tau(
    held_out: HeldOut,
    weight: Weight = "own",
    per_output: bool = False,
    *,
    clusters: object = "own",
) -> Tensor:
    """Kendall's tau_b between targets and held-out outputs within each cluster, averaged over clusters.

    Args beyond the usual: clusters, integer labels (n,); "own" takes those of the HeldOut; None, like a
    HeldOut of leave-one-out, makes all rows one group. A cluster whose targets are all tied, a single
    row for one, has no tau_b and is left out of the average; where none is left there is an error. A
    cluster whose outputs alone are all tied counts 0. Unweighted. Higher is better. Not differentiable.
    O(n log^2 n) time, all clusters and the whole batch together. See Note [Kendall's tau by integers].
    Reference: Kendall 1970; Knight 1966; Pahikkala, Boberg, Salakoski 2006, section 4.
    """
    _no_weight("kendall_tau", weight)
    rows = _Rows("kendall_tau", held_out, None, steps=True)
    n, device = rows.outputs.shape[-1], rows.outputs.device
    labels = held_out.clusters if isinstance(clusters, str) and clusters == "own" else clusters
    if labels is None:
        cluster, sizes = torch.zeros(n, dtype=torch.int64), torch.tensor([n])
    else:
        labels = torch.from_numpy(host_labels("kendall_tau", labels, n))
        cluster, sizes = torch.unique(labels, return_inverse=True, return_counts=True)[1:]
    tau, defined = tau_b(rows.targets, rows.outputs, cluster.to(device), sizes.to(device))  # (..., c, k)
    count = defined.sum(-1)
    rows.guard.require(count > 0, "targets must differ within one cluster at least, all are tied")
    rows.guard.check()
    return rows.over_outputs((tau.sum(-1) / count).to(rows.outputs.dtype), per_output)


@_criterion(lower_is_better=False, differentiable=True)
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

    Args beyond the usual: noise, the variance s^2 > 0, a number or a tensor that broadcasts with
    batch + (c,), or with the batch where there is no output axis. None takes the s^2 that maximises
    the result, the mean of r^2 / v under the same weights, one for each output. Rasmussen and Williams
    sum over rows and have every scale in the kernel: n times this with noise=1. Under clusters v is
    the marginal variance of a row given all other clusters.
    Higher is better. Differentiable. Reference: Rasmussen, Williams 2006, eq. 5.10 to 5.12.
    """
    rows = _Rows("log_density", held_out, weight)
    v = rows.turn("variance", held_out.variance)
    rows.guard.require(~v.isnan().any(), "variance must be known, but this machine has none")
    ratio = rows.mean(rows.turn("residuals", held_out.residuals).square() / v)  # (..., c)
    if noise is None:
        s2 = ratio
        rows.guard.require(s2 > 0, "residuals must not all be zero, the density has no bound; give noise")
    else:
        rows.guard.positive(noise=noise)
        s2 = torch.as_tensor(noise, dtype=v.dtype, device=v.device)
        s2 = s2 if rows.output_axis else s2.unsqueeze(-1)
    rows.guard.check()
    value = -0.5 * (math.log(2 * math.pi) + s2.log() + rows.mean(v.log()) + ratio / s2)
    return rows.over_outputs(value, per_output)


@_criterion(lower_is_better=False, differentiable=False, takes_fit=True)
def leave_pair_out_auc(
    fit: _PairFit, weight: Weight = "own", per_output: bool = False, *, tolerance: float | None = None
) -> Tensor:
    """AUC in which every (positive, negative) pair is ranked by the machine that saw neither, ties half.

    The held-out residual of L = {i, j} is P_LL^{-1} a_L, a closed 2 x 2 solve for each pair.

    Args:
        fit: a Fit, with targets and dual (..., n, c) and annihilator() -> P (..., n, n).
        tolerance: outputs nearer than this, relative to their targets and residuals, are tied; twin rows
            of both classes tie only up to rounding. None: the square root of the machine precision.

    Unweighted. Higher is better. Not differentiable. O(n_+ n_-) given P, for each output, in blocks of
    about two million entries. Reference: Pahikkala, Airola, Boberg, Salakoski 2008.
    """
    name = "leave_pair_out_auc"
    _no_weight(name, weight)
    if not hasattr(fit, "annihilator"):
        raise TypeError(f"{name}: fit must be a Fit, as solve(X, y) gives it, got {type(fit).__name__}")
    P, a = fit.annihilator(), fit.dual.mT  # (..., n, n), (..., c, n)
    require_floating(name, dual=a, targets=fit.targets, annihilator=P)
    n = a.shape[-1]
    if n < 3 or P.shape[-2:] != (n, n):
        raise ValueError(f"{name}: fit must have P (n, n) and n > 2 rows, got {tuple(P.shape)} and n = {n}")
    Y = fit.targets.mT.expand(a.shape)
    guard = Guard(name)
    _require_classes(guard, "targets", Y)
    guard.finite(dual=a, annihilator=P)
    guard.check()
    P = P.unsqueeze(-3).expand(*a.shape, n)  # (..., c, n, n), no copy
    tolerance = torch.finfo(a.dtype).eps ** 0.5 if tolerance is None else tolerance
    positive, negative = by_class(Y > 0, a.dtype)
    block = max(1, ranking.PAIRS // a.numel())
    right = a.new_zeros(a.shape[:-1], dtype=torch.float64)  # (..., c)
    for i, mask in zip(positive.row.split(block, -1), positive.mask.split(block, -1), strict=True):
        gap, size, det = pair_terms(P, Y, a, i, negative.row)
        pair = mask.unsqueeze(-1) * negative.mask.unsqueeze(-2)  # (..., c, p, q)
        guard.require((det > 0) | (pair == 0), "fit is singular in a pair of rows; raise reg or use float64")
        tied = gap.abs() <= tolerance * size
        right += (pair * torch.where(tied, 0.5, (gap > 0).to(a.dtype))).sum((-2, -1), dtype=torch.float64)
    guard.check()
    value = right / (positive.mask.sum(-1) * negative.mask.sum(-1))
    whole = per_output and not getattr(fit, "flat", False)  # flat: the targets came without output axis
    return (value if whole else value.mean(-1)).to(a.dtype)


def balanced_weight(y: Tensor) -> Tensor:
    """Weights n / (2 n_class) that give both classes the same sum, n / 2; ones where they are balanced.

    Args: y, labels (..., n), the class is the sign. Returns: shape and dtype of y.
    Reference: Cawley 2006, eq. 18.

    >>> balanced_weight(torch.tensor([1.0, -1.0, -1.0, -1.0]))
    tensor([2.0000, 0.6667, 0.6667, 0.6667])
    """
    require_floating("balanced_weight", y=y)
    if y.ndim == 0 or y.shape[-1] == 0:
        raise ValueError(f"balanced_weight: y must be (..., n) with n > 0, got shape {tuple(y.shape)}")
    guard, positive = Guard("balanced_weight"), y > 0
    guard.finite(y=y)
    _require_classes(guard, "y", y)
    guard.check()
    count = positive.sum(-1, keepdim=True)  # (..., 1)
    return y.shape[-1] / (2 * torch.where(positive, count, y.shape[-1] - count).to(y.dtype))
