"""Sequential minimal optimisation of many SVMs at once that share kernel matrices.

Note [working sets]
State of each problem: alpha and F = u - y, u = K (alpha * y). With I_up the variables whose
a = alpha * y can rise and I_low those whose a can fall, b_up = min F over I_up and
b_low = max F over I_low, the problem is solved to epsilon when b_low - b_up <= epsilon. A round
takes the q worst violators of each problem, solves among them, and brings F up to date by one
product with the kernel columns that changed.

Among the q a few second-order pairs find out which variables are free; a few Newton steps on the whole free
set, Note [free sets], then do what pairs take thousands of steps for. Each goes to the maximum on its line or
to the first bound. What has not come nearer for some rounds is solved among the q by Note [inner interior
point], as is everything where no Newton steps are wanted. That alone stalls where more variables are free
than the q: diabetis, RBF, C = 100, with 131 free variables took 42 s, and 0.3 s with Newton steps.
With working=2 a round is one step on the most violating pair, the SMO of Keerthi et al. 2001 that BOUND uses.
"""

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from torchloo.svm.smo.box_qp import box_qp
from torchloo.svm.smo.free_newton import FreeSets, Groups
from torchloo.svm.stacked import may_look, subset

if TYPE_CHECKING:
    from torchloo.svm.smo.bound import DualBound

__all__ = ["SMOState", "seed_without", "smo"]

_TINY = 1e-12
_PAIRS = 32  # steps on pairs before the interior point
_FEW_PAIRS = 8  # steps on pairs before Newton steps
_ASKED, _PAIRS_ASKED = 4, 4  # a rule waits for a quarter more rounds; and for so many pairs at least
_STALLED = 4  # rounds that do not halve the violation, before the interior point comes to help


@dataclass
class SMOState:
    """B problems being solved, and those solved."""

    number: Tensor
    """The place of the problem in the batch as it came in, (B,)."""
    table: Tensor
    """Which kernel matrix it uses, (B,)."""
    box: Tensor
    """Upper bounds; 0 for what is left out, (B, n)."""
    y: Tensor
    """Labels, (B, n)."""
    alpha: Tensor
    """Coefficients, (B, n)."""
    F: Tensor
    """K (alpha * y) - y, also at rows left out, (B, n)."""
    bias: Tensor
    """Midpoint -(b_up + b_low) / 2, (B,)."""
    violation: Tensor
    """b_low - b_up, (B,)."""
    steps: Tensor
    """Pairs optimised, (B,)."""
    newton: Tensor
    """Newton steps on the free set, (B,)."""
    columns: Tensor
    """Kernel columns read, (B,)."""
    stopped_by: Tensor
    """0: epsilon-KKT (or out of rounds), of which the rule is not asked; other numbers are its own, (B,)."""
    read: Tensor
    """Columns read since the rule was last asked, (B, n) bool."""
    sign: Tensor
    """Sign of the held-out value proved by the stop rule, 0 if none, (B,)."""
    mark: Tensor
    """The violation when it had last been halved, (B,)."""
    waited: Tensor
    """Rounds since then, (B,)."""

    def take(self, rows: Tensor) -> "SMOState":
        """The problems at `rows`."""
        return SMOState(*(getattr(self, f.name)[rows] for f in fields(self)))


def smo(
    K: Tensor,
    y: Tensor,
    box: Tensor,
    alpha: Tensor,
    epsilon: float = 1e-3,
    table: Tensor | None = None,
    rule: "DualBound | None" = None,
    working: int = 64,
    most_rounds: int = 100_000,
    patience: int | None = None,
    newton: int = 4,
) -> SMOState:
    """Solve B SVM duals to epsilon from feasible starting points, Note [working sets].

        max sum alpha - 1/2 sum alpha_i alpha_j y_i y_j k_ij,  y^T alpha = 0,  0 <= alpha <= box

    Args:
        K: kernel matrices, (T, n, n).
        y, box, alpha: labels, upper bounds and start of each problem, (B, n).
        epsilon: largest violation of the optimality conditions.
        table: which kernel matrix each problem uses, (B,); default the first.
        rule: another reason to stop, of the same problems (bound.py); asked at first in every round, or after
            every fourth pair, and ever more rarely, so that no stop comes later by more than a quarter.
        working: size of the working sets.
        most_rounds: give up after so many rounds, or when rounding lets nothing move; `violation` tells.
        patience: give a problem up whose violation has not been halved in so many rounds.
        newton: Newton steps on the free set in each round, at most; 0: none, as with working=2.

    Cost O(B n q) a round, and O(B n^2) a Newton step. Memory O(B (n + q^2)), and 4 n^2 for each kernel matrix
    for Newton steps. On an accelerator the host waits once a round.
    Reference: Keerthi et al. 2001; Fan et al. 2005.
    """
    q = min(working, y.shape[1])
    sets = FreeSets(K) if newton and q > 2 else None
    state = _first_state(K, y, box, alpha, table)
    if rule is not None:
        rule.take(state.number)
    groups = Groups.of(state.table, len(K), len(y))
    ended: list[SMOState] = []
    asks = 0  # the round of the next test by the rule
    stuck = torch.zeros_like(state.number, dtype=torch.bool)
    for round_ in range(most_rounds):
        F_up, F_low = _movable(state)
        done = stuck | (_update_violation(state, F_up, F_low) <= epsilon)
        if patience is not None:
            done |= state.waited >= patience
        if round_ == most_rounds - 1:
            done = torch.ones_like(done)
        if rule is not None and round_ >= asks:  # after epsilon-KKT, as Step 4 of Algorithm 3 comes before 7
            asks = round_ + round_ // _ASKED + (_PAIRS_ASKED if q == 2 else 1)
            done |= rule.advance(state, ~done)
            state.read = torch.zeros_like(state.read)
        plan = _look(state, done, groups, sets)
        if plan.ended:
            rest, gone = done.to(torch.uint8).argsort(stable=True).split([len(done) - plan.ended, plan.ended])
            ended.append(state.take(gone))
            if not len(rest):
                break
            state, F_up, F_low = state.take(rest), F_up[rest], F_low[rest]
            groups = Groups.of(state.table, len(K), plan.most)
            if rule is not None:
                rule.take(rest)
        if q == 2:
            stuck = ~_pair_step(K, state, F_up, F_low)
            continue
        W = _working_set(state, F_up, F_low, q)
        moved = _improve(K, state, W, epsilon, sets is not None, plan.stalled)
        if sets is not None:
            if plan.stale:
                sets.renew(plan.size)
            moved |= _newton_steps(sets, state, groups, newton)
        stuck = ~moved
    joined = SMOState(*(torch.cat([getattr(part, f.name) for part in ended]) for f in fields(SMOState)))
    return joined.take(joined.number.argsort())


def _first_state(K: Tensor, y: Tensor, box: Tensor, alpha: Tensor, table: Tensor | None) -> SMOState:
    """The problems at their start, in the order of their kernel matrices."""
    zero = torch.zeros(len(y), dtype=torch.long, device=y.device)
    table = zero if table is None else table
    order = table.argsort(stable=True)
    table, y, box, alpha = table[order], y[order], box[order], alpha[order]
    F = Groups.of(table, len(K), len(y)).product(alpha * y, K) - y
    none = alpha.new_zeros(len(y))
    return SMOState(
        order, table, box, y, alpha, F, none, none, zero, zero.clone(), zero.clone(), zero,
        torch.zeros_like(y, dtype=torch.bool), none, none + torch.inf, zero,
    )  # fmt: skip


class _Plan(NamedTuple):
    """What the host has to know of a round."""

    ended: int
    """Problems that end here."""
    most: int = 0
    """Those of one kernel matrix that go on, at most, if there are several."""
    stalled: int = 0
    """Problems that need the interior point."""
    stale: int = 0
    """Kernel matrices that need a new common set, Note [free sets]."""
    size: int = 0
    """The size of the largest common set then."""


def _look(s: SMOState, done: Tensor, groups: Groups, sets: FreeSets | None) -> _Plan:
    """All that is asked for in one reading, the only time that the host waits in a round."""
    numbers = [done.sum()]
    if len(groups.sizes) > 1 or sets is not None:
        numbers.append(torch.zeros_like(groups.sizes).index_add_(0, s.table, (~done).long()).amax())
    if sets is not None:
        numbers.append(((s.waited >= _STALLED) & ~done).sum())
        numbers += sets.look((s.alpha > 0) & (s.alpha < s.box), groups)
    return _Plan(*torch.stack(numbers).tolist()) if len(numbers) > 1 else _Plan(int(numbers[0]))


def _directions(alpha: Tensor, box: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Masks of I_up and I_low."""
    can_grow, can_shrink = alpha < box, alpha > 0
    return torch.where(y > 0, can_grow, can_shrink), torch.where(y > 0, can_shrink, can_grow)


def _movable(s: SMOState) -> tuple[Tensor, Tensor]:
    """F where a can rise, else inf; F where a can fall, else -inf; (B, n) both."""
    up, low = _directions(s.alpha, s.box, s.y)
    return s.F.masked_fill(~up, torch.inf), s.F.masked_fill(~low, -torch.inf)


def _update_violation(s: SMOState, F_up: Tensor, F_low: Tensor) -> Tensor:
    """Set bias, violation and waited of each problem, and return the violation, (B,)."""
    b_up, b_low = F_up.amin(1), F_low.amax(1)
    s.violation = (b_low - b_up).clamp_min(0).nan_to_num(0, 0, 0)
    halved = s.violation < s.mark / 2
    s.mark = torch.where(halved, s.violation, s.mark)
    s.waited = (s.waited + 1).masked_fill(halved, 0)
    # One class only: b has a half-line, and f is the remaining label at the nearer end.
    one_sided = torch.where(b_up.isinf(), -b_low, -b_up)
    s.bias = torch.where(b_up.isinf() | b_low.isinf(), one_sided, -(b_up + b_low) / 2)
    return s.violation


def _working_set(s: SMOState, F_up: Tensor, F_low: Tensor, q: int) -> Tensor:
    """The q worst violators, (B, q); both directions have a share, so that the equality lets them move."""
    share = max(q // 4, 1)
    rising = F_up.topk(share, 1, largest=False, sorted=False).indices
    falling = F_low.topk(share, 1, sorted=False).indices
    score = torch.maximum(F_low.amax(1, keepdim=True) - F_up, F_low - F_up.amin(1, keepdim=True))
    score = score.scatter(1, torch.cat([rising, falling], 1), torch.inf)
    return score.masked_fill(s.box <= 0, -torch.inf).topk(q, 1).indices


def _improve(K: Tensor, s: SMOState, W: Tensor, epsilon: float, newton: bool, stalled: int) -> Tensor:
    """Optimise over working sets W (B, q), update F by one product; whether alpha moved, (B,).

    Where Newton steps follow only roughly, but for the `stalled` problems.
    """
    K_WW = K[s.table[:, None, None], W[:, :, None], W[:, None, :]]  # (B, q, q)
    y, box, before, F = (x.gather(1, W) for x in (s.y, s.box, s.alpha, s.F))
    alpha, steps, unsolved = _pairs(K_WW, y, box, before, F, epsilon, _FEW_PAIRS if newton else _PAIRS)
    if stalled or not newton:
        hard = subset(unsolved & (s.waited >= _STALLED) if newton else unsolved)
        parts = (x[hard] for x in (K_WW, y, box, before, F, alpha))
        alpha = alpha.index_copy(0, hard, _solve_exactly(*parts)) if len(hard) else alpha
    s.steps = s.steps + steps
    return _enter(K, s, W, before, alpha)


def _enter(K: Tensor, s: SMOState, W: Tensor, before: Tensor, alpha: Tensor) -> Tensor:
    """Change the coefficients at W (B, q), and F by one product; whether any has changed, (B,)."""
    change, moved = (alpha - before) * s.y.gather(1, W), alpha != before
    s.alpha = s.alpha.scatter(1, W, alpha)
    rows = W + (s.table * K.shape[1])[:, None]
    s.F = s.F + embedding_bag(rows, K.flatten(0, 1), per_sample_weights=change, mode="sum")
    s.read = s.read.scatter(1, W, s.read.gather(1, W) | moved)
    s.columns = s.columns + moved.sum(1)
    return moved.any(1)


def _pair_step(K: Tensor, s: SMOState, F_up: Tensor, F_low: Tensor) -> Tensor:
    """One step on the most violating pair, Keerthi et al. 2001; whether alpha moved, (B,)."""
    W = torch.stack([F_up.argmin(1), F_low.argmax(1)], 1)  # (B, 2)
    k_ii, k_ij, _, k_jj = K[s.table[:, None, None], W[:, :, None], W[:, None, :]].flatten(1).unbind(1)
    y, box, before = (x.gather(1, W) for x in (s.y, s.box, s.alpha))
    newton = s.violation / (k_ii + k_jj - 2 * k_ij).clamp_min(_TINY)
    a, _ = _pair(*_signed(before, box, y), newton)
    s.steps = s.steps + 1
    return _enter(K, s, W, before, a * y)


def _newton_steps(sets: FreeSets, s: SMOState, groups: Groups, most: int) -> Tensor:
    """So many Newton steps, until no bound blocks; which problems moved, (B,)."""
    moved = torch.zeros_like(s.number, dtype=torch.bool)
    rows, going = torch.arange(len(moved), device=moved.device), ~moved
    for step in range(most):
        changed, blocked = _newton_step(sets, s, rows, going, groups)
        moved[rows] |= changed
        going = changed & blocked
        kept = subset(going)
        if not len(kept) or step == most - 1:
            break
        rows, going, groups = rows[kept], going[kept], groups.take(kept)
    return moved


def _newton_step(
    sets: FreeSets, s: SMOState, rows: Tensor, going: Tensor, groups: Groups
) -> tuple[Tensor, Tensor]:
    """Along Note [free sets] to the maximum or the first bound; which moved, and which met a bound, (R,).

    Of the problems at `rows` (R,), those that are `going`.
    """
    alpha, box, y, F = (x.index_select(0, rows) for x in (s.alpha, s.box, s.y, s.F))
    d = sets.directions((alpha > 0) & (alpha < box), F, groups)
    K_d = groups.product(d, sets.K)
    slope, bend = -(F * d).sum(1), (K_d * d).sum(1)
    change = d * y  # of alpha
    room = torch.where(change > 0, box - alpha, -alpha).div_(change).masked_fill_(change == 0, torch.inf)
    nearest, j = room.min(1, keepdim=True)  # (R, 1)
    best = slope / bend.clamp_min(torch.finfo(bend.dtype).tiny)
    blocked = nearest[:, 0] <= best
    moves = going & (slope > 0) & (blocked | (bend > 0))
    t = torch.where(blocked, nearest[:, 0], best).masked_fill_(~moves, 0)[:, None]
    blocked &= moves
    new = torch.addcmul(alpha, change, t)
    bound = torch.where(change.gather(1, j) > 0, box.gather(1, j), 0.0)
    new.scatter_(1, j, torch.where(blocked[:, None], bound, new.gather(1, j)))
    new = new.clamp_min_(0).minimum(box)
    s.alpha[rows] = new
    s.F[rows] = torch.addcmul(F, K_d, t)
    s.newton[rows] += moves
    s.columns[rows] += (new != alpha).sum(1)
    return moves, blocked


def _solve_exactly(K: Tensor, y: Tensor, box: Tensor, before: Tensor, F: Tensor, paired: Tensor) -> Tensor:
    """Note [inner interior point] on working sets (B, q); where it gains no more, what the pairs reached."""
    Q = K * y[:, :, None] * y[:, None, :]
    c = y * F - (Q @ before[:, :, None])[:, :, 0]
    candidates = torch.stack([paired, box_qp(Q, c, box, before, y)])  # (2, B, q)
    cost = (candidates * (c + (Q @ candidates[..., None])[..., 0] / 2)).sum(2)
    return torch.where((cost[1] < cost[0])[:, None], candidates[1], candidates[0])


def _pairs(
    K: Tensor, y: Tensor, box: Tensor, alpha: Tensor, F: Tensor, epsilon: float, most: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Second-order SMO on (B, q), with at most so many steps.

    New alpha (B, q), the number of pairs, and what is not solved, (B,).
    """
    a, lowest, highest = _signed(alpha, box, y)
    diagonal = K.diagonal(dim1=1, dim2=2)
    steps = torch.zeros(len(y), dtype=torch.long, device=y.device)
    batch = torch.arange(len(y), device=y.device)
    for count in range(most + 1):
        F_i, i = F.masked_fill(a >= highest, torch.inf).min(1)
        gain = F.masked_fill(a <= lowest, -torch.inf).sub_(F_i[:, None]).clamp_min_(0)  # (B, q)
        moving = gain.amax(1) > epsilon / 2  # not the slope of j, whose gain may lie in a tiny eta
        if count == most or (count % 4 == 0 and may_look(moving) and not bool(moving.any())):
            break
        K_i = K[batch, i]
        eta = (diagonal[batch, i][:, None] + diagonal).sub_(K_i, alpha=2).clamp_min_(_TINY)
        newton = gain / eta
        j = (gain * newton).argmax(1)
        pair = torch.stack([i, j], 1)
        step = newton.gather(1, j[:, None])[:, 0] * moving
        a_pair, low, high = (x.gather(1, pair) for x in (a, lowest, highest))
        value, t = _pair(a_pair, low, high, step)
        a = a.scatter(1, pair, value)
        F = torch.addcmul(F, K_i.sub_(K[batch, j]), t[:, None])
        steps += moving
    return a * y, steps, moving


def _signed(alpha: Tensor, box: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """a = alpha * y and its lower and upper bounds."""
    far = box * y
    return alpha * y, far.clamp_max(0), far.clamp_min(0)


def _pair(a: Tensor, lowest: Tensor, highest: Tensor, newton: Tensor) -> tuple[Tensor, Tensor]:
    """Raise the first a of each pair (B, 2) and lower the second by `newton` (B,), or to a bound.

    The new a, snapped to the bound that it hits, and the step.
    """
    room = torch.minimum(highest[:, 0] - a[:, 0], a[:, 1] - lowest[:, 1])
    t = torch.minimum(newton, room)
    return _snapped(a + torch.stack([t, -t], 1), lowest, highest), t


def _snapped(a: Tensor, lowest: Tensor, highest: Tensor) -> Tensor:
    """Rounding must neither pass a bound nor miss it: what misses it looks free."""
    margin = _TINY * (highest - lowest)
    a = torch.where(highest - a < margin, highest, a)
    return torch.where(a - lowest < margin, lowest, a)


def seed_without(alpha: Tensor, y: Tensor, box: Tensor, near: Tensor) -> Tensor:
    """A feasible start without some rows, from the full solution; all (B, n), `box` 0 at those rows.

    What the rows held goes to rows whose a = alpha * y can take it, nearest in kernel (`near`)
    first: by growing same-class ones, then by shrinking the others. That always completes while
    both classes remain; with one class the only feasible point, zero, comes out.
    """
    left = alpha.minimum(box)
    surplus = ((alpha - left) * y).sum(1)  # (B,) to be put back
    same = y * surplus[:, None].sign() > 0
    grow = torch.where(same, box - left, 0.0)
    left = left + _pour(surplus.abs(), grow, near)
    rest = surplus.abs() - (left - alpha.minimum(box)).sum(1)
    shrink = torch.where(same, 0.0, left)
    left = left - _pour(rest.clamp_min(0), shrink, near)
    return _snapped(left, torch.zeros_like(box), box)


def _pour(amount: Tensor, room: Tensor, near: Tensor) -> Tensor:
    """Fill rooms (B, n) in the order of nearness until the amount (B,) is spent."""
    order = near.masked_fill(room <= 0, -torch.inf).argsort(1, descending=True)
    sorted_room = room.gather(1, order)
    before = sorted_room.cumsum(1) - sorted_room
    given = (amount[:, None] - before).clamp_min(0).minimum(sorted_room)
    return torch.zeros_like(room).scatter(1, order, given)
