"""Leave-one-out by the exact path: from full solutions to each solution without a row."""

import torch
from torch import Tensor

from torchloo.svm.path.follow import follow
from torchloo.svm.path.refresh import Finish
from torchloo.svm.path.state import Base, Ends
from torchloo.svm.path.tableau import Tableau, pivot_transform
from torchloo.svm.proof.active import sign_by_active_set
from torchloo.svm.proof.certify import (
    Held,
    Rest,
    bias_by_free,
    gap_ball_sign,
    held_out_bias,
    midpoint_bias,
    reach_of,
    sign_by_reach,
    smallest_and_sum,
)
from torchloo.svm.records import Exact, SVMProblem, Targets, Unlearned
from torchloo.svm.stacked import Tables, subset
from torchloo.svm.tolerances import CLOSE, EXACT, PERTURBATION, WIDEST

__all__ = ["unlearn"]

_FEW = 300  # variables that may all have a column
_NEAREST, _SHARE = 128, 3  # columns beside the free variables: so many, or a third of all variables
_SMALL = 2**12  # coefficients at the ends of paths: up to so many, all are looked at


def unlearn(
    problem: SVMProblem, full: Exact, targets: Targets, values: bool = True, coefficients: bool = False
) -> Unlearned:
    """Lower alpha of each target to what is kept along the exact path and certify the end.

    The tableaux of all machines are stacked and followed as one batch; at first with columns only for the
    variables of the smallest margins, and again with all where the margins of the end show that another one
    had a part in it. With `values` to the end; else only until y_r f_r < 0, and again to the end where that
    is too near 0 to be proved.

    Cost O(m l s) for each machine with s free variables and l columns, then O(l k) an event. Memory
    O(m l) for each machine, and O(N k).
    Reference: Cauwenberghs and Poggio 2000, for the idea of unlearning.
    """
    ends = _unlearn(problem, full, targets, values, coefficients, whole=False)
    if values and problem.y.shape[1] <= _FEW:
        return ends
    rows = (~ends.solved).nonzero()[:, 0]
    if not rows.numel():
        return ends
    again = targets.take(rows)
    used, table = again.table.unique(return_inverse=True)
    again = again._replace(table=table)
    return ends.replaced(
        rows, _unlearn(problem.take(used), full.take(used), again, True, coefficients, whole=True)
    )


def _unlearn(
    problem: SVMProblem, full: Exact, targets: Targets, values: bool, coefficients: bool, whole: bool
) -> Unlearned:
    """`unlearn` with columns for the free variables and the nearest others, or for all."""
    tableau = _tableaux(problem, full, targets, values, whole)
    base = perturbed_base(problem, full, tableau)
    done = []
    groups = follow(base, targets.table, targets.variable, targets.room(full), not values)
    for ends in groups:
        its = targets if len(groups) == 1 else targets.take(ends.problem_id)
        every = problem, full, tableau, ends, its
        parts = Tables(its.table, len(problem.y)).parts(tableau.A.shape[2])
        done += [_certified(*_part(every, *part), coefficients) for part in parts]
    if len(done) == 1:
        return done[0]
    found = Unlearned(*(torch.cat(field) for field in zip(*done, strict=True)))
    if len(groups) == 1:
        return found
    order = torch.cat([ends.problem_id for ends in groups]).argsort()
    return Unlearned(*(x.index_select(0, order) for x in found))


_Ended = tuple[SVMProblem, Exact, Tableau, Ends, Targets]
"""Machines, and the ends of the paths of their targets."""


def _part(every: _Ended, machines: slice, rows: slice) -> _Ended:
    """A part as `Tables.parts` gives it, with the numbers of machines and of rows of tableaux that it has."""
    problem, full, tableau, ends, targets = every
    own, end = targets.take(rows), Ends(*(x[rows] for x in ends))
    own = own._replace(table=own.table - machines.start)
    end = end._replace(row=end.row - machines.start * tableau.A.shape[1])
    return problem.take(machines), full.take(machines), Tableau(*(x[machines] for x in tableau)), end, own


def _tableaux(problem: SVMProblem, full: Exact, targets: Targets, values: bool, whole: bool) -> Tableau:
    """Tableaux with equally many columns: the free variables first, then by the size of margins.

    Targets come before the margins count if an early stop has to watch them.
    """
    m = problem.y.shape[1]
    margin = full.margin.abs()
    if not values:
        margin[targets.table, targets.variable] = -1.0
    margin.masked_fill_(full.free, -2.0)
    order = margin.argsort(dim=1, stable=True)
    if whole or m <= _FEW:
        columns = m
    else:
        wanted = int((margin < 0).sum(1).max())
        columns = min(m, wanted + max(_NEAREST, m // _SHARE))
    labelled = problem.K, problem.y, full.free
    return pivot_transform(*labelled, None, order, columns, problem.kernel, full.system)


def _certified(
    problem: SVMProblem, full: Exact, tableau: Tableau, ends: Ends, targets: Targets, coefficients: bool
) -> Unlearned:
    """Ends of paths on the unperturbed data, and what their duality gaps or active sets prove."""
    end, finished = Finish(problem, full, tableau, ends, targets), ends.room <= 0
    if len(finished) * problem.y.shape[1] <= _SMALL:
        output, sign, exact = _proof_by_all(end)
    else:
        output, sign, exact = _proof_by_moved(end)
        rows = ((sign == 0) | ~exact).nonzero()[:, 0]
        if rows.numel():
            output[rows], sign[rows], exact[rows] = _proof_by_all(end, rows)
    proved = (sign * output > 0) & (finished | (sign == -end.y_r)) & ~ends.failed
    # A sign may be proved where the value is not: then the path has missed an event.
    proved &= ~finished | exact
    alpha = end.coefficients() if coefficients else output.new_empty(len(finished), 0)
    return Unlearned(output, proved, proved | (finished & exact & ~ends.failed), ends.events, alpha)


def _proof_by_all(end: Finish, rows: Tensor | slice = slice(None)) -> tuple[Tensor, Tensor, Tensor]:
    """`_proof` of the paths at `rows` (R,), default all, by the coefficients of all variables."""
    return _proof(end.problem.K, end.solutions(rows), end.stray[rows])


def _proof_by_moved(end: Finish) -> tuple[Tensor, Tensor, Tensor]:
    """`_proof` by the variables that paths have moved, Note [variables at rest]; open if others are not."""
    problem, full, tables, machines = end.problem, end.full, end.tables, end.machines
    moved = torch.zeros_like(full.free).scatter_(1, machines.variable[:, :-1], True)
    down = (full.upper ^ (problem.y < 0)).to(problem.y)  # 1 for those that push the bias down
    r = end.target[:, None]
    box_r, rounding_r = (tables.pick(x, r)[:, 0] for x in (problem.box, problem.rounding))
    at_rest = (end.place == machines.variable.shape[1] - 1).to(box_r)
    lost, gone = at_rest * (box_r - end.own), at_rest * end.gone
    of_machine = torch.stack(
        [
            (((problem.y > 0).to(down) - 1 + down) * problem.box).masked_fill_(moved, 0).sum(1),
            (full.alpha * problem.y).masked_fill_(moved, 0).sum(1),
            (full.alpha * problem.rounding).masked_fill_(moved, 0).sum(1),
            problem.rounding.amax(1),
            *smallest_and_sum(problem.box),
            end.every.u.abs().amax(1),
        ],
        1,
    )
    count, pull, doubt, *of_all = tables.each(of_machine).unbind(-1)
    y, box, rounding = (tables.each(x) for x in (machines.y, machines.box, machines.rounding))
    own, table = end.own * (1 - at_rest), problem.kernels(tables.table).table
    held = Held(end.alpha, end.u_moved, y, box, end.place, rounding, table, own, end.held)
    bias = bias_by_free(held)
    is_midpoint = bias.isnan()
    none = subset(is_midpoint)
    if none.numel():
        middle = midpoint_bias(end.solutions(none))
        bias = torch.where(is_midpoint, bias.index_copy(0, none, middle), bias)
    violation = (end.over + bias).maximum(-(end.under + bias))
    count, pull = count - end.y_r * lost, pull - end.y_r * gone
    rest = Rest(violation, count, pull, doubt - rounding_r * gone, *of_all)
    reach = reach_of(problem.K, end.target, table)
    sign, _, slip = sign_by_reach(held._replace(rest=rest), bias, end.u_r, reach, is_midpoint)
    return end.u_r + bias, sign, slip.maximum(end.stray) <= EXACT


def _proof(K: Tensor, held: Held, stray: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """f(x_r), its proved sign or 0, and whether the solution is exact to rounding, (N,) all.

    `stray` (N,) is by how much coefficients had to be changed to lie in their boxes.
    """
    bias, is_midpoint = held_out_bias(held)
    sign, _, slip = gap_ball_sign(K, held, bias, is_midpoint)
    exact = slip.maximum(stray) <= EXACT
    near = (((sign == 0) | ~exact) & (slip <= CLOSE)).nonzero()[:, 0]
    if near.numel():
        by_set, error = sign_by_active_set(K, held.take(near), bias[near])
        exact[near] |= error.isfinite()
        sign[near] = torch.where(sign[near] == 0, by_set, sign[near])
    return held.of_target(held.u) + bias, sign, exact


def perturbed_base(problem: SVMProblem, full: Exact, tableau: Tableau) -> Base:
    """The start of the paths, moved off all ties by PERTURBATION times a random factor.

    Favourably: margins of the lower set up, of the upper set down, boxes of the free set wider, so
    that the full solution stays optimal. (Perturbing the data beforehand costs hundreds of events.)
    """
    m = problem.y.shape[1]
    generator = torch.Generator("cpu").manual_seed(0)
    jitter = torch.rand(2, m, generator=generator, dtype=full.alpha.dtype, device="cpu")
    jitter = PERTURBATION * (0.5 + jitter.to(full.alpha.device))
    margin = torch.where(
        full.upper, full.margin.clamp_max(0) - jitter[0], full.margin.clamp_min(0) + jitter[0]
    )
    widen = full.free * problem.box.clamp_max(WIDEST)
    low = full.alpha.clamp_max(0) * full.free - widen * jitter[0]
    high = torch.where(full.free, torch.maximum(full.alpha, problem.box), problem.box)
    bounds = torch.stack([low, high + widen * jitter[1]])
    return Base.build(tableau, full.free, full.upper, full.alpha, margin, bounds, problem.diagonal())
