"""The base class of machines: a kernel, an expansion over support points, and how both are stored."""

import copy
from typing import Any, Self

import torch
from torch import Tensor, nn

from torchloo import csr
from torchloo.classes import (
    as_classes,
    coded,
    is_label,
    predicted_labels,
    require_few,
    require_two,
    sorted_labels,
)
from torchloo.guards import Guard, full_dtype, require_inputs, warn_of_cut_graph
from torchloo.kernels import Kernel, Precomputed
from torchloo.machine.frozen import FrozenMachine
from torchloo.machine.predictor import Predictor

__all__ = ["MACHINES", "KernelMachine"]

MACHINES: dict[str, Any] = {}
"""All machines by name, including your own."""


class KernelMachine(nn.Module):
    """A kernel and, once fitted, an expansion over support points.

    Methods other than `fit` store nothing and keep the graph; `fit` stores its result in buffers, without a
    graph.

    Args:
        kernel: a kernel of torchloo.kernels.
        classes: all class labels, in the order of their columns; None for the sorted labels of each call.

    Shape:
        X (..., n, d), or (..., n, *event) if the kernel has an `event_dim`, or sparse rows (n, d) of layout
        torch.sparse_csr if it takes them; y (..., n) or (..., n, c), and the results have the same shape;
        weight (..., n); clusters (n,). Leading dimensions are batch dimensions. y without them, (n,) or
        (n, c), is shared by all problems of a batch; an ambiguous (n, n) is read as (B, n).

    X and y in bfloat16 or float16 are converted to float32, X after its features; results are float32.

    Note [class labels]
    Integer or bool y (..., n) are class labels, coded one class against the rest (Note [coding of classes] in
    classes.py) in the dtype of X: for c > 2 classes the outputs are (..., n, c), for two (..., n), positive
    for the second. With `classes=`, no value is read, and a call may lack a class; otherwise the sorted
    labels of the call are the classes, of which more than max(20, sqrt n) are rejected as probable counts.
    Only `fit` stores classes, for `predict_class`; the targets of a HeldOut are the columns.
    """

    name: str = ""
    """Name by which the command and the scikit-learn estimators offer the machine; empty if they do not."""
    label: str
    """Name of the machine in reports."""
    needs_classes: bool = False
    """Whether it takes class labels only, and needs training rows of every class."""
    fitted_buffers: tuple[str, ...] = ("support", "coef", "bias")
    """Buffers of a fitted machine that its outputs need."""
    _function: str
    _with_graph = "solve, whose Fit is differentiable"
    extra_buffers: tuple[str, ...] = ()
    """Buffers of a fitted machine that its outputs do not need."""

    support: Tensor | None
    coef: Tensor | None
    bias: Tensor | None
    classes: Tensor | None
    """Labels of the classes, (c,), in the order of the columns: those given, or those of the last `fit`."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if name := vars(cls).get("name"):
            known = MACHINES.setdefault(name, cls)
            if known.__module__ != cls.__module__:
                raise ValueError(
                    f"{cls.__name__}: name must be new, but {known.__module__} already has {name!r}"
                )
            MACHINES[name] = cls

    def __init__(self, kernel: Kernel, classes: Any = None) -> None:
        super().__init__()
        if not isinstance(kernel, Kernel):
            raise TypeError(
                f"{type(self).__name__}: kernel must be a torchloo kernel, got {type(kernel).__name__}"
            )
        self.kernel = kernel
        for name in ("support", "coef", "bias"):
            self.register_buffer(name, None)
        given = None if classes is None else as_classes(type(self).__name__, classes)
        self.register_buffer("classes", given)
        self.has_given_classes = given is not None
        self._flat, self._linear = True, False

    def forward(self, X: Tensor) -> Tensor:
        """Outputs at new points, with the trailing shape of the targets of `fit`."""
        return self._fitted_predictor()(X)

    def _fitted_predictor(self) -> Predictor:
        if self.coef is None or self.bias is None or self.support is None:
            raise RuntimeError(f"{type(self).__name__}: not fitted; call fit(X, y) first")
        parts = (self.support, self.coef, self.bias)
        return Predictor(self._function, self.kernel, *parts, self._flat, self._linear)

    def held_out(
        self, X: Any, y: Any = None, clusters: object | None = None, weight: Tensor | None = None
    ) -> Any:
        """`loo(X, y, weight)`, or `lco(X, y, clusters, weight)` if clusters are given."""
        machine: Any = self
        if clusters is None:
            return machine.loo(X, y, weight)
        return machine.lco(X, y, clusters, weight)

    def predict_class(self, X: Tensor) -> Tensor:
        """Labels (..., n) of the predicted classes at new points: the class of the largest output.

        For two classes the second if the output is not negative. The machine must have been fitted to integer
        labels, or to the columns of its `classes`.
        """
        return predicted_labels(type(self).__name__, self(X), self.classes, self._flat)

    def frozen(self, block: int = 8192) -> FrozenMachine:
        """A module for inference only, with the current fit of the machine; see `FrozenMachine`.

        Args:
            block: evaluate at most this many rows at a time.
        """
        return FrozenMachine(self._fitted_predictor(), self.classes, block)

    def _warn_of_cut_graph(self, *inputs: object) -> None:
        """Warn if `fit` is given tensors of a graph: its stored results are not part of it."""
        warn_of_cut_graph(
            f"{type(self).__name__}.fit keeps no graph, so that no gradient reaches the inputs through the "
            f"fitted machine; use {self._with_graph}, or call fit under torch.no_grad()",
            *inputs,
            stacklevel=3,
        )

    def _store(self, solved: Predictor) -> None:
        """Store a copy of the support points, the coefficients and the bias."""
        support = solved.support
        if isinstance(self.kernel, Precomputed):
            support = csr.dense(support)[..., :1]  # only the number of its rows is needed
        with torch.inference_mode(False):
            self.support = support.clone()
            self.coef = solved.coef.clone()
            self.bias = solved.bias.clone()
        self._flat, self._linear = solved.flat, solved.linear

    def _matrix_dtype(self, X: Tensor) -> torch.dtype:
        """The dtype in which the kernel is evaluated for rows X; see `Kernel.keeps_digits`."""
        return full_dtype(X.dtype) if self.kernel.keeps_digits else torch.float64

    @property
    def row_axis(self) -> int:
        """The axis of the rows in X (..., n, *event), counted from the end."""
        return -self.kernel.event_dim - 1

    def checked_targets(self, X: Tensor, y: Any) -> tuple[Guard, Tensor, bool]:
        """A guard with the checks of X, the targets as a matrix, and whether they were given as a vector.

        Class labels are coded; see Note [class labels].
        """
        kernel = self.kernel
        guard = Guard(self._function, symmetric=kernel.is_symmetric, wide=True)
        self._require_rows(self._function, X)
        if is_label(y):
            y, _ = self.coded_targets(guard, X, y)
        require_inputs(self._function, X=X, y=y)
        n = X.shape[self.row_axis]
        most = X.ndim - kernel.event_dim  # axes of targets (..., n)
        flat = y.ndim <= most and y.shape[-1:] == (n,)
        matrix = 1 < y.ndim <= most + 1 and y.shape[-2] == n
        if not (flat or matrix) or 0 in y.shape:
            raise ValueError(
                f"{self._function}: y must have {n} rows to match X, shape (..., n) or (..., n, c) "
                f"with the batch dimensions of X or without, got shape {tuple(y.shape)}"
                f"{self._meant_event(X, y)}"
            )
        y = y.to(full_dtype(X.dtype))
        guard.finite(X=X)
        return guard, y.unsqueeze(-1) if flat else y, flat

    def _require_rows(self, function: str, X: Tensor) -> None:
        """Raise unless X holds rows of the kernel's inputs, one at least."""
        require_inputs(function, X=X)
        csr.require_layout(function, "X", X)
        if X.ndim <= self.kernel.event_dim or 0 in X.shape:
            raise ValueError(
                f"{function}: X must be {self.kernel.input_shape} with at least one row, "
                f"got shape {tuple(X.shape)}"
            )

    def _meant_event(self, X: Tensor, y: Tensor) -> str:
        """A remedy if the targets match the first axis of X: the other axes may be those of one input."""
        axes = X.ndim - 1
        if axes <= self.kernel.event_dim or y.shape[:1] != X.shape[:1]:
            return ""
        name = type(self.kernel).__name__
        return f"; if X holds {len(X)} inputs of {axes} axes each, give the kernel {name}(event_dim={axes})"

    def coded(self, function: str, X: Tensor, y: Any) -> Any:
        """Targets as numbers: class labels coded by this machine, others unchanged."""
        if not is_label(y):
            return y
        guard = Guard(function)
        targets, _ = self.coded_targets(guard, X, y)
        guard.check()
        return targets

    def coded_targets(
        self, guard: Guard, X: Tensor, labels: Tensor, classes: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Targets (..., n, c), or (..., n) for two classes, of class labels (..., n), and the classes."""
        self._require_rows(guard.function, X)
        if labels.device != X.device:
            raise ValueError(
                f"{guard.function}: y must be on the device of X, {X.device}, got {labels.device}"
            )
        most = X.ndim - self.kernel.event_dim
        dtype = full_dtype(X.dtype)
        if not 0 < labels.ndim <= most or labels.shape[-1] != X.shape[self.row_axis]:
            raise ValueError(
                f"{guard.function}: integer y are class labels, (..., n) to match the rows of X, "
                f"{tuple(X.shape)}, got shape {tuple(labels.shape)}; columns of numbers must be {dtype}"
                f"{self._meant_event(X, labels)}"
            )
        labels = labels[(None,) * (most - labels.ndim)]  # the same labels for all problems of a batch
        if self.has_given_classes:
            classes = self.classes
        if classes is None:
            classes = sorted_labels(guard.function, "y", labels)
            require_two(guard.function, "y", classes)
            require_few(guard.function, classes, labels.shape[-1])
        columns = coded(guard, "y", labels, classes, dtype)
        return (columns if len(classes) > 2 else columns[..., 0]), classes

    def _fit_targets(self, X: Any, y: Any) -> tuple[Any, Tensor | None]:
        """The targets of `fit`, and the classes that it stores; the labels are read once."""
        if self.has_given_classes or not is_label(y):
            return y, self.classes if self.has_given_classes else None
        return self.coded_targets(Guard(self._function), X, y)

    def get_extra_state(self) -> dict[str, bool]:
        """Whether the targets of `fit` had no output axis, and whether `coef` is of features."""
        return {"flat": self._flat, "linear": self._linear}

    def set_extra_state(self, state: dict[str, bool]) -> None:
        """Restore the result of `get_extra_state`."""
        self._flat = state["flat"]
        self._linear = state["linear"]

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        for buffer in self.buffers(recurse=False):
            if csr.is_csr(buffer):  # torch has no deepcopy for it
                memo[id(buffer)] = buffer.clone()
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__ = copy.deepcopy(self.__dict__, memo)
        return twin

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Resize the buffers to those of the loaded machine, fitted or not."""
        device = next(self.parameters()).device
        if prefix + "classes" not in state_dict:  # fitted to numbers, or not at all
            if self.has_given_classes:
                state_dict[prefix + "classes"] = self.classes
            else:
                self.classes = None
        fitted = prefix + "coef" in state_dict
        if fitted or prefix + "_extra_state" in state_dict:
            # What is not loaded with them would belong to other coefficients; an unfitted machine has none.
            for name in self.extra_buffers if fitted else (*self.fitted_buffers, *self.extra_buffers):
                setattr(self, name, None)
        for name in (*self.fitted_buffers, *self.extra_buffers, "classes"):
            if prefix + name in state_dict:
                setattr(self, name, torch.empty_like(state_dict[prefix + name], device=device))
        super()._load_from_state_dict(state_dict, prefix, *args)
