"""HeldOut: held-out predictions of every row, by the machine trained without it."""

from typing import Any, NamedTuple

from torch import Tensor

from torchloo.guards import expanded

__all__ = ["HeldOut", "assemble", "require_held_out"]


class HeldOut(NamedTuple):
    """Held-out predictions of a machine for its own training rows.

    Shapes are those of the targets: (..., n), or (..., n, c) with an output axis, which exists iff
    ``outputs.ndim == weight.ndim + 1``. A path adds its axis of regularisations in front of all others.
    For `lso` the n entries are the rows to predict, set after set.
    """

    outputs: Tensor
    """Prediction of row i by the machine trained without it (or its cluster)."""

    residuals: Tensor
    """targets - outputs, from the closed form."""

    targets: Tensor
    """The targets the machine was trained on (KFD: its coded targets)."""

    weight: Tensor
    """Training weights, (..., n); ones if none were given."""

    clusters: Tensor | None
    """Integer labels (n,), on the host, of rows left out together; None if every row was left out alone."""

    variance: Tensor
    """Held-out predictive variance in units of the noise variance, the shape of the outputs."""

    refitted: Tensor
    """Boolean (..., n): rows refitted explicitly because the closed form would have lost its accuracy."""


def assemble(
    Y: Tensor,
    weight: Tensor,
    clusters: Tensor | None,
    parts: tuple[Tensor, Tensor, Tensor],
    flat: bool,
    outputs: Tensor | None = None,
) -> HeldOut:
    """A HeldOut in the dtype of the targets, without the output axis where `flat` is set.

    `parts` are residuals (..., n, c), variances (..., n, 1) or (..., n, c), and refitted rows (..., n).
    """
    r, variance, refitted = parts
    r = r.to(Y.dtype)
    variance = variance.to(Y.dtype)
    weight = expanded(weight, refitted.shape)
    outputs = Y - r if outputs is None else outputs
    fields = (outputs, r, expanded(Y, r.shape), expanded(variance, r.shape))
    outputs, residuals, targets, variance = (t.squeeze(-1) if flat else t for t in fields)
    return HeldOut(outputs, residuals, targets, weight, clusters, variance, refitted)


def require_held_out(function: str, held_out: Any, signs: bool = False) -> None:
    """Raise unless it has the fields of a HeldOut, and decision values unless `signs` suffice."""
    if not all(hasattr(held_out, name) for name in HeldOut._fields):
        raise TypeError(f"{function}: held_out must be a HeldOut, got {type(held_out).__name__}")
    if not signs and not getattr(held_out, "values", True):
        raise ValueError(
            f"{function}: held_out must hold decision values, got only their signs; use values=True"
        )
