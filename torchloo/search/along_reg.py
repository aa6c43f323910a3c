"""Search along a path: the regularisation, where it is all there is to choose, without gradients.

Note [search along a path]
All regularisations of a box, half a decade apart, come from one decomposition, so the search sees the whole
box. Then it looks between the neighbours of the best: a criterion of held-out rows is a smooth function of
log reg (its poles, at reg = -w for eigenvalues w of the kernel matrix, are at least pi away), so that the
polynomial through a few Chebyshev nodes is the criterion to many digits. The search is done where the
criterion agrees with the least value of the polynomial. Where it does not, as with error rates, which are
steps, the search looks between the neighbours of the best again, until these are 1 % apart.
"""

import math

import numpy as np
import torch
from numpy.polynomial import Chebyshev
from torch import Tensor

from torchloo.criteria.score import Score
from torchloo.machine import LeastSquares
from torchloo.search.objective import Objective, Outset
from torchloo.search.parameters import Entry, Space

__all__ = ["has_path", "only_reg", "search_reg"]

_HALF_DECADE = math.log(10) / 2
_NODES = 8  # even, so that none is the best itself
_NARROW = 1e-2  # distance of logarithms at which a search that is not smooth stops


def has_path(space: Space, score: Score, entry: Entry) -> bool:
    """Whether a parameter is the regularisation of a machine that has paths."""
    return isinstance(space.machine, LeastSquares) and entry.name == "reg" and not score.takes_fit


def only_reg(space: Space, score: Score) -> bool:
    """Whether one regularisation, along a path, is all that is to be chosen."""
    return space.size == 1 and has_path(space, score, space.entries[0])


def search_reg(objective: Objective, outset: Outset) -> None:
    """Minimise over the regularisation in each of R boxes, see Note [search along a path].

    The objective keeps the best. At most `evaluations` regularisations are tried for each, those next to its
    start first.
    """
    for start, problem, low, high in zip(outset.start, outset.problem, *outset.box, strict=True):
        _Line(objective, start, problem.reshape(1), outset).search(low.item(), high.item())


class _Line:
    """One problem, and what was tried: logarithms x of regularisations, ascending, and their values f."""

    def __init__(self, objective: Objective, start: Tensor, problem: Tensor, outset: Outset) -> None:
        self.objective, self.start, self.problem = objective, start, problem
        self.left = outset.evaluations
        self.tolerance = max(outset.tolerance, outset.rounding**0.5)  # a factorisation costs digits
        self.x, self.f = np.empty(0), np.empty(0)

    def search(self, low: float, high: float) -> None:
        """Try the box, and then between the neighbours of the best until these say no more."""
        start = self.start.item()
        scan = np.append(_half_decades(start, low), _half_decades(start, high)[1:])
        self.evaluate(scan[abs(scan - start).argsort(kind="stable")])
        while np.isfinite(self.f).any():
            best = int(self.f.argmin())
            low, high = self.x[max(best - 1, 0)], self.x[min(best + 1, len(self.x) - 1)]
            if high - low <= _NARROW or self.left <= _NODES or self.settled(low, high):
                return

    def evaluate(self, logs: np.ndarray) -> np.ndarray:
        """Values of further regularisations, as many as are left to be tried."""
        logs = logs[: self.left]
        regs = torch.from_numpy(np.exp(logs))
        f = self.objective.along_reg(self.start.unsqueeze(0), self.problem, regs)[0].numpy()
        x = np.append(self.x, logs)
        order = x.argsort()
        self.x, self.f, self.left = x[order], np.append(self.f, f)[order], self.left - len(logs)
        return f

    def settled(self, low: float, high: float) -> bool:
        """Try Chebyshev nodes, and where their polynomial is least; whether its value is the one it has."""
        nodes = (low + high + (high - low) * np.cos(np.pi * (np.arange(_NODES) + 0.5) / _NODES)) / 2
        self.evaluate(nodes)
        between = (low <= self.x) & (self.x <= high)
        if not np.isfinite(self.f[between]).all():
            return False
        polynomial = Chebyshev.fit(self.x[between], self.f[between], between.sum() - 1, domain=[low, high])
        stationary = polynomial.deriv().roots().real  # a complex root gives a point like any other
        points = np.append(stationary[(low < stationary) & (stationary < high)], [low, high])
        least = points[polynomial(points).argmin()]
        known = self.f[self.x == least]  # an end of the box, perhaps
        value = known[0] if len(known) else self.evaluate(np.array([least]))[0]
        return bool(abs(value - polynomial(least)) <= self.tolerance * abs(value))


def _half_decades(start: float, end: float) -> np.ndarray:
    """From one logarithm to another in equal steps of half a decade at most."""
    return np.linspace(start, end, 1 + math.ceil(abs(end - start) / _HALF_DECADE - 1e-9))
