"""Leave-one-out by the exact path: from the full solution to each solution without a row."""

from typing import NamedTuple

import torch
from torch import Tensor

from torchloo.svm.certify import Held, gap_ball_sign, held_out_bias
from torchloo.svm.exact import Exact
from torchloo.svm.merge import Problem
from torchloo.svm.path import follow
from torchloo.svm.refresh import final_coefficients, refined
from torchloo.svm.state import Base, Paths
from torchloo.svm.tableau import Tableau, pivot_transform

__all__ = ["Task", "Unlearned", "unlearn", "unlearn_many"]

_PERTURBATION = 1e-8
_TABLEAUX = 2**23  # entries of tableaux that are stacked


class Unlearned(NamedTuple):
    """Where the paths of B variables ended."""

    output: Tensor
    """f(x_r) at the end, (B,)."""

    sign: Tensor
    """Its certified sign, 0 if open, (B,)."""

    gap: Tensor
    """Duality gap, (B,)."""

    finished: Tensor
    """The path came to its end, (B,) bool; if not, a certified sign can only be that of an error."""

    failed: Tensor
    """The path gave up, (B,) bool."""

    events: Tensor
    """Number of events, (B,)."""

    alpha: Tensor
    """Coefficients at the end, (B, m)."""

    bias: Tensor
    """Offset at the end, (B,)."""


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


def unlearn(problem: Problem, full: Exact, target: Tensor, room: Tensor, values: bool = True) -> Unlearned:
    """`unlearn_many` for one machine."""
    return unlearn_many([Task(problem, full, target, room)], values)[0]


def unlearn_many(tasks: list[Task], values: bool = True) -> list[Unlearned]:
    """Lower alpha of each target by its room along the exact path and certify the end.

    Machines with as many variables stack their tableaux and are followed as one batch. With `values`
    to the end; else only until y_r f_r < 0.

    Cost O(m^2 s) for each machine with s free variables, then O(m k) an event. Memory O(m^2 + B m).
    Reference: Cauwenberghs and Poggio 2000, for the idea of unlearning.
    """
    outcomes: dict[int, Unlearned] = {}
    for group in _groups(tasks):
        tableaux = [
            pivot_transform(tasks[t].problem.K, tasks[t].problem.y, tasks[t].full.free) for t in group
        ]
        bases = [
            perturbed_base(tasks[t].problem, tasks[t].full, A) for t, A in zip(group, tableaux, strict=True)
        ]
        target, room = (torch.cat([getattr(tasks[t], name) for t in group]) for name in ("target", "room"))
        counts = torch.tensor([len(tasks[t].target) for t in group], device=target.device)
        table = torch.arange(len(group), device=target.device).repeat_interleave(counts)
        ends = follow(Base.stack(bases), table, target, room, not values)
        for t, tableau, own in zip(group, tableaux, _sorted(ends, len(group)), strict=True):
            outcomes[t] = _certified(tasks[t], tableau, own)
    return [outcomes[t] for t in range(len(tasks))]


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


def _sorted(parts: list[Paths], machines: int) -> list[Paths]:
    """The paths of each machine; only among them are change sets padded to one size."""
    if machines == 1:
        return [Paths.join(parts)]
    width = parts[0].distance.shape[2]
    own: list[list[Paths]] = [[] for _ in range(machines)]
    for part in parts:
        table = part.first // width
        for t in table.unique().tolist():
            own[t].append(part.take((table == t).nonzero()[:, 0]))
    return [Paths.join(mine) for mine in own]


def _certified(task: Task, tableau: Tableau, ends: Paths) -> Unlearned:
    """Ends of paths on the unperturbed data, and what their duality gaps prove."""
    problem, full, target, room = task
    alpha = final_coefficients(problem, full, tableau, ends, room - ends.room)
    alpha, u = refined(problem, full, tableau, ends, alpha)
    weight = problem.box.expand_as(alpha).clone()
    rows = torch.arange(len(target), device=target.device)
    finished = ends.room <= 0
    kept = full.alpha[target] - room
    # Where full.alpha[target] is the room, rounding must not leave a box of 1e-17.
    kept = torch.where(kept < 1e-9 * problem.box[target], 0.0, kept)
    weight[rows, target] = torch.where(finished, kept, 0.0)
    stuck = torch.where(finished, 0.0, problem.y[target] * alpha[rows, target])
    held = Held(alpha, u, weight, stuck, target)
    bias = held_out_bias(problem.y, held)
    sign, gap = gap_ball_sign(problem.K, problem.y, held, bias)
    return Unlearned(
        u[rows, target] + bias, sign, gap, finished & ~ends.failed, ends.failed, ends.events, alpha, bias
    )


def perturbed_base(problem: Problem, full: Exact, tableau: Tableau) -> Base:
    """The start of the paths, moved off all ties by 1e-8 times a random factor.

    Favourably: margins of the lower set up, of the upper set down, boxes of the free set wider, so
    that the full solution stays optimal. (Perturbing the data beforehand costs hundreds of events.)
    """
    m = len(problem.y)
    generator = torch.Generator().manual_seed(0)
    jitter = _PERTURBATION * (0.5 + torch.rand(2, m, generator=generator, dtype=full.alpha.dtype))
    jitter = jitter.to(full.alpha.device)
    margin = torch.where(
        full.upper, full.margin.clamp_max(0) - jitter[0], full.margin.clamp_min(0) + jitter[0]
    )
    widen = full.free * problem.box.clamp_max(1e3)
    low = full.alpha.clamp_max(0) * full.free - widen * jitter[0]
    high = torch.where(full.free, torch.maximum(full.alpha, problem.box), problem.box) + widen * jitter[1]
    box = torch.stack([low, high])
    return Base.build(tableau, full.free, full.upper, full.alpha, margin, box, problem.K.diagonal())
