"""Leave-one-out of SVMs by the exact path, with a refit where the path leaves a doubt."""

import torch
from torch import Tensor

from torchloo.svm import held_out as code
from torchloo.svm.active import judged, value_error
from torchloo.svm.certify import Held, value_bound
from torchloo.svm.checks import only_of_its_class, strictly_inside, sufficiency_checks
from torchloo.svm.exact import Exact
from torchloo.svm.gradient import Deferred
from torchloo.svm.merge import Problem
from torchloo.svm.rows import RowOutcome
from torchloo.svm.unlearn import Task, Unlearned, unlearn_many
from torchloo.svm.without import Without, left_of, solve_without

__all__ = ["leave_one_out_by_path"]


class _Rows:
    """Work arrays for the n rows: everything starts as check 1 leaves it."""

    def __init__(self, problem: Problem, full: Exact) -> None:
        v = problem.variable
        n = len(v)
        self.y = problem.y[v]
        self.kept = left_of(problem.box[v], problem.row_box)
        self.room = full.alpha[v] - self.kept
        self.open = self.room > 1e-9 * torch.minimum(problem.box[v], full.alpha.amax())
        self.outputs = (problem.y * (1 + full.margin))[v]
        self.doubt = value_bound(problem.K, full.alpha, full.margin, problem.box, problem.rounding)  # (m,)
        self.certified = self.outputs.abs() > self.doubt[v]
        if not bool((self.certified | self.open).all()):
            self.certified |= _full_sign(problem, full)[v] * self.outputs > 0
        self.resolved_by = torch.full((n,), code.UNUSED, device=v.device)
        self.iterations, self.columns, self.newton = torch.zeros(3, n, dtype=torch.long, device=v.device)

    def settle(self, rows: Tensor, outputs: Tensor, certified: Tensor, by: int | Tensor) -> None:
        """Close rows with an outcome."""
        self.outputs[rows] = outputs
        self.certified[rows] = certified
        self.resolved_by[rows] = by
        self.open[rows] = False


def leave_one_out_by_path(
    machines: list[tuple[Problem, Exact]],
    values: bool,
    trace: bool = False,
    checks: bool = True,
    only: Tensor | None = None,
) -> list[RowOutcome]:
    """Check 1 and the path; without `values` checks 2, 3 and E2 come between, and errors stop early.

    `only` (n,) is true for the rows that are asked for.
    """
    works = [_Work(problem, full, values, trace, checks, only) for problem, full in machines]
    open_works = [work for work in works if len(work.first)]
    ends = unlearn_many([work.task() for work in open_works], values, coefficients=trace)
    for work, end in zip(open_works, ends, strict=True):
        work.settle(end)
    return [work.outcome(values) for work in works]


class _Work:
    """Leave-one-out of one machine: what is settled without a path, and what the path settles."""

    def __init__(
        self, problem: Problem, full: Exact, values: bool, trace: bool, checks: bool, only: Tensor | None
    ) -> None:
        self.problem, self.full = problem, full
        self.rows = rows = _Rows(problem, full)
        self.machines = Deferred(problem) if trace else None
        inner = strictly_inside(full.alpha, problem.box)
        # A row may take the only free variable to its bound merely by making its box smaller.
        filled = inner[problem.variable] & (rows.room >= -1e-7 * problem.box[problem.variable])
        loose = ~rows.open & (inner.sum() - filled.int() == 0)
        if bool(loose.any()):
            _settle_without_free(problem, full, rows, loose.nonzero()[:, 0])
        alone = _settle_one_class(rows)
        if self.machines is not None:
            self.machines.add(lambda machines: machines.enter_unchanged(problem, full))
            self.machines.add(lambda machines: machines.clear(alone))
        if checks and not values and bool(inner.any()):
            _settle_by_checks(problem, full, rows)
        if only is not None:
            rows.open &= only
        self.first, self.number = _distinct(problem, rows)

    def task(self) -> Task:
        """What is left for the path."""
        return Task(self.problem, self.full, self.problem.variable[self.first], self.rows.room[self.first])

    def settle(self, end: Unlearned) -> None:
        """Take the ends of the paths, refit what they leave open, and copy the outcome to equal rows."""
        problem, rows, first, number = self.problem, self.rows, self.first, self.number
        target = problem.variable[first]
        output, proved, by = end.output.clone(), end.proved.clone(), torch.full_like(first, code.PATH)
        events, columns, newton = end.events.clone(), torch.zeros_like(first), torch.zeros_like(first)
        left = (~end.solved).nonzero()[:, 0]
        if len(left):
            by[left] = code.REFIT
            output[left], proved[left], without = _refit(
                problem, self.full, target[left], rows.kept[first[left]]
            )
            events[left] += without.iterations
            columns[left], newton[left] = without.columns, without.newton
            if self.machines is not None:
                end.alpha[left] = without.alpha
        index = rows.open.nonzero()[:, 0]
        if self.machines is not None:
            kept, alpha = rows.kept[first], end.alpha
            self.machines.add(
                lambda machines: machines.enter_without(problem, index, number, target, alpha, kept)
            )
        rows.iterations[index], rows.columns[index] = events[number], columns[number]
        rows.newton[index] = newton[number]
        rows.settle(index, output[number], proved[number], by[number])

    def outcome(self, values: bool) -> RowOutcome:
        """Outputs, or labels if not `values`."""
        rows, outputs = self.rows, self.rows.outputs
        if not values:
            outputs = torch.where(outputs >= 0, 1.0, -1.0).to(outputs)
        return RowOutcome(
            outputs,
            rows.certified,
            rows.resolved_by,
            rows.iterations,
            rows.columns,
            rows.newton,
            self.machines,
        )


def _distinct(problem: Problem, rows: _Rows) -> tuple[Tensor, Tensor]:
    """One open row for each distinct (variable, C), and which of them each open row equals."""
    index = rows.open.nonzero()[:, 0]
    if len(problem.y) == len(rows.y):  # no two rows are one variable
        return index, torch.arange(len(index), device=index.device)
    boxes, box = torch.unique(problem.row_box[index], return_inverse=True)
    _, number = torch.unique(problem.variable[index] * len(boxes) + box, return_inverse=True)
    first = torch.full((int(number.max()) + 1 if len(index) else 0,), len(index), device=index.device)
    first = first.scatter_reduce_(0, number, torch.arange(len(index), device=index.device), "amin")
    return index[first], number


def _settle_one_class(rows: _Rows) -> Tensor:
    """The only rows of their class, whose indices are returned: what is left predicts the other label."""
    alone = only_of_its_class(rows.y).nonzero()[:, 0]
    if len(alone):
        rows.settle(alone, -rows.y[alone], torch.ones_like(alone, dtype=torch.bool), code.ONE_CLASS)
    return alone


def _settle_by_checks(problem: Problem, full: Exact, rows: _Rows) -> None:
    """Checks 2 and 3 and E2 on the variables; alpha of a variable bounds what one row of it holds."""
    f = problem.y * (1 + full.margin)
    by = sufficiency_checks(problem.K, problem.y, full.alpha, f, problem.box, rows.doubt)[problem.variable]
    index = (rows.open & (by > code.UNUSED)).nonzero()[:, 0]
    rows.settle(index, rows.outputs[index], torch.ones_like(index, dtype=torch.bool), by[index])


def _settle_without_free(problem: Problem, full: Exact, rows: _Rows, index: Tensor) -> None:
    """No free variable without these rows: b has an interval, which changes even if an unused row goes."""
    held = _held(problem, full.alpha.expand(len(index), -1), problem.variable[index], rows.kept[index])
    rows.settle(index, *judged(problem.K, problem.y, held), code.UNUSED)


def _full_sign(problem: Problem, full: Exact) -> Tensor:
    """Signs of the full machine's decision values that its active set proves, else 0, (m,)."""
    nobody = torch.zeros(1, dtype=torch.long, device=full.alpha.device)
    u, bias = (full.alpha * problem.y)[None] @ problem.K, full.bias[None]
    held = Held(full.alpha[None], u, problem.box, nobody, problem.rounding)
    error = value_error(problem.K, problem.y, held, bias)
    f = u + bias
    return (f.sign() * (f.abs() > error))[0]


def _held(problem: Problem, alpha: Tensor, target: Tensor, kept: Tensor) -> Held:
    """Solutions (B, m) whose box of the target is what other rows leave of it."""
    return Held(alpha, (alpha * problem.y) @ problem.K, problem.box, target, problem.rounding, kept)


def _refit(problem: Problem, full: Exact, target: Tensor, kept: Tensor) -> tuple[Tensor, Tensor, Without]:
    """Solve without the rows what the path left open: f(x_r), whether its sign is proved, the machines."""
    boxes = problem.box.expand(len(target), -1).scatter(1, target[:, None], kept[:, None])
    without = solve_without(problem, full, boxes, problem.K[target])
    return *judged(problem.K, problem.y, _held(problem, without.alpha, target, kept)), without
