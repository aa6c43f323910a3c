"""The base class of kernels, and the kernels composed of others: scaled, added, multiplied."""

import copy
import functools
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.func import functional_call

from torchloo import csr
from torchloo.guards import (
    broadcast_shapes,
    full_dtype,
    require_inputs,
    values_visible,
    whole_number,
)
from torchloo.positive import Positive, Values, log_of
from torchloo.precision import full_precision

__all__ = ["KERNELS", "Choice", "Features", "Kernel", "Product", "Scaled", "Sum", "pure"]

Features = nn.Module | None


@dataclass(frozen=True)
class Choice:
    """A kernel that the command and the scikit-learn estimators offer by name."""

    name: str
    label: str
    """A description with an article, such as "an RBF kernel"."""
    make: Callable[[int], "Kernel"]
    """The kernel for d inputs, which are standardised unless `binary`."""
    binary: bool = False
    """Whether inputs must be 0 and 1, and are not standardised."""

    def __call__(self, inputs: int) -> "Kernel":
        """The kernel for this number of inputs."""
        return self.make(inputs)

    @property
    def is_linear(self) -> bool:
        """Whether the kernel is linear in finitely many features."""
        return self(1).is_linear


KERNELS: dict[str, Choice] = {}
"""All choices by name, as kernel classes declare them in `choices`, including your own classes."""


def _show(value: Any) -> str:
    if not isinstance(value, Tensor):
        return str(value)
    if value.ndim > 1 or value.numel() > 8 or not values_visible(value):
        return f"<shape {tuple(value.shape)}>"
    shown = [f"{v:.4g}" for v in value.flatten().tolist()]
    return f"[{', '.join(shown)}]" if value.ndim else shown[0]


class Kernel(nn.Module):
    """A positive semidefinite function of two points, for all pairs of rows of X and Z.

    A kernel of your own overrides `_evaluate`, for inputs that are checked and have gone through `features`.
    They may be float64 where X is float32, see `keeps_digits`. It declares each of its positive parameters by
    a `Positive` in the class body and reads them by `_lift`, so that they may be batched. Searches and
    reports need nothing else:

    >>> class Cosine(Kernel):
    ...     rate = Positive("how many periods there are in one unit of the inputs")
    ...
    ...     def __init__(self, rate=1.0):
    ...         super().__init__(rate=rate)
    ...
    ...     def _evaluate(self, X, Z):
    ...         Z = X if Z is None else Z
    ...         return (self._lift("rate", X) * (X.sum(-1).unsqueeze(-1) - Z.sum(-1).unsqueeze(-2))).cos()
    >>> Cosine(torch.tensor([0.5, 2.0]))(torch.zeros(3, 1)).shape
    torch.Size([2, 3, 3])

    Args:
        features: module applied to X and Z first, (..., n, d) -> (..., n, p), and trained with the kernel. It
            may run under autocast; the kernel itself is always evaluated in the precision of X, or in float32
            where X is bfloat16 or float16.
        event_dim: number of axes of one input. For more than one, such as images, X is (..., n, *event); the
            module gets all inputs as one batch (rows, *event) and returns (rows, p). Without features they
            are flattened.
        positive: values of positive parameters by name, each stored as the parameter `log_<name>`.
    """

    settings: tuple[str, ...] = ()
    """Arguments that are chosen and not trained, such as a degree."""
    choices: tuple[Choice, ...] = ()
    """Names by which the command and the scikit-learn estimators offer this kernel."""
    _symmetric: bool = False  # whether the matrix of one set of points is known to be symmetric
    event_dim: int = 1
    """Number of axes of one input."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        overridden = {"forward", "_evaluate"} & set(vars(cls))
        if overridden and "_symmetric" not in vars(cls):
            cls._symmetric = False  # the base class knew its own matrices only
        for choice in vars(cls).get("choices", ()):
            known = KERNELS.setdefault(choice.name, choice)
            module = known.make.__module__
            if module != choice.make.__module__:
                raise ValueError(
                    f"{cls.__name__}: names of choices must not be in use, got {choice.name}, which is "
                    f"defined in {module}"
                )
            KERNELS[choice.name] = choice

    def __init__(self, *, features: Features = None, event_dim: int = 1, **positive: Values) -> None:
        super().__init__()
        self.event_dim = whole_number(self._get_name(), "event_dim", event_dim)
        if not isinstance(features, Features):
            raise TypeError(f"{self._get_name()}: features must be a Module, got {type(features).__name__}")
        self.features = features
        for name, values in positive.items():
            log = log_of(self._get_name(), name, values)
            self.register_parameter(f"log_{name}", nn.Parameter(log))

    def forward(self, X: Tensor, Z: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """Kernel matrix (..., n, m) between X (..., n, d) and Z (..., m, d), in their dtype.

        With `dtype`, X and Z, or their `features`, are converted to it and the matrix is evaluated in it.
        """
        left = self._embed("X", X)
        right = None
        if Z is not None:
            require_inputs(self._get_name(), X=X, Z=Z)
            right = self._embed("Z", Z)
            self._match(left, right)
        with full_precision(X):
            return self._evaluate_in(left, right, dtype or full_dtype(X.dtype))

    def _match(self, X: Tensor, Z: Tensor) -> None:
        """Raise unless the shapes of embedded inputs (..., n, d) and (..., m, d) match."""
        if self.is_embedding_inside:
            return  # the parts check their own inputs
        d = X.shape[-1]
        self._require(Z.shape[-1] == d, f"Z must have {d} columns to match X", Z.shape)
        self._batch(X=X.shape[:-2], Z=Z.shape[:-2])

    @property
    def input_shape(self) -> str:
        """The shape of X in words: (..., n, d), or with `event_dim` axes for each input."""
        return "(..., n, d)" if self.event_dim == 1 else f"(..., n, *event), {self.event_dim} axes an input,"

    def embed(self, X: Tensor) -> Tensor:
        """The output of `features` for X, (..., n, p); without features X itself, its inputs flattened."""
        return self._embed("X", X)

    def between(self, F: Tensor, G: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """The kernel matrix (..., n, m) of `forward`, for rows that have already gone through `embed`."""
        with full_precision(F):
            return self._evaluate_in(F, G, dtype or full_dtype(F.dtype))

    def embed_support(self, Z: Tensor) -> list[Tensor]:
        """Embedded rows of Z (..., m, d), one tensor for each part of the kernel, to be used by `against`."""
        return [Z if self._has_own_forward else self._embed("Z", Z)]

    def against(self, X: Tensor, support: Iterator[Tensor], dtype: torch.dtype) -> Tensor:
        """The kernel matrix (..., n, m) of X and Z, given `embed_support` of Z, evaluated in a dtype."""
        if self._has_own_forward:
            return self(X, next(support), dtype)
        left = self._embed("X", X)
        right = next(support)
        self._match(left, right)
        with full_precision(X):
            return self._evaluate_in(left, right, dtype)

    @property
    def _has_own_forward(self) -> bool:
        """Whether a user's kernel overrides `forward` as a whole."""
        return type(self).forward is not Kernel.forward

    def choose(self, setting: str, value: Any) -> None:
        """Change one of the `settings` in place; raises the ValueError of the constructor."""
        owner = next(kind for kind in type(self).__mro__ if "settings" in vars(kind))
        checked = owner(**{setting: value})
        setattr(self, setting, getattr(checked, setting))

    def frozen(self) -> Self:
        """A copy for inference: values instead of their logarithms, as buffers, and nothing to train."""
        twin = copy.deepcopy(self).eval().requires_grad_(False)
        for part in twin.modules():
            if isinstance(part, Kernel):
                part._fix_values()
        return twin

    def _fix_values(self) -> None:
        for stored in (self._parameters, self._buffers):
            logs = [name for name in stored if name.startswith("log_")]
            for name in logs:
                log = stored.pop(name)
                assert log is not None
                fixed = name.replace("log_", "fixed_", 1)  # where `Positive` looks for the value itself
                self.register_buffer(fixed, log.detach().double().exp())

    @property
    def is_embedding_inside(self) -> bool:
        """Whether parts of the kernel embed inputs themselves, so that `embed` returns them unchanged."""
        parts = [part for part in self.modules() if isinstance(part, Kernel) and part is not self]
        return any(part._embeds for part in parts)

    @property
    def _embeds(self) -> bool:
        return self.features is not None or self.event_dim > 1

    @property
    def operands(self) -> list["Kernel"]:
        """The kernels that this one combines, which are evaluated at the rows of `embed`; none by default."""
        return []

    def diagonal(self, X: Tensor, embedded: bool = False, dtype: torch.dtype | None = None) -> Tensor:
        """k(x_i, x_i), (..., n), without the matrix; if `embedded`, X has already gone through `embed`.

        `dtype` is as in `forward`.
        """
        F = X if embedded else self._embed("X", X)
        with full_precision(F):
            return self._diagonal_in(F, dtype or full_dtype(F.dtype))

    def _evaluate(self, X: Tensor, Z: Tensor | None) -> Tensor:
        raise NotImplementedError

    def _evaluate_in(self, X: Tensor, Z: Tensor | None, dtype: torch.dtype) -> Tensor:
        """`_evaluate` for inputs converted to a dtype; composed kernels convert after their own features."""
        return self._matrix(X.to(dtype), None if Z is None else Z.to(dtype))

    def _matrix(self, X: Tensor, Z: Tensor | None) -> Tensor:
        """`_evaluate`, with a check that a batch of parameters has given a batch of matrices."""
        K = self._evaluate(X, Z)
        batches = self._parameter_batches()
        if any(batches.values()):
            columns = X if Z is None else Z
            batch = self._batch(X=X.shape[:-2], Z=columns.shape[:-2], **batches)
            expected = (*batch, X.shape[-2], columns.shape[-2])
            if K.shape != expected:
                raise TypeError(
                    f"{self._get_name()}: _evaluate must return shape {expected}, got {tuple(K.shape)}; read "
                    "parameters by self._lift(name, X), or declare them by Positive(..., batched=False)"
                )
        return K

    def _parameter_batches(self) -> dict[str, torch.Size]:
        """Batch shapes of the positive parameters, by name."""
        batches = {}
        for name, value in self._parameters.items():
            declared = Positive.of(self, name)
            if declared is not None and value is not None:
                batches[name] = declared.batch_of(value)
        return batches

    def _diagonal_in(self, X: Tensor, dtype: torch.dtype) -> Tensor:
        """`_diagonal` for inputs converted to a dtype."""
        return self._diagonal(X.to(dtype))

    def _diagonal(self, X: Tensor) -> Tensor:
        blocks = (self._matrix(rows, None) for rows in X.split(64, dim=-2))
        return torch.cat([block.diagonal(dim1=-2, dim2=-1) for block in blocks], -1)

    @property
    def is_symmetric(self) -> bool:
        """Whether the matrix for one set of points is known to be symmetric, and so need not be checked."""
        return self._symmetric

    @property
    def keeps_digits(self) -> bool:
        """Whether the matrix of float32 rows is accurate in float32, however far from the origin they are.

        True for functions of distances. A function of inner products is nearly constant there, and the
        differences between rows are lost to rounding: machines evaluate it in float64.
        """
        return bool(self.operands) and all(kernel.keeps_digits for kernel in self.operands)

    @property
    def is_linear(self) -> bool:
        """Whether the kernel is linear in finitely many features, which `feature_map` lists."""
        return False

    def feature_map(self, X: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """F (..., n, p) with K = F F^T, for a kernel that `is_linear`; the default dtype is that of X."""
        raise NotImplementedError(f"{self._get_name()} is not linear in finitely many features")

    def extra_repr(self) -> str:
        """Current values."""
        stored = (*self._parameters, *self._buffers)
        names = [*self.settings, *(re.sub("^(log|fixed)_", "", name) for name in stored)]
        if self.event_dim > 1 and not self.is_embedding_inside:
            names.append("event_dim")
        return ", ".join(f"{name}={_show(getattr(self, name))}" for name in names)

    def __add__(self, other: object) -> "Sum":
        return Sum(self, other) if isinstance(other, Kernel) else NotImplemented

    def __radd__(self, other: object) -> "Kernel":
        return self if other == 0 else NotImplemented  # sum(kernels) starts from 0

    def __mul__(self, other: object) -> "Kernel":
        if isinstance(other, Kernel):
            return Product(self, other)
        return Scaled(self, other) if isinstance(other, float | int | Tensor) else NotImplemented

    __rmul__ = __mul__

    def _require(self, holds: bool, expected: str, shape: torch.Size) -> None:
        if not holds:
            raise ValueError(f"{self._get_name()}: {expected}, got shape {tuple(shape)}")

    def _batch(self, **shapes: torch.Size) -> torch.Size:
        try:
            return broadcast_shapes(*shapes.values())
        except RuntimeError:
            received = ", ".join(f"{name} {tuple(shape)}" for name, shape in shapes.items())
            raise ValueError(f"{self._get_name()}: batch shapes must broadcast, got {received}") from None

    def _lift(self, name: str, X: Tensor) -> Tensor:
        """A parameter of batch shape (...) as (..., 1, 1), in the dtype of X."""
        value = getattr(self, name)
        self._batch(**{"X": X.shape[:-2], name: value.shape})
        return value.to(X.dtype).unsqueeze(-1).unsqueeze(-1)

    def _embed(self, name: str, X: Tensor) -> Tensor:
        require_inputs(self._get_name(), **{name: X})
        csr.require_layout(self._get_name(), name, X)
        event = self.event_dim
        self._require(X.ndim > event, f"{name} must have shape {self.input_shape}", X.shape)
        for tensor in (*self._parameters.values(), *self._buffers.values()):
            if tensor is not None and tensor.device != X.device:
                raise ValueError(
                    f"{self._get_name()}: {name} must be on the device of the kernel, {tensor.device}, "
                    f"got {X.device}; move the kernel, e.g. kernel.to({name}.device)"
                )
        dtype = full_dtype(X.dtype)
        if self.features is None:
            if (event == 1 and X.dtype == dtype) or self.is_embedding_inside:
                return X
            return X.flatten(-event).to(dtype)
        if event == 1:
            F = self.features(X)
            n = X.shape[-2]
            self._require(F.ndim >= 2 and F.shape[-2] == n, f"features must return (..., {n}, p)", F.shape)
            return F.to(dtype)
        rows = X.flatten(0, -event - 1)  # one batch, as convolutions need
        F = self.features(rows)
        n = len(rows)
        self._require(F.ndim == 2 and len(F) == n, f"features must return ({n}, p)", F.shape)
        return F.to(dtype).unflatten(0, X.shape[:-event])


def _event_dim(name: str, kernels: Sequence[Kernel], features: Features, event_dim: int | None) -> int:
    """The event_dim of a composed kernel: that given for its features, or that of its parts."""
    if not all(isinstance(kernel, Kernel) for kernel in kernels):
        types = [type(kernel).__name__ for kernel in kernels]
        raise TypeError(f"{name}: kernels must be torchloo kernels, got {types}")
    inner = [kernel.event_dim for kernel in kernels]
    expected = 1 if features is not None or not inner else inner[0]
    if any(dim != expected for dim in inner):
        after = " after features" if features is not None else ""
        raise ValueError(
            f"{name}: kernels must take inputs of one shape{after}, event_dim {expected}, got {inner}"
        )
    if features is None and event_dim not in (None, expected):
        raise ValueError(f"{name}: event_dim must be that of the kernels, {expected}, got {event_dim}")
    return expected if event_dim is None else event_dim


class Scaled(Kernel):
    """scale * kernel, scale > 0 of shape (...)."""

    _symmetric = True
    scale = Positive("the weight of this part of the kernel")

    def __init__(
        self,
        kernel: Kernel,
        scale: Values,
        *,
        features: Features = None,
        event_dim: int | None = None,
    ) -> None:
        events = _event_dim("Scaled", [kernel], features, event_dim)
        super().__init__(features=features, event_dim=events, scale=scale)
        self.kernel = kernel

    def _evaluate(self, X: Tensor, Z: Tensor | None) -> Tensor:
        return self._evaluate_in(X, Z, full_dtype(X.dtype))

    def _evaluate_in(self, X: Tensor, Z: Tensor | None, dtype: torch.dtype) -> Tensor:
        K = self.kernel(X, Z, dtype)
        return self._lift("scale", K) * K

    def embed_support(self, Z: Tensor) -> list[Tensor]:
        """See `Kernel.embed_support`."""
        return self.kernel.embed_support(self._embed("Z", Z))

    def against(self, X: Tensor, support: Iterator[Tensor], dtype: torch.dtype) -> Tensor:
        """See `Kernel.against`."""
        K = self.kernel.against(self._embed("X", X), support, dtype)
        return self._lift("scale", K) * K

    def _diagonal_in(self, X: Tensor, dtype: torch.dtype) -> Tensor:
        k = self.kernel.diagonal(X, dtype=dtype).unsqueeze(-1)
        return (self._lift("scale", k) * k)[..., 0]

    @property
    def operands(self) -> list[Kernel]:
        """The kernel that is scaled."""
        return [self.kernel]

    @property
    def is_symmetric(self) -> bool:
        """Whether the kernel is."""
        return self._symmetric and self.kernel.is_symmetric

    @property
    def is_linear(self) -> bool:
        """Whether the kernel is."""
        return self.kernel.is_linear

    def feature_map(self, X: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """sqrt(scale) times the features of the kernel."""
        F = self.kernel.feature_map(self._embed("X", X), dtype)
        return self._lift("scale", F).sqrt() * F


class _Composite(Kernel):
    """Several kernels whose matrices are combined elementwise; each may have features of its own."""

    _symmetric = True
    _combine: Callable[[Any, Any], Any]

    def __init__(self, *kernels: Kernel, features: Features = None, event_dim: int | None = None) -> None:
        name = type(self).__name__
        super().__init__(features=features, event_dim=_event_dim(name, kernels, features, event_dim))
        self.kernels: Any = nn.ModuleList(kernels)

    def _evaluate(self, X: Tensor, Z: Tensor | None) -> Tensor:
        return self._evaluate_in(X, Z, full_dtype(X.dtype))

    def _combined(self, values: Callable[[Kernel], Tensor]) -> Tensor:
        """The values for each kernel, combined; one at a time, so that no list of matrices is kept."""
        return functools.reduce(self._combine, map(values, self.kernels))

    def _evaluate_in(self, X: Tensor, Z: Tensor | None, dtype: torch.dtype) -> Tensor:
        return self._combined(lambda kernel: kernel(X, Z, dtype))

    def embed_support(self, Z: Tensor) -> list[Tensor]:
        """See `Kernel.embed_support`."""
        F = self._embed("Z", Z)
        return [rows for kernel in self.kernels for rows in kernel.embed_support(F)]

    def against(self, X: Tensor, support: Iterator[Tensor], dtype: torch.dtype) -> Tensor:
        """See `Kernel.against`."""
        F = self._embed("X", X)
        return self._combined(lambda kernel: kernel.against(F, support, dtype))

    def _diagonal_in(self, X: Tensor, dtype: torch.dtype) -> Tensor:
        return self._combined(lambda kernel: kernel.diagonal(X, dtype=dtype))

    @property
    def operands(self) -> list[Kernel]:
        """The kernels that are combined."""
        return list(self.kernels)

    @property
    def is_symmetric(self) -> bool:
        """Whether all of the kernels are."""
        return self._symmetric and all(kernel.is_symmetric for kernel in self.kernels)


class Sum(_Composite):
    """k1 + k2 + ...; each kernel may have features of its own, applied after those of the sum."""

    _combine = staticmethod(operator.add)

    @property
    def is_linear(self) -> bool:
        """Whether all of the kernels are."""
        return all(kernel.is_linear for kernel in self.kernels)

    def feature_map(self, X: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """The features of the kernels side by side."""
        X = self._embed("X", X)
        maps = [kernel.feature_map(X, dtype) for kernel in self.kernels]
        batch = broadcast_shapes(*(F.shape[:-2] for F in maps))
        expanded_maps = [F.expand(*batch, *F.shape[-2:]) for F in maps]
        return torch.cat(expanded_maps, dim=-1)


class Product(_Composite):
    """k1 * k2 * ..., elementwise; features as in Sum."""

    _combine = staticmethod(operator.mul)


class _Call(nn.Module):
    """A method of a kernel as the forward of a module."""

    def __init__(self, kernel: Kernel, method: str) -> None:
        super().__init__()
        self.kernel, self.method = kernel, method

    def forward(self, *inputs: Any) -> Tensor:
        """The result of the method."""
        return getattr(self.kernel, self.method)(*inputs)


def pure(kernel: Kernel, method: str) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """A method of a kernel as a function (parameters, *inputs), and the current parameters of the kernel.

    Buffers keep their current values, even if the kernel changes later.
    """
    module = _Call(kernel, method)
    parameters: dict[str, Tensor] = dict(module.named_parameters())
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}

    def evaluate(values: Sequence[Tensor], *inputs: Any) -> Tensor:
        named = dict(zip(parameters, values, strict=True))
        return functional_call(module, buffers | named, inputs)

    return evaluate, list(parameters.values())
