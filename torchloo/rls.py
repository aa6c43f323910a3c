"""Regularised least squares: no bias."""

from torch import Tensor

from torchloo.guards import Guard
from torchloo.machine import LeastSquares
from torchloo.smoothers import Fit, solve_dual

__all__ = ["RLS", "rls"]


def rls(K: Tensor, Y: Tensor, reg: Tensor | float, weight: Tensor | None = None) -> Fit:
    """Regularised least squares, f(x) = sum_i a_i k(x, x_i).

    Solves min over f of sum_i weight_i |y_i - f(x_i)|^2 + reg |f|^2, that is
    (K + reg diag(1/weight)) a = Y; held-out residuals are P_LL^{-1} a_L with P the inverse.

    Args:
        K: kernel matrix, symmetric, (..., n, n).
        Y: targets, (..., n, c).
        reg: regularisation, a number or a tensor of batch shape; never scaled by n.
        weight: row weights, (..., n); None for equal weights.

    Returns:
        Fit with coef (..., n, c) and bias zero.

    Differentiable in all four. Cost n^3/3, as much again for leave-one-out. Memory besides K: 2.2 n^2
    numbers, 4.3 n^2 with the backward.

    Reference: Pahikkala, Boberg and Salakoski (2006), section 3.

    Example:
        >>> import torch
        >>> K = torch.tensor([[1.0, 0.5], [0.5, 1.0]])
        >>> rls(K, torch.tensor([[1.0], [2.0]]), reg=1.0).held_out().outputs
        tensor([[0.5000],
                [0.2500]])
    """
    return solve_dual(Guard("rls"), K, Y, reg, weight, bias=False).checked()


class RLS(LeastSquares):
    """Regularised least squares as a module; see `rls`.

    Args:
        kernel: a kernel of torchloo.kernels. For a linear kernel with fewer features than rows, the primal
            form is used automatically.
        reg: regularisation, positive; stored as the parameter `log_reg`.
        reg_per_output: whether reg (..., c) holds one number for each of the c outputs.
        classes: all class labels, if some may be missing from the labels of a call; see Note [class labels]
            in machine/kernel_machine.py.
    """

    name = "rls"
    label = "regularised least-squares machine"
    _function = "rls"
    has_bias = False
