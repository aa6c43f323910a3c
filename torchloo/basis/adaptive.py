"""Selectors that look at what is left of every row, again after each choice."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from torchloo.basis.pivots import Factor, Proposal
from torchloo.basis.selector import BLOCK, Propose, Seeded, Selector

__all__ = ["greedy", "pivoted", "rpcholesky", "stochastic"]

_TILE = 1 << 17  # numbers of a tile that fits the cache of a CPU


@dataclass(frozen=True)
class greedy(Selector):  # noqa: N801
    """The vector that lowers the reconstruction error most, one after another.

    Keeps E, what is left of the kernel matrix, by a rank-one update for each vector; adding vector j lowers
    the error by mean_i E_ij^2 / (E_jj k_ii).

    Time n^2 m: the matrix is read and written once for each vector. Memory 2 n^2.

    Reference: Baudat and Anouar (2001), whose criterion is J; Cawley and Talbot (2004), 2.4.
    """

    def _rule(self, factor: Factor, y: Tensor | None, weight: Tensor | None) -> Propose:
        scale = factor.gram.scale
        E = (factor.gram.matrix() * scale.unsqueeze(-1)).mul_(scale.unsqueeze(-2))
        tiles = E.split(max(1, _TILE // max(1, E.shape[-1])), dim=-2)

        def propose() -> Proposal:
            u = factor.L[..., -1:, :]  # (..., 1, n), or (..., 0, n) at first
            total = torch.zeros_like(factor.rest)
            start = 0
            for tile in tiles:
                stop = start + tile.shape[-2]
                if factor.count:
                    tile -= u[..., start:stop].mT * u
                total += tile.square().sum(-2)
                start = stop
            gain = torch.where(factor.open, total / factor.rest, -1.0)
            return gain.argmax(-1, keepdim=True), None

        return propose


@dataclass(frozen=True)
class stochastic(Seeded):  # noqa: N801
    """The best of random candidates by the greedy criterion on random rows, one vector after another.

    Args:
        candidates: how many candidates to draw for each vector; the best of 59 is among the best 5 % with a
            certainty of 95 %.
        rows: how many rows the gain of a candidate is averaged over, drawn anew for each vector.

    Time n m^2 / 2 + candidates rows m^2 / 2, memory n m.

    Reference: Cawley and Talbot (2004), 2.4; Smola and Schoelkopf (2000) for the 59.
    """

    candidates: int = field(default=59, kw_only=True)
    rows: int = field(default=1000, kw_only=True)

    def __post_init__(self, generator: torch.Generator | None) -> None:
        super().__post_init__(generator)
        self._count("candidates")
        self._count("rows")

    def _rule(self, factor: Factor, y: Tensor | None, weight: Tensor | None) -> Propose:
        draw, gram = self._draw(), factor.gram
        n = factor.rest.shape[-1]

        def propose() -> Proposal:
            lots = draw(2, n).to(factor.rest)
            among = torch.where(factor.open, lots[0], -1.0)
            candidates = among.topk(min(self.candidates, n)).indices  # (..., b)
            rows = lots[1].topk(min(self.rows, n)).indices.expand(*factor.rest.shape[:-1], -1)  # (..., a)
            left, right = (factor.L.take_along_dim(some.unsqueeze(-2), -1) for some in (rows, candidates))
            E = gram(rows, candidates) - left.mT @ right  # (..., a, b)
            rest = factor.rest.take_along_dim(candidates, -1)
            gain = torch.where(factor.open.take_along_dim(candidates, -1), E.square().sum(-2) / rest, -1.0)
            return candidates.take_along_dim(gain.argmax(-1, keepdim=True), -1), None

        return propose


@dataclass(frozen=True)
class pivoted(Selector):  # noqa: N801
    """The row that is reconstructed worst, relative to its length: Cholesky with complete pivoting.

    Deterministic. Time n m^2, memory n m.
    """

    def _rule(self, factor: Factor, y: Tensor | None, weight: Tensor | None) -> Propose:
        return lambda: (factor.rest.argmax(-1, keepdim=True), None)


@dataclass(frozen=True)
class rpcholesky(Seeded):  # noqa: N801
    """A row drawn with probability proportional to its relative reconstruction error, one after another.

    Randomly pivoted Cholesky of the normalised kernel matrix, whose trace is what the error measures, so
    that the theorem on its expected error applies to the error reported. Rows are proposed in blocks: one
    drawn with what was left of it before the block is kept with the probability that still is left over
    that, which gives exactly the distribution of drawing one by one.

    Time n m^2, in matrix products; memory n m.

    Reference: Chen, Epperly, Tropp and Webber (2023), "Randomly pivoted Cholesky", algorithm 1; Epperly,
    Tropp and Webber (2024), "Embrace rejection", for the blocks.
    """

    def _rule(self, factor: Factor, y: Tensor | None, weight: Tensor | None) -> Propose:
        draw = self._draw()
        before = -1

        def propose() -> Proposal | None:
            nonlocal before
            if factor.count == before:  # of all the rows drawn last, none could be told from rounding
                return None
            before = factor.count
            lots = draw(2, BLOCK).to(factor.rest.device)
            mass = (factor.rest * factor.open).cumsum(-1, dtype=torch.float64)  # (..., n)
            total = mass[..., -1:]
            # Just below 1, as rounding might else lead past the last row with any mass.
            rows = torch.searchsorted(mass, lots[0].clamp(max=1 - 1e-15) * total, right=True)
            rows = rows.clamp(max=mass.shape[-1] - 1)  # where nothing is left in a batch
            return rows, lots[1].to(factor.rest) * factor.rest.take_along_dim(rows, -1)

        return propose
