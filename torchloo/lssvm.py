"""The (weighted) least-squares support vector machine: an unpenalised bias."""

from torch import Tensor

from torchloo.guards import Guard
from torchloo.machine import LeastSquares
from torchloo.smoothers import Fit, solve_dual

__all__ = ["LSSVM", "lssvm"]


def lssvm(K: Tensor, Y: Tensor, reg: Tensor | float, weight: Tensor | None = None) -> Fit:
    """Least-squares support vector machine, f(x) = sum_i a_i k(x, x_i) + b.

    Solves min over f, b of sum_i weight_i |y_i - f(x_i) - b|^2 + reg |f|^2, that is
    (K + reg diag(1/weight)) a + b 1 = Y with 1^T a = 0; held-out residuals are P_LL^{-1} a_L with P
    the inverse of the bordered matrix, cut to the rows.

    Args:
        K: kernel matrix, symmetric, (..., n, n).
        Y: targets, (..., n, c); labels -1 and +1 for classification.
        reg: regularisation, a number or a tensor of batch shape; never scaled by n.
        weight: row weights, (..., n); None for equal weights.

    Returns:
        Fit with coef (..., n, c) and bias (..., c).

    Differentiable in all four. Cost n^3/3, as much again for leave-one-out. Memory besides K: 2.2 n^2
    numbers, 4.3 n^2 with the backward.

    Reference: Cawley (2006), "Leave-one-out cross-validation based model selection criteria for
    weighted LS-SVMs", II.

    Example:
        >>> import torch
        >>> K = torch.eye(3, dtype=torch.float64)
        >>> Y = torch.tensor([[0.0], [3.0], [6.0]], dtype=torch.float64)
        >>> lssvm(K, Y, reg=1.0).held_out().outputs[:, 0]  # each is the mean of the other two
        tensor([4.5000, 3.0000, 1.5000], dtype=torch.float64)
    """
    return solve_dual(Guard("lssvm"), K, Y, reg, weight, bias=True).checked()


class LSSVM(LeastSquares):
    """The least-squares support vector machine as a module; see `lssvm`. Arguments as in `RLS`."""

    name = "lssvm"
    label = "least-squares support vector machine"
    _function = "lssvm"
    has_bias = True
