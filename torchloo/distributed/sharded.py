"""The primal form with its rows shared out over processes: held-out rows with their gradients.

Every process computes the normal equations of its own rows; one all-reduce makes them those of all rows,
and the rest is Note [primal form] and Note [sets of a stream] on the process's own rows. Written in plain
differentiable operations: the backward runs through the same all-reduce (Note [sums over processes]).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from torchloo.blocks import NOT_DEFINITE, solve_blocks
from torchloo.clusters import Partition
from torchloo.distributed.processes import Processes
from torchloo.guards import Guard
from torchloo.problem import Problem
from torchloo.sums import REFIT_BELOW, is_lost, sum_of_others

__all__ = ["Shard", "solve_shard"]


@dataclass(frozen=True)
class Shard:
    """The rows of one process, and the solution that all rows give."""

    processes: Processes
    D: Tensor
    """Features about the mean of all rows, and ones for the bias, (n, p')."""
    Y: Tensor
    """Targets, (n, c)."""
    zeta: Tensor
    """Weights, (n, 1)."""
    R: Tensor
    """Penalty, (p', p')."""
    reg: Tensor
    """Regularisation."""
    factor: Tensor
    """Cholesky factor of the normal matrix of all rows, (p', p')."""
    coef: Tensor
    """Coefficients, (p', c)."""

    @property
    def least(self) -> Tensor:
        """Sets whose 1 - h is below this are refitted."""
        return torch.full_like(self.reg, REFIT_BELOW)

    def held_out(self, partition: Partition, guard: Guard) -> tuple[Tensor, Tensor, Tensor]:
        """Held-out residuals (n, c), variances (n, 1), and which rows (n,) were refitted."""
        e = self.Y - self.D @ self.coef
        root = torch.linalg.solve_triangular(self.factor, self.D.mT, upper=False).mT  # (n, p')
        small, large = partition.split(self.D.shape[-1])
        residuals, variances, marks, lost = [], [], [], []
        for rows in small.groups:
            r, variance, flags = self._by_blocks(rows, root, e, guard)
            residuals.append(r)
            variances.append(variance)
            marks.append(flags[:, None, None].expand_as(variance))
            lost += [rows[k] for k in flags.nonzero()[:, 0].tolist()]
        for rows in large.groups:
            V = (self.zeta[rows].sqrt() * root[rows]).detach()
            flags = is_lost(torch.eye(V.shape[-1], dtype=V.dtype, device=V.device) - V.mT @ V, self.least)
            residuals.append(e[rows])
            variances.append(torch.ones_like(e[rows][..., :1]))
            marks.append(flags[:, None, None].expand_as(variances[-1]))
            lost += list(rows)
        n = len(e)
        r, variance = partition.scatter(residuals, n), partition.scatter(variances, n)
        r, variance = self._refitted(r, variance, lost, guard)
        return r, variance, partition.scatter(marks, n)[..., 0]

    def _by_blocks(
        self, rows: Tensor, root: Tensor, e: Tensor, guard: Guard
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Residuals (g, s, c), variances (g, s, 1) and lost sets (g,) of sets (g, s)."""
        scale = self.zeta[rows].sqrt()  # (g, s, 1)
        V = scale * root[rows]
        M = torch.eye(rows.shape[1], dtype=V.dtype, device=V.device) - V @ V.mT
        lost = is_lost(M, self.least)
        # A harmless block in place of a lost one: its quotient is thrown away, and so is its gradient.
        unit = torch.eye(rows.shape[1], dtype=V.dtype, device=V.device)
        M = torch.where(lost[:, None, None], unit, M)
        (r,), (variance,) = solve_blocks([scale * e[rows]], [M], guard)
        return r / scale, self.reg * variance / self.zeta[rows], lost

    def _refitted(
        self, r: Tensor, variance: Tensor, lost: list[Tensor], guard: Guard
    ) -> tuple[Tensor, Tensor]:
        """Residuals (n, c) and variances (n, 1), with lost and large sets by Note [leaving out by sums]."""
        if not any(self.processes.gather(len(lost))):
            return r, variance
        p, c = self.coef.shape
        outside = self.zeta
        for rows in lost:
            outside = outside.index_fill(0, rows, 0.0)
        rest = _sums(self.D, outside, self.Y)
        parts = [_sums(self.D[rows], self.zeta[rows], self.Y[rows]) for rows in lost]
        own = torch.stack([*parts, rest])[: len(lost)]  # (g, p', p' + c), with a graph even if g = 0
        before = sum(self.processes.gather(len(lost))[: self.processes.rank])
        (total,) = self.processes.sums(rest)
        sets = sum_of_others(self.processes.rows(own, shared=False)) + total
        for k, rows in enumerate(lost):
            C, right = sets[before + k].split([p, c], -1)
            L, info = torch.linalg.cholesky_ex(C + self.R)
            guard.require(info == 0, NOT_DEFINITE)
            root = torch.linalg.solve_triangular(L, self.D[rows].mT, upper=False)  # (p', s)
            r = r.index_copy(0, rows, self.Y[rows] - self.D[rows] @ torch.cholesky_solve(right, L))
            norm = root.square().sum(0).unsqueeze(-1)
            variance = variance.index_copy(0, rows, self.reg * (1 / self.zeta[rows] + norm))
        # Every process goes through the same collectives backward, whether or not it has such sets.
        return r + 0.0 * sets.sum(), variance


def _sums(D: Tensor, zeta: Tensor, Y: Tensor) -> Tensor:
    """Normal matrix and right side of rows, (p', p' + c)."""
    return D.mT @ (zeta * torch.cat([D, Y], -1))


def solve_shard(processes: Processes, problem: Problem, Z: Tensor, bias: bool) -> Shard:
    """Solve ridge regression on features Z (n, p) of which every process has rows.

    Differentiable in Z, targets, weights and regularisation; cost n p^2 for the n rows of the process,
    communication p^2 numbers; memory 4 n p, 6 n p with the backward.
    """
    guard = problem.guard
    Z, Y, zeta, reg = (t.double() for t in (Z, problem.Y, problem.weight.unsqueeze(-1), problem.reg))
    with torch.no_grad():
        total, weighted = processes.sums(zeta.sum(), (zeta * Z).sum(0, keepdim=True))
    centre = weighted / total if bias else torch.zeros_like(weighted)
    D = Z - centre
    penalised = torch.ones_like(D[0])
    if bias:
        D = torch.cat([D, torch.ones_like(D[:, :1])], -1)
        penalised = torch.cat([penalised, torch.zeros_like(penalised[:1])])
    R = torch.diag(reg * penalised)
    own = _sums(D, zeta, Y)
    if len(set(processes.gather(own.requires_grad))) > 1:
        raise ValueError(f"{guard.function}: either all processes or none must ask for gradients")
    (sums,) = processes.sums(own)
    C, right = sums.split([D.shape[-1], Y.shape[-1]], -1)
    L, info = torch.linalg.cholesky_ex(C + R)
    guard.require(info == 0, NOT_DEFINITE)
    coef = torch.cholesky_solve(right, L)
    with torch.no_grad():  # a step of refinement, as in the primal form; its gradient is that of the solution
        (gradient,) = processes.sums(D.mT @ (zeta * (Y - D @ coef)))
        step = torch.cholesky_solve(gradient - R @ coef, L)
    return Shard(processes, D, Y, zeta, R, reg, L, coef + step)
