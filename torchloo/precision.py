"""Linear algebra that autocast leaves alone."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

__all__ = ["full_precision", "in_full_precision"]


_NOTHING = nullcontext()

# Devices whose products autocast may round.
_KINDS = ("cpu", "cuda", "xpu", "mps")

P = ParamSpec("P")
T = TypeVar("T")


def full_precision(like: Tensor) -> AbstractContextManager[object]:
    """A context in which products keep the dtype of their inputs, even under autocast."""
    if not torch._C._is_any_autocast_enabled():
        return _NOTHING
    kind = like.device.type
    if kind != "cpu" and not torch.amp.is_autocast_available(kind):
        kind = "cpu"
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else _NOTHING


def in_full_precision(function: Callable[P, T]) -> Callable[P, T]:
    """The function in the context of `full_precision`, on whatever device its tensors are."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        if not torch._C._is_any_autocast_enabled():
            return function(*args, **kwargs)
        with ExitStack() as stack:
            for kind in _KINDS:
                if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, enabled=False))
            return function(*args, **kwargs)

    return wrapped
