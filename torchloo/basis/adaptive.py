"""Selectors that use the current residual of every row, which each choice changes."""

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

    Keeps the residual E of the kernel matrix, by a rank-one update for each vector; adding vector j lowers
    the error by mean_i E_ij^2 / (E_jj k_ii).

    Time n^2 m: the matrix is read and written once for each vector. Memory 2 n^2.

    Reference: Baudat and Anouar (2001), whose criterion is J; Cawley and Talbot (2004), 2.4.
    """

    def _rule(self, factor: Factor, y: Tensor | None, weight: Tensor | None) -> Propose:
        scale = factor.gram.scale
        E = factor.gram.matrix() * scale.unsqueeze(-1)
        E.mul_(scale.unsqueeze(-2))
        rows_in_tile = _TILE // max(1, E.shape[-1])
        tiles = E.split(max(1, rows_in_tile), dim=-2)

        def propose() -> Proposal:
            u = factor.L[..., -1:, :]  # (..., 1, n), or (..., 0, n) at first
            total = torch.zeros_like(factor.residual)
            start = 0
            for tile in tiles:
                stop = start + tile.shape[-2]
                if factor.count:
                    tile -= u[..., start:stop].mT * u
                total += tile.square().sum(-2)
                start = stop
            gain = torch.where(factor.eligible, total / factor.residual, -1.0)
            return gain.argmax(-1, keepdim=True), None

        return propose


@dataclass(frozen=True)
class stochastic(Seeded):  # noqa: N801
    """The best of random candidates by the greedy criterion on random rows, one vector after another.

    Args:
        candidates: number of candidates drawn for each vector; the best of 59 is among the best 5 % with
            probability 95 %.
        rows: number of rows that the gain of a candidate is averaged over, drawn again for each vector.

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
        *batch, n = factor.residual.shape

        def propose() -> Proposal:
            uniform = draw(2, n).to(factor.residual)
            priority = torch.where(factor.eligible, uniform[0], -1.0)
            candidates = priority.topk(min(self.candidates, n)).indices  # (..., b)
            rows = uniform[1].topk(min(self.rows, n)).indices
            rows = rows.expand(*batch, -1)  # (..., a)
            explained = factor.columns(rows).mT @ factor.columns(candidates)
            E = gram(rows, candidates) - explained  # (..., a, b)
            residual = factor.residual.take_along_dim(candidates, -1)
            eligible = factor.eligible.take_along_dim(candidates, -1)
            gain = torch.where(eligible, E.square().sum(-2) / residual, -1.0)
            best = gain.argmax(-1, keepdim=True)
            return candidates.take_along_dim(best, -1), None

        return propose


@dataclass(frozen=True)
class pivoted(Selector):  # noqa: N801
    """The row with the largest relative reconstruction error: Cholesky with complete pivoting.

    Deterministic. Time n m^2, memory n m.
    """

    def _rule(self, factor: Factor, y: Tensor | None, weight: Tensor | None) -> Propose:
        return lambda: (factor.residual.argmax(-1, keepdim=True), None)


@dataclass(frozen=True)
class rpcholesky(Seeded):  # noqa: N801
    """A row drawn with probability proportional to its relative reconstruction error, one after another.

    Randomly pivoted Cholesky of the normalised kernel matrix, whose trace is the reported error, so that the
    theorem on its expected error applies to it. Rows are proposed in blocks, drawn with their residuals
    before the block. When its turn comes, a row is accepted with probability (residual now) / (residual
    before the block), which gives exactly the distribution of drawing one by one.

    Time n m^2, in matrix products; memory n m.

    Reference: Chen, Epperly, Tropp and Webber (2023), "Randomly pivoted Cholesky", algorithm 1; Epperly,
    Tropp and Webber (2024), "Embrace rejection", for the blocks.
    """

    def _rule(self, factor: Factor, y: Tensor | None, weight: Tensor | None) -> Propose:
        draw = self._draw()
        count_before = -1

        def propose() -> Proposal | None:
            nonlocal count_before
            if factor.count == count_before:  # the residuals of all rows drawn last were rounding errors
                return None
            count_before = factor.count
            uniform = draw(2, BLOCK).to(factor.residual.device)
            cumulative = (factor.residual * factor.eligible).cumsum(-1, dtype=torch.float64)  # (..., n)
            total = cumulative[..., -1:]
            # Just below 1, as rounding might otherwise lead past the last eligible row.
            drawn = uniform[0].clamp(max=1 - 1e-15) * total
            rows = torch.searchsorted(cumulative, drawn, right=True)
            rows = rows.clamp(max=cumulative.shape[-1] - 1)  # for problems of a batch that are finished
            residual = factor.residual.take_along_dim(rows, -1)
            return rows, uniform[1].to(residual) * residual

        return propose
