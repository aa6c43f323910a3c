"""Search along a path: where the regularisation is the only parameter, without gradients.

Note [search along a path]
All regularisations of a box, half a decade apart, come from one decomposition, so the search covers the whole
box. Then it looks between the neighbours of the best: a criterion of held-out rows is a smooth function of
log reg (its poles, at reg = -w for eigenvalues w of the kernel matrix, are at least pi away), so that the
polynomial through a few Chebyshev nodes approximates the criterion to many digits. The search ends where the
criterion agrees with the minimum of the polynomial. Where it does not, as with error rates, which are
step functions, the search looks between the neighbours of the best again, until these are 1 % apart.
"""

import math

import numpy as np
import torch
from numpy.polynomial import Chebyshev
from torch import Tensor

from torchloo.criteria.score import Score
from torchloo.machine import LeastSquares
from torchloo.search.objective import Objective, RunSetup
from torchloo.search.parameters import Entry, Space

__all__ = ["has_path", "only_reg", "search_reg"]

_HALF_DECADE = math.log(10) / 2
_NODES = 8  # even, so that none is the best itself
_NARROW = 1e-2  # distance of logarithms at which a search that is not smooth stops


def has_path(space: Space, score: Score, entry: Entry) -> bool:
    """Whether a parameter is the regularisation of a machine that has paths."""
    return isinstance(space.machine, LeastSquares) and entry.name == "reg" and not score.takes_fit


def only_reg(space: Space, score: Score) -> bool:
    """Whether the only parameter is one regularisation that has a path."""
    return space.size == 1 and has_path(space, score, space.entries[0])


def search_reg(objective: Objective, setup: RunSetup) -> None:
    """Minimise over the regularisation in each of R boxes, see Note [search along a path].

    The objective keeps the best. At most `evaluations` regularisations are tried for each, those next to its
    start first.
    """
    for start, problem, low, high in zip(setup.start, setup.problem, *setup.box, strict=True):
        line = _Line(objective, start, problem.reshape(1), setup)
        line.search(low.item(), high.item())


class _Line:
    """The evaluations of one problem: logarithms x of regularisations, ascending, and their values f."""

    def __init__(self, objective: Objective, start: Tensor, problem: Tensor, setup: RunSetup) -> None:
        self.objective = objective
        self.start = start
        self.problem = problem
        self.remaining = setup.evaluations
        self.tolerance = max(setup.tolerance, setup.rounding**0.5)  # a factorisation costs digits
        self.x = np.empty(0)
        self.f = np.empty(0)

    def search(self, low: float, high: float) -> None:
        """Evaluate all of the box, then between the neighbours of the best until the search converges."""
        start = self.start.item()
        downwards = _half_decades(start, low)
        upwards = _half_decades(start, high)
        scan = np.append(downwards, upwards[1:])
        nearest_first = abs(scan - start).argsort(kind="stable")
        self.evaluate(scan[nearest_first])
        while np.isfinite(self.f).any():
            best = int(self.f.argmin())
            low = self.x[max(best - 1, 0)]
            high = self.x[min(best + 1, len(self.x) - 1)]
            if high - low <= _NARROW or self.remaining <= _NODES or self.converged(low, high):
                return

    def evaluate(self, logs: np.ndarray) -> np.ndarray:
        """Values of further regularisations, up to the limit of evaluations."""
        logs = logs[: self.remaining]
        regs = torch.from_numpy(np.exp(logs))
        (values,) = self.objective.along_reg(self.start.unsqueeze(0), self.problem, regs)
        f = values.numpy()
        x = np.append(self.x, logs)
        order = x.argsort()
        self.x = x[order]
        self.f = np.append(self.f, f)[order]
        self.remaining -= len(logs)
        return f

    def converged(self, low: float, high: float) -> bool:
        """Fit a polynomial to Chebyshev nodes; whether the criterion agrees with it at its minimum."""
        cosines = np.cos(np.pi * (np.arange(_NODES) + 0.5) / _NODES)
        self.evaluate((low + high + (high - low) * cosines) / 2)
        between = (low <= self.x) & (self.x <= high)
        x, f = self.x[between], self.f[between]
        if not np.isfinite(f).all():
            return False
        polynomial = Chebyshev.fit(x, f, len(x) - 1, domain=[low, high])
        stationary = polynomial.deriv().roots().real  # the real part of a complex root is a point too
        inside = stationary[(low < stationary) & (stationary < high)]
        points = np.append(inside, [low, high])
        minimum = points[polynomial(points).argmin()]
        known = self.f[self.x == minimum]  # an end of the box, perhaps
        if not len(known):
            known = self.evaluate(np.array([minimum]))
        value = known[0]
        return bool(abs(value - polynomial(minimum)) <= self.tolerance * abs(value))


def _half_decades(start: float, end: float) -> np.ndarray:
    """From one logarithm to another in equal steps of half a decade at most."""
    steps = math.ceil(abs(end - start) / _HALF_DECADE - 1e-9)
    return np.linspace(start, end, 1 + steps)
