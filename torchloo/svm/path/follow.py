"""The exact path: lower one coefficient, follow the optimum, for many problems at once.

Note [change sets]
All problems share the tableau of the full solution (Note [tableau]). Problem r keeps the set P of
indices whose role differs from it, and H = (A_PP)^-1. What is held still in P are its outputs. When q,
mostly r itself, is driven at rate 1 (alpha_q if it is bounded, g_q if it is free now), the inputs move
at rates c, those of P so that its other outputs do not:

    q outside P:  c_P = -H A_Pq, c_q = 1          q in P:  c_P = D_q H_:q

The coordinates of Note [state vector] then change at rates v = A c, but v_P = c_P. When z_j meets an
end of its range, j changes its role (Note [changes of role]), with rank-one updates of H and of c:

    j joins P:   x = H A_Pj,  pi = A_jj - A_jP x,  u = x - e_j,  H += u u^T / pi,    c += u v_j / pi
    j leaves P:  x = H e_j,   pi = H_jj,           u = x,        H -= u u^T / pi,    c -= u v_j / pi

As coded, with e = A_Pj or e_j, and `start`, `gain`, `own` of a Turn: x = H e, pi = start - gain e^T x,
u = x with `own` in a new place, H += gain u u^T / pi, c += gain u v_j / pi. Indices are columns of the
tableau; r may be a row only. Nothing per problem has size n^2. |pi| is the diagonal entry of the
problem's own tableau: 0 if the new free set would be singular (Note [singular pivots]). Places in P are
given out in the same order to all problems, one in each round, and packed when they run out.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from torchloo.svm.path.roles import Shared, Turn, begin_swap, end_swap
from torchloo.svm.path.state import Base, Ends, Paths
from torchloo.svm.stacked import at_once, times_vector, weighted_rows
from torchloo.svm.tolerances import FLAT, ROUNDING

__all__ = ["follow"]

_GROWTH = 4  # places of a change set at first
_BLOCK = 2**18  # entries of the state of problems that are followed together; more leave the cache
_WORTH_PACKING = 20_000  # entries of the state of ended problems that are worth removing
_WORTH_SPLITTING = 2**22  # entries of inverses, all as large as the largest, that are worth several groups
_SHORT = 1 - ROUNDING  # of each step: rounding carries no z past an end; a tie with the reach is no event
_NEVER = 1e-300  # 1 / step where nothing blocks


def follow(
    base: Base,
    table: Tensor,
    variable: Tensor,
    room: Tensor,
    stop_at_error: bool = False,
    most_events: int | None = None,
    distances: bool = False,
) -> list[Ends]:
    """Lower alpha of each variable by its room and return where each problem ends, by sizes of change sets.

    Args:
        base: T full solutions.
        table, variable, room: full solution, variable and distance of each problem, (B,).
        stop_at_error: end as soon as y_r f_r < 0: it never rises again. Every variable needs a column.
        most_events: give problems up after so many rounds; default 200 and one for each column.
        distances: whether the distances of the ends are asked for.

    Cost O(l k + k^2) an event for l columns and k changes. Memory O(l) for each problem.
    """
    shared = Shared(base, stop_at_error, distances)
    row, target = base.tableau.find(table, variable)
    most_events = 200 + shared.width if most_events is None else most_events
    ended: list[Ends] = []
    most = max(1, at_once(room, _BLOCK) // shared.width)
    numbers = torch.arange(len(target), device=target.device).split(most)
    blocks: Iterator[Paths] = (
        _start(shared, base.distance, x, table[x], row[x], target[x], room[x]) for x in numbers
    )
    waiting = len(numbers)
    while waiting:
        # Problems of one age together: rounds of few are all overhead, and so are the large change
        # sets of old problems for young ones.
        rest = [_advance(shared, s, most_events, ended, to_the_end=waiting == 1) for s in blocks]
        joined = _joined([s for s in rest if s is not None], most)
        blocks, waiting = iter(joined), len(joined)
    sizes: dict[int, list[Ends]] = {}
    most = max(part.P.shape[1] for part in ended)
    split = len(target) * most**2 > _WORTH_SPLITTING
    for part in ended:
        sizes.setdefault((part.P.shape[1] - 1) // _GROWTH if split else 0, []).append(part)
    return [Ends.cat(parts) for parts in sizes.values()]


def _advance(shared: Shared, s: Paths, most_events: int, ended: list[Ends], to_the_end: bool) -> Paths | None:
    """Rounds until half of the problems have ended, or all; those still on their way, if any."""
    live = len(s.problem_id)
    enough = 0 if to_the_end else live // 2
    while live > enough and s.rounds < most_events:
        for _ in range(shared.rounds_per_look):  # those of ended problems change nothing
            singular = _round(shared, s)
        s.rounds += shared.rounds_per_look
        live = int(s.reach.count_nonzero()) if singular is None else _look(shared, s, *singular)
        if live > enough and (len(s.problem_id) - live) * shared.width >= _WORTH_PACKING:
            s = _without_ended(shared, s, live, ended)
    if live and s.rounds < most_events:
        return _without_ended(shared, s, live, ended)
    # The others, if any, are given up; in a swap the room of r waits in its place already.
    s.failed |= s.reach > 0
    s.room += s.reach * ~s.swap
    ended.append(s.ends(shared.distances))
    return None


def _look(shared: Shared, s: Paths, singular: Tensor, j: Tensor, at_high: Tensor) -> int:
    """How many problems are still on their way, by one synchronisation; singular changes begin swaps."""
    live, waiting = s.look(singular)
    if waiting:
        begin_swap(shared, s, singular.nonzero()[:, 0], j, at_high)
    return live


def _without_ended(shared: Shared, s: Paths, live: int, ended: list[Ends]) -> Paths:
    """Those still on their way, so many; the others go to `ended`."""
    order = (s.reach > 0).to(torch.uint8).argsort(descending=True, stable=True)
    ended.append(s.ends(shared.distances, order[live:]))
    return s.take(order[:live])


def _joined(parts: list[Paths], most: int) -> list[Paths]:
    """The same problems in as few blocks of at most so many as may be."""
    blocks: list[list[Paths]] = []
    room = 0
    for s in parts:
        if room < len(s.problem_id):
            blocks.append([])
            room = most
        blocks[-1].append(s)
        room -= len(s.problem_id)
    return [Paths.cat(block) for block in blocks]


def _start(
    shared: Shared, distance: Tensor, problem_id: Tensor, table: Tensor, row: Tensor, r: Tensor, room: Tensor
) -> Paths:
    """The problems before their first step; an r that was free has changed its role already."""
    B, dummy = len(problem_id), shared.dummy
    no = torch.zeros(B, dtype=torch.bool, device=r.device)
    first, first_row = table * shared.width, table * shared.height
    turn = shared.turn(first + r, no, no)
    A_rr, was_free = turn.start, shared.sign[first + r] < 0
    singular = was_free & (A_rr.abs() < turn.least)
    joins = was_free & ~singular
    H_rr = A_rr.reciprocal().masked_fill_(~joins, 0)
    c_r = torch.where(joins, H_rr, -1.0)  # r is driven down: -D_r H_rr in P
    zeros, none = room.new_zeros(B, _GROWTH - 1), torch.full((B, _GROWTH - 1), dummy, device=r.device)
    s = Paths(
        problem_id=problem_id,
        first=first,
        first_row=first_row,
        row=first_row + row,
        target=r,
        room=torch.zeros_like(room),
        distance=distance.index_select(0, table),
        moved=torch.cat([(first_row + row)[:, None], none], 1),
        P=torch.cat([torch.where(joins, r, dummy)[:, None], none], 1),
        rate=torch.cat([c_r[:, None], zeros], 1),
        H=room.new_zeros(B, _GROWTH, _GROWTH),
        reach=room.clone(),
        driver=r.clone(),
        sense=-torch.ones_like(room),
        swap=no,
        failed=no.clone(),
        events=torch.zeros_like(r),
    )
    s.H[:, 0, 0] = H_rr
    _hold_target(shared, s, was_free)
    if bool(singular.any()):
        begin_swap(shared, s, singular.nonzero()[:, 0], r, no)
    return s


def _hold_target(shared: Shared, s: Paths, was_free: Tensor) -> None:
    """z_r = g_r in the range of Note [state vector]; it is 0 if r was free (B,), or has no column."""
    batch, r = torch.arange(len(s.target), device=s.target.device), s.target
    low, high = s.distance[batch, :, r].unbind(1)
    g = torch.where(low.isinf(), -high, -low).masked_fill_(was_free | (r == shared.no_event), 0)
    s.distance[batch, 0, r] = shared.floor - g
    s.distance[batch, 1, r] = torch.inf


Singular = tuple[Tensor, Tensor, Tensor]
"""Which problems wait with a singular change of role, (B,); its j; whether that is at its high end."""


def _round(shared: Shared, s: Paths) -> Singular | None:
    """Move every problem to its next event, or to the end of its reach, and handle it."""
    v = _rates(shared, s)
    soonest, j = torch.maximum(*(v[:, None] / s.distance).unbind(1)).max(1)  # 1 / step, where it is > 0
    step = soonest.clamp_min_(_NEVER).reciprocal_()
    event = step < s.reach * _SHORT
    step = torch.where(event, step.mul_(_SHORT), s.reach)
    s.distance.addcmul_(v[:, None], step[:, None, None], value=-1)
    s.reach -= step
    if shared.stop_at_error:
        _stop_at_floor(s, event, j)
    s.events += event
    v_j = v.gather(1, j[:, None])
    at_high = v_j[:, 0] > 0
    if s.swapping:
        swapped = s.swap.nonzero()[:, 0]
        end_swap(shared, s, swapped, j, at_high, event, step)
        event[swapped] = False
    return _change_role(shared, s, torch.where(event, j, shared.no_event), v_j, at_high)


def _rates(shared: Shared, s: Paths) -> Tensor:
    """v of Note [change sets], (B, l + 2); rounding is set to 0."""
    A_c = weighted_rows(shared.rows, s.moved, s.rate, shared.dummy, shared.bags(s.moved))
    return torch.hardshrink(A_c.scatter_(1, s.P, s.rate), FLAT)


def _stop_at_floor(s: Paths, event: Tensor, j: Tensor) -> None:
    """End problems whose target has met its floor; `event` loses them."""
    met = event & (j == s.target)
    s.room = torch.where(met & ~s.swap, s.reach, s.room)
    s.reach.masked_fill_(met, 0)
    s.swap &= ~met
    event &= ~met


def _change_role(shared: Shared, s: Paths, j: Tensor, v_j: Tensor, at_high: Tensor) -> Singular | None:
    """Free j where it is bounded, bound it where it is free: the updates of Note [change sets].

    `v_j` (B, 1) is ignored where there is no event. A singular change begins a swap, or comes back where a
    look at values is costly: the problem stays where it is, and the next round brings the same event.
    """
    turn, member, in_P, u, pi = _pivot(shared, s, j, at_high)
    singular, change, waits = pi.abs() < turn.least, j, shared.rounds_per_look > 1
    if waits or bool(singular.any()):
        if waits:
            s.events.sub_(singular.to(s.events))
        else:
            begin_swap(shared, s, singular.nonzero()[:, 0], j, at_high)
        j = j.masked_fill(singular, shared.no_event)
        turn, member, in_P, u, pi = _pivot(shared, s, j, at_high)
    u[:, s.used] = turn.own
    scaled = u * (turn.gain / pi)[:, None]
    s.H.addcmul_(scaled[:, :, None], u[:, None, :])
    s.rate.addcmul_(scaled, v_j)
    s.moved.masked_fill_(member, shared.dummy)
    s.P.masked_fill_(member, shared.dummy)
    s.P[:, s.used] = entry = torch.where(in_P, shared.dummy, j).clamp_max_(shared.dummy)
    s.moved[:, s.used] = shared.rows_of(s.first_row, entry)
    s.used += 1
    s.distance.scatter_(2, j[:, None, None].expand(-1, 2, 1), turn.distance[:, :, None])
    return (singular, change, at_high) if waits else None


def _pivot(
    shared: Shared, s: Paths, j: Tensor, at_high: Tensor
) -> tuple[Turn, Tensor, Tensor, Tensor, Tensor]:
    """The turn of j, where in P it is (B, k), if at all (B,), x (B, k) and pi (B,) of Note [change sets]."""
    s.make_room(1, pack=shared.rounds_per_look == 1)
    member = j[:, None] == s.P
    in_P = member.any(1)
    turn = shared.turn(s.first + j, in_P, at_high)
    e = torch.where(in_P[:, None], member, shared.entries(s.first_row + j, s.P))
    x = times_vector(s.H, e)
    return turn, member, in_P, x, torch.addcmul(turn.start, turn.gain, (e * x).sum(1), value=-1)
