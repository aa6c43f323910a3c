"""Gradients of held-out decision values at the final active sets.

Note [gradient]
Without row r, f_r = sum_i a_i k_ri + b, where the free set S has margin 0, a_U = y_U C_U, and
[0 1^T; 1 K_SS] [b; a_S] = [-1^T a_U; y_S - K_SU a_U]. The active set stays as it is under small
changes (almost everywhere), so with the adjoint [0 1^T; 1 K_SS] [mu; lambda_S] = [1; K_Sr],

    d f_r = (e_r - lambda)^T dK a  +  sum_{j in U} (k_rj - lambda^T k_j - mu) y_j dC_j.

With no free variable b is the midpoint between the two points that bound its interval: lambda is 1/2
at these, mu = 0.

All rows together: Kbar = W^T A with the rows of W fbar_r (e_r - lambda_r)^T and those of A a_r^T.
Copies of a point share the coefficient of their variable, and lambda, in proportion to their boxes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchloo.svm.records import Exact, SVMProblem
from torchloo.svm.solve.systems import Bordered, bordered_matrix
from torchloo.svm.stacked import block_of, set_of
from torchloo.svm.tolerances import SINGULAR, at_bound, is_free

__all__ = ["Deferred", "HeldOutMachines", "matrix_numbers", "outputs_with_gradient"]

_ROWS = 2**20  # entries of the rows of machines that are entered at once
_TOGETHER = 2**22  # entries of the inverses of machines that are made at once


@dataclass
class HeldOutMachines:
    """The n held-out machines of one problem, by rows, in the units of the caller's K and C."""

    coef: Tensor
    """a_r, (n, n)."""
    adjoint: Tensor
    """e_r - lambda_r, (n, n)."""
    box_rate: Tensor
    """d f_r / d C_j at fixed K, (n, n)."""

    def enter(
        self, problem: SVMProblem, rows: Tensor, which: Tensor, alpha: Tensor, box: Tensor, group: Tensor
    ) -> None:
        """Enter machine which[i] for rows[i], (R,) both, trained without all rows of its group (n,).

        The G machines have coefficients alpha and boxes (G, m).
        """
        if not rows.numel():
            return
        by_machine = which.argsort(stable=True)
        for part in by_machine.split(max(1, _ROWS // len(group))):
            machines, own = which[part].unique(return_inverse=True)
            self._enter(problem, rows[part], own, alpha[machines], box[machines], group)

    def _enter(
        self, problem: SVMProblem, rows: Tensor, which: Tensor, alpha: Tensor, box: Tensor, group: Tensor
    ) -> None:
        """`enter` for so few rows that arrays (R, n) are small."""
        y, v = problem.y, problem.variable
        # Shares of copies: rows left out have none.
        others = problem.row_box.masked_fill(group[rows][:, None] == group, 0.0)
        total = others.new_zeros(len(rows), len(y)).index_add_(1, v, others)
        share = (others / total[:, v]).nan_to_num(0.0)
        upper = (alpha >= box - at_bound(alpha, box)) & (box > 0)
        lam, rate = _adjoints(problem, v[rows], which, alpha, box, upper, total)
        self.coef[rows] = (alpha * y)[which][:, v] * share / problem.scale
        self.adjoint[rows] = -lam[:, v] * share
        self.adjoint[rows, rows] += 1
        self.box_rate[rows] = (rate * upper[which] * y)[:, v] * (others > 0) * problem.scale

    def enter_without(
        self, problem: SVMProblem, rows: Tensor, which: Tensor, target: Tensor, alpha: Tensor, kept: Tensor
    ) -> None:
        """Enter machines alpha (G, m) without (part of) their targets (G,), of which `kept` (G,) is left."""
        box = problem.box.expand_as(alpha).scatter(1, target[:, None], kept[:, None])
        self.enter(problem, rows, which, alpha, box, torch.arange(len(problem.variable), device=rows.device))

    def enter_unchanged(self, problem: SVMProblem, full: Exact) -> None:
        """Rows that are no support vectors: without them the machine has the same coefficients."""
        rows = torch.arange(len(problem.variable), device=problem.y.device)
        self.enter(problem, rows, torch.zeros_like(rows), full.alpha[None], problem.box[None], rows)

    def clear(self, rows: Tensor) -> None:
        """Rows whose output depends on nothing: one class is left."""
        for field in (self.coef, self.adjoint, self.box_rate):
            field[rows] = 0

    @classmethod
    def none(cls, problem: SVMProblem) -> "HeldOutMachines":
        """Outputs that depend on nothing."""
        n = len(problem.variable)
        return cls(*(problem.K.new_zeros(n, n) for _ in range(3)))


class Deferred:
    """Machines that are made when a backward asks for them: most calls are never differentiated."""

    def __init__(self, problem: SVMProblem) -> None:
        self.problem = problem
        self.entries: list[Callable[[HeldOutMachines], None]] = []

    def add(self, entry: Callable[[HeldOutMachines], None]) -> None:
        """Enter some machines, over those that were entered before."""
        self.entries.append(entry)

    def __call__(self) -> HeldOutMachines:
        """Make them."""
        machines = HeldOutMachines.none(self.problem)
        for entry in self.entries:
            entry(machines)
        return machines


def _adjoints(
    problem: SVMProblem, r: Tensor, which: Tensor, alpha: Tensor, box: Tensor, upper: Tensor, left: Tensor
) -> tuple[Tensor, Tensor]:
    """lambda of Note [gradient] for the targets r (R,), and k_rj - lambda^T k_j - mu; (R, m) both."""
    free = is_free(alpha, box, at_bound(alpha, box))  # (G, m)
    lam, mu = torch.zeros_like(left), torch.zeros_like(r, dtype=left.dtype)
    targets, place = _by_machine(which, len(alpha))
    for machines in _that_fit(free, targets.shape[1]):
        S, at_free, mus = _solved(problem.K, free[machines], r[targets[machines]])
        rows = torch.isin(which, machines).nonzero()[:, 0]
        own = torch.searchsorted(machines, which[rows])
        lam[rows] = lam[rows].scatter_(1, S[own], at_free[own, place[rows]])
        mu[rows] = mus[own, place[rows]]
    none = (~free.any(1))[which].nonzero()[:, 0]
    if none.numel():
        lam[none], mu[none] = _halves(problem, alpha, upper, which[none], left[none]), 0.0
    return lam, problem.K[r] - lam @ problem.K - mu[:, None]


def _by_machine(which: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Rows of each of so many machines (G, t), padded with any, and the place of each row there (R,)."""
    order = which.argsort(stable=True)
    sizes = torch.bincount(which, minlength=count)
    first = sizes.cumsum(0) - sizes
    place = torch.empty_like(which)
    place[order] = torch.arange(len(which), device=which.device) - first[which[order]]
    rows = which.new_zeros(count, max(1, int(sizes.max())))
    rows[which, place] = torch.arange(len(which), device=which.device)
    return rows, place


def _that_fit(free: Tensor, targets: int) -> tuple[Tensor, ...]:
    """Numbers of machines with free variables, in parts whose equations fit."""
    count = free.sum(1)
    machines = count.nonzero()[:, 0]
    if not len(machines):
        return ()
    largest = int(count.max())
    return machines.split(max(1, _TOGETHER // (largest * max(largest, targets))))


def _solved(K: Tensor, free: Tensor, r: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Free variables S (G, s), padded, and for targets r (G, t) lambda_S (G, t, s) and mu (G, t).

    The equations are singular where the free points depend on each other, which ties leave behind: then
    lambda is not unique, and the shortest one treats all of them alike.
    """
    S, real = set_of(free)
    first = torch.zeros_like(S[:, 0])
    K_SS, K_rS = block_of(K[None], S, which=first), block_of(K[None], r, S, first)
    K_rS = K_rS * real[:, None]  # (G, t, s)
    one = torch.ones_like(r, dtype=K.dtype)
    system = Bordered(K_SS, real)
    mu, lam = system.solve(one, K_rS)
    rows = (~system.regular(SINGULAR)).nonzero()[:, 0]
    if rows.numel():
        M = bordered_matrix(K_SS[rows], real[rows])
        rhs = torch.cat([one[rows, :, None], K_rS[rows]], 2)
        shortest = rhs @ torch.linalg.pinv(M, rtol=SINGULAR, hermitian=True)
        mu[rows], lam[rows] = shortest[:, :, 0], shortest[:, :, 1:]
    return S, lam, mu


def _halves(problem: SVMProblem, alpha: Tensor, upper: Tensor, which: Tensor, left: Tensor) -> Tensor:
    """lambda (R, m) where no variable is free: 1/2 at the points that bound the interval of b."""
    s = (problem.y - (alpha * problem.y) @ problem.K)[which]  # the b that gives each point margin 0
    demands_more = ((problem.y > 0) ^ upper)[which]
    low = s.masked_fill(~demands_more | (left <= 0), -torch.inf).argmax(1, keepdim=True)
    high = s.masked_fill(demands_more | (left <= 0), torch.inf).argmin(1, keepdim=True)
    return torch.zeros_like(left).scatter(1, low, 0.5).scatter(1, high, 0.5)


def matrix_numbers(K: Tensor, batch: torch.Size) -> Tensor:
    """Which of the matrices of K (..., n, n), counted in order, each problem of a batch has, on the host."""
    matrices = K.shape[:-2].numel()
    return torch.arange(matrices, device="cpu").reshape(K.shape[:-2]).expand(batch).flatten()


class _HeldOutOutputs(torch.autograd.Function):
    """Outputs that are known, with the backward of Note [gradient]. Once differentiable."""

    @staticmethod
    def forward(ctx: Any, K: Tensor, box: Tensor, outputs: Tensor, machines: list[Deferred]) -> Tensor:
        ctx.machines, ctx.dtype, ctx.shape = machines, K.dtype, K.shape
        ctx.numbers = matrix_numbers(K, box.shape[:-1]).tolist()
        return outputs.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        n = grad.shape[-1]
        rows = grad.double().reshape(-1, n)
        K_bar, box_bar = rows.new_zeros(ctx.shape).view(-1, n, n), torch.empty_like(rows)
        for b, (number, deferred) in enumerate(zip(ctx.numbers, ctx.machines, strict=True)):
            machines, g = deferred(), rows[b]
            K_bar[number].addmm_((machines.adjoint * g[:, None]).T, machines.coef)
            box_bar[b] = g @ machines.box_rate
        K_bar = ((K_bar + K_bar.mT) / 2).view(ctx.shape).to(ctx.dtype)
        return K_bar, box_bar.view_as(grad).to(ctx.dtype), None, None


def outputs_with_gradient(K: Tensor, box: Tensor, outputs: Tensor, machines: list[Deferred]) -> Tensor:
    """Outputs (..., n), differentiable once in K and box (..., n) by Note [gradient].

    The batch shape is that of `box`, to which K (..., n, n) broadcasts; machines has one entry a problem.
    """
    return _HeldOutOutputs.apply(K, box, outputs, machines)
