"""Changes of role that would make the free set singular.

Note [singular pivots]
An index j that must change its role but would make the free set singular (|pi| of Note [change sets] is
too small: its point depends on the free ones, or it is the last free one) is driven itself while the
coefficient of r waits:

    j is      what is driven            until              then j is
    bounded   alpha_j, off its bound    i blocks           free, i changes its role, too
    bounded   alpha_j, off its bound    at its far bound   bounded there, g_j = 0
    free      g_j, which moves b        i blocks           bounded where it is, i changes its role, too

Either is driven up from the lower bound of alpha_j and down from the upper one. This covers rank
deficiency and the empty free set alike.
"""

import torch
from torch import Tensor

from torchloo.svm.path.roles import Shared
from torchloo.svm.path.state import TOUCH, Paths, times

__all__ = ["begin_swap", "end_swap"]

_ENDLESS = 1e290  # a step that nothing blocks


def begin_swap(shared: Shared, s: Paths, rows: Tensor, j: Tensor, at_high: Tensor) -> None:
    """Drive j (B,), which has met its high or its low end, in the problems at `rows` from now on."""
    j = j[rows]
    was_free, free = _roles(shared, s, rows, j)
    at_lower_bound = at_high[rows] == (was_free & free)  # Note [changes of role]
    box = shared.box[s.first[rows] + j]  # (R, 2)
    s.room[rows] = s.reach[rows]
    s.swap[rows] = True
    s.swapping = True
    s.driver[rows] = j
    s.sense[rows] = torch.where(at_lower_bound, 1.0, -1.0).to(s.sense)
    s.reach[rows] = torch.where(free, torch.inf, box[:, 1] - box[:, 0])
    s.distance[rows, 0, j] = -torch.inf  # what is driven has no range
    s.distance[rows, 1, j] = torch.inf
    _drive(shared, s, rows)


def end_swap(
    shared: Shared, s: Paths, rows: Tensor, i: Tensor, at_high: Tensor, event: Tensor, step: Tensor
) -> None:
    """End the swaps at `rows` after a step (B,) of j.

    It is an event (B,) if i (B,) has met its high or its low end; else j has reached its far bound.
    """
    s.swapping = False
    endless = step[rows] >= _ENDLESS
    if bool(endless.any()):
        s.failed[rows] |= endless
        s.reach[rows[endless]] = 0
        s.swap[rows[endless]] = False
        rows = rows[~endless]
    s.make_room(3)  # for i, j and _drive: packing between them would lose what has no rate yet
    blocked, j = event[rows], s.driver[rows]
    s.distance[rows, :, j] = _after_drive(shared, s, rows, blocked, step[rows])
    s.swap[rows], s.driver[rows], s.sense[rows] = False, s.target[rows], -1.0
    s.reach[rows], s.room[rows] = s.room[rows], 0.0
    both, i, j = rows[blocked], i[rows[blocked]], j[blocked]
    if len(both):
        in_P = (s.P[both] == i[:, None]).any(1)
        s.distance[both, :, i] = shared.turn(s.first[both] + i, in_P, at_high[both]).distance
        _toggle_both(shared, s, both, i, j)
    _drive(shared, s, rows)


def _roles(shared: Shared, s: Paths, rows: Tensor, j: Tensor) -> tuple[Tensor, Tensor]:
    """Whether j was free in the full solution, and whether it is now, (R,) each."""
    was_free = shared.sign[s.first[rows] + j] < 0
    return was_free, was_free ^ (s.P[rows] == j[:, None]).any(1)


def _after_drive(shared: Shared, s: Paths, rows: Tensor, blocked: Tensor, gone: Tensor) -> Tensor:
    """Distances (R, 2) of j, driven so far (R,), in its role after that: Note [singular pivots].

    r has its own range, Note [state vector].
    """
    j, up = s.driver[rows], s.sense[rows] > 0
    was_free, free = _roles(shared, s, rows, j)
    low, high = shared.box[s.first[rows] + j].unbind(1)
    alpha = torch.where(up, low + gone, high - gone)
    entered = torch.stack([low - alpha, high - alpha], 1)
    entered = torch.where(was_free[:, None], -entered.flip(1), entered)  # of z = -alpha
    away = torch.where(blocked, gone, 0.0).clamp_min(TOUCH)  # |g|
    inf = torch.full_like(away, torch.inf)
    upper = up ^ blocked  # up to the far bound, or g down from 0 at the upper one
    bounded = torch.where(upper[:, None], torch.stack([-inf, away], 1), torch.stack([-away, inf], 1))
    distance = torch.where((blocked & ~free)[:, None], entered, bounded)
    target = torch.stack([shared.floor - s.sense[rows] * gone, inf], 1)
    distance = torch.where((j == s.target[rows])[:, None], target, distance)
    low, high = distance.unbind(1)
    return torch.stack([low.clamp_max(-TOUCH), high.clamp_min(TOUCH)], 1)


def _toggle_both(shared: Shared, s: Paths, rows: Tensor, i: Tensor, j: Tensor) -> None:
    """Change the roles of i and j at once, with H from scratch: either alone would be singular."""
    for index in (i, j):
        P = s.P[rows]
        member = index[:, None] == P
        place = torch.where(index == s.target[rows], 0, s.used)  # place 0 is the target's
        joins = torch.where(member.any(1), shared.dummy, index)
        s.P[rows] = P.masked_fill(member, shared.dummy).scatter(1, place[:, None], joins[:, None])
        s.used += 1
    P, first = s.P[rows], s.first_row[rows][:, None, None]
    identity = torch.diag_embed(P.eq(shared.dummy).to(s.H))  # at padded places
    H, info = torch.linalg.inv_ex(shared.rows[first + P[:, :, None], P[:, None, :]] + identity)
    singular = info != 0
    s.H[rows] = (H - identity).masked_fill(singular[:, None, None], 0)
    s.failed[rows] |= singular
    s.reach[rows] = s.reach[rows].masked_fill(singular, 0)


def _drive(shared: Shared, s: Paths, rows: Tensor) -> None:
    """The rates c of Note [change sets] for the drivers q of `rows`, from H.

    A q that is not in P takes a place of its own: r place 0, others a new one.
    """
    s.make_room(1)
    q, sense, P = s.driver[rows][:, None], s.sense[rows][:, None], s.P[rows]
    first, row_r, q_is_r = s.first_row[rows][:, None], s.row[rows][:, None], q == s.target[rows][:, None]
    row_q, place = torch.where(q_is_r, row_r, first + q), torch.where(q_is_r, 0, s.used)
    member = q == P  # (R, k)
    in_P = member.any(1, keepdim=True)
    D_q = shared.sign[s.first[rows][:, None] + q]
    c = times(s.H[rows], torch.where(in_P, member * D_q, -shared.rows[row_q, P]) * sense)
    s.rate[rows] = c.scatter(1, place, torch.where(in_P, c.gather(1, place), sense))
    moved = torch.cat([row_r, shared.rows_of(first, P)[:, 1:]], 1)
    s.moved[rows] = moved.scatter(1, place, torch.where(in_P, moved.gather(1, place), row_q))
    s.used += 1
