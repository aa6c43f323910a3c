"""One machine trained on the rows of all processes, with held-out predictions of the rows of each."""

from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from torchloo.distributed.processes import Processes
from torchloo.distributed.same_machine import require_same_machine
from torchloo.held_out import HeldOut
from torchloo.machine import LeastSquares
from torchloo.primal.block import Rows, Shard, require_alone
from torchloo.primal.collective import require_same
from torchloo.primal.solved import StreamFit

__all__ = ["fit", "gather", "lco", "loo", "path", "solve", "sum_gradients"]

M = TypeVar("M", bound=LeastSquares)


def solve(machine: LeastSquares, stream: Rows, group: Any = None) -> StreamFit:
    """Solve the machine for the rows of all processes, of which each has a stream; see `StreamFit`.

    One all-reduce of the normal equations, of m^2 numbers. `held_out` and `path` of the StreamFit return the
    rows of this process, and `machine.fit(solved)` stores the fitted machine in each process; all processes
    must call them. Held-out predictions are differentiable in the parameters of the machine.

    Args:
        machine: SparseLSSVM with a basis given as a tensor, or RLS or LSSVM with a linear kernel; the same in
            all processes.
        stream: the rows of this process.
        group: a process group; None for all processes.
    """
    return machine.solve(_shared("distributed.solve", machine, stream, None, None, group))


def _shared(
    function: str,
    machine: LeastSquares,
    X: Tensor | Rows,
    y: Tensor | None,
    weight: Tensor | None,
    group: Any,
    *required: Any,
) -> Rows:
    """The rows of this process, to be shared with those of the others; checks that machines are equal."""
    rows = "a Stream" if isinstance(X, Rows) else "tensors"
    processes = Processes(function, group).named(f"{function} of {rows}")
    require_same_machine(processes, machine)

    def own() -> Rows:
        for problem, given in required:
            if given is None:
                raise TypeError(f"{function}: {problem}, got None")
        if not isinstance(X, Rows):
            return Shard(X, y, weight)
        require_alone(function, y, weight)
        return X

    return processes.run(own).shared(processes)


def fit(
    machine: M, X: Tensor | Rows, y: Tensor | None = None, weight: Tensor | None = None, group: Any = None
) -> M:
    """Fit the machine, in every process, to the rows of all processes; arguments as in `loo`."""
    return machine.fit(_shared("distributed.fit", machine, X, y, weight, group))


def path(
    machine: LeastSquares,
    X: Tensor | Rows,
    y: Tensor | None = None,
    regs: Tensor | None = None,
    clusters: object | None = None,
    weight: Tensor | None = None,
    group: Any = None,
) -> HeldOut:
    """Held-out predictions of the rows of this process for every regularisation; see `loo` and `lco`."""
    required = ("regs must be regularisations (R,) or (R, c)", regs)
    rows = _shared("distributed.path", machine, X, y, weight, group, required)
    return machine.path(rows, regs=regs, clusters=clusters)


def loo(
    machine: LeastSquares,
    X: Tensor | Rows,
    y: Tensor | None = None,
    weight: Tensor | None = None,
    group: Any = None,
) -> HeldOut:
    """Leave-one-out predictions of the rows of this process, by the machine trained on all other rows.

    Differentiable in tensors: gradients are those of the sum of the losses of all processes (Note [sums over
    processes]), or those of one loss of all rows, computed from `gather`. All processes must call backward.
    Gradients of X, y and weight are then complete; those of the machine's parameters are the contribution of
    this process until `sum_gradients(machine)` is called. The rows of a Stream have no gradients.

    Args:
        machine: SparseLSSVM with a basis given as a tensor, or RLS or LSSVM with a linear kernel; the same in
            all processes.
        X: rows (n_r, d) of this process, y: their targets, (n_r,) or (n_r, c), weight: (n_r,).
        group: a process group; None for all processes.

    Cost: n_r m^2 and m^3; memory 4 n_r m numbers, 6 n_r m with the backward; for a stream see `StreamFit`.
    Communication: an all-reduce of m^2 numbers in the forward, and one in the backward.
    """
    return machine.loo(_shared("distributed.loo", machine, X, y, weight, group))


def lco(
    machine: LeastSquares,
    X: Tensor | Rows,
    y: Tensor | None = None,
    clusters: object = None,
    weight: Tensor | None = None,
    group: Any = None,
) -> HeldOut:
    """Leave-cluster-out predictions, for cluster labels (n_r,); otherwise as `loo`.

    All rows of a cluster must be in one process. Clusters that have more rows than the machine has features,
    and those that are refitted for accuracy, need m^2 numbers each.
    """
    required = ("clusters must be integer labels; use loo without", clusters)
    rows = _shared("distributed.lco", machine, X, y, weight, group, required)
    return machine.lco(rows, clusters=clusters)


def sum_gradients(machine: nn.Module | Iterable[Tensor], group: Any = None) -> None:
    """Sum the gradients of parameters over the processes, by one all-reduce.

    Afterwards they are those of the sum of the losses of all processes, the same in each process. Parameters
    that have a gradient in no process are left without one.
    """
    processes = Processes("distributed.sum_gradients", group)

    def own() -> tuple[list[Tensor], list[Any]]:
        parameters = list(machine.parameters() if isinstance(machine, nn.Module) else machine)
        return parameters, [(tuple(p.shape), str(p.dtype)) for p in parameters]

    parameters, shapes = processes.run(own)
    require_same("distributed.sum_gradients", processes, "shapes and dtypes of parameters", shapes)
    has_gradient = processes.gather([p.grad is not None for p in parameters])
    used = [p for p, *flags in zip(parameters, *has_gradient, strict=True) if any(flags)]
    if not used:
        return
    with torch.no_grad():
        # Concatenated, float32 and float64 gradients are summed in float64.
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in used]
        sums = processes.sums(*gradients)
        totals = [total.to(p) for p, total in zip(used, sums, strict=True)]
    for parameter, total in zip(used, totals, strict=True):
        parameter.grad = total


def gather(held_out: HeldOut, group: Any = None) -> HeldOut:
    """The held-out predictions of all processes, concatenated, in each process; differentiable.

    For a loss of all rows that every process computes. Memory: n c numbers in each process.
    """
    processes = Processes("distributed.gather", group)
    rows = processes.run(lambda: _axis_of_rows(held_out))
    outputs = held_out.outputs
    others = [size for axis, size in enumerate(outputs.shape) if axis != rows]
    kind = (held_out.clusters is not None, others, str(outputs.dtype))
    require_same("distributed.gather", processes, "whether there are clusters, other axes and dtype", kind)

    def of_all(values: Tensor) -> Tensor:
        rows_first = values.movedim(rows, 0).contiguous()
        return processes.rows(rows_first, shared=True).movedim(0, rows)

    clusters = held_out.clusters
    return HeldOut(
        outputs=of_all(held_out.outputs),
        residuals=of_all(held_out.residuals),
        targets=of_all(held_out.targets),
        weight=of_all(held_out.weight),
        clusters=None if clusters is None else torch.cat(processes.gather(clusters)),
        variance=of_all(held_out.variance),
        refitted=of_all(held_out.refitted.double()) > 0,
    )


def _axis_of_rows(held_out: HeldOut) -> int:
    if not isinstance(getattr(held_out, "weight", None), Tensor):
        raise TypeError(f"distributed.gather: held_out must be a HeldOut, got {type(held_out).__name__}")
    return held_out.weight.ndim - 1
