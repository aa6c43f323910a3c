"""Search by gradients: L-BFGS in a box, many runs at once, each with a line search of its own.

Note [runs in step]
Every run holds a point, a direction and a step length, and asks for one trial point at a time; the trial
points of all runs are one batch, with gradients. A run whose trial point descends enough (Armijo) moves
there and takes the direction that L-BFGS says; one whose does not shortens its step, by a parabola through
what it knows. So no run waits for the line search of another, and every evaluation is used. A line search is
over where a shorter step could gain no more than the rounding of the value.

Parameters at a bound that their gradient points out of are held there; a step is cut at the box.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from torchloo.search.objective import Objective, Outset

__all__ = ["descend"]

_MEMORY = 10  # pairs that L-BFGS remembers
_FIRST = 0.5  # the largest change of a number in the first step, in its unit
_LONGEST = 2.0  # the same in any step: a factor 7.4 in a positive parameter
_SHORTEST = 1e-10
_ARMIJO = 1e-4


@dataclass
class _Runs:
    """The state of R runs."""

    x: Tensor
    f: Tensor
    g: Tensor
    lower: Tensor
    upper: Tensor
    unit: Tensor
    s: Tensor
    """Steps, newest last, (_MEMORY, R, p); zeros where there are none."""
    z: Tensor
    """Changes of the gradient, likewise."""
    step: Tensor
    """Step lengths, (R,)."""
    idle: Tensor
    """How many steps in a row brought next to nothing, (R,)."""
    reach: Tensor
    """The largest change of a number in a step along the gradient itself, in its unit, (R,)."""
    direction: Tensor
    rounding: float
    """Relative change of a value that may be rounding."""

    def free(self) -> Tensor:
        """Which numbers are not held at a bound, (R, p)."""
        held = ((self.x <= self.lower) & (self.g > 0)) | ((self.x >= self.upper) & (self.g < 0))
        return ~held

    def slope(self) -> Tensor:
        """The largest entry of the projected gradient, in units, (R,)."""
        return (self.g * self.unit * self.free()).abs().amax(-1)

    def turn(self, which: Tensor) -> None:
        """A new direction for the runs `which`: L-BFGS, or steepest descent where that does not descend."""
        free, metric = self.free(), self.unit.square()
        direction = -_two_loops(self.g * free, self.s, self.z, metric) * free
        steepest = -metric * self.g * free
        known = self.s.abs().amax((0, -1)) > 0  # (R,)
        descent = (direction * self.g).sum(-1)
        enough = descent < -1e-8 * _norm(direction) * _norm(self.g * free)
        good = (known & enough).unsqueeze(-1)
        size = ((steepest / self.unit).abs().amax(-1, keepdim=True)).clamp(min=1e-300)
        direction = torch.where(good, direction, steepest * (self.reach.unsqueeze(-1) / size))
        longest = (direction / self.unit).abs().amax(-1, keepdim=True)
        direction = direction * (_LONGEST / longest.clamp(min=_LONGEST))
        self.direction = torch.where(which.unsqueeze(-1), direction, self.direction)
        self.step = torch.where(which, torch.ones_like(self.step), self.step)

    def forget(self, which: Tensor) -> None:
        """Drop what L-BFGS remembers of the runs `which`."""
        keep = (~which).unsqueeze(-1)
        self.s, self.z = self.s * keep, self.z * keep


def _norm(v: Tensor) -> Tensor:
    return torch.linalg.vector_norm(v, dim=-1)


def _two_loops(g: Tensor, s: Tensor, z: Tensor, metric: Tensor) -> Tensor:
    """H g for the inverse Hessian H that the pairs s, z (m, R, p) describe (Nocedal and Wright 2006, 7.4)."""
    products = (s * z).sum(-1)  # (m, R)
    rho = torch.where(products > 0, 1 / products.clamp(min=1e-300), 0.0)
    q, alphas = g, []
    for i in reversed(range(len(s))):
        alpha = rho[i] * (s[i] * q).sum(-1)
        q = q - alpha.unsqueeze(-1) * z[i]
        alphas.append(alpha)
    last = (z[-1] * metric * z[-1]).sum(-1)
    gamma = torch.where(last > 0, products[-1] / last.clamp(min=1e-300), 1.0)
    q = gamma.unsqueeze(-1) * metric * q
    for i, alpha in enumerate(reversed(alphas)):
        beta = rho[i] * (z[i] * q).sum(-1)
        q = q + (alpha - beta).unsqueeze(-1) * s[i]
    return q


def descend(objective: Objective, outset: Outset) -> None:
    """Minimise from R starts, each in its box; the objective keeps the best.

    A run stops when the projected gradient falls below `tolerance` of the value, when three steps in a row
    gain less than `tolerance` of it, when no step along the gradient itself descends, or after so many
    `evaluations`.
    """
    start, problem, box, unit, evaluations, tolerance, rounding = outset
    tolerance = max(tolerance, rounding)
    f, g = objective(start, problem, gradient=True)
    memory = start.new_zeros(_MEMORY, *start.shape)
    blank = torch.zeros_like(f)
    state = (start, f, g, box[0], box[1], unit, memory, memory, blank, blank, blank + _FIRST)
    runs = _Runs(*state, torch.zeros_like(g), rounding)
    active = f.isfinite()
    runs.turn(active)
    for _ in range(evaluations - 1):
        active = active & (runs.slope() > tolerance * runs.f.abs())
        if not bool(active.any()):
            return
        _advance(objective, runs, problem, active, tolerance)
        active = active & (runs.idle < 3) & (runs.step > _SHORTEST)


def _advance(objective: Objective, runs: _Runs, problem: Tensor, active: Tensor, tolerance: float) -> None:
    """One trial point for every active run."""
    trial = torch.clamp(runs.x + runs.step.unsqueeze(-1) * runs.direction, runs.lower, runs.upper)
    f, g = runs.f.clone(), runs.g.clone()
    f[active], g[active] = objective(trial[active], problem[active], gradient=True)
    moved = trial - runs.x
    expected = (runs.g * moved).sum(-1)
    accepted = active & (expected < 0) & (f <= runs.f + _ARMIJO * expected) & g.isfinite().all(-1)
    small = runs.f - f <= tolerance * runs.f.abs()
    runs.idle = torch.where(accepted, torch.where(small, runs.idle + 1, 0), runs.idle)
    _remember(runs, accepted, moved, g - runs.g)
    refused = active & ~accepted
    _shorten(runs, refused, f, expected)
    column = accepted.unsqueeze(-1)
    runs.x, runs.f = torch.where(column, trial, runs.x), torch.where(accepted, f, runs.f)
    runs.g = torch.where(column, g, runs.g)
    lost = refused & (runs.step <= _SHORTEST) & (runs.s.abs().amax((0, -1)) > 0)
    runs.forget(lost)  # once more, along the gradient
    runs.turn(accepted | lost)


def _remember(runs: _Runs, accepted: Tensor, moved: Tensor, change: Tensor) -> None:
    """Keep the pairs of the accepted steps along which the gradient grew.

    Where it fell, the valley is not yet in sight and what is remembered says nothing of it: the run goes
    on along the gradient, twice as far each time.
    """
    curved = (moved * change).sum(-1) > 1e-10 * _norm(moved) * _norm(change)
    over = accepted & ~curved
    length = (2 * (moved / runs.unit).abs().amax(-1)).clamp(_FIRST, _LONGEST)
    runs.reach = torch.where(over, length, torch.where(accepted, _FIRST, runs.reach))
    runs.forget(over)
    keep = (accepted & curved).unsqueeze(-1)
    runs.s = torch.where(keep, torch.cat([runs.s[1:], moved.unsqueeze(0)]), runs.s)
    runs.z = torch.where(keep, torch.cat([runs.z[1:], change.unsqueeze(0)]), runs.z)


def _shorten(runs: _Runs, refused: Tensor, f: Tensor, expected: Tensor) -> None:
    """The step at the bottom of the parabola through value, slope and trial value, a tenth to a half.

    Where it would gain no more than rounding, none: the slope promises more than any step gains.
    """
    rise = f - runs.f - expected
    factor = torch.where(rise > 0, -expected / (2 * rise), 0.5).nan_to_num(0.1).clamp(0.1, 0.5)
    factor = torch.where(-expected * factor > runs.rounding * runs.f.abs(), factor, 0.0)
    runs.step = torch.where(refused, runs.step * factor, runs.step)
