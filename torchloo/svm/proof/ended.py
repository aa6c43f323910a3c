"""What the ends of paths prove, from the variables that paths have moved and from how the others stand."""

from typing import NamedTuple

import torch
from torch import Tensor

from torchloo.svm.path.layout import Layout
from torchloo.svm.proof.active import sign_by_active_set
from torchloo.svm.proof.certify import (
    Held,
    Standing,
    bias_of_free,
    gap_ball_sign,
    midpoint_bias,
    reach_of,
    sign_by_reach,
)

__all__ = ["Ended"]

_EXACT = 1e-9  # slip of a solution that counts as exact
_NEAR = 1e-6  # slip that may be rounding


class Ended(NamedTuple):
    """B solutions without (part of) their variable r; Note [standing variables]."""

    layout: Layout
    """Which variables have moved."""

    alpha: Tensor
    """Their coefficients, (B, a + 1)."""

    u: Tensor
    """Their K (alpha * y), (B, a + 1)."""

    target: Tensor
    """r, (B,)."""

    gone: Tensor
    """By how much its coefficient has gone down, (B,)."""

    kept: Tensor
    """What is left of its box, (B,)."""

    held: Tensor
    """y_r a of an r that is held at a, else 0, (B,)."""

    def bias(self, free: Tensor) -> Tensor:
        """By the free variables (B, a + 1), or the midpoint where none is free, (B,)."""
        bias = bias_of_free(self.layout.y - self.u, free)
        none = bias.isnan().nonzero()[:, 0]
        if len(none):
            bias[none] = midpoint_bias(self.layout.problem.y, self._whole(none))
        return bias

    def proof(self, bias: Tensor, stray: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """f(x_r), its proved sign or 0, and whether the solution is exact to rounding, (B,) all.

        `stray` (B,) is by how much coefficients had to be changed to lie in their boxes.
        """
        K, y = self.layout.problem.K, self.layout.problem.y
        past = self.beyond(bias)
        u_r = self.of_target(past, bias)
        sign, _, slip = sign_by_reach(self.layout.y, self.listed(past), bias, u_r, reach_of(K, self.target))
        output, exact = u_r + bias, slip.maximum(stray) <= _EXACT
        open_ones = (sign == 0).nonzero()[:, 0]
        if len(open_ones):
            sign[open_ones] = gap_ball_sign(K, y, self._whole(open_ones), bias[open_ones]).sign
        near = (((sign == 0) | ~exact) & (slip <= _NEAR)).nonzero()[:, 0]
        if len(near):
            by_set, error = sign_by_active_set(K, y, self._whole(near), bias[near])
            exact[near] |= error.isfinite()
            sign[near] = torch.where(sign[near] == 0, by_set, sign[near])
        return output, sign, exact

    def beyond(self, bias: Tensor) -> Tensor:
        """How far each standing variable is past its margin, -+(b + d), where that is > 0; (B, m)."""
        layout, y, K = self.layout, self.layout.problem.y, self.layout.problem.K
        change = torch.cat([layout.change(self.alpha, self.target), bias[:, None]], 1)
        rows = torch.cat([K[layout.moved], torch.ones_like(y)[None]])
        past = torch.addmm(layout.start - y, change, rows)
        past.addcmul_(K[self.target], (y[self.target] * self.gone)[:, None], value=-1)
        return past.mul_(layout.push)

    def of_target(self, past: Tensor, bias: Tensor) -> Tensor:
        """u of r, which may have moved or stand, (B,)."""
        target = self.target[:, None]
        push, place = self.layout.push[target], self.layout.place[target]
        standing = push * past.gather(1, target) + self.layout.problem.y[target] - bias[:, None]
        return torch.where(push == 0, self.u.gather(1, place), standing)[:, 0]

    def listed(self, past: Tensor) -> Held:
        """The moved variables, with all that has to be known of the others."""
        layout, place = self.layout, self.layout.place[self.target]
        y, box = layout.problem.y[self.target], layout.problem.box[self.target]
        stands = place == layout.count
        # An r that stands is at its box: what it loses goes from those that push its way.
        count = self.held + layout.rest_count - stands * y * (box - self.kept)
        pull = layout.standing_pull(self.target, self.gone)
        standing = Standing((past + layout.no_side).amax(1), layout.rest_box, pull, layout.rest_doubt)
        own = self.kept.masked_fill(stands, 0)
        return Held(self.alpha, self.u, layout.box, place, layout.rounding, own, count, standing)

    def _whole(self, rows: Tensor) -> Held:
        """Some of the solutions, with all variables."""
        problem, target = self.layout.problem, self.target[rows]
        alpha = self.layout.whole(self.alpha[rows], target, self.gone[rows])
        u = (alpha * problem.y) @ problem.K
        return Held(alpha, u, problem.box, target, problem.rounding, self.kept[rows], self.held[rows])
