"""State of many paths at once.

Note [state vector]
A problem holds one coordinate z_i for each variable, with a range [low_i, high_i]:

    now                     in the full solution   z_i                  range
    at its lower bound      any                    g_i = y_i f_i - 1    [0, inf)
    at its upper bound      any                    g_i                  (-inf, 0]
    free                    bounded                alpha_i              its box
    free                    free                   -alpha_i             minus its box
    r, which is held        any                    g_r                  [floor, inf)

With this sign the change of an index that has kept its role is (A c)_i, that of one that has changed it
c_i (Note [change sets]): D of Note [tableau] is never needed. What is stored is not z but its distances
(low_i - z_i, high_i - z_i) = (<= 0, >= 0) from the ends. Every event of the path is the same thing, a
distance that shrinks to nothing (Note [changes of role]), and the next one has the largest
rate_i / distance_i: one operation over (B, l). A distance that is 0 is stored as 1e-200, so that 0 / 0
never occurs. The floor is -inf, or just below g_r = -1, that is y_r f_r = 0, if that is to end the path.
"""

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchloo.guards import may_look

if TYPE_CHECKING:
    from torchloo.svm.path.tableau import Tableau

__all__ = ["TOUCH", "Base", "Ends", "Paths"]

_GROWTH = 8  # change sets grow by so many places
TOUCH = 1e-200  # stands for a distance of 0


class Base(NamedTuple):
    """T full solutions of one size as the start of paths."""

    tableau: "Tableau"
    """Note [tableau], T of them."""

    distance: Tensor
    """Distances from the ends, Note [state vector], of the columns, (T, 2, l + 2)."""

    box: Tensor
    """Lower and upper bound of every variable once it is free, (T, 2, l + 2)."""

    size: Tensor
    """Diagonal of K, at least its mean, which is 1, (T, l + 2)."""

    @classmethod
    def build(
        cls,
        tableau: "Tableau",
        free: Tensor,
        upper: Tensor,
        alpha: Tensor,
        margin: Tensor,
        box: Tensor,
        k: Tensor,
    ) -> "Base":
        """Masks of the sets, alpha, y f - 1 and the diagonals of K (T, m), bounds (2, T, m)."""
        columns = tableau.order[:, : tableau.sign.shape[1] - 2]
        free, upper, alpha, margin, k = (x.gather(1, columns) for x in (free, upper, alpha, margin, k))
        box = box.gather(2, columns.expand(2, -1, -1))
        inf = torch.full_like(alpha, torch.inf)
        of_free = torch.stack([alpha - box[1], alpha - box[0]])  # (2, T, l), z = -alpha
        of_bounded = torch.stack([torch.where(upper, -inf, -margin), torch.where(upper, -margin, inf)])
        low, high = torch.where(free, of_free, of_bounded)
        low = pad(low.clamp_max(-TOUCH), (0, 2), value=-torch.inf)
        high = pad(high.clamp_min(TOUCH), (0, 2), value=torch.inf)
        box = pad(box.transpose(0, 1), (0, 2))
        size = pad(k.clamp_min(1.0), (0, 2), value=1.0)
        return cls(tableau, torch.stack([low, high], 1), box, size)


@dataclass
class Paths:
    """B problems on their way: the state of Note [state vector] and Note [change sets]."""

    problem_id: Tensor
    """The caller's number of the problem, (B,)."""
    first: Tensor
    """First column of its tableau among those of all, (B,)."""
    first_row: Tensor
    """First row of it, (B,)."""
    row: Tensor
    """Row of r, whose alpha is lowered, among those of all tableaux, (B,)."""
    target: Tensor
    """Column of r in its own tableau, as are P and the driver; l + 1 if it has none, (B,)."""
    room: Tensor
    """How far r still has to go when the problem has ended or r waits, (B,)."""
    distance: Tensor
    """Distances from the ends, Note [state vector], (B, 2, l + 2)."""
    moved: Tensor
    """Rows of the stacked tableaux whose inputs move: P, and the driver if not in P; else l, (B, k)."""
    P: Tensor
    """The change set in the same places, l where there is none, (B, k). Place 0 is r's."""
    rate: Tensor
    """c of Note [change sets], (B, k)."""
    H: Tensor
    """Inverses of A_PP, zero at other places, (B, k, k)."""
    reach: Tensor
    """How far the driver may go: the room of r, or the width of the box of j; 0 at the end, (B,)."""
    driver: Tensor
    """The index being driven: r, or j of Note [singular pivots], (B,)."""
    sense: Tensor
    """+1 or -1: which way it is driven, (B,)."""
    swap: Tensor
    """Note [singular pivots] is at work, (B,) bool."""
    failed: Tensor
    """It was given up: nothing blocked, A_PP was singular, or it took too long, (B,) bool."""
    events: Tensor
    """Number of events, (B,)."""
    used: int = 1
    """Places given out so far."""
    rounds: int = 0
    """How many rounds the oldest problem has seen."""
    swapping: bool = False
    """Whether any problem is in a swap."""

    def take(self, rows: Tensor) -> "Paths":
        """The problems at `rows`."""
        parts: dict[str, Any] = {name: getattr(self, name).index_select(0, rows) for name in _TENSORS}
        return Paths(**parts, used=self.used, rounds=self.rounds, swapping=self.swapping)

    def make_room(self, places: int, pack: bool = True) -> None:
        """So many places in every change set that are not yet given out: pack, if allowed, then grow."""
        if self.used + places <= self.P.shape[1]:
            return
        if not pack or self.P.shape[1] <= _GROWTH:  # packing would bring too little
            return self.grow(places + _GROWTH - 1)
        kept = self._kept()
        self._pack(kept, int(kept.sum(1).max()))
        self.grow(places + _GROWTH - self.used % _GROWTH)

    def look(self, singular: Tensor) -> tuple[int, int]:
        """How many problems are on their way, and how many `singular` (B,); places that none needs go."""
        kept = self._kept()
        counts = [self.reach.count_nonzero(), singular.sum(), kept.sum(1).max()]
        live, waiting, used = torch.stack(counts).tolist()
        if used + _GROWTH <= self.used:
            self._pack(kept, used)
            self.grow(_GROWTH)
        return live, waiting

    def _kept(self) -> Tensor:
        """Mask of the places in use, (B, k)."""
        kept = self.P.ne(self.distance.shape[2] - 2) | (self.rate != 0)
        kept[:, 0] = True
        return kept

    def _pack(self, kept: Tensor, used: int) -> None:
        """Only as many places as the largest change set uses."""
        self.used = used
        self.H, self.moved, self.P, self.rate = _packed(kept, used, self.H, self.moved, self.P, self.rate)

    def grow(self, places: int) -> None:
        """More places in every change set."""
        dummy = self.distance.shape[2] - 2
        self.moved, self.P = (pad(x, (0, places), value=dummy) for x in (self.moved, self.P))
        self.rate = pad(self.rate, (0, places))
        self.H = pad(self.H, (0, places, 0, places))

    @staticmethod
    def cat(parts: list["Paths"]) -> "Paths":
        """Batches one after the other, change sets padded to the largest."""
        if len(parts) == 1:
            return parts[0]
        k = max(part.P.shape[1] for part in parts)
        for part in parts:
            part.grow(k - part.P.shape[1])
        whole: dict[str, Any] = {
            name: torch.cat([getattr(part, name) for part in parts]) for name in _TENSORS
        }
        used, rounds = (max(getattr(part, name) for part in parts) for name in ("used", "rounds"))
        return Paths(**whole, used=used, rounds=rounds, swapping=any(part.swapping for part in parts))

    def ends(self, distances: bool, rows: Tensor | None = None) -> "Ends":
        """What is of interest of the problems at `rows`, default all, once they have ended."""

        def own(x: Tensor) -> Tensor:
            return x if rows is None else x.index_select(0, rows)

        distance = own(self.distance)
        low, high = distance.unbind(1)
        upper = (low == -torch.inf) & (high < torch.inf)  # the range (-inf, 0]
        kept = distance if distances else distance[:, :, :0].clone()
        same = self.problem_id, self.row, self.target, self.room, self.failed, self.events
        P, H = self.P[:, : self.used], self.H[:, : self.used, : self.used]
        *taken, P, H = [own(x) for x in (*same, P, H)]
        if may_look(P) and self.used > _GROWTH:
            changed = P.ne(distance.shape[2] - 2)
            H, P = _packed(changed, int(changed.sum(1).max()), H, P)
        return Ends._make([*taken, P, H, upper, kept])


def _packed(kept: Tensor, used: int, H: Tensor, *others: Tensor) -> list[Tensor]:
    """H (B, k, k) and others (B, k) with the places of a mask (B, k) first, so many of them."""
    order = kept.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :used]  # (B, used)
    rows = H.gather(1, order[:, :, None].expand(-1, -1, H.shape[2]))
    return [rows.gather(2, order[:, None, :].expand(-1, used, -1)), *(x.gather(1, order) for x in others)]


_TENSORS = [f.name for f in fields(Paths) if f.type is Tensor]


class Ends(NamedTuple):
    """B problems that have ended: fields of Paths, and which variables are at their upper bound."""

    problem_id: Tensor
    row: Tensor
    target: Tensor
    room: Tensor
    failed: Tensor
    events: Tensor
    P: Tensor
    H: Tensor
    upper: Tensor
    """(B, l + 2) bool."""
    distance: Tensor
    """As in Paths if asked for, else (B, 2, 0)."""

    @staticmethod
    def cat(parts: list["Ends"]) -> "Ends":
        """Batches as one in the order of their numbers, change sets padded to the largest."""
        if len(parts) == 1:
            return parts[0]  # in order, as all batches are
        numbers = torch.cat([part.problem_id for part in parts])
        order = numbers.argsort()
        k, dummy = max(part.P.shape[1] for part in parts), parts[0].upper.shape[1] - 2
        all_P = [pad(part.P, (0, k - part.P.shape[1]), value=dummy) for part in parts]
        padded = [part._replace(P=P) for part, P in zip(parts, all_P, strict=True)]
        columns = dict(zip(Ends._fields, zip(*padded, strict=True), strict=True))
        H = parts[0].H.new_zeros(len(numbers), k, k)
        of_parts = order.argsort().split([len(part.problem_id) for part in parts])
        for rows, part in zip(of_parts, columns.pop("H"), strict=True):
            places = part.shape[1]
            H[:, :places, :places].index_copy_(0, rows, part)
        return Ends(H=H, **{name: torch.cat(x).index_select(0, order) for name, x in columns.items()})
