"""Coefficients, predictions at new points and their variances, from the factorised form of a machine.

Note [variance at a new point]
Read as a Gaussian process, whose bias has a flat prior, a machine has at a new point x the variance

    k(x,x) - k^T M^{-1} k + (1 - 1^T M^{-1} k)^2 / (1^T M^{-1} 1)        (no last term without a bias),

in the units of 1 / P_ii, where the noise of a row is reg / weight: for the machine without row i, the
variance at x_i and the noise of row i add up to 1 / P_ii. In the differences to the pivot p of Note [dual
form], with c_i = (k_i - k_p) - (K_ip - K_pp) + ridge_p and c_p = 0, it is
k(x,x) - 2 k_p + K_pp + ridge_p - c^T P c. In the primal form it is reg z^T C^{-1} z.

Note [weights at a new point]
Outputs are linear in the targets, f(x) = w(x)^T Y, with w = P k without a bias, P c + e_p with one, and
Omega Z C^{-1} z in the primal form. By Note [held-out residual] the machine without L has the targets
Y - r, so its output at x is f(x) - w_L(x)^T r_L: one product gives the outputs of all held-out machines.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from torchloo.dual import Dual
from torchloo.guards import Guard
from torchloo.precision import full_precision
from torchloo.primal.front import primal
from torchloo.primal.whole import Primal

__all__ = [
    "CentredFeatures",
    "Coefficients",
    "FeatureWeights",
    "Features",
    "FeaturesOfKernelRows",
    "KernelRows",
    "NewPoints",
    "Representation",
]


class FeatureWeights(NamedTuple):
    """f(z) = (z - centre) coef + offset for features z; the centre keeps digits far from the origin."""

    coef: Tensor
    """(..., d, c)."""
    centre: Tensor
    """(..., 1, d); zeros without a bias."""
    offset: Tensor
    """(..., c)."""


class Coefficients(NamedTuple):
    """Coefficients that multiply kernel rows or features, in the dtype of the targets."""

    columns: Tensor
    """Coefficients of the columns of K_new in `Fit.from_kernel`, (..., m, c)."""
    offset: Tensor
    """(..., c), zeros for a machine without a bias."""
    features: FeatureWeights | None = None
    """Weights of the explicit features; None if the machine has none."""


class Representation(Protocol):
    """How a machine predicts at new points, given the factorised form that it was solved by.

    `rows` (..., q, m) describe the new points and multiply the coefficients of the machine: kernel rows, or
    centred features.
    """

    def coefficients(self, form: Any) -> Coefficients:
        """The coefficients of the machine."""

    def weights(self, form: Any, rows: Tensor) -> Tensor:
        """w(x) of Note [weights at a new point], (..., q, n)."""

    def variance(self, form: Any, rows: Tensor, own: Tensor | None) -> Tensor:
        """Note [variance at a new point], (..., q); kernel rows need own = k(x,x), (..., q)."""


class NewPoints(Protocol):
    """Outputs of a solved machine at new inputs X (..., q, d), and the rows that they are computed from."""

    def __call__(self, X: Tensor) -> Tensor:
        """Outputs (..., q) or (..., q, c)."""

    def rows(self, X: Tensor) -> Tensor:
        """The rows of `Representation`, (..., q, m)."""

    def own(self, X: Tensor) -> Tensor | None:
        """k(x, x), (..., q), for kernel rows."""


@dataclass(frozen=True)
class KernelRows:
    """A machine of kernel rows: its coefficients are those of its form."""

    dtype: torch.dtype

    def coefficients(self, form: Any) -> Coefficients:
        """Of the training rows."""
        return Coefficients(form.dual.to(self.dtype), form.bias.to(self.dtype))

    def weights(self, form: Dual, rows: Tensor) -> Tensor:
        """See `Representation`."""
        return form.weights_at(rows)

    def variance(self, form: Dual, rows: Tensor, own: Tensor | None) -> Tensor:
        """See `Representation`."""
        assert own is not None
        return form.variance_at(rows, own)


@dataclass(frozen=True)
class Features:
    """Ridge regression with any penalty: the rows are features, not centred."""

    dtype: torch.dtype

    def coefficients(self, form: Primal) -> Coefficients:
        """Of the features."""
        coef = form.coef.to(self.dtype)
        return Coefficients(coef, torch.zeros_like(coef[..., 0, :]))

    def weights(self, form: Primal, rows: Tensor) -> Tensor:
        """See `Representation`."""
        return form.weights_at(rows.double())

    def variance(self, form: Primal, rows: Tensor, own: Tensor | None) -> Tensor:
        """See `Representation`."""
        return form.variance_at(rows.double())


@dataclass(frozen=True)
class CentredFeatures:
    """A machine of features (..., n, d) minus their centre (..., 1, d), `shifted`, solved by either form."""

    shifted: Tensor
    centre: Tensor
    dtype: torch.dtype

    def coefficients(self, form: Any) -> Coefficients:
        """Of the training rows, and of the features."""
        with full_precision(self.shifted):
            coef, offset = self._weighed(form)
            at_zero = offset - (self.centre @ coef)[..., 0, :]
        weights = FeatureWeights(*(t.to(self.dtype) for t in (coef, self.centre, offset)))
        return Coefficients(form.dual.to(self.dtype), at_zero.to(self.dtype), weights)

    def _weighed(self, form: Any) -> tuple[Tensor, Tensor]:
        """Coefficients (..., d, c) of the centred features, and the offset (..., c)."""
        if isinstance(form, Primal):
            return form.coef, form.offset
        return self.shifted.mT @ form.dual, form.bias

    def weights(self, form: Dual | Primal, rows: Tensor) -> Tensor:
        """See `Representation`."""
        z = rows.double()
        return form.weights_at(z if isinstance(form, Primal) else z @ self.shifted.mT)

    def variance(self, form: Dual | Primal, rows: Tensor, own: Tensor | None) -> Tensor:
        """See `Representation`."""
        z = rows.double()
        if isinstance(form, Primal):
            return form.variance_at(z)
        return form.variance_at(z @ self.shifted.mT, z.square().sum(-1))

    def spread(self, form: Dual | Primal) -> Tensor:
        """S (..., p, d + 1) with the variance |S (z, 1)|^2 at centred features z."""
        if isinstance(form, Dual):
            unit, weight = torch.ones_like(form.ridge[..., 0]), form.ridge.reciprocal()
            given = (self.shifted, weight, form.dual[..., :1], unit)
            form, _ = primal(Guard("spread"), *given, bias=form.pivot is not None)
        with full_precision(self.shifted):
            return form.spread()


@dataclass(frozen=True)
class FeaturesOfKernelRows:
    """Kernel rows are, or give, the features of the machine, whose coefficients are those of the rows."""

    features: CentredFeatures

    def coefficients(self, form: Any) -> Coefficients:
        """Of the columns of the kernel matrix."""
        _, offset, features = self.features.coefficients(form)
        assert features is not None
        return Coefficients(self._of_rows(features.coef), offset)

    def weights(self, form: Any, rows: Tensor) -> Tensor:
        """See `Representation`."""
        return self.features.weights(form, self._from_rows(rows) - self.features.centre)

    def variance(self, form: Any, rows: Tensor, own: Tensor | None) -> Tensor:
        """See `Representation`."""
        return self.features.variance(form, self._from_rows(rows) - self.features.centre, None)

    def _from_rows(self, rows: Tensor) -> Tensor:
        """Features of kernel rows (..., q, m)."""
        return rows

    def _of_rows(self, coef: Tensor) -> Tensor:
        """Coefficients (..., m, c) of kernel rows from those of features."""
        return coef
