"""Stop the solver of a leave-one-out problem as soon as its sign is known.

Note [dual bound]
If the sign of f(x_r) at the current alpha were wrong, the segment to the optimum would cross
f(x_r) = 0, where the primal is at least its minimum under that constraint. That problem has no bias
(f(x) = <w, phi(x) - phi(x_r)>), so its dual is a box QP without an equality,

    H(beta) = sum beta - 1/2 sum beta_i beta_j y_i y_j k'_ij,   k'_ij = k_ij - k_ri - k_rj + k_rr,

and Primal(alpha) < H(beta) for any feasible alpha, beta proves the sign (BOUND, Corollary 1; the
printed k' has the wrong sign of k_rr). With v = K (beta * y) and t = sum beta y,

    h_i = 1 - y_i (v_i - v_r - t (k_ri - k_rr)),   H = 1/2 sum beta_i (1 + h_i).

Rounding of K, Note [rounding of K], leaves 1/2 |w|^2 in doubt by (e . alpha)^2 / 2, the losses by
max(E) sum box, and H by (sum beta_i (e_i + e_r))^2 / 2, as k'_ij may be off by (e_i + e_r) (e_j + e_r).
"""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from torchloo.guards import may_look
from torchloo.svm import result as code
from torchloo.svm.proof.certify import Held, gap_ball_sign, weighted_interval
from torchloo.svm.smo.options import SMOOptions
from torchloo.svm.stacked import block_of, subset
from torchloo.svm.tolerances import EXACT

if TYPE_CHECKING:
    from torchloo.svm.smo.rounds import SMOState

__all__ = ["DualBound", "ceiling", "primal_objective"]

_ASKED = 8  # a rule waits for an eighth more rounds
_PAIRS_ASKED = 4  # and for so many pairs at least
_CLIMB = 16  # steps of beta at a time; an interior point in their place proves hardly more, and takes longer
_MOST = 64  # columns over which H is raised at once


def primal_objective(s: "SMOState") -> tuple[Tensor, Tensor]:
    """1/2 |w|^2 + sum box max(0, 1 - y f) with the best bias, and that bias; (B,) both."""
    count = (s.box * (s.y > 0)).sum(1)
    low, high = weighted_interval(-s.F, s.box, count)
    bias = torch.where(low.isinf(), high, torch.where(high.isinf(), low, (low + high) / 2))
    loss = (s.box * (-s.y * (s.F + bias[:, None])).clamp_min(0)).sum(1)
    return (s.alpha * s.y * (s.F + s.y)).sum(1) / 2 + loss, bias


def ceiling(w_squared: Tensor, f: Tensor, y: Tensor, box: Tensor, target: Tensor) -> Tensor:
    """Primals of full machines with their bias moved to f(x_r) = 0, Note [ceiling], (B,).

    Of |w|^2 (B,), outputs f, labels and boxes (B, n), and r (B,).
    """
    margin = y * (f - f.gather(1, target[:, None]))
    return w_squared / 2 + (box * (1 - margin).clamp_min(0)).sum(1)


class DualBound:
    """Algorithm 3 of BOUND for a batch, with the gap ball as a second proof.

    Note [free columns]
    beta costs no kernel column of its own. A feasible alpha is a feasible beta with H = G, so beta first goes
    to the best point between itself and alpha, whose v = u is known; then it takes steps along single
    coordinates whose columns alpha has just read, always along the one that gains most. So a run with the
    bound reads no more than a run without it, but for ties that fall differently. Coordinates of beta's own
    choice, 4 or 16 a round, brought hardly a proof more on four small sets, for up to seven times as many.

    Note [ceiling]
    H cannot exceed the primal of any machine with f(x_r) = 0, and the full machine with its bias moved there
    is one. While Primal(alpha) is above its primal, no beta proves anything, and none is looked for.

    Note [efficiency test]
    The first problems of each kernel matrix are trials, the M of the paper, and the only ones of which the
    proofs are asked at first, while all problems are solved together. As soon as the useful share of them is
    proved, the others are asked too; once so many have met epsilon-KKT unproved that this cannot be, none is.
    """

    def __init__(
        self,
        K: Tensor,
        table: Tensor,
        target: Tensor,
        rounding: Tensor,
        ceiling: Tensor,
        seen: Tensor,
        options: SMOOptions,
    ) -> None:
        """For problems without the rows `target` (B,) on kernel matrices K (T, n, n), by a `table` (B,).

        The table is ascending; `rounding` is e of each K, (T, n), `ceiling` (B,) that of each problem, and
        `seen` (B, n) its coefficients before any column was read.
        """
        self.K, self.rounding, self.options = K, rounding, options
        self.target, self.ceiling, self.seen = target, ceiling, seen
        trials, useful = options.trials, options.useful
        count = self._by_table(torch.ones_like(table), table)
        number = torch.arange(len(table), device=table.device) - (count.cumsum(0) - count)[table]
        self.trial = number < trials  # (B,)
        self.needed = useful * count.clamp_max(trials)  # (T,) proofs among the trials
        self.proved = torch.zeros_like(count)
        self.next = 0  # the round in which it is asked again
        self.met = torch.zeros_like(self.trial)  # whom it has been asked of

    def _by_table(self, x: Tensor, table: Tensor) -> Tensor:
        """Sums of x (B,) over the problems of each kernel matrix, (T,)."""
        return torch.zeros(len(self.K), dtype=torch.long, device=x.device).index_add_(0, table, x.long())

    def begin(self, state: "SMOState") -> None:
        """Take the order of the problems and beta from their first state."""
        self.beta, self.v = state.alpha, state.F + state.y
        for name in ("target", "ceiling", "trial", "seen"):
            setattr(self, name, getattr(self, name)[state.number])

    def take(self, rows: Tensor) -> None:
        """Keep only the problems at `rows`."""
        for name in ("target", "ceiling", "trial", "met", "beta", "v", "seen"):
            setattr(self, name, getattr(self, name)[rows])

    def due(self, round_: int) -> bool:
        """Whether to ask in this round.

        At first in every round, or after every fourth pair, and ever more rarely, so that no stop comes later
        by more than an eighth.
        """
        if round_ < self.next:
            return False
        self.next = round_ + round_ // _ASKED + (_PAIRS_ASKED if self.options.working == 2 else 1)
        return True

    def advance(self, state: "SMOState", going: Tensor) -> Tensor:
        """Set stopped_by and sign of the state where a sign is proved, and say where, (B,).

        `going` (B,) are the problems that have not met epsilon-KKT.
        """
        table = state.table
        hopeful = self.proved + self._by_table(self.trial & going, table) >= self.needed
        useful = self.proved >= self.needed
        asked = going & torch.where(self.trial, hopeful[table], useful[table])
        rows = subset(asked)
        if len(rows):
            if not self.options.seed:  # with a seed the column of r has been read
                state.columns = state.columns + (asked & ~self.met)
                self.met = self.met | asked
            sign, by = self._proofs(state.take(rows), rows)
            state.sign = state.sign.index_copy(0, rows, sign * asked[rows])
            state.stopped_by = state.stopped_by.index_copy(0, rows, by * asked[rows])
        stopped = state.stopped_by > 0
        self.proved = self.proved + self._by_table(self.trial & stopped, table)
        return stopped

    def _proofs(self, s: "SMOState", rows: Tensor) -> tuple[Tensor, Tensor]:
        """Signs of the problems at `rows`, 0 where none is proved, and what proves them, (R,) both."""
        primal, bias = primal_objective(s)  # Step 5 of Algorithm 3
        u, r = s.F + s.y, self.target[rows]
        ball = torch.zeros_like(bias)
        if self.options.gap_ball:
            held = Held(s.alpha, u, s.y, s.box, r, self.rounding[s.table], s.table)
            ball = gap_ball_sign(self.K, held, bias).sign
        proved = torch.zeros_like(ball, dtype=torch.bool)
        if self.options.bound:
            possible = primal < self.ceiling[rows]
            tried = subset(possible)
            if len(tried):
                found = self._proved_by_bound(s.take(tried), rows[tried], primal[tried], ball[tried] != 0)
                proved = proved.index_copy(0, tried, found & possible[tried])
        f_r = u.gather(1, r[:, None])[:, 0] + bias
        sign = torch.where(proved, torch.where(f_r >= 0, 1.0, -1.0).to(ball), ball)
        return sign, torch.where(proved, code.BOUND, torch.where(ball != 0, code.BALL, 0))

    def _proved_by_bound(self, s: "SMOState", rows: Tensor, primal: Tensor, known: Tensor) -> Tensor:
        """Primal < H, if need be with a higher H where the sign is not known (R,) already, (R,)."""
        at_r = _AtTarget.of(self.K, s, self.target[rows])
        beta, v = at_r.approach(self.beta[rows], self.v[rows], s.alpha, s.F + s.y)  # Step 6
        proved = self._exceeds(s, at_r, beta, v, primal)  # Step 7
        read = (s.alpha != self.seen[rows]) & (s.box > 0)
        unproved = subset(~proved & ~known & read.any(1))
        if len(unproved):
            some = s.take(unproved), at_r.take(unproved), read[unproved], beta[unproved], v[unproved]
            higher, its_v = self._raised(*some)
            beta, v = beta.index_copy(0, unproved, higher), v.index_copy(0, unproved, its_v)
            proved = self._exceeds(s, at_r, beta, v, primal)
        self.beta, self.v = self.beta.index_copy(0, rows, beta), self.v.index_copy(0, rows, v)
        self.seen = self.seen.index_copy(0, rows, s.alpha)
        return proved

    def _exceeds(self, s: "SMOState", at_r: "_AtTarget", beta: Tensor, v: Tensor, primal: Tensor) -> Tensor:
        """Primal < H with room for rounding, Note [dual bound], (R,)."""
        bound = (beta * (1 + at_r.gradient(beta, v))).sum(1) / 2
        e = self.rounding[s.table]
        pull = (s.alpha * e).sum(1)
        of_beta = (beta * (e + e.gather(1, at_r.r))).sum(1)
        doubt = (pull.square() + of_beta.square()) / 2 + pull * e.amax(1) * s.box.sum(1)
        return primal < bound - EXACT * primal.abs() - doubt

    def _raised(
        self, s: "SMOState", at_r: "_AtTarget", read: Tensor, beta: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor]:
        """beta and v with a higher H, by steps along the columns `read` (R, n)."""
        q = min(_MOST, read.shape[1])
        q = min(q, int(read.sum(1).max())) if may_look(read) else q
        used, W = read.to(torch.uint8).topk(q, 1)  # (R, q)
        y, before, box = (x.gather(1, W) for x in (s.y, beta, s.box))
        h = at_r.gradient(beta, v).gather(1, W)
        Q = at_r.centred(self.K, s.table, W) * y[:, :, None] * y[:, None, :]
        after = _climbed(Q, h, box, before, used > 0)
        rows = W + (s.table * self.K.shape[1])[:, None]
        moved = embedding_bag(rows, self.K.flatten(0, 1), per_sample_weights=(after - before) * y, mode="sum")
        return beta.scatter(1, W, after), v + moved


def _climbed(Q: Tensor, h: Tensor, box: Tensor, beta: Tensor, used: Tensor) -> Tensor:
    """beta (R, q) after steps along the coordinate that gains most, of those `used`; h is the gradient."""
    batch = torch.arange(len(h), device=h.device)
    curvature = Q.diagonal(dim1=1, dim2=2).clamp_min(torch.finfo(Q.dtype).tiny)
    for _ in range(_CLIMB):
        top = torch.where(used, (beta + h / curvature).clamp_min(0).minimum(box), beta)
        d = top - beta
        j = (d * (h - d * curvature / 2)).argmax(1, keepdim=True)
        beta = beta.scatter(1, j, top.gather(1, j))
        h = h - Q[batch, j[:, 0]] * d.gather(1, j)
    return beta


class _AtTarget(NamedTuple):
    """The problem with f(x_r) = 0 of Note [dual bound], for R rows r."""

    y: Tensor
    """Labels, (R, n)."""
    r: Tensor
    """(R, 1)."""
    edge: Tensor
    """k_ri - k_rr, (R, n)."""
    corner: Tensor
    """k_rr, (R, 1)."""

    @classmethod
    def of(cls, K: Tensor, s: "SMOState", r: Tensor) -> "_AtTarget":
        k_r = K[s.table, r]
        corner = k_r.gather(1, r[:, None])
        return cls(s.y, r[:, None], k_r - corner, corner)

    def take(self, rows: Tensor) -> "_AtTarget":
        return _AtTarget(*(x.index_select(0, rows) for x in self))

    def gradient(self, beta: Tensor, v: Tensor) -> Tensor:
        """h, (R, n)."""
        total = (beta * self.y).sum(1, keepdim=True)
        return 1 - self.y * (v - v.gather(1, self.r) - total * self.edge)

    def approach(self, beta: Tensor, v: Tensor, alpha: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        """The best point between beta and alpha, Note [free columns], and its v."""
        step, h = alpha - beta, self.gradient(beta, v)
        slope = (step * h).sum(1, keepdim=True)
        bend = (step * (h - self.gradient(alpha, u))).sum(1, keepdim=True)
        t = (slope / bend.clamp_min(torch.finfo(bend.dtype).tiny)).clamp(0, 1)
        return beta + t * step, v + t * (u - v)

    def centred(self, K: Tensor, table: Tensor, W: Tensor) -> Tensor:
        """k'_ij = k_ij - k_ri - k_rj + k_rr at W (R, q), (R, q, q)."""
        edge = self.edge.gather(1, W)
        K_WW = block_of(K, W, which=table)
        return K_WW - edge[:, :, None] - edge[:, None, :] - self.corner[:, :, None]
