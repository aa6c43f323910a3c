"""First solutions of the SVM dual by an interior point, good enough to read the active sets off."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchloo.svm.low_rank import low_rank_factor
from torchloo.svm.systems import Dense, LowRank

__all__ = ["Interior", "first_solutions", "interior_point", "to_the_last_digit"]

_SETTLED = 30.0  # a multiplier so many times the distance to its bound has won
_WORTH_FACTORING = 255  # variables: below, nothing is gained
_WORTH_SAMPLING = 1100  # variables: below, the plain interior point is as fast
_NEAR = 0.5  # margins above 0 that a better solution may well bring down
_WORTH_SHRINKING = 300  # live variables
_PATIENCE = 8  # steps that may fail to lower the gap before rounding is known to hold it up


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


def first_solutions(K: Tensor, y: Tensor, box: Tensor) -> Interior:
    """Interior points of B machines that share K (m, m) and y (m,) and differ in their boxes (B, m).

    Where K has low rank all together, else one after another; for large K on the variables that a
    third of them finds interesting.
    """
    factor = low_rank_factor(K) if len(y) > _WORTH_FACTORING else None
    if factor is not None and len(box) > 1:
        return interior_point(LowRank(factor), y, box)
    system = Dense(K) if factor is None else LowRank(factor)
    sample = factor is None and len(y) > _WORTH_SAMPLING
    each = (_by_sample(K, y, x) if sample else interior_point(system, y, x) for x in box)
    return Interior(*(torch.stack(field) for field in zip(*each, strict=True)))


def _by_sample(K: Tensor, y: Tensor, box: Tensor) -> Interior:
    """One machine on the variables of interest.

    The SVM of a third of them, its boxes three times as large, shows which margins are far above 0;
    the rest is solved, and whatever violates its margin then comes in.
    """
    sample = torch.arange(0, len(y), 3, device=y.device)
    if bool((y[sample] == y[sample[0]]).all()):
        return interior_point(Dense(K), y, box)
    rough = interior_point(Dense(K[sample][:, sample]), y[sample], 3 * box[sample], gap=1e-3)
    margin = y * (K[:, sample] @ (rough.alpha * y[sample]) + rough.bias) - 1
    live = margin < _NEAR
    none = torch.zeros_like(box)
    while True:
        index = live.nonzero()[:, 0]
        part = interior_point(Dense(K[index][:, index]), y[index], box[index])
        margin = y * (K[:, index] @ (part.alpha * y[index]) + part.bias) - 1
        missed = ~live & (margin < 1e-6)
        if not bool(missed.any()):
            alpha, upper = (none.index_copy(0, index, x) for x in (part.alpha, part.upper))
            return Interior(alpha, (none + 1).index_copy(0, index, part.lower), upper, part.bias)
        live |= margin < _NEAR / 3


def interior_point(
    system: Dense | LowRank, y: Tensor, box: Tensor, gap: float = 1e-8, steps: int = 60
) -> Interior:
    """Solve one SVM dual, or several, to a relative gap by Mehrotra's predictor and corrector.

        max sum alpha - 1/2 |sum alpha_i y_i phi_i|^2,  y^T alpha = 0,  0 <= alpha <= box

    Works on a = alpha * y, so that the Newton matrix is K + diag(theta) and K is never copied with
    signs. The number of steps (about 15) hardly depends on the box, unlike that of an SMO. Of several
    machines each leaves when it is solved. Variables of a single one that are plainly on their way to
    a bound are put there, and the rest goes on without them; whoever asks for more than the sets must
    check the margins of all (exact.py does).

    Args:
        system: K with mean diagonal 1, (m, m), or its factor.
        y: labels, (m,).
        box: upper bounds, (m,); (B, m) with a factor.
        gap: relative duality gap to stop at.
        steps: the most Newton steps.

    Cost m^3 / 3 a step, or m p^2 for K of rank p; less once variables have settled. Memory: one
    copy of K, or of the factor for each machine. Reference: Fine and Scheinberg 2001.
    """
    solve = _together if box.ndim > 1 else _alone
    return solve(system, _Iterate.start(y, box), gap, steps)


def to_the_last_digit(K: Tensor, y: Tensor, box: Tensor, gap: float = 1e-14, steps: int = 100) -> Interior:
    """The point of one machine with the least duality gap: near the end rounding drives them about."""
    system, point = Dense(K), _Iterate.start(y, box)
    best, least, waited = point.interior(), torch.inf, 0
    for _ in range(steps):
        point.look(system)
        now = point.relative_gap()
        best, least, waited = (point.interior(), now, 0) if now < least else (best, least, waited + 1)
        if least <= gap or waited > _PATIENCE or point.stuck:
            break
        point.step(system)
    return best


def _together(system: Dense | LowRank, point: "_Iterate", gap: float, steps: int) -> Interior:
    """Several machines; one that is solved leaves."""
    whole = point.interior()
    machine = torch.arange(len(point.box), device=point.y.device)
    for _ in range(steps):
        point.look(system)
        solved = point.solved(gap)[:, 0]
        if bool(solved.any()):
            whole = Interior(
                *(old.index_copy(0, machine, x) for old, x in zip(whole, point.interior(), strict=True))
            )
            going = (~solved).nonzero()[:, 0]
            if not len(going):
                break
            machine, point = machine[going], point.take(going)
            point.look(system)
        point.step(system)
    return Interior(*(old.index_copy(0, machine, x) for old, x in zip(whole, point.interior(), strict=True)))


def _alone(system: Dense | LowRank, point: "_Iterate", gap: float, steps: int) -> Interior:
    """One machine; variables that have settled leave."""
    whole = point.interior()
    live = torch.arange(len(point.y), device=point.y.device)
    pull, total = None, 0.0  # u and y^T alpha of settled variables
    for _ in range(steps):
        point.look(system, pull, total)
        if point.solved(gap):
            break
        point.step(system)
        if len(live) <= _WORTH_SHRINKING:
            continue
        settled = point.settled()
        if len(live) // 3 < int(settled.sum()) < len(live):  # someone must be left to go on
            whole = _entered(whole, live, point)
            _, _, lower, upper = point.values
            a = torch.where(lower > upper, 0.0, point.box) * point.y * settled
            keep = (~settled).nonzero()[:, 0]
            u = system.product(a) if pull is None else system.product(a) + pull
            pull, total = u[keep], total + float(a.sum())
            live, system, point = live[keep], system.take(keep), point.without(keep)
    return _entered(whole, live, point)


def _entered(whole: Interior, live: Tensor, point: "_Iterate") -> Interior:
    """The live variables of a machine entered into the whole solution."""
    new = point.interior()
    alpha, lower, upper = (old.index_copy(0, live, x) for old, x in zip(whole[:3], new[:3], strict=True))
    return Interior(alpha, lower, upper, new.bias)


Number = Any
"""A number of one machine, a float; those of several, (B, 1)."""


class _Iterate:
    """The point of one machine or of several, its residuals, and the Newton step from it.

    Note [Newton step]
    X = (alpha, box - alpha) and their multipliers W = (lower, upper) are stacked as `values`,
    (4, m) or (4, B, m). A step that should change the products X W by E - X W solves, with theta = sum
    of W / X,

        (K + theta) x = (y - u - b) + y * ((E / X)_1 - (E / X)_2),    (K + theta) eta = 1,
        d_b = (1^T x - equality residual) / 1^T eta,   d_alpha = y * (x - d_b eta),
        dX = (d_alpha, -d_alpha),   dW = E / X - W - (W / X) dX.

    The predictor has E = 0, the corrector E = centre - dX dW of the predictor.
    """

    def __init__(self, y: Tensor, box: Tensor, values: Tensor, bias: Number, stuck: Number) -> None:
        self.y, self.box, self.values, self.bias, self.stuck = y, box, values, bias, stuck
        self.single, self.ones = box.ndim == 1, torch.ones_like(box)
        self.sides = torch.stack([y, -y]) if self.single else torch.stack([y, -y])[:, None]

    @classmethod
    def start(cls, y: Tensor, box: Tensor) -> "_Iterate":
        """A fifth of the way into the box; of ten starts tried this took the fewest steps."""
        one = torch.ones_like(box)
        values = torch.stack([0.2 * box, 0.8 * box, one, one])
        if box.ndim == 1:
            return cls(y, box, values, 0.0, False)
        zero = torch.zeros_like(box[:, :1])
        return cls(y, box, values, zero, zero > 0)

    def interior(self) -> Interior:
        """The point as others see it."""
        alpha, _, lower, upper = self.values
        return Interior(alpha, lower, upper, alpha.new_tensor([self.bias]) if self.single else self.bias)

    def take(self, rows: Tensor) -> "_Iterate":
        """The machines at `rows`."""
        return _Iterate(self.y, self.box[rows], self.values[:, rows], self.bias[rows], self.stuck[rows])

    def without(self, keep: Tensor) -> "_Iterate":
        """The point of one machine without the variables that have settled."""
        return _Iterate(self.y[keep], self.box[keep], self.values[:, keep], self.bias, self.stuck)

    def look(self, system: Dense | LowRank, pull: Tensor | None = None, total: float = 0.0) -> None:
        """Residuals, with what the settled variables add to K (alpha * y) and to y^T alpha."""
        a = self.values[0] * self.y
        u = system.product(a)
        self.miss = self.y - (u if pull is None else u + pull) - self.bias
        self.equality_residual = -self._sum(a) - total
        self.complementarity = self._sum(self.values[:2] * self.values[2:])

    def solved(self, gap: float) -> Number:
        """Rounding may hold residuals up for ever, but not the complementarity: then that decides."""
        alpha, _, lower, upper = self.values
        scale = self._sum(alpha)  # of the objective
        closed = (self.complementarity <= gap * scale) | self.stuck
        if closed is False:
            return False
        dual_residual = (self.y * self.miss).add_(lower).sub_(upper)
        small = (dual_residual.abs().amax(-1, keepdim=True) <= gap) & (
            abs(self.equality_residual) <= gap * scale
        )
        return closed & (small | (self.complementarity <= 1e-2 * gap * scale) | self.stuck)

    def relative_gap(self) -> float:
        """The duality gap of one machine, relative to the sum of alpha."""
        short = self.y * self.miss  # of the margin
        terms = self.values[0] * (-short).clamp_min(0) + self.values[1] * short.clamp_min(0)
        return (self._sum(terms) + abs(self.bias * self.equality_residual)) / self._sum(self.values[0])

    def settled(self) -> Tensor:
        """Variables whose multiplier outweighs their distance to the bound by far."""
        return (self.values[2:] > _SETTLED * self.values[:2]).any(0)

    def step(self, system: Dense | LowRank) -> None:
        """Predict, centre, correct, and go 0.995 of the way to the nearest bound.

        A machine whose factorisation fails is stuck: its sets are as clear as rounding lets them be.
        """
        X, W = self.values[:2], self.values[2:]
        slope = W / X
        regular = system.factor(slope.sum(0))
        if not bool(regular.all()):
            self.stuck = self.single or self.stuck | ~regular[:, None]
            if self.single:
                return
        x, eta = system.solve(torch.stack([self.miss, self.ones], -2)).unbind(-2)
        response = eta, self._sum(eta)
        d, _ = self._direction(x, response, slope, -W)
        t = self._longest_step(d)
        product = d[:2] * d[2:]
        # X dW + W dX = -X W, so that the products after a step t need no new vectors.
        after = 1 - t + t * t * self._sum(product) / self.complementarity
        centre = self.complementarity / (2 * X.shape[-1]) * ((after + abs(after)) / 2) ** 3
        push = (centre - product).div_(X)
        rhs = torch.addcmul(self.miss, self.y, push[0] - push[1])
        d, d_bias = self._direction(system.solve(rhs[..., None, :])[..., 0, :], response, slope, push - W)
        t = 0.995 * self._longest_step(d)
        values, bias = self._plus(self.values, t, d), self.bias + t * d_bias
        values[1] = self.box - values[0]
        if not self.single:
            values, bias = (
                torch.where(self.stuck, self.values, values),
                torch.where(self.stuck, self.bias, bias),
            )
        self.values, self.bias = values, bias

    def _direction(
        self, x: Tensor, response: tuple[Tensor, Number], slope: Tensor, push: Tensor
    ) -> tuple[Tensor, Number]:
        """Change of `values` and of the bias, Note [Newton step]; the response is eta and its sum."""
        eta, total = response
        d_bias = (self._sum(x) - self.equality_residual) / total
        dX = self.sides * self._plus(x, -d_bias, eta)
        return torch.cat([dX, torch.addcmul(push, slope, dX, value=-1)]), d_bias

    def _longest_step(self, d: Tensor) -> Number:
        """The longest t <= 1 that keeps all values + t d nonnegative."""
        ratio = d / self.values
        if self.single:
            return -1 / min(float(ratio.min()), -1.0)
        return -1 / ratio.amin((0, 2)).clamp_max_(-1.0)[:, None]

    def _sum(self, x: Tensor) -> Number:
        """The sum over all but the machines."""
        if self.single:
            return float(x.sum())
        return (x if x.ndim == 2 else x.sum(0)).sum(1, keepdim=True)

    def _plus(self, x: Tensor, t: Number, d: Tensor) -> Tensor:
        """x + t d."""
        return torch.add(x, d, alpha=t) if self.single else torch.addcmul(x, t, d)
