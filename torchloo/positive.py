"""Positive parameters of kernels and machines, each declared once, on its class."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, Self, overload

import torch
from torch import Tensor, nn

from torchloo.guards import Guard

__all__ = ["Positive", "Values", "log_of"]

Values = float | Sequence[float] | Tensor


def log_of(function: str, name: str, values: Values) -> Tensor:
    """Logarithms in float64 of values checked to be positive and finite."""
    if isinstance(values, Tensor):  # stays on its device, whatever the default device
        tensor = values.detach().double()
    else:
        try:
            tensor = torch.as_tensor(values, dtype=torch.float64)
        except (TypeError, ValueError, RuntimeError):
            raise TypeError(
                f"{function}: {name} must be a positive number or a tensor of them, got {values!r}"
            ) from None
    guard = Guard(function)
    guard.positive(**{name: values if isinstance(values, float | int) else tensor})
    guard.check()
    return tensor.log()


class Positive:
    """The declaration of a positive parameter, ``rate = Positive("...")`` in the body of a class.

    Searches, the command and its report read the declaration. The instance stores the logarithm, `log_rate`;
    ``kernel.rate`` is the value, exp(log_rate), and ``Kernel.rate`` the declaration itself.

    Args:
        meaning: a short explanation for reports.
        start: the start of a search; None for the current value. For a kernel, a function (Z, each) of rows
            Z (m, d) in float64 that returns a positive number (), or, if `each` is True, one for each input,
            (d,). For a machine, a function of the regularisation () of Note [first start] in
            search/starts.py.
        unit: "inputs" for a value that scales with the inputs, such as a distance.
        per_input: whether shape (d,) is one value for each input; a batch then has the shape (..., 1) or
            (..., d). Otherwise a single kernel has the shape () and a batch (...).
        batched: whether a batch of values gives a batch of matrices, which a search over several starts
            uses; otherwise they are evaluated one after another.
    """

    def __init__(
        self,
        meaning: str,
        start: Callable[..., Tensor] | None = None,
        *,
        unit: Literal["", "inputs"] = "",
        per_input: bool = False,
        batched: bool = True,
    ) -> None:
        self.meaning = meaning
        self.start = start
        self.unit = unit
        self.per_input, self.batched = per_input, batched
        self.name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name
        self.__doc__ = f"exp(log_{name}): {self.meaning}."

    @overload
    def __get__(self, module: None, owner: type) -> Self: ...

    @overload
    def __get__(self, module: nn.Module, owner: type) -> Tensor: ...

    def __get__(self, module: nn.Module | None, owner: type) -> Any:
        if module is None:
            return self
        fixed = module._buffers.get(f"fixed_{self.name}")  # of a frozen kernel
        return getattr(module, f"log_{self.name}").exp() if fixed is None else fixed

    @staticmethod
    def of(module: nn.Module, leaf: str) -> "Positive | None":
        """The declaration of the parameter `leaf`, such as log_rate, of a module; None if there is none."""
        declared = getattr(type(module), leaf.removeprefix("log_"), None)
        return declared if leaf.startswith("log_") and isinstance(declared, Positive) else None

    def batch_of(self, value: Tensor) -> torch.Size:
        """The batch shape of a value: all but the axis of the inputs."""
        return value.shape[:-1] if self.per_input else value.shape
