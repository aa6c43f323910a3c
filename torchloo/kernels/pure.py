"""Kernels as functions of their parameters, which can be evaluated again with others in their place."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from torchloo.kernels.kernel import Kernel

__all__ = ["pure"]


class _Call(nn.Module):
    """A method of a kernel as the forward of a module."""

    def __init__(self, kernel: Kernel, method: str) -> None:
        super().__init__()
        self.kernel, self.method = kernel, method

    def forward(self, *inputs: Any) -> Tensor:
        """What the method gives."""
        return getattr(self.kernel, self.method)(*inputs)


def pure(kernel: Kernel, source: Kernel, method: str) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """A method of a kernel as a function (tensors, *inputs), and the tensors that it has in `source`.

    `kernel` is left as it is; where its parameters may change before the function is called, give a copy.
    """
    names: list[str] = []
    tensors: list[Tensor] = []
    for name, parameter in source.named_parameters(prefix="kernel"):
        names.append(name)
        tensors.append(parameter)
    module = _Call(kernel, method)

    def evaluate(given: Sequence[Tensor], *inputs: Any) -> Tensor:
        return functional_call(module, dict(zip(names, given, strict=True)), inputs)

    return evaluate, tensors
