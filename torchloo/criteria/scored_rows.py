"""The rows of a HeldOut, checked and weighted, from which criteria are computed."""

from functools import partial
from typing import Literal

import torch
from torch import Tensor

from torchloo.guards import Guard, require_floating
from torchloo.held_out import HeldOut, require_held_out

__all__ = [
    "Average",
    "Classes",
    "ScoredRows",
    "Weight",
    "no_weight",
    "one_positive",
    "require_average",
    "require_classes",
    "two_valued",
]

Weight = Tensor | Literal["own"] | None
Average = Literal["outputs"] | None
Classes = Literal["sign", "both signs", "column", "any"] | None

_CODING = (
    "encode two classes as -1 and +1; for several classes use tl.one_vs_rest(labels), a column for each, "
    "and multiclass_error"
)


def two_valued(y: Tensor) -> Tensor:
    """Whether y (..., n) is the only positive, or the only non-positive, value of its column."""
    return y == _own_extreme(y)


def _own_extreme(y: Tensor) -> Tensor:
    """The largest value of the column for positive labels, the smallest for the others, (..., n)."""
    largest = y.amax(-1, keepdim=True)
    smallest = y.amin(-1, keepdim=True)
    return torch.where(y > 0, largest, smallest)


def one_positive(targets: Tensor) -> Tensor:
    """Whether exactly one column of (..., c, n) is positive, that of the class of the row: (..., n)."""
    return (targets > 0).sum(-2) == 1


def require_classes(guard: Guard, name: str, y: Tensor, both: bool = True) -> None:
    """Require that y (..., n) has at most one positive and one negative value, and both of them if `both`."""
    y = y.detach()
    guard.require(y != 0, f"{name} must be positive or negative labels, got 0; {_CODING}")
    guard.require(two_valued(y), partial(_two_of_a_sign, name, y))
    if both:
        held = (y > 0).any(-1) & (y < 0).any(-1)
        guard.require(held, f"{name} must hold both classes, positive and negative, got one class only")


def _two_of_a_sign(name: str, y: Tensor) -> str:
    """The message for labels with two values of the same sign, such as 1, 2 and 3."""
    place = tuple((~two_valued(y)).nonzero()[0].tolist())
    pair = f"{y[place].item()} and {_own_extreme(y)[place].item()}"
    return f"{name} must hold one positive and one negative value, got {pair}; {_CODING}"


def require_average(guard: Guard, targets: Tensor, per_output: bool, average: Average) -> None:
    """Require an explicit average="outputs" for the mean over one-vs-rest columns (..., c, n).

    The mean error of the one-vs-rest columns is not the error of the predicted class.
    """
    if average is not None and average != "outputs":
        raise ValueError(f"{guard.function}: average must be None or 'outputs', got {average!r}")
    columns = targets.shape[-2]
    if columns > 1 and average is None and not per_output:
        guard.require(
            ~one_positive(targets).all(-1),
            f"average must be 'outputs' for the mean over {columns} one-vs-rest columns, "
            "got None; the error of the class with the largest output is multiclass_error",
        )


class ScoredRows:
    """A HeldOut, checked and transposed so that rows come last: (..., c, n), c = 1 without output axis.

    classes: how targets encode a class: by their "sign", with one value each; "both signs", if both classes
    must occur; by the one positive "column" of a row; or "any" of these. average: as in two-class criteria.
    steps: check for NaN, which a step function would hide. signs: the signs of the outputs suffice, so that a
    HeldOut without values (its `values` is False) is accepted.
    """

    def __init__(
        self,
        function: str,
        held_out: HeldOut,
        weight: Weight,
        per_output: bool,
        *,
        classes: Classes = None,
        average: Average = None,
        steps: bool = False,
        signs: bool = False,
    ) -> None:
        require_held_out(function, held_out, signs)
        f, y, own = held_out.outputs, held_out.targets, held_out.weight
        require_floating(function, outputs=f, targets=y, weight=own)
        self.output_axis = f.ndim == own.ndim + 1
        shape_of_rows = f.shape[:-1] if self.output_axis else f.shape
        if own.ndim == 0 or f.numel() == 0 or own.shape != shape_of_rows:
            raise ValueError(
                f"{function}: outputs must be (..., n) or (..., n, c) for weight (..., n) and not empty, "
                f"got outputs {tuple(f.shape)} and weight {tuple(own.shape)}"
            )
        self.function = function
        self.guard = Guard(function)
        self.shape = f.shape
        self.per_output = per_output
        self.outputs = self.turn("outputs", f)
        self.targets = self.turn("targets", y)
        self.weight = self._weight(weight, own).unsqueeze(-2)  # (..., 1, n)
        if steps or classes is not None:
            self.guard.finite(targets=y)
        if steps:
            self.guard.finite(outputs=f)
        if classes in ("column", "any"):
            self._require_one_class()
        if classes == "column" or (classes == "any" and self.outputs.shape[-2] > 1):
            self._require_columns()
        elif classes is not None:
            require_classes(self.guard, "targets", self.targets, both=classes == "both signs")
            require_average(self.guard, self.targets, per_output, average)
        self.guard.check()

    def _require_one_class(self) -> None:
        """Raise if the columns are requested separately."""
        if self.per_output:
            raise ValueError(
                f"{self.function}: per_output must be False, as a row has one predicted class, not one for "
                "each column; for the columns one by one use error_rate(held_out, per_output=True)"
            )

    def _require_columns(self) -> None:
        """Require a column for each of several classes, and one positive target in every row."""
        columns = self.outputs.shape[-2]
        if columns < 2:
            raise ValueError(
                f"{self.function}: outputs must have a column for each of several classes, got shape "
                f"{tuple(self.shape)}; for two classes in one column use error_rate or balanced_error_rate"
            )
        self.guard.require(
            one_positive(self.targets),
            f"targets must have exactly one positive column of {columns} in every row, that of its class",
        )

    def turn(self, name: str, tensor: Tensor) -> Tensor:
        """(..., n) or (..., n, c) -> (..., c, n)."""
        if not isinstance(tensor, Tensor) or tensor.shape != self.shape:
            got = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ValueError(
                f"{self.function}: {name} must have the outputs' shape {tuple(self.shape)}, got {got}"
            )
        return tensor.mT if self.output_axis else tensor.unsqueeze(-2)

    def _weight(self, weight: Weight, own: Tensor) -> Tensor:
        """The requested row weights, in the shape of those of the HeldOut."""
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
        self.guard.require(weight.sum(-1) > 0, "weight must be positive in at least one row")
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

    @property
    def scores(self) -> Tensor:
        """An output for every class, (..., k, n): of two classes in one column, -f and f."""
        f = self.outputs
        if f.shape[-2] > 1:
            return f
        return torch.cat([-f, f], -2)

    @property
    def members(self) -> Tensor:
        """Membership of each row in each class, (..., k, n), in the dtype of the outputs."""
        positive = self.positive
        if positive.shape[-2] == 1:
            positive = torch.cat([~positive, positive], -2)
        return positive.to(self.outputs.dtype)

    @property
    def predicted(self) -> Tensor:
        """The class with the largest output, of equal ones the first (of two the second), as `members`."""
        if self.outputs.shape[-2] == 1:
            number = (self.outputs[..., 0, :] >= 0).long()
        else:
            number = self.outputs.argmax(-2)  # (..., n)
        k = torch.arange(max(2, self.outputs.shape[-2]), device=number.device)
        return (number.unsqueeze(-2) == k.unsqueeze(-1)).to(self.outputs.dtype)

    def total(self, losses: Tensor) -> Tensor:
        """Weighted sum over the rows: (..., c, n) -> (..., c)."""
        return (self.weight * losses).sum(-1)

    def mean(self, losses: Tensor) -> Tensor:
        """Weighted mean over the rows: (..., c, n) -> (..., c)."""
        return self.total(losses) / self.weight.sum(-1)

    def over_outputs(self, value: Tensor) -> Tensor:
        """(..., c) -> the requested shape: averaged over outputs, or one number per output."""
        if not self.output_axis:
            return value[..., 0]
        return value if self.per_output else value.mean(-1)


def no_weight(function: str, weight: Weight) -> None:
    """Raise if a weight is given to an unweighted criterion."""
    if weight is not None and not (isinstance(weight, str) and weight == "own"):
        got = weight if isinstance(weight, str) else type(weight).__name__
        raise ValueError(f"{function}: weight must be omitted, the criterion is unweighted; got {got}")
