"""Proofs that the sign of a held-out decision value is right.

Note [gap ball]
Let alpha be feasible for the problem without r, with duality gap D and u = K (alpha * y). The primal
is 1-strongly convex in w, so |w - w*| <= sqrt(D) in every direction that counts here: for each i,
(u_i - u_r) differs from its optimal value by at most rho_i = sqrt(D k'_ii), where
k'_ii = k_ii + k_rr - 2 k_ir. The bias is an order statistic: with s_i = y_i - (u_i - u_r), the value
of f(x_r) that gives point i margin 0, and each point counting by its box, f*(x_r) is where the count
from below reaches that of the positives,

    f*(x_r) in [ (s - rho)_(W+), (s + rho)_(next above W+) ]

To know the sign no sorting is needed: f* > 0 if the points with s - rho <= 0 weigh less than W+, and
f* < 0 if those with s + rho < 0 weigh more. A coefficient that is held at a value a instead of
being boxed adds y_r a to W+ and has no weight.

Note [variables at rest]
Nearly all variables keep their bound on every path of a machine. One of them pushes the bias up (a positive
at 0 or a negative at its box) and is on its proper side if y_i - u_i <= b, or pushes it down (the others) and
is so if y_i - u_i >= b. While all are, by more than rounding, they add nothing to the gap; and as
s_i = f(x_r) + (y_i - u_i - b), those that push up have s_i <= f(x_r), those that push down s_i >= f(x_r). Let
the first count as below and the others as above. If f(x_r) > rho the others are so, and the first only make a
proof of f* > 0 harder; if f(x_r) < -rho the first are so, and the others only make a proof of f* < 0 harder.
So what they add to the count is one number for the machine, and a proof looks at the variables that have
moved. r itself may be at rest: it was at its box, and the lower it gets the farther on its proper side it is.

Note [rounding of K]
K is known to rounding only: each k_ij may be off by e_i e_j, where e_i^2 is what rounding to the dtype that
K came in may do to k_ii. (|k_ij| <= sqrt(k_ii k_jj), and where k_ij is a sum of products of rows far from the
origin, its rounding is that of the largest terms.) Then u = K (alpha * y), and so the margin, is off by

    E_i = e_i (e . alpha)

at most at point i. All errors would have to conspire for that; there is room for what summing u adds. Of a
margin m in doubt by E, the term alpha max(m, 0) + (box - alpha) max(-m, 0) of the gap grows by at most

    E alpha   if m > E,        E (box - alpha)   if m < -E,        E box   between these,

and each s_i moves by at most E_i + E_r. With a gap and a rho that are larger by as much, Note [gap ball]
proves the sign for every K within the rounding, that of the rows themselves among them. Note [active sets],
Note [dual bound] and E2 take e likewise.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from torchloo.svm.records import Exact, SVMProblem, duality_gap, gap_terms
from torchloo.svm.stacked import dot, subset
from torchloo.svm.tolerances import AT_BOUND, EXACT, LONGER, NOTHING, ROUNDING, UNIT, is_free

__all__ = [
    "Held",
    "Proof",
    "Rest",
    "bias_by_free",
    "bias_of_free",
    "gap_ball_sign",
    "gap_in_doubt",
    "held_out_bias",
    "midpoint_bias",
    "reach_of",
    "sign_by_reach",
    "smallest_and_sum",
    "value_bound",
    "weighted_interval",
]


class Rest(NamedTuple):
    """What variables that are not listed add to B solutions; Note [variables at rest]."""

    violation: Tensor
    """How far one of them is past its proper side at most, below 0 if none is, (B,)."""

    positives: Tensor
    """To W+ of Note [gap ball], less the weight of those that count as below, (B,)."""

    pull: Tensor
    """To y^T alpha, (B,)."""

    doubt: Tensor
    """To e . alpha of Note [rounding of K], (B,)."""

    rounding: Tensor
    """The largest e of all variables, () or (B,)."""

    least: Tensor
    """The smallest box of all variables, () or (B,)."""

    total: Tensor
    """The sum of their boxes, () or (B,)."""

    largest: Tensor
    """The largest |u| in the full solution, () or (B,)."""


class Held(NamedTuple):
    """B solutions without (or with less of) their variable r."""

    alpha: Tensor
    """Coefficients, (B, m)."""

    u: Tensor
    """K (alpha * y), (B, m)."""

    y: Tensor
    """Labels, (m,) or (B, m)."""

    box: Tensor
    """Boxes of the problem, (m,) or (B, m)."""

    target: Tensor
    """r, (B,)."""

    rounding: Tensor
    """e of Note [rounding of K], (m,) or (B, m)."""

    table: Tensor
    """Which of T kernel matrices (T, m, m) each solution is of, (B,)."""

    own: Tensor | None = None
    """Box of r, 0 for an r that is held, (B,); None: that of `box`."""

    held: Tensor | None = None
    """y_r a of an r that is held at a, else 0, (B,); None: 0."""

    rest: Rest | None = None
    """What variables beside the m listed ones add; None: there are no others."""

    @classmethod
    def full(cls, problem: SVMProblem, full: Exact) -> "Held":
        """The full machines, of which any variable is the target."""
        every = torch.arange(len(problem.y), device=problem.y.device)
        u, first = problem.product(full.alpha * problem.y), torch.zeros_like(every)
        table = problem.kernels(every).table
        return cls(full.alpha, u, problem.y, problem.box, first, problem.rounding, table)

    @classmethod
    def of(
        cls,
        problem: SVMProblem,
        table: Tensor,
        alpha: Tensor,
        box: Tensor,
        target: Tensor,
        own: Tensor | None = None,
    ) -> "Held":
        """Coefficients and boxes (B, m) for the problems `table` (B,), in ascending order."""
        kernels, y = problem.kernels(table), problem.y[table]
        u = kernels.product(alpha * y, problem.K)
        return cls(alpha, u, y, box, target, problem.rounding[table], kernels.table, own)

    def take(self, rows: Tensor) -> "Held":
        """The solutions at `rows`."""
        of_each = self.alpha, self.u, self.target, self.table
        alpha, u, target, table = (x.index_select(0, rows) for x in of_each)
        shared = self.y, self.box, self.rounding
        y, box, rounding = (x if x.ndim == 1 else x.index_select(0, rows) for x in shared)
        own, held = (None if x is None else x[rows] for x in (self.own, self.held))
        return Held(alpha, u, y, box, target, rounding, table, own, held)

    def of_target(self, x: Tensor) -> Tensor:
        """The values (B, m) or (m,) at r, (B,)."""
        return x.index_select(0, self.target) if x.ndim == 1 else x.gather(1, self.target[:, None])[:, 0]

    def doubt(self) -> Tensor:
        """e . alpha of Note [rounding of K], (B,)."""
        doubt = dot(self.alpha, self.rounding)
        return doubt if self.rest is None else doubt + self.rest.doubt

    def weight(self) -> Tensor:
        """The boxes, that of r among them, (B, m)."""
        boxes = self.box.expand_as(self.u)
        return boxes if self.own is None else boxes.scatter(1, self.target[:, None], self.own[:, None])

    def weigh(self, mask: Tensor) -> Tensor:
        """The sum of the boxes where the mask (B, m) or (m,) is true, (B,)."""
        whole = dot(mask.to(self.box), self.box)
        if self.own is None:
            return whole.expand_as(self.target)
        return whole + self.of_target(mask) * (self.own - self.of_target(self.box))

    def positive_count(self) -> Tensor:
        """W+ of Note [gap ball], (B,)."""
        count = self.weigh(self.y > 0)
        if self.rest is not None:
            count = count + self.rest.positives
        return count if self.held is None else count + self.held

    def slack(self) -> Tensor:
        """How far sums of boxes may be off: by far less than a box, and by rounding, (B,)."""
        least, total = smallest_and_sum(self.box) if self.rest is None else (self.rest.least, self.rest.total)
        if self.own is not None:
            least = least.minimum(self.own.masked_fill(self.own <= 0, torch.inf))
        return _slack(least, total)

    def largest(self) -> Tensor:
        """The largest |u|, (B,)."""
        largest = torch.maximum(self.u.amax(-1), -self.u.amin(-1))
        return largest if self.rest is None else largest.maximum(self.rest.largest)


def smallest_and_sum(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The least positive weight and the sum of all, (...) of (..., m)."""
    return weight.masked_fill(weight <= 0, torch.inf).amin(-1), weight.sum(-1)


def _slack(least: Tensor, total: Tensor) -> Tensor:
    """How far a sum of boxes may be off, from the least box and the sum of all."""
    return NOTHING * least + UNIT * total


def weighted_interval(s: Tensor, weight: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """The two values of s (B, m) between which the weight from below passes `count` (B,).

    They are one value unless the weight up to some s equals `count` exactly. An end that does not
    exist (one class only) is infinite.
    """
    s, order = s.masked_fill(weight <= 0, torch.inf).sort(-1)
    below = weight.gather(-1, order).cumsum(-1)
    least, total = smallest_and_sum(weight)
    slack = _slack(least, total)[:, None]
    infinity = s.new_full((len(s), 1), torch.inf)
    s = torch.cat([-infinity, s, infinity], -1)
    first = (below < count[:, None] - slack).sum(-1, keepdim=True) + 1
    after = (below <= count[:, None] + slack).sum(-1, keepdim=True) + 1
    first = torch.where(count[:, None] <= slack, 0, first)
    return s.gather(-1, first)[:, 0], s.gather(-1, after)[:, 0]


def held_out_bias(held: Held) -> tuple[Tensor, Tensor]:
    """The bias of each solution by its free variables, and whether it is the midpoint as none is, (B,)."""
    bias = bias_by_free(held)
    is_midpoint = bias.isnan()
    none = is_midpoint.nonzero()[:, 0]
    if none.numel():
        bias[none] = midpoint_bias(held.take(none))
    return bias, is_midpoint


def bias_by_free(held: Held) -> Tensor:
    """The bias of each solution by its free variables, NaN where none is free; (B,)."""
    # By the boxes alone: the listed variables need not hold the largest coefficient, and a free one that is
    # taken for bounded only leaves the bias to its interval.
    box = held.weight()
    return bias_of_free(held.y - held.u, is_free(held.alpha, box, AT_BOUND * box))


def bias_of_free(miss: Tensor, free: Tensor) -> Tensor:
    """The mean of `miss` (B, l), y - u, of the free variables; NaN where there is none; (B,)."""
    one = free.to(miss)
    return torch.linalg.vecdot(miss, one) / one.sum(-1)


def midpoint_bias(held: Held) -> Tensor:
    """The bias where no variable is free: the midpoint of its interval, (B,).

    If one class only is left, one end of the interval is infinite and f is the remaining label.
    """
    low, high = _interval_of_bounded(held)
    one_class = low.isinf() | high.isinf()
    label = torch.where(low.isinf(), -1.0, 1.0)
    return torch.where(one_class, label - held.of_target(held.u), (low + high) / 2)


def _interval_of_bounded(held: Held) -> tuple[Tensor, Tensor]:
    """`weighted_interval` of y - u at W+; not sorted where those that push the bias up lie below the rest."""
    s, weight, count = held.y - held.u, held.weight(), held.positive_count()
    up, ignored = (held.y > 0) ^ (held.alpha > weight / 2), weight <= 0
    low = s.masked_fill(~up | ignored, -torch.inf).amax(1)
    high = s.masked_fill(up | ignored, torch.inf).amin(1)
    is_interval = (low <= high) & (((weight * up).sum(1) - count).abs() <= held.slack())
    rows = subset(~is_interval)
    if rows.numel():
        least, most = weighted_interval(s[rows], weight[rows], count[rows])
        low = torch.where(is_interval, low, low.index_copy(0, rows, least))
        high = torch.where(is_interval, high, high.index_copy(0, rows, most))
    return low, high


class Proof(NamedTuple):
    """What a solution proves."""

    sign: Tensor
    """The certified sign of f*(x_r), +1, -1 or 0 where it is open, (B,)."""

    gap: Tensor
    """Duality gap, (B,)."""

    slip: Tensor
    """How far a variable other than r misses its margin at most, relative to the largest |u|, (B,)."""


def gap_ball_sign(K: Tensor, held: Held, bias: Tensor, is_midpoint: Tensor | None = None) -> Proof:
    """The sign of f*(x_r) by Note [gap ball], for kernel matrices K (T, m, m).

    `is_midpoint` (B,) is as `held_out_bias` gives it, if it has given the bias.
    """
    u_r, reach = held.of_target(held.u), reach_of(K, held.target, held.table)
    proof = sign_by_reach(held, bias, u_r, reach, is_midpoint)
    rows = subset(proof.sign == 0)
    if not rows.numel():
        return proof
    closer = _sign_by_each_distance(K, held.take(rows), proof.gap[rows])
    return proof._replace(
        sign=torch.where(proof.sign == 0, proof.sign.index_copy(0, rows, closer), proof.sign)
    )


def reach_of(K: Tensor, target: Tensor, table: Tensor) -> Tensor:
    """The largest root of k' of Note [gap ball] that a point i can have, for targets of K[table], (B,)."""
    norm = K.diagonal(dim1=1, dim2=2).clamp_min(0).sqrt()
    return LONGER * (norm[table, target] + norm.amax(-1)[table])  # k'_ii <= (|phi_i| + |phi_r|)^2


def sign_by_reach(
    held: Held, bias: Tensor, u_r: Tensor, reach: Tensor, is_midpoint: Tensor | None = None
) -> Proof:
    """Note [gap ball] with one rho for all i, which proves nearly every sign.

    No s_i is off by more, and so neither is the midpoint of an interval between two of them.
    """
    doubt = held.doubt()
    gap, slip = _optimality(held, bias, doubt)
    most = (held.rounding.amax(-1) if held.rest is None else held.rest.rounding) * doubt
    scale = held.largest().maximum(u_r.abs()) + 1
    rho = gap.sqrt() * reach + ROUNDING * scale + 2 * most
    count, slack = held.positive_count(), held.slack()
    f = u_r + bias
    positive = f > 0
    below = held.weigh(held.y - held.u <= (torch.where(positive, rho, -rho) - u_r)[:, None])
    proved = torch.where(positive, below < count - slack, below > count + slack)
    if is_midpoint is not None:
        proved |= is_midpoint & (f.abs() > rho)
    slip = slip / scale
    if held.rest is not None:
        at_rest = held.rest.violation < -most - ROUNDING * scale
        proved &= at_rest & (f.abs() > rho)
        slip = slip.masked_fill(~at_rest, torch.inf)
    sign = torch.where(positive, 1.0, -1.0).to(gap) * (proved & gap.isfinite())  # NaN proves nothing
    return Proof(sign, gap, slip)


def gap_in_doubt(alpha: Tensor, margin: Tensor, box: Tensor, E: Tensor) -> Tensor:
    """What Note [rounding of K] adds to the duality gap; (...) from (..., m)."""
    # 0 or 1 in the dtype of the others: a choice by a random mask takes ten times as long.
    not_below, not_above = torch.ge(margin, -E, out=torch.empty_like(E)), torch.le(margin, E, out=E.clone())
    return dot((box - alpha).mul_(not_above).addcmul_(alpha, not_below), E)


def value_bound(k: Tensor, alpha: Tensor, margin: Tensor, box: Tensor, rounding: Tensor) -> Tensor:
    """How far decision values of a solution (m,) may be from those of the optimum, Note [gap ball].

    (..., m), as all arguments are; k is the diagonal of K.
    """
    alpha = alpha.clamp_min(0).minimum(box)
    E = rounding * (rounding * alpha).sum(-1, keepdim=True)
    gap = (duality_gap(alpha, margin, box) + gap_in_doubt(alpha, margin, box, E))[..., None]
    norm = k.clamp_min(0).sqrt()
    reach = LONGER * (norm.amax(-1, keepdim=True) + norm)
    return gap.sqrt() * reach + 2 * E.amax(-1, keepdim=True) + EXACT


def _optimality(held: Held, bias: Tensor, doubt: Tensor) -> tuple[Tensor, Tensor]:
    """Duality gap, with what rounding of K may add, and largest miss of a margin, (B,) both."""
    margin = (held.u + bias[:, None]).sub_(held.y).mul_(held.y)
    alpha = held.alpha.clamp_min(0).minimum(held.box)
    terms = gap_terms(alpha, margin, held.box)
    if held.own is not None:
        terms.scatter_(1, held.target[:, None], 0.0)
    E = doubt[:, None] * held.rounding
    gap, imbalance = terms.sum(-1) + gap_in_doubt(alpha, margin, held.box, E), dot(held.alpha, held.y)
    slip = terms.div_(held.box.clamp_min(torch.finfo(gap.dtype).tiny)).amax(-1)
    if held.rest is not None:
        imbalance = imbalance + held.rest.pull
    gap += (bias * imbalance).abs()
    if held.own is None:
        return gap, slip
    margin_r, alpha_r = held.of_target(margin), held.of_target(alpha).minimum(held.own)
    return gap + gap_terms(alpha_r, margin_r, held.own), slip


def _sign_by_each_distance(K: Tensor, held: Held, gap: Tensor) -> Tensor:
    """Note [gap ball] with each point's own rho, and with the midpoint where the bias has an interval."""
    largest = held.rounding.amax(-1, keepdim=True)  # (1,) or (B, 1)
    of_sums = ROUNDING * (1 + held.u.abs().amax(-1))
    rounding = of_sums + 2 * largest.squeeze(-1) * held.doubt()
    s = held.y - held.u + held.of_target(held.u)[:, None]
    k, k_r = K.diagonal(dim1=1, dim2=2)[held.table], K[held.table, held.target]  # (B, m)
    spread = k + held.of_target(k)[:, None] - 2 * k_r  # k'
    rho = (gap[:, None] * (spread.clamp_min(0) + 4 * largest.square())).sqrt()
    rho += rounding[:, None]
    count, slack = held.positive_count(), held.slack()
    above = held.weigh(s - rho <= 0) < count - slack
    beneath = held.weigh(s + rho < 0) > count + slack
    sign = above.to(s) - beneath.to(s)
    return torch.where(sign != 0, sign, _midpoint_sign(s, rho, held.weight(), count)) * gap.isfinite()


def _midpoint_sign(s: Tensor, rho: Tensor, weight: Tensor, count: Tensor) -> Tensor:
    """The sign where the bias has an interval and its midpoint is taken; 0 where rho leaves it open."""
    least = torch.stack(weighted_interval(s - rho, weight, count)).sum(0)
    most = torch.stack(weighted_interval(s + rho, weight, count)).sum(0)
    return (least > 0).to(s) - (most < 0).to(s)
