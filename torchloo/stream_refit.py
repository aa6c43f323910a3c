"""Sets of rows of a stream refitted, where their closed form would cancel; Note [leaving out by sums]."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from torchloo.blocks import NOT_DEFINITE
from torchloo.guards import Guard
from torchloo.machines import Machines
from torchloo.moments import add_symmetric
from torchloo.primal import sum_of_others
from torchloo.sink import Sink

if TYPE_CHECKING:
    from torchloo.streaming import StreamFit

__all__ = ["Lost", "refit"]

Lost = dict[tuple[int, int], list[tuple[Tensor, bool]]]
"""Sets of rows, and whether they are to be marked as refitted, by regularisation and output."""

# How many numbers the normal matrices of sets may take at once.
_CHUNK = 1 << 23


class _Set(NamedTuple):
    """Rows that are left out together."""

    D: Tensor
    """Features about the mean, and a row of ones for the bias, (p', s)."""
    zeta: Tensor
    """Weights, (s,)."""
    Y: Tensor
    """Targets, (s, c)."""


def _joined(parts: list[_Set]) -> _Set:
    D, zeta, Y = zip(*parts, strict=True)
    return _Set(torch.cat(D, 1), torch.cat(zeta), torch.cat(Y))


def refit(solved: "StreamFit", machines: Machines, sink: Sink, lost: Lost) -> None:
    """Write the rows of lost sets, in two passes for as many sets as a block has rows."""
    everywhere = sorted({key for keys in solved.others.gather(list(lost)) for key in keys})
    own = machines.regs.shape[1]
    for r, j in everywhere:
        outputs = slice(None) if own == 1 else slice(j, j + 1)
        sets = lost.get((r, j), [])
        rounds = list(_rounds(sets, max(solved.size, len(solved.moments.S) + 1)))
        for k in range(max(solved.others.gather(len(rounds)))):
            some = rounds[k] if k < len(rounds) else []
            refits = _Round(solved, machines.regs[r, j], outputs, [rows for rows, _ in some])
            for (rows, mark), (residuals, variance) in zip(some, refits.solve(), strict=True):
                sink.overwrite(rows, r, j, outputs, residuals, variance, mark)


def _rounds(sets: list[tuple[Tensor, bool]], limit: int) -> Iterator[list[tuple[Tensor, bool]]]:
    """Sets in turn, together of at most so many rows, but at least one."""
    some: list[tuple[Tensor, bool]] = []
    for rows, mark in sets:
        if some and sum(len(before) for before, _ in some) + len(rows) > limit:
            yield some
            some = []
        some.append((rows, mark))
    if some:
        yield some


class _Round:
    """Refits of a few sets of this process, and of those of the others, by two passes."""

    def __init__(self, solved: "StreamFit", reg: Tensor, outputs: slice, sets: list[Tensor]) -> None:
        self.solved, self.reg, self.outputs, self.rows = solved, reg, outputs, sets
        n, S, T = solved.stream.n, solved.moments.S, solved.moments.T[:, outputs]
        assert n is not None
        self.number = torch.full((n,), -1, dtype=torch.int32)  # which set a row is in
        for k, rows in enumerate(sets):
            self.number[rows] = k
        p = len(S) + solved.moments.centre
        self.R = torch.diag(torch.cat([reg.expand(len(S)), reg.new_zeros(p - len(S))]))
        self.C, self.right = S.new_zeros(p, p), S.new_zeros(p, T.shape[1])
        self.first = 0
        self.sets: list[_Set] = []

    def _blocks(self, what: str) -> Iterator[tuple[Tensor, _Set]]:
        """Numbers of the sets of the rows, and the rows with all that belongs to them."""
        expansion, moments = self.solved.expansion, self.solved.moments
        for part in self.solved.blocks(what):
            D = expansion.features(expansion.columns(part.X)) - moments.mean_z
            if moments.centre:
                D = torch.cat([D, torch.ones_like(D[:1])])
            number = self.number[part.rows].to(D.device)
            yield number, _Set(D, part.weight.double(), part.Y.double()[:, self.outputs])

    def _gather(self) -> None:
        """The sums over the rows in no set, and the sets themselves."""
        like = self.C
        found: list[list[_Set]] = [[] for _ in self.rows]
        for number, rows in self._blocks("refits: sums"):
            for k in number[number >= 0].unique().tolist():
                at = number == k
                found[k].append(_Set(rows.D[:, at], rows.zeta[at], rows.Y[at]))
            V = rows.D * (rows.zeta * (number < 0)).sqrt()
            add_symmetric(self.C, V)
            self.right += V @ (rows.zeta.sqrt().unsqueeze(-1) * rows.Y)
        own = [_joined(parts) for parts in found]
        self.C, self.right = self.solved.others.sums(self.C, self.right)
        self.C = self.C.tril() + self.C.tril(-1).mT
        everyone = self.solved.others.gather([_Set(*(t.cpu() for t in s)) for s in own])
        self.first = sum(len(sets) for sets in everyone[: self.solved.others.rank])
        self.sets = [_Set(*(t.to(like.device) for t in s)) for sets in everyone for s in sets]

    def _chunks(self) -> Iterator[tuple[range, Tensor, Tensor]]:
        """Own sets a few at a time: their numbers, and the normal equations without each, (g, p', .)."""
        p = len(self.C)
        step = max(1, _CHUNK // (p * p))
        last = self.first + len(self.rows)
        for start in range(self.first, last, step):
            chunk = range(start, min(start + step, last))
            C, right = self.C + self.R, self.right
            for k, s in enumerate(self.sets):
                if k not in chunk:
                    C = C + (s.D * s.zeta) @ s.D.mT
                    right = right + (s.D * s.zeta) @ s.Y
            some = [self.sets[k] for k in chunk]
            yield (
                chunk,
                C + sum_of_others(torch.stack([(s.D * s.zeta) @ s.D.mT for s in some])),
                right + sum_of_others(torch.stack([(s.D * s.zeta) @ s.Y for s in some])),
            )

    def _gradient(self, coef: Tensor) -> Tensor:
        """Normal equations of coefficients (G, p', c) of all sets, over the rows in no set, (G, p', c)."""
        G, p, c = coef.shape
        flat = coef.transpose(0, 1).reshape(p, G * c)
        total = torch.zeros_like(flat)
        for number, rows in self._blocks("refits: refinement"):
            e = rows.Y.unsqueeze(1) - (rows.D.mT @ flat).unflatten(-1, (G, c))  # (b, G, c)
            total += rows.D @ (e * (rows.zeta * (number < 0))[:, None, None]).flatten(1)
        (total,) = self.solved.others.sums(total)
        return total.unflatten(-1, (G, c)).transpose(0, 1)

    def solve(self) -> list[tuple[Tensor, Tensor]]:
        """Held-out residuals (s, c) and variances (s, 1) of the sets of this process."""
        self._gather()
        guard = Guard(self.solved.function)
        coefs = []
        for _, C, right in self._chunks():
            L, info = torch.linalg.cholesky_ex(C)
            guard.require(info == 0, NOT_DEFINITE)
            coefs.append(torch.cholesky_solve(right, L))
        guard.check()
        none = self.right.new_zeros(0, *self.right.shape)
        mine = torch.cat(coefs) if coefs else none
        coef = torch.cat([t.to(none.device) for t in self.solved.others.gather(mine.cpu())])
        gradient = self._gradient(coef)
        out = []
        for chunk, C, _ in self._chunks():
            L = torch.linalg.cholesky(C)
            for at, k in enumerate(chunk):
                g, own = gradient[k] - self.R @ coef[k], self.sets[k]
                for other, s in enumerate(self.sets):
                    if other != k:
                        g = g + (s.D * s.zeta) @ (s.Y - s.D.mT @ coef[k])
                p_k = coef[k] + torch.cholesky_solve(g, L[at])
                root = torch.linalg.solve_triangular(L[at], own.D, upper=False)
                variance = self.reg * (root.square().sum(0) + 1 / own.zeta)
                out.append((own.Y - own.D.mT @ p_k, variance.unsqueeze(-1)))
        return out
