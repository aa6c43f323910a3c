"""Search without gradients: the simplex of Nelder and Mead (1965), many simplexes at once.

Note [simplexes in step]
All simplexes take their steps together, in at most three batched evaluations: every reflection; for those
that need it, an expansion or a contraction; and for the few where that failed, all points of a shrunken
simplex. The objective is infinite outside the box, and not evaluated there: clipping points to the faces
would flatten the simplex.
"""

import torch
from torch import Tensor

from torchloo.search.objective import Objective, RunSetup

__all__ = ["minimise"]

_STEP = 1.0  # edge of the first simplex, in units: a factor e in a positive parameter
_SMALL = 1e-2  # edge at which a simplex may stop


def minimise(objective: Objective, setup: RunSetup) -> None:
    """Minimise from R starts, each in its box; the objective keeps the best.

    Reflection 1, expansion 2, contraction and shrinkage 1/2. A simplex stops when its values differ by less
    than `tolerance` of the best and its edges are below 1 % of a unit, or after this many `evaluations`.
    """
    start, problem, box, unit, evaluations, tolerance, rounding = setup
    tolerance = max(tolerance, rounding)
    runs, p = start.shape
    simplex = _first_simplex(start.unsqueeze(1), box.unsqueeze(2), unit)  # (R, p + 1, p)
    values, _ = objective(simplex.flatten(0, 1), problem.repeat_interleave(p + 1))
    f = values.view(runs, p + 1)
    used = torch.full((runs,), p + 1, device="cpu")
    while True:
        order = f.argsort(dim=1, stable=True)
        f = f.gather(1, order)
        simplex = simplex.gather(1, order.unsqueeze(-1).expand_as(simplex))
        best = f[:, 0]
        worst = f[:, -1]
        edges = (simplex[:, 1:] - simplex[:, :1]) / unit
        edge = edges.abs().amax((1, 2))
        converged = (worst - best <= tolerance * best.abs()) & (edge <= _SMALL)
        done = converged | best.isinf() | (used >= evaluations)
        active = (~done).nonzero()[:, 0]
        if not len(active):
            return
        boxed = _Boxed(objective, box[:, active])
        simplex[active], f[active], more = _step(boxed, simplex[active], f[active], problem[active])
        used[active] += more


def _first_simplex(start: Tensor, box: Tensor, unit: Tensor) -> Tensor:
    """A step along every axis from starts (R, 1, p); if that leaves the box, to its farther face."""
    lower, upper = box
    step = _STEP * torch.diag(unit)  # (p, p)
    up = (start + step <= upper) | (upper - start >= start - lower)  # (R, p, p)
    corners = start + torch.where(up, step, -step)
    return torch.clamp(torch.cat([start, corners], 1), lower, upper)


class _Boxed:
    """An objective that is infinite outside the boxes (2, A, p) of its A runs."""

    def __init__(self, objective: Objective, box: Tensor) -> None:
        self.objective, self.box = objective, box

    def __call__(self, theta: Tensor, problem: Tensor, which: Tensor) -> Tensor:
        """Values (B,) of theta (B, p), where entry i belongs to run which[i]."""
        low, high = self.box[:, which]
        inside = ((theta >= low - 1e-9) & (theta <= high + 1e-9)).all(-1)
        values = torch.full_like(theta[:, 0], torch.inf)
        if bool(inside.any()):
            kept = torch.clamp(theta[inside], low[inside], high[inside])
            values[inside] = self.objective(kept, problem[which[inside]])[0]
        return values


def _step(boxed: _Boxed, simplex: Tensor, f: Tensor, problem: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One step of simplexes (A, p + 1, p), best corner first; and the number of evaluations of each."""
    centre = simplex[:, :-1].mean(1)
    away = centre - simplex[:, -1]
    point = centre + away
    value = boxed(point, problem, torch.arange(len(f), device=f.device))
    expand = value < f[:, 0]
    contract = value >= f[:, -2]
    inside = value >= f[:, -1]  # of the simplex, where a contraction goes to
    second_try = expand | contract
    evaluations = 1 + second_try.long()
    again = second_try.nonzero()[:, 0]
    shrink = torch.zeros_like(expand)
    if len(again):
        contraction = torch.where(inside, -0.5, 0.5)
        length = torch.where(expand, 2.0, contraction)[again].to(f.dtype)
        second = centre[again] + length.unsqueeze(-1) * away[again]
        second_value = boxed(second, problem, again)
        better_than_worst = second_value < f[again, -1]
        better_than_first = second_value <= value[again]
        better = torch.where(inside[again], better_than_worst, better_than_first)
        point[again] = torch.where(better.unsqueeze(-1), second, point[again])
        value[again] = torch.where(better, second_value, value[again])
        shrink[again] = contract[again] & ~better
    simplex, f = simplex.clone(), f.clone()
    moved = ~shrink
    simplex[moved, -1] = point[moved]
    f[moved, -1] = value[moved]
    if bool(shrink.any()):
        which = shrink.nonzero()[:, 0]
        simplex[which], f[which] = _shrunken(boxed, simplex[which], f[which], problem, which)
        evaluations[which] += simplex.shape[-1]
    return simplex, f, evaluations


def _shrunken(
    boxed: _Boxed, simplex: Tensor, f: Tensor, problem: Tensor, which: Tensor
) -> tuple[Tensor, Tensor]:
    """Simplexes (K, p + 1, p) of the runs `which`, half as large about their best corners."""
    simplex = (simplex + simplex[:, :1]) / 2
    p = simplex.shape[-1]
    values = boxed(simplex[:, 1:].flatten(0, 1), problem, which.repeat_interleave(p))
    return simplex, torch.cat([f[:, :1], values.view(-1, p)], 1)
