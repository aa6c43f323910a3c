"""The exact path: lower one coefficient, follow the optimum, for many problems at once.

Note [change sets]
All problems share the tableau of the full solution (Note [tableau]). Problem r keeps the set P of
indices whose role differs from it, and H = (A_PP)^-1. When input q moves at rate 1, the inputs of P
must move so that its outputs, which are held still now, do not:

    q outside P:  c_P = -H A_Pq, c_q = 1          q in P:  c_P = D_q H_:q

The coordinates of Note [state vector] then change by v = A c, and those of P by c_P. When index j
meets a bound it changes its role, with rank-one updates of H and of c:

    j joins P:   x = H A_Pj,  pi = A_jj - A_jP x,  u = x - e_j,  H += u u^T / pi,    c += u v_j / pi
    j leaves P:  x = H e_j,   pi = H_jj,           u = x,        H -= u u^T / pi,    c -= u v_j / pi

Indices are columns of the tableau; r may be a row only. Nothing per problem has size n^2. |pi| is
the diagonal entry of the problem's own tableau: 0 if the new free set would be singular. Places in P
are given out in the same order to all problems, one in each round, and packed when they run out.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from torchloo.svm.roles import Shared
from torchloo.svm.state import Base, Ends, Paths, times
from torchloo.svm.swap import begin_swap, end_swap

__all__ = ["follow"]

_FLAT = 1e-11  # rates below this are rounding
_GROWTH = 8  # places of a change set at first
_BLOCK = 1024  # problems followed together; of several machines, or of one that is large
_WORTH_PACKING = 20_000  # entries of the state of ended problems that are worth removing
_SHORT = (
    1 - 1e-12
)  # of each step: rounding never carries a coordinate past its bound; and of ties with the end
_NEVER = 1e-300  # 1 / step where nothing blocks


def follow(
    base: Base,
    table: Tensor,
    row: Tensor,
    target: Tensor,
    room: Tensor,
    stop_at_error: bool = False,
    most_events: int | None = None,
    distances: bool = False,
) -> Ends:
    """Lower alpha of each target by its room and return where each problem ends, in any order.

    Args:
        base: T full solutions.
        table, row, target, room: full solution, row, column and distance of each problem, (B,).
        stop_at_error: end as soon as y_r f_r < 0: it never rises again. Every target needs a column.
        most_events: give a problem up after so many; default 200 and one for each column.
        distances: whether the distances of the ends are asked for.

    Cost O(l k + k^2) an event for l columns and k changes. Memory O(l) for each of the 1024 problems in
    work, and for each that has ended.
    """
    shared = Shared(base, stop_at_error, distances)
    most_events = 200 + shared.width if most_events is None else most_events
    ended: list[Ends] = []
    names = torch.arange(len(target), device=target.device).split(_BLOCK)
    blocks: Iterator[Paths] = (
        _start(shared, base.distance, x, table[x], row[x], target[x], room[x]) for x in names
    )
    waiting = len(names)
    while waiting:
        # Problems of one age together: rounds of few are all overhead, and so are the large change
        # sets of old problems for young ones.
        rest = [_advance(shared, s, most_events, ended, to_the_end=waiting == 1) for s in blocks]
        joined = _joined([s for s in rest if s is not None])
        blocks, waiting = iter(joined), len(joined)
    return Ends.cat(ended)


def _advance(shared: Shared, s: Paths, most_events: int, ended: list[Ends], to_the_end: bool) -> Paths | None:
    """Rounds until half of the problems have ended, or all; those still on their way, if any."""
    enough = 0 if to_the_end else len(s.name) // 2
    live = len(s.name)
    while live > enough and s.rounds < most_events:
        _round(shared, s)
        s.rounds += 1
        live = int(s.reach.count_nonzero())
        if live > enough and (len(s.name) - live) * shared.width >= _WORTH_PACKING:
            ended.append(s.ends((s.reach == 0).nonzero()[:, 0], shared.distances))
            s = s.take(s.reach.nonzero()[:, 0])
    if live and s.rounds < most_events:
        ended.append(s.ends((s.reach == 0).nonzero()[:, 0], shared.distances))
        return s.take(s.reach.nonzero()[:, 0])
    s.failed |= s.reach > 0
    s.room += s.reach * ~s.swap
    ended.append(s.ends(torch.arange(len(s.name), device=s.name.device), shared.distances))
    return None


def _joined(parts: list[Paths]) -> list[Paths]:
    """The same problems in as few blocks as may be."""
    blocks: list[list[Paths]] = []
    room = 0
    for s in parts:
        if room < len(s.name):
            blocks.append([])
            room = _BLOCK
        blocks[-1].append(s)
        room -= len(s.name)
    return [Paths.cat(block) for block in blocks]


def _start(
    shared: Shared, distance: Tensor, name: Tensor, table: Tensor, row: Tensor, r: Tensor, room: Tensor
) -> Paths:
    """The problems before their first step; a free target has changed its role already."""
    B, nothing = len(name), shared.pad
    no = torch.zeros(B, dtype=torch.bool, device=r.device)
    first, first_row = table * shared.width, table * shared.height
    turn = shared.turn(first + r, no, no)
    A_rr, was_free = turn.start, shared.sign[first + r] < 0
    singular = was_free & (A_rr.abs() < turn.least)
    joins = was_free & ~singular
    zeros, none = room.new_zeros(B, _GROWTH - 1), torch.full((B, _GROWTH - 1), nothing, device=r.device)
    inverse = A_rr.reciprocal().masked_fill_(~joins, 0)
    s = Paths(
        name=name,
        first=first,
        first_row=first_row,
        row=first_row + row,
        target=r,
        room=torch.zeros_like(room),
        distance=distance[table],
        moved=torch.cat([(first_row + row)[:, None], none], 1),
        P=torch.cat([torch.where(joins, r, nothing)[:, None], none], 1),
        rate=torch.cat([torch.where(joins, inverse, -1.0)[:, None], zeros], 1),
        H=room.new_zeros(B, _GROWTH, _GROWTH),
        reach=room.clone(),
        driver=r.clone(),
        sense=-torch.ones_like(room),
        swap=no,
        failed=no.clone(),
        events=torch.zeros_like(r),
    )
    s.H[:, 0, 0] = inverse
    # The target holds z = g without bounds, but for the floor; g = 0 where it was free or has no column.
    batch = torch.arange(B, device=r.device)
    low, high = s.distance[batch, :, r].unbind(1)
    margin = torch.where(low.isinf(), -high, -low).masked_fill_(was_free | (r == shared.nobody), 0)
    s.distance[batch, 0, r] = shared.floor - margin
    s.distance[batch, 1, r] = torch.inf
    if bool(singular.any()):
        begin_swap(shared, s, singular.nonzero()[:, 0], r, no)
    return s


def _round(shared: Shared, s: Paths) -> None:
    """Move every problem to its next event and handle it."""
    v = _rates(shared, s)
    nearest, j = torch.maximum(*(v[:, None] / s.distance).unbind(1)).max(1)
    step = nearest.clamp_min_(_NEVER).reciprocal_()
    event = step < s.reach * _SHORT
    step = torch.where(event, step.mul_(_SHORT), s.reach)
    s.distance.addcmul_(v[:, None], step[:, None, None], value=-1)
    s.reach -= step
    if shared.stop_at_error:
        _stop_at_floor(s, event, j)
    s.events += event
    pace = v.gather(1, j[:, None])
    at_high = pace[:, 0] > 0
    if s.swapping:
        swapped = s.swap.nonzero()[:, 0]
        end_swap(shared, s, swapped, j, at_high, event, step)
        event[swapped] = False
    _change_role(shared, s, torch.where(event, j, shared.nobody), pace, at_high)


def _rates(shared: Shared, s: Paths) -> Tensor:
    """How fast every coordinate moves, Note [change sets], (B, l + 2); rounding is set to 0."""
    B, k = s.moved.shape
    bags = torch.arange(0, B * k, k, device=s.moved.device)
    weights, plain, total = s.rate.view(-1), False, 0  # mode 0 is the sum
    v = torch.embedding_bag(
        shared.rows, s.moved.view(-1), bags, plain, total, plain, weights, plain, shared.pad
    )[0]
    return torch.hardshrink(v.scatter_(1, s.P, s.rate), _FLAT)


def _stop_at_floor(s: Paths, event: Tensor, j: Tensor) -> None:
    """End problems whose target has met its floor; `event` loses them."""
    met = event & (j == s.target)
    s.room = torch.where(met & ~s.swap, s.reach, s.room)
    s.reach.masked_fill_(met, 0)
    s.swap &= ~met
    event &= ~met


def _change_role(shared: Shared, s: Paths, j: Tensor, pace: Tensor, at_high: Tensor) -> None:
    """Free j where it is bounded, bound it where it is free: the updates of Note [change sets].

    `pace` (B, 1) is v_j; of no account for the dummy, which does nothing.
    """
    s.make_room(1)
    column = j[:, None]
    member = column == s.P  # (B, k)
    in_P = member.any(1)
    turn = shared.turn(s.first + j, in_P, at_high)
    rhs = torch.where(in_P[:, None], member, shared.rows[s.moved, column])
    u = times(s.H, rhs)
    pivot = torch.addcmul(turn.start, turn.gain, (rhs * u).sum(1), value=-1)
    singular = pivot.abs() < turn.least
    if bool(singular.any()):
        begin_swap(shared, s, singular.nonzero()[:, 0], j, at_high)
        return _change_role(shared, s, j.masked_fill(singular, shared.nobody), pace, at_high)
    u[:, s.used] = turn.own
    scaled = u * (turn.gain / pivot)[:, None]
    s.H.addcmul_(scaled[:, :, None], u[:, None, :])
    s.rate.addcmul_(scaled, pace)
    s.moved.masked_fill_(member, shared.pad)
    s.P.masked_fill_(member, shared.pad)
    s.P[:, s.used] = entry = torch.where(in_P, shared.pad, j).clamp_max_(shared.pad)
    s.moved[:, s.used] = shared.rows_of(s.first_row, entry)
    s.used += 1
    s.distance.scatter_(2, column[:, :, None].expand(-1, 2, 1), turn.distance[:, :, None])
