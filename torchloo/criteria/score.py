"""A criterion as the score of a search: its direction, and one number for each entry of a batch."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchloo.criteria.classification import error_rate
from torchloo.criteria.declared import CRITERIA
from torchloo.criteria.regression import press
from torchloo.criteria.several_classes import multiclass_error
from torchloo.held_out import HeldOut

__all__ = ["Score", "as_held_out", "usual_criterion"]


def usual_criterion(search: str, labelled: bool, columns: bool) -> Any:
    """The default criterion, for numbers or class labels, encoded as several columns or one."""
    if not labelled or search == "gradient":
        return press
    return multiclass_error if columns else error_rate


class Score:
    """A criterion of torchloo.criteria, by itself or by name, or any callable of a HeldOut.

    A callable without the decorator `criterion` is called with one unbatched HeldOut at a time; lower is
    better, unless it has an attribute `lower_is_better`.

    Attributes:
        sign: 1 if lower is better, else -1: sign * value is minimised.
        targets: as `Criterion.targets`; None for any other callable.
    """

    def __init__(self, function: str, argument: str, criterion: Any) -> None:
        if isinstance(criterion, str):
            if criterion not in CRITERIA:
                known = ", ".join(sorted(CRITERIA))
                raise ValueError(
                    f"{function}: {argument} must be one of {known}, or a callable of a HeldOut, "
                    f"got {criterion!r}"
                )
            criterion = CRITERIA[criterion]
        if not callable(criterion):
            got = type(criterion).__name__
            raise TypeError(f"{function}: {argument} must be a name or a callable of a HeldOut, got {got}")
        self.function = function
        self.argument = argument
        self.criterion = criterion
        marked = criterion
        while isinstance(marked, functools.partial) and not hasattr(marked, "lower_is_better"):
            marked = marked.func
        self.batched = hasattr(marked, "takes_fit")
        self.takes_fit: bool = getattr(marked, "takes_fit", False)
        self.targets: str | None = getattr(marked, "targets", None)
        self.mean_over_rows: bool = getattr(marked, "mean_over_rows", False)
        self.differentiable: bool = getattr(marked, "differentiable", True)
        self.smooth: str = getattr(marked, "smooth", "")
        self.sign = 1.0 if getattr(marked, "lower_is_better", True) else -1.0
        self.name: str = getattr(marked, "__name__", type(marked).__name__)

    def require_differentiable(self) -> None:
        """Raise if the criterion is not differentiable, naming a substitute."""
        if not self.differentiable:
            instead = f"{self.argument}=tl.criteria.{self.smooth}, or " if self.smooth else ""
            raise ValueError(
                f"{self.function}: {self.argument} must be differentiable for search='gradient', got "
                f"{self.name}; use {instead}search='nelder-mead'"
            )

    def require_targets(self, y: Tensor, where: str = "") -> None:
        """Raise if a criterion for classes is undefined for the targets y (n,) or (n, c)."""
        if self.targets in (None, "numbers") or self.takes_fit:
            return
        try:
            self(as_held_out(y, y))
        except ValueError as fault:
            message = f"{self.function}: {self.argument} cannot be evaluated{where}: {fault}"
            raise ValueError(message) from fault

    def require_weight(self, weight: Any, name: str) -> None:
        """Raise if weights are given and a user-defined callable does not take them."""
        if self.batched or (isinstance(weight, str) and weight == "own"):
            return
        try:
            inspect.signature(self.criterion).bind(None, weight=None)
        except TypeError:
            raise TypeError(
                f"{self.function}: {self.argument} must take weight= if {name} is given, and {self.name} "
                f"does not; add that argument, or omit {name}"
            ) from None
        except ValueError:  # a built-in without a signature
            return

    def __call__(self, held_out: Any, weight: Any = "own") -> Tensor:
        """Values of batch shape, for a HeldOut (or a Fit, if the criterion takes one) of any batch."""
        own_weights = isinstance(weight, str) and weight == "own"

        def call(argument: Any, weight: Any) -> Any:
            criterion: Callable[..., Any] = self.criterion
            return criterion(argument) if own_weights else criterion(argument, weight=weight)

        if self.takes_fit:
            return call(held_out, weight)
        batch = held_out.weight.shape[:-1]
        if self.batched:
            value = call(held_out, weight)
            if value.shape != batch:
                raise TypeError(
                    f"{self.function}: {self.argument} must return shape {tuple(batch)}, one number for each "
                    f"problem, got {tuple(value.shape)}"
                )
            return value
        values = []
        for i, one in enumerate(_unbatched(held_out, batch)):
            number = call(one, None if own_weights else _entry(weight, i, batch))
            value = torch.as_tensor(number, dtype=one.outputs.dtype, device=one.outputs.device)
            if value.ndim:
                raise ValueError(
                    f"{self.function}: {self.argument} must return one number, got shape {tuple(value.shape)}"
                )
            values.append(value)
        return torch.stack(values).reshape(batch)


def as_held_out(outputs: Tensor, y: Tensor) -> HeldOut:
    """Outputs on test rows, (n,) or (n, c), as an unweighted HeldOut."""
    ones = torch.ones_like(y if y.ndim == 1 else y[:, 0])
    unknown = torch.full_like(outputs, torch.nan)
    return HeldOut(outputs, y - outputs, y, ones, None, unknown, ones > 1)


def _unbatched(held_out: Any, batch: torch.Size) -> list[HeldOut]:
    """The entries of a batch, each a HeldOut of its own."""
    if not batch:
        return [held_out]
    flat = {
        name: value.flatten(0, len(batch) - 1)
        for name, value in held_out._asdict().items()
        if isinstance(value, Tensor) and (name != "clusters" or value.ndim > 1)
    }
    entries = []
    for i in range(batch.numel()):
        fields = {name: value[i] for name, value in flat.items()}
        entries.append(held_out._replace(**fields))
    return entries


def _entry(weight: Tensor | None, i: int, batch: torch.Size) -> Tensor | None:
    if weight is None or weight.ndim == 1:
        return weight
    return weight.expand(*batch, weight.shape[-1]).flatten(0, -2)[i]
