"""Independent work shared out over processes: any items, grids, outer splits, the points of an SVM."""

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from torchloo.distributed.processes import Processes
from torchloo.machine import KernelMachine
from torchloo.search.compared import NoCandidateError, settings_of
from torchloo.search.parameters import matching_names
from torchloo.selection import Selection
from torchloo.selection import select as select_alone
from torchloo.splits import resolve
from torchloo.svm import SVC, SVMHeldOut
from torchloo.validation import Validation, summed_up
from torchloo.validation import validate as validate_alone

__all__ = ["select", "share", "svc_loo", "validate"]

T = TypeVar("T")


def share(function: Callable[[Any], T], items: Iterable[Any], group: Any = None) -> list[T]:
    """function(item) for all items, shared out over the processes; the results, in order, in each.

    Args:
        function: of one item; what it returns is pickled.
        items: the same in all processes; process r of w takes items r, r + w, r + 2 w and so on.
        group: a process group; None: all processes.
    """
    processes = Processes("distributed.share", group)
    return _share(processes, function, processes.together(lambda: list(items)))


def _share(processes: Processes, function: Callable[[Any], T], items: list[Any]) -> list[T]:
    counts = processes.gather(len(items))
    if len(set(counts)) > 1:
        raise ValueError(
            f"{processes.function}: what is shared out must be the same in all processes, got {counts} items"
        )
    own = items[processes.rank :: processes.count]
    results = processes.gather(processes.together(lambda: [function(item) for item in own]))
    return [results[k % processes.count][k // processes.count] for k in range(len(items))]


def select(
    machine: KernelMachine,
    X: Tensor,
    y: Tensor,
    criterion: Any = None,
    *,
    grid: Mapping[str, Iterable[Any]],
    group: Any = None,
    **options: Any,
) -> Selection:
    """`tl.select` over a grid whose points are shared out over the processes; the outcome in each.

    All rows are in every process. The values of one parameter, of those other than the regularisation
    the one with most values, are shared out; the regularisation comes from one decomposition as before.

    Args:
        machine, X, y, criterion: as in `tl.select`, alike in all processes; one machine.
        grid: {name: values} of parameters.
        group: a process group; None: all processes.
        options: clusters, weight, criterion_weight, start, prior, time_budget, progress of `tl.select`.
    """
    processes = Processes("distributed.select", group)
    axes = processes.together(lambda: _axes(machine, grid))
    name = max(axes, key=lambda axis: (axis != "reg", len(axes[axis])))

    def one(part: list[Any]) -> Selection | NoCandidateError:
        try:
            return select_alone(machine, X, y, criterion, "grid", grid=axes | {name: part}, **options)
        except NoCandidateError as error:  # others may have some
            return error

    count = min(processes.count, len(axes[name]))
    found = _share(processes, one, [axes[name][k::count] for k in range(count)])
    chosen = [outcome for outcome in found if isinstance(outcome, Selection)]
    if not chosen:
        failure = found[0]
        assert isinstance(failure, NoCandidateError)
        raise failure
    best = min(chosen, key=lambda outcome: min(entry.objective for entry in outcome.history))
    history = [entry for outcome in chosen for entry in outcome.history]
    history = [entry._replace(number=k) for k, entry in enumerate(history, 1)]
    twin = copy.deepcopy(machine)
    twin.load_state_dict(best.machine.state_dict())
    stopped = next((part.table[0]["stopped"] for part in chosen if part.table[0]["stopped"]), "")
    row = {**best.table[0], "evaluations": len(history), "stopped": stopped}
    return Selection(twin, best.value, history, len(history), [row])


def _axes(machine: KernelMachine, grid: Mapping[str, Iterable[Any]]) -> dict[str, list[Any]]:
    """The values of a grid, of which each parameter has some."""
    axes = {name: list(values) for name, values in grid.items()} if isinstance(grid, Mapping) else {}
    if not axes or not all(axes.values()):
        raise ValueError(f"distributed.select: grid must be a dict of name -> values, got {grid!r}")
    if not isinstance(machine, KernelMachine):
        raise TypeError(f"distributed.select: machine must be one machine, got {type(machine).__name__}")
    settings = [name for name in axes if matching_names(name, settings_of(machine))]
    if settings:
        raise ValueError(
            f"distributed.select: grid must name parameters, got the settings {', '.join(settings)}; search "
            "the machines with each of them by tl.distributed.share, or by tl.select"
        )
    return axes


def validate(
    machine: KernelMachine,
    X: Tensor,
    y: Tensor,
    splits: int | str | Iterable[tuple[Any, Any]] = 100,
    *arguments: Any,
    clusters: object | None = None,
    generator: torch.Generator | None = None,
    group: Any = None,
    **options: Any,
) -> Validation:
    """`tl.validate` with its splits shared out over the processes; the outcome, in order, in each.

    All rows are in every process. Random splits are those that process 0 draws. Ctrl-C in a process
    leaves out those of its splits whose search has not begun, and none of those of the others.

    Args:
        machine, X, y, splits, clusters, generator: as in `tl.validate`, alike in all processes.
        arguments, options: all others of `tl.validate`.
        group: a process group; None: all processes.
    """
    processes = Processes("distributed.validate", group)
    pairs = processes.together(lambda: resolve(splits, len(X), clusters, generator))
    pairs = processes.gather(pairs)[0]
    count = min(processes.count, len(pairs))

    def some(first: int) -> Validation:
        options_here = {"clusters": clusters, "generator": generator, **options}
        return validate_alone(machine, X, y, pairs[first::count], *arguments, **options_here)

    parts = _share(processes, some, list(range(count)))
    table = [
        dict(row, split=first + count * row["split"])
        for first, part in enumerate(parts)
        for row in part.table
    ]  # of a process that was interrupted, the splits that it came to
    table.sort(key=lambda row: row["split"])
    return summed_up(table, parts[0].metric, parts[0].criterion)


def svc_loo(
    machine: SVC,
    X: Tensor,
    y: Tensor,
    weight: Tensor | None = None,
    method: str = "auto",
    values: bool = True,
    epsilon: float = 1e-3,
    group: Any = None,
) -> SVMHeldOut:
    """`SVC.loo` with its points shared out over the processes; all points come back in each.

    Every process has all rows and solves the full machine; leaving out point i is the work of process
    i mod w. Differentiable as `SVC.loo` is, for a loss of all points computed alike in every process:
    gradients are the share of the process, until they are added up (`sum_gradients`).
    """
    processes = Processes("distributed.svc_loo", group)

    def own() -> tuple[SVMHeldOut, Tensor]:
        n = X.shape[-machine.kernel.event_dim - 1]
        mine = torch.arange(n, device=X.device) % processes.count == processes.rank
        return machine.loo(X, y, weight, method, values, epsilon, rows=mine), mine

    part, mine = processes.together(own)
    if part.outputs.ndim > part.weight.ndim:
        mine = mine.unsqueeze(-1)  # (n, 1) beside an output axis

    def merged(field: Tensor) -> Tensor:
        masked = torch.where(mine, field, torch.zeros_like(field))
        with torch.no_grad():
            (total,) = processes.sums(masked)
        return masked + (total - masked.detach())  # the gradient is that of the own points

    counts = (part.resolved_by, part.iterations, part.kernel_columns, part.newton_steps)
    outputs, certified = merged(part.outputs), merged(part.certified.int()) > 0
    by, iterations, columns, newton = map(merged, counts)
    return SVMHeldOut.build(
        part.targets, part.weight, outputs, certified, by, iterations, columns, newton, values=values
    )
