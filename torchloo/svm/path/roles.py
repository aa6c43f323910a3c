"""Changes of role: what they do to a variable, looked up by all problems of a batch.

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
"""

from typing import NamedTuple

import torch
from torch import Tensor

from torchloo.svm.host_reads import rounds_per_look
from torchloo.svm.path.state import TOUCH, Base

__all__ = ["Shared", "Turn"]

_SINGULAR_ENTRY = 1e-9  # of a diagonal entry of K: the point depends on the free ones
_SINGULAR_EXIT = 1e-4  # of 1 / k: the last free variable
_BEYOND = 0.03  # how far past zero an early stop goes, so that its end point proves the error


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
        self.floor = -1 - _BEYOND if stop_at_error else -torch.inf
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
    one = A.new_ones(())
    gain, own = torch.where(in_P, -one, one), torch.where(in_P, 0.0, -one)
    start = torch.where(in_P, 0.0, A.diagonal(dim1=1, dim2=2))
    least = torch.where(free, _SINGULAR_EXIT / size.amax(1, keepdim=True), _SINGULAR_ENTRY * size)
    turns = torch.stack(torch.broadcast_tensors(low, high, start, gain, least, own), -1)
    turns[..., -2:, :] = A.new_tensor([-torch.inf, torch.inf, 1.0, 0.0, 0.0, 0.0])  # do nothing
    return turns.reshape(-1, 6)
