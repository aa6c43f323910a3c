"""What every machine has: a kernel, an expansion over support points, and how both are stored."""

import copy
import math
import warnings
from typing import Any, Self

import torch
from torch import Tensor, nn

from torchloo import csr
from torchloo.guards import Guard, require_floating
from torchloo.kernels import Kernel, Precomputed
from torchloo.machine.predictor import Predictor

__all__ = ["KernelMachine", "log_parameter"]


def log_parameter(function: str, **value: Tensor | float) -> nn.Parameter:
    """The logarithm of a positive hyper-parameter, in float64, so that any optimiser moves it safely."""
    guard = Guard(function)
    guard.positive(**value)
    guard.check()
    (positive,) = value.values()
    log = positive.detach().log() if isinstance(positive, Tensor) else math.log(positive)
    return nn.Parameter(torch.as_tensor(log, dtype=torch.float64).clone())


class KernelMachine(nn.Module):
    """A kernel and, once fitted, an expansion over support points: what every machine has.

    Methods that answer a question store nothing and keep the graph; only `fit` stores, in buffers,
    without a graph.

    Args:
        kernel: a kernel of torchloo.kernels.

    Shape:
        X (..., n, d), or sparse rows (n, d) of layout torch.sparse_csr where the kernel takes them;
        y (..., n) or (..., n, c), whichever came in goes out; weight (..., n);
        clusters (n,). Leading dimensions are batch.
    """

    _function: str
    _fitted: tuple[str, ...] = ("support", "coef", "bias")

    support: Tensor | None
    coef: Tensor | None
    bias: Tensor | None

    def __init__(self, kernel: Kernel) -> None:
        super().__init__()
        if not isinstance(kernel, Kernel):
            raise TypeError(
                f"{type(self).__name__}: kernel must be a torchloo kernel, got {type(kernel).__name__}"
            )
        self.kernel = kernel
        for name in ("support", "coef", "bias"):
            self.register_buffer(name, None)
        self._flat, self._linear = True, False

    def forward(self, X: Tensor) -> Tensor:
        """Outputs at new points, with the trailing shape of the targets of `fit`."""
        if self.coef is None or self.bias is None or self.support is None:
            raise RuntimeError(f"{type(self).__name__}: not fitted; call fit(X, y) first")
        parts = (self.support, self.coef, self.bias)
        return Predictor(self._function, self.kernel, *parts, self._flat, self._linear)(X)

    def _warn_of_cut_graph(self, *inputs: object) -> None:
        """Warn where `fit` is given tensors of a graph, which what it stores does not belong to."""
        if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in inputs):
            warnings.warn(
                f"{type(self).__name__}.fit keeps no graph: no gradient reaches the inputs through what it "
                "stores; use solve, whose Fit is differentiable, or call fit under torch.no_grad()",
                stacklevel=3,
            )

    def _store(self, solved: Predictor) -> None:
        """Keep a copy of what predicts."""
        support = solved.support
        if isinstance(self.kernel, Precomputed):
            support = csr.dense(support)[..., :1]  # only the number of its rows is asked for
        with torch.inference_mode(False):
            self.support, self.coef, self.bias = support.clone(), solved.coef.clone(), solved.bias.clone()
        self._flat, self._linear = solved.flat, solved.linear

    def _checked(self, X: Tensor, y: Any) -> tuple[Guard, Tensor, bool]:
        """A guard that knows X, the targets as a matrix, and whether they came as a vector."""
        require_floating(self._function, X=X, y=y)
        csr.require_layout(self._function, "X", X)
        if X.ndim < 2 or 0 in X.shape:
            raise ValueError(
                f"{self._function}: X must be (..., n, d) with at least one row, got shape {tuple(X.shape)}"
            )
        flat = y.ndim == X.ndim - 1
        rows = y.shape[y.ndim - 1 if flat else X.ndim - 2 :][:1]
        if y.ndim not in (X.ndim - 1, X.ndim) or rows != X.shape[-2:-1] or 0 in y.shape:
            raise ValueError(
                f"{self._function}: y must have {X.shape[-2]} rows to match X, shape (..., n) or (..., n, c) "
                f"with the batch dimensions of X, got shape {tuple(y.shape)}"
            )
        guard = Guard(self._function, symmetric=self.kernel.is_symmetric)
        guard.finite(X=X)
        return guard, y.unsqueeze(-1) if flat else y, flat

    def get_extra_state(self) -> dict[str, bool]:
        """Whether the targets of `fit` came without an output axis, and whether features are weighed."""
        return {"flat": self._flat, "linear": self._linear}

    def set_extra_state(self, state: dict[str, bool]) -> None:
        """Restore what `get_extra_state` gave."""
        self._flat, self._linear = state["flat"], state["linear"]

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        for buffer in self.buffers(recurse=False):
            if csr.is_csr(buffer):  # which torch does not copy deeply by itself
                memo[id(buffer)] = buffer.clone()
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__ = copy.deepcopy(self.__dict__, memo)
        return twin

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Make room for the coefficients of a fitted machine, whatever this one holds."""
        device = next(self.parameters()).device
        for name in self._fitted:
            if prefix + name in state_dict:
                setattr(self, name, torch.empty_like(state_dict[prefix + name], device=device))
        super()._load_from_state_dict(state_dict, prefix, *args)
