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

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from torchloo.clusters import Partition
from torchloo.dual import Dual, dual
from torchloo.guards import Guard, require_floating, values_visible
from torchloo.held_out import HeldOut
from torchloo.precision import full_precision
from torchloo.primal import Primal, primal
from torchloo.problem import Problem, check_dual, check_features

__all__ = ["Fit", "centred", "held_out_residuals", "solve_dual", "solve_features", "solve_primal"]

NOT_DEFINITE = (
    "the regularised matrix is not positive definite to working precision; "
    "take a larger reg, float64, or a positive semi-definite kernel"
)


def held_out_residuals(
    a: Tensor, blocks: list[Tensor], partition: Partition, guard: Guard
) -> tuple[Tensor, Tensor]:
    """P_LL^{-1} a_L and diag(P_LL^{-1}) for every set L of a partition; Note [held-out residual].

    Args:
        a: P Y, (..., n, c).
        blocks: diagonal blocks of P, (..., g, s, s) for each size s of the partition.
        guard: takes note of blocks that are not positive definite.

    Returns:
        held-out residuals (..., n, c) and variances (..., n, 1).
    """
    residuals, variances = [], []
    for a_L, P_LL in zip(partition.gather(a), blocks, strict=True):
        if P_LL.shape[-1] == 1:
            guard.require(P_LL > 0, NOT_DEFINITE)
            residuals.append(a_L / P_LL)
            variances.append(1 / P_LL)
            continue
        L, info = torch.linalg.cholesky_ex(P_LL)
        guard.require(info == 0, NOT_DEFINITE)
        residuals.append(torch.cholesky_solve(a_L, L))
        variances.append(torch.cholesky_inverse(L).diagonal(dim1=-2, dim2=-1).unsqueeze(-1))
    return partition.scatter(residuals), partition.scatter(variances)


def form_held_out(form: Dual | Primal, partition: Partition, guard: Guard) -> tuple[Tensor, Tensor, Tensor]:
    """Held-out residuals (..., n, c), variances (..., n, 1), and the rows (..., n) refitted for them."""
    a, blocks = form.blocks(partition)
    if isinstance(form, Dual) or not values_visible(form.Y):
        r, variance = held_out_residuals(a, blocks, partition, guard)
        return r, variance, torch.zeros_like(r[..., 0], dtype=torch.bool)
    lost = form.cancelled(blocks, partition)  # (..., g) for each size
    # A harmless block in place of a lost one: its quotient is thrown away, and so is its gradient.
    safe = [
        torch.where(flag[..., None, None], torch.diag_embed(torch.ones_like(block[..., 0])), block)
        for flag, block in zip(lost, blocks, strict=True)
    ]
    r, variance = held_out_residuals(a, safe, partition, guard)
    shape, (n, c) = r.shape[:-1], r.shape[-2:]
    r, variance = r.reshape(-1, n, c), variance.reshape(-1, n, 1)
    refitted = torch.zeros_like(r[..., 0], dtype=torch.bool)  # (problems, n)
    for flag, rows in zip(lost, partition.groups, strict=True):
        for problem, cluster in flag.reshape(-1, rows.shape[0]).nonzero().tolist():
            index = (torch.full_like(rows[cluster], problem), rows[cluster])
            r_L, variance_L = form.refit(problem, rows[cluster])
            r, variance = r.index_put(index, r_L), variance.index_put(index, variance_L)
            refitted[index] = True
    return r.reshape(*shape, c), variance.reshape(*shape, 1), refitted.reshape(shape)


def assemble(
    Y: Tensor, weight: Tensor, clusters: Tensor | None, parts: tuple[Tensor, Tensor, Tensor], flat: bool
) -> HeldOut:
    """A HeldOut in the dtype of the targets, without the output axis where `flat` is set."""
    r, variance, refitted = parts
    r, variance = r.to(Y.dtype), variance.to(Y.dtype)
    fields = (Y - r, r, Y.expand_as(r), variance.expand_as(r))
    outputs, residuals, targets, variance = (t[..., 0] if flat else t for t in fields)
    return HeldOut(outputs, residuals, targets, weight, clusters, variance, refitted)


@dataclass(frozen=True)
class Fit:
    """A solved least-squares machine that still knows its factorisation.

    Every tensor is differentiable in what the machine was given. Shapes are those of the targets:
    (..., n, c), or without the output axis where `flat` is set. `leverage`, `annihilator` and
    `held_out` are computed when asked.
    """

    form: Dual | Primal
    """The factorised problem."""
    problem: Problem
    """Targets, weights and regularisation as they came, with equal batch dimensions."""
    columns: Tensor
    """Coefficients of the columns of K_new in `predict`, (..., m, c)."""
    offset: Tensor
    """(..., c), zeros for a machine without a bias."""
    feature_coef: Tensor | None = None
    """Weights of the explicit features, (..., d, c), where the machine has such, else None."""
    kept: Tensor | None = None
    """Boolean (..., m): the basis vectors in use, where a machine may drop dependent ones."""
    flat: bool = False
    """True where the targets came without an output axis."""

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
        _, (block,) = self.form.blocks(Partition.single(self.targets.shape[-2], self.targets.device))
        return (1 - self.problem.ridge * block[..., 0, 0]).to(self.targets.dtype)

    def annihilator(self) -> Tensor:
        """P, (..., n, n), with a = P Y; n^2 numbers for every problem of the batch."""
        _, (block,) = self.form.blocks(Partition.whole(self.targets.shape[-2], self.targets.device))
        return block[..., 0, :, :].to(self.targets.dtype)

    def predict(self, K_new: Tensor) -> Tensor:
        """Outputs at new points from their kernel rows (..., m, n): K_new @ coef + bias."""
        if K_new.ndim < 2 or K_new.shape[-1] != self.columns.shape[-2]:
            raise ValueError(
                f"predict: K_new must have {self.columns.shape[-2]} columns, got shape {tuple(K_new.shape)}"
            )
        with full_precision(K_new):
            return self._shaped(K_new @ self.columns + self.offset.unsqueeze(-2))

    def held_out(self, clusters: object | None = None) -> HeldOut:
        """What the machine would have said of every row, had it not seen it or its cluster.

        Note [held-out residual]. Differentiable. In the primal form, sets whose 1 - h is lost to
        rounding are refitted explicitly and marked in `refitted`; this needs their values, so it
        is left out on meta and fake tensors, inside torch.func transforms and under torch.compile.

        Args:
            clusters: integer labels (n,) on the host; None leaves every row out alone.
        """
        Y, function = self.targets, self.problem.function
        partition = Partition.of(function, clusters, Y.shape[-2], Y.device)
        guard = Guard(function)
        with full_precision(Y):
            parts = form_held_out(self.form, partition, guard)
        guard.check()
        return assemble(Y, self.weight, partition.labels, parts, self.flat)


def solve_dual(
    guard: Guard, K: Tensor, Y: Tensor, reg: Tensor | float, weight: Tensor | None, bias: bool
) -> Fit:
    """Solve a kernel machine from its kernel matrix; Note [dual form]."""
    problem = check_dual(guard, K, Y, reg, weight)
    form = dual(problem.expand(K), problem.ridge, problem.Y, bias)
    problem.guard.require(form.info == 0, NOT_DEFINITE)
    problem.guard.check()
    return Fit(form, problem, form.dual, form.bias)


def solve_primal(guard: Guard, Z: Tensor, Y: Tensor, R: Tensor, weight: Tensor | None) -> Fit:
    """Solve ridge regression on features Z with the penalty p^T R p; Note [primal form]."""
    problem = check_features(guard, Z, Y, 1.0, weight)
    require_floating(guard.function, Z=Z, R=R)
    p = Z.shape[-1]
    if R.ndim < 2 or R.shape[-2:] != (p, p):
        raise ValueError(f"{guard.function}: R must be ({p}, {p}) to match Z, got shape {tuple(R.shape)}")
    problem.guard.symmetric(R=R)
    form = primal(problem.expand(Z), problem.expand(R), problem.weight, problem.Y, problem.reg)
    problem.guard.require(form.info == 0, NOT_DEFINITE)
    problem.guard.check()
    coef = form.coef.to(Y.dtype)
    return Fit(form, problem, coef, torch.zeros_like(coef[..., 0, :]))


def centred(Z: Tensor, weight: Tensor, bias: bool) -> tuple[Tensor, Tensor]:
    """Features (..., n, d) about their weighted mean (..., 1, d), which is held constant.

    An unpenalised bias absorbs any shift of the features, so this changes no output and no
    gradient; it keeps features far from the origin from spoiling the normal equations. Without a
    bias the shift is zero.
    """
    if not bias:
        return Z, torch.zeros_like(Z[..., :1, :])
    zeta = weight.detach().unsqueeze(-1)
    mean = (zeta * Z.detach()).sum(-2, keepdim=True) / zeta.sum(-2, keepdim=True)
    return Z - mean, mean


def with_ones(Z: Tensor, reg: Tensor, bias: bool) -> tuple[Tensor, Tensor]:
    """Features with a column of ones for the bias, and the penalty R = reg diag(1, ..., 1, 0)."""
    if bias:
        Z = torch.cat([Z, torch.ones_like(Z[..., :1])], -1)
    penalised = torch.ones_like(Z[..., 0, :])
    if bias:
        penalised[..., -1] = 0
    return Z, torch.diag_embed(reg.unsqueeze(-1) * penalised)


def solve_features(
    guard: Guard, Z: Tensor, Y: Tensor, reg: Tensor | float, weight: Tensor | None, bias: bool
) -> Fit:
    """Solve the machine of the kernel K = Z Z^T from its features, by the cheaper form.

    The primal form where there are fewer features than rows, else the dual one. `columns` are the
    coefficients of the training rows, as for any other kernel; `feature_coef` those of the features.
    """
    d = Z.shape[-1]
    if d + bias >= Z.shape[-2]:
        with full_precision(Z):
            fit = solve_dual(guard, Z @ Z.mT, Y, reg, weight, bias)
            return replace(fit, feature_coef=Z.mT @ fit.columns)
    problem = check_features(guard, Z, Y, reg, weight)
    with full_precision(Z):
        shifted, mean = centred(problem.expand(Z).double(), problem.weight.double(), bias)
        design, R = with_ones(shifted, problem.reg.double(), bias)
        form = primal(design, R, problem.weight, problem.Y, problem.reg)
        problem.guard.require(form.info == 0, NOT_DEFINITE)
        problem.guard.check()
        coef = form.coef[..., :d, :]
        offset = form.coef[..., d:, :].sum(-2) - (mean @ coef)[..., 0, :]
    dtype = Y.dtype
    return Fit(form, problem, form.dual.to(dtype), offset.to(dtype), feature_coef=coef.to(dtype))
