"""The heart: one identity that gives every least-squares machine its held-out residuals.

Note [held-out residual]
A least-squares machine minimises a weighted square loss and a quadratic penalty, so the minimum
is a quadratic form Y^T P Y in the targets, and a = P Y is half its gradient. Let L be any set of
rows. The machine that never saw L stays the same when the targets of L are replaced by its own
outputs f_L there and the rows are put back: they add no loss, so the gradient in them vanishes,

    0 = (P (Y - r))_L,  r zero outside L and Y_L - f_L on it   =>   r_L = P_LL^{-1} a_L.

So held-out residuals need a and the diagonal blocks of P, whichever form supplies them: dual.py
(kernel matrix), primal/ (explicit features) or spectral/ (many regularisations at once).
A row left out alone is a block of size one. diag(P_LL^{-1}) is the held-out predictive variance
in units of the noise (Rasmussen and Williams 2006, 5.4.2), and 1 - ridge_i P_ii the leverage.
"""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchloo.clusters import Partition, row_sets
from torchloo.dual import Dual, dual
from torchloo.guards import Guard, require_floating
from torchloo.held_out import HeldOut, assemble
from torchloo.leave_out_sets import LeaveOutSets
from torchloo.panels import inner_products
from torchloo.precision import full_precision
from torchloo.primal.front import primal
from torchloo.primal.solved import StreamFit
from torchloo.primal.whole import Primal, centred
from torchloo.problem import Problem, check_dual, check_features
from torchloo.quick import leave_one_out
from torchloo.representation import (
    CentredFeatures,
    Coefficients,
    Features,
    FeatureWeights,
    KernelRows,
    NewPoints,
    Representation,
)

if TYPE_CHECKING:
    from torchloo.spectral.path import Path

__all__ = [
    "Fit",
    "loo_features",
    "solve_dual",
    "solve_features",
    "solve_primal",
]


@dataclass(frozen=True)
class Fit:
    """A solved least-squares machine that still knows its factorisation.

    Every tensor is differentiable in what the machine was given. Shapes are those of the targets:
    (..., n, c), or without the output axis where `flat` is set; those of a path have an axis R in front of
    all others. `leverage`, `annihilator` and `held_out` are computed when asked.
    """

    form: "Dual | Primal | Path"
    """The factorised problem, or several with one regularisation each."""
    problem: Problem
    """Targets, weights and regularisation as they came, with equal batch dimensions."""
    representation: Representation
    """What the form means for the coefficients, and for new points."""
    rows: StreamFit | None = None
    """The same solved by passes over the rows, which leave rows and clusters out."""
    kept: Tensor | None = None
    """Boolean (..., m): the basis vectors in use, where a machine may drop dependent ones."""
    flat: bool = False
    """True where the targets came without an output axis."""
    predictor: NewPoints | None = None
    """Outputs at new inputs, where a machine with a kernel was solved."""
    _found: list[Coefficients] = field(default_factory=list, init=False, repr=False, compare=False)
    """The coefficients, once computed."""

    def __call__(self, X_new: Tensor) -> Tensor:
        """Outputs (..., q) or (..., q, c) at new inputs (..., q, d), what `machine.fit(X, y)(X_new)` gives.

        Differentiable in the new inputs, and in everything the machine was solved from: X, y, weight,
        regularisation, the kernel and its features. Batches are episodes, X (B, n, d) and X_new (B, q, d).
        Cost: a kernel matrix (q, n) and its product with the coefficients.
        """
        return self._predicting()(X_new)

    def predictive(self, X_new: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs at new inputs (..., q, d), and their variances (..., q), differentiable as `__call__` is.

        Note [variance at a new point]; the units are those of `LeastSquares.predictive`.
        Cost n^2 q in the dual form, p^2 q in the primal one.
        """
        mean, rows = self(X_new), self._predicting().rows(X_new)
        return mean, self.variance_at(rows, self._predicting().own(X_new)).to(mean.dtype)

    def variance_at(self, rows: Tensor, own: Tensor | None) -> Tensor:
        """Variances (..., q) at kernel rows, with k(x,x) as `own` (..., q), or at features (..., q, m)."""
        form, own = self._one("predictive"), None if own is None else self._aligned(own, 1)
        with full_precision(rows):
            found = self.representation.variance(form, self._aligned(rows, 2), own)
        return self._placed(found, rows)

    def weights_at(self, X_new: Tensor) -> Tensor:
        """w (..., q, n) with outputs w @ targets at new inputs (..., q, d): what every row adds to them.

        Note [weights at a new point]. At the training rows this is the smoother matrix, whose
        diagonal is the leverage. Differentiable. Cost n^2 q in the dual form, n p q in the primal one.
        """
        form, rows = self._one("weights_at"), self._predicting().rows(X_new)
        with full_precision(rows):
            found = self.representation.weights(form, self._aligned(rows, 2))
        return self._placed(found, rows).to(self.targets.dtype)

    def _one(self, function: str) -> Dual | Primal:
        """The form of one regularisation, whose inputs are as they were."""
        if not isinstance(self.form, Dual | Primal):
            raise TypeError(
                f"{function}: takes a machine of one regularisation, got several; solve it for each of them"
            )
        self.problem.given.require_unchanged(self.problem.function)
        return self.form

    def _predicting(self) -> NewPoints:
        if self.predictor is None:
            raise TypeError(
                f"{self.problem.function}: solved from matrices, a Fit knows no kernel to evaluate at new "
                "inputs; use Fit.from_kernel(K_new) with their kernel rows, or solve of a machine"
            )
        return self.predictor

    def _aligned(self, values: Tensor, axes: int) -> Tensor:
        """Values of new points with the batch dimensions of the form; if it has none, they become points."""
        batch, own = self.targets.shape[:-2], values.shape[-axes:]
        if not batch:
            return values.reshape(-1, *own[1:])
        try:
            return values.expand(*batch, *own)
        except RuntimeError:
            raise ValueError(
                f"{self.problem.function}: X_new must have the batch dimensions {tuple(batch)} of the "
                f"machine, got {tuple(values.shape[:-axes])}"
            ) from None

    def _placed(self, found: Tensor, rows: Tensor) -> Tensor:
        """Undo what `_aligned` did to rows (..., q, m), for what was found at each of them."""
        return found if self.targets.ndim > 2 else found.reshape(*rows.shape[:-1], *found.shape[1:])

    @property
    def _coefficients(self) -> Coefficients:
        if not self._found:  # not a cached_property, which torch.compile does not follow
            self._found.append(self.representation.coefficients(self.form))
        return self._found[0]

    @property
    def columns(self) -> Tensor:
        """Coefficients of the columns of K_new in `from_kernel`, (..., m, c)."""
        return self._coefficients.columns

    @property
    def offset(self) -> Tensor:
        """(..., c), zeros for a machine without a bias."""
        return self._coefficients.offset

    @property
    def features(self) -> FeatureWeights | None:
        """Weights of the explicit features, where the machine has such."""
        return self._coefficients.features

    def predicting(self, predictor: NewPoints, flat: bool) -> "Fit":
        """The same with the coefficients found, for new inputs and targets that may have come as a vector."""
        twin = replace(self, predictor=predictor, flat=flat)
        twin._found.append(self._coefficients)
        return twin

    def checked(self) -> "Fit":
        """The same, solved from the inputs as they are now, once the guard has looked at the values."""
        self.problem.guard.check()
        _ = self._coefficients
        return self

    def shaped(self, values: Tensor) -> Tensor:
        """Values (..., c), or (...) where the targets came without an output axis."""
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
        return self.shaped(self.columns)

    @property
    def bias(self) -> Tensor:
        """Offset; zeros for a machine without one."""
        return self.shaped(self.offset)

    @property
    def residuals(self) -> Tensor:
        """Training residuals Y - Yhat."""
        return self.shaped(self.form.noise.to(self.targets.dtype) * self.dual)

    @property
    def outputs(self) -> Tensor:
        """Training outputs Yhat."""
        return self.shaped(self.targets) - self.residuals

    @property
    def leverage(self) -> Tensor:
        """h_i = d Yhat_i / d Y_i, (..., n), or (..., n, c) where every output has its own regularisation."""
        block = self._block(Partition.single(self.targets.shape[-2], self.targets.device))
        P, noise = block[..., 0, 0], self.form.noise
        h = 1 - noise * P.mT if noise.shape[-1] > 1 else 1 - noise[..., 0] * P
        return h.to(self.targets.dtype)

    def annihilator(self) -> Tensor:
        """P, (..., n, n), with a = P Y; n^2 numbers for every problem of the batch.

        (..., c, n, n) where every output has its own regularisation.
        """
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
            outputs = K_new.to(self.columns.dtype) @ self.columns + self.offset.unsqueeze(-2)
        return self.shaped(outputs.to(self.targets.dtype))

    def held_out(
        self, clusters: object | None = None, flat: bool | None = None, *, sets: Any = None
    ) -> HeldOut:
        """Held-out predictions of every row, by the machine trained without it or without its cluster.

        Note [held-out residual]. Differentiable. In the primal form, sets whose 1 - h is lost to
        rounding are refitted explicitly and marked in `refitted`; this needs their values, so it
        is left out on meta and fake tensors, inside torch.func transforms and under torch.compile.

        Args:
            clusters: integer labels (n,) on the host; None leaves every row out alone.
            flat: whether to leave out the output axis; None: as the targets came.
            sets: pairs (rows to predict, rows to leave out) instead of clusters; see `LeastSquares.lso`.
        """
        Y, weight, function, guard = self.targets, self.weight, self.problem.function, self.problem.guard
        flat = self.flat if flat is None else flat
        self.problem.given.require_unchanged(function)
        if self.rows is not None and sets is None:
            return self.rows.leave_out(clusters, flat=flat)
        if sets is None:
            partition = Partition.of(function, clusters, Y.shape[-2], Y.device)
            labels = partition.labels
            with full_precision(Y):
                parts = self.form.held_out(partition, guard)
        elif clusters is not None:
            raise TypeError(f"{function}: give clusters or sets, not both")
        else:
            left_out = LeaveOutSets(function, sets, Y.shape[-2], Y.device)
            labels = left_out.labels
            with full_precision(Y):
                parts = self.form.left_out(left_out, guard)
            Y, weight = Y.index_select(-2, left_out.rows), weight.index_select(-1, left_out.rows)
        guard.check()
        return assemble(Y, weight, labels, parts, flat)

    def held_out_coef(self, rows: object) -> tuple[Tensor, Tensor]:
        """Coefficients and bias of the machine that was not given some rows.

        By Note [held-out residual] it is the machine of the same rows whose targets in L are its own
        held-out outputs there, Y_L - r_L: so one more solution with the factorisation at hand,
        a - P_{:L} r_L in the dual form (zero on L, to rounding), gives its coefficients.

        Args:
            rows: one row, or integers (s,), the rows left out together; or (g, s), g disjoint sets of them.

        Returns:
            `coef` and `bias` of the machine without them, for sets (g, s) with an axis of g before those
            of each. Basis vectors, and the columns of KFD, stay.

        Differentiable. Cost n^2 g (s + c) in the dual form, that of `held_out` in the primal one; memory
        n g (s + c) numbers.
        """
        n, function = self.targets.shape[-2], "held_out_coef"
        one = self._one(function)
        sets, several = row_sets(function, rows, n)
        sets, guard = sets.to(self.targets.device), self.problem.guard
        Y = one.Y.unsqueeze(-3)  # (..., 1, n, c)
        with full_precision(Y):
            r = one.leave_out(sets, guard)  # (..., g, s, c)
            place = sets.unsqueeze(-1).expand(r.shape)
            replaced = Y - r.new_zeros((*r.shape[:-2], *Y.shape[-2:])).scatter(-2, place, r)
            outputs = (len(sets), Y.shape[-1])
            form = one.with_targets(replaced.movedim(-3, -2).flatten(-2))
            found = self.representation.coefficients(form)
        guard.check()
        coef = found.columns.unflatten(-1, outputs).movedim(-2, -3)  # (..., g, m, c)
        bias = found.offset.unflatten(-1, outputs)  # (..., g, c)
        if not several:
            coef, bias = coef.squeeze(-3), bias.squeeze(-2)
        return self.shaped(coef), self.shaped(bias)


def solve_dual(
    guard: Guard, K: Tensor, Y: Tensor, reg: Tensor | float, weight: Tensor | None, bias: bool
) -> Fit:
    """Solve a kernel machine from its kernel matrix; Note [dual form]; the guard is to be checked."""
    problem = check_dual(guard, K, Y, reg, weight)
    form = dual(problem.expand(K), problem.ridge.to(K.dtype), problem.Y.to(K.dtype), bias, guard)
    return Fit(form, problem, KernelRows(K.dtype))


def solve_primal(guard: Guard, Z: Tensor, Y: Tensor, R: Tensor, weight: Tensor | None) -> Fit:
    """Solve ridge regression with the penalty p^T R p; Note [primal form]; the guard is to be checked."""
    require_floating(guard.function, Z=Z, R=R)
    p = Z.shape[-1] if Z.ndim else 0
    if R.ndim < 2 or R.shape[-2:] != (p, p):
        raise ValueError(f"{guard.function}: R must be ({p}, {p}) to match Z, got shape {tuple(R.shape)}")
    problem = check_features(guard, Z, Y, torch.ones_like(R[..., 0, 0]), weight)
    guard.symmetric(R=R)
    given = (problem.expand(Z), problem.weight, problem.Y, problem.reg)
    form, _ = primal(guard, *given, bias=False, penalty=problem.expand(R))
    return Fit(form, problem, Features(Y.dtype))


def loo_features(
    guard: Guard,
    Z: Tensor,
    Y: Tensor,
    reg: Tensor,
    weight: Tensor | None,
    bias: bool,
    flat: bool,
) -> HeldOut:
    """Leave-one-out of the machine that `solve_features` solves; few rows by Note [quick form]."""
    problem = check_features(guard, Z, Y, reg, weight)
    with full_precision(Z):
        parts = leave_one_out(problem, Z, bias)
    if parts is None:
        return solve_features(problem, Z, bias).held_out(None, flat)
    return assemble(problem.Y, problem.weight, None, parts, flat)


def solve_features(problem: Problem, Z: Tensor, bias: bool) -> Fit:
    """Solve the machine of the kernel K = Z Z^T from its features, by the cheaper form.

    The primal form where there are fewer features than rows, else the dual one. Where Z Z^T is badly
    conditioned, no more features than rows take the primal form too, and more a factor from Z itself.
    `columns` are the coefficients of the training rows, as for any other kernel; `features` those of the
    features.
    The guard is to be checked.
    """
    n, d = Z.shape[-2:]
    guard = problem.guard
    with full_precision(Z):
        zeta = problem.weight.double() if problem.weighted else None
        shifted, centre = centred(problem.expand(Z), zeta, bias)
        representation = CentredFeatures(shifted, centre, Z.dtype)

        def from_features() -> tuple[Primal, StreamFit | None]:
            return primal(guard, shifted, problem.weight, problem.Y, problem.reg, bias)

        if d + bias < n:
            form, rows = from_features()
            return Fit(form, problem, representation, rows=rows)
        # Z Z^T squares the condition of Z, which the primal form and a factor from Z itself avoid.
        otherwise = (lambda: from_features()[0]) if d <= n else None
        ridge, Y64 = problem.ridge.double(), problem.Y.double()
        other = dual(inner_products(shifted), ridge, Y64, bias, guard, otherwise, shifted.detach())
    return Fit(other, problem, representation)
