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

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from torchloo.svm.proof.certify import Held, gap_ball_sign, weighted_interval
from torchloo.svm.smo.box_qp import box_qp
from torchloo.svm.smo.rounds import SMOState
from torchloo.svm.stacked import may_look, subset

__all__ = ["BOUND", "GAP_BALL", "DualBound", "SMOOptions", "primal_objective"]

BOUND, GAP_BALL = 1, 2  # what SMOState.stopped_by says
_CLIMB = 8  # steps of beta beside pairs
_MOST = 64  # columns over which H is raised at once, or as many as a working set has


class SMOOptions(NamedTuple):
    """Variants of Algorithms 1 to 3 of BOUND for method "smo" of `svm_loo`.

    `SMOOptions(working=2, bound=True)` is the proposed algorithm of the paper, `SMOOptions(working=2)` the
    standard one that it is compared with. By default neither proof is looked for on the way: Newton steps
    solve a seeded problem in a few rounds, of which a proof saves too little. Over 47 problems of 12 IDA sets
    the gap ball takes 1.09 times the time (geometric mean), the bound 1.29 times; 6913, 6913 and 6917 of 7010
    rows are certified, as the gap ball judges every row at the end. `scripts/bench/svm_bound.py --solvers
    newton` compares the default with and without the bound.
    """

    working: int = 64
    """Size of the working sets; 2 is the SMO of the paper: each round is one step on the worst pair."""

    seed: bool = True
    """Start from the full machine, else from zero."""

    bound: bool = False
    """Stop when the dual bound proves the sign (only where no values are asked for), Note [dual bound]."""

    gap_ball: bool = False
    """Stop when the gap ball proves it (likewise), Note [gap ball]."""

    trials: int = 10
    """M of the paper: the first so many open points decide whether the proofs are worth their time."""

    useful: float = 0.5
    """The share of them that must be proved before they meet epsilon-KKT."""

    newton: int = 4
    """Newton steps on the free set in each round, at most, Note [free sets]; none with working=2."""

    most_rounds: int = 100_000
    """Problems that need more are left unsolved: "not solved: out of rounds"."""

    patience: int = 100
    """Sweeps, rounds whose working sets have n variables together, that may fail to halve the violation of
    a problem; then it is left unsolved too."""


def primal_objective(s: SMOState) -> tuple[Tensor, Tensor]:
    """1/2 |w|^2 + sum box max(0, 1 - y f) with the best bias, and that bias; (B,) both."""
    count = (s.box * (s.y > 0)).sum(1)
    low, high = weighted_interval(-s.F, s.box, count)
    bias = torch.where(low.isinf(), high, torch.where(high.isinf(), low, (low + high) / 2))
    loss = (s.box * (-s.y * (s.F + bias[:, None])).clamp_min(0)).sum(1)
    return (s.alpha * s.y * (s.F + s.y)).sum(1) / 2 + loss, bias


class DualBound:
    """Algorithm 3 of BOUND for a batch, with the gap ball as a second proof.

    Note [free columns]
    beta costs no kernel column of its own. A feasible alpha is a feasible beta with H = G, so beta
    first goes to the best point between itself and alpha, whose v = u is known; then H is
    maximised over the columns that alpha has just read. So a run with the bound reads no more
    than a run without it, but for ties that fall differently. Coordinates of beta's own choice, 4 or
    16 a round, were tried on four small sets: hardly a proof more, and up to seven times the columns.

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
        options: SMOOptions,
    ) -> None:
        """For problems without the rows `target` (B,) on kernel matrices K (T, n, n), by a `table` (B,).

        The table is ascending; `rounding` is e of each K, (T, n).
        """
        self.K, self.rounding, self.target, self.options = K, rounding, target, options
        trials, useful = options.trials, options.useful
        count = self._by_table(torch.ones_like(table), table)
        number = torch.arange(len(table), device=table.device) - (count.cumsum(0) - count)[table]
        self.trial = number < trials  # (B,)
        self.needed = useful * count.clamp_max(trials)  # (T,) proofs among the trials
        self.proved = torch.zeros_like(count)
        self.beta = self.v = K.new_zeros(len(target), K.shape[1])
        self.begun = torch.zeros_like(self.trial)  # whose beta is set

    def _by_table(self, x: Tensor, table: Tensor) -> Tensor:
        """Sums of x (B,) over the problems of each kernel matrix, (T,)."""
        return torch.zeros(len(self.K), dtype=torch.long, device=x.device).index_add_(0, table, x.long())

    def take(self, rows: Tensor) -> None:
        """Keep only the problems at `rows`."""
        for name in ("target", "trial", "begun", "beta", "v"):
            setattr(self, name, getattr(self, name)[rows])

    def advance(self, state: SMOState, going: Tensor) -> Tensor:
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
                first = asked[rows] & ~self.begun[rows]
                state.columns = state.columns.index_add(0, rows, first.long())
            sign, by = self._proofs(state.take(rows), rows)
            self.begun = self.begun.index_copy(0, rows, self.begun[rows] | asked[rows])
            state.sign = state.sign.index_copy(0, rows, sign * asked[rows])
            state.stopped_by = state.stopped_by.index_copy(0, rows, by * asked[rows])
        stopped = state.stopped_by > 0
        self.proved = self.proved + self._by_table(self.trial & stopped, table)
        return stopped

    def _proofs(self, s: SMOState, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Signs of the problems at `rows`, 0 where none is proved, and what proves them, (R,) both."""
        primal, bias = primal_objective(s)  # Step 5 of Algorithm 3
        u, r = s.F + s.y, self.target[rows]
        ball = torch.zeros_like(bias)
        if self.options.gap_ball:
            held = Held(s.alpha, u, s.box, r, self.rounding[s.table], table=s.table)
            ball = gap_ball_sign(self.K, s.y, held, bias).sign
        proved = self._proved_by_bound(s, rows, primal, ball != 0) if self.options.bound else ball > 1
        f_r = u.gather(1, r[:, None])[:, 0] + bias
        sign = torch.where(proved, torch.where(f_r >= 0, 1.0, -1.0).to(ball), ball)
        return sign, torch.where(proved, BOUND, torch.where(ball != 0, GAP_BALL, 0))

    def _proved_by_bound(self, s: SMOState, rows: Tensor, primal: Tensor, known: Tensor) -> Tensor:
        """Primal < H, if need be with a higher H where the sign is not known (R,) already, (R,)."""
        at_r = _AtTarget.of(self.K, s, self.target[rows])
        u, begun = s.F + s.y, self.begun[rows][:, None]
        beta = torch.where(begun, self.beta[rows], s.alpha)
        v = torch.where(begun, self.v[rows], u)
        beta, v = at_r.approach(beta, v, s.alpha, u)  # Step 6
        proved = self._exceeds(s, at_r, beta, v, primal)  # Step 7
        unproved = subset(~proved & ~known & s.read.any(1))
        if len(unproved):
            risen = self._raised(s.take(unproved), at_r.take(unproved), beta[unproved], v[unproved])
            beta, v = (x.index_copy(0, unproved, new) for x, new in zip((beta, v), risen, strict=True))
            proved = self._exceeds(s, at_r, beta, v, primal)
        self.beta, self.v = self.beta.index_copy(0, rows, beta), self.v.index_copy(0, rows, v)
        return proved

    def _exceeds(self, s: SMOState, at_r: "_AtTarget", beta: Tensor, v: Tensor, primal: Tensor) -> Tensor:
        """Primal < H with room for rounding, Note [dual bound], (R,)."""
        bound = (beta * (1 + at_r.gradient(beta, v))).sum(1) / 2
        e = self.rounding[s.table]
        pull = (s.alpha * e).sum(1)
        of_beta = (beta * (e + e.gather(1, at_r.r))).sum(1)
        doubt = (pull.square() + of_beta.square()) / 2 + pull * e.amax(1) * s.box.sum(1)
        return primal < bound - 1e-9 * primal.abs() - doubt

    def _raised(self, s: SMOState, at_r: "_AtTarget", beta: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """beta and v with a higher H over the columns read: the highest, or beside pairs some steps up."""
        q = min(max(_MOST, self.options.working), s.read.shape[1])
        q = min(q, int(s.read.sum(1).max())) if may_look(s.read) else q
        used, W = s.read.to(s.y).topk(q, 1)  # (R, q): 1 and 0
        y, before, box = (x.gather(1, W) for x in (s.y, beta, s.box))
        h = at_r.gradient(beta, v).gather(1, W)
        Q = at_r.centred(self.K, s.table, W) * y[:, :, None] * y[:, None, :]
        if self.options.working == 2:
            change = _climbed(Q, h, box, before, used)
        else:
            c = -h - (Q @ (before * used)[:, :, None])[:, :, 0]
            found = torch.where(used > 0, box_qp(Q, c, box * used, before, tolerance=1e-9), before)
            mean_slope = c + (Q @ ((before + found) * used)[:, :, None])[:, :, 0] / 2
            better = ((before - found) * mean_slope).sum(1, keepdim=True) > 0
            change = torch.where(better, found - before, 0.0)
        rows = W + (s.table * self.K.shape[1])[:, None]
        moved = embedding_bag(rows, self.K.flatten(0, 1), per_sample_weights=change * y, mode="sum")
        return beta.scatter_add(1, W, change), v + moved


def _climbed(Q: Tensor, h: Tensor, box: Tensor, beta: Tensor, used: Tensor) -> Tensor:
    """The change of beta (R, q) by steps along the coordinate that gains most, h being the gradient.

    Of the coordinates for which `used` is 1, not 0.
    """
    new, batch = beta, torch.arange(len(h), device=h.device)
    curvature = Q.diagonal(dim1=1, dim2=2).clamp_min(torch.finfo(Q.dtype).tiny)
    for _ in range(min(_CLIMB, h.shape[1])):
        d = ((new + h / curvature).clamp_min(0).minimum(box) - new) * used
        j = (d * (h - d * curvature / 2)).argmax(1)
        step = d[batch, j][:, None]
        new = new.scatter_add(1, j[:, None], step)
        h = h - Q[batch, j] * step
    return new - beta


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
    def of(cls, K: Tensor, s: SMOState, r: Tensor) -> "_AtTarget":
        k_r = K[s.table, r]
        corner = k_r.gather(1, r[:, None])
        return cls(s.y, r[:, None], k_r - corner, corner)

    def take(self, rows: Tensor) -> "_AtTarget":
        return _AtTarget(*(x[rows] for x in self))

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
        K_WW = K[table[:, None, None], W[:, :, None], W[:, None, :]]
        return K_WW - edge[:, :, None] - edge[:, None, :] - self.corner[:, :, None]
