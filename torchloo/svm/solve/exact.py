"""The full machine exactly: from an approximate solution to the optimal active set."""

from typing import NamedTuple

import torch
from torch import Tensor

from torchloo.svm.path.follow import follow
from torchloo.svm.path.state import Base
from torchloo.svm.path.tableau import pivot_transform
from torchloo.svm.solve.accurate import accurate_product
from torchloo.svm.solve.interior import first_solutions, to_the_last_digit
from torchloo.svm.solve.merge import Problem
from torchloo.svm.solve.systems import Bordered

__all__ = ["ATTEMPTS", "Exact", "duality_gap", "relative_gap", "solve_exactly", "solve_from"]

_SLIP = 1e-9  # how far rounding may carry a solution past its bounds
_CLOSE = 1e-6  # how far, if the sets are open to rounding
_DEPENDENT = 1e-8  # pivot, relative to k_ii, below which a point depends on the others
_ROUNDED = 1e-13  # the same where every digit counts
_SMALL = 1e-9  # relative gap of a solution that need not be better
ATTEMPTS = 4  # at the sets, a homotopy between any two
_REFINEMENTS = 2


class Exact(NamedTuple):
    """An optimal solution and its active set; the free set is never empty and always regular."""

    alpha: Tensor
    """Coefficients, (m,)."""

    bias: Tensor
    """Offset, ()."""

    margin: Tensor
    """y f - 1, (m,)."""

    free: Tensor
    """Mask of the free set S, (m,)."""

    upper: Tensor
    """Mask of the variables at their upper bound, (m,)."""

    slip: float
    """How far a coefficient or a margin lies past its bound at most."""

    @property
    def optimal(self) -> bool:
        """Whether every condition holds to rounding."""
        return self.slip <= _SLIP

    @property
    def close(self) -> bool:
        """Whether every condition nearly holds: all that can be had where margins hardly differ."""
        return self.slip <= _CLOSE


def duality_gap(alpha: Tensor, margin: Tensor, box: Tensor) -> Tensor:
    """Primal minus dual objective as a sum of nonnegative terms, so that nothing cancels; (...)."""
    return (alpha * margin.clamp_min(0) + (box - alpha) * (-margin).clamp_min(0)).sum(-1)


def solve_exactly(problems: list[Problem]) -> list[Exact]:
    """Read the sets off interior points and solve for them; the problems differ in their boxes only."""
    boxes = torch.stack([problem.box for problem in problems])
    start = first_solutions(problems[0].K, problems[0].y, boxes)
    upper = boxes - start.alpha < start.upper
    free = (start.alpha > start.lower) & ~upper
    parts = zip(problems, start.alpha, start.bias[:, 0], free, upper, strict=True)
    return [_or_tighter(problem, solve_from(problem, *others)) for problem, *others in parts]


def relative_gap(problem: Problem, solution: Exact) -> float:
    """The duality gap relative to the sum of alpha; what passes a bound by more than rounding is cut off."""
    alpha, margin, box, y = solution.alpha, solution.margin, problem.box, problem.y
    if solution.optimal:
        return float(duality_gap(alpha, margin, box) / alpha.sum())
    inside = alpha.clamp_min(0).minimum(box)
    inside = torch.where((alpha - inside).abs() > _SLIP * box.clamp(min=1.0), inside, alpha)
    margin = margin + y * (problem.K @ ((inside - alpha) * y))
    imbalance = (inside @ y * solution.bias).abs()
    return float((duality_gap(inside, margin, box) + imbalance) / inside.sum())


def _or_tighter(problem: Problem, solution: Exact) -> Exact:
    """A solution that could be better is replaced by the best that an interior point leads to."""
    if solution.optimal or (solution.close and relative_gap(problem, solution) <= _SMALL):
        return solution
    K, y, box = problem.K, problem.y, problem.box
    alpha, lower, upper, (bias,) = to_the_last_digit(K, y, box)
    at_upper = box - alpha < upper
    free = (alpha > lower) & ~at_upper
    found = solve_from(problem, alpha, bias, free, at_upper, attempts=1, tight=True)
    return min(solution, found, key=lambda x: relative_gap(problem, x))


def solve_from(
    problem: Problem,
    alpha: Tensor,
    bias: Tensor,
    free: Tensor,
    upper: Tensor,
    attempts: int = ATTEMPTS,
    tight: bool = False,
) -> Exact:
    """The exact solution from an approximate one and its sets; where signs fail, by a homotopy.

    Where a homotopy brings it no nearer, the best one is what rounding allows: it may be the given one.
    """
    K, y, box = problem.K, problem.y, problem.box
    tolerance = _ROUNDED if tight else _DEPENDENT
    alpha = torch.where(free, alpha, torch.where(upper, box, 0.0))
    best: Exact | None = None
    for left in reversed(range(attempts)):
        if not bool(free.any()):
            free, upper, bias = _free_one(K, y, alpha, upper)
        system = _free_system(K, free)
        if not system.regular(tolerance):
            free, upper, alpha = _drop_dependent(K, y, box, free, upper, alpha, tolerance)
            system = _free_system(K, free)
        solution = _active_set_solution(K, y, box, free, upper, tight, system)
        if not solution.optimal:
            solution = _without_strays(problem, solution, tight)
        if not solution.optimal:
            given = _as_given(problem, alpha, bias, free, upper)
            solution = min(solution, given, key=lambda x: relative_gap(problem, x))
        if best is None or solution.slip < best.slip / 2:
            best = solution
        elif best.close:
            break
        if best.optimal or not left:
            break
        free, upper, alpha = _homotopy(problem, free, upper, alpha, bias)
        bias = solution.bias
    return best if best is not None else solution


def _as_given(problem: Problem, alpha: Tensor, bias: Tensor, free: Tensor, upper: Tensor) -> Exact:
    """A solution whose free variables need not have margin 0."""
    margin = problem.y * (problem.K @ (alpha * problem.y) + bias) - 1
    slip = torch.where(free, margin.abs(), torch.where(upper, margin, -margin)).max()
    return Exact(alpha, bias, margin, free, upper, float(slip.maximum((alpha @ problem.y).abs())))


def _free_one(K: Tensor, y: Tensor, alpha: Tensor, upper: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """With every alpha at a bound, b has an interval; at its lower end one variable has margin 0."""
    s = y - K @ (alpha * y)  # the b that gives each point margin 0
    pushes_up = (y > 0) ^ upper  # lower-bound positives and upper-bound negatives demand b >= s
    first = torch.where(pushes_up, s, -torch.inf).argmax()
    free = torch.zeros_like(upper)
    free[first] = True
    return free, upper & ~free, s[first]


def _drop_dependent(
    K: Tensor,
    y: Tensor,
    box: Tensor,
    free: Tensor,
    upper: Tensor,
    alpha: Tensor,
    tolerance: float = _DEPENDENT,
) -> tuple[Tensor, Tensor, Tensor]:
    """Bound free variables, one at a time, until the equations of the free set are regular.

    A dependent variable j moves along the null space, which changes no margin, until it or an
    independent one reaches a bound; that one is bounded, and j takes its place if it is still free.
    """
    S = free.nonzero()[:, 0]
    kept = _free_system(K, free).independent(tolerance)
    chosen, dropped = S[kept], S[~kept]
    if not len(dropped):  # with pivots in their best order none is too small
        return free, upper, alpha
    # Change of alpha of the chosen per alpha of each dropped one, (|chosen|, |dropped|).
    _, rates = Bordered(K[chosen][:, chosen]).solve(-torch.ones_like(y[dropped]), -K[dropped][:, chosen])
    rates = rates.T.contiguous() * y[chosen, None] * y[dropped]
    alpha_in, box_in, names = alpha[chosen], box[chosen], chosen.tolist()
    bounded: list[tuple[int, bool]] = []  # variable, whether at its upper bound
    for k, (j, room) in enumerate(zip(dropped.tolist(), (box - alpha)[dropped].tolist(), strict=True)):
        rate = rates[:, k]
        ratio = (torch.where(rate > 0, box_in, 0.0) - alpha_in).div_(rate)
        ratio = ratio.masked_fill_(rate.abs() < _SLIP, torch.inf).clamp_min_(0)
        least, where = ratio.min(0)
        step, place = float(least), int(where)
        alpha_in.add_(rate, alpha=min(step, room))
        if room <= step:
            bounded.append((j, True))
            continue
        # An exchange: one pivot of `rates`.
        pivot = rate[place].item()
        bounded.append((names[place], pivot > 0))
        names[place], box_in[place], alpha_in[place] = j, box[j], alpha[j] + step
        row = rates[place] / -pivot
        rates.addr_(rate.clone(), row)
        rates[place] = row
    gone, at_upper = y.new_tensor(bounded).unbind(1)
    gone, kept = gone.long(), torch.tensor(names, device=y.device)
    free, upper = free.index_fill(0, gone, False), upper.index_copy(0, gone, at_upper > 0)
    return free, upper, alpha.index_copy(0, gone, at_upper * box[gone]).index_copy(0, kept, alpha_in)


def _free_system(K: Tensor, free: Tensor) -> Bordered:
    """The equations of the free set."""
    S = free.nonzero()[:, 0]
    return Bordered(K[S][:, S])


def _active_set_solution(
    K: Tensor,
    y: Tensor,
    box: Tensor,
    free: Tensor,
    upper: Tensor,
    tight: bool = False,
    system: Bordered | None = None,
) -> Exact:
    """Solve [0 1^T; 1 K_SS] [b; a_S] = [-1^T a_U; y_S - K_SU a_U] and look at the signs."""
    S = free.nonzero()[:, 0]
    a = torch.where(upper, box * y, 0.0)
    system = _free_system(K, free) if system is None else system
    bias = y.new_zeros(())
    product = accurate_product if tight else torch.mv
    for _ in range(1 + _REFINEMENTS):  # a nearly singular K_SS loses digits
        rhs = y[S] - bias - product(K[S], a)
        (change,), (step,) = system.solve(-a.sum()[None], rhs[None])
        a[S] += step
        bias = bias + change
    alpha = a * y
    margin = y * (product(K, a) + bias) - 1
    beyond = torch.maximum(-alpha, alpha - box) / box.clamp(min=1.0)
    missed = torch.where(upper, margin, -margin) - _rounding(K, alpha)
    return Exact(alpha, bias, margin, free, upper, float(torch.where(free, beyond, missed).max()))


def _rounding(K: Tensor, alpha: Tensor) -> Tensor:
    """What rounding of sums of m terms does to each margin, (m,), up to what is close."""
    length = K.diagonal().sqrt()
    unit = torch.finfo(K.dtype).eps * len(alpha) ** 0.5
    return (unit * (length @ alpha.abs()) * length).clamp_max_(_CLOSE)


def _without_strays(problem: Problem, solution: Exact, tight: bool) -> Exact:
    """With free variables beyond their bounds put there, if nothing else is wrong then, as is mostly so."""
    low, high = (solution.alpha < 0) & solution.free, (solution.alpha > problem.box) & solution.free
    free = solution.free & ~(low | high)
    if not bool(free.any()) or not bool((low | high).any()):
        return solution
    other = _active_set_solution(problem.K, problem.y, problem.box, free, solution.upper | high, tight)
    return other if other.slip <= 0 else solution


def _homotopy(
    problem: Problem, free: Tensor, upper: Tensor, alpha: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The optimal sets, by a path from data for which the given ones are optimal to the true data.

    One more variable, lowered from 1 to 0, has as its column the change of margins (and of the
    equality) that makes `alpha` optimal: the path engine then does the rest.
    """
    K, y, box = problem.K, problem.y, problem.box
    m = len(y)
    generator = torch.Generator("cpu").manual_seed(1)
    jitter = 1e-6 * (1 + torch.rand(m, generator=generator, dtype=K.dtype, device="cpu")).to(K.device)
    margin = y * (K @ (alpha * y) + bias) - 1
    lift = torch.where(upper, -margin.clamp_min(0) - jitter, (-margin).clamp_min(0) + jitter)
    lift = torch.where(free, -margin, lift)  # (m,)
    extended = K.new_zeros(m + 1, m + 1)
    extended[:m, :m] = K
    extended[:m, m] = extended[m, :m] = y * lift
    border = torch.cat([torch.ones_like(y), -(alpha @ y)[None]])
    tail = K.new_zeros(1)
    tableau = pivot_transform(
        extended, torch.cat([y, tail + 1]), torch.cat([free, free.new_zeros(1)]), border
    )
    sets = [torch.cat([mask, mask.new_zeros(1)]) for mask in (free, upper)]
    bounds = torch.cat([torch.stack([torch.zeros_like(box), box]), tail.new_tensor([[0.0], [1.0]])], 1)
    values = [torch.cat([x, tail]) for x in (alpha, margin + lift)]
    diagonal = torch.cat([K.diagonal(), tail])
    base = Base.build(tableau, sets[0], sets[1], values[0], values[1], bounds, diagonal)
    row, column = tableau.find(torch.full((1,), m, device=K.device))
    end = follow(base, torch.zeros_like(row), row, column, tail + 1, most_events=200 + 2 * m, distances=True)
    low, high = end.distance[0, :, :-2].index_select(1, tableau.order[0].argsort())[:, :m]
    # What was free holds -alpha, Note [state vector].
    alpha = torch.where(free, high, -low).clamp_min(0)
    free, upper = low.isfinite() & high.isfinite(), low.isinf() & high.isfinite()
    return free, upper, torch.where(free, alpha, torch.where(upper, box, 0.0))
