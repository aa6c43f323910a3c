"""Input checks: shapes and dtypes at once, values of one call in a single synchronisation."""

import numbers
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

__all__ = [
    "Guard",
    "broadcast_shapes",
    "host_labels",
    "is_whole",
    "require_floating",
    "values_visible",
    "whole_number",
]

_FLOATING = (torch.float32, torch.float64)


def values_visible(*tensors: Tensor) -> bool:
    """True where the values can be looked at.

    Not so on meta and fake tensors, inside torch.func transforms and under torch.compile.
    """
    if torch.compiler.is_compiling() or torch._C._functorch.maybe_current_level() is not None:
        return False
    legacy = torch._C._functorch.is_legacy_batchedtensor  # autograd.grad(..., is_grads_batched=True)
    return not any(t.is_meta or isinstance(t, FakeTensor) or legacy(t) for t in tensors)


def require_floating(function: str, **tensors: Tensor) -> None:
    """Raise TypeError unless every argument is a float32 or float64 tensor of one dtype and device."""
    first_name, first = next(iter(tensors.items()))
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{function}: {name} must be a torch tensor, got {type(tensor).__name__}")
        if tensor.dtype not in _FLOATING:
            raise TypeError(
                f"{function}: {name} must be float32 or float64, got {tensor.dtype}; "
                f"convert it, e.g. {name}.double()"
            )
        if tensor.dtype != first.dtype:
            raise TypeError(
                f"{function}: {name} must have the dtype of {first_name}, {first.dtype}, got {tensor.dtype}"
            )
        if tensor.device != first.device:
            raise ValueError(
                f"{function}: {name} must be on the device of {first_name}, {first.device}, "
                f"got {tensor.device}"
            )


def broadcast_shapes(*shapes: tuple[int, ...]) -> torch.Size:
    """As `torch.broadcast_shapes`, whose first call takes half a second to import what it does not need."""
    return torch.broadcast_tensors(*(torch.empty(shape, device="meta") for shape in shapes))[0].shape


def is_whole(value: object) -> bool:
    """Whether a value is a whole number, of Python or of NumPy; True and False are none."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def whole_number(function: str, name: str, value: Any, least: int = 1) -> int:
    """A whole number that is large enough."""
    if not is_whole(value) or value < least:
        raise ValueError(f"{function}: {name} must be a whole number, {least} or more, got {value!r}")
    return int(value)


def host_labels(function: str, clusters: object, rows: int) -> np.ndarray:
    """Cluster labels as an int64 array (n,); they decide shapes, so they live on the host."""
    try:
        labels = clusters.detach().cpu().numpy() if isinstance(clusters, Tensor) else np.asarray(clusters)
    except ValueError:
        raise TypeError(f"{function}: clusters must be integer labels (n,), got a ragged list") from None
    if labels.dtype.kind not in "iu":
        raise TypeError(f"{function}: clusters must be integer labels, got {labels.dtype}")
    if labels.shape != (rows,):
        raise ValueError(
            f"{function}: clusters must hold one label for each of the {rows} rows, got shape {labels.shape}"
        )
    return labels.astype(np.int64)


class Guard:
    """Gathers the checks of values of one call, so that a GPU is waited for only once.

    Flags are 0-dimensional boolean tensors on the device of the data; `check` looks at all of
    them together and raises ValueError with the first message that applies.
    """

    def __init__(self, function: str) -> None:
        self.function = function
        self._flags: list[Tensor] = []
        self._messages: list[Callable[[], str]] = []

    def require(self, flag: Tensor, message: str | Callable[[], str]) -> None:
        """Demand that a boolean tensor holds everywhere; the message says what else is wrong.

        One that has to look at values is a function, called only where the demand does not hold.
        """
        if values_visible(flag):
            self._flags.append(flag.detach().all())
            self._messages.append(message if callable(message) else lambda: message)

    def finite(self, **tensors: Tensor) -> None:
        """Demand that no entry is NaN or infinite."""
        for name, tensor in tensors.items():
            # A NaN or infinity makes the sum one too: no boolean copy of a large matrix is needed.
            entries = tensor.values() if tensor.layout == torch.sparse_csr else tensor
            total = entries.detach().sum(dtype=torch.float64)
            self.require(total.isfinite(), f"{name} must be finite, got NaN or infinity")

    def symmetric(self, **matrices: Tensor) -> None:
        """Demand finite, symmetric matrices (..., n, n), by comparing K v and K^T v for one v."""
        for name, matrix in matrices.items():
            K = matrix.detach()
            n = K.shape[-1]
            v = torch.arange(n, dtype=K.dtype, device=K.device).cos()
            Kv = K @ v
            gap = (Kv - K.mT @ v).abs().amax(-1)
            self.require(gap.isfinite(), f"{name} must be finite, got NaN or infinity")
            size = Kv.abs().amax(-1) + K.diagonal(dim1=-2, dim2=-1).abs().amax(-1)
            limit = n * torch.finfo(K.dtype).eps * size  # what summing in another order may change
            self.require(gap <= limit, f"{name} must be symmetric, but differs from its transpose")

    def positive(self, **tensors: Tensor | float) -> None:
        """Demand that every entry is positive and finite."""
        for name, value in tensors.items():
            if isinstance(value, Tensor):
                flag = (value > 0) & (value < torch.inf)
                self.require(flag, partial(_with_entry, f"{name} must be positive and finite", value, flag))
            elif not isinstance(value, numbers.Real) or not 0 < value < float("inf"):
                raise ValueError(f"{self.function}: {name} must be positive and finite, got {value}")

    def two_classes(self, **labels: Tensor) -> None:
        """Demand labels -1 and +1, both of them in every column of (..., n, c); a column without is named."""
        for name, y in labels.items():
            self.require(y.abs() == 1, f"{name} must hold labels -1 and +1 only")
            both = (y > 0).any(-2) & (y < 0).any(-2)  # (..., c)
            self.require(both, partial(_with_column, f"{name} must hold both classes, got one only", both))

    def check(self) -> None:
        """Raise for the first demand that does not hold."""
        self._look([])

    def asks(self, question: Tensor) -> bool:
        """Whether a boolean tensor holds everywhere, seen in one synchronisation with `check`."""
        return self._look([question.detach().all()])[0]

    def answers(self, *questions: Tensor) -> list[bool]:
        """`asks` for several questions at once."""
        return [bool(answer) for answer in self._look([question.detach().all() for question in questions])]

    def _look(self, questions: list[Tensor]) -> list[bool]:
        """The values of 0-dimensional flags, once every demand was seen to hold."""
        flags, messages = [*self._flags, *questions], self._messages
        self._flags, self._messages = [], []
        if not flags:
            return []
        values = torch.stack([flag.to(flags[0].device) for flag in flags]).tolist()
        for held, message in zip(values, messages, strict=False):
            if not held:
                raise ValueError(f"{self.function}: {message()}")
        return values[len(messages) :]


def _with_entry(message: str, value: Tensor, held: Tensor) -> str:
    """The message with the first entry that does not hold, and its place."""
    place = tuple((~held).nonzero()[0].tolist())
    return f"{message}, got {value.detach()[place].item():.4g}" + (f" at {place}" if place else "")


def _with_column(message: str, held: Tensor) -> str:
    """The message and the first of several columns of (..., c) that does not hold."""
    columns = held.reshape(-1, held.shape[-1]).all(0).tolist()
    return f"{message} in column {columns.index(False)}" if len(columns) > 1 else message
