"""What a criterion is: a function of a HeldOut that declares, once, all that others go by."""

from collections.abc import Callable
from typing import Any, Literal, ParamSpec, Protocol, cast

import torch
from torch import Tensor

__all__ = ["CRITERIA", "Criterion", "Targets", "criterion"]

P = ParamSpec("P")

Targets = Literal["numbers", "signs", "one-vs-rest", "classes"]


class Criterion(Protocol[P]):
    """A function of a HeldOut that knows its own direction; the decorator `criterion` makes it one."""

    __name__: str
    label: str
    """What it is called."""
    meaning: str
    """What it is, in words that follow the label."""
    lower_is_better: bool
    differentiable: bool
    smooth: str
    """Of one that is not differentiable: the name of one to descend instead, and how it is to be used."""
    targets: Targets
    """What is read: the numbers themselves, or the class as the sign of a column ("signs"), as the positive
    one of several columns ("one-vs-rest"), or as either of the two ("classes")."""
    counterpart: str
    """The name of what measures the same of several classes, for one of two, or of two, for one of several;
    only those that have none may be a mean over several classes, each against the rest."""
    takes_fit: bool
    """True where the argument is a Fit instead of a HeldOut."""
    needs_variance: bool
    """Whether it reads the variance of the HeldOut, which an SVM does not have."""
    mean_over_rows: bool
    """Whether it is a weighted mean of a loss of each row, which has a standard error."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Tensor:
        """The criterion, one number for each entry of the batch."""
        ...


CRITERIA: dict[str, Criterion[...]] = {}
"""All criteria by name, those of your own as well."""


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
    """Make a function a criterion, by what it declares of itself; `Criterion` says what each means.

    Searches, the command and its report then serve it as any of tl.criteria, under its name too. The function
    is called with a HeldOut (..., n) of many problems at once, or (..., n, c), and returns the batch shape;
    it takes ``weight="own"``, as all criteria do, and ``average=None`` if it reads signs. Without gradient it
    keeps no graph.

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
                f"criterion: the function must have a name of its own, got {marked.__name__}, which "
                f"{known.__module__} has"
            )
        CRITERIA[marked.__name__] = marked
        return cast("Criterion[P]", marked)

    return declare
