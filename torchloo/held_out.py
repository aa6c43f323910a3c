"""HeldOut: predictions of every row by the machine that has not seen it."""

from typing import Any, NamedTuple

from torch import Tensor

__all__ = ["HeldOut", "require_held_out"]


class HeldOut(NamedTuple):
    """Held-out outputs of a machine at its own training points.

    Shapes are those of the targets that came in: (..., n), or (..., n, c) with an output axis,
    which is there iff ``outputs.ndim == weight.ndim + 1``. A path puts its axis of
    regularisations before everything else. Of `lso` the n entries are the rows to predict, set after set.
    """

    outputs: Tensor
    """Prediction of row i by the machine that never saw it (or its cluster)."""

    residuals: Tensor
    """targets - outputs, from the closed form."""

    targets: Tensor
    """The targets the machine was trained on (KFD: its coded targets)."""

    weight: Tensor
    """Training weights, (..., n); ones where none were given."""

    clusters: Tensor | None
    """Integer labels (n,) on the host of what was left out together; None: every row alone."""

    variance: Tensor
    """Held-out predictive variance in units of the noise variance, the shape of the outputs."""

    refitted: Tensor
    """Boolean (..., n): rows refitted explicitly because the closed form would have cancelled."""


def require_held_out(function: str, held_out: Any, signs: bool = False) -> None:
    """Raise unless it has the fields of a HeldOut, and decision values unless `signs` are enough."""
    if not all(hasattr(held_out, name) for name in HeldOut._fields):
        raise TypeError(f"{function}: held_out must be a HeldOut, got {type(held_out).__name__}")
    if not signs and not getattr(held_out, "values", True):
        raise ValueError(
            f"{function}: held_out must hold decision values, got only their signs; use values=True"
        )
