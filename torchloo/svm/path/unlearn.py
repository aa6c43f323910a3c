"""Leave-one-out by the exact path: from the full solution to each solution without a row."""

from typing import NamedTuple

import torch
from torch import Tensor

from torchloo.svm.path.follow import follow
from torchloo.svm.path.refresh import Finish
from torchloo.svm.path.state import Base, Ends
from torchloo.svm.path.tableau import Tableau, pivot_transform
from torchloo.svm.proof.ended import Ended
from torchloo.svm.solve.exact import Exact
from torchloo.svm.solve.merge import Problem

__all__ = ["Task", "Unlearned", "unlearn", "unlearn_many"]

_PERTURBATION = 1e-8
_TABLEAUX = 2**23  # entries of tableaux that are stacked
_FEW = 300  # variables that may all have a column
_NEAREST, _SHARE = 128, 3  # columns beside the free variables: so many, or a third of all variables


class Unlearned(NamedTuple):
    """Where the paths of B variables ended."""

    output: Tensor
    """f(x_r) at the end, (B,)."""

    proved: Tensor
    """Its sign is certified, and the value exact if the path came to its end, (B,) bool."""

    solved: Tensor
    """Proved, or at the end of its path and exact: a refit would find nothing else, (B,) bool."""

    events: Tensor
    """Number of events, (B,)."""

    alpha: Tensor
    """Coefficients at the end if they are asked for, (B, m), else (B, 0)."""

    def replaced(self, rows: Tensor, by: "Unlearned") -> "Unlearned":
        """With other ends of the variables at `rows`."""
        return Unlearned(*(old.index_copy(0, rows, new) for old, new in zip(self, by, strict=True)))


class Task(NamedTuple):
    """What is to go from one machine."""

    problem: Problem
    """The merged problem."""

    full: Exact
    """Its exact solution."""

    target: Tensor
    """Variables, each to be lowered alone, (B,)."""

    room: Tensor
    """How much of alpha goes, (B,)."""

    def take(self, rows: Tensor) -> "Task":
        """The targets at `rows`."""
        return self._replace(target=self.target[rows], room=self.room[rows])


def unlearn(problem: Problem, full: Exact, target: Tensor, room: Tensor, values: bool = True) -> Unlearned:
    """`unlearn_many` for one machine, with coefficients."""
    return unlearn_many([Task(problem, full, target, room)], values, coefficients=True)[0]


def unlearn_many(tasks: list[Task], values: bool = True, coefficients: bool = False) -> list[Unlearned]:
    """Lower alpha of each target by its room along the exact path and certify the end.

    Machines with as many variables stack their tableaux and are followed as one batch; at first with
    columns only for the variables of the smallest margins, and again with all where the margins of
    the end show that another one had a part in it. With `values` to the end; else only until y_r f_r < 0,
    and again to the end where that is too near 0 to be proved.

    Cost O(m l s) for each machine with s free variables and l columns, then O(l k) an event. Memory
    O(m l + B m).
    Reference: Cauwenberghs and Poggio 2000, for the idea of unlearning.
    """
    outcomes = _unlearn(tasks, values, coefficients, whole=False)
    doubtful = {
        t: (~end.solved).nonzero()[:, 0]
        for t, (task, end) in enumerate(zip(tasks, outcomes, strict=True))
        if (not values or len(task.problem.y) > _FEW) and not bool(end.solved.all())
    }
    if doubtful:
        few = [tasks[t].take(rows) for t, rows in doubtful.items()]
        ends = _unlearn(few, True, coefficients, whole=True)
        for (t, rows), end in zip(doubtful.items(), ends, strict=True):
            outcomes[t] = outcomes[t].replaced(rows, end)
    return outcomes


def _unlearn(tasks: list[Task], values: bool, coefficients: bool, whole: bool) -> list[Unlearned]:
    """`unlearn_many` with columns for the free variables and the nearest others, or for all."""
    outcomes: dict[int, Unlearned] = {}
    for group in _groups(tasks):
        members = [tasks[t] for t in group]
        tableau = _tableaux(members, values, whole)
        problem = Problem(*(torch.stack(x) for x in zip(*(task.problem for task in members), strict=True)))
        full = Exact(*(torch.stack(x) for x in zip(*(task.full for task in members), strict=True)))
        base = perturbed_base(problem, full, tableau)
        tableaux = [Tableau(*(x[t : t + 1] for x in tableau)) for t in range(len(members))]
        table = torch.cat([torch.full_like(task.target, t) for t, task in enumerate(members)])
        row, column = tableau.find(table, torch.cat([task.target for task in members]))
        counts = [len(task.target) for task in members]
        ends = follow(base, table, row, column, torch.cat([task.room for task in members]), not values)
        for t, tableau, own in zip(group, tableaux, ends.split(counts), strict=True):
            outcomes[t] = _certified(tasks[t], tableau, own, coefficients)
    return [outcomes[t] for t in range(len(tasks))]


def _tableaux(tasks: list[Task], values: bool, whole: bool) -> Tableau:
    """Tableaux with equally many columns."""
    m = len(tasks[0].problem.y)
    orders, wanted = [], 0
    for task in tasks:
        order, first = _by_margin(task, not values)
        orders.append(order)
        wanted = max(wanted, first)
    near = max(_NEAREST, m // _SHARE)
    columns = m if whole or m <= _FEW else min(m, wanted + near)
    K, y, free = (
        torch.stack(x) for x in zip(*((t.problem.K, t.problem.y, t.full.free) for t in tasks), strict=True)
    )
    return pivot_transform(K, y, free, None, torch.stack(orders), columns)


def _by_margin(task: Task, targets_too: bool) -> tuple[Tensor, int]:
    """The free variables, the targets if an early stop has to watch them, then by the size of margins.

    And how many come before the margins count.
    """
    margin = task.full.margin.abs()
    if targets_too:
        margin[task.target] = -1.0
    margin.masked_fill_(task.full.free, -2.0)
    return margin.argsort(stable=True), int((margin < 0).sum())


def _groups(tasks: list[Task]) -> list[list[int]]:
    """Numbers of tasks of one size, together while their tableaux fit."""
    groups: list[list[int]] = []
    last: dict[int, list[int]] = {}
    for number, task in enumerate(tasks):
        m = len(task.problem.y)
        if m not in last or (len(last[m]) + 1) * (m + 2) ** 2 > _TABLEAUX:
            last[m] = []
            groups.append(last[m])
        last[m].append(number)
    return groups


def _certified(task: Task, tableau: Tableau, ends: Ends, coefficients: bool) -> Unlearned:
    """Ends of paths on the unperturbed data, and what their duality gaps or active sets prove."""
    problem, full, target, room = task
    gone, finished = room - ends.room, ends.room <= 0
    finish = Finish(problem, full, tableau, ends, target, gone)
    kept = full.alpha[target] - room
    # Where full.alpha[target] is the room, rounding must not leave a box of 1e-17.
    kept = torch.where(kept < 1e-9 * problem.box[target], 0.0, kept).mul_(finished)
    stuck = torch.where(finished, 0.0, problem.y[target] * (full.alpha[target] - gone))
    ended = Ended(finish.layout, finish.alpha, finish.u, target, gone, kept, stuck)
    output, sign, exact = ended.proof(ended.bias(finish.inside()), finish.stray)
    proved = (sign * output > 0) & (finished | (sign == -problem.y[target])) & ~ends.failed
    # A sign may be proved where the value is not: then the path has missed an event.
    proved &= ~finished | exact
    alpha = (
        finish.layout.whole(finish.alpha, target, gone) if coefficients else output.new_empty(len(target), 0)
    )
    return Unlearned(output, proved, proved | (finished & exact & ~ends.failed), ends.events, alpha)


def perturbed_base(problem: Problem, full: Exact, tableau: Tableau) -> Base:
    """The start of the paths, moved off all ties by 1e-8 times a random factor.

    Favourably: margins of the lower set up, of the upper set down, boxes of the free set wider, so
    that the full solution stays optimal. (Perturbing the data beforehand costs hundreds of events.)
    """
    m = problem.y.shape[1]
    generator = torch.Generator("cpu").manual_seed(0)
    jitter = torch.rand(2, m, generator=generator, dtype=full.alpha.dtype, device="cpu")
    jitter = _PERTURBATION * (0.5 + jitter.to(full.alpha.device))
    margin = torch.where(
        full.upper, full.margin.clamp_max(0) - jitter[0], full.margin.clamp_min(0) + jitter[0]
    )
    widen = full.free * problem.box.clamp_max(1e3)
    low = full.alpha.clamp_max(0) * full.free - widen * jitter[0]
    high = torch.where(full.free, torch.maximum(full.alpha, problem.box), problem.box) + widen * jitter[1]
    diagonal = problem.K.diagonal(dim1=1, dim2=2)
    return Base.build(tableau, full.free, full.upper, full.alpha, margin, torch.stack([low, high]), diagonal)
