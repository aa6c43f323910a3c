"""Fake CUDA tensors on a torch built without CUDA: every tensor has a device, none has values.

Without CUDA, some bindings of torch ask for a CUDA device guard before they dispatch; the mode below
takes the same operations by a way that does not.
"""

import contextlib
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode


def _parts(tensor: Tensor, index: Any) -> Tensor:
    """tensor[index] by views and one gather."""
    index = list(index) if isinstance(index, tuple) else [index]
    if any(part is Ellipsis for part in index):
        place = next(k for k, part in enumerate(index) if part is Ellipsis)
        named = sum(part is not None for part in index) - 1
        index[place : place + 1] = [slice(None)] * (tensor.ndim - named)
    gathers: list[Tensor | None] = []
    for part in index:
        axis = len(gathers)
        if isinstance(part, int):
            tensor = tensor.select(axis, part)
            continue
        if part is None:
            tensor = tensor.unsqueeze(axis)
        elif isinstance(part, slice):
            start, stop, _ = part.indices(tensor.shape[axis])
            tensor = tensor.narrow(axis, start, max(0, stop - start))
        gathers.append(part if isinstance(part, Tensor) else None)
    if any(part is not None for part in gathers):
        return torch.ops.aten.index.Tensor(tensor, gathers)
    return tensor


class _WithoutDeviceGuards(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.__getitem__:
            return _parts(*args)
        if func is Tensor.__setitem__:
            _parts(args[0], args[1]).add_(args[2])  # no values: any operation in place will do
            return None
        if func is Tensor.__invert__:
            return torch.logical_not(args[0])
        if func is Tensor.contiguous:
            return args[0].clone(memory_format=torch.contiguous_format)
        if func is Tensor.to and len(args) > 1 and isinstance(args[1], str | torch.device):
            return torch.ops.aten._to_copy(args[0], device=torch.device(args[1]))
        return func(*args, **kwargs)


@contextlib.contextmanager
def fake_cuda():
    """A context in which device "cuda" is there, without values and without gradients."""
    with FakeTensorMode(), torch.no_grad(), _WithoutDeviceGuards():
        yield
