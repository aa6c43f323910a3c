"""The declaration of a criterion: its direction, its targets, its name in reports."""

from collections.abc import Callable
from typing import Any, Literal, ParamSpec, Protocol, cast

import torch
from torch import Tensor

__all__ = ["CRITERIA", "Criterion", "Targets", "criterion"]

P = ParamSpec("P")

Targets = Literal["numbers", "signs", "one-vs-rest", "classes"]


class Criterion(Protocol[P]):
    """A function of a HeldOut with a declaration, made by the decorator `criterion`."""

    __name__: str
    label: str
    """Its name in reports."""
    meaning: str
    """A short explanation, which follows the label in reports."""
    lower_is_better: bool
    differentiable: bool
    smooth: str
    """For one that is not differentiable: the name of a differentiable substitute, and how to use it."""
    targets: Targets
    """What the targets are: numbers, a class as the sign of a column ("signs"), a class as the positive one
    of several columns ("one-vs-rest"), or either of these ("classes")."""
    counterpart: str
    """Name of the corresponding criterion for several classes, or for two; a two-class criterion without one
    may be averaged over one-vs-rest columns."""
    takes_fit: bool
    """True where the argument is a Fit instead of a HeldOut."""
    needs_variance: bool
    """Whether it needs the variance of the HeldOut, which an SVM does not have."""
    mean_over_rows: bool
    """Whether it is a weighted mean of losses of the rows, so that it has a standard error."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Tensor:
        """The criterion, one number for each entry of the batch."""
        ...


CRITERIA: dict[str, Criterion[...]] = {}
"""All criteria by name, including your own."""


def criterion(
    label: str,
    meaning: str,
    *,
    lower_is_better: bool,
    differentiable: bool,
    smooth: str = "",
    targets: Targets = "numbers",
    counterpart: str = "",
    takes_fit: bool = False,
    needs_variance: bool = False,
    mean_over_rows: bool = False,
) -> Callable[[Callable[P, Tensor]], Criterion[P]]:
    """Declare a function as a criterion; `Criterion` explains the arguments.

    It can then be used like those of tl.criteria, also by name, in searches, the command and its report. The
    function is called with a HeldOut (..., n) or (..., n, c) of a batch of problems and returns the batch
    shape; it takes ``weight="own"``, like all criteria, and ``average=None`` if its targets are "signs". If
    it is not differentiable, it is evaluated without a graph.

    >>> @criterion("worst error", "the largest residual", lower_is_better=True, differentiable=True)
    ... def worst_error(held_out, weight="own"):
    ...     return held_out.residuals.abs().amax(-1)
    >>> worst_error.label
    'worst error'
    """
    facts = {name: value for name, value in locals().items() if name in Criterion.__annotations__}

    def declare(function: Callable[P, Tensor]) -> Criterion[P]:
        marked: Any = function if differentiable else torch.no_grad()(function)
        for name, value in facts.items():
            setattr(marked, name, value)
        known = CRITERIA.setdefault(marked.__name__, marked)
        if known.__module__ != marked.__module__:
            raise ValueError(
                f"criterion: the name of the function must not be in use, got {marked.__name__}, which is "
                f"defined in {known.__module__}"
            )
        CRITERIA[marked.__name__] = marked
        return cast("Criterion[P]", marked)

    return declare
