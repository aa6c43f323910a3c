"""Functions of torch.autograd, quick to call."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.autograd.function import Function

__all__ = ["apply", "in_forward_mode", "once_differentiable"]


def apply(function: type[Function], *args: Any) -> Any:
    """function.apply(*args), for a Function with `setup_context` and all arguments of its `forward`.

    torch binds default arguments at every call by inspecting the signature of `forward`, and notes a backward
    even where no graph is wanted: both take longer than the whole forward of a small problem.
    """
    if torch.compiler.is_compiling():
        return function.apply(*args)
    if in_forward_mode():
        return _apply_in_forward_mode(function, args)
    if torch._C._are_functorch_transforms_active():
        return function.apply(*args)
    if not (torch.is_grad_enabled() and _requires_grad(args)):
        return function.forward(*args)
    alive = [torch._C._functorch.unwrap_if_dead(t) if isinstance(t, torch.Tensor) else t for t in args]
    return super(Function, function).apply(*alive)  # type: ignore[misc]


def in_forward_mode() -> bool:
    """Whether forward-mode derivatives are being taken, which no Function has."""
    return forward_ad._current_level >= 0


def _apply_in_forward_mode(function: type[Function], args: tuple[Any, ...]) -> Any:
    """function.apply(*args); no Function has a `jvp`, since torch.compile takes none that has one."""
    try:
        return function.apply(*args)
    except NotImplementedError as error:
        raise NotImplementedError(
            "torchloo: forward-mode derivatives (torch.func.jvp, jacfwd, hessian) are not supported by "
            "kernel matrices; use reverse mode: torch.func.jacrev(f), or jacrev(torch.func.grad(f))"
        ) from error


def _requires_grad(args: tuple[Any, ...]) -> bool:
    return any(isinstance(argument, torch.Tensor) and argument.requires_grad for argument in args)


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """For a Function whose backward(ctx, saved tensors, *cotangents) has no derivatives of its own.

    The decorator of torch raises an error for derivatives in the cotangents only: `autograd.grad` in a
    parameter on which the saved tensors depend would return a part of the second derivative.
    """

    @wraps(backward)
    def once(ctx: Any, *cotangents: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        saved = ctx.saved_tensors
        with torch.no_grad():
            found = backward(ctx, saved, *cotangents)
        if not torch.is_grad_enabled():
            return found
        return tuple(bar if bar is None else _OrderOne.apply(bar, *cotangents, *saved) for bar in found)

    return once


class _OrderOne(Function):
    """A derivative, with an error for derivatives of it in the tensors that it was computed from."""

    generate_vmap_rule = True

    @staticmethod
    def forward(derivative: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return derivative.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> None:
        raise RuntimeError(
            "torchloo: held-out outputs of an SVM, or of a path of many regularisations, have derivatives of "
            "order one only; take the gradient without create_graph=True"
        )
