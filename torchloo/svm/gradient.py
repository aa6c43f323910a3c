"""Gradients of leave-one-out decision values at the final active sets.

Note [gradient]
Without row r, f_r = sum_i a_i k_ri + b, where the free set S has margin 0, a_U = y_U C_U, and
[0 1^T; 1 K_SS] [b; a_S] = [-1^T a_U; y_S - K_SU a_U]. The active set stays as it is under small
changes (almost everywhere), so with the adjoint [0 1^T; 1 K_SS] [mu; lambda_S] = [1; K_Sr],

    d f_r = (e_r - lambda)^T dK a  +  sum_{j in U} (k_rj - lambda^T k_j - mu) y_j dC_j.

All rows together: Kbar = W^T A with the rows of W fbar_r (e_r - lambda_r)^T and those of A a_r^T.
Copies of a point share the coefficient of their variable, and lambda, in proportion to their boxes.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchloo.svm.exact import Exact
from torchloo.svm.merge import Problem
from torchloo.svm.tableau import bordered_inverse

__all__ = ["Machines", "outputs_with_gradient", "unchanged_machines"]

_INSIDE = 1e-7  # of the box: a coefficient this far from both bounds is free


@dataclass
class Machines:
    """The n held-out machines of one problem, by rows, in the units of the caller's K and C."""

    coef: Tensor
    """a_r, (n, n)."""
    adjoint: Tensor
    """e_r - lambda_r, (n, n)."""
    box_rate: Tensor
    """d f_r / d C_j at fixed K, (n, n)."""

    def set(
        self, problem: Problem, rows: Tensor, target: Tensor, number: Tensor, alpha: Tensor, kept: Tensor
    ) -> None:
        """Enter machines alpha (B, m) without (part of) their targets (B,); row rows[i] has number[i]."""
        for k in range(len(target)):
            box = problem.box.clone()
            box[target[k]] = kept[k]
            own = rows[number == k]
            _enter(self, problem, own, alpha[k], box)


def unchanged_machines(problem: Problem, full: Exact, y: Tensor, kept: Tensor) -> Machines:
    """The machines of rows that the full machine does without: all have its own coefficients."""
    n = len(y)
    empty = problem.K.new_zeros(n, n)
    machines = Machines(empty, empty.clone(), empty.clone())
    _enter(machines, problem, torch.arange(n, device=y.device), full.alpha, problem.box)
    return machines


def _enter(machines: Machines, problem: Problem, rows: Tensor, alpha: Tensor, box: Tensor) -> None:
    """Coefficients and adjoints of one machine alpha (m,), for each of `rows` left out of it."""
    K, y, v = problem.K, problem.y, problem.variable
    free = (alpha > _INSIDE * box) & (alpha < (1 - _INSIDE) * box)
    upper = (alpha >= (1 - _INSIDE) * box) & (box > 0)
    S = free.nonzero()[:, 0]
    lam = K.new_zeros(len(rows), len(y))
    rate = K[v[rows]]  # (R, m) k_rj, then minus lambda^T k_j + mu
    if len(S):
        corner, edge, inner = bordered_inverse(K[S][:, S])
        lam[:, S] = K[v[rows]][:, S] @ inner + edge
        mu = corner + K[v[rows]][:, S] @ edge
        rate = rate - lam[:, S] @ K[S] - mu[:, None]
    # Shares of copies: the row left out has none.
    others = problem.row_box.expand(len(rows), -1).scatter(1, rows[:, None], 0.0)
    total = torch.zeros_like(lam).index_add_(1, v, others)
    share = (others / total[:, v]).nan_to_num(0.0)
    machines.coef[rows] = (alpha * y)[v] * share / problem.scale
    machines.adjoint[rows] = -lam[:, v] * share
    machines.adjoint[rows, rows] += 1
    machines.box_rate[rows] = rate[:, v] * (upper[v] * y[v]) * (others > 0) * problem.scale


class _LooOutputs(torch.autograd.Function):
    """Outputs that are known, with the backward of Note [gradient]. Once differentiable."""

    @staticmethod
    def forward(ctx: Any, K: Tensor, box: Tensor, outputs: Tensor, machines: Machines) -> Tensor:
        ctx.machines = machines
        ctx.dtype = K.dtype
        return outputs.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        machines, g = ctx.machines, grad.double()
        K_bar = (machines.adjoint * g[:, None]).T @ machines.coef
        box_bar = g @ machines.box_rate
        return ((K_bar + K_bar.T) / 2).to(ctx.dtype), box_bar.to(ctx.dtype), None, None


def outputs_with_gradient(K: Tensor, box: Tensor, outputs: Tensor, machines: Machines) -> Tensor:
    """Outputs (n,), differentiable once in K (n, n) and box (n,) by Note [gradient]."""
    return _LooOutputs.apply(K, box, outputs, machines)
