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

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from torchloo.svm.certify import Held, gap_ball_sign, weighted_interval
from torchloo.svm.inner import box_qp
from torchloo.svm.smo import SMOState

__all__ = ["BOUND", "GAP_BALL", "DualBound", "primal_objective"]

BOUND, GAP_BALL = 1, 2  # what SMOState.stopped_by says


def primal_objective(s: SMOState) -> tuple[Tensor, Tensor]:
    """1/2 |w|^2 + sum box max(0, 1 - y f) with the best bias, and that bias; (B,) both."""
    count = (s.box * (s.y > 0)).sum(1)
    low, high = weighted_interval(-s.F, s.box, count)
    bias = torch.where(low.isinf(), high, torch.where(high.isinf(), low, (low + high) / 2))
    loss = (s.box * (-s.y * (s.F + bias[:, None])).clamp_min(0)).sum(1)
    return (s.alpha * s.y * (s.F + s.y)).sum(1) / 2 + loss, bias


class DualBound:
    """Algorithm 3 of BOUND for a batch, with the gap ball as a second proof. A StopRule of smo.

    Note [free columns]
    beta costs no kernel column of its own. A feasible alpha is a feasible beta with H = G, so beta
    first goes to the best point between itself and alpha, whose v = u is known; then H is
    maximised exactly over the columns that alpha has just read. So a run with the bound reads no more
    than a run without it, but for ties that fall differently. Coordinates of beta's own choice, 4 or
    16 a round, were tried on four small sets: hardly a proof more, and up to seven times the columns.
    """

    def __init__(
        self,
        K: Tensor,
        start: Tensor,
        y: Tensor,
        target: Tensor,
        rounding: Tensor,
        bound: bool = True,
        gap_ball: bool = True,
    ) -> None:
        """Start from beta = alpha: K (n, n), alpha (B, n), labels (n,), rows left out (B,), e of K (n,).

        `bound` and `gap_ball` say which of the two proofs are looked for.
        """
        self.K, self.y, self.target, self.rounding = K, y, target, rounding
        self.bound, self.gap_ball = bound, gap_ball
        self.beta = start.clone()
        self.v = (start * y) @ K
        self.edge = K[target] - K.diagonal()[target][:, None]  # (B, n) k_ri - k_rr

    def take(self, rows: Tensor) -> None:
        """Keep only the problems at `rows`."""
        for name in ("target", "beta", "v", "edge"):
            setattr(self, name, getattr(self, name)[rows])

    def advance(self, state: SMOState) -> Tensor:
        """The proofs that cost nothing; where they fail, a higher H."""
        primal, bias = primal_objective(state)
        u = state.F + state.y
        held = Held(state.alpha, u, state.box, self.target, self.rounding)
        ball = gap_ball_sign(self.K, self.y, held, bias).sign if self.gap_ball else torch.zeros_like(bias)
        proved = self._proved_by_bound(state, primal, ball != 0) if self.bound else torch.zeros_like(bias) > 0
        f_r = u.gather(1, self.target[:, None])[:, 0] + bias
        state.sign = torch.where(proved, torch.where(f_r >= 0, 1.0, -1.0).to(ball), ball)
        state.stopped_by = torch.where(proved, BOUND, torch.where(ball != 0, GAP_BALL, 0))
        return state.stopped_by > 0

    def _proved_by_bound(self, s: SMOState, primal: Tensor, known: Tensor) -> Tensor:
        """Primal < H, if need be with a higher H where the sign is not known (B,) already, (B,)."""
        self._approach(s)
        proved = self._exceeds(s, primal)
        unproved = ~proved & ~known & s.read.any(1)
        if not bool(unproved.any()):
            return proved
        self._raise(s, unproved.nonzero()[:, 0])
        return self._exceeds(s, primal)

    def _gradient(self, y: Tensor, beta: Tensor, v: Tensor) -> Tensor:
        """h of Note [dual bound], (B, n)."""
        total = (beta * y).sum(1, keepdim=True)
        return 1 - y * (v - v.gather(1, self.target[:, None]) - total * self.edge)

    def _exceeds(self, s: SMOState, primal: Tensor) -> Tensor:
        """Primal < H with room for rounding, (B,)."""
        bound = (self.beta * (1 + self._gradient(s.y, self.beta, self.v))).sum(1) / 2
        return primal < bound - 1e-9 * primal.abs() - self._doubt(s)

    def _doubt(self, s: SMOState) -> Tensor:
        """What rounding of K leaves open of the primal and of H, Note [dual bound], (B,)."""
        e = self.rounding
        pull = s.alpha @ e
        of_beta = self.beta @ e + self.beta.sum(1) * e[self.target]
        return (pull.square() + of_beta.square()) / 2 + pull * e.amax() * s.box.sum(1)

    def _approach(self, s: SMOState) -> None:
        """The best point between beta and alpha, Note [free columns]."""
        u = s.F + s.y
        step = s.alpha - self.beta
        h = self._gradient(s.y, self.beta, self.v)
        slope = (step * h).sum(1, keepdim=True)
        bend = (step * (h - self._gradient(s.y, s.alpha, u))).sum(1, keepdim=True)
        t = (slope / bend.clamp_min(torch.finfo(bend.dtype).tiny)).clamp(0, 1)
        self.beta = self.beta + t * step
        self.v = self.v + t * (u - self.v)

    def _raise(self, s: SMOState, rows: Tensor) -> None:
        """Maximise H of the problems at `rows` over the columns that alpha has read."""
        read = s.read[rows]
        used, W = read.to(s.y).topk(int(read.sum(1).max()), 1)  # (R, q): 1 and 0
        y, before, box = (x[rows].gather(1, W) for x in (s.y, self.beta, s.box))
        h = self._gradient(s.y, self.beta, self.v)[rows].gather(1, W)
        Q = self._centred(rows, W) * y[:, :, None] * y[:, None, :]
        c = -h - (Q @ (before * used)[:, :, None])[:, :, 0]
        beta = torch.where(used > 0, box_qp(Q, c, box * used, before, tolerance=1e-9), before)
        mean_slope = c + (Q @ ((before + beta) * used)[:, :, None])[:, :, 0] / 2
        better = ((before - beta) * mean_slope).sum(1, keepdim=True) > 0
        change = torch.where(better, beta - before, 0.0)
        self.beta[rows] = self.beta[rows].scatter_add(1, W, change)
        self.v[rows] += embedding_bag(W, self.K, per_sample_weights=change * y, mode="sum")

    def _centred(self, rows: Tensor, W: Tensor) -> Tensor:
        """k'_ij = k_ij - k_ri - k_rj + k_rr, where k_ri = edge_i + k_rr, (R, q, q)."""
        edge = self.edge[rows].gather(1, W)
        corner = self.K.diagonal()[self.target[rows]][:, None, None]
        return self.K[W[:, :, None], W[:, None, :]] - edge[:, :, None] - edge[:, None, :] - corner
