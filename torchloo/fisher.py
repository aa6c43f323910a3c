"""The kernel Fisher discriminant: the least-squares machine of the kernel matrix K K^T."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from torchloo.guards import Guard
from torchloo.machine import LeastSquares
from torchloo.primal.machines import Expansion
from torchloo.problem import Regs, check_dual
from torchloo.representation import CentredFeatures, FeaturesOfKernelRows
from torchloo.smoothers import Fit
from torchloo.spectral import from_features

__all__ = ["KFD", "kfd"]


def _code(guard: Guard, K: Tensor, y: Tensor, weight: Tensor | None) -> Tensor:
    """Targets +s/s_1 and -s/s_2 for labels +1 and -1 (..., n, c), with s the sums of the weights."""
    check_dual(guard, K, y, 1.0, weight)
    guard.two_classes(y=y)
    positive = y > 0
    zeta = torch.ones_like(y) if weight is None else weight.unsqueeze(-1)
    first = (zeta * positive).sum(-2, keepdim=True)
    second = (zeta * ~positive).sum(-2, keepdim=True)
    total = first + second
    return torch.where(positive, total / first, -total / second)


def _solve(guard: Guard, K: Tensor, y: Tensor, reg: Tensor | float | Regs, weight: Tensor | None) -> Fit:
    """Ridge regression on the columns of K as features, centred, so that a constant costs no accuracy."""
    return _solve_coded(guard, K, _code(guard, K, y, weight), reg, weight)


def _solve_coded(
    guard: Guard, K: Tensor, T: Tensor, reg: Tensor | float | Regs, weight: Tensor | None
) -> Fit:
    fit = from_features(guard, K, T, reg, weight, bias=True)
    assert isinstance(fit.representation, CentredFeatures)
    return replace(fit, representation=FeaturesOfKernelRows(fit.representation))


def kfd(K: Tensor, y: Tensor, reg: Tensor | float, weight: Tensor | None = None) -> Fit:
    """Kernel Fisher discriminant, f(x) = sum_i alpha_i k(x, x_i) + b.

    Solves min over alpha, b of sum_i weight_i (t_i - k_i^T alpha - b)^2 + reg |alpha|^2 with the
    targets t_i = s/s_1 for label +1 and -s/s_2 for label -1 (s_1, s_2, s: sums of weights by class
    and in all): the LS-SVM of the kernel matrix K K^T, with alpha = K^T a. The targets, and the
    columns of K, stay as they are when a row is left out.

    Args:
        K: kernel matrix, symmetric, (..., n, n).
        y: labels -1 and +1, (..., n, c); both classes in every column.
        reg: regularisation, a number or a tensor of batch shape; never scaled by n.
        weight: row weights, (..., n); None for equal weights.

    Returns:
        Fit with coef (..., n, c), bias (..., c) and the coded targets.

    Differentiable in K, reg and weight. Cost 2 n^3 + n^3/3, n^3/3 more for leave-one-out. Memory
    besides K: 3.2 n^2 numbers, 5.3 n^2 with the backward.

    Reference: Cawley and Talbot (2003), "Efficient leave-one-out cross-validation of kernel Fisher
    discriminant classifiers", section 3.
    """
    return _solve(Guard("kfd"), K, y, reg, weight).checked()


class KFD(LeastSquares):
    """The kernel Fisher discriminant as a module; see `kfd`.

    Labels y are integers, (..., n), see Note [class labels] in machine/kernel_machine.py; or -1 and +1,
    (..., n), or (..., n, c) for several classes: column k is +1 in the rows of class k, one class against the
    rest, and the class with the largest output is the predicted one. The machine codes its own targets column
    by column; its HeldOut contains the coded ones. All columns share one decomposition. Arguments as in
    `RLS`.
    """

    name = "kfd"
    label = "kernel Fisher discriminant"
    needs_classes = True
    _function = "kfd"
    has_bias = True

    def _solve(self, guard: Guard, X: Tensor, Y: Tensor, weight: Tensor | None, reg: Tensor | Regs) -> Fit:
        return _solve(guard, self._matrix(X), Y, reg, weight)

    def _smoother(self, guard: Guard, X: Tensor, Y: Tensor, weight: Tensor) -> Fit:
        return _solve_coded(guard, self._matrix(X), Y, self.reg, weight)

    def _features(self, X: Tensor) -> Tensor | None:
        """None: whatever the kernel, the features are the columns of K."""
        return None

    def features_of_rows(self, first: Callable[[int], Tensor]) -> Expansion:
        """Raises: the features are the columns of K, one for each row."""
        raise TypeError(
            "kfd: a stream needs a machine with few features; use SparseLSSVM(kernel, reg, basis=...) "
            "with y coded as s/s_1 and -s/s_2"
        )
