"""From the final active sets of perturbed paths to the coefficients of the true data.

Note [refresh]
A path ends with an active set: the change set P (Note [change sets]) and the bounds of the others. Let
x be what the inputs of the tableau have changed by since the full solution; the outputs have changed by
D * (A x), Note [tableau]. On the true data, of each variable i either x_i or its output is known:

    variable                   input x_i                  output
    free, as before            0, of its g                alpha_i - alpha0_i = -(A x)_i
    bounded, as before         0, of its alpha            not needed
    from bound to bound        +-box_i, of its alpha      not needed
    r, unless it was free      -gone, of its alpha        not needed
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
from torch.nn.functional import pad

from torchloo.svm.path.state import Ends
from torchloo.svm.path.tableau import Tableau
from torchloo.svm.proof.certify import Held
from torchloo.svm.records import Exact, SVMProblem, Targets
from torchloo.svm.stacked import Tables, columns_of, set_of, take_rows, times_vector, weighted_rows
from torchloo.svm.tolerances import REFINED

__all__ = ["Finish"]


class _Machines(NamedTuple):
    """What all paths of T machines share: their tableaux, and the a variables that any of them has moved.

    These are padded with others to the same number; the dummy, the last of a + 1, has zeros.
    """

    A: Tensor
    """A of Note [tableau], one below the other, (T (m + 2), l + 2)."""
    A_S: Tensor
    """Its first s columns, once more; s is the size of the largest free set, (T (m + 2), s)."""
    was_free: Tensor
    """Which of the first s variables were free, (T, s)."""
    columns: Tensor
    """Columns of the moved variables, the free ones first, and of the dummy, (T, a + 1)."""
    variable: Tensor
    """The moved variables, and any in place of the dummy, (T, a + 1)."""
    y: Tensor
    """Their labels, (T, a + 1)."""
    box: Tensor
    """Their boxes, (T, a + 1)."""
    alpha: Tensor
    """Their coefficients in the full solutions, (T, a + 1)."""
    margin: Tensor
    """Their y f - 1 there, (T, a + 1)."""
    rounding: Tensor
    """Their e of Note [rounding of K], (T, a + 1)."""
    imbalance: Tensor
    """Their y^T alpha, which rounding may leave, (T, 1)."""

    @classmethod
    def build(cls, problem: SVMProblem, full: Exact, tableau: Tableau, moved: Tensor) -> "_Machines":
        """From the mask of the columns (T, l + 2) that any path has moved."""
        dummy, free = tableau.sign.shape[1] - 2, tableau.sign < 0
        moved = moved | free
        moved[:, dummy:] = False
        columns, _ = set_of(moved)
        variable = tableau.order.gather(1, columns)
        s, A = int(free.sum(1).max()), tableau.A.view(-1, dummy + 2)
        imbalance = (full.alpha * problem.y).sum(1, keepdim=True)
        known = torch.stack([problem.y, problem.box, full.alpha, full.margin, problem.rounding], 1)
        y, box, alpha, margin, rounding = pad(columns_of(known, variable), (0, 1)).unbind(1)
        columns, variable = pad(columns, (0, 1), value=dummy), pad(variable, (0, 1))
        sets = A[:, :s].contiguous(), free[:, :s], columns, variable
        return cls(A, *sets, y, box, alpha, margin, rounding, imbalance)

    @property
    def dummy(self) -> int:
        """The column of the dummy."""
        return self.A.shape[1] - 2


class _Every(NamedTuple):
    """What it takes to find u = K (alpha * y) of all variables of T machines, and what to compare it with."""

    variable: Tensor
    """As in `_Machines`, (T, a + 1)."""
    K: Tensor
    """Rows of K of the moved variables, (T, a, m)."""
    u: Tensor
    """u in the full solutions, (T, m)."""
    at_most: Tensor
    """y of the variables at rest of which f must not exceed y, inf for the others, (T, m)."""
    at_least: Tensor
    """y of those of which y must not exceed f, -inf for the others, (T, m)."""

    @classmethod
    def build(cls, problem: SVMProblem, full: Exact, machines: _Machines) -> "_Every":
        """For machines whose other variables rest at their bounds."""
        y, moved = problem.y, machines.variable[:, :-1]
        down = full.upper ^ (y < 0)
        at_most, at_least = torch.where(down, y, torch.inf), torch.where(down, -torch.inf, y)
        at_most, at_least = at_most.scatter(1, moved, torch.inf), at_least.scatter(1, moved, -torch.inf)
        u = problem.product(full.alpha * y)
        return cls(machines.variable, problem.rows(moved), u, at_most, at_least)


class _Sets(NamedTuple):
    """Final active sets of N paths."""

    P: Tensor
    """Change sets as columns, l where there is none, (N, k)."""
    rows: Tensor
    """The same as rows of A, (N, k)."""
    place: Tensor
    """The same as places among the moved variables, a where there is none, (N, k)."""
    changed: Tensor
    """The same as a mask of the moved variables, (N, a + 1)."""
    D: Tensor
    """D_P: -1 where the variable was free, (N, k)."""
    H: Tensor
    """Inverses of A_PP, (N, k, k)."""
    own: Tensor
    """Place of r among the moved variables, a if it has none, (N, 1)."""
    y_gone: Tensor
    """y_r times how far its alpha went down, (N, 1)."""

    def take(self, rows: Tensor | slice) -> "_Sets":
        """The paths at `rows`."""
        return _Sets(*(take_rows(x, rows) for x in self))

    def respond(self, machines: _Machines, w: Tensor, A_x0: Tensor) -> tuple[Tensor, Tensor]:
        """c (N, k) of Note [refresh] and (A x0 + A_:P c)_S (N, s), from w (N, k) and A x0 (N, l + 2)."""
        rhs = (self.D * w).sub_(A_x0.gather(1, self.P))
        c = times_vector(self.H, rhs.masked_fill_(self.P.eq(machines.dummy), 0))
        by_c = weighted_rows(machines.A_S, self.rows, c, machines.dummy)
        return c, by_c.add_(A_x0[:, : by_c.shape[1]])

    def enter(self, x: Tensor, of_P: Tensor) -> Tensor:
        """Values of the moved variables (N, a + 1), those in P replaced by (N, k); the dummy has 0."""
        x.scatter_(1, self.place, of_P)[:, -1] = 0
        return x


class Finish:
    """Where N paths of T machines ended.

    `target` (N,) are the variables that were lowered, `y_r` their labels, `alpha_r` their coefficients at the
    end and `gone` how far these went down; `own` and `held` are as in `Held`; `tables` says of which machine
    each path is.
    `alpha` and `u_moved` = K (alpha * y) are those of the a moved variables and the dummy, (N, a + 1), `u_r`
    that of each target, (N,). `over` and `under` (N,) are the largest and the least u - y of the variables at
    rest of which f must not exceed y, or y not f. `stray` (N,) is by how much coefficients lay beyond their
    bounds before they were put there.
    """

    def __init__(
        self, problem: SVMProblem, full: Exact, tableau: Tableau, ends: Ends, targets: Targets
    ) -> None:
        self.problem, self.full, self.target = problem, full, targets.variable
        self.tables = tables = Tables(targets.table, len(problem.y))
        r = self.target[:, None]
        self.y_r, before = (tables.pick(x, r)[:, 0] for x in (problem.y, full.alpha))
        self.gone = gone = before - targets.kept - ends.room
        self.alpha_r = before - gone
        finished = ends.room <= 0
        self.own = targets.kept * finished
        self.held = torch.where(finished, 0.0, self.y_r * self.alpha_r)
        dummy = tableau.sign.shape[1] - 2
        upper_before = pad(full.upper.gather(1, tableau.order[:, :dummy]), (0, 2))
        changed = torch.zeros_like(ends.upper).scatter_(1, ends.P, True)
        # From bound to bound, but for r, which is known by what has gone.
        jumped = (ends.upper ^ tables.each(upper_before)).logical_and_(~changed)
        jumped.scatter_(1, ends.target[:, None], False)
        moved = tables.any(changed | jumped)
        self.machines = machines = _Machines.build(problem, full, tableau, moved)
        changed, jumped, upper = (tables.select(x, machines.columns) for x in (changed, jumped, ends.upper))
        a = machines.variable.shape[1] - 1
        places = torch.full_like(tableau.sign, a, dtype=torch.long)
        places.scatter_(1, machines.columns[:, :a], torch.arange(a, device=r.device).expand(len(places), -1))
        rows = ends.P + tables.table[:, None] * tableau.A.shape[1]
        self._sets = sets = _Sets(
            P=ends.P,
            rows=rows.masked_fill_(ends.P.eq(dummy), dummy),
            place=tables.pick(places, ends.P),
            changed=changed,
            D=tables.pick(tableau.sign, ends.P),
            H=ends.H,
            own=tables.pick(places, ends.target[:, None]),
            y_gone=(self.y_r * gone)[:, None],
        )
        was_free_r = tables.pick(tableau.sign, ends.target[:, None]) < 0
        x0 = -gone[:, None].masked_fill(was_free_r, 0)
        of_r = self.alpha_r[:, None], ends.row[:, None], x0
        self.alpha = _coefficients(machines, tables, sets, of_r, upper, jumped)
        self.every = _Every.build(problem, full, machines)
        change, looks = _change(machines, tables, sets, self.alpha), []
        for some, paths in tables.parts(problem.y.shape[1]):
            its, every = tables.part(some, paths), _Every(*(x[some] for x in self.every))
            u = self._pull(problem.take(some), every, its, paths, change[paths])
            looks.append(_look(every, its, u, self.target[paths]))
        self.u_moved, self.u_r, self.over, self.under = (
            found[0] if len(looks) == 1 else torch.cat(found) for found in zip(*looks, strict=True)
        )
        self._refine(tableau, ends.failed)
        self.stray = self._put_inside()

    @property
    def place(self) -> Tensor:
        """The place of each target among the moved variables, a if it has none, (N,)."""
        return self._sets.own[:, 0]

    def solutions(self, rows: Tensor | slice) -> Held:
        """Those of the paths at `rows`, (R,), by all variables."""
        problem, its = self.problem, self.tables.take(rows)
        y, box, rounding = (its.each(x) for x in (problem.y, problem.box, problem.rounding))
        table = problem.kernels(its.table).table
        solution = self.coefficients(rows), self.u(rows), y, box, self.target[rows], rounding, table
        return Held(*solution, self.own[rows], self.held[rows])

    def coefficients(self, rows: Tensor | slice = slice(None)) -> Tensor:
        """alpha of all variables of the paths at `rows`, (R, m); default all."""
        its = self.tables.take(rows)
        moved = self.machines.variable[:, :-1]
        alpha = its.insert(self.full.alpha[its.table], moved, self.alpha[rows, :-1])
        return alpha.scatter_(1, self.target[rows, None], self.alpha_r[rows, None])

    def u(self, rows: Tensor | slice) -> Tensor:
        """K (alpha * y) of all variables of the paths at `rows`, (R, m)."""
        its = self.tables.take(rows)
        change = _change(self.machines, its, self._sets.take(rows), self.alpha[rows])
        return self._pull(self.problem, self.every, its, rows, change)

    def _pull(
        self, problem: SVMProblem, every: _Every, its: Tables, rows: Tensor | slice, change: Tensor
    ) -> Tensor:
        """u (R, m) of the paths at `rows`, of machines numbered as in `its`, from what `_change` gives."""
        K_r = problem.kernels(its.table).rows(problem.K, self.target[rows])
        u = its.product(change, every.K).add_(its.each(every.u))
        return u.addcmul_(K_r, self._sets.y_gone[rows], value=-1)

    def _move(self, rows: Tensor, alpha: Tensor) -> None:
        """Other coefficients (R, a + 1) of the moved variables of the paths at `rows`."""
        self.alpha[rows] = alpha
        seen = _look(self.every, self.tables.take(rows), self.u(rows), self.target[rows])
        self.u_moved[rows], self.u_r[rows], self.over[rows], self.under[rows] = seen

    def _refine(self, tableau: Tableau, failed: Tensor) -> None:
        """Correct alpha by what K says, Note [refresh], twice at most; not where a path has failed (N,)."""
        machines, tables, sets = self.machines, self.tables, self._sets
        s = machines.A_S.shape[1]
        free = sets.changed.clone()
        free[:, :s] ^= tables.each(machines.was_free)
        free[:, -1] = False
        free = free.scatter_(1, sets.own, False).to(self.alpha)
        count, y = free.sum(1).clamp_min(1), tables.each(machines.y)
        for _ in range(2):
            miss = (y - self.u_moved).mul_(free)
            bias = miss.sum(1) / count
            lack = miss.addcmul_(bias[:, None], free, value=-1).mul_(y)  # -g
            rough = lack.abs().amax(1) > REFINED * (1 + self.u_moved.abs().amax(1))
            rows = (rough & ~failed).nonzero()[:, 0]
            if not rows.numel():
                return
            own, its = sets.take(rows), tables.take(rows)
            step = _correction(machines, its, own, tableau, self.alpha[rows], lack[rows])
            self._move(rows, self.alpha[rows] + step * free[rows])

    def _put_inside(self) -> Tensor:
        """Put coefficients beyond their bounds there, and say by how much in all, (N,).

        The true data may ask for more than a box holds where the perturbed path has missed an event; a
        gap proves something of feasible coefficients only.
        """
        inside = self.alpha.clamp_min(0).minimum(self.tables.each(self.machines.box))
        stray = (self.alpha - inside).abs_().sum(1)
        rows = stray.nonzero()[:, 0]
        if rows.numel():
            self._move(rows, inside[rows])
        return stray


def _change(machines: _Machines, tables: Tables, sets: _Sets, alpha: Tensor) -> Tensor:
    """What the moved variables other than r add to alpha * y, (N, a)."""
    change = (alpha - tables.each(machines.alpha)).mul_(tables.each(machines.y))
    return change.scatter_(1, sets.own, 0.0)[:, :-1]


def _look(every: _Every, tables: Tables, u: Tensor, target: Tensor) -> tuple[Tensor, ...]:
    """What a Finish tells of u (N, m)."""
    over, under = (u - tables.each(x) for x in (every.at_most, every.at_least))
    u_r = u.gather(1, target[:, None])[:, 0]
    return tables.select(u, every.variable), u_r, over.amax(1), under.amin(1)


def _coefficients(
    machines: _Machines,
    tables: Tables,
    sets: _Sets,
    of_r: tuple[Tensor, Tensor, Tensor],
    upper: Tensor,
    jumped: Tensor,
) -> Tensor:
    """alpha of Note [refresh], (N, a + 1).

    From alpha, the row of A and x0 of r, (N, 1) each, and masks (N, a + 1) of what is at its upper bound and
    of what has gone from bound to bound.
    """
    alpha0, s = tables.each(machines.alpha), machines.A_S.shape[1]
    alpha = upper.to(alpha0) * tables.each(machines.box)  # as if all were bounded: the free have 0
    alpha_r, rows, x0 = of_r
    alpha.scatter_(1, sets.own, alpha_r)
    most = int(jumped.sum(1).max())
    if most:
        change = (alpha - alpha0).mul_(jumped.to(alpha))
        others = change.abs().topk(most, 1).indices
        columns = tables.pick(machines.columns, others)
        height = len(machines.A) // tables.count
        rows = torch.cat([rows, columns + tables.table[:, None] * height], 1)
        x0 = torch.cat([x0, change.gather(1, others)], 1)
    was_free, bound_P = sets.D < 0, alpha.gather(1, sets.place)
    alpha0_P = tables.pick(machines.alpha, sets.place)
    w = torch.where(was_free, bound_P - alpha0_P, -tables.pick(machines.margin, sets.place))
    c, at_S = sets.respond(machines, w, weighted_rows(machines.A, rows, x0, machines.dummy))
    alpha[:, :s].addcmul_(tables.each(machines.was_free.to(alpha)), alpha0[..., :s] - at_S)
    return sets.enter(alpha, torch.where(was_free, bound_P, alpha0_P + c))


def _correction(
    machines: _Machines, tables: Tables, sets: _Sets, tableau: Tableau, alpha: Tensor, lack: Tensor
) -> Tensor:
    """Change of the free alpha that adds to margins what they lack and makes y^T alpha 0, (N, a + 1) all.

    Of variables that are not free it says nothing.
    """
    s, was_free = machines.A_S.shape[1], tables.each(machines.was_free)
    change = _change(machines, tables, sets, alpha).sum(1, keepdim=True)
    imbalance = change + tables.each(machines.imbalance) - sets.y_gone
    x0 = lack.masked_fill(sets.changed, 0)[:, :s] * was_free
    A_x0 = tables.product(x0, tableau.A[:, :s])  # (N, l + 2)
    A_x0.addcmul_(imbalance, tables.each(tableau.equality * tableau.sign), value=-1)
    w = torch.where(sets.D < 0, 0.0, lack.gather(1, sets.place))
    c, at_S = sets.respond(machines, w, A_x0)
    step = torch.zeros_like(lack)
    step[:, :s] = -at_S * was_free
    return sets.enter(step, c)
