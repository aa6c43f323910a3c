"""The full machines exactly: from approximate solutions to the optimal active sets, all at once."""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchloo.svm.path.follow import follow
from torchloo.svm.path.state import TOUCH, Base, Ends
from torchloo.svm.path.tableau import pivot_transform
from torchloo.svm.records import Exact, SVMProblem, duality_gap
from torchloo.svm.solve.interior import first_solutions, solve_to_rounding
from torchloo.svm.solve.newton import Sets
from torchloo.svm.solve.systems import Bordered, accurate_product
from torchloo.svm.stacked import set_of, times_vector
from torchloo.svm.tolerances import CLOSE, DEPENDENT, EXACT, JITTER, SINGULAR, size

__all__ = ["ATTEMPTS", "relative_gap", "solve_exactly", "solve_from"]

ATTEMPTS = 4  # at the sets, a homotopy between any two
_REFINEMENTS = 2


def solve_exactly(problem: SVMProblem) -> Exact:
    """Read the sets of B machines off interior points and solve for them."""
    point = first_solutions(problem.K, problem.y, problem.box, problem.kernel)
    return _or_tighter(problem, solve_from(problem, Sets.read_off(point, problem.box)))


def relative_gap(problem: SVMProblem, solution: Exact) -> Tensor:
    """Duality gaps relative to the sums of alpha, (B,); what passes a bound beyond rounding is cut off."""
    gap = duality_gap(solution.alpha, solution.margin, problem.box) / solution.alpha.sum(1)
    rows = (~solution.optimal).nonzero()[:, 0]
    return (
        gap.index_copy(0, rows, _gap_inside(problem.take(rows), solution.take(rows))) if rows.numel() else gap
    )


def _gap_inside(problem: SVMProblem, solution: Exact) -> Tensor:
    """`relative_gap` of solutions that are not optimal."""
    alpha, box, y = solution.alpha, problem.box, problem.y
    inside = alpha.clamp_min(0).minimum(box)
    inside = torch.where((alpha - inside).abs() > EXACT * size(inside, box).clamp_min(1), inside, alpha)
    margin = solution.margin + y * problem.product((inside - alpha) * y)
    imbalance = ((inside * y).sum(1) * solution.bias).abs()
    return (duality_gap(inside, margin, box) + imbalance) / inside.sum(1)


def _better(problem: SVMProblem, first: Exact, second: Exact) -> Exact:
    """Of two solutions of each machine the one with the smaller gap, the first if they are equal."""
    return first.where(~(relative_gap(problem, second) < relative_gap(problem, first)), second)


def _or_tighter(problem: SVMProblem, solution: Exact) -> Exact:
    """Solutions that could be better are replaced by the best that an interior point leads to."""
    rows = (~solution.optimal).nonzero()[:, 0]
    if not rows.numel():
        return solution
    first = solution.take(rows)
    rows = rows[~(first.close & (relative_gap(problem.take(rows), first) <= EXACT))]
    if not rows.numel():
        return solution
    problem, first = problem.take(rows), solution.take(rows)
    sets = Sets.read_off(solve_to_rounding(problem.matrices(), problem.y, problem.box), problem.box)
    found = solve_from(problem, sets, attempts=1, tight=True)
    return solution.replaced(rows, _better(problem, first, found))


def solve_from(problem: SVMProblem, sets: Sets, attempts: int = ATTEMPTS, tight: bool = False) -> Exact:
    """The exact solutions from approximate ones and their sets; where signs fail, by homotopies.

    Where a homotopy brings it no nearer, the best one is what rounding allows: it may be the given one.
    """
    alpha = torch.where(sets.free, sets.alpha, torch.where(sets.upper, problem.box, 0.0))
    sets, solution = _attempt(problem, sets._replace(alpha=alpha), tight)
    best, machine = solution, torch.arange(len(alpha), device=alpha.device)
    going = ~solution.optimal
    for _ in range(attempts - 1):
        rows = going.nonzero()[:, 0]
        if not rows.numel():
            break
        machine, problem = machine[rows], problem.take(rows)
        sets = _homotopy(problem, sets.take(rows))._replace(bias=solution.bias[rows])
        sets, solution = _attempt(problem, sets, tight)
        before = best.take(machine)
        nearer = solution.slip < before.slip / 2
        after = solution.where(nearer, before)
        best = best.replaced(machine, after)
        going = ~(after.optimal | (~nearer & before.close))
    return best


def _attempt(problem: SVMProblem, sets: Sets, tight: bool) -> tuple[Sets, Exact]:
    """The sets without what makes their equations singular, and the best solutions that they lead to."""
    tolerance = SINGULAR if tight else DEPENDENT
    none = (~sets.free.any(1)).nonzero()[:, 0]
    if none.numel():
        sets = sets.replaced(none, _free_one(problem.take(none), sets.take(none)))
    S, system = _equations(problem, sets.free)
    rows = (~system.regular(tolerance)).nonzero()[:, 0]
    if rows.numel():
        own = sets.take(rows)
        kept = torch.zeros_like(own.free).scatter_(1, S[rows], system.independent(tolerance, rows))
        sets = sets.replaced(rows, _drop_dependent(problem.take(rows), own, kept))
        S, system = _equations(problem, sets.free)
    solution = _active_set_solution(problem, sets, (S, system), tight)
    rows = (~solution.optimal).nonzero()[:, 0]
    if rows.numel():
        better = _rescued(problem.take(rows), sets.take(rows), solution.take(rows), tight)
        solution = solution.replaced(rows, better)
    return sets, solution


def _rescued(problem: SVMProblem, sets: Sets, solution: Exact, tight: bool) -> Exact:
    """Solutions that are not optimal without their strays, or as they were given if that is better."""
    solution = _without_strays(problem, solution, tight)
    given = _as_given(problem, sets)
    return solution.where(solution.optimal, _better(problem, solution, given))


def _as_given(problem: SVMProblem, sets: Sets) -> Exact:
    """Solutions whose free variables need not have margin 0."""
    alpha, bias, free, upper = sets
    margin = problem.y * (problem.product(alpha * problem.y) + bias[:, None]) - 1
    slip = torch.where(free, margin.abs(), torch.where(upper, margin, -margin)).amax(1)
    imbalance = (alpha * problem.y).sum(1).abs()
    return Exact(alpha, bias, margin, free, upper, slip.maximum(imbalance))


def _free_one(problem: SVMProblem, sets: Sets) -> Sets:
    """With every alpha at a bound, b has an interval; at its lower end one variable has margin 0."""
    y, alpha, upper = problem.y, sets.alpha, sets.upper
    s = y - problem.product(alpha * y)  # the b that gives each point margin 0
    pushes_up = (y > 0) ^ upper  # lower-bound positives and upper-bound negatives demand b >= s
    first = torch.where(pushes_up, s, -torch.inf).argmax(1, keepdim=True)
    free = torch.zeros_like(upper).scatter_(1, first, True)
    return Sets(alpha, s.gather(1, first)[:, 0], free, upper & ~free)


def _drop_dependent(problem: SVMProblem, sets: Sets, kept: Tensor) -> Sets:
    """Bound free variables until the equations of the free sets are regular, as those of `kept` (B, m) are.

    Dependent variables can move along the null space, which changes no margin: all go to their nearest
    bounds at once, and the independent ones respond. Whenever one of these reaches a bound it stays there,
    and the dependent one that it responds to most takes its place.
    """
    y, box = problem.y, problem.box
    dropped, waits = set_of(sets.free & ~kept)  # (B, d)
    if not dropped.shape[1]:  # with pivots in their best order none is too small
        return sets
    chosen, held = set_of(kept)  # (B, c)
    # Change of alpha of the chosen per alpha of each dropped one, (B, c, d).
    equations = Bordered(problem.block(chosen), held)
    _, rates = equations.solve(-torch.ones_like(dropped, dtype=y.dtype), -problem.block(dropped, chosen))
    y_chosen, y_dropped = y.gather(1, chosen), y.gather(1, dropped)
    rates = rates.mT.contiguous() * y_chosen[:, :, None] * y_dropped[:, None]
    alpha, limit = (x.gather(1, dropped) for x in (sets.alpha, box))
    to_upper = alpha > limit / 2
    way = (torch.where(to_upper, limit, 0.0) - alpha) * waits
    ends = _ends(sets.alpha.gather(1, chosen), box.gather(1, chosen))
    crossing = _Crossing(rates, chosen, ends, dropped, limit, to_upper, way)
    for _ in range(dropped.shape[1]):
        end, blocked = crossing.move()
        if not bool(blocked.any()):
            break
        crossing.exchange(end, blocked)
    m = box.shape[1]  # a place for the padding
    gone = dropped.masked_fill(~waits, m)
    free = pad(sets.free, (0, 1)).scatter_(1, gone, False)[:, :m]
    upper = pad(sets.upper, (0, 1)).scatter_(1, gone, to_upper)[:, :m]
    whole = pad(torch.where(free, sets.alpha, torch.where(upper, box, 0.0)), (0, 1))
    whole.scatter_(1, chosen.masked_fill(~held, m), -ends[:, :, 0])
    return Sets(whole[:, :-1], sets.bias, free, upper)


def _ends(alpha: Tensor, box: Tensor) -> Tensor:
    """Distances of coefficients from their bounds, < 0 and > 0, (B, v, 2) of (B, v)."""
    return torch.stack([(-alpha).clamp_max_(-TOUCH), (box - alpha).clamp_min_(TOUCH)], 2)


class _Crossing(NamedTuple):
    """Dependent variables on their way to bounds; all tensors are changed in place."""

    rates: Tensor
    """Change of alpha of the chosen variables per alpha of the dropped ones, (B, c, d)."""
    chosen: Tensor
    """(B, c)."""
    ends: Tensor
    """Distances of the chosen from their bounds, (B, c, 2)."""
    dropped: Tensor
    """(B, d)."""
    limit: Tensor
    """Their boxes, (B, d)."""
    to_upper: Tensor
    """Whether they go, or have gone, to their upper bounds, (B, d)."""
    way: Tensor
    """How far they still have to go, (B, d)."""

    def move(self) -> tuple[Tensor, Tensor]:
        """Go on until a chosen variable meets an end; the end's number, and whether one is met, (B, 1)."""
        response = torch.hardshrink(times_vector(self.rates, self.way), EXACT)[:, :, None]
        soonest, end = (response / self.ends).flatten(1).max(1, keepdim=True)  # 1 / step
        step = soonest.clamp_min(1).reciprocal_()
        self.ends.addcmul_(response, step[:, :, None], value=-1)
        self.ends[:, :, 0].clamp_max_(-TOUCH)
        self.ends[:, :, 1].clamp_min_(TOUCH)
        self.way.mul_(1 - step)
        return end, soonest > 1

    def exchange(self, end: Tensor, blocked: Tensor) -> None:
        """Exchange the chosen variable i that has met an end for the dropped k that moves it most."""
        i, met_upper, at = end // 2, end % 2 == 1, blocked[:, :, None]
        row = self.rates.gather(1, i[:, :, None].expand(-1, 1, self.rates.shape[2]))  # (B, 1, d)
        k = (row[:, 0] * self.way).abs_().argmax(1, keepdim=True)
        column = self.rates.gather(2, k[:, None].expand(-1, self.rates.shape[1], 1))  # (B, c, 1)
        change = torch.where(at, row / -row[:, 0].gather(1, k)[:, :, None], 0.0)
        self.rates.addcmul_(column, change)
        self.rates.scatter_(1, i[:, :, None].expand_as(row), torch.where(at, change, row))
        self.rates.scatter_(2, k[:, None].expand_as(column), torch.where(at, 0.0, column))
        limit, way = self.limit.gather(1, k), self.way.gather(1, k)
        ends = _ends(torch.where(self.to_upper.gather(1, k), limit, 0.0) - way, limit)[:, 0]  # (B, 2)
        entries = (
            (self.dropped, k, self.chosen.gather(1, i)),
            (self.chosen, i, self.dropped.gather(1, k)),
            (self.to_upper, k, met_upper),
            (self.way, k, torch.zeros_like(way)),
            (self.ends[:, :, 0], i, ends[:, :1]),
            (self.ends[:, :, 1], i, ends[:, 1:]),
        )
        for x, index, value in entries:
            x.scatter_(1, index, torch.where(blocked, value, x.gather(1, index)))


def _equations(problem: SVMProblem, free: Tensor) -> tuple[Tensor, Bordered]:
    """The free sets S (B, s) of B machines, as `set_of` gives them, and the systems of their equations."""
    S, real = set_of(free)
    return S, Bordered(problem.block(S), None if len(S) == 1 else real)  # one set needs no padding


def _active_set_solution(
    problem: SVMProblem, sets: Sets, equations: tuple[Tensor, Bordered], tight: bool
) -> Exact:
    """Solve [0 1^T; 1 K_SS] [b; a_S] = [-1^T a_U; y_S - K_SU a_U] and look at the signs.

    `equations` are those of `_equations`.
    """
    S, system = equations
    y, box = problem.y, problem.box
    a = torch.where(sets.upper, box * y, 0.0)
    bias, K_S, y_S = torch.zeros_like(sets.bias), problem.rows(S), y.gather(1, S)
    product = accurate_product if tight else times_vector
    margin_product = partial(accurate_product, problem.matrices()) if tight else problem.product
    for _ in range(1 + _REFINEMENTS):  # a nearly singular K_SS loses digits
        rhs = y_S - bias[:, None] - product(K_S, a)
        change, step = system.solve(-a.sum(1, keepdim=True), rhs[:, None])
        a.scatter_add_(1, S, step[:, 0])
        bias = bias + change[:, 0]
    alpha = a * y
    margin = y * (margin_product(a) + bias[:, None]) - 1
    beyond = torch.maximum(-alpha, alpha - box) / size(alpha, box).clamp_min(1)
    missed = torch.where(sets.upper, margin, -margin) - _rounding(problem, alpha)
    slip = torch.where(sets.free, beyond, missed).amax(1)
    return Exact(alpha, bias, margin, sets.free, sets.upper, slip, system)


def _rounding(problem: SVMProblem, alpha: Tensor) -> Tensor:
    """What rounding of sums of m terms does to each margin, (B, m), up to what is close."""
    length = problem.diagonal().sqrt()
    unit = torch.finfo(alpha.dtype).eps * alpha.shape[1] ** 0.5
    return (unit * (length * alpha.abs()).sum(1, keepdim=True) * length).clamp_max_(CLOSE)


def _without_strays(problem: SVMProblem, solution: Exact, tight: bool) -> Exact:
    """With free variables beyond their bounds put there, if nothing else is wrong then, as is mostly so."""
    low, high = (solution.alpha < 0) & solution.free, (solution.alpha > problem.box) & solution.free
    stray = low | high
    rows = (stray.any(1) & (solution.free & ~stray).any(1)).nonzero()[:, 0]
    if not rows.numel():
        return solution
    first, problem = solution.take(rows), problem.take(rows)
    sets = Sets(first.alpha, first.bias, first.free & ~stray[rows], first.upper | high[rows])
    other = _active_set_solution(problem, sets, _equations(problem, sets.free), tight)
    return solution.replaced(rows, other.where(other.slip <= 0, first))


def _homotopy(problem: SVMProblem, sets: Sets) -> Sets:
    """The optimal sets, by paths from data for which the given ones are optimal to the true data.

    One more variable, lowered from 1 to 0, has as its column the change of margins (and of the
    equality) that makes `alpha` optimal: the path engine then does the rest.
    """
    K, y, box = problem.matrices(), problem.y, problem.box
    alpha, bias, free, upper = sets
    B, m = y.shape
    generator = torch.Generator("cpu").manual_seed(1)
    random = torch.rand(m, generator=generator, dtype=K.dtype, device="cpu")
    jitter = JITTER * (1 + random).to(K.device)
    margin = y * (times_vector(K, alpha * y) + bias[:, None]) - 1
    lift = torch.where(upper, -margin.clamp_min(0) - jitter, (-margin).clamp_min(0) + jitter)
    lift = torch.where(free, -margin, lift)  # (B, m)
    extended = pad(K, (0, 1, 0, 1))
    extended[:, :m, m] = extended[:, m, :m] = y * lift
    border = torch.cat([torch.ones_like(y), -(alpha * y).sum(1, keepdim=True)], 1)
    free_too, upper_too = pad(free, (0, 1)), pad(upper, (0, 1))
    tableau = pivot_transform(extended, pad(y, (0, 1), value=1.0), free_too, border)
    bounds = torch.stack([torch.zeros_like(border), pad(box, (0, 1), value=1.0)])
    values = pad(alpha, (0, 1)), pad(margin + lift, (0, 1))
    diagonal = extended.diagonal(dim1=1, dim2=2)
    base = Base.build(tableau, free_too, upper_too, *values, bounds, diagonal)
    each = torch.arange(B, device=K.device)
    last = torch.full_like(each, m)
    end = Ends.cat(follow(base, each, last, bias.new_ones(B), most_events=200 + 2 * m, distances=True))
    place = tableau.order.argsort(1)[:, :m]
    both_ends = end.distance[:, :, :-2].gather(2, place[:, None].expand(-1, 2, -1))
    low, high = both_ends.unbind(1)
    # What was free holds -alpha, Note [state vector].
    alpha = torch.where(free, high, -low).clamp_min(0)
    free, upper = low.isfinite() & high.isfinite(), low.isinf() & high.isfinite()
    return Sets(torch.where(free, alpha, torch.where(upper, box, 0.0)), bias, free, upper)
