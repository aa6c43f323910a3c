"""What criteria are computed from: the rows of a HeldOut, checked and weighed."""

from typing import Literal

import torch
from torch import Tensor

from torchloo.guards import Guard, require_floating
from torchloo.held_out import HeldOut, require_held_out

__all__ = ["Rows", "Weight", "no_weight", "require_classes"]

Weight = Tensor | Literal["own"] | None


def require_classes(guard: Guard, name: str, y: Tensor, both: bool = True) -> None:
    """Demand that every label of y (..., n) has a sign, and that both signs are there."""
    guard.require(y != 0, f"{name} must be positive or negative labels, got 0")
    if both:
        held = (y > 0).any(-1) & (y < 0).any(-1)
        guard.require(held, f"{name} must hold both classes, positive and negative, got one class only")


class Rows:
    """A HeldOut checked and turned so that rows come last: (..., c, n), c = 1 without output axis.

    labels: targets must have a sign; both: and both signs; steps: NaN would go unseen, so look for it;
    signs: the signs of the outputs are enough, where a HeldOut has no more (its `values` is False).
    """

    def __init__(
        self,
        function: str,
        held_out: HeldOut,
        weight: Weight,
        labels: bool = False,
        both: bool = False,
        steps: bool = False,
        signs: bool = False,
    ) -> None:
        require_held_out(function, held_out, signs)
        f, y, own = held_out.outputs, held_out.targets, held_out.weight
        require_floating(function, outputs=f, targets=y, weight=own)
        self.output_axis = f.ndim == own.ndim + 1
        if own.ndim == 0 or f.numel() == 0 or own.shape != (f.shape[:-1] if self.output_axis else f.shape):
            raise ValueError(
                f"{function}: outputs must be (..., n) or (..., n, c) for weight (..., n) and not empty, "
                f"got outputs {tuple(f.shape)} and weight {tuple(own.shape)}"
            )
        self.function, self.guard, self.shape = function, Guard(function), f.shape
        self.outputs, self.targets = self.turn("outputs", f), self.turn("targets", y)
        self.weight = self._weight(weight, own).unsqueeze(-2)  # (..., 1, n)
        if labels or both:
            require_classes(self.guard, "targets", self.targets, both)
        if steps:
            self.guard.finite(outputs=f, targets=y)
        self.guard.check()

    def turn(self, name: str, tensor: Tensor) -> Tensor:
        """(..., n) or (..., n, c) -> (..., c, n)."""
        if not isinstance(tensor, Tensor) or tensor.shape != self.shape:
            got = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ValueError(
                f"{self.function}: {name} must have the outputs' shape {tuple(self.shape)}, got {got}"
            )
        return tensor.mT if self.output_axis else tensor.unsqueeze(-2)

    def _weight(self, weight: Weight, own: Tensor) -> Tensor:
        """The row weights asked for, in the shape of the HeldOut's own."""
        if weight is None:
            return torch.ones_like(own)
        if isinstance(weight, str):
            if weight != "own":
                raise ValueError(f"{self.function}: weight must be 'own', None or a tensor, got {weight!r}")
            return own
        require_floating(self.function, outputs=self.outputs, weight=weight)
        if weight.ndim == 0 or own.shape[-weight.ndim :] != weight.shape:
            expected = f"({own.shape[-1]},) or {tuple(own.shape)}"
            raise ValueError(f"{self.function}: weight must be {expected}, got shape {tuple(weight.shape)}")
        self.guard.require((weight >= 0) & (weight < torch.inf), "weight must be finite and not negative")
        self.guard.require(weight.sum(-1) > 0, "weight must be positive in one row at least")
        return weight.expand(own.shape)

    @property
    def positive(self) -> Tensor:
        """Rows of the positive class, boolean (..., c, n)."""
        return self.targets > 0

    @property
    def margin(self) -> Tensor:
        """t f, (..., c, n)."""
        return self.targets.sign() * self.outputs

    @property
    def wrong(self) -> Tensor:
        """Rows whose class is predicted wrongly, in the dtype of the outputs, (..., c, n)."""
        return ((self.outputs >= 0) != self.positive).to(self.outputs.dtype)

    def total(self, losses: Tensor) -> Tensor:
        """Weighted sum over the rows: (..., c, n) -> (..., c)."""
        return (self.weight * losses).sum(-1)

    def mean(self, losses: Tensor) -> Tensor:
        """Weighted mean over the rows: (..., c, n) -> (..., c)."""
        return self.total(losses) / self.weight.sum(-1)

    def over_outputs(self, value: Tensor, per_output: bool) -> Tensor:
        """(..., c) -> the shape that the caller wants."""
        if not self.output_axis:
            return value[..., 0]
        return value if per_output else value.mean(-1)


def no_weight(function: str, weight: Weight) -> None:
    """An unweighted criterion refuses a weight rather than leave it out."""
    if weight is not None and not (isinstance(weight, str) and weight == "own"):
        got = weight if isinstance(weight, str) else type(weight).__name__
        raise ValueError(f"{function}: weight must be left out, the criterion is unweighted; got {got}")
