"""Sets of rows of a stream refitted, where their closed form would cancel; Note [leaving out by sums]."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from torchloo.blocks import NOT_DEFINITE
from torchloo.guards import Guard
from torchloo.streaming.collective import Alone
from torchloo.streaming.machines import Machines
from torchloo.streaming.moments import add_symmetric
from torchloo.streaming.sink import Sink
from torchloo.streaming.stream import Block
from torchloo.sums import sum_of_others

if TYPE_CHECKING:
    from torchloo.streaming.solved import StreamFit

__all__ = ["Lost", "refit"]

Lost = dict[tuple[int, int], list[tuple[Tensor, bool]]]
"""Sets of rows, and whether they have no more rows than features, by regularisation and output."""

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
    """Write the rows of lost sets: in two passes for as many small sets as a block has rows, or one large."""
    others, own = solved.others, machines.regs.shape[1]
    for r, j in sorted({key for keys in others.gather(list(lost)) for key in keys}):
        outputs = slice(None) if own == 1 else slice(j, j + 1)
        sets = lost.get((r, j), [])
        for some, large in _rounds(sets, max(solved.size, len(solved.moments.S) + 1), others):
            refits = _Round(solved, machines.regs[r, j], outputs, some, large)
            for rows, residuals, variance in refits.solve():
                sink.overwrite(rows, r, j, outputs, residuals, variance)


def _rounds(
    sets: list[tuple[Tensor, bool]], limit: int, others: Alone
) -> Iterator[tuple[list[Tensor], bool]]:
    """Small sets, together of at most so many rows; then, process after process, one large set at a time."""
    together: list[list[Tensor]] = []
    for rows in (rows for rows, small in sets if small):
        if not together or sum(map(len, together[-1])) + len(rows) > limit:
            together.append([])
        together[-1].append(rows)
    for k in range(max(others.gather(len(together)))):
        yield (together[k] if k < len(together) else []), False
    large = [rows for rows, small in sets if not small]
    for rank, count in enumerate(others.gather(len(large))):
        for k in range(count):
            yield ([large[k]] if rank == others.rank else []), True


class _Round:
    """Refits of a few sets of this process, and of those of the others, by two passes.

    A large set is the only one of all processes: its rows need not be kept, but are read again at last.
    """

    def __init__(
        self, solved: "StreamFit", reg: Tensor, outputs: slice, sets: list[Tensor], large: bool
    ) -> None:
        self.solved, self.reg, self.outputs, self.rows, self.large = solved, reg, outputs, sets, large
        n, S, T = solved.stream.n, solved.moments.S, solved.moments.T[:, outputs]
        assert n is not None
        self.number = torch.full((n,), -1, dtype=torch.int32, device="cpu")  # which set a row is in
        for k, rows in enumerate(sets):
            self.number[rows] = k
        p = len(S) + solved.moments.centre
        self.R = torch.diag(torch.cat([reg.expand(len(S)), reg.new_zeros(p - len(S))]))
        self.C, self.right = S.new_zeros(p, p), S.new_zeros(p, T.shape[1])
        self.first = 0
        self.sets: list[_Set] = []

    def _blocks(self, what: str) -> Iterator[tuple[Tensor, _Set]]:
        """Numbers of the sets of the rows, and the rows with all that belongs to them."""
        for part in self.solved.blocks(what):
            yield self.number[part.rows].to(part.X.device), self._set_of(part)

    def _set_of(self, part: Block) -> _Set:
        expansion, moments = self.solved.expansion, self.solved.moments
        D = expansion.features(expansion.columns(part.X)).sub_(moments.mean_z)
        if moments.centre:
            D = torch.cat([D, torch.ones_like(D[:1])])
        return _Set(D, part.weight.double(), part.Y.double()[:, self.outputs])

    def _sums(self) -> list[_Set]:
        """The sums over the rows in no set, and the sets themselves."""
        empty = _Set(self.C[:, :0], self.C[0, :0], self.right[:0])
        found = [[empty] for _ in self.rows]
        for number, rows in self._blocks("refits: sums"):
            for k in [] if self.large else number[number >= 0].unique().tolist():
                at = number == k
                found[k].append(_Set(rows.D[:, at], rows.zeta[at], rows.Y[at]))
            V = rows.D * (rows.zeta * (number < 0)).sqrt()
            add_symmetric(self.C, V)
            self.right += V @ (rows.zeta.sqrt().unsqueeze(-1) * rows.Y)
        return [_joined(parts) for parts in found]

    def _gather(self) -> None:
        """The same of all processes."""
        own = self.solved.others.together(self._sums)
        self.C, self.right = self.solved.others.sums(self.C, self.right)
        self.C = self.C.tril() + self.C.tril(-1).mT
        everyone = self.solved.others.gather([_Set(*(t.cpu() for t in s)) for s in own])
        self.first = sum(len(sets) for sets in everyone[: self.solved.others.rank])
        self.sets = [_Set(*(t.to(self.C.device) for t in s)) for sets in everyone for s in sets]

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
        return total.unflatten(-1, (G, c)).transpose(0, 1)

    def _solutions(self) -> Tensor:
        """Coefficients without each set of this process, (g, p', c), not yet refined."""
        guard, coefs = Guard(self.solved.function), [self.right.new_zeros(0, *self.right.shape)]
        for _, C, right in self._chunks():
            L, info = torch.linalg.cholesky_ex(C)
            guard.require(info == 0, NOT_DEFINITE)
            coefs.append(torch.cholesky_solve(right, L))
        guard.check()
        return torch.cat(coefs)

    def solve(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Rows (s,) of this process, with held-out residuals (s, c) and variances (s, 1)."""
        self._gather()
        others = self.solved.others
        coef = torch.cat([t.to(self.C.device) for t in others.gather(others.together(self._solutions).cpu())])
        (gradient,) = others.sums(others.together(lambda: self._gradient(coef)).contiguous())
        for chunk, C, _ in self._chunks():
            for k, L in zip(chunk, torch.linalg.cholesky(C), strict=True):
                g = gradient[k] - self.R @ coef[k]
                for other, s in enumerate(self.sets):
                    if other != k:
                        g = g + (s.D * s.zeta) @ (s.Y - s.D.mT @ coef[k])
                refined = coef[k] + torch.cholesky_solve(g, L)
                for rows, own in self._again(k):
                    root = torch.linalg.solve_triangular(L, own.D, upper=False)
                    variance = self.reg * (root.square().sum(0) + 1 / own.zeta)
                    yield rows, own.Y - own.D.mT @ refined, variance.unsqueeze(-1)

    def _again(self, k: int) -> Iterator[tuple[Tensor, _Set]]:
        """The rows of a set of this process, in parts if it is large."""
        rows = self.rows[k - self.first]
        if not self.large:
            yield rows.sort().values, self.sets[k]  # in the order of the passes
        else:
            for some in rows.split(self.solved.size):
                yield some, self._set_of(self.solved.stream.take(self.solved.function, some))
