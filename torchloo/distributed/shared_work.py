"""Independent work distributed over processes: any items, grids, outer splits, the points of an SVM."""

import copy
import itertools
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
    """function(item) for all items, distributed over the processes; all results, in order, in each process.

    Args:
        function: called with one item; its result is pickled.
        items: the same in all processes; process r of w takes items r, r + w, r + 2 w and so on.
        group: a process group; None for all processes.
    """
    processes = Processes("distributed.share", group)
    return _share(processes, function, processes.run(lambda: list(items)))


def _share(processes: Processes, function: Callable[[Any], T], items: list[Any]) -> list[T]:
    counts = processes.gather(len(items))
    if len(set(counts)) > 1:
        raise ValueError(
            f"{processes.function}: items must be the same in all processes, got {counts} of them"
        )
    own = items[processes.rank :: processes.count]
    results = processes.gather(processes.run(lambda: [function(item) for item in own]))
    in_turns = itertools.zip_longest(*results)  # the first item of every process, then the second, ...
    return list(itertools.chain.from_iterable(in_turns))[: len(items)]


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
    """`tl.select` over a grid whose points are distributed over the processes; the same result in each.

    Every process has all rows. The values of one parameter are distributed: of the parameters other than the
    regularisation, which comes from one decomposition, the one with the most values.

    Args:
        machine, X, y, criterion: as in `tl.select`, the same in all processes; a single machine.
        grid: {name: values} of parameters.
        group: a process group; None for all processes.
        options: clusters, weight, criterion_weight, start, prior, time_budget, progress of `tl.select`.
    """
    processes = Processes("distributed.select", group)
    axes = processes.run(lambda: _axes(machine, grid))
    name = max(axes, key=lambda axis: (axis != "reg", len(axes[axis])))

    def one(part: list[Any]) -> Selection | NoCandidateError:
        try:
            return select_alone(machine, X, y, criterion, "grid", grid=axes | {name: part}, **options)
        except NoCandidateError as error:  # other processes may have found some
            return error

    count = min(processes.count, len(axes[name]))
    found = _share(processes, one, [axes[name][k::count] for k in range(count)])
    chosen = [outcome for outcome in found if isinstance(outcome, Selection)]
    if not chosen:
        failure = found[0]
        assert isinstance(failure, NoCandidateError)
        raise failure

    def least(selection: Selection) -> float:
        return min(entry.objective for entry in selection.history)

    best = min(chosen, key=least)
    entries = [entry for selection in chosen for entry in selection.history]
    history = [entry._replace(number=k) for k, entry in enumerate(entries, 1)]
    twin = copy.deepcopy(machine)
    twin.load_state_dict(best.machine.state_dict())
    reasons = [selection.table[0]["stopped"] for selection in chosen]
    stopped = next(filter(None, reasons), "")
    row = {**best.table[0], "evaluations": len(history), "stopped": stopped}
    return Selection(twin, best.value, history, len(history), [row])


def _axes(machine: KernelMachine, grid: Mapping[str, Iterable[Any]]) -> dict[str, list[Any]]:
    """The values of a grid as lists; ValueError if it is not valid."""
    axes: dict[str, list[Any]] = {}
    if isinstance(grid, Mapping):
        axes = {name: list(values) for name, values in grid.items()}
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
    """`tl.validate` with its splits distributed over the processes; the same result in each.

    Every process has all rows. Random splits are drawn by process 0. After Ctrl-C in one process the result
    lacks those of its splits whose search had not begun, and has all splits of the other processes.

    Args:
        machine, X, y, splits, clusters, generator: as in `tl.validate`, the same in all processes.
        arguments, options: all other arguments of `tl.validate`.
        group: a process group; None for all processes.
    """
    processes = Processes("distributed.validate", group)
    pairs = processes.run(lambda: resolve(splits, len(X), clusters, generator))
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
    ]  # of an interrupted process, only the splits that it searched
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
    """`SVC.loo` with its points distributed over the processes; the result for all points in each.

    Every process has all rows and solves the full machine; process i mod w leaves out point i. Differentiable
    like `SVC.loo`, for a loss of all points that every process computes: gradients are the contribution of
    the process until they are summed by `sum_gradients`.
    """
    processes = Processes("distributed.svc_loo", group)

    def own() -> tuple[SVMHeldOut, Tensor]:
        n = X.shape[-machine.kernel.event_dim - 1]
        mine = torch.arange(n, device=X.device) % processes.count == processes.rank
        return machine.loo(X, y, weight, method, values, epsilon, rows=mine), mine

    part, mine = processes.run(own)
    if part.outputs.ndim > part.weight.ndim:
        mine = mine.unsqueeze(-1)  # (n, 1) beside an output axis

    def merged(field: Tensor) -> Tensor:
        masked = torch.where(mine, field, torch.zeros_like(field))
        with torch.no_grad():
            (total,) = processes.sums(masked)
        return masked + (total - masked.detach())  # the gradient is that of the points of this process

    outputs = merged(part.outputs)
    certified = merged(part.certified.int()) > 0
    counts = (part.resolved_by, part.iterations, part.kernel_columns, part.newton_steps)
    by, iterations, columns, newton = map(merged, counts)
    return SVMHeldOut.build(
        part.targets, part.weight, outputs, certified, by, iterations, columns, newton, values=values
    )
