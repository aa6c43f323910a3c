"""Comparison of several machines, and of discrete settings of a machine, such as a degree.

Note [machines compared]
Machines are searched one after another, independently; every combination of discrete settings counts as a
machine of its own. The one with the best criterion is chosen, the first in case of ties. A time budget is
shared: each machine gets an equal part of what is left, so that time that one does not need goes to the
others, and at least one evaluation.
"""

import copy
import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor, nn

from torchloo.criteria.score import Score
from torchloo.fisher import KFD
from torchloo.kernels import Kernel
from torchloo.search.objective import Best, Evaluation, Objective
from torchloo.search.parameters import Space, matching_names, unique_name
from torchloo.search.problem_batch import ProblemBatch
from torchloo.search.run import CALLBACK, INTERRUPTED, TIME_BUDGET, Search, StopSearch, run
from torchloo.search.starts import takes_kernel_matrix

__all__ = [
    "NoCandidateError",
    "Outcome",
    "Rival",
    "best_of",
    "compared",
    "require_comparable",
    "require_found",
    "search_all",
    "settings_of",
]


class NoCandidateError(ValueError):
    """A search in which no candidate could be evaluated."""


class Rival(NamedTuple):
    """A machine in a comparison."""

    plan: Search
    """Options of its search, with its own bounds and axes of the grid."""
    space: Space

    @property
    def name(self) -> str:
        """Names of machine and kernel, such as LSSVM(RBF)."""
        machine = self.space.machine
        return f"{type(machine).__name__}({type(machine.kernel).__name__})"


class Outcome(NamedTuple):
    """The result of the search of one machine."""

    rival: Rival
    objective: Objective
    stopped: str
    """Why it stopped early; empty if it did not."""
    history: list[Evaluation]
    """Numbered over all machines."""


def settings_of(machine: nn.Module) -> dict[str, Kernel]:
    """Kernels by the names of their settings, such as kernel.degree."""
    return {
        f"{path}.{name}": module
        for path, module in machine.named_modules()
        if isinstance(module, Kernel)
        for name in module.settings
    }


def compared(plan: Search, machine: Any, batched: bool = True) -> list[Rival]:
    """The machines to search: one or several, with every combination of settings in a grid."""
    machines = list(machine) if isinstance(machine, list | tuple | nn.ModuleList) else [machine]
    if not machines:
        raise ValueError(
            f"{plan.function}: machine must be a machine or a list of machines, got an empty list"
        )
    spaces = [Space(plan.function, each, batched) for each in machines]
    if len({takes_kernel_matrix(space.machine) for space in spaces}) > 1:
        raise ValueError(
            f"{plan.function}: machines with a Precomputed kernel can only be compared with one another, "
            "since X holds their kernel values"
        )
    parameters = [[entry.name for entry in space.entries if entry.log] for space in spaces]
    settings = [list(settings_of(space.machine)) for space in spaces]
    grid_names = [names + more for names, more in zip(parameters, settings, strict=True)]
    bounds = _for_each_machine(plan.function, "bounds", plan.bounds, parameters)
    grids = _for_each_machine(plan.function, "grid", _listed(plan), grid_names)
    rivals = []
    for space, own_bounds, own_grid in zip(spaces, bounds, grids, strict=True):
        own_plan = replace(plan, bounds=own_bounds)
        rivals += _with_settings(own_plan, space, own_grid, batched)
    return rivals


def _listed(plan: Search) -> dict[str, list[Any]] | None:
    """The values of a grid as lists, which can be read for every machine."""
    if plan.grid is None:
        return None
    if not isinstance(plan.grid, Mapping) or not plan.grid:
        raise ValueError(f"{plan.function}: grid must be a dict of name -> values, got {plan.grid!r}")
    grid = {}
    for name, values in plan.grid.items():
        grid[name] = list(values) if isinstance(values, Iterable) else []
        if not grid[name]:
            raise ValueError(f"{plan.function}: grid of {name} must be a list of values, got {values!r}")
    return grid


def _for_each_machine(
    function: str,
    argument: str,
    given: Mapping[str, Any] | None,
    known: list[list[str]],
) -> list[dict[str, Any] | None]:
    """For each machine the given values of its parameters, by full name; ValueError for unknown names.

    `known` are the names of the parameters of each machine.
    """
    if given is None:
        return [None] * len(known)
    for name in given:
        if not any(matching_names(name, names) for names in known):
            all_names = list(dict.fromkeys(itertools.chain(*known)))
            unique_name(function, argument, name, all_names)  # raises
    by_machine: list[dict[str, Any] | None] = []
    for names in known:
        values: dict[str, Any] = {}
        for name, value in given.items():
            if not matching_names(name, names):
                continue
            full_name = unique_name(function, argument, name, names)
            if full_name in values:
                raise ValueError(
                    f"{function}: {argument} must name each parameter once, got {', '.join(given)}"
                )
            values[full_name] = value
        by_machine.append(values)
    return by_machine


def _with_settings(plan: Search, space: Space, grid: dict[str, Any] | None, batched: bool) -> list[Rival]:
    """A machine for every combination of settings in a grid; other axes are left for the search."""
    if grid is None:
        return [Rival(plan, space)]
    settings = [name for name in grid if name in settings_of(space.machine)]
    axes = {name: values for name, values in grid.items() if name not in settings}
    if axes and plan.method != "grid":
        raise ValueError(
            f"{plan.function}: grid must be None unless search='grid', or name only settings such as degree; "
            f"got {', '.join(axes)} with search={plan.method!r}"
        )
    if plan.method == "grid" and not grid:
        raise ValueError(
            f"{plan.function}: grid must name a parameter of every machine, but it names none of "
            f"{Rival(plan, space).name}"
        )
    plan = replace(plan, grid=axes or None)
    rivals = []
    for values in itertools.product(*(grid[name] for name in settings)):
        machine = copy.deepcopy(space.machine)
        chosen = {}
        for name, value in zip(settings, values, strict=True):
            chosen[name] = _chosen(plan.function, machine, name, value)
        rivals.append(Rival(plan, Space(plan.function, machine, batched, chosen)))
    return rivals


def _chosen(function: str, machine: nn.Module, name: str, value: Any) -> Any:
    """Change a setting of a machine in place; returns the new value."""
    kernel = settings_of(machine)[name]
    setting = name.rpartition(".")[2]
    try:
        kernel.choose(setting, value.item() if isinstance(value, Tensor) else value)
    except (ValueError, RuntimeError) as fault:
        raise ValueError(f"{function}: grid of {setting} must hold valid values: {fault}") from fault
    return getattr(kernel, setting)


def require_comparable(score: Score, rivals: Sequence[Rival]) -> None:
    """Raise if residuals of KFD, which codes its targets, are compared with those of other machines."""
    is_kfd = {isinstance(rival.space.machine, KFD) for rival in rivals}
    if len(is_kfd) > 1 and score.targets == "numbers":
        raise ValueError(
            f"{score.function}: {score.argument} must be for classes to compare KFD with other machines, "
            f"since it codes its targets; got {score.name}, use smooth_error or error_rate"
        )


def search_all(
    rivals: Sequence[Rival],
    problems: Sequence[ProblemBatch],
    score: Score,
    deadline: float,
    names: Sequence[str] = ("",),
    before: int = 0,
) -> list[Outcome]:
    """Search all machines, see Note [machines compared]; returns the results up to an early stop.

    Args:
        problems: the data of each machine; their names, such as " in split 3", are for error messages.
        deadline: of time.monotonic(), maybe infinite.
        before: evaluations of earlier searches, which come first in the history.

    After an early stop some problems may have no candidate; if none has one, KeyboardInterrupt is raised.
    """
    outcomes: list[Outcome] = []
    generator = rivals[0].plan.generator
    state = None if generator is None else generator.get_state()
    for number, (rival, data) in enumerate(zip(rivals, problems, strict=True)):
        if generator is not None and state is not None:
            generator.set_state(state)  # every machine starts from the same random state
        now = time.monotonic()
        until = now + (deadline - now) / (len(rivals) - number)
        done = before + sum(len(outcome.history) for outcome in outcomes)
        watch = _Watch(until, rival.plan.callback, number, done)
        objective, stopped = run(rival.plan, rival.space, data, score, watch, names)
        history = watch.numbered(objective.history)
        outcomes.append(Outcome(rival, objective, stopped, history))
        if stopped in (INTERRUPTED, CALLBACK):
            break
    require_found(outcomes, names)
    return outcomes


class _Watch:
    """Ends a search between evaluations: by the time budget or the callback."""

    def __init__(
        self,
        until: float,
        callback: Callable[[Evaluation], Any] | None,
        machine: int,
        done: int,
    ) -> None:
        self.until, self.callback = until, callback
        self.machine, self.done = machine, done

    def numbered(self, steps: list[Evaluation]) -> list[Evaluation]:
        """Evaluations of this machine, numbered after those of earlier machines."""
        return [step._replace(number=self.done + step.number, machine=self.machine) for step in steps]

    def __call__(self, steps: list[Evaluation]) -> None:
        """Raise StopSearch if the search is to end after these evaluations."""
        if self.callback is not None:
            # Called for all of the batch, even if the first call returns True.
            stop = [self.callback(step) for step in self.numbered(steps)]
            if any(stop):
                raise StopSearch(CALLBACK)
        if time.monotonic() >= self.until:
            raise StopSearch(TIME_BUDGET)


def best_of(outcomes: Sequence[Outcome], problem: int) -> tuple[Outcome, Best] | None:
    """The machine with the best criterion in a problem, and its best candidate; None if there is none."""
    found = [outcome for outcome in outcomes if outcome.objective.best[problem].theta is not None]
    if not found:
        return None

    def loss(outcome: Outcome) -> float:
        return outcome.objective.score.sign * outcome.objective.best[problem].value

    winner = min(found, key=loss)
    return winner, winner.objective.best[problem]


def require_found(outcomes: list[Outcome], names: Sequence[str]) -> None:
    """Raise if no candidate could be evaluated in a problem, unless the search stopped before."""
    stopped = [outcome.stopped for outcome in outcomes if outcome.stopped]
    missing = [number for number in range(len(names)) if best_of(outcomes, number) is None]
    if not missing or (stopped and len(missing) < len(names)):
        return
    if INTERRUPTED in stopped:
        raise KeyboardInterrupt
    first = outcomes[0]
    failure = first.objective.failures.get(missing[0])
    reason = failure or "the criterion is not finite"
    where = names[missing[0]]
    if TIME_BUDGET in stopped:
        where += " within the time budget"
    function = first.rival.space.function
    raise NoCandidateError(f"{function}: no candidate could be evaluated{where}: {reason}") from failure
