"""Clusters of a stream, left out together.

Their rows are gathered wherever they stand, many sets of one size at a time; a set with more rows than
features and than a block is visited twice, first for its sums. See Note [leaving sets out].
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torchloo.clusters import Partition
from torchloo.panels import add_symmetric, mirrored
from torchloo.primal.block import Block
from torchloo.primal.leaving_out import leave_out_large, leave_out_small, root_of_rest, rows_of_large
from torchloo.primal.machines import LARGE, ImpreciseError, Machines
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
    large = any(solved.others.gather(bool(visit.worst * (1 - LARGE) > 1)))
    if large and machines.go_the_long_way():
        return leave_out_sets(solved, machines, partition, sink)
    if solved.expansion.kind != torch.float64 and any(solved.others.gather(bool(visit.lost))):
        raise ImpreciseError
    return refit(solved, machines, sink, visit.lost)


def _visits(visit: "_Visit", partition: Partition) -> None:
    """Go to all sets, under a bar."""
    stream = visit.solved.stream
    stream.spool(visit.solved.function, visit.solved.blocks("spooling"))
    small, large = partition.split(max(visit.size, visit.f.shape[-1]))
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


# Part of a held-out residual that may come from kernel columns which round otherwise than in the first pass.
_DIFFERS = {torch.float64: 1e-9, torch.float32: 1e-4}


class _Visit:
    """Visits to the rows of sets, and what they find.

    The rows of a set come together here for the first time, and a matrix product rounds each of them as its
    neighbours have it. What is left out is then not quite what was taken in: by delta in f^{1/2} u, which
    changes the residuals of a set by delta times the heaviest weight, the longest f^{1/2} u and 1 / (1 - h)
    at most. Sets for which that is too much are refitted, from rows that are evaluated once.
    """

    def __init__(self, solved: "StreamFit", machines: Machines, sink: Sink) -> None:
        self.solved, self.machines, self.sink = solved, machines, sink
        self.size = solved.stream.block or solved.size
        self.lost: Lost = {}
        self.read = torch.zeros(3, dtype=torch.int64, device="cpu")  # checksums of all rows written so far
        self.f = solved.with_bias(machines.f)  # (R, c', p')
        self.worst = self.f.new_zeros(())  # the largest 1 / (1 - h) of all sets but those that are lost

    def _read(self, rows: Tensor) -> tuple[Block, Tensor, Tensor, Tensor]:
        """Rows (b,): the block, U (p', b), residuals (R, c, b) and weights (b,)."""
        part = self.solved.stream.take(self.solved.function, rows)
        U = self.machines.rotated(part.X, fold=False).double()
        e = self.machines.residuals(U, part)
        if self.solved.moments.centre:
            U = torch.cat([U, torch.ones_like(U[:1])])
        return part, U, e, part.weight.double()

    def _note(self, lost: Tensor, r: int, j: int, sets: Tensor, small: bool) -> None:
        """Take note of the sets (g, s) that are lost, (g,)."""
        if bool(lost.any()):
            self.lost.setdefault((r, j), []).extend((sets[k], small) for k in lost.nonzero()[:, 0].tolist())

    def _differs(self, B: Tensor, scale: Tensor, inverse: Tensor) -> Tensor:
        """Which sets (g,) the rounding of kernel columns may change too much."""
        zeta = scale.square()
        longest = (B.square().sum(-1, keepdim=True) / zeta).sqrt()  # (g, s, 1)
        largest, farthest, worst = (part.amax((-2, -1)) for part in (zeta, longest, inverse * zeta))
        change = self.machines.rounding * largest * farthest * worst
        return change > _DIFFERS[self.solved.expansion.kind]

    def _weigh(self, diagonal: Tensor) -> None:
        """Take note of the diagonal of an inverse of I - B B^T or I - B^T B."""
        self.worst = torch.maximum(self.worst, diagonal.max())

    def _write(self, part: Block, residuals: Tensor, variance: Tensor, rows: Tensor) -> None:
        """Held-out residuals (R, c, b) and variances (R, c', b) of rows (b,), each of them once."""
        self.sink.write(part, residuals, variance, rows)
        if not self.solved.stream.lasting:
            self.read += checksum(part, rows)

    def small(self, sets: Tensor) -> None:
        """Sets (g, s) of no more rows than a block has, or than there are features."""
        g, s = sets.shape
        few = s <= self.f.shape[-1]
        unit = torch.eye(self.f.shape[-1], dtype=self.f.dtype, device=self.f.device)
        part, U, e, zeta = self._read(sets.flatten())
        scale = zeta.sqrt().reshape(g, s, 1)
        V = U.mT.reshape(g, s, -1) * scale
        residuals, variance = torch.empty_like(e), torch.empty_like(e[:, : self.machines.regs.shape[1]])
        for r, j, outputs in self.machines.each:
            e_L = e[r, outputs].unflatten(-1, (g, s)).permute(1, 2, 0)  # (g, s, c)
            given = (V * self.f[r, j].sqrt(), scale, e_L, self.machines.least[r, j])
            r_L, inverse, lost = leave_out_small(*given) if few else leave_out_large(*given, unit)
            self._note(lost | self._differs(*given[:2], inverse), r, j, sets, few)
            self._weigh(inverse * scale.square())
            residuals[r, outputs] = r_L.permute(2, 0, 1).flatten(1)
            variance[r, j] = self.machines.regs[r, j] * inverse.flatten()
        self._write(part, residuals, variance, sets.flatten())

    def large(self, rows: Tensor) -> None:
        """One set (s,) of more rows than a block has, and than there are features."""
        p, (R, c) = self.f.shape[-1], self.machines.offset.shape
        A, t = self.f.new_zeros(p, p), self.f.new_zeros(R, c, p)
        for some in rows.split(self.size):
            _, U, e, zeta = self._read(some)
            add_symmetric(A, U, zeta)
            t += (zeta * e) @ U.mT
        mirrored(A)
        unit = torch.eye(p, dtype=A.dtype, device=A.device)
        inverses, roots = [], self.f.sqrt()  # (R, c', p')
        for r, j, _ in self.machines.each:
            root = roots[r, j]
            rest = unit - root.unsqueeze(-1) * A * root
            W, lost = root_of_rest(rest, self.machines.least[r, j])
            self._note(lost.reshape(1), r, j, rows.unsqueeze(0), small=False)
            self._weigh(W.square().sum(-2))
            inverses.append(W)
        for some in rows.split(self.size):
            part, U, e, zeta = self._read(some)
            variance = torch.empty_like(e[:, : self.machines.regs.shape[1]])
            scale = zeta.sqrt().unsqueeze(-1)
            for (r, j, outputs), W in zip(self.machines.each, inverses, strict=True):
                B = U.mT * scale * roots[r, j]
                given = (B, scale, e[r, outputs].mT, W, (roots[r, j] * t[r, outputs]).mT)
                r_L, inverse = rows_of_large(*given)
                e[r, outputs], variance[r, j] = r_L.mT, self.machines.regs[r, j] * inverse[:, 0]
            self._write(part, e, variance, some)
