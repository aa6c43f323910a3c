"""Arguments of the SVM functions: checked, and brought to one batch shape."""

from typing import NamedTuple

import torch
from torch import Tensor

from torchloo.guards import Guard, broadcast_shapes, require_floating, values_visible
from torchloo.svm.stacked import at_once
from torchloo.svm.tolerances import ASYMMETRY, FEW_DIGITS

__all__ = ["Caller", "batch_of", "checked", "indefinite"]

_BLOCK = 2**21  # entries of K compared at once with their mirror images


class Caller(NamedTuple):
    """Whom the user has called, for the words of errors."""

    function: str
    """The name in front of every message."""

    matrix: str = "K"
    """What the user calls the kernel matrix: "kernel(X)" where rows were given."""


def checked(
    caller: Caller, K: Tensor, y: Tensor, C: float | Tensor, weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """K, y, boxes and weight of one batch shape, to which K only broadcasts, or an error."""
    function, matrix = caller
    require_floating(function, **{matrix: K}, y=y)
    if not values_visible(K, y):
        raise RuntimeError(
            f"{function}: needs to see the values of {matrix} and y, which meta and fake tensors, torch.func "
            "transforms and torch.compile do not show"
        )
    if K.ndim < 2 or K.shape[-1] != K.shape[-2] or not K.shape[-1]:
        raise ValueError(
            f"{function}: {matrix} must be square and not empty, (..., n, n), got shape {tuple(K.shape)}"
        )
    n = K.shape[-1]
    if y.ndim < 1 or y.shape[-1] != n:
        raise ValueError(f"{function}: y must have {n} entries to match {matrix}, got shape {tuple(y.shape)}")
    guard = Guard(function)
    guard.positive(C=C)
    C = C.to(K) if isinstance(C, Tensor) else torch.as_tensor(C, dtype=K.dtype, device=K.device)
    if weight is not None:
        _check_weight(guard, caller, K, weight)
    guard.positive(C=C)  # again: a number may be too large or too small for the dtype of K
    guard.finite(**{matrix: K})
    guard.two_classes(y=y.unsqueeze(-1))
    if not K.numel():
        raise ValueError(f"{function}: {matrix} must not be an empty batch, got shape {tuple(K.shape)}")
    matrices = K.detach().reshape(-1, n, n)
    guard.require(_is_symmetric(matrices), f"{matrix} must be symmetric, but differs from its transpose")
    guard.require(
        K.diagonal(dim1=-2, dim2=-1) >= 0,
        lambda: indefinite(caller, float(torch.linalg.eigvalsh(matrices).min())),
    )
    batch = batch_of(function, {matrix: (K, 2), "y": (y, 1), "weight": (weight, 1), "C": (C, 0)})
    name, weight = ("C", torch.ones_like(y)) if weight is None else ("C * weight", weight)
    weight = weight.expand(*batch, n)
    box = C.expand(batch)[..., None] * weight
    guard.positive(**{name: box})
    expected = f"{name} must be at least {FEW_DIGITS:.1e} in some row; use a larger C"
    guard.require(box.amax(-1) >= FEW_DIGITS, expected)
    guard.check()
    return K, y.expand(*batch, n), box, weight


def batch_of(function: str, given: dict[str, tuple[Tensor | None, int]]) -> torch.Size:
    """The batch shape of arguments by name, each with the number of its own axes; None was not given."""
    shapes = {name: (tuple(x.shape), own) for name, (x, own) in given.items() if x is not None}
    try:
        return broadcast_shapes(*(shape[: len(shape) - own] for shape, own in shapes.values()))
    except RuntimeError:
        shown = ", ".join(f"{name} {shape}" for name, (shape, _) in shapes.items())
        raise ValueError(f"{function}: batch dimensions must broadcast, got {shown}") from None


def _check_weight(guard: Guard, caller: Caller, K: Tensor, weight: Tensor) -> None:
    """One for each row of K."""
    require_floating(guard.function, **{caller.matrix: K}, weight=weight)
    n = K.shape[-1]
    if weight.shape[-1:] != (n,):
        raise ValueError(
            f"{guard.function}: weight must have {n} entries to match {caller.matrix}, "
            f"got shape {tuple(weight.shape)}"
        )
    guard.positive(weight=weight)


def _is_symmetric(K: Tensor) -> Tensor:
    """Whether each K (B, n, n) is symmetric but for rounding, (B,); by blocks, which is faster."""
    n, size = K.shape[-1], max(1, at_once(K, _BLOCK) // (len(K) * K.shape[-1]))
    blocks = (K[:, i : i + size, i:] - K[:, i:, i : i + size].mT for i in range(0, n, size))
    apart = torch.stack([block.abs_().amax((1, 2)) for block in blocks]).amax(0)
    return apart <= ASYMMETRY * K.diagonal(dim1=1, dim2=2).abs().amax(1)


def indefinite(caller: Caller, least: float) -> str:
    """What is wrong with a kernel matrix of this smallest eigenvalue."""
    return (
        f"{caller.matrix} must be positive semi-definite, its smallest eigenvalue is {least:.3g}; "
        "use a valid kernel or add to its diagonal"
    )
