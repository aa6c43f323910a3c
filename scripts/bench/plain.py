"""Leave-one-out as it is written by hand in plain torch: what features.py is measured against.

Short, without tricks and without checks; gradients are left to autograd. `inverse` is how a positive definite
matrix is inverted: by `torch.linalg.inv`, or by `cholesky_inverse`, whichever is faster for a shape.
"""

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["cholesky_inverse", "linear_path", "linear_residuals", "rls_residuals", "sparse_residuals"]

Inverse = Callable[[Tensor], Tensor]


def cholesky_inverse(A: Tensor) -> Tensor:
    return torch.cholesky_inverse(torch.linalg.cholesky(A))


def linear_path(X: Tensor, y: Tensor, weight: Tensor, regs: Tensor) -> Tensor:
    """Residuals (R, n) of weighted ridge regression with a bias, all from one eigendecomposition."""
    total = weight.sum()
    Xc, yc = X - weight @ X / total, y - weight @ y / total
    w, Q = torch.linalg.eigh(Xc.mT @ (weight.unsqueeze(-1) * Xc))
    f = 1 / (w + regs.unsqueeze(-1))  # (R, d)
    coef = f * ((weight * yc) @ Xc @ Q)
    U = Xc @ Q
    leverage = weight * (f @ U.square().mT + 1 / total)  # (R, n)
    return (yc - coef @ U.mT) / (1 - leverage)


def linear_residuals(X: Tensor, Y: Tensor, reg: Tensor, inverse: Inverse) -> Tensor:
    """Residuals (..., n, c) of ridge regression with a bias, in the smaller of the two forms."""
    n, d = X.shape[-2:]
    Xc = X - X.mean(-2, keepdim=True)
    Yc = Y - Y.mean(-2, keepdim=True)
    unit = torch.eye(min(n, d), dtype=X.dtype)
    if n <= d:
        P = inverse(Xc @ Xc.mT + reg * unit)
        diagonal = P.diagonal(dim1=-2, dim2=-1) - 1 / (n * reg)
        return P @ Yc / diagonal.unsqueeze(-1)
    XC = Xc @ inverse(Xc.mT @ Xc + reg * unit)
    leverage = (XC * Xc).sum(-1, keepdim=True) + 1 / n
    return (Yc - XC @ (Xc.mT @ Yc)) / (1 - leverage)


def _rbf(X: Tensor, Z: Tensor, lengthscale: Tensor) -> Tensor:
    X, Z = X / lengthscale, Z / lengthscale
    left = X.square().sum(-1).unsqueeze(-1)
    right = Z.square().sum(-1).unsqueeze(-2)
    square = left + right - 2 * X @ Z.mT
    return torch.exp(-0.5 * square)


def rls_residuals(X: Tensor, Y: Tensor, reg: Tensor, lengthscale: Tensor, inverse: Inverse) -> Tensor:
    """Residuals (n, c) of kernel ridge regression without a bias, RBF kernel."""
    P = inverse(_rbf(X, X, lengthscale) + reg * torch.eye(len(X), dtype=X.dtype))
    return P @ Y / P.diagonal().unsqueeze(-1)


def sparse_residuals(X: Tensor, Y: Tensor, basis: Tensor, reg: Tensor, lengthscale: Tensor) -> Tensor:
    """Residuals (n, c) of the sparse LS-SVM with an RBF kernel, as ridge regression on its features."""
    L = torch.linalg.cholesky(_rbf(basis, basis, lengthscale))
    Z = torch.linalg.solve_triangular(L, _rbf(basis, X, lengthscale), upper=False).mT
    return linear_residuals(Z, Y, reg, cholesky_inverse)
