"""Kernels as functions of their parameters, to be evaluated again with other values of them."""

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
