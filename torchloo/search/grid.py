"""Search over a grid: the regularisation by one decomposition, all other axes in batches."""

import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from torchloo.search.along_reg import has_path
from torchloo.search.objective import Objective
from torchloo.search.parameters import Entry, Space

__all__ = ["Axes", "default_axes", "given_axes", "scan"]

Axes = list[tuple[Entry, Tensor]]
"""Parameters and the logarithms of their values, (V, size of the parameter)."""


def given_axes(space: Space, grid: Mapping[str, Iterable[Any]]) -> Axes:
    """The axes of a grid given by name; a number applies to all entries of a vector."""
    axes = []
    for name, listed in grid.items():
        entry = space.find(name, "grid")
        size = max(1, math.prod(entry.shape))
        try:
            points = torch.stack([_vector(value, size) for value in listed])
        except (TypeError, ValueError, RuntimeError):
            raise ValueError(
                f"{space.function}: grid of {name} must be a list of numbers or of {size} numbers each, "
                f"got {listed!r}"
            ) from None
        valid = (points > 0) & (points < torch.inf)
        if not bool(valid.all()):
            raise ValueError(f"{space.function}: grid of {name} must be positive and finite")
        axes.append((entry, points.log()))
    return axes


def _vector(value: Any, size: int) -> Tensor:
    """A number, or `size` of them, as a vector (size,)."""
    tensor = torch.as_tensor(value, dtype=torch.float64, device="cpu").detach()
    return tensor.reshape(-1).expand(size)


def default_axes(space: Space) -> Axes:
    """Steps around the first start: 25 half decades of reg or C, 9 factors of 2 of other parameters."""
    axes = []
    for entry in space.entries:
        if entry.log:
            if entry.kernel:
                steps = torch.arange(-4, 5, device="cpu") * math.log(2)
            else:
                steps = torch.arange(-12, 13, device="cpu") * math.log(10) / 2
            axes.append((entry, steps.double().unsqueeze(-1)))
    points = math.prod(len(values) for _, values in axes)
    if points > 1e5:
        raise ValueError(
            f"{space.function}: the default grid of {len(axes)} parameters would have {points} points; "
            "give grid= with fewer, or use search='gradient'"
        )
    return axes


def scan(objective: Objective, first: Tensor, axes: Axes, relative: bool, box: Tensor) -> None:
    """Evaluate every point of the grid in each problem; the objective keeps the best.

    Args:
        first: the first start of each problem, (P, p); parameters without an axis stay there.
        relative: whether the axes hold steps from the first start, as the default ones do.
        box: (2, P, p), to which the default grid is clipped.
    """
    by_path = [axis for axis in axes if has_path(objective.space, objective.score, axis[0])]
    others = [axis for axis in axes if axis not in by_path]
    candidates = []
    for values in itertools.product(*(points for _, points in others)):
        theta = first.clone()
        for (entry, _), value in zip(others, values, strict=True):
            theta[:, entry.part] = theta[:, entry.part] * relative + value
        candidates.append(torch.clamp(theta, box[0], box[1]) if relative else theta)
    theta = torch.stack(candidates, 1)  # (P, G, p)
    problem = torch.arange(len(first), device=first.device).repeat_interleave(len(candidates))
    if not by_path:
        objective(theta.flatten(0, 1), problem)
        return
    entry, logs = by_path[0]
    if not relative:
        objective.along_reg(theta.flatten(0, 1), problem, logs.exp())
        return
    for number, start in enumerate(first):  # every problem has its own regularisations
        low, high = box[:, number, entry.part]
        regs = torch.clamp(start[entry.part] + logs, low, high).exp()
        problem = torch.full((len(candidates),), number, device="cpu")
        objective.along_reg(theta[number], problem, regs)
