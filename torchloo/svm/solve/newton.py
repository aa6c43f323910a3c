"""Points of Mehrotra's predictor-corrector method for the SVM dual, the step from one, the sets it shows."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchloo.svm.records import gap_terms
from torchloo.svm.solve.systems import Dense, LowRank, Rough
from torchloo.svm.stacked import times_vector
from torchloo.svm.tolerances import DECIDES, SETTLED, SHORT_OF_BOUND

__all__ = ["Interior", "Iterate", "Number", "Sets"]


class Interior(NamedTuple):
    """Interior points near the optimum; which multiplier wins tells the set of each variable."""

    alpha: Tensor
    """Coefficients strictly between 0 and the box, (..., m)."""

    lower: Tensor
    """Multipliers of alpha >= 0, (..., m)."""

    upper: Tensor
    """Multipliers of alpha <= box, (..., m)."""

    bias: Tensor
    """Offset, (..., 1)."""


class Sets(NamedTuple):
    """Approximate solutions of B machines, whose sets are to be tried."""

    alpha: Tensor
    """Coefficients, (B, m)."""

    bias: Tensor
    """Offsets, (B,)."""

    free: Tensor
    """Masks of the free sets, (B, m)."""

    upper: Tensor
    """Masks of the variables at their upper bounds, (B, m)."""

    @classmethod
    def read_off(cls, point: Interior, box: Tensor) -> "Sets":
        """Of each variable the set whose multiplier wins, of free ones none."""
        upper = box - point.alpha < point.upper
        return cls(point.alpha, point.bias[:, 0], (point.alpha > point.lower) & ~upper, upper)

    def take(self, rows: Tensor) -> "Sets":
        """The machines at `rows`."""
        return Sets(*(x.index_select(0, rows) for x in self))

    def replaced(self, rows: Tensor, by: "Sets") -> "Sets":
        """With other sets of the machines at `rows`."""
        return Sets(*(old.index_copy(0, rows, new) for old, new in zip(self, by, strict=True)))


Number = Any
"""A number of one machine, a float; those of several, (B, 1)."""


class Iterate:
    """The point of one machine (m,) or of several (B, m), its residuals, and the Newton step from it.

    Note [Newton step]
    X = (alpha, box - alpha) and their multipliers W = (lower, upper) are stacked as `values`,
    (4, m) or (4, B, m). A step that should change the products X W by E - X W solves, with theta = sum
    of W / X,

        (K + theta) x = (y - u - b) + y * ((E / X)_1 - (E / X)_2),    (K + theta) eta = 1,
        d_b = (1^T x - equality residual) / 1^T eta,   d_alpha = y * (x - d_b eta),
        dX = (d_alpha, -d_alpha),   dW = E / X - W - (W / X) dX.

    Relative to the values, with r = dX / X, these are r and dW / W = E / (X W) - 1 - r. The predictor has
    E = 0, so that dX dW = -X W (r + r^2); the corrector has E = centre - dX dW of the predictor.
    """

    def __init__(self, y: Tensor, box: Tensor, values: Tensor, bias: Number, stuck: Number) -> None:
        self.y, self.box, self.values, self.bias, self.stuck = y, box, values, bias, stuck
        self.single, self.ones = box.ndim == 1, torch.ones_like(box)
        self.sides, self.sums = torch.stack([y, -y]), torch.stack([self.ones, y], -2)
        self.rhs = torch.stack([self.ones, self.ones], -2)  # of x and of eta, (..., 2, m)
        self.miss = self.rhs.select(-2, 0)  # y - u - b

    @classmethod
    def start(cls, y: Tensor, box: Tensor, held: bool = False) -> "Iterate":
        """A fifth of the way into the box; of ten starts tried this took whole machines the fewest steps.

        In the middle, and with equal products, where others are held: boxes may hardly let variables move.
        """
        share, multiplier = 0.2, torch.ones_like(box)
        if held:
            share, multiplier = 0.5, box.amax(-1, keepdim=True) / box
        values = torch.stack([share * box, (1 - share) * box, multiplier, multiplier])
        if box.ndim == 1:
            return cls(y, box, values, 0.0, False)
        zero = torch.zeros_like(box[:, :1])
        return cls(y, box, values, zero, zero > 0)

    def interior(self) -> Interior:
        """The point as others see it."""
        alpha, _, lower, upper = self.values
        return Interior(alpha, lower, upper, alpha.new_tensor([self.bias]) if self.single else self.bias)

    def take(self, rows: Tensor) -> "Iterate":
        """The machines at `rows`."""
        return Iterate(self.y[rows], self.box[rows], self.values[:, rows], self.bias[rows], self.stuck[rows])

    def without(self, keep: Tensor) -> "Iterate":
        """The point without the variables that have settled: those of `keep` (v,) or (B, v)."""
        y, box = self.y.gather(-1, keep), self.box.gather(-1, keep)
        values = self.values.gather(-1, keep.expand(4, *keep.shape))
        return Iterate(y, box, values, self.bias, self.stuck)

    def look(self, system: Dense | LowRank, pull: Tensor | None = None, total: Number = 0.0) -> None:
        """Residuals, with what the settled variables add to K (alpha * y) and to y^T alpha."""
        alpha = self.values[0]
        u = system.product(alpha * self.y)
        torch.sub(self.y, u if pull is None else u + pull, out=self.miss).sub_(self.bias)
        self.scale, balance = self._two(times_vector(self.sums, alpha))  # the scale of the objective
        self.equality_residual = -balance - total
        self.products = self.values[:2] * self.values[2:]
        self.complementarity = self.total(self.products)

    def solved(self, gap: float) -> Number:
        """Where rounding keeps the residuals from shrinking, the complementarity alone decides."""
        scale = self.scale
        closed = (self.complementarity <= gap * scale) | self.stuck
        if closed is False:
            return False
        _, _, lower, upper = self.values
        dual_residual = (self.y * self.miss).add_(lower).sub_(upper)
        small = (dual_residual.abs().amax(-1, keepdim=True) <= gap) & (
            abs(self.equality_residual) <= gap * scale
        )
        solved = closed & (small | (self.complementarity <= DECIDES * gap * scale) | self.stuck)
        return bool(solved) if self.single else solved

    def far_from(self, gap: float) -> bool:
        """Whether no machine has come near a relative gap yet."""
        return bool((self.complementarity > gap * self.scale).all())

    def relative_gap(self) -> Number:
        """The duality gap, relative to the sum of alpha."""
        terms = gap_terms(self.values[0], -self.y * self.miss, self.box)
        return (self.total(terms) + abs(self.bias * self.equality_residual)) / self.scale

    def settled(self, total: Number) -> tuple[Tensor, Tensor]:
        """Mask of variables whose multiplier outweighs their distance to the bound by far, (..., m).

        None of a machine whose others could not make y^T alpha, with `total` from elsewhere, 0: some have
        settled at the wrong bound. And alpha * y of all at the bounds that the multipliers choose, (..., m).
        """
        X, W = self.values[:2], self.values[2:]
        gone, signed = (W > SETTLED * X).any(0), self.box * self.y
        at_bound = signed.masked_fill(W[0] > W[1], 0)
        needed = -total - (at_bound * gone).sum(-1, keepdim=True)
        rest = signed.masked_fill_(gone, 0)
        low, high = (x.sum(-1, keepdim=True) for x in (rest.clamp_max(0), rest.clamp_min(0)))
        return gone & (low < needed) & (needed < high), at_bound

    def step(self, system: Dense | LowRank | Rough) -> None:
        """Predict, centre, correct, and go SHORT_OF_BOUND of the way to the nearest bound.

        A machine whose factorisation fails is stuck: its sets are as clear as rounding lets them be.
        """
        X, W = self.values[:2], self.values[2:]
        slope = W / X
        regular = system.factor(slope.sum(0))
        if isinstance(regular, Tensor):
            self.stuck = self.stuck | ~regular[:, None]
        elif not regular:
            self.stuck = True
            return
        sides = self.sides / X
        both = system.solve(self.rhs)
        sum_x, total = self._two(both.sum(-1))
        x, eta = both.unbind(-2)
        r = sides * self._plus(x, (self.equality_residual - sum_x) / total, eta)
        change = torch.addcmul(r, r, r)  # -dX dW, relative to the products
        t = self._longest_predicted(r)
        after = 1 - t - t * t * self._dot(self.products, change) / self.complementarity
        centre = self.complementarity / (2 * X.shape[-1]) * ((after + abs(after)) / 2) ** 3
        target = self._plus_ratio(change, centre, self.products)  # E / (X W)
        push = W * target
        rhs = torch.addcmul(self.miss, self.y, push[0] - push[1])
        x = system.solve(rhs[..., None, :])[..., 0, :]
        d_bias = (self.total(x) - self.equality_residual) / total
        r = sides * self._plus(x, -d_bias, eta)
        relative = torch.cat([r, target.sub_(r).sub_(1)])
        t = SHORT_OF_BOUND * self._longest_step(relative)
        values = torch.addcmul(self.values, self.values, relative.mul_(t))
        bias = self.bias + t * d_bias
        torch.sub(self.box, values[0], out=values[1])
        if not self.single:
            self.stuck = self.stuck | t.isnan()
            values = torch.where(self.stuck, self.values, values)
            bias = torch.where(self.stuck, self.bias, bias)
        self.values, self.bias = values, bias

    def _longest_step(self, relative: Tensor) -> Number:
        """The longest t <= 1 with 1 + t d >= 0 for all relative changes d, (l, m) or (l, B, m)."""
        if self.single:
            return -1 / min(float(relative.amin()), -1.0)
        return -1 / relative.amin((0, -1)).clamp_max_(-1.0)[:, None]

    def _longest_predicted(self, r: Tensor) -> Number:
        """`_longest_step` for the predictor, whose relative changes are r and -1 - r."""
        if self.single:
            least, most = torch.aminmax(r)
            return -1 / min(float(least), -1 - float(most), -1.0)
        least, most = r.amin((0, -1)), r.amax((0, -1))
        return -1 / torch.minimum(least, -1 - most).clamp_max_(-1.0)[:, None]

    def _two(self, x: Tensor) -> tuple[Number, Number]:
        """The two numbers of each machine, (..., 2)."""
        if self.single:
            first, second = x.tolist()
            return first, second
        return x[:, :1], x[:, 1:]

    def _dot(self, x: Tensor, z: Tensor) -> Number:
        """The sum of x z, (2, m) or (2, B, m), over all but the machines."""
        return float(torch.dot(x.view(-1), z.view(-1))) if self.single else self.total(x * z)

    def total(self, x: Tensor) -> Number:
        """The sum over all but the machines, of (..., m) or (2, ..., m)."""
        if self.single:
            return float(x.sum())
        return x.sum(-1, keepdim=True) if x.ndim == 2 else x.sum((0, 2))[:, None]

    def _plus(self, x: Tensor, t: Number, d: Tensor) -> Tensor:
        """x + t d."""
        return torch.add(x, d, alpha=t) if self.single else torch.addcmul(x, t, d)

    def _plus_ratio(self, x: Tensor, t: Number, d: Tensor) -> Tensor:
        """x + t / d."""
        return torch.addcdiv(x, self.ones, d, value=t) if self.single else torch.addcdiv(x, t, d)
