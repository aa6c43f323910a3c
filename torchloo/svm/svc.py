"""SVC: the support vector machine as a module."""

from dataclasses import replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from torchloo import csr
from torchloo.guards import full_dtype, require_inputs
from torchloo.kernels import Kernel, Precomputed
from torchloo.machine import KernelMachine, Predictor
from torchloo.machine.predictor import SolvedWith
from torchloo.positive import Positive, log_of
from torchloo.precision import full_precision
from torchloo.svm.arguments import Caller, batch_of
from torchloo.svm.fit import SVMFit, train
from torchloo.svm.lco import leave_clusters_out
from torchloo.svm.loo import leave_one_out
from torchloo.svm.result import SVMHeldOut
from torchloo.svm.smo.options import SMOOptions

__all__ = ["SVC"]

_CALLER = Caller("svc", "kernel(X)")


class SVC(KernelMachine):
    """Support vector classifier with an exact, certified leave-one-out; see `svm` and `svm_loo`.

    Labels y are integers, (..., n), see Note [class labels] in machine/kernel_machine.py; or -1 and +1,
    (..., n), or (..., n, c) for several classes: column k is +1 in the rows of class k, one class against the
    rest, and the class with the largest output is the predicted one. There is one machine for each column,
    all over one kernel matrix and solved as one batch, which takes the time and the memory of as many
    problems. A weight multiplies C row by row, which is how classes get a C of their own:
    weight=torch.where(y > 0, 3.0, 1.0).to(X) makes errors on +1 three times as costly, and
    weight=tl.balanced_weight(y) those of all classes together equally costly.
    Decision values of leave-one-out are differentiable once in X, C, weight and parameters of the kernel;
    the coefficients themselves are not.

    Certificates are of the machine on the rows as they are, Note [rounding of K] in certify.py: kernels of
    float32 rows are evaluated in float64, and the features of a linear one are centred first, which no
    decision value depends on. What rounding could still change is unstable: polynomials of rows far from the
    origin, and a `Precomputed` matrix in float32.

    Args:
        kernel: a kernel of torchloo.kernels.
        C: box bound, a positive number or tensor of batch shape; kept as the parameter `log_C`.
        classes: the class labels there are, where a call may lack some; see Note [class labels] in
            machine/kernel_machine.py.
    """

    name = "svc"
    label = "support vector machine"
    needs_classes = True
    _function = "svc"
    _with_graph = "loo or lco, whose outputs are differentiable"
    C = Positive("how much the machine pays for each row on the wrong side", torch.reciprocal)

    def __init__(self, kernel: Kernel, C: Tensor | float = 1.0, *, classes: Any = None) -> None:
        super().__init__(kernel, classes)
        self.log_C = nn.Parameter(log_of("SVC", "C", C))

    def solve(self, X: Tensor, y: Tensor, weight: Tensor | None = None) -> SVMFit:
        """The trained machine, which takes new inputs: ``solved(X_new)``; neither is differentiable."""
        fit, predictor = self._trained(X, y, weight)
        if predictor.linear:  # from the bias of centred features to that of the kernel
            shift = predictor.support.to(predictor.coef) @ predictor.coef  # (..., 1, c)
            fit = fit._replace(bias=fit.bias - shift[..., 0, :])
        predictor = replace(predictor, solved_with=SolvedWith.now(self.kernel, predictor.support))
        return fit.with_outputs(predictor.flat).to(full_dtype(X.dtype))._replace(predictor=predictor)

    def fit(self, X: Tensor, y: Tensor, weight: Tensor | None = None) -> Self:
        """Store the support vectors and their coefficients; an error leaves the machine as it was.

        Of a linear kernel on dense rows, the centre of the features and their weights. Coefficients of
        kernels that are evaluated in float64 are float64, whatever X is.
        """
        self._warn_of_cut_graph(X, y, weight)
        with torch.no_grad():
            y, classes = self._fit_targets(X, y)
            self._store(self._trained(X, y, weight)[1])
            self.classes = classes
        return self

    @torch.no_grad()
    def _trained(self, X: Tensor, y: Tensor, weight: Tensor | None) -> tuple[SVMFit, Predictor]:
        """What `svm` makes of the problems, and what predicts: support vectors, or weights of features."""
        gram, problems, flat = self._problems(X, y, weight)
        fit = train(_CALLER, *problems)
        coef, bias = fit.coef.mT, fit.bias  # (..., n, c), (..., c)
        if gram.centred is not None:
            F, centre = gram.centred
            return fit, Predictor(self._function, self.kernel, centre, F.mT @ coef, bias, flat, linear=True)
        if self._has_given_matrix():
            support = X  # the columns of a given matrix cannot be chosen among
        else:
            used = (coef != 0).any(-1).reshape(-1, coef.shape[-2]).any(0)
            rows = used.nonzero()[:, 0]
            support = csr.select(X, rows) if csr.is_csr(X) else X.index_select(self.row_axis, rows)
            coef = coef[..., rows, :]
        return fit, Predictor(self._function, self.kernel, support, coef, bias, flat)

    def loo(
        self,
        X: Tensor,
        y: Tensor,
        weight: Tensor | None = None,
        method: str = "auto",
        values: bool = True,
        epsilon: float = 1e-3,
        rows: Tensor | None = None,
        smo: SMOOptions | None = None,
    ) -> SVMHeldOut:
        """Held-out prediction of every row, or of those that `rows` (n,) marks; see `svm_loo`."""
        _, problems, flat = self._problems(X, y, weight)
        held = leave_one_out(_CALLER, *problems, method, values, epsilon, rows, smo)
        return held.with_outputs(flat, full_dtype(X.dtype))

    def lco(
        self,
        X: Tensor,
        y: Tensor,
        clusters: object,
        weight: Tensor | None = None,
        method: str = "auto",
        epsilon: float = 1e-3,
    ) -> SVMHeldOut:
        """Held-out prediction of every row, by the machine without its cluster; see `svm_lco`."""
        _, problems, flat = self._problems(X, y, weight)
        held = leave_clusters_out(_CALLER, *problems, clusters, method, epsilon)
        return held.with_outputs(flat, full_dtype(X.dtype))

    def extra_repr(self) -> str:
        """Current box bound."""
        C = self.C.detach()
        return f"C={C.item():.4g}" if C.ndim == 0 else f"C={tuple(C.shape)}"

    def _has_given_matrix(self) -> bool:
        """Whether rows of X are kernel values, which no evaluation in float64 makes more precise."""
        return any(isinstance(part, Precomputed) for part in self.kernel.modules())

    def _gram(self, X: Tensor) -> "_Gram":
        """The kernel matrix; in float64, and centred where that is possible."""
        if self._has_given_matrix():
            return _Gram(self.kernel(X))
        if not self.kernel.is_linear or csr.is_csr(X):
            return _Gram(self.kernel(X, dtype=torch.float64))
        F = self.kernel.feature_map(X, torch.float64)
        # Any centre will do; one in the dtype of X is what `fit` can store.
        centre = F.detach().mean(-2, keepdim=True).to(full_dtype(X.dtype))
        F = F - centre
        with full_precision(X):
            half = (0.5 * F) @ F.mT
        return _Gram(half + half.mT, (F, centre))

    def _problems(self, X: Tensor, y: Tensor, weight: Tensor | None) -> tuple["_Gram", "_Problems", bool]:
        """The columns of y as the last batch axis of problems that share K, and whether y came as a vector.

        `with_outputs` of what they give is the way back.
        """
        guard, Y, flat = self.checked_targets(X, y)
        guard.two_classes(y=Y)
        if weight is not None:
            require_inputs("svc", X=X, weight=weight)
            n = X.shape[self.row_axis]
            if weight.shape[-1:] != (n,):
                raise ValueError(
                    f"svc: weight must have {n} entries to match X, got shape {tuple(weight.shape)}"
                )
            guard.positive(weight=weight)
        guard.check()
        gram = self._gram(X)
        labels = (Y[..., 0], 1) if flat else (Y, 2)
        batch_of("svc", {"kernel(X)": (gram.K, 2), "y": labels, "weight": (weight, 1), "C": (self.C, 0)})
        K, C = gram.K.unsqueeze(-3), self.C.to(gram.K).unsqueeze(-1)  # (..., 1, n, n), (..., 1)
        weight = None if weight is None else weight.to(K).unsqueeze(-2)
        return gram, (K, Y.mT.to(K), C, weight), flat


_Problems = tuple[Tensor, Tensor, Tensor, Tensor | None]
"""K, y, C and weight of `svm`."""


class _Gram(NamedTuple):
    """A kernel matrix, and what it was made of."""

    K: Tensor
    """(..., n, n)."""

    centred: tuple[Tensor, Tensor] | None = None
    """Of a linear kernel, features without their centre, (..., n, p), and the centre, (..., 1, p)."""
