"""Counts what a call dispatches: operations, and looks at values, for which a GPU would be waited for."""

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Operations whose result the host has to see, without namespace and overload.
_LOOKS = {
    "_local_scalar_dense",
    "item",
    "is_nonzero",
    "nonzero",
    "equal",
    "masked_select",
    "_unique2",
    "unique_dim",
}


class _HostReads(TorchFunctionMode):
    """Counts reads of whole tensors, which a CPU tensor answers without dispatching anything."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.count += getattr(function, "__name__", "") in ("tolist", "numpy", "__array__")
        return function(*args, **(kwargs or {}))


class Counting(TorchDispatchMode):
    """Counts operations, without views, and synchronisations while it is entered.

    A view is an operation whose results share the storage of an argument that it leaves unchanged.
    Synchronisations are reads of values by the host: item, tolist, nonzero, equal, an index by a mask.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self._dispatched_looks = 0
        self._reads = _HostReads()

    @property
    def operations(self) -> int:
        """Number of operations."""
        return self.calls.total()

    @property
    def synchronisations(self) -> int:
        """Number of reads of values by the host."""
        return self._dispatched_looks + self._reads.count

    def __enter__(self) -> "Counting":
        self._reads.__enter__()
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._reads.__exit__(*raised)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if not _is_view(function, args, result):
            self.calls[name] += 1
        self._dispatched_looks += name in _LOOKS or _is_masked(name, args)
        return result


def _is_view(function: Any, args: tuple[Any, ...], result: Any) -> bool:
    """Whether all that comes out shares the storage of something that went in, unchanged."""
    if function._schema.is_mutable:
        return False
    storages = {t.untyped_storage()._cdata for t in tree_leaves(args) if isinstance(t, Tensor)}
    made = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
    return bool(made) and all(t.untyped_storage()._cdata in storages for t in made)


def _is_masked(name: str, args: tuple[Any, ...]) -> bool:
    """Whether an index is boolean, so that its values decide a shape."""
    if name not in ("index", "index_put", "index_put_"):
        return False
    return any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1])
