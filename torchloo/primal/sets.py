"""Clusters of a stream, left out together.

Note [sets of a stream]
With u as in Note [rotated features], extended by a 1 whose f is 1/w for the bias, a set L has
P_LL = Omega^{1/2} M Omega^{1/2} with M = I - Omega^{1/2} U_L^T diag(f) U_L Omega^{1/2}, of its own size; so
its held-out residuals are Omega^{-1/2} M^{-1} Omega^{1/2} e_L. A set with more rows than features takes
the other side, of the size of the features: with B = diag(f)^{1/2} U_L and N = I - B Omega B^T, they are
e_L + B^T N^{-1} B Omega e_L, in two visits to its rows. Sets whose 1 - h, the smallest pivot of M or N, is
lost to rounding are refitted.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torchloo.clusters import Partition
from torchloo.primal.block import Block
from torchloo.primal.machines import Machines
from torchloo.primal.moments import add_symmetric
from torchloo.primal.refit import Lost, Refitted, refit
from torchloo.primal.seen import checksum
from torchloo.primal.sink import Sink

if TYPE_CHECKING:
    from torchloo.primal.solved import StreamFit

__all__ = ["leave_out_sets"]


def leave_out_sets(
    solved: "StreamFit", machines: Machines, partition: Partition, sink: Sink
) -> list[Refitted]:
    """Write the held-out rows of all clusters."""
    visit = _Visit(solved, solved.refined(machines), sink)
    solved.others.together(lambda: _visits(visit, partition))
    return refit(solved, machines, sink, visit.lost)


def _visits(visit: "_Visit", partition: Partition) -> None:
    """Go to all sets, under a bar."""
    stream = visit.solved.stream
    stream.spool(visit.solved.function, visit.solved.blocks("spooling"))
    small, large = partition.split(visit.f.shape[-1])
    with stream.bar("clusters") as bar:
        for sets in small.groups:
            for rows in sets.split(max(1, visit.size // sets.shape[1])):
                visit.small(rows)
                bar.update(rows.numel())
        for sets in large.groups:
            for rows in sets:
                visit.large(rows)
                bar.update(len(rows))
    if not stream.lasting:
        visit.solved.moments.seen.require_all(visit.solved.function, visit.read)


class _Visit:
    """Visits to the rows of sets; see Note [sets of a stream]."""

    def __init__(self, solved: "StreamFit", machines: Machines, sink: Sink) -> None:
        self.solved, self.machines, self.sink = solved, machines, sink
        self.size = solved.stream.block or solved.size
        self.lost: Lost = {}
        self.read = torch.zeros(3, dtype=torch.int64, device="cpu")  # checksums of all rows written so far
        self.f = machines.f  # (R, c', p')
        if solved.moments.centre:
            self.f = torch.cat([self.f, solved.per_weight.expand_as(self.f[..., :1])], -1)
        R, own = machines.regs.shape
        every = slice(None)
        self.each = [(r, j, every if own == 1 else slice(j, j + 1)) for r in range(R) for j in range(own)]

    def _read(self, rows: Tensor) -> tuple[Block, Tensor, Tensor, Tensor]:
        """Rows (b,): the block, U (p', b), residuals (R, c, b) and weights (b,)."""
        part = self.solved.stream.take(self.solved.function, rows)
        U = self.machines.rotated(part.X, fold=False)
        e = self.machines.residuals(U, part)
        if self.solved.moments.centre:
            U = torch.cat([U, torch.ones_like(U[:1])])
        return part, U, e, part.weight.double()

    def _factor(self, matrix: Tensor, r: int, j: int, sets: Tensor, small: bool) -> Tensor:
        """Cholesky factors of M or N (g, k, k); sets (g, s) that are lost are noted, and get the identity."""
        L, info = torch.linalg.cholesky_ex(matrix)
        pivot = L.diagonal(dim1=-2, dim2=-1).square().amin(-1)
        lost = (info != 0) | ~(pivot > self.machines.least[r, j])
        if bool(lost.any()):
            rows = [sets[k] for k in lost.nonzero()[:, 0].tolist()]
            self.lost.setdefault((r, j), []).extend((rows_of, small) for rows_of in rows)
            unit = torch.eye(L.shape[-1], dtype=L.dtype, device=L.device)
            L = torch.where(lost[:, None, None], unit, L)
        return L

    def _write(self, part: Block, residuals: Tensor, variance: Tensor, rows: Tensor) -> None:
        """Held-out residuals (R, c, b) and variances (R, c', b) of rows (b,), each of them once."""
        self.sink.write(part, residuals, variance, rows)
        if not self.solved.stream.lasting:
            self.read += checksum(part, rows)

    def small(self, sets: Tensor) -> None:
        """Sets (g, s) of no more rows than features."""
        g, s = sets.shape
        part, U, e, zeta = self._read(sets.flatten())
        root = zeta.sqrt()
        V = (U * root).mT.reshape(g, s, -1)
        unit = torch.eye(s, dtype=V.dtype, device=V.device)
        residuals, variance = torch.empty_like(e), torch.empty_like(e[:, : self.machines.regs.shape[1]])
        for r, j, outputs in self.each:
            L = self._factor(unit - (V * self.f[r, j]) @ V.mT, r, j, sets, small=True)
            right = (root * e[r, outputs]).unflatten(-1, (g, s)).permute(1, 2, 0)  # (g, s, c)
            solved = torch.cholesky_solve(right, L).permute(2, 0, 1).flatten(1)
            residuals[r, outputs] = solved / root
            inverse = torch.cholesky_inverse(L).diagonal(dim1=-2, dim2=-1).flatten()
            variance[r, j] = self.machines.regs[r, j] * inverse / zeta
        self._write(part, residuals, variance, sets.flatten())

    def large(self, rows: Tensor) -> None:
        """One set (s,) of more rows than features."""
        p, (R, c) = self.f.shape[-1], self.machines.offset.shape
        A, t = self.f.new_zeros(p, p), self.f.new_zeros(R, c, p)
        for some in rows.split(self.size):
            _, U, e, zeta = self._read(some)
            add_symmetric(A, U * zeta.sqrt())
            t += (zeta * e) @ U.mT
        A = A.tril() + A.tril(-1).mT
        unit = torch.eye(p, dtype=A.dtype, device=A.device)
        factors, solutions = [], []
        for r, j, outputs in self.each:
            root = self.f[r, j].sqrt()  # (p',)
            N = unit - root.unsqueeze(-1) * A * root
            L = self._factor(N.unsqueeze(0), r, j, rows.unsqueeze(0), small=False)[0]
            factors.append(torch.linalg.solve_triangular(L, torch.diag(root), upper=False))
            solutions.append(torch.cholesky_solve((root * t[r, outputs]).mT, L).mT * root)
        for some in rows.split(self.size):
            part, U, e, zeta = self._read(some)
            variance = torch.empty_like(e[:, : self.machines.regs.shape[1]])
            for (r, j, outputs), factor, solution in zip(self.each, factors, solutions, strict=True):
                e[r, outputs] += solution @ U
                variance[r, j] = self.machines.regs[r, j] * (1 / zeta + (factor @ U).square().sum(0))
            self._write(part, e, variance, some)
