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
"""

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Held", "gap_ball_sign", "held_out_bias", "weighted_interval"]


class Held(NamedTuple):
    """B solutions without (or with less of) their variable r."""

    alpha: Tensor
    """Coefficients, (B, m)."""

    u: Tensor
    """K (alpha * y), (B, m)."""

    weight: Tensor
    """Boxes of the problem, that of r reduced; 0 for an r that is held, (B, m)."""

    held: Tensor
    """y_r a of an r that is held at a, else 0, (B,)."""

    target: Tensor
    """r, (B,)."""


def weighted_interval(s: Tensor, weight: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """The two values of s (B, m) between which the weight from below passes `count` (B,).

    They are one value unless the weight up to some s equals `count` exactly. An end that does not
    exist (one class only) is infinite.
    """
    s, order = s.masked_fill(weight <= 0, torch.inf).sort(-1)
    below = weight.gather(-1, order).cumsum(-1)
    slack = 1e-9 * weight.masked_fill(weight <= 0, torch.inf).amin(-1, keepdim=True)
    infinity = s.new_full((len(s), 1), torch.inf)
    s = torch.cat([-infinity, s, infinity], -1)
    first = (below < count[:, None] - slack).sum(-1, keepdim=True) + 1
    after = (below <= count[:, None] + slack).sum(-1, keepdim=True) + 1
    first = torch.where(count[:, None] <= slack, 0, first)
    return s.gather(-1, first)[:, 0], s.gather(-1, after)[:, 0]


def _positive_count(y: Tensor, held: Held) -> Tensor:
    return held.weight @ (y > 0).to(y) + held.held


def held_out_bias(y: Tensor, held: Held) -> Tensor:
    """The bias of each solution: by its free variables; the midpoint where none is free; (B,).

    If one class only is left, one end of the interval is infinite and f is the remaining label.
    """
    s = y - held.u
    width = 1e-7 * held.weight
    free = (held.alpha > width) & (held.alpha < held.weight - width)
    bias = (s * free).sum(-1) / free.sum(-1)
    none = (~free.any(-1)).nonzero()[:, 0]
    if len(none):
        few = Held(*(x[none] for x in held))
        low, high = weighted_interval(s[none], few.weight, _positive_count(y, few))
        label = torch.where(low.isinf(), -1.0, 1.0)
        u_r = few.u.gather(1, few.target[:, None])[:, 0]
        bias[none] = torch.where(low.isinf() | high.isinf(), label - u_r, (low + high) / 2)
    return bias


def gap_ball_sign(K: Tensor, y: Tensor, held: Held, bias: Tensor) -> tuple[Tensor, Tensor]:
    """The certified sign of f*(x_r), +1, -1 or 0 where it is open, and the duality gap; (B,) both."""
    s = y - held.u  # (B, m) the bias that gives each point margin 0
    margin = (bias[:, None] - s).mul_(y)
    alpha = held.alpha.clamp_min(0).minimum(held.weight)
    # alpha max(margin, 0) + (weight - alpha) max(-margin, 0) >= 0: nothing cancels.
    terms = held.weight * (-margin).clamp_min_(0)
    gap = terms.addcmul_(alpha, margin).clamp_min_(0).sum(-1) + (bias * (held.alpha @ y)).abs()
    u_r = held.u.gather(1, held.target[:, None])
    norm = K.diagonal().clamp_min(0).sqrt()
    rounding = 1e-12 * (1 + torch.linalg.vector_norm(held.u, torch.inf, -1, keepdim=True))
    # k'_ii <= (|phi_i| + |phi_r|)^2 for all i at once proves nearly every sign.
    rho = gap.sqrt()[:, None] * (norm.amax() + norm[held.target][:, None]) + rounding
    count = _positive_count(y, held)
    slack = _slack(held.weight)
    above = ((s <= rho - u_r) * held.weight).sum(-1) < count - slack
    beneath = ((s < -rho - u_r) * held.weight).sum(-1) > count + slack
    sign = (above.to(s) - beneath.to(s)) * gap.isfinite()  # NaN proves nothing
    rows = (sign == 0).nonzero()[:, 0]
    if len(rows):
        few = Held(*(x[rows] for x in held))
        sign[rows] = _sign_by_each_distance(
            K, s[rows] + u_r[rows], gap[rows], rounding[rows], few, count[rows]
        )
    return sign, gap


def _slack(weight: Tensor) -> Tensor:
    """How far sums of weights may be off, (B,)."""
    return 1e-9 * weight.masked_fill(weight <= 0, torch.inf).amin(-1)


def _sign_by_each_distance(
    K: Tensor, s: Tensor, gap: Tensor, rounding: Tensor, held: Held, count: Tensor
) -> Tensor:
    """Note [gap ball] with each point's own rho, and with the midpoint where the bias has an interval."""
    k = K.diagonal()
    spread = k + k[held.target][:, None] - 2 * K[held.target]  # (B, m) k'
    rho = (gap[:, None] * spread.clamp_min(0)).sqrt()
    slack = _slack(held.weight)
    above = ((s - rho <= rounding) * held.weight).sum(-1) < count - slack
    beneath = ((s + rho < -rounding) * held.weight).sum(-1) > count + slack
    sign = above.to(s) - beneath.to(s)
    return torch.where(sign != 0, sign, _midpoint_sign(s, rho, held.weight, count)) * gap.isfinite()


def _midpoint_sign(s: Tensor, rho: Tensor, weight: Tensor, count: Tensor) -> Tensor:
    """The sign where the bias has an interval and its midpoint is taken; 0 where rho leaves it open."""
    least = torch.stack(weighted_interval(s - rho, weight, count)).sum(0)
    most = torch.stack(weighted_interval(s + rho, weight, count)).sum(0)
    return (least > 0).to(s) - (most < 0).to(s)
