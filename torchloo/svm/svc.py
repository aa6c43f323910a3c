"""SVC: the support vector machine as a module."""

from typing import Self

import torch
from torch import Tensor

from torchloo import csr
from torchloo.kernels import Kernel, Precomputed
from torchloo.machine import KernelMachine, log_parameter
from torchloo.svm.fit import SVMFit, svm
from torchloo.svm.held_out import SVMHeldOut
from torchloo.svm.lco import svm_lco
from torchloo.svm.loo import svm_loo

__all__ = ["SVC"]


class SVC(KernelMachine):
    """Support vector classifier with an exact, certified leave-one-out; see `svm` and `svm_loo`.

    Labels y are -1 and +1, (..., n). A weight multiplies C row by row, which is how classes get a C
    of their own. Decision values of leave-one-out are differentiable in X, C, weight and the
    parameters of the kernel; the coefficients themselves are not.

    Args:
        kernel: a kernel of torchloo.kernels.
        C: box bound, a positive number or tensor of batch shape; kept as the parameter `log_C`.
    """

    _function = "svc"

    def __init__(self, kernel: Kernel, C: Tensor | float = 1.0) -> None:
        super().__init__(kernel)
        self.log_C = log_parameter("SVC", C=C)

    @property
    def C(self) -> Tensor:  # noqa: N802
        """Box bound, exp(log_C)."""
        return self.log_C.exp()

    def solve(self, X: Tensor, y: Tensor, weight: Tensor | None = None) -> SVMFit:
        """The trained machine; not differentiable."""
        return svm(self._kernel_matrix(X, y), y, self.C.to(X), weight)

    @torch.no_grad()
    def fit(self, X: Tensor, y: Tensor, weight: Tensor | None = None) -> Self:
        """Store the support vectors and their coefficients; an error leaves the machine as it was."""
        fit = self.solve(X, y, weight)
        coef = fit.coef.unsqueeze(-1)
        if any(isinstance(part, Precomputed) for part in self.kernel.modules()):
            support = X  # the columns of a given matrix cannot be chosen among
        else:
            used = (fit.coef != 0).flatten(0, -2).any(0) if fit.coef.ndim > 1 else fit.coef != 0
            rows = used.nonzero()[:, 0]
            support = csr.select(X, rows) if csr.is_csr(X) else X[..., rows, :]
            coef = coef[..., rows, :]
        self._store(support, coef, fit.bias.unsqueeze(-1), flat=True)
        return self

    def loo(
        self,
        X: Tensor,
        y: Tensor,
        weight: Tensor | None = None,
        method: str = "auto",
        values: bool = True,
        epsilon: float = 1e-3,
    ) -> SVMHeldOut:
        """What the machine would have said of every row, had it not seen it; see `svm_loo`."""
        return svm_loo(self._kernel_matrix(X, y), y, self.C.to(X), weight, method, values, epsilon)

    def lco(
        self,
        X: Tensor,
        y: Tensor,
        clusters: object,
        weight: Tensor | None = None,
        method: str = "auto",
        epsilon: float = 1e-3,
    ) -> SVMHeldOut:
        """What the machine would have said of every row, had it not seen its cluster; see `svm_lco`."""
        return svm_lco(self._kernel_matrix(X, y), y, self.C.to(X), clusters, weight, method, epsilon)

    def extra_repr(self) -> str:
        """Current box bound."""
        C = self.C.detach()
        return f"C={C.item():.4g}" if C.ndim == 0 else f"C={tuple(C.shape)}"

    def _kernel_matrix(self, X: Tensor, y: Tensor) -> Tensor:
        guard, _, flat = self._checked(X, y)
        if not flat:
            raise ValueError(f"svc: y must be one label for each row, (..., n), got shape {tuple(y.shape)}")
        guard.check()
        return self.kernel(X)
