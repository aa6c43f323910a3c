"""Search without gradients: the simplex of Nelder and Mead (1965), many simplexes at once.

Note [simplexes in step]
All simplexes take their steps together, in at most three batched evaluations: every reflection; for those
that ask for it, an expansion or a contraction; and for the few where that failed, all points of a shrunken
simplex. Points outside the box count as infinite and are not evaluated: cutting them off at its faces would
flatten the simplex.
"""

import torch
from torch import Tensor

from torchloo.search.objective import Objective

__all__ = ["walk"]

_STEP = 1.0  # edge of the first simplex, in units: a factor e in a positive parameter
_SMALL = 1e-2  # edge at which a simplex may stop


def walk(
    objective: Objective,
    start: Tensor,
    problem: Tensor,
    box: Tensor,
    unit: Tensor,
    evaluations: int,
    tolerance: float,
) -> None:
    """Minimise from R starts (R, p) of problems (R,) in the boxes (2, R, p); the objective keeps the best.

    Reflection 1, expansion 2, contraction and shrinkage 1/2. A simplex stops when its values differ by less
    than `tolerance` of the best and its edges are below 1 % of a unit, or after so many `evaluations`.
    """
    runs, p = start.shape
    simplex = torch.cat(
        [start.unsqueeze(1), start.unsqueeze(1) + _STEP * torch.diag(unit)], 1
    )  # (R, p + 1, p)
    # A corner outside the box is reflected into it.
    simplex = torch.where(simplex > box[1].unsqueeze(1), 2 * start.unsqueeze(1) - simplex, simplex)
    simplex = torch.clamp(simplex, box[0].unsqueeze(1), box[1].unsqueeze(1))
    f, _ = objective(simplex.flatten(0, 1), problem.repeat_interleave(p + 1))
    f = f.view(runs, p + 1)
    used = torch.full((runs,), p + 1)
    while True:
        order = f.argsort(dim=1, stable=True)
        f = f.gather(1, order)
        simplex = simplex.gather(1, order.unsqueeze(-1).expand_as(simplex))
        edge = ((simplex[:, 1:] - simplex[:, :1]) / unit).abs().amax((1, 2))
        level = f[:, -1] - f[:, 0] <= tolerance * f[:, 0].abs()
        done = (level & (edge <= _SMALL)) | f[:, 0].isinf() | (used >= evaluations)
        active = (~done).nonzero()[:, 0]
        if not len(active):
            return
        stepped = _step(_Boxed(objective, box[:, active]), simplex[active], f[active], problem[active])
        simplex[active], f[active], asked = stepped
        used[active] += asked


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
    """One step of simplexes (A, p + 1, p), best corner first; and how many evaluations each asked for."""
    centre = simplex[:, :-1].mean(1)
    away = centre - simplex[:, -1]
    everyone = torch.arange(len(f))
    point = centre + away
    value = boxed(point, problem, everyone)
    expand, inside = value < f[:, 0], value >= f[:, -1]
    contract = value >= f[:, -2]
    again = (expand | contract).nonzero()[:, 0]
    asked = 1 + (expand | contract).long()
    shrink = torch.zeros_like(expand)
    if len(again):
        length = torch.where(expand, 2.0, torch.where(inside, -0.5, 0.5))[again].to(f.dtype)
        second = centre[again] + length.unsqueeze(-1) * away[again]
        other = boxed(second, problem, again)
        better = torch.where(inside[again], other < f[again, -1], other <= value[again])
        point[again] = torch.where(better.unsqueeze(-1), second, point[again])
        value[again] = torch.where(better, other, value[again])
        shrink[again] = contract[again] & ~better
    simplex, f = simplex.clone(), f.clone()
    simplex[~shrink, -1], f[~shrink, -1] = point[~shrink], value[~shrink]
    if bool(shrink.any()):
        small = simplex[shrink, :1] + 0.5 * (simplex[shrink, 1:] - simplex[shrink, :1])  # (K, p, p)
        p = small.shape[-1]
        values = boxed(small.flatten(0, 1), problem, everyone[shrink].repeat_interleave(p))
        simplex[shrink, 1:], f[shrink, 1:] = small, values.view(-1, p)
        asked[shrink] += p
    return simplex, f, asked
