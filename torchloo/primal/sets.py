"""Clusters of a stream, left out together.

Their rows are gathered wherever they are, many sets of like size at a time, for all machines of a path at
once; a set with more rows than features and than a block is visited twice, first for its sums. See
Note [leaving sets out].
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torchloo.clusters import PaddedSets, Partition
from torchloo.panels import add_symmetric, mirrored
from torchloo.primal.block import Block
from torchloo.primal.leaving_out import leave_out, root_of_rest, rows_of_large
from torchloo.primal.machines import LARGE, ImpreciseError, Machines, ProblemsApartError
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
    solved.others.run(lambda: _visits(visit, partition))
    large = any(solved.others.gather(visit.has_large))
    if large and machines.drop_shortcuts():
        return leave_out_sets(solved, machines, partition, sink)
    if solved.expansion.kind != torch.float64 and any(solved.others.gather(visit.found_lost)):
        raise ImpreciseError
    if visit.apart:
        raise ProblemsApartError(sorted(visit.apart))
    return refit(solved, machines, sink, visit.lost)


def _visits(visit: "_Visit", partition: Partition) -> None:
    """Go to all sets, under a bar."""
    stream = visit.solved.stream
    stream.spool(visit.solved.function, visit.solved.blocks("spooling"))
    assert stream.n is not None
    largest = max(visit.size, visit.f.shape[-1])
    with stream.bar("clusters") as bar:
        for sets in partition.padded(stream.n, visit.f.numel()).chunks(visit.size):
            padded = PaddedSets(sets, stream.n)
            if sets.shape[1] > largest:
                visit.large(padded.rows)
            else:
                visit.small(padded)
            bar.update(len(padded.rows))
    visit.find_lost()
    if not stream.lasting:
        visit.solved.moments.seen.require_all(visit.solved.function, visit.read)


# So many numbers of rows of several machines are computed together, or those of one machine.
_TOGETHER = 1 << 20

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
        self.size = solved.size
        self.lost: Lost = {}
        self.apart: set[int] = set()  # numbers of the problems of a batch that have lost sets
        self._judged: list[tuple[Tensor, int, Callable[[int], Tensor], bool]] = []
        self.read = torch.zeros(3, dtype=torch.int64, device="cpu")  # checksums of all rows written so far
        self.f = machines.f_with_bias  # (..., R, c', p')
        self.worst = self.f.new_zeros(())  # the largest 1 / (1 - h) of all sets but those that are lost
        self.has_large = False  # whether some leverage is large

    def _read(self, rows: Tensor) -> tuple[Block, Tensor, Tensor, Tensor]:
        """Rows (b,): the block, U (..., p', b), residuals (..., R, c, b) and weights (..., b)."""
        part = self.solved.stream.take(self.solved.function, rows)
        U = self.machines.rotated(part.X, fold=False, ones=True).double()
        e = self.machines.residuals(U[..., : self.machines.rotation.shape[-1], :], part)
        return part, U, e, part.weight.double()

    @property
    def found_lost(self) -> bool:
        """Whether any set is lost."""
        return bool(self.lost or self.apart)

    def find_lost(self) -> None:
        """Take note of all sets that are lost, in one look at the values, or two if there are some."""
        questions = [lost.any() for lost, *_ in self._judged]
        *some, self.has_large = torch.stack([*questions, self.worst * (1 - LARGE) > 1]).tolist()
        for (lost, first, rows_of, small), found in zip(self._judged, some, strict=True):
            if not found:
                continue
            if self.solved.stream.batch:
                self.apart.update(lost.flatten(1).any(1).nonzero()[:, 0].tolist())
                continue
            for r, j, k in lost.nonzero().tolist():
                self.lost.setdefault((first + r, j), []).append((rows_of(k), small))

    def _differs(self, B: Tensor, scale: Tensor, inverse: Tensor) -> Tensor:
        """Which sets (..., r, c', g) the rounding of kernel columns may change too much."""
        zeta = scale.square()
        longest = (B.square().sum(-1, keepdim=True) / zeta).sqrt()  # (..., r, c', g, s, 1)
        largest, farthest, worst = (part.amax((-2, -1)) for part in (zeta, longest, inverse * zeta))
        change = self.machines.rounding[..., None, None, None] * largest * farthest * worst
        return change > _DIFFERS[self.solved.expansion.kind]

    def _weigh(self, diagonal: Tensor) -> None:
        """Take note of the diagonal of an inverse of I - B B^T or I - B^T B."""
        self.worst = torch.maximum(self.worst, diagonal.max())

    def _write(self, part: Block, residuals: Tensor, variance: Tensor, rows: Tensor) -> None:
        """Held-out residuals (..., R, c, b) and variances (..., R, c', b) of rows (b,), each of them once."""
        self.sink.write(part, residuals, variance, rows)
        if not self.solved.stream.lasting:
            self.read += checksum(part, rows)

    def small(self, sets: PaddedSets) -> None:
        """Sets (g, s) of no more rows than a block has, or than there are features."""
        part, U, e, zeta = self._read(sets.rows)
        scale = sets.laid_out(zeta, zeta.min()).sqrt().unsqueeze(-1)  # (..., g, s, 1)
        V = sets.laid_out(U).movedim(-3, -1) * scale  # (..., g, s, p')
        R, own = self.machines.regs.shape[-2:]
        at_once = max(1, _TOGETHER // (V.numel() * own))
        found = []
        for first in range(0, R, at_once):
            found.append(self._without(sets, V, scale, e, first, min(R, first + at_once)))
        residuals, variance = (torch.cat(parts, -3) for parts in zip(*found, strict=True))
        self._write(part, residuals, variance, sets.rows)

    def _without(
        self, sets: PaddedSets, V: Tensor, scale: Tensor, e: Tensor, first: int, last: int
    ) -> tuple[Tensor, Tensor]:
        """Held-out residuals (..., r, c, b) and variances (..., r, c', b) of some machines, r of them."""
        some = slice(first, last)
        f, regs = self.f[..., some, :, :], self.machines.regs[..., some, :]
        least = self.machines.least[..., some, :].unsqueeze(-1)
        scale = scale[..., None, None, :, :, :]
        B = V[..., None, None, :, :, :] * f.sqrt()[..., None, None, :]  # (..., r, c', g, s, p')
        own = regs.shape[-1] > 1
        e_L = sets.laid_out(e[..., some, :, :])  # (..., r, c, g, s)
        e_L = e_L.unsqueeze(-1) if own else e_L.movedim(-3, -1).unsqueeze(-4)  # (..., r, c', g, s, c / c')
        r_L, inverse, lost = leave_out(B, scale, e_L, least)
        if self.solved.expansion.factor is not None:
            lost = lost | self._differs(B, scale, inverse)
        self._judged.append((lost, first, sets.__getitem__, sets.shape[1] <= f.shape[-1]))
        self._weigh(inverse * scale.square())
        r_L = r_L[..., 0] if own else r_L.squeeze(-4).movedim(-1, -3)  # (..., r, c, g, s)
        return sets.taken(r_L), regs.unsqueeze(-1) * sets.taken(inverse[..., 0])

    def large(self, rows: Tensor) -> None:
        """One set (s,) of more rows than a block has, and than there are features."""
        *batch, p = self.f.shape[:-3] + self.f.shape[-1:]
        A, t = self.f.new_zeros(*batch, p, p), self.f.new_zeros(*self.machines.shift.shape, p)
        for some in rows.split(self.size):
            part, U, e, zeta = self._read(some)
            add_symmetric(A, U, zeta)
            t += self.machines.sums(U, part.zeta * e)
        A = mirrored(A)[..., None, None, :, :]
        unit = torch.eye(p, dtype=A.dtype, device=A.device)
        roots = self.f.sqrt()  # (..., R, c', p')
        W, lost = root_of_rest(unit - roots.unsqueeze(-1) * A * roots.unsqueeze(-2), self.machines.least)
        self._judged.append((lost.unsqueeze(-1), 0, lambda _: rows, False))
        self._weigh(W.square().sum(-2))
        for some in rows.split(self.size):
            part, U, e, zeta = self._read(some)
            variance = torch.empty_like(e[..., : self.machines.regs.shape[-1], :])
            scale = zeta.sqrt().unsqueeze(-1)
            for r, j, outputs in self.machines.each:
                root = roots[..., r, j, None, :]
                t_L = (root * t[..., r, outputs, :]).mT
                e_L = e[..., r, outputs, :].mT
                r_L, inverse = rows_of_large(U.mT * scale * root, scale, e_L, W[..., r, j, :, :], t_L)
                e[..., r, outputs, :] = r_L.mT
                variance[..., r, j, :] = self.machines.regs[..., r, j, None] * inverse[..., 0]
            self._write(part, e, variance, some)
