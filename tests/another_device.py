"""A device in Python: its tensors compute on the CPU and refuse to meet tensors of another device.

It finds what a GPU would find, a tensor made on the wrong device, with values and with gradients. To be used
in a process of its own, since a device stays registered.
"""

import contextlib
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_setup_privateuseone_for_python_backend("elsewhere")
DEVICE = torch.device("elsewhere:0")

# Operations that may bring devices together: copies, and an index by a CPU tensor, which torch allows.
_MEETINGS = {"_to_copy", "copy_", "index", "index_put", "index_put_", "_index_put_impl_"}


class Elsewhere(Tensor):
    """A tensor that says it is on DEVICE and holds its values on the CPU."""

    @staticmethod
    def __new__(cls, values: Tensor) -> "Elsewhere":
        return Tensor._make_wrapper_subclass(
            cls,
            values.shape,
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=DEVICE,
        )

    def __init__(self, values: Tensor) -> None:
        self.values = values

    def tolist(self) -> Any:
        return self.values.tolist()

    def __repr__(self) -> str:
        return f"Elsewhere({self.values!r})"

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(function, *args, **(kwargs or {}))


def _computed(function: Any, *args: Any, **kwargs: Any) -> Any:
    """An operation on the CPU; what comes out is on DEVICE, or where a copy is to go."""
    name = function.overloadpacket.__name__
    given = tree_leaves((args, kwargs))
    elsewhere = [x for x in given if isinstance(x, Elsewhere)]
    strays = [x for x in given if isinstance(x, Tensor) and not isinstance(x, Elsewhere) and x.ndim]
    if elsewhere and strays and name not in _MEETINGS:
        raise RuntimeError(f"{name}: tensors of {DEVICE} and of {strays[0].device}")
    target = kwargs.get("device") or DEVICE
    if "device" in kwargs:
        kwargs = {**kwargs, "device": "cpu"}
    result = function(*tree_map(_values, args), **tree_map(_values, kwargs))
    if function._schema.is_mutable:
        return elsewhere[0] if isinstance(result, Tensor) else result
    return tree_map(_wrapped, result) if torch.device(target).type == DEVICE.type else result


def _values(x: Any) -> Any:
    return x.values if isinstance(x, Elsewhere) else x


def _wrapped(x: Any) -> Any:
    return Elsewhere(x) if isinstance(x, Tensor) else x


class _FromNumbers(TorchFunctionMode):
    """Tensors of Python numbers are made on the CPU and moved: torch cannot make them in Python."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function is Tensor.new_tensor and isinstance(args[0], Elsewhere):
            kwargs = {"dtype": args[0].dtype, "device": DEVICE} | kwargs
            function, args = torch.tensor, args[1:]
        if function in (torch.tensor, torch.as_tensor) and kwargs.get("device") == DEVICE:
            made = function(*args, **{**kwargs, "device": "cpu"})
            return made if isinstance(made, Elsewhere) else made.to(DEVICE)
        return function(*args, **kwargs)


def _ranges(overload: str) -> Any:
    """torch.arange, which by default gives an empty tensor another size."""
    function = getattr(torch.ops.aten.arange, overload or "default")
    return lambda *args, **kwargs: _computed(function, *args, **kwargs)


_every = torch.library.Library("_", "IMPL")
_every.fallback(_computed, "PrivateUse1")
_aten = torch.library.Library("aten", "IMPL")
for _overload in ("", "start", "start_step"):
    _aten.impl("arange" + (_overload and "." + _overload), _ranges(_overload), "PrivateUse1")
_FromNumbers().__enter__()
# In inference mode a tensor subclass cannot be detached.
torch.inference_mode = lambda mode=True: torch.no_grad() if mode else contextlib.nullcontext()
