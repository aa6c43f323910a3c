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

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from torchloo.autograd import once_differentiable
from torchloo.svm.records import SVMProblem
from torchloo.svm.solve.systems import Bordered, bordered_matrix
from torchloo.svm.stacked import at_once, block_of, set_of
from torchloo.svm.tolerances import SINGULAR, at_bound, is_free

__all__ = ["Deferred", "HeldOutMachines", "in_parts_of_rows", "matrix_numbers", "outputs_with_gradient"]

_ROWS = 2**20  # entries of the rows of machines that are entered at once
_TOGETHER = 2**18  # entries of the equations of machines that are solved at once: more leave a CPU's cache


class HeldOutMachines:
    """The n held-out machines of each of T problems, by rows, in the units of the caller's K and C.

    `coef` has a_r, `adjoint` e_r - lambda_r and `box_rate` d f_r / d C_j at fixed K, (T n, n) each. Rows are
    numbered from 0 to T n. What is not entered is 0: an output that depends on nothing.
    """

    def __init__(self, problem: SVMProblem) -> None:
        self.problem = problem
        size, n = problem.variable.shape
        self.coef, self.adjoint, self.box_rate = (problem.K.new_zeros(size * n, n) for _ in range(3))

    def enter(
        self,
        rows: Tensor,
        which: Tensor,
        table: Tensor,
        alpha: Tensor,
        box: Tensor,
        group: Tensor | None = None,
    ) -> None:
        """Enter machine which[i] for rows[i], (R,) both, trained without all rows of its group (n,).

        Without groups: without the row alone. The G machines are of the problems `table` (G,), in ascending
        order, and have coefficients alpha and boxes (G, m).
        """
        n = self.coef.shape[1]
        group = torch.arange(n, device=rows.device) if group is None else group
        by_machine = which.argsort(stable=True)
        for part in by_machine.split(max(1, at_once(rows, _ROWS) // n)) if rows.numel() else ():
            machines, own = which[part].unique(return_inverse=True)
            self._enter(rows[part], own, table[machines], alpha[machines], box[machines], group)

    def _enter(
        self, rows: Tensor, which: Tensor, table: Tensor, alpha: Tensor, box: Tensor, group: Tensor
    ) -> None:
        """`enter` for so few rows that arrays (R, n) are small."""
        problem, n = self.problem, self.coef.shape[1]
        of, i = rows // n, rows % n
        y, v, merged = problem.y[table], problem.variable[of], alpha.shape[1] < n

        def by_row(x: Tensor) -> Tensor:
            """Values of variables (R, m) as those of rows, (R, n)."""
            return x.gather(1, v) if merged else x

        # Shares of copies: rows left out have none.
        others = problem.row_box[of].masked_fill(group[i][:, None] == group, 0.0)
        total = others.new_zeros(len(rows), y.shape[1]).scatter_add_(1, v, others) if merged else others
        share = (others / by_row(total)).nan_to_num(0.0)
        upper = (alpha >= box - at_bound(alpha, box)) & (box > 0)
        target = v.gather(1, i[:, None])[:, 0]
        lam, rate = _adjoints(problem, table, target, which, alpha, box, upper, total)
        scale = problem.scale[of][:, None]
        self.coef[rows] = by_row((alpha * y)[which]) * share / scale
        self.adjoint[rows] = -by_row(lam) * share
        self.adjoint[rows, i] += 1
        self.box_rate[rows] = by_row(rate * upper[which] * y[which]) * (others > 0) * scale


@dataclass
class Deferred:
    """Machines that are made when a backward asks for them: most calls are never differentiated."""

    problem: SVMProblem
    numbers: Tensor
    """The places of its problems in the batch, (T,)."""
    enter: Callable[[HeldOutMachines], None]

    def among(self, places: Tensor) -> "Deferred":
        """The same in a larger batch, where its batch has these places."""
        return replace(self, numbers=places[self.numbers])

    def __call__(self) -> HeldOutMachines:
        """Make them."""
        machines = HeldOutMachines(self.problem)
        self.enter(machines)
        return machines


def in_parts_of_rows(problem: SVMProblem) -> Iterator[slice]:
    """Some of the problems at a time, so that arrays (T n, n) are small."""
    size, n = problem.variable.shape
    each = max(1, at_once(problem.K, _ROWS) // n**2)
    return (slice(first, min(first + each, size)) for first in range(0, size, each))


def _adjoints(
    problem: SVMProblem,
    table: Tensor,
    r: Tensor,
    which: Tensor,
    alpha: Tensor,
    box: Tensor,
    upper: Tensor,
    left: Tensor,
) -> tuple[Tensor, Tensor]:
    """lambda of Note [gradient] for the targets r (R,), and k_rj - lambda^T k_j - mu; (R, m) both."""
    free = is_free(alpha, box, at_bound(alpha, box))  # (G, m)
    kernels, of_rows = problem.kernels(table), problem.kernels(table[which])
    lam, mu = torch.zeros_like(left), torch.zeros_like(r, dtype=left.dtype)
    targets, place = _by_machine(which, len(alpha))
    for machines in _that_fit(free, targets.shape[1]):
        system = problem.K, kernels.table[machines], free[machines]
        S, at_free, mus = _solved(*system, r[targets[machines]])
        rows = torch.isin(which, machines).nonzero()[:, 0]
        own = torch.searchsorted(machines, which[rows])
        lam[rows] = lam[rows].scatter_(1, S[own], at_free[own, place[rows]])
        mu[rows] = mus[own, place[rows]]
    none = (~free.any(1))[which].nonzero()[:, 0]
    if none.numel():
        y = problem.y[table]
        s = y - kernels.product(alpha * y, problem.K)  # the b that gives each point margin 0
        demands_more, its = (y > 0) ^ upper, which[none]
        lam[none], mu[none] = _halves(s[its], demands_more[its], left[none]), 0.0
    return lam, of_rows.rows(problem.K, r) - of_rows.product(lam, problem.K) - mu[:, None]


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
    together = at_once(free, _TOGETHER)
    return machines.split(max(1, together // (largest * max(largest, targets))))


def _solved(K: Tensor, table: Tensor, free: Tensor, r: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Free variables S (G, s), padded, and for targets r (G, t) lambda_S (G, t, s) and mu (G, t).

    The equations are singular where the free points depend on each other, which ties leave behind: then
    lambda is not unique, and the shortest one treats all of them alike.
    """
    S, real = set_of(free)
    K_SS = block_of(K, S, which=table)
    K_rS = block_of(K, r, S, table) * real[:, None]  # (G, t, s)
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


def _halves(s: Tensor, demands_more: Tensor, left: Tensor) -> Tensor:
    """lambda (R, m) where no variable is free: 1/2 at the points that bound the interval of b."""
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
        ctx.save_for_backward(K, box)
        ctx.machines, ctx.dtype, ctx.shape = machines, K.dtype, K.shape
        ctx.numbers = matrix_numbers(K, box.shape[:-1]).to(K.device)
        return outputs.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor | None, ...]:
        n = grad.shape[-1]
        rows = grad.double().reshape(-1, n)
        K_bar, box_bar = rows.new_zeros(ctx.shape).view(-1, n, n), torch.empty_like(rows)
        for deferred in ctx.machines:
            machines, g = deferred(), rows[deferred.numbers][:, :, None]  # (T, n, 1)
            coef, adjoint, rate = (
                x.view(-1, n, n) for x in (machines.coef, machines.adjoint, machines.box_rate)
            )
            K_bar.index_add_(0, ctx.numbers[deferred.numbers], (adjoint * g).mT @ coef)
            box_bar[deferred.numbers] = (g.mT @ rate)[:, 0]
        K_bar = ((K_bar + K_bar.mT) / 2).view(ctx.shape).to(ctx.dtype)
        return K_bar, box_bar.view_as(grad).to(ctx.dtype), None, None


def outputs_with_gradient(K: Tensor, box: Tensor, outputs: Tensor, machines: list[Deferred]) -> Tensor:
    """Outputs (..., n), differentiable once in K and box (..., n) by Note [gradient].

    The batch shape is that of `box`, to which K (..., n, n) broadcasts; each problem is in one of `machines`.
    """
    return _HeldOutOutputs.apply(K, box, outputs, machines)
