"""Changes of role: what they do to a variable, looked up by all problems of a batch; and singular ones.

Note [changes of role]
A variable whose coordinate z (Note [state vector]) meets an end of its range changes its role: from
bounded to free, or back. What comes then follows from whether it was free in the full solution,
whether it is in P, and which end z has met:

    was free  in P  now      z       met    alpha is at   then     z       begins at
    no        no    bounded  g       low    lower bound   free     alpha   low
    no        no    bounded  g       high   upper bound   free     alpha   high
    no        yes   free     alpha   low    lower bound   bounded  g       low
    no        yes   free     alpha   high   upper bound   bounded  g       high
    yes       no    free     -alpha  low    upper bound   bounded  g       high
    yes       no    free     -alpha  high   lower bound   bounded  g       low
    yes       yes   bounded  g       low    lower bound   free     -alpha  high
    yes       yes   bounded  g       high   upper bound   free     -alpha  low

In short: z begins at the end that it has met, or at the other one if it was free in the full solution;
and low means the lower bound of alpha, but for z = -alpha, where it means the upper one. The new range
is as wide as the box for a free variable, and endless for a bounded one.

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

from typing import NamedTuple

import torch
from torch import Tensor

from torchloo.svm.path.state import TOUCH, Base, Paths
from torchloo.svm.stacked import entries, rounds_per_look, times_vector
from torchloo.svm.tolerances import BEYOND, SINGULAR_ENTRY, SINGULAR_EXIT

__all__ = ["Shared", "Turn", "begin_swap", "end_swap"]

_ENDLESS = 1e290  # a step that nothing blocks


class Turn(NamedTuple):
    """What it takes, in B problems, to change the role of one index j each, Note [change sets]."""

    distance: Tensor
    """Distances of z_j from the ends of its new range, Note [changes of role], (B, 2)."""

    start: Tensor
    """A_jj if j joins P, 0 if it leaves, (B,)."""

    gain: Tensor
    """+1 if j joins P, -1 if it leaves, (B,)."""

    least: Tensor
    """The least regular |pi|, Note [singular pivots], (B,)."""

    own: Tensor
    """u at the new place: -1, which is that of j, if it joins P, 0 if it leaves, (B,)."""


class Shared:
    """What all problems of a batch read; columns and rows are those of all T tableaux in turn."""

    def __init__(self, base: Base, stop_at_error: bool, distances: bool) -> None:
        self.stop_at_error, self.distances = stop_at_error, distances
        self.rounds_per_look = rounds_per_look(base.distance)
        # y_r f_r - 1 below this ends the path; within a segment, where the active set is sure.
        self.floor = -1 - BEYOND if stop_at_error else -torch.inf
        self.height, self.width = base.tableau.A.shape[1:]  # m + 2, l + 2
        self.dummy, self.no_event = self.width - 2, self.width - 1  # Note [tableau]
        self.rows = base.tableau.A.reshape(-1, self.width)  # (T (m + 2), l + 2)
        self.sign = base.tableau.sign.reshape(-1)  # (T (l + 2),)
        self.box = base.box.transpose(1, 2).reshape(-1, 2)  # (T (l + 2), 2)
        self.turns = _turns(base)
        self.columns = len(self.sign)
        self._bags, self._k = self.sign[:0].long(), 0

    def rows_of(self, first_row: Tensor, P: Tensor) -> Tensor:
        """The rows of change sets; one dummy stands for all, which costs `embedding_bag` nothing."""
        if self.columns == self.width:
            return P
        return (first_row + P).masked_fill_(P.eq(self.dummy), self.dummy)

    def entries(self, rows: Tensor, P: Tensor) -> Tensor:
        """A_jP for rows j (B,) and columns P (B, k), (B, k)."""
        return entries(self.rows, torch.add(P, rows[:, None], alpha=self.width))

    def bags(self, moved: Tensor) -> Tensor:
        """Where the change sets `moved` (B, k) begin, one after the other, (B,)."""
        B, k = moved.shape
        if len(self._bags) != B or self._k != k:
            self._bags, self._k = torch.arange(0, B * k, k, device=moved.device), k
        return self._bags

    def turn(self, column: Tensor, in_P: Tensor, at_high: Tensor) -> Turn:
        """The change of role of columns (B,) whose coordinates have met their high or their low ends."""
        key = column.add(in_P, alpha=self.columns).add_(at_high, alpha=2 * self.columns)
        found = self.turns.index_select(0, key)
        return Turn(found[:, :2], *found[:, 2:].unbind(1))


def _turns(base: Base) -> Tensor:
    """The numbers of a Turn by (has met its high end, in P, column): (4 T (l + 2), 6)."""
    A, size = base.tableau.A, base.size
    two = torch.arange(2, device=A.device).bool()
    at_high, in_P = two[:, None, None, None], two[:, None, None]
    was_free = base.tableau.sign < 0  # (T, l + 2)
    free = was_free ^ in_P  # (2, T, l + 2)
    span = (base.box[:, 1] - base.box[:, 0]).masked_fill(free, torch.inf)
    begins_low = at_high == was_free  # (2, 1, T, l + 2)
    low, high = torch.where(begins_low, -TOUCH, -span), torch.where(begins_low, span, TOUCH)
    gain, own = A.new_tensor([[1.0, -1.0], [-1.0, 0.0]])[:, :, None, None]  # not in P, in P
    start = torch.where(in_P, 0.0, A.diagonal(dim1=1, dim2=2))
    least = torch.where(free, SINGULAR_EXIT / size.amax(1, keepdim=True), SINGULAR_ENTRY * size)
    turns = torch.stack(torch.broadcast_tensors(low, high, start, gain, least, own), -1)
    turns[..., -2:, :] = A.new_tensor([-torch.inf, torch.inf, 1.0, 0.0, 0.0, 0.0])  # do nothing
    return turns.reshape(-1, 6)


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
    if both.numel():
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
    at_upper, at_lower = torch.stack([-inf, away], 1), torch.stack([-away, inf], 1)
    bounded = torch.where(upper[:, None], at_upper, at_lower)
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
    A_PP = shared.rows[first + P[:, :, None], P[:, None, :]]
    H, info = torch.linalg.inv_ex(A_PP + identity)
    singular = info != 0
    s.H[rows] = (H - identity).masked_fill(singular[:, None, None], 0)
    s.failed[rows] |= singular
    s.reach[rows] = s.reach[rows].masked_fill(singular, 0)


def _drive(shared: Shared, s: Paths, rows: Tensor) -> None:
    """The rates c of Note [change sets] for the drivers q of `rows`, from H.

    A q that is not in P takes a place of its own: r place 0, others a new one.
    """
    s.make_room(1)
    P = s.P[rows]  # (R, k); the others are (R, 1)
    q, sense = s.driver[rows][:, None], s.sense[rows][:, None]
    first, row_r = s.first_row[rows][:, None], s.row[rows][:, None]
    q_is_r = q == s.target[rows][:, None]
    row_q = torch.where(q_is_r, row_r, first + q)
    place = torch.where(q_is_r, 0, s.used)
    member = q == P  # (R, k)
    in_P = member.any(1, keepdim=True)
    D_q = shared.sign[s.first[rows][:, None] + q]
    rhs = torch.where(in_P, member * D_q, -shared.rows[row_q, P])
    c = times_vector(s.H[rows], rhs * sense)
    s.rate[rows] = c.scatter(1, place, torch.where(in_P, c.gather(1, place), sense))
    moved = torch.cat([row_r, shared.rows_of(first, P)[:, 1:]], 1)
    s.moved[rows] = moved.scatter(1, place, torch.where(in_P, moved.gather(1, place), row_q))
    s.used += 1
