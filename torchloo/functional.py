"""The pure functions behind the machines, under one import."""

from torch import Tensor

from torchloo.fisher import kfd
from torchloo.guards import Guard
from torchloo.lssvm import lssvm
from torchloo.rls import rls
from torchloo.smoothers import Fit, solve_primal
from torchloo.sparse import sparse_lssvm
from torchloo.svm import svm, svm_lco, svm_loo

__all__ = ["kfd", "lssvm", "ridge", "rls", "sparse_lssvm", "svm", "svm_lco", "svm_loo"]


def ridge(Z: Tensor, Y: Tensor, R: Tensor, weight: Tensor | None = None) -> Fit:
    """Ridge regression on explicit features with any quadratic penalty.

    Solves min over p of sum_i weight_i |y_i - z_i^T p|^2 + p^T R p; held-out residuals are
    (I - Z_L C^{-1} Z_L^T Omega_L)^{-1} e_L with C = R + Z^T Omega Z. A column of ones in Z with a
    zero row and column in R is an unpenalised bias. `Fit.from_kernel` takes new features.

    Args:
        Z: features, (..., n, p).
        Y: targets, (..., n, c).
        R: penalty, symmetric, positive semi-definite, (..., p, p).
        weight: row weights, (..., n); None for equal weights.

    Returns:
        Fit with coef (..., p, c).

    Differentiable in all four. Cost n p^2. Memory besides Z: 2 n p numbers,
    5 n p with the backward, in float64.

    Reference: Cawley and Talbot (2004), appendix A.
    """
    return solve_primal(Guard("ridge"), Z, Y, R, weight).checked()
