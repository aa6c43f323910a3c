"""Input checks: shapes and dtypes at once, values of one call in a single synchronisation."""

import math
import numbers
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

__all__ = [
    "Guard",
    "broadcast_shapes",
    "expanded",
    "full_dtype",
    "host_labels",
    "is_whole",
    "may_look",
    "on_host",
    "refuse_text",
    "require_floating",
    "require_inputs",
    "values_visible",
    "warn_of_cut_graph",
    "whole_number",
]

_FLOATING = (torch.float32, torch.float64)
_HALF = (torch.bfloat16, torch.float16)
_READ_AT_NO_COST = {"cpu"}


def values_visible(*tensors: Tensor) -> bool:
    """Whether the values of tensors can be read.

    Not on meta and fake tensors, inside torch.func transforms, in forward mode and under torch.compile.
    """
    if torch.compiler.is_compiling() or torch._C._functorch.maybe_current_level() is not None:
        return False
    if forward_ad._current_level >= 0:
        return False
    for t in tensors:  # legacy batches come with autograd.grad(..., is_grads_batched=True)
        if t.is_meta or isinstance(t, FakeTensor) or torch._C._functorch.is_legacy_batchedtensor(t):
            return False
    return True


def may_look(x: Tensor) -> bool:
    """Whether values of x can be read without waiting, as on a CPU, but not on an accelerator."""
    return x.device.type in _READ_AT_NO_COST


def warn_of_cut_graph(reason: str, *inputs: object, stacklevel: int) -> None:
    """Warn the caller if inputs require a gradient that the result will not propagate."""
    if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in inputs):
        warnings.warn(reason, stacklevel=stacklevel + 1)


def full_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for bfloat16 and float16; any other dtype unchanged."""
    return torch.float32 if dtype in _HALF else dtype


def require_floating(function: str, **tensors: Tensor) -> None:
    """Raise TypeError unless every argument is a float32 or float64 tensor of one dtype and device."""
    _require_alike(function, tensors, half=False)


def require_inputs(function: str, **tensors: Tensor) -> None:
    """The same for inputs and targets, where bfloat16 and float16 count as float32."""
    _require_alike(function, tensors, half=True)


def _require_alike(function: str, tensors: dict[str, Tensor], half: bool) -> None:
    first = ""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{function}: {name} must be a torch tensor, got {type(tensor).__name__}")
        dtype = full_dtype(tensor.dtype) if half else tensor.dtype
        if dtype not in _FLOATING:
            raise TypeError(
                f"{function}: {name} must be float32 or float64, got {tensor.dtype}; "
                f"convert it, e.g. {name}.double()"
            )
        if not first:
            first, expected, device = name, dtype, tensor.device
        elif dtype != expected:
            raise TypeError(
                f"{function}: {name} must have the dtype of {first}, {expected}, got {tensor.dtype}"
            )
        elif tensor.device != device:
            raise ValueError(
                f"{function}: {name} must be on the device of {first}, {device}, got {tensor.device}"
            )


def broadcast_shapes(*shapes: tuple[int, ...]) -> torch.Size:
    """As `torch.broadcast_shapes`, whose first call takes half a second for imports it does not need."""
    if not any(shapes):
        return torch.Size()
    sizes = [1] * max(map(len, shapes))
    for shape in shapes:
        for axis in range(-len(shape), 0):
            if sizes[axis] == 1:
                sizes[axis] = shape[axis]
            elif shape[axis] not in (1, sizes[axis]):
                raise RuntimeError(f"shapes do not broadcast: {', '.join(map(str, map(tuple, shapes)))}")
    return torch.Size(sizes)


def expanded(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The tensor in a larger shape; itself if it has that shape, which saves the graph a node."""
    return tensor if tensor.shape == shape else tensor.expand(shape)


def is_whole(value: object) -> bool:
    """Whether a value is an integer of Python or NumPy, but not a bool."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def whole_number(function: str, name: str, value: Any, least: int = 1) -> int:
    """The value as an int; ValueError unless it is an integer of at least `least`."""
    if not is_whole(value) or value < least:
        raise ValueError(f"{function}: {name} must be a whole number, {least} or more, got {value!r}")
    return int(value)


def on_host(values: object) -> np.ndarray:
    """Numbers as an array on the host."""
    if not isinstance(values, Tensor):
        return np.asarray(values)
    if torch.compiler.is_compiling():
        return values.detach().cpu().numpy()
    with torch._C._DisableFuncTorch():  # whose transforms hide the values of all that operations return
        return values.detach().cpu().numpy()


def refuse_text(function: str, **labels: object) -> None:
    """Raise TypeError where labels, other than tensors, are text or other objects."""
    for name, values in labels.items():
        if not isinstance(values, Tensor) and (dtype := np.asarray(values).dtype).kind in "USTO":
            raise TypeError(
                f"{function}: {name} must be integer labels, got {dtype}; number them, e.g. "
                f"np.unique({name}, return_inverse=True)[1]"
            )


def host_labels(function: str, clusters: object, rows: int, name: str = "clusters") -> np.ndarray:
    """Labels of rows as an int64 array (n,), on the host, since shapes depend on them."""
    try:
        labels = on_host(clusters)
    except ValueError:
        raise TypeError(f"{function}: {name} must be integer labels (n,), got a ragged list") from None
    if clusters is None:
        raise TypeError(f"{function}: {name} must be integer labels, got None; use loo")
    refuse_text(function, **{name: labels})
    if labels.dtype.kind not in "iu":
        raise TypeError(f"{function}: {name} must be integer labels, got {labels.dtype}")
    if labels.shape != (rows,):
        raise ValueError(
            f"{function}: {name} must hold one label for each of the {rows} rows, got shape {labels.shape}"
        )
    return labels.astype(np.int64)


class _Demand(NamedTuple):
    """A condition on a number, and the message if it does not hold."""

    number: Tensor | None
    """None for the sum of a tensor that must be finite."""
    holds: Callable[[float], bool]
    message: str | Callable[[], str]
    about: Tensor | None = None
    """The tensor that must be finite, if that is the condition."""

    def value(self) -> Tensor:
        """The number, computed if necessary."""
        if self.number is not None:
            return self.number
        assert self.about is not None
        return _total(self.about)


class Guard:
    """Collects the checks of values of one call, so that a GPU is synchronised only once.

    Each check reduces a tensor to one number, which stays on the device of the data; `check` reads all
    numbers together and raises ValueError with the first message that applies. Details of the message are
    computed only then.

    Args:
        function: name of the function for errors.
        symmetric: whether kernel matrices of this call are symmetric by construction.
        wide: whether matrices may be float64 if targets are float32, as a machine may evaluate its kernel.
    """

    def __init__(self, function: str, symmetric: bool = False, wide: bool = False) -> None:
        self.function, self.wide = function, wide
        self._symmetric = symmetric
        self._demands: list[_Demand] = []
        self._proofs: list[tuple[Tensor, tuple[Tensor, ...]]] = []

    def expect(
        self, number: Tensor, holds: Callable[[float], bool], message: str | Callable[[], str]
    ) -> None:
        """Require that `holds` is true for a 0-dimensional tensor; otherwise the message is raised.

        A message that depends on values is a function, called only if the condition does not hold.
        """
        if values_visible(number):
            self._demands.append(_Demand(number, holds, message))

    def require(self, flag: Tensor, message: str | Callable[[], str]) -> None:
        """Require that a boolean tensor is True everywhere; the message is as in `expect`."""
        self.expect(_constant(flag).all(), bool, message)

    def finite(self, **tensors: Tensor) -> None:
        """Require that no entry is NaN or infinite."""
        for name, tensor in tensors.items():
            self.expect_finite(tensor, _not_finite(name))

    def expect_finite(self, tensor: Tensor, message: str | Callable[[], str]) -> None:
        """The same for one tensor; the message is as in `expect`."""
        for demand in self._demands:
            if demand.about is tensor:
                return
        if values_visible(tensor):
            self._demands.append(_Demand(None, math.isfinite, message, tensor))

    def implied(self, result: Tensor, *tensors: Tensor) -> None:
        """Check a result that is finite only if these tensors are, instead of the tensors themselves."""
        if self._demands:
            self._proofs.append((_total(result), tensors))

    def symmetric(self, **matrices: Tensor) -> None:
        """Require finite, symmetric matrices (..., n, n), by comparing K v and K^T v for one v."""
        for name, matrix in matrices.items():
            if values_visible(matrix):
                K = _constant(matrix)
                message = partial(_not_symmetric, name, K)
                self._demands.append(_Demand(_asymmetry(K), _is_no_excess, message))

    def kernel_matrix(self, **matrices: Tensor) -> None:
        """Require finite matrices (..., n, n), and symmetric ones unless they are so by construction."""
        (self.finite if self._symmetric else self.symmetric)(**matrices)

    def positive(self, **tensors: Tensor | float) -> None:
        """Require that every entry is positive and finite."""
        for name, value in tensors.items():
            if isinstance(value, Tensor):
                entries = _constant(value)
                if values_visible(entries) and entries.numel():
                    message = partial(_not_positive, name, entries)
                    for extreme in entries.aminmax() if entries.ndim else (entries,):
                        self._demands.append(_Demand(extreme, _is_positive, message))
            elif not isinstance(value, numbers.Real) or not _is_positive(value):
                raise ValueError(f"{self.function}: {name} must be positive and finite, got {value}")

    def two_classes(self, **labels: Tensor) -> None:
        """Require labels -1 and +1, both of them in every column of (..., n, c)."""
        for name, y in labels.items():
            self.require(y.abs() == 1, partial(_not_labels, name, y))
            both = (y > 0).any(-2) & (y < 0).any(-2)  # (..., c)
            self.require(both, partial(_with_column, f"{name} must hold both classes, got one only", both))

    def factored(self, info: Tensor, message: str) -> None:
        """Require that all factorisations succeeded, by the `info` of `torch.linalg.cholesky_ex`."""
        self.expect(_largest(info), lambda failed: failed == 0, message)

    def check(self) -> None:
        """Raise for the first condition that does not hold."""
        self.read()

    def read_flag(self, question: Tensor) -> bool:
        """Whether a boolean tensor is True everywhere, read in one synchronisation with `check`."""
        return bool(self.read(_constant(question).all())[0])

    def largest(self, *tensors: Tensor) -> list[float]:
        """The largest entry of each tensor, read in one synchronisation with `check`; NaN if there is one."""
        return self.read(*(_largest(_constant(tensor)) for tensor in tensors))

    def read(self, *questions: Tensor) -> list[float]:
        """The values of 0-dimensional tensors, read in one synchronisation with `check`."""
        demands, proofs = self._demands, self._proofs
        if not (demands or questions):
            return []
        self._demands, self._proofs = [], []
        implied = {id(tensor) for _, tensors in proofs for tensor in tensors}
        first = [demand for demand in demands if id(demand.about) not in implied]
        first += [_Demand(total, math.isfinite, "") for total, _ in proofs]
        values = _values([*(demand.value() for demand in first), *questions])
        for demand, value in zip(first, values, strict=False):
            if not demand.holds(value):
                self._raise_first(demands)
                break
        return values[len(first) :]

    def _raise_first(self, demands: list[_Demand]) -> None:
        values = _values([demand.value() for demand in demands])
        for demand, value in zip(demands, values, strict=True):
            if not demand.holds(value):
                message = demand.message() if callable(demand.message) else demand.message
                raise ValueError(f"{self.function}: {message}")


def _values(numbers: list[Tensor]) -> list[float]:
    """The values of 0-dimensional tensors, at least one, in one synchronisation."""
    device = numbers[0].device
    return torch.stack([t if t.device == device else t.to(device) for t in numbers]).tolist()


def _total(tensor: Tensor) -> Tensor:
    """The sum, which is not finite if an entry is not: no boolean copy of a large matrix is needed."""
    entries = tensor.values() if tensor.layout == torch.sparse_csr else tensor
    return _constant(entries).sum(dtype=torch.float64)


def _largest(tensor: Tensor) -> Tensor:
    return tensor.amax() if tensor.ndim else tensor


def _constant(tensor: Tensor) -> Tensor:
    """The tensor outside of any graph."""
    return tensor.detach() if tensor.requires_grad else tensor


def _is_positive(value: float) -> bool:
    return 0 < value < math.inf


def _is_no_excess(value: float) -> bool:
    return -math.inf < value <= 0


def _asymmetry(K: Tensor) -> Tensor:
    """The difference of K v and K^T v beyond the rounding of sums in another order: at most 0 if K = K^T."""
    n = K.shape[-1]
    v = torch.arange(n, dtype=K.dtype, device=K.device).cos_()
    Kv = K @ v
    vectors = (Kv - K.mT @ v, Kv, K.diagonal(dim1=-2, dim2=-1))
    gap, size, diagonal = (torch.linalg.vector_norm(t, torch.inf, dim=-1) for t in vectors)
    rounding = n * torch.finfo(K.dtype).eps
    return torch.sub(gap, size + diagonal, alpha=rounding).amax()


def _not_finite(name: str) -> str:
    return f"{name} must be finite, got NaN or infinity"


def _not_symmetric(name: str, K: Tensor) -> str:
    symmetric = f"{name} must be symmetric, but differs from its transpose"
    if K.sum(dtype=torch.float64).isfinite():
        return symmetric
    return _not_finite(name)


def _not_positive(name: str, value: Tensor) -> str:
    return _with_entry(f"{name} must be positive and finite", value, (value > 0) & (value < torch.inf))


def _with_entry(message: str, value: Tensor, held: Tensor) -> str:
    """The message with the first invalid entry and its position."""
    place = tuple((~held).nonzero()[0].tolist())
    return f"{message}, got {value.detach()[place].item():.4g}" + (f" at {place}" if place else "")


def _not_labels(name: str, y: Tensor) -> str:
    """What is wrong with labels that are not all -1 or +1."""
    other = y[y.abs() != 1][0].item()
    return f"{name} must hold labels -1 and +1 only, got {other:.4g}; class labels must be integers"


def _with_column(message: str, held: Tensor) -> str:
    """The message with the first invalid one of several columns of (..., c)."""
    columns = held.reshape(-1, held.shape[-1]).all(0).tolist()
    return f"{message} in column {columns.index(False)}" if len(columns) > 1 else message
