"""Options of a search, and one search over a batch of problems of the same shape."""

import math
import numbers
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from torchloo.criteria.score import Score
from torchloo.search import grid, lbfgs, nelder_mead
from torchloo.search.along_reg import only_reg, search_reg
from torchloo.search.objective import Evaluation, Objective, RunSetup
from torchloo.search.parameters import Space
from torchloo.search.prior import HyperPrior, Prior
from torchloo.search.problem_batch import ProblemBatch
from torchloo.search.starts import first_start, further_starts

__all__ = [
    "CALLBACK",
    "INTERRUPTED",
    "SEARCHES",
    "TIME_BUDGET",
    "Search",
    "StopSearch",
    "run",
    "warn_stopped",
]

_FROM_STARTS: dict[str, Callable[[Objective, RunSetup], None]] = {
    "gradient": lbfgs.minimise,
    "nelder-mead": nelder_mead.minimise,
}
SEARCHES = (*_FROM_STARTS, "grid")
"""Names of the search methods."""

_DECADES = 6.0  # default bounds around the first start, either way


INTERRUPTED, TIME_BUDGET, CALLBACK = "interrupted", "time budget", "callback"
"""Why a search ended early."""


class StopSearch(Exception):  # noqa: N818, no error
    """Raised to end a search; its text says why."""


@dataclass(frozen=True)
class Search:
    """Options of a search, for `select` and `validate`.

    ``tl.select(machine, X, y, search=tl.Search("gradient", starts=3))`` is the same as
    ``tl.select(machine, X, y, search="gradient", starts=3)``; keyword arguments override the object.

    Args:
        method: "gradient": L-BFGS with a line search, for a differentiable criterion; needs by far the fewest
            evaluations. If reg is the only parameter, it follows the regularisation path instead, for any
            criterion (Note [search along a path] in search/along_reg.py). "nelder-mead": the simplex method,
            for any criterion and few parameters. "grid": every point of `grid`; the axis "reg" comes from
            one decomposition (`path`).
        starts: number of runs of "gradient" and "nelder-mead", which advance as one batch. The first starts
            from the data (Note [first start] in search/starts.py) or, with start="machine", from the values
            of the machine; the others are drawn around it from `generator`. A path needs only one.
        bounds: {name: (low, high)}; by default six decades either way of the first start. A given grid is not
            clipped. With several machines, a name applies to those that have such a parameter.
        grid: {name: values}, names such as "reg", "C", "kernel.lengthscale", or "lengthscale" where that is
            unique; a value of several numbers sets the entries of an ARD kernel. Default: 25 half decades of
            reg or C and 9 factors of two of every other parameter around the first start. Settings that are
            not trained, the "degree" of Polynomial and the "nu" of Matern, may be listed with every method:
            each combination is compared as a machine of its own, with a row in `Selection.table`.
        prior: hyper-prior against over-fitting of the criterion Q. A strength s adds
            s |Q(t0)| / n * sum_j (t_j - t0_j)^2 over the logarithms t of the kernel's parameters, t0 being
            the first start: s is the precision of a Gaussian prior on each (Note [hyper-prior] in
            search/prior.py). Or a callable, which gets the logarithms by name, (B,) or (B, d), and returns
            penalties (B,) to be added (subtracted where higher is better).
        max_evaluations: limit for each run, by default 200 with gradient, else 200 for each parameter.
        tolerance: relative change of the criterion at which a run stops.
        time_budget: seconds after which the search stops, with a warning, and returns the best so far; the
            current evaluation is completed, and the final fit is not included. Several machines share what is
            left equally (Note [machines compared] in search/compared.py).
        callback: called with every evaluation, an entry of `Selection.history`, in order, after its batch. If
            it returns True the whole search stops and returns the best so far; exceptions are propagated.
        generator: random number generator for further starts; None uses torch's global one.
        progress: whether to show a progress bar.
    """

    method: str = "gradient"
    starts: int = 1
    start: str = "auto"
    bounds: Mapping[str, tuple[float, float]] | None = None
    grid: Mapping[str, Iterable[Any]] | None = None
    prior: Prior = None
    max_evaluations: int | None = None
    tolerance: float = 1e-6
    time_budget: float | None = None
    callback: Callable[[Evaluation], Any] | None = None
    generator: torch.Generator | None = None
    progress: bool = True
    function: str = field(default="Search", repr=False)
    """Name of the calling function, for error messages."""

    @classmethod
    def of(cls, function: str, search: "str | Search", options: Mapping[str, Any]) -> "Search":
        """From the arguments of a function: a method or a Search, and further options by name."""
        known = [each.name for each in fields(cls) if each.name not in ("method", "function")]
        for name in options:
            if name not in known:
                raise TypeError(
                    f"{function}: unknown argument {name!r}; the options of a search are {', '.join(known)}"
                )
        if isinstance(search, Search):
            return replace(search, function=function, **options)
        return replace(cls(), method=search, function=function, **options)

    def __post_init__(self) -> None:
        if self.method not in SEARCHES:
            raise ValueError(
                f"{self.function}: search must be one of {', '.join(SEARCHES)}, got {self.method!r}"
            )
        if self.start not in ("auto", "machine"):
            raise ValueError(f"{self.function}: start must be 'auto' or 'machine', got {self.start!r}")
        for name in ("starts", "max_evaluations"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ValueError(f"{self.function}: {name} must be a positive integer, got {value!r}")
        if not 0 < self.tolerance < 1:
            raise ValueError(f"{self.function}: tolerance must be between 0 and 1, got {self.tolerance!r}")
        if not (self.prior is None or callable(self.prior)):
            number = isinstance(self.prior, float | int) and not isinstance(self.prior, bool)
            if not number or not 0 <= self.prior < math.inf:
                raise ValueError(
                    f"{self.function}: prior must be a non-negative number or a callable, got {self.prior!r}"
                )
        if not (self.bounds is None or isinstance(self.bounds, Mapping)):
            raise TypeError(
                f"{self.function}: bounds must be a dict of name -> (low, high), got {self.bounds!r}"
            )
        if not (self.time_budget is None or _is_positive(self.time_budget)):
            raise ValueError(
                f"{self.function}: time_budget must be a positive number of seconds, got {self.time_budget!r}"
            )
        if not (self.callback is None or callable(self.callback)):
            raise TypeError(f"{self.function}: callback must be callable, got {self.callback!r}")

    def deadline(self) -> float:
        """When a search that begins now must end, on the clock of time.monotonic()."""
        return math.inf if self.time_budget is None else time.monotonic() + self.time_budget

    def evaluations(self, size: int) -> int:
        """The most evaluations of one run."""
        if self.max_evaluations is not None:
            return self.max_evaluations
        return 200 if self.method == "gradient" else 200 * size


def _is_positive(value: Any) -> bool:
    """Whether a value is a positive, finite number."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return False
    return 0 < float(value) < math.inf


def run(
    plan: Search,
    space: Space,
    problems: ProblemBatch,
    score: Score,
    watch: Callable[[list[Evaluation]], None] | None = None,
    names: Sequence[str] = ("",),
) -> tuple[Objective, str]:
    """Search all problems; returns the objective, which holds the best of each, and why it stopped early.

    Names of the problems, such as " in split 3", go into errors; `watch` may raise `StopSearch`.
    """
    for name, y in zip(names, problems.y, strict=True):
        score.require_targets(y, name)
    if plan.method == "gradient" and not only_reg(space, score):
        score.require_differentiable()
    prior = HyperPrior(plan.prior, space, problems.X.shape[1])
    with tqdm(desc=plan.method, unit=" evaluations", disable=not plan.progress, leave=False) as bar:
        objective = Objective(space, problems, score, prior, bar, watch)
        try:
            first, box = _first_starts(plan, space, problems)
            _search(plan, objective, first, box)
        except StopSearch as stop:
            return objective, str(stop)
        except KeyboardInterrupt:
            return objective, INTERRUPTED
    return objective, ""


def _first_starts(plan: Search, space: Space, problems: ProblemBatch) -> tuple[Tensor, Tensor]:
    """The first start of every problem, (P, p), and its bounds, (2, P, p)."""
    if plan.start == "auto":
        weights: Any = [None] * len(problems.X) if problems.weight is None else problems.weight
        rows = zip(problems.X, problems.y, weights, strict=True)
        first = torch.stack([first_start(space, X, y, weight) for X, y, weight in rows])
    else:
        first = space.vector().repeat(len(problems.X), 1)
    box = space.bounds(first, plan.bounds, _DECADES)
    return torch.clamp(first, box[0], box[1]), box


def _search(plan: Search, objective: Objective, first: Tensor, box: Tensor) -> None:
    space = objective.space
    if objective.prior.wants_centre:
        values, _ = objective(first, torch.arange(len(first), device=first.device))
        objective.prior.anchor(first, values)
    if plan.method == "grid":
        if plan.grid is None:
            axes = grid.default_axes(space)
        else:
            axes = grid.given_axes(space, plan.grid)
        grid.scan(objective, first, axes, plan.grid is None, box)
        return
    search = _FROM_STARTS[plan.method]
    count = plan.starts
    if plan.method == "gradient" and only_reg(space, objective.score):
        search, count = search_reg, 1  # covers the whole box from one start
    starts = further_starts(space, first, count, plan.generator)  # (P, S, p)
    starts = torch.clamp(starts, box[0].unsqueeze(1), box[1].unsqueeze(1))
    problem = torch.arange(len(first), device=first.device)
    setup = RunSetup(
        start=starts.flatten(0, 1),
        problem=problem.repeat_interleave(count),
        box=box.repeat_interleave(count, 1),
        unit=space.units(),
        evaluations=plan.evaluations(space.size),
        tolerance=plan.tolerance,
        rounding=objective.rounding,
    )
    search(objective, setup)


def warn_stopped(function: str, stopped: Iterable[str], time_budget: float | None, outcome: str) -> None:
    """Warn that a search was interrupted, or that its time budget is used up, and what is returned."""
    if INTERRUPTED in stopped:
        reason = INTERRUPTED
    elif TIME_BUDGET in stopped:
        reason = f"the time budget of {time_budget:g} s is used up"
    else:
        return
    warnings.warn(f"{function}: {reason}; {outcome}", RuntimeWarning, stacklevel=3)
