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
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from torchloo.svm.free_newton import FreeSets
from torchloo.svm.inner import box_qp

__all__ = ["SMOState", "StopRule", "seed_without", "smo"]

_TINY = 1e-12
_PAIRS = 32  # steps on pairs before the interior point
_FEW_PAIRS = 8  # steps on pairs before Newton steps
_STALLED = 4  # rounds that do not halve the violation, before the interior point comes to help


@dataclass
class SMOState:
    """B problems being solved, and those solved."""

    name: Tensor
    """The caller's number of the problem, (B,)."""
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


class StopRule(Protocol):
    """Another reason to stop, tested once a round."""

    def advance(self, state: SMOState) -> Tensor:
        """Work on the own bound, set state.stopped_by and state.sign; mask of those to stop, (B,)."""

    def take(self, rows: Tensor) -> None:
        """Keep only the problems at `rows`."""


def smo(
    K: Tensor,
    y: Tensor,
    box: Tensor,
    alpha: Tensor,
    epsilon: float = 1e-3,
    table: Tensor | None = None,
    rule: StopRule | None = None,
    working: int = 64,
    most_rounds: int = 100_000,
    rule_every: int = 1,
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
        rule: an additional stopping rule (bound.py).
        working: size of the working sets.
        most_rounds: give up after so many rounds, or when rounding lets nothing move; `violation` tells.
        rule_every: ask the rule every so many rounds.
        patience: give a problem up whose violation has not been halved in so many rounds.
        newton: Newton steps on the free set in each round, at most; 0: none, as with working=2.

    Cost O(B n q) a round, and O(B n^2) a Newton step. Memory O(B (n + q^2)), and 4 n^2 for each kernel matrix
    for Newton steps. Reference: Keerthi et al. 2001; Fan et al. 2005.
    """
    B, n = alpha.shape
    zero = torch.zeros(B, dtype=torch.long, device=K.device)
    table = zero if table is None else table
    u = (
        torch.stack([a @ K[t] for a, t in zip(alpha * y, table.tolist(), strict=True)])
        if len(K) > 1
        else ((alpha * y) @ K[0])
    )
    state = SMOState(
        torch.arange(B, device=K.device), table, box, y, alpha.clone(), u - y,
        alpha.new_zeros(B), alpha.new_zeros(B), zero.clone(), zero.clone(), zero.clone(), zero.clone(),
        torch.zeros_like(alpha, dtype=torch.bool), alpha.new_zeros(B),
        alpha.new_full((B,), torch.inf), zero.clone(),
    )  # fmt: skip
    flat = K.reshape(-1, n)
    newton = newton if working > 2 else 0
    sets = [FreeSets(k) for k in K] if newton else []
    ended: list[SMOState] = []
    stuck = torch.zeros(B, dtype=torch.bool, device=K.device)
    for round_ in range(most_rounds):
        done = stuck | (_update_violation(state) <= epsilon)
        if patience is not None:
            done |= state.waited >= patience
        if round_ == most_rounds - 1:
            done[:] = True
        state = _without(state, done, ended, rule)
        if rule is not None and len(state.name) and round_ % rule_every == 0:
            stopped = rule.advance(state)
            state.read = torch.zeros_like(state.read)
            state = _without(state, stopped, ended, rule)
        if not len(state.name):
            break
        moved = _improve(flat, state, _working_set(state, min(working, n)), epsilon, bool(newton))
        for number, free_sets in enumerate(sets):
            rows = (state.table == number).nonzero()[:, 0]
            moved[rows] |= _newton_steps(free_sets, state, rows, newton)
        stuck = ~moved
    joined = SMOState(*(torch.cat([getattr(part, f.name) for part in ended]) for f in fields(SMOState)))
    return joined.take(joined.name.argsort())


def _without(s: SMOState, done: Tensor, ended: list[SMOState], rule: StopRule | None) -> SMOState:
    """The problems that go on; those that are done (B,) go to `ended`."""
    if not bool(done.any()):
        return s
    ended.append(s.take(done.nonzero()[:, 0]))
    rest = (~done).nonzero()[:, 0]
    if rule is not None:
        rule.take(rest)
    return s.take(rest)


def _directions(alpha: Tensor, box: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Masks of I_up and I_low."""
    can_grow, can_shrink = alpha < box, alpha > 0
    return torch.where(y > 0, can_grow, can_shrink), torch.where(y > 0, can_shrink, can_grow)


def _movable(s: SMOState) -> tuple[Tensor, Tensor]:
    """F where a can rise, else inf; F where a can fall, else -inf; (B, n) both."""
    up, low = _directions(s.alpha, s.box, s.y)
    return s.F.masked_fill(~up, torch.inf), s.F.masked_fill(~low, -torch.inf)


def _update_violation(s: SMOState) -> Tensor:
    """Set bias, violation and waited of each problem, and return the violation, (B,)."""
    F_up, F_low = _movable(s)
    b_up, b_low = F_up.amin(1), F_low.amax(1)
    s.violation = (b_low - b_up).clamp_min(0).nan_to_num(0, 0, 0)
    halved = s.violation < s.mark / 2
    s.mark = torch.where(halved, s.violation, s.mark)
    s.waited = (s.waited + 1).masked_fill(halved, 0)
    # One class only: b has a half-line, and f is the remaining label at the nearer end.
    one_sided = torch.where(b_up.isinf(), -b_low, -b_up)
    s.bias = torch.where(b_up.isinf() | b_low.isinf(), one_sided, -(b_up + b_low) / 2)
    return s.violation


def _working_set(s: SMOState, q: int) -> Tensor:
    """The q worst violators, (B, q); both directions have a share, so that the equality lets them move."""
    F_up, F_low = _movable(s)
    share = max(q // 4, 1)
    rising = F_up.topk(share, 1, largest=False, sorted=False).indices
    falling = F_low.topk(share, 1, sorted=False).indices
    score = torch.maximum(F_low.amax(1, keepdim=True) - F_up, F_low - F_up.amin(1, keepdim=True))
    score = score.scatter(1, torch.cat([rising, falling], 1), torch.inf)
    return score.masked_fill(s.box <= 0, -torch.inf).topk(q, 1).indices


def _improve(flat: Tensor, s: SMOState, W: Tensor, epsilon: float, newton: bool) -> Tensor:
    """Optimise over working sets W (B, q), update F by one product; whether alpha moved, (B,).

    Only roughly, but for stalled problems, where Newton steps follow.
    """
    rows = W + (s.table * s.F.shape[1])[:, None]
    K_WW = flat[rows[:, :, None], W[:, None, :]]  # (B, q, q)
    y, box, before, F = (x.gather(1, W) for x in (s.y, s.box, s.alpha, s.F))
    most = 1 if W.shape[1] == 2 else _FEW_PAIRS if newton else _PAIRS
    alpha, steps, unsolved = _pairs(K_WW, y, box, before, F, epsilon, most)
    if newton:
        unsolved &= s.waited >= _STALLED
    hard = unsolved.nonzero()[:, 0]
    if len(hard):
        parts = (x[hard] for x in (K_WW, y, box, before, F, alpha))
        alpha = alpha.index_copy(0, hard, _solve_exactly(*parts))
    change = (alpha - before) * y
    s.alpha.scatter_(1, W, alpha)
    s.F = s.F + embedding_bag(rows, flat, per_sample_weights=change, mode="sum")
    s.steps += steps
    moved = change != 0
    s.read |= torch.zeros_like(s.read).scatter_(1, W, moved)
    s.columns += moved.sum(1)
    return moved.any(1)


def _newton_steps(sets: FreeSets, s: SMOState, rows: Tensor, most: int) -> Tensor:
    """So many Newton steps of the problems at `rows` (R,), until no bound blocks; which moved, (R,)."""
    moved = torch.zeros_like(rows, dtype=torch.bool)
    going = torch.arange(len(rows), device=rows.device)
    for _ in range(most):
        if not len(going):
            break
        changed, blocked = _newton_step(sets, s, rows[going])
        moved[going] |= changed
        going = going[(changed & blocked).nonzero()[:, 0]]
    return moved


def _newton_step(sets: FreeSets, s: SMOState, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Along Note [free sets] to the maximum or the first bound; which moved, and which met a bound, (R,)."""
    alpha, box, y, F = (x.index_select(0, rows) for x in (s.alpha, s.box, s.y, s.F))
    free = (alpha > 0) & (alpha < box)
    d = sets.directions(free, F)
    K_d = d @ sets.K
    slope, bend = -(F * d).sum(1), (K_d * d).sum(1)
    change = d * y  # of alpha
    room = torch.where(change > 0, box - alpha, -alpha).div_(change).masked_fill_(change == 0, torch.inf)
    nearest, j = room.min(1, keepdim=True)  # (R, 1)
    best = slope / bend.clamp_min(torch.finfo(bend.dtype).tiny)
    blocked = nearest[:, 0] <= best
    moves = (slope > 0) & (blocked | (bend > 0))
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
    diagonal = K.diagonal(dim1=1, dim2=2)
    steps = torch.zeros(len(y), dtype=torch.long, device=y.device)
    batch = torch.arange(len(y), device=y.device)
    for count in range(most + 1):
        up, low = _directions(alpha, box, y)
        F_i, i = F.masked_fill(~up, torch.inf).min(1)
        gain = F.masked_fill(~low, -torch.inf) - F_i[:, None]  # (B, q)
        moving = gain.amax(1) > epsilon / 2  # not the slope of j, whose gain may lie in a tiny eta
        if count == most or (count % 4 == 0 and not bool(moving.any())):
            break
        K_i = K[batch, i]
        eta = (diagonal[batch, i][:, None] + diagonal - 2 * K_i).clamp_min_(_TINY)
        j = torch.where(gain > 0, gain.square() / eta, -1.0).argmax(1)
        slope = gain.gather(1, j[:, None])[:, 0]
        room = torch.minimum(_room(alpha, box, y, i, 1.0), _room(alpha, box, y, j, -1.0))
        t = torch.minimum(slope / eta.gather(1, j[:, None])[:, 0], room).masked_fill(~moving, 0)
        alpha = _moved(_moved(alpha, box, y, i, t), box, y, j, -t)
        F = F + t[:, None] * (K_i - K[batch, j])
        steps += moving
    return alpha, steps, moving


def _room(alpha: Tensor, box: Tensor, y: Tensor, i: Tensor, sense: float) -> Tensor:
    """How far a_i = alpha_i y_i can move up (sense 1) or down (-1), (B,)."""
    i = i[:, None]
    grows = (y.gather(1, i) * sense) > 0
    value = alpha.gather(1, i)
    return torch.where(grows, box.gather(1, i) - value, value)[:, 0]


def _moved(alpha: Tensor, box: Tensor, y: Tensor, i: Tensor, t: Tensor) -> Tensor:
    """alpha with a_i moved by t and snapped to the bound that it hits."""
    i = i[:, None]
    limit = box.gather(1, i)
    value = alpha.gather(1, i) + y.gather(1, i) * t[:, None]
    value = torch.where(value > limit * (1 - _TINY), limit, value)
    value = torch.where(value < limit * _TINY, 0.0, value)
    return alpha.scatter(1, i, value)


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
    # Rounding must neither pass a bound nor miss it: what misses it looks free.
    left = torch.where(left > box * (1 - _TINY), box, left)
    return torch.where(left < box * _TINY, 0.0, left)


def _pour(amount: Tensor, room: Tensor, near: Tensor) -> Tensor:
    """Fill rooms (B, n) in the order of nearness until the amount (B,) is spent."""
    order = near.masked_fill(room <= 0, -torch.inf).argsort(1, descending=True)
    sorted_room = room.gather(1, order)
    before = sorted_room.cumsum(1) - sorted_room
    given = (amount[:, None] - before).clamp_min(0).minimum(sorted_room)
    return torch.zeros_like(room).scatter(1, order, given)
