"""Counts what a call dispatches: operations, and looks at values, for which a GPU would be waited for."""

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Operations whose result the host has to see, by name without namespace and overload.
LOOKS = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "_unique2", "unique_dim"}


class Counting(TorchDispatchMode):
    """How often each operation is dispatched inside; views, which only share their storage, are left out.

    >>> with Counting() as counting:
    ...     held_out = machine.loo(X, y)
    >>> counting.operations, counting.looks
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.looks = 0

    @property
    def operations(self) -> int:
        """Number of operations dispatched, views left out."""
        return self.calls.total()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if not _is_view(function, args, result):
            self.calls[name] += 1
        self.looks += name in LOOKS or _masked(name, args)
        return result


def _is_view(function: Any, args: tuple[Any, ...], result: Any) -> bool:
    """Whether all that comes out shares the storage of something that went in, unchanged."""
    if function._schema.is_mutable:
        return False
    storages = {t.untyped_storage()._cdata for t in tree_leaves(args) if isinstance(t, Tensor)}
    made = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
    return bool(made) and all(t.untyped_storage()._cdata in storages for t in made)


def _masked(name: str, args: tuple[Any, ...]) -> bool:
    """Whether a boolean tensor is the index, the number of whose True entries decides the shape."""
    if name not in ("index", "index_put", "index_put_"):
        return False
    return any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1])
