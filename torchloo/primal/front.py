"""Where machines hand over their rows: tensors, streams, and those that several processes share.

A machine says what the features of its rows are: `features_of` of tensors, `features_of_rows` of blocks.
"""

from functools import partial

import torch
from torch import Tensor

from torchloo.classes import is_label, sorted_labels
from torchloo.guards import Guard, values_visible
from torchloo.precision import full_precision
from torchloo.primal.block import Memory, Rows, RowSource, Shard, require_alone
from torchloo.primal.collective import Peers, shared_labels
from torchloo.primal.machines import Expansion, transposed
from torchloo.primal.solved import MachineOfFeatures, StreamFit
from torchloo.primal.whole import Known, Normal, Primal, ridge_penalty
from torchloo.problem import Problem, Regs, check_rows

__all__ = ["explicit", "primal", "solve_by_passes", "solve_rows", "solve_tensors"]


def solve_rows(
    machine: MachineOfFeatures, rows: Rows | StreamFit, y: object, weight: object, reg: Tensor | Regs
) -> StreamFit:
    """The machine solved from rows that bring their targets and weights, and from those of other processes.

    What was solved already is given back.
    """
    rows.others.run(lambda: require_alone(machine._function, y, weight))
    if isinstance(rows, StreamFit):
        return rows
    if isinstance(rows, Shard):
        return _of_shard(machine, rows, reg)
    assert isinstance(rows, RowSource)
    return _of_stream(machine, rows, reg)


def _of_stream(machine: MachineOfFeatures, stream: RowSource, reg: Tensor | Regs) -> StreamFit:
    function, others = machine._function, stream.others
    if machine.has_given_classes:
        stream = stream.with_classes(machine.classes)
    elif others.count > 1:
        own = others.run(lambda: stream.labels(function))
        stream = stream.with_classes(shared_labels(function, others, own, stream.n or 0))
    first = partial(stream.head, function)
    expansion = others.run(lambda: machine.features_of_rows(first))
    return StreamFit(Guard(function), stream, expansion, reg, machine.has_bias, others, machine)


def _of_shard(machine: MachineOfFeatures, shard: Shard, reg: Tensor | Regs) -> StreamFit:
    function, others, X, y, weight = machine._function, shard.others, shard.X, shard.y, shard.weight
    classes = None
    if not machine.has_given_classes:
        found = others.run(lambda: sorted_labels(function, "y", y) if is_label(y) else None)
        classes = shared_labels(function, others, found, len(X))

    def own() -> tuple[Problem, Tensor, Expansion, bool]:
        targets = y if classes is None else machine.coded_targets(Guard(function), X, y, classes)[0]
        guard, Y, flat = machine.checked_targets(X, targets)
        if X.ndim != -machine.row_axis or not machine.is_one(reg):
            raise ValueError(
                f"{function}: X and reg must be without batch dimensions, got X {tuple(X.shape)}"
            )
        found = machine.features_of(guard, X, Y, weight)
        if found is None:
            raise TypeError(
                f"{function}: rows can be divided among processes only for a machine with few features: a "
                f"linear kernel, or SparseLSSVM(kernel, reg, basis=...); got {machine}"
            )
        problem = check_rows(guard, found[0], Y, reg, weight)
        guard.check()
        return problem, *found, flat

    return _in_memory(machine, *others.run(own), reg, others, classes)


def explicit(Z: Tensor) -> tuple[Tensor, Expansion]:
    """Rows that are features already, (..., n, p)."""
    return Z, Expansion(transposed, Z.shape[-1])


def solve_by_passes(
    guard: Guard,
    Z: Tensor,
    weight: Tensor,
    Y: Tensor,
    reg: Tensor | Regs,
    bias: bool,
    penalty: Tensor | None = None,
) -> StreamFit | None:
    """The machine of features, solved in float64; None where values cannot be looked at.

    Args:
        guard: demands on the values; that the solution exists becomes one of them.
        Z: (..., n, p), weight: (..., n) and Y: (..., n, c), with equal batch dimensions.
        reg: of batch shape; or Regs, those of a path or one for each output.
        bias: whether there is an unpenalised bias.
        penalty: what the regularisation multiplies, (..., p, p); None for the identity.
    """
    if not values_visible(Z, Y):
        return None
    if penalty is not None:
        penalty = penalty.detach().double()
        penalty = penalty.flatten(0, -3) if penalty.ndim > 3 else penalty  # like the rows of Memory
    expansion = Expansion(transposed, Z.shape[-1], single=False, penalty=penalty)
    return StreamFit(guard, Memory(Z, Y, weight, flat=False), expansion, reg, bias)


def primal(
    guard: Guard,
    Z: Tensor,
    weight: Tensor,
    Y: Tensor,
    reg: Tensor,
    bias: bool,
    penalty: Tensor | None = None,
) -> tuple[Primal, StreamFit | None]:
    """`solve_by_passes`, and the same with operations on all rows that torch differentiates."""
    Z = Z if torch.is_grad_enabled() else Z.detach()  # targets, weights and reg are copies without a graph
    with full_precision(Z):
        solved = solve_by_passes(guard, Z, weight, Y, reg, bias, penalty)
        R = ridge_penalty(reg, Z) if penalty is None else penalty.double()
        known = None if solved is None else Known(*(t[0] for t in solved.known()))  # of the only one
        return Normal.of(Z, weight, bias).solve(R, reg.double(), Y.double(), known), solved


def solve_tensors(
    machine: MachineOfFeatures,
    guard: Guard,
    X: Tensor,
    Z: Tensor | None,
    Y: Tensor,
    weight: Tensor | None,
    flat: bool,
    reg: Tensor | Regs,
) -> StreamFit | None:
    """The machine solved from tensors by their features, where it has fewer of them than rows.

    Z are the features of X where they are explicit, else None. None for more features than rows, for batches
    of problems without explicit features, and where values cannot be looked at.
    """
    if Z is not None and Z.shape[-1] + machine.has_bias >= Z.shape[-2]:
        return None
    one = X.ndim == -machine.row_axis and (weight is None or weight.ndim == 1) and machine.is_one(reg)
    if (Z is None and not one) or not values_visible(X, Y, machine.log_reg):
        return None
    found = machine.features_of(guard, X, Y, weight) if Z is None else explicit(Z)
    if found is None or found[1].count + machine.has_bias >= X.shape[machine.row_axis]:
        return None
    problem = check_rows(guard, found[0], Y, reg, weight)
    return _in_memory(machine, problem, *found, flat, reg, Peers(), None)


def _in_memory(
    machine: MachineOfFeatures,
    problem: Problem,
    inputs: Tensor,
    expansion: Expansion,
    flat: bool,
    reg: Tensor | Regs,
    others: Peers,
    classes: Tensor | None,
) -> StreamFit:
    if problem.reg.ndim:
        inputs = problem.expand(inputs)
    memory = Memory(inputs, problem.Y, problem.weight, flat, classes)
    reg = reg if isinstance(reg, Regs) else problem.reg
    return StreamFit(problem.guard, memory, expansion, reg, machine.has_bias, others, machine)
