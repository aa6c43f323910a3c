"""Kernels: small modules, kernel(X, Z=None) -> (..., n, m), composed by + and *.

Leading dimensions of X (..., n, d) and Z (..., m, d) are batch dimensions and broadcast. Z=None means Z = X:
the matrix is then exactly symmetric. Positive parameters are copied and stored as logarithms,
`log_lengthscale` and so on, in float64, so that any optimiser keeps them positive. Kernels do not check the
values of X (for NaN, say): machines do, once.

Inputs may have any shape: with `event_dim` e, X is (..., n, *event) with e axes for each input. For X in
bfloat16 or float16, which a network may need, the output of the network, or X itself, is converted to
float32, and so the matrix is float32.

X and Z may also be sparse rows, (n, d) of layout torch.sparse_csr, for Linear, Polynomial and Boolean, for
RBF and Matern with one lengthscale, and for sums and products of them. The matrix is dense, and
differentiable in the parameters of the kernel and in dense points, not in sparse rows.

>>> import torch
>>> kernel = 2.0 * RBF(lengthscale=0.5) + Linear()
>>> kernel(torch.zeros(3, 2)).shape
torch.Size([3, 3])
"""

from torchloo.kernels.inner_products import Boolean, Linear, Polynomial
from torchloo.kernels.kernel import Choice, Kernel, Product, Scaled, Sum
from torchloo.kernels.precomputed import Precomputed
from torchloo.kernels.stationary import RBF, Matern
from torchloo.positive import Positive

__all__ = [
    "RBF", "Boolean", "Choice", "Kernel", "Linear", "Matern", "Polynomial", "Positive", "Precomputed",
    "Product", "Scaled", "Sum",
]  # fmt: skip
