"""Small box-constrained quadratic programs, many at once: what a working set leaves to solve.

Note [inner interior point]
    min 1/2 x^T Q x + c^T x,   0 <= x <= u,   a^T x = held

With multipliers z of x >= 0, w of x <= u and b of the equality, a Newton step eliminates z and w:

    (Q + diag(z / x + w / (u - x))) dx + a db = rhs,   a^T dx = held - a^T x

one batched Cholesky for the predictor and the corrector of Mehrotra: about a dozen iterations
whatever the condition of Q. At the end x < z means that x belongs at its bound. Putting it there
moves the others by the square root of the final complementarity, too much where C is large; so the
equations of the free variables are solved once more, exactly. Free variables may be one more than
the rank of Q, which only the equality makes definite; so sigma / 2 (a^T x - held)^2, zero at every
feasible point, is added to the objective.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from torchloo.guards import may_look
from torchloo.svm.stacked import subset
from torchloo.svm.tolerances import NEAR_BOUND, POLISH_RIDGE, RIDGE, ROUNDING, SHORT_OF_BOUND, TINY

__all__ = ["box_qp"]

_POLISHES = 2  # the second takes away what the ridge of the first costs


class _Program(NamedTuple):
    """B programs in units of their largest box."""

    Q: Tensor  # (B, q, q)
    c: Tensor  # (B, q)
    u: Tensor  # (B, q)
    a: Tensor  # (B, q)
    held: Tensor  # (B, 1)

    def take(self, rows: Tensor) -> "_Program":
        return _Program(*(x.index_select(0, rows) for x in self))

    def gradient(self, x: Tensor) -> Tensor:
        return (self.Q @ x[:, :, None])[:, :, 0] + self.c

    def lack(self, x: Tensor) -> Tensor:
        return self.held - (self.a * x).sum(1, keepdim=True)  # (B, 1)

    def factor(self, diagonal: Tensor, among: Tensor | None = None) -> Tensor:
        """Cholesky factor of Q (its rows and columns `among` only) plus a diagonal and a tiny ridge."""
        ridge = RIDGE * (1 + self.Q.diagonal(dim1=1, dim2=2).mean(1, keepdim=True))
        Q = self.Q if among is None else self.Q * among[:, :, None] * among[:, None, :]
        return torch.linalg.cholesky_ex(Q + torch.diag_embed(diagonal + ridge))[0]

    def solve(self, factor: Tensor, rhs: Tensor, lack: Tensor, among: Tensor) -> tuple[Tensor, Tensor]:
        """dx and db of the bordered equations, (B, q) and (B, 1); db is 0 where all x are fixed."""
        both = torch.cholesky_solve(torch.stack([rhs, self.a], 2) * among[:, :, None], factor)
        dx, along = both[:, :, 0], both[:, :, 1]
        slope = (self.a * along).sum(1, keepdim=True)
        db = torch.where(slope > 0, ((self.a * dx).sum(1, keepdim=True) - lack) / slope, 0.0)
        return dx - along * db, db


class _Point(NamedTuple):
    """An interior point, or a step."""

    x: Tensor  # (B, q)
    rest: Tensor  # u - x, (B, q)
    z: Tensor  # (B, q)
    w: Tensor  # (B, q)
    b: Tensor  # (B, 1)

    def plus(self, t: Tensor, step: "_Point") -> "_Point":
        return _Point(*(p + t * d for p, d in zip(self, step, strict=True)))

    def complementarity(self) -> Tensor:
        return (self.x * self.z + self.rest * self.w).mean(1, keepdim=True) / 2  # (B, 1)

    def longest(self, step: "_Point") -> Tensor:
        """The share of a step up to the boundary, at most 1, (B, 1)."""
        ratios = torch.cat([-d / p for p, d in zip(self[:4], step[:4], strict=True)], 1)
        return 1 / ratios.amax(1, keepdim=True).clamp_min(1)


def box_qp(Q: Tensor, c: Tensor, u: Tensor, x_0: Tensor, a: Tensor) -> Tensor:
    """Minimisers (B, q) of the programs of Note [inner interior point]; entries with u = 0 stay 0.

    Args:
        Q: positive semi-definite matrices, (B, q, q).
        c, u: linear terms and upper bounds, (B, q).
        x_0: a feasible point, for the value of the equality, (B, q).
        a: coefficients +-1 of the equality, (B, q).

    Cost about 12 Cholesky factorisations of size q.
    """
    fixed = u <= 0
    scale = u.amax(1, keepdim=True).clamp_min(torch.finfo(u.dtype).tiny)
    a = torch.where(fixed, 0.0, a)
    held = (a * x_0).sum(1, keepdim=True) / scale
    Q = (Q * scale[:, :, None]).masked_fill(fixed[:, :, None] | fixed[:, None, :], 0.0)
    sigma = Q.diagonal(dim1=1, dim2=2).mean(1, keepdim=True)
    Q = Q + sigma[:, :, None] * a[:, :, None] * a[:, None, :]
    c = torch.where(fixed, 0.0, c) - sigma * held * a
    program = _Program(Q, c, torch.where(fixed, 1.0, u / scale), a, held)
    x = _interior_point(program)
    for _ in range(_POLISHES):
        x = _polished(program, x)
    x = torch.where(fixed | (x >= program.u), u, (x * scale).minimum(u))  # u itself, not to rounding
    return _balanced(x, u, x_0, a)


def _interior_point(program: _Program, most: int = 40) -> Tensor:
    """Minimisers in units of the program, what lies at a bound put there, (B, q)."""
    size = 1 + program.c.abs().amax(1, keepdim=True)
    multiplier = size.expand_as(program.c)
    p = _Point(program.u / 2, program.u / 2, multiplier, multiplier, torch.zeros_like(size))
    left = torch.arange(len(size), device=size.device)
    x = torch.empty_like(program.c)
    for _ in range(most if may_look(x) else most // 2):  # no more than nearly all need, where all must go on
        dual = program.gradient(p.x) + program.a * p.b - p.z + p.w  # (B, q)
        x[left] = _at_bounds(p, program.u)
        wrong = torch.maximum(p.complementarity(), dual.abs().amax(1, keepdim=True))
        going = wrong > ROUNDING * size  # NaN, a failed factor, ends too
        rows = subset(going[:, 0])
        if not len(rows):
            break
        if len(rows) < len(left):
            left, size, dual, going = (x[rows] for x in (left, size, dual, going))
            program, p = program.take(rows), _Point(*(v[rows] for v in p))
        new = _step(program, p, dual)
        p = new if may_look(going) else _Point(*(torch.where(going, *v) for v in zip(new, p, strict=True)))
    return x


def _step(program: _Program, p: _Point, dual: Tensor) -> _Point:
    """One predictor and corrector of Mehrotra."""
    factor = program.factor(p.z / p.x + p.w / p.rest)

    def newton(lower: Tensor, upper: Tensor) -> _Point:
        rhs = -dual - lower / p.x + upper / p.rest
        dx, db = program.solve(factor, rhs, program.lack(p.x), torch.ones_like(rhs))
        return _Point(dx, -dx, -(lower + p.z * dx) / p.x, -(upper - p.w * dx) / p.rest, db)

    lower, upper, mu = p.x * p.z, p.rest * p.w, p.complementarity()
    guess = newton(lower, upper)
    later = p.plus(p.longest(guess), guess).complementarity()
    centre = mu * (later / mu).clamp(0, 1) ** 3
    step = newton(lower + guess.x * guess.z - centre, upper - guess.x * guess.w - centre)
    return p.plus(SHORT_OF_BOUND * p.longest(step), step)


def _at_bounds(p: _Point, u: Tensor) -> Tensor:
    """x, with what belongs at a bound put there."""
    x = torch.where((p.rest < p.w) & (p.rest < NEAR_BOUND), u, p.x)
    return torch.where((p.x < p.z) & (p.x < NEAR_BOUND), 0.0, x)


def _polished(program: _Program, x: Tensor) -> Tensor:
    """Solve the equations of the free variables, as far as the bounds allow."""
    free = (x > 0) & (x < program.u)
    # More free variables than the rank of Q: a larger ridge keeps rounding from moving them far, and
    # the second polish takes away what it costs.
    ridge = POLISH_RIDGE * (1 + program.Q.diagonal(dim1=1, dim2=2).mean(1, keepdim=True))
    factor = program.factor(torch.where(free, ridge, 1.0), free)
    dx, _ = program.solve(factor, -program.gradient(x), program.lack(x), free)
    ratios = torch.maximum(-dx / x, dx / (program.u - x)).masked_fill(~free, 0.0)
    moved = x + dx / ratios.amax(1, keepdim=True).clamp_min(1)
    moved = torch.where(moved < TINY * program.u, 0.0, moved)  # what blocks lies at its bound
    moved = torch.where(moved > (1 - TINY) * program.u, program.u, moved)
    return torch.where(free & moved.isfinite(), moved, x)


def _balanced(x: Tensor, u: Tensor, x_0: Tensor, a: Tensor) -> Tensor:
    """Give what rounding left of the equality to the variable with most room."""
    lack = (a * (x_0 - x)).sum(1, keepdim=True)
    i = torch.minimum(x, u - x).argmax(1, keepdim=True)
    value = x.gather(1, i) + a.gather(1, i) * lack
    return x.scatter(1, i, value.clamp_min(0).minimum(u.gather(1, i)))
