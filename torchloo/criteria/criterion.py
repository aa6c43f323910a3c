"""What a criterion is: a function of a HeldOut that knows its own direction."""

from collections.abc import Callable
from typing import Literal, ParamSpec, Protocol, cast

import torch
from torch import Tensor

__all__ = ["Criterion", "Targets", "criterion"]

P = ParamSpec("P")

Targets = Literal["numbers", "signs", "one-vs-rest", "classes"]


class Criterion(Protocol[P]):
    """A function of a HeldOut that knows its own direction."""

    lower_is_better: bool
    differentiable: bool
    takes_fit: bool
    """True where the argument is a Fit instead of a HeldOut."""
    targets: Targets
    """What is read: the numbers themselves, or the class as the sign of a column ("signs"), as the positive
    one of several columns ("one-vs-rest"), or as either of the two ("classes")."""
    mean_over_rows: bool
    """Whether it is a weighted mean of a loss of each row, which has a standard error."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Tensor:
        """The criterion, one number for each entry of the batch."""
        ...


def criterion(
    *,
    lower_is_better: bool,
    differentiable: bool,
    takes_fit: bool = False,
    targets: Targets = "numbers",
    mean_over_rows: bool = False,
) -> Callable[[Callable[P, Tensor]], Criterion[P]]:
    """Put its properties on a function; without gradient it keeps no graph."""

    def mark(function: Callable[P, Tensor]) -> Criterion[P]:
        marked = cast("Criterion[P]", function if differentiable else torch.no_grad()(function))
        marked.lower_is_better = lower_is_better
        marked.differentiable = differentiable
        marked.takes_fit = takes_fit
        marked.targets = targets
        marked.mean_over_rows = mean_over_rows
        return marked

    return mark
