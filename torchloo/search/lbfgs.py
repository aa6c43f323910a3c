"""Search by gradients: L-BFGS in a box, many runs at once, each with a line search of its own.

Note [runs in step]
Every run holds a point, a direction and a step length, and evaluates one trial point at a time; the trial
points of all runs are one batch, with gradients. A run whose trial point decreases the objective enough
(Armijo) moves there and takes the next L-BFGS direction; otherwise it shortens its step, by a parabola
through the known values. So no run waits for the line search of another, and every evaluation is used. A
line search ends where a shorter step could gain no more than the rounding error of the value.

Parameters at a bound that their negative gradient points out of are held there; steps are clipped to the box.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from torchloo.search.objective import Objective, RunSetup

__all__ = ["minimise"]

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
    """Number of consecutive steps with almost no gain, (R,)."""
    reach: Tensor
    """The largest change of a number in a step along the gradient itself, in its unit, (R,)."""
    direction: Tensor
    rounding: float
    """Relative rounding error of a value."""

    def free(self) -> Tensor:
        """Which numbers are not held at a bound, (R, p)."""
        held_below = (self.x <= self.lower) & (self.g > 0)
        held_above = (self.x >= self.upper) & (self.g < 0)
        return ~(held_below | held_above)

    def slope(self) -> Tensor:
        """The largest entry of the projected gradient, in units, (R,)."""
        return (self.g * self.unit * self.free()).abs().amax(-1)

    def turn(self, which: Tensor) -> None:
        """A new direction for the runs `which`: L-BFGS, or steepest descent where that does not minimise."""
        free = self.free()
        metric = self.unit.square()
        direction = -_two_loops(self.g * free, self.s, self.z, metric) * free
        steepest = -metric * self.g * free
        descent = (direction * self.g).sum(-1)
        descends = descent < -1e-8 * _norm(direction) * _norm(self.g * free)
        use_lbfgs = (self.remembers() & descends).unsqueeze(-1)
        length = self.length(steepest).clamp(min=1e-300)
        scaled = steepest * (self.reach.unsqueeze(-1) / length)
        direction = torch.where(use_lbfgs, direction, scaled)
        direction = direction * (_LONGEST / self.length(direction).clamp(min=_LONGEST))
        self.direction = torch.where(which.unsqueeze(-1), direction, self.direction)
        self.step = torch.where(which, torch.ones_like(self.step), self.step)

    def length(self, direction: Tensor) -> Tensor:
        """The largest change of a number, in its unit, (R, 1)."""
        return (direction / self.unit).abs().amax(-1, keepdim=True)

    def remembers(self) -> Tensor:
        """Runs that have pairs of steps and gradients, (R,)."""
        return self.s.abs().amax((0, -1)) > 0

    def forget(self, which: Tensor) -> None:
        """Drop the pairs of the runs `which`."""
        keep = (~which).unsqueeze(-1)
        self.s = self.s * keep
        self.z = self.z * keep


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


def minimise(objective: Objective, setup: RunSetup) -> None:
    """Minimise from R starts, each in its box; the objective keeps the best.

    A run stops when the projected gradient falls below `tolerance` of the value, when three steps in a row
    gain less than `tolerance` of it, when no step along the gradient itself descends, or after this many
    `evaluations`.
    """
    start, problem, box, unit, evaluations, tolerance, rounding = setup
    tolerance = max(tolerance, rounding)
    f, g = objective(start, problem, gradient=True)
    memory = start.new_zeros(_MEMORY, *start.shape)
    runs = _Runs(
        x=start,
        f=f,
        g=g,
        lower=box[0],
        upper=box[1],
        unit=unit,
        s=memory,
        z=memory,
        step=torch.zeros_like(f),
        idle=torch.zeros_like(f),
        reach=torch.full_like(f, _FIRST),
        direction=torch.zeros_like(g),
        rounding=rounding,
    )
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
    ahead = runs.x + runs.step.unsqueeze(-1) * runs.direction
    trial = torch.clamp(ahead, runs.lower, runs.upper)
    f, g = runs.f.clone(), runs.g.clone()
    f[active], g[active] = objective(trial[active], problem[active], gradient=True)
    moved = trial - runs.x
    expected = (runs.g * moved).sum(-1)
    decreased = (expected < 0) & (f <= runs.f + _ARMIJO * expected)
    accepted = active & decreased & g.isfinite().all(-1)
    small_gain = runs.f - f <= tolerance * runs.f.abs()
    idle = torch.where(small_gain, runs.idle + 1, 0)
    runs.idle = torch.where(accepted, idle, runs.idle)
    _remember(runs, accepted, moved, g - runs.g)
    rejected = active & ~accepted
    _shorten(runs, rejected, f, expected)
    column = accepted.unsqueeze(-1)
    runs.x = torch.where(column, trial, runs.x)
    runs.f = torch.where(accepted, f, runs.f)
    runs.g = torch.where(column, g, runs.g)
    restarted = rejected & (runs.step <= _SHORTEST) & runs.remembers()
    runs.forget(restarted)  # they go on along the gradient
    runs.turn(accepted | restarted)


def _remember(runs: _Runs, accepted: Tensor, moved: Tensor, change: Tensor) -> None:
    """Keep the pairs of accepted steps with positive curvature.

    Where the curvature is negative, the pairs do not describe the minimum ahead: the run forgets them and
    goes on along the gradient, twice as far each time.
    """
    curvature = (moved * change).sum(-1)
    curved = curvature > 1e-10 * _norm(moved) * _norm(change)
    not_curved = accepted & ~curved
    doubled = (2 * runs.length(moved)[..., 0]).clamp(_FIRST, _LONGEST)
    reach = torch.where(accepted, _FIRST, runs.reach)
    runs.reach = torch.where(not_curved, doubled, reach)
    runs.forget(not_curved)
    keep = (accepted & curved).unsqueeze(-1)
    steps = torch.cat([runs.s[1:], moved.unsqueeze(0)])
    changes = torch.cat([runs.z[1:], change.unsqueeze(0)])
    runs.s = torch.where(keep, steps, runs.s)
    runs.z = torch.where(keep, changes, runs.z)


def _shorten(runs: _Runs, rejected: Tensor, f: Tensor, expected: Tensor) -> None:
    """Shorten steps to the minimum of the parabola through value, slope and trial value, 0.1 to 0.5 of it.

    A step that would gain no more than rounding becomes 0: the slope promises more than any step gains.
    """
    rise = f - runs.f - expected
    factor = torch.where(rise > 0, -expected / (2 * rise), 0.5)
    factor = factor.nan_to_num(0.1).clamp(0.1, 0.5)
    gains = -expected * factor > runs.rounding * runs.f.abs()
    factor = torch.where(gains, factor, 0.0)
    runs.step = torch.where(rejected, runs.step * factor, runs.step)
