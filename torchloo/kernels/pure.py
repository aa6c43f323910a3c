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


def pure(kernel: Kernel, method: str) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """A method of a kernel as a function (parameters, *inputs), and the parameters that it has now.

    Buffers stay as they are now, whatever becomes of the kernel.
    """
    module = _Call(kernel, method)
    names, parameters = [], list[Tensor]()
    for name, parameter in module.named_parameters():
        names.append(name)
        parameters.append(parameter)
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}

    def evaluate(given: Sequence[Tensor], *inputs: Any) -> Tensor:
        return functional_call(module, buffers | dict(zip(names, given, strict=True)), inputs)

    return evaluate, parameters
