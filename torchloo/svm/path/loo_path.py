"""Leave-one-out of stacked SVMs by the exact path, with a refit where the path leaves a doubt."""

from typing import NamedTuple

import torch
from torch import Tensor

from torchloo.svm import result as code
from torchloo.svm.gradient import Deferred, HeldOutMachines, in_parts_of_rows
from torchloo.svm.path.unlearn import unlearn
from torchloo.svm.proof.active import judged, value_error
from torchloo.svm.proof.certify import Held, value_bound
from torchloo.svm.proof.checks import only_of_its_class, sufficiency_checks
from torchloo.svm.records import Exact, RowOutcome, SVMProblem, Targets, Unlearned
from torchloo.svm.solve.exact import solve_exactly, solve_from
from torchloo.svm.solve.newton import Sets
from torchloo.svm.solve.smaller import left_of, solve_smaller
from torchloo.svm.tolerances import NOTHING, at_bound, is_free, size

__all__ = ["leave_one_out_by_path"]


class _Rows:
    """Work arrays (T, n) for the rows of T machines: everything starts as check 1 leaves it."""

    def __init__(self, problem: SVMProblem, full: Exact) -> None:
        v = problem.variable
        self.problem, self.full = problem, full
        self.y, box, alpha = (x.gather(1, v) for x in (problem.y, problem.box, full.alpha))
        self.kept = left_of(box, problem.row_box)
        self.room = alpha - self.kept
        self.open = self.room > NOTHING * size(alpha, box)
        self.outputs = (problem.y * (1 + full.margin)).gather(1, v)
        self.doubt = value_bound(
            problem.diagonal(), full.alpha, full.margin, problem.box, problem.rounding
        )  # (T, m)
        self.certified = self.outputs.abs() > self.doubt.gather(1, v)
        in_doubt = (~(self.certified | self.open)).any(1).nonzero()[:, 0]
        if in_doubt.numel():
            sign = _full_sign(problem.take(in_doubt), full.take(in_doubt)).gather(1, v[in_doubt])
            self.certified[in_doubt] |= sign * self.outputs[in_doubt] > 0
        self.resolved_by = torch.full_like(v, code.UNUSED)
        self.iterations = torch.zeros_like(v)

    def settle(self, mask: Tensor, outputs: Tensor, by: int | Tensor) -> None:
        """Close the rows of a mask with outputs that are certified, all (T, n)."""
        self.outputs = torch.where(mask, outputs, self.outputs)
        self.certified |= mask
        self.resolved_by = torch.where(mask, by, self.resolved_by)
        self.open &= ~mask

    def put(self, rows: Tensor, **fields: Tensor) -> None:
        """Enter values (R,) at rows, numbered from 0 to T n."""
        for name, values in fields.items():
            getattr(self, name).view(-1).index_copy_(0, rows, values)

    def at(self, x: Tensor, rows: Tensor) -> Tensor:
        """The values (T, n) at rows, (R,)."""
        return x.reshape(-1).index_select(0, rows)


def leave_one_out_by_path(
    problem: SVMProblem,
    full: Exact,
    values: bool,
    trace: bool = False,
    checks: bool = True,
    only: Tensor | None = None,
) -> RowOutcome:
    """Check 1 and the path; without `values` checks 2, 3 and E2 come between, and errors stop early.

    Of T machines at once. `only` (n,) is true for the rows that are asked for.
    """
    rows = _Rows(problem, full)
    width = at_bound(full.alpha, problem.box)
    inner = is_free(full.alpha, problem.box, width)
    filled = _settle_without_free(rows, inner, width)
    alone = only_of_its_class(rows.y)  # what is left predicts the other label
    rows.settle(alone, -rows.y, code.ONE_CLASS)
    if checks and not values:
        _settle_by_checks(rows, inner.any(1, keepdim=True))
    if only is not None:
        rows.open &= only
    index = rows.open.view(-1).nonzero()[:, 0]
    paths = None
    if index.numel():
        first, number = _distinct(rows, index)
        target = rows.at(problem.variable, first)
        targets = Targets(first // rows.y.shape[1], target, rows.at(rows.kept, first))
        end, by = _with_refits(problem, full, targets, _followed(problem, full, targets, values, trace))
        paths = _Paths(index, number, targets, end)
        rows.put(index, outputs=end.output[number], certified=end.proved[number])
        rows.put(index, iterations=end.events[number], resolved_by=by[number])
    outputs = rows.outputs if values else torch.where(rows.outputs >= 0, 1.0, -1.0).to(rows.outputs)
    machines = None
    if trace:
        unchanged = (~alone).view(-1).index_fill(0, index, False).view_as(alone)
        known = unchanged & ~filled, unchanged & filled, paths
        machines = [_deferred(rows, *known, some) for some in in_parts_of_rows(problem)]
    none = torch.zeros_like(rows.iterations)  # kernel columns and Newton steps, of an SMO
    return RowOutcome(outputs, rows.certified, rows.resolved_by, rows.iterations, none, none, machines)


def _distinct(rows: _Rows, index: Tensor) -> tuple[Tensor, Tensor]:
    """One open row for each distinct (machine, variable, C), and which of them each open row equals."""
    problem, n = rows.problem, rows.y.shape[1]
    m = problem.y.shape[1]
    if m == n:  # no two rows are one variable
        return index, torch.arange(len(index), device=index.device)
    boxes, box = torch.unique(rows.at(problem.row_box, index), return_inverse=True)
    variable = rows.at(problem.variable, index) + m * (index // n)
    names, number = torch.unique(variable * len(boxes) + box, return_inverse=True)
    first = torch.full_like(names, len(index))
    first.scatter_reduce_(0, number, torch.arange(len(index), device=index.device), "amin")
    return index[first], number


def _settle_by_checks(rows: _Rows, some_free: Tensor) -> None:
    """Checks 2 and 3 and E2 on the variables; alpha of a variable bounds what one row of it holds.

    Only of machines with a free variable (T, 1).
    """
    problem, alpha = rows.problem, rows.full.alpha
    f = problem.y * (1 + rows.full.margin)
    by = sufficiency_checks(problem.matrices(), problem.y, alpha, f, problem.box, rows.doubt)
    by = by.gather(1, problem.variable)
    rows.settle(rows.open & (by > code.UNUSED) & some_free, rows.outputs, by)


def _settle_without_free(rows: _Rows, inner: Tensor, width: Tensor) -> Tensor:
    """No free variable without these rows: b has an interval, which changes even if an unused row goes.

    Returns which of them take the only free variable to its bound, (T, n).
    """
    problem, v = rows.problem, rows.problem.variable
    # A row may take the only free variable to its bound merely by making its box smaller.
    filled = inner.gather(1, v) & (rows.room >= -width.gather(1, v))
    loose = ~rows.open & (inner.sum(1, keepdim=True) - filled.int() == 0)
    index = loose.view(-1).nonzero()[:, 0]
    if not index.numel():
        return loose
    table = index // v.shape[1]
    target, kept = rows.at(v, index), rows.at(rows.kept, index)
    held = Held.of(problem, table, rows.full.alpha[table], problem.box[table], target, kept)
    outputs, certified = judged(problem.K, held)
    rows.put(index, outputs=outputs, certified=certified)
    return loose & filled


def _full_sign(problem: SVMProblem, full: Exact) -> Tensor:
    """Signs of the full machines' decision values that their active sets prove, else 0, (T, m)."""
    held = Held.full(problem, full)
    error = value_error(problem.K, held, full.bias)
    f = held.u + full.bias[:, None]
    return f.sign() * (f.abs() > error)


def _followed(
    problem: SVMProblem, full: Exact, targets: Targets, values: bool, coefficients: bool
) -> Unlearned:
    """`unlearn`; machines whose equations are singular have no paths, and leave the batch unsolved."""
    try:
        return unlearn(problem, full, targets, values, coefficients)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        if len(problem.y) == 1:
            return Unlearned.unsolved(targets.room(full), problem.y.shape[1] if coefficients else 0)
    middle, found = len(problem.y) // 2, []
    for some in (slice(0, middle), slice(middle, len(problem.y))):
        own = targets.take(_between(targets.table, some.start, some.stop))
        if own.table.numel():
            own = own._replace(table=own.table - some.start)
            found.append(_followed(problem.take(some), full.take(some), own, values, coefficients))
    return Unlearned(*map(torch.cat, zip(*found, strict=True)))


def _with_refits(
    problem: SVMProblem, full: Exact, targets: Targets, end: Unlearned
) -> tuple[Unlearned, Tensor]:
    """Solve without the rows what the paths have left open; and by what each is resolved, (N,)."""
    by = torch.full_like(targets.table, code.PATH)
    left = (~end.solved).nonzero()[:, 0]
    if not left.numel():
        return end, by
    gone = targets.take(left)
    table, target, kept = gone
    boxes = gone.boxes(problem)
    near = full.alpha[table].clamp_min(0).minimum(boxes)

    def solve(smaller: SVMProblem, rows: Tensor, V: Tensor) -> Exact:
        its = full.take(table[rows])
        alpha, free, upper = (x.gather(1, V) for x in (near[rows], its.free, its.upper))
        return _solve_near(smaller, Sets(alpha, its.bias, free, upper))

    alpha = solve_smaller(problem, table, boxes, near, solve=solve)
    held = Held.of(problem, table, alpha, problem.box[table], target, kept)
    output, proved = judged(problem.K, held)
    alpha = alpha if end.alpha.shape[1] else end.alpha[left]
    anew = Unlearned(output, proved, proved, end.events[left], alpha)
    return end.replaced(left, anew), by.index_fill(0, left, code.REFIT)


def _solve_near(problem: SVMProblem, sets: Sets) -> Exact:
    """Exact solutions by homotopies from those of the full machines; anew where these do not lead there.

    A path that has missed an event among margins that hardly differ ends near the solution, where an interior
    point would find no clear sets: refits of banana, RBF with lengthscale 19, take a tenth of the time.
    """
    try:
        found = solve_from(problem, sets)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        return solve_exactly(problem)
    rows = (~found.optimal).nonzero()[:, 0]
    return found.replaced(rows, solve_exactly(problem.take(rows))) if rows.numel() else found


class _Paths(NamedTuple):
    """What the backward has to know of rows that were followed."""

    rows: Tensor
    """Rows, numbered from 0 to T n, ascending, (R,)."""
    number: Tensor
    """Which path each has, (R,)."""
    targets: Targets
    end: Unlearned


def _deferred(rows: _Rows, same: Tensor, filled: Tensor, paths: _Paths | None, some: slice) -> Deferred:
    """The held-out machines of some problems, for a backward.

    The full one for rows (T, n) that are the `same` without themselves, and for `filled` ones, whose variable
    is then at its bound.
    """
    n = rows.y.shape[1]
    every = torch.arange(len(rows.y), device=rows.y.device)[some]
    problem, full = rows.problem.take(some), rows.full.take(some)
    same, filled, kept = (x[some].flatten() for x in (same, filled, rows.kept))

    def enter(machines: HeldOutMachines) -> None:
        own = same.nonzero()[:, 0]
        machines.enter(own, own // n, every - some.start, full.alpha, problem.box)
        own = filled.nonzero()[:, 0]
        if own.numel():
            gone = Targets(own // n, problem.variable.flatten()[own], kept[own])
            number = torch.arange(len(own), device=own.device)
            machines.enter(own, number, gone.table, full.alpha[gone.table], gone.boxes(problem))
        if paths is None:
            return
        own = _between(paths.rows, some.start * n, some.stop * n)
        first = _between(paths.targets.table, some.start, some.stop)
        if own.numel():
            gone = paths.targets.take(first)
            gone = gone._replace(table=gone.table - some.start)
            number = paths.number[own] - first[0]
            ends = gone.table, paths.end.alpha[first], gone.boxes(problem)
            machines.enter(paths.rows[own] - some.start * n, number, *ends)

    return Deferred(problem, every, enter)


def _between(numbers: Tensor, first: int, end: int) -> Tensor:
    """Where the numbers are from `first` up to `end`."""
    return ((numbers >= first) & (numbers < end)).nonzero()[:, 0]
