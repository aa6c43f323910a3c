"""The heart: one identity that gives every least-squares machine its held-out residuals.

Note [held-out residual]
A least-squares machine minimises a weighted square loss and a quadratic penalty, so the minimum
is a quadratic form Y^T P Y in the targets, and a = P Y is half its gradient. Let L be any set of
rows. The machine that never saw L stays the same when the targets of L are replaced by its own
outputs f_L there and the rows are put back: they add no loss, so the gradient in them vanishes,

    0 = (P (Y - r))_L,  r zero outside L and Y_L - f_L on it   =>   r_L = P_LL^{-1} a_L.

So held-out residuals need a and the diagonal blocks of P, whichever form supplies them: dual.py
(kernel matrix), primal.py (explicit features) or spectral.py (many regularisations at once).
A row left out alone is a block of size one. diag(P_LL^{-1}) is the held-out predictive variance
in units of the noise (Rasmussen and Williams 2006, 5.4.2), and 1 - ridge_i P_ii the leverage.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchloo.clusters import Partition
from torchloo.dual import Dual, dual, inner_products
from torchloo.guards import Guard, expanded, require_floating
from torchloo.held_out import HeldOut
from torchloo.precision import full_precision
from torchloo.primal.whole import Primal, centred, primal, with_ones
from torchloo.problem import Problem, check_dual, check_features
from torchloo.quick import leave_one_out

__all__ = [
    "FeatureWeights",
    "Fit",
    "assemble",
    "centred",
    "solve_dual",
    "solve_features",
    "solve_primal",
    "with_ones",
]


def assemble(
    Y: Tensor, weight: Tensor, clusters: Tensor | None, parts: tuple[Tensor, Tensor, Tensor], flat: bool
) -> HeldOut:
    """A HeldOut in the dtype of the targets, without the output axis where `flat` is set."""
    r, variance, refitted = parts
    r, variance = r.to(Y.dtype), variance.to(Y.dtype)
    fields = (Y - r, r, expanded(Y, r.shape), expanded(variance, r.shape))
    outputs, residuals, targets, variance = (t.squeeze(-1) if flat else t for t in fields)
    return HeldOut(outputs, residuals, targets, weight, clusters, variance, refitted)


class FeatureWeights(NamedTuple):
    """f(z) = (z - centre) coef + offset for features z; the centre keeps digits far from the origin."""

    coef: Tensor
    """(..., d, c)."""
    centre: Tensor
    """(..., 1, d); zeros without a bias."""
    offset: Tensor
    """(..., c)."""


class _Later:
    """A field of a dataclass that may be given as a function, called when the field is first read."""

    def __init__(self, *default: Any) -> None:
        self.default = default

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = f"_{name}"

    def __set__(self, instance: Any, value: Any) -> None:
        vars(instance)[self.name] = value

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:  # dataclass asks for the default
            if self.default:
                return self.default[0]
            raise AttributeError(self.name)
        value = vars(instance)[self.name]
        if callable(value):
            value = vars(instance)[self.name] = value()
        return value


@dataclass(frozen=True)
class Fit:
    """A solved least-squares machine that still knows its factorisation.

    Every tensor is differentiable in what the machine was given. Shapes are those of the targets:
    (..., n, c), or without the output axis where `flat` is set. `leverage`, `annihilator` and
    `held_out` are computed when asked.
    """

    problem: Problem
    """Targets, weights and regularisation as they came, with equal batch dimensions."""
    form: Dual | Primal = _Later()  # type: ignore[assignment]
    """The factorised problem."""
    columns: Tensor = _Later()  # type: ignore[assignment]
    """Coefficients of the columns of K_new in `from_kernel`, (..., m, c)."""
    offset: Tensor = _Later()  # type: ignore[assignment]
    """(..., c), zeros for a machine without a bias."""
    features: "FeatureWeights | None" = _Later(None)  # type: ignore[assignment]
    """Weights of the explicit features, where the machine has such."""
    kept: Tensor | None = None
    """Boolean (..., m): the basis vectors in use, where a machine may drop dependent ones."""
    flat: bool = False
    """True where the targets came without an output axis."""
    quickly: Callable[[], tuple[Tensor, Tensor, Tensor] | None] = lambda: None
    """What leave-one-out gives where there is a quicker way than `form`."""

    def checked(self) -> "Fit":
        """The same, solved from the inputs as they are now, once the guard has looked at the values."""
        _ = self.form
        self.problem.guard.check()
        _ = self.columns, self.offset, self.features
        return self

    def _shaped(self, values: Tensor) -> Tensor:
        return values[..., 0] if self.flat else values

    @property
    def targets(self) -> Tensor:
        """Y, (..., n, c)."""
        return self.problem.Y

    @property
    def weight(self) -> Tensor:
        """Row weights, (..., n); ones where none were given."""
        return self.problem.weight

    @property
    def dual(self) -> Tensor:
        """a = P Y, (..., n, c)."""
        return self.form.dual.to(self.targets.dtype)

    @property
    def coef(self) -> Tensor:
        """Coefficients of the columns of K_new."""
        return self._shaped(self.columns)

    @property
    def bias(self) -> Tensor:
        """Offset; zeros for a machine without one."""
        return self._shaped(self.offset)

    @property
    def residuals(self) -> Tensor:
        """Training residuals Y - Yhat."""
        return self._shaped(self.problem.ridge.unsqueeze(-1) * self.dual)

    @property
    def outputs(self) -> Tensor:
        """Training outputs Yhat."""
        return self._shaped(self.targets) - self.residuals

    @property
    def leverage(self) -> Tensor:
        """h_i = d Yhat_i / d Y_i, (..., n)."""
        block = self._block(Partition.single(self.targets.shape[-2], self.targets.device))
        return (1 - self.problem.ridge * block[..., 0, 0]).to(self.targets.dtype)

    def annihilator(self) -> Tensor:
        """P, (..., n, n), with a = P Y; n^2 numbers for every problem of the batch."""
        block = self._block(Partition.whole(self.targets.shape[-2], self.targets.device))
        return block[..., 0, :, :].to(self.targets.dtype)

    def _block(self, partition: Partition) -> Tensor:
        """Diagonal blocks of P for sets of one size, (..., g, s, s)."""
        self.problem.given.require_unchanged(self.problem.function)
        _, (block,) = self.form.blocks(partition)
        return block

    def from_kernel(self, K_new: Tensor) -> Tensor:
        """Outputs at new points from their kernel rows (..., m, n): K_new @ coef + bias."""
        if K_new.ndim < 2 or K_new.shape[-1] != self.columns.shape[-2]:
            raise ValueError(
                f"from_kernel: K_new must be kernel rows with {self.columns.shape[-2]} columns, "
                f"got shape {tuple(K_new.shape)}"
            )
        with full_precision(K_new):
            return self._shaped(K_new @ self.columns + self.offset.unsqueeze(-2))

    def held_out(self, clusters: object | None = None, flat: bool | None = None) -> HeldOut:
        """What the machine would have said of every row, had it not seen it or its cluster.

        Note [held-out residual]. Differentiable. In the primal form, sets whose 1 - h is lost to
        rounding are refitted explicitly and marked in `refitted`; this needs their values, so it
        is left out on meta and fake tensors, inside torch.func transforms and under torch.compile.

        Args:
            clusters: integer labels (n,) on the host; None leaves every row out alone.
            flat: whether to leave out the output axis; None: as the targets came.
        """
        Y, function = self.targets, self.problem.function
        self.problem.given.require_unchanged(function)
        partition = Partition.of(function, clusters, Y.shape[-2], Y.device)
        guard = self.problem.guard
        with full_precision(Y):
            parts = self.quickly() if clusters is None else None
            if parts is None:
                parts = self.form.held_out(partition, guard)
        guard.check()
        return assemble(Y, self.weight, partition.labels, parts, self.flat if flat is None else flat)


def solve_dual(
    guard: Guard, K: Tensor, Y: Tensor, reg: Tensor | float, weight: Tensor | None, bias: bool
) -> Fit:
    """Solve a kernel machine from its kernel matrix; Note [dual form]; the guard is to be checked."""
    problem = check_dual(guard, K, Y, reg, weight)
    form = dual(problem.expand(K), problem.ridge, problem.Y, bias, guard)
    return Fit(problem, form, lambda: form.dual, lambda: form.bias)  # type: ignore[arg-type]


def solve_primal(guard: Guard, Z: Tensor, Y: Tensor, R: Tensor, weight: Tensor | None) -> Fit:
    """Solve ridge regression with the penalty p^T R p; Note [primal form]; the guard is to be checked."""
    require_floating(guard.function, Z=Z, R=R)
    p = Z.shape[-1] if Z.ndim else 0
    if R.ndim < 2 or R.shape[-2:] != (p, p):
        raise ValueError(f"{guard.function}: R must be ({p}, {p}) to match Z, got shape {tuple(R.shape)}")
    problem = check_features(guard, Z, Y, torch.ones_like(R[..., 0, 0]), weight)
    guard.symmetric(R=R)
    form = primal(problem.expand(Z), problem.expand(R), problem.weight, problem.Y, problem.reg, guard)
    coef = form.coef.to(Y.dtype)
    return Fit(problem, form, coef, torch.zeros_like(coef[..., 0, :]))


def solve_features(
    guard: Guard, Z: Tensor, Y: Tensor, reg: Tensor | float, weight: Tensor | None, bias: bool
) -> Fit:
    """Solve the machine of the kernel K = Z Z^T from its features, by the cheaper form.

    The primal form where there are fewer features than rows, else the dual one, unless Z Z^T is badly
    conditioned and there are no more features than rows. `columns` are the
    coefficients of the training rows, as for any other kernel; `features` those of the features.
    The guard is to be checked.
    """
    d = Z.shape[-1]
    problem = check_features(guard, Z, Y, reg, weight)

    @functools.cache
    def solved() -> tuple[Dual | Primal, Tensor, Tensor]:
        with full_precision(Z):
            return _factorised(problem, problem.expand(Z), bias)

    def weights() -> FeatureWeights:
        form, shifted, centre = solved()
        if isinstance(form, Primal):
            return FeatureWeights(form.coef[..., :d, :], centre, form.coef[..., d:, :].sum(-2))
        with full_precision(Z):
            return FeatureWeights(shifted.mT @ form.dual, centre, form.bias)

    def at_zero() -> Tensor:
        coef, centre, offset = weights()
        with full_precision(Z):
            return (offset - (centre @ coef)[..., 0, :]).to(Y.dtype)

    return Fit(
        problem,
        form=lambda: solved()[0],  # type: ignore[arg-type]
        columns=lambda: solved()[0].dual.to(Y.dtype),  # type: ignore[arg-type]
        offset=at_zero,  # type: ignore[arg-type]
        features=lambda: FeatureWeights(*(t.to(Y.dtype) for t in weights())),  # type: ignore[arg-type]
        quickly=lambda: leave_one_out(problem, Z, bias),
    )


def _factorised(problem: Problem, Z: Tensor, bias: bool) -> tuple[Dual | Primal, Tensor, Tensor]:
    """The form that `solve_features` takes, features (..., n, d) about their centre, and the centre."""
    n, d = Z.shape[-2:]
    shifted, centre = centred(Z, problem.weight.double() if problem.weighted else None, bias)

    def from_features() -> Primal:
        design, R = with_ones(shifted, problem.reg.double(), bias)
        return primal(design, R, problem.weight, problem.Y, problem.reg, problem.guard)

    if d + bias < n:
        return from_features(), shifted, centre
    # Z Z^T squares the condition of Z, which the primal form can avoid.
    otherwise = from_features if d <= n else None
    ridge, Y = problem.ridge.double(), problem.Y.double()
    return dual(inner_products(shifted), ridge, Y, bias, problem.guard, otherwise), shifted, centre
