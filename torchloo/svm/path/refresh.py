"""From the final active sets of perturbed paths to the coefficients of the true data.

Note [refresh]
A path ends with an active set: the change set P (Note [change sets]) and the bounds of the others. Let
x be what the inputs of the tableau have changed by since the full solution; the outputs have changed by
D * (A x), Note [tableau]. On the true data, of each variable i either x_i or its output is known:

    variable                   input x_i                  output
    free, as before            0, of its g                alpha_i - alpha0_i = -(A x)_i
    bounded, as before         0, of its alpha            nobody asks
    from bound to bound        +-box_i, of its alpha      nobody asks
    r, unless it was free      -gone, of its alpha        nobody asks
    in P, was free             c_i, of its g              bound_i - alpha0_i
    in P, was bounded          c_i, of its alpha          -g0_i: it comes to margin 0

An r that was free is in P, with alpha0_r - gone as its bound. With the last two outputs as w, the known
inputs as x0 and H = (A_PP)^-1,

    c = H (D_P * w - (A x0)_P),   alpha_S = alpha0_S - (A x0 + A_:P c)_S

for S, the variables that were free. The tableau of a nearly singular free set has lost digits; K itself
says by how much free variables then miss margin 0, and y^T alpha misses 0. A correction of alpha follows
from the same equations: x0 is what the margins of the free of S lack, w what those in P lack, or 0 if
it is alpha that is held; and a change of y^T alpha adds itself times D * equality to A x0.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag, pad

from torchloo.svm.path.layout import Layout
from torchloo.svm.path.state import Ends, times
from torchloo.svm.path.tableau import Tableau
from torchloo.svm.solve.exact import Exact
from torchloo.svm.solve.merge import Problem

__all__ = ["Finish"]

_ROUGH = 1e-10  # of the largest |u|: free variables that miss margin 0 by more are refined
_INSIDE = 1e-7  # of the box: this far from both bounds is free


class _Machine(NamedTuple):
    """What all paths of a machine share: its tableau, and the a variables that any of them has moved."""

    A: Tensor
    """A of Note [tableau], (m + 2, l + 2)."""

    A_S: Tensor
    """Its first s columns, those of the variables that were free, (m + 2, s)."""

    D: Tensor
    """D of its columns, (l + 2,)."""

    equality: Tensor
    """As in Tableau, (l + 2,)."""

    columns: Tensor
    """Columns of the moved variables, the first s among them, and of the dummy, (a + 1,)."""

    layout: Layout
    """The same variables in the same order."""

    @classmethod
    def build(cls, problem: Problem, full: Exact, tableau: Tableau, moved: Tensor) -> "_Machine":
        """From the mask of the columns (l + 2,) that any path has moved."""
        A, D, dummy = tableau.A[0], tableau.sign[0], tableau.sign.shape[1] - 2
        s = int((D < 0).sum())
        moved[:s] = True
        moved[dummy:] = False
        columns = moved.nonzero()[:, 0]
        layout = Layout(problem, full, tableau.order[0][columns])
        columns = pad(columns, (0, 1), value=dummy)
        return cls(A, A[:, :s].contiguous(), D, tableau.equality[0], columns, layout)

    @property
    def s(self) -> int:
        """How many variables were free."""
        return self.A_S.shape[1]

    def place(self, P: Tensor) -> Tensor:
        """Where the columns (B, k) are among the moved variables, a where they are not, (B, k)."""
        a = self.layout.count
        place = torch.full_like(self.D, a, dtype=torch.long)
        place[self.columns] = torch.arange(a + 1, device=P.device)
        return place[P]


class _Sets(NamedTuple):
    """Final active sets of B paths."""

    P: Tensor
    """Change sets as columns, l where there is none, (B, k)."""

    place: Tensor
    """P as places among the moved variables, a where there is none, (B, k)."""

    changed: Tensor
    """P as a mask of the moved variables, (B, a + 1)."""

    D: Tensor
    """D_P: -1 where the variable was free, (B, k)."""

    H: Tensor
    """Inverses of A_PP, (B, k, k)."""

    target: Tensor
    """The variable r, (B,)."""

    own: Tensor
    """Its place among the moved variables, a if it has none, (B, 1)."""

    gone: Tensor
    """How far its alpha went down, (B,)."""

    def take(self, rows: Tensor) -> "_Sets":
        """The paths at `rows`."""
        return _Sets(*(x[rows] for x in self))

    def free(self, s: int) -> Tensor:
        """Mask of the free variables but for r; before, the first s were free, (B, a + 1)."""
        free = self.changed.clone()
        free[:, :s] ^= True
        free[:, -1] = False
        return free.scatter_(1, self.own, False)

    def respond(self, machine: _Machine, w: Tensor, at_P: Tensor, at_S: Tensor) -> tuple[Tensor, Tensor]:
        """c (B, k) of Note [refresh] and (A x0 + A_:P c)_S (B, s), from w (B, k) and A x0 at P and at S."""
        dummy = len(machine.D) - 2
        c = times(self.H, (self.D * w - at_P).masked_fill_(self.P.eq(dummy), 0))
        by_c = embedding_bag(self.P, machine.A_S, per_sample_weights=c, mode="sum", padding_idx=dummy)
        return c, at_S + by_c

    def enter(self, x: Tensor, of_P: Tensor) -> Tensor:
        """Values of the moved variables (B, a + 1), those in P replaced by (B, k); the dummy has 0."""
        x.scatter_(1, self.place, of_P)[:, -1] = 0
        return x


def _known_inputs(
    machine: _Machine, sets: _Sets, row: Tensor, bound: Tensor, jumped: Tensor
) -> tuple[Tensor, Tensor]:
    """Rows of A and x0 of r and of what has jumped to its bound (B, a + 1), (B, 1 + most jumps) both."""
    x0 = -sets.gone[:, None].masked_fill(sets.own < machine.s, 0)
    most = int(jumped.sum(1).max())
    if not most:
        return row, x0
    change = (bound - machine.layout.alpha).mul_(jumped)
    others = change.abs().topk(most, 1).indices
    return torch.cat([row, machine.columns[others]], 1), torch.cat([x0, change.gather(1, others)], 1)


def _coefficients(machine: _Machine, sets: _Sets, row: Tensor, upper: Tensor, jumped: Tensor) -> Tensor:
    """alpha of Note [refresh], (B, a + 1).

    From the row of r in A (B, 1), and masks (B, a + 1) of what is at its upper bound and of what has gone
    from bound to bound.
    """
    layout, s = machine.layout, machine.s
    alpha0, g0 = layout.alpha, layout.of_moved(layout.full.margin)
    alpha = torch.where(upper, layout.box, 0.0)  # as if all were bounded
    alpha.scatter_(1, sets.own, alpha0[sets.own] - sets.gone[:, None])
    rows, x0 = _known_inputs(machine, sets, row, alpha, jumped)
    at_P = (x0[:, None] @ machine.A[rows[:, :, None], sets.P[:, None]])[:, 0]
    at_S = embedding_bag(rows, machine.A_S, per_sample_weights=x0, mode="sum")
    was_free, bound_P, alpha0_P = sets.D < 0, alpha.gather(1, sets.place), alpha0[sets.place]
    w = torch.where(was_free, bound_P - alpha0_P, -g0[sets.place])
    c, at_S = sets.respond(machine, w, at_P, at_S)
    alpha[:, :s] = alpha0[:s] - at_S
    return sets.enter(alpha, torch.where(was_free, bound_P, alpha0_P + c))


def _correction(machine: _Machine, sets: _Sets, alpha: Tensor, lack: Tensor) -> Tensor:
    """Change of the free alpha that adds to margins what they lack and makes y^T alpha 0, (B, a + 1) all.

    Of variables that are not free it says nothing.
    """
    layout, s = machine.layout, machine.s
    imbalance = (alpha @ layout.y + layout.standing_pull(sets.target, sets.gone))[:, None]
    x0 = lack.masked_fill(sets.changed, 0)[:, :s]
    A_x0 = x0 @ machine.A[:s] - imbalance * (machine.equality * machine.D)  # (B, l + 2)
    w = torch.where(sets.D < 0, 0.0, lack.gather(1, sets.place))
    c, at_S = sets.respond(machine, w, A_x0.gather(1, sets.P), A_x0[:, :s])
    step = torch.zeros_like(lack)
    step[:, :s] = -at_S
    return sets.enter(step, c)


class Finish:
    """Where the B paths of one machine ended, over the a variables that any of them has moved.

    `layout` says which these are; `alpha` and `u` = K (alpha * y) are theirs, (B, a + 1), with a dummy;
    `stray` (B,) is by how much coefficients lay beyond their bounds before they were put there.
    """

    def __init__(
        self, problem: Problem, full: Exact, tableau: Tableau, ends: Ends, target: Tensor, gone: Tensor
    ) -> None:
        """`gone` (B,) is how far alpha of each target went down."""
        upper_before = pad(full.upper[tableau.order[0, : tableau.sign.shape[1] - 2]], (0, 2))
        changed = torch.zeros_like(ends.upper).scatter_(1, ends.P, True)
        # From bound to bound, but for r, which is known by what has gone.
        jumped = (ends.upper ^ upper_before).logical_and_(~changed).scatter_(1, ends.target[:, None], False)
        machine = _Machine.build(problem, full, tableau, (changed | jumped).any(0))
        self.layout = layout = machine.layout
        changed, jumped, upper = (x.index_select(1, machine.columns) for x in (changed, jumped, ends.upper))
        own = layout.place[target][:, None]
        sets = _Sets(ends.P, machine.place(ends.P), changed, machine.D[ends.P], ends.H, target, own, gone)
        row = ends.row[:, None] % len(machine.A)  # in its own tableau
        self._sets, self.alpha = sets, _coefficients(machine, sets, row, upper, jumped)
        self.u = layout.pull(self.alpha, target, gone)
        self._refine(machine, ends.failed)
        self.stray = self._put_inside()

    def inside(self) -> Tensor:
        """Which coefficients lie between their bounds, but for that of r, (B, a + 1)."""
        width = _INSIDE * self.layout.box
        inside = (self.alpha > width) & (self.alpha < self.layout.box - width)
        return inside.scatter_(1, self._sets.own, False)

    def _refine(self, machine: _Machine, failed: Tensor) -> None:
        """Correct alpha by what K says, Note [refresh], twice at most; not where a path has failed (B,)."""
        layout = self.layout
        free = self._sets.free(machine.s).to(self.u)
        count = free.sum(1).clamp_min(1)
        for _ in range(2):
            miss = (layout.y - self.u).mul_(free)
            bias = miss.sum(1) / count
            lack = miss.addcmul_(bias[:, None], free, value=-1).mul_(layout.y)  # -g
            size, scale = lack.abs().amax(1), self.u.abs().amax(1)
            rows = ((size > _ROUGH * (1 + scale)) & ~failed).nonzero()[:, 0]
            if not len(rows):
                return
            sets, alpha = self._sets.take(rows), self.alpha[rows]
            alpha += _correction(machine, sets, alpha, lack[rows]) * free[rows]
            self.alpha[rows], self.u[rows] = alpha, layout.pull(alpha, sets.target, sets.gone)

    def _put_inside(self) -> Tensor:
        """Put coefficients beyond their bounds there, and say by how much in all, (B,).

        The true data may ask for more than a box holds where the perturbed path has missed an event; a
        gap proves something of feasible coefficients only.
        """
        inside = self.alpha.clamp_min(0).minimum(self.layout.box)
        stray = (self.alpha - inside).abs_().sum(1)
        rows = stray.nonzero()[:, 0]
        if len(rows):
            target, gone = self._sets.target[rows], self._sets.gone[rows]
            self.alpha[rows], self.u[rows] = inside[rows], self.layout.pull(inside[rows], target, gone)
        return stray
