"""Choosing the basis of a sparse machine: selectors, called as selector(kernel, X) -> Basis.

A selector stops at m vectors, at a mean relative reconstruction error of `tolerance`, or when what is left
of every row is rounding ("no longer invertible"). All of them measure the error alike; see Note
[reconstruction error] in pivots.py. No gradient passes through a choice.

| selector | rule | time | memory |
|---|---|---|---|
| greedy | the vector that lowers the error most | n^2 m | n^2 |
| stochastic | the best of some candidates on some rows | n m^2 | n m |
| pivoted | the row reconstructed worst | n m^2 | n m |
| rpcholesky | a row drawn by its error | n m^2 | n m |
| pruned | what is left when small coefficients are dropped again and again | n^3 | n^2 |
| random | rows drawn alike | n m^2 | n m |
| all | every row | n^3 | n^2 |

Random choices draw a seed from `generator` once, when the selector is made: called again on the same data it
gives the same basis, on every device, so that `fit` and `loo` of one machine speak of the same one. All
problems of a batch draw the same numbers: a batch equals its loop.

>>> X = torch.linspace(0, 1, 50, dtype=torch.float64).unsqueeze(-1)
>>> chosen = rpcholesky(40, tolerance=1e-6)(RBF(lengthscale=0.2), X)
>>> chosen.stopped, bool(chosen.errors[-1] <= 1e-6), len(chosen.indices) < 20
('tolerance', True, True)
"""

from collections.abc import Callable
from dataclasses import InitVar, dataclass, field

import torch
from torch import Tensor
from tqdm import tqdm

from torchloo.guards import Guard, values_visible
from torchloo.kernels import RBF, Kernel  # noqa: F401  RBF is for the example
from torchloo.pivots import Basis, Factor, NormalisedKernel, Proposal
from torchloo.smoothers import solve_dual

__all__ = ["Basis", "Selector", "all", "greedy", "pivoted", "pruned", "random", "rpcholesky", "stochastic"]

Propose = Callable[[], Proposal | None]

_BLOCK = 64  # rows proposed at once where a rule can
_TILE = 1 << 17  # numbers of a tile that fits the cache of a CPU


@dataclass(frozen=True)
class Selector:
    """A rule for choosing basis vectors, and when to stop.

    Args:
        m: largest number of vectors; None: as many as there are rows.
        tolerance: mean relative reconstruction error that is small enough.
        progress: show a progress bar where it takes more than a few seconds.
    """

    m: int | None = None
    tolerance: float = field(default=0.0, kw_only=True)
    progress: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        if self.m is not None:
            self._count(m=self.m)
        if not isinstance(self.tolerance, float | int) or not 0 <= self.tolerance < 1:
            raise ValueError(f"{self._name}: tolerance must be from 0 to below 1, got {self.tolerance}")

    @torch.no_grad()
    def __call__(
        self, kernel: Kernel, X: Tensor, y: Tensor | None = None, weight: Tensor | None = None
    ) -> Basis:
        """Choose among the rows of X (..., n, d); y (..., n) or (..., n, c) and weight matter to `pruned`."""
        guard = Guard(self._name)
        gram = NormalisedKernel(guard, kernel, X)
        n = X.shape[-2]
        if self.m is not None and self.m > n:
            raise ValueError(f"{self._name}: m must be at most the number of rows, {n}, got {self.m}")
        factor = Factor(guard, gram, n if self.m is None else self.m, self.tolerance)
        propose = self._rule(factor, y, weight)
        with tqdm(
            total=factor.m, desc=self._name, unit="vector", delay=3, leave=False, disable=not self.progress
        ) as bar:
            return factor.grow(propose, bar.update)

    def _rule(self, factor: Factor, y: Tensor | None, weight: Tensor | None) -> Propose:
        """A function that proposes rows for the factor as it stands."""
        raise NotImplementedError

    @property
    def _name(self) -> str:
        return type(self).__name__

    def _count(self, **count: object) -> None:
        ((name, value),) = count.items()
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{self._name}: {name} must be a positive integer, got {value!r}")


@dataclass(frozen=True)
class _Seeded(Selector):
    generator: InitVar[torch.Generator | None] = field(default=None, kw_only=True)
    seed: int = field(init=False)

    def __post_init__(self, generator: torch.Generator | None) -> None:
        super().__post_init__()
        device = None if generator is None else generator.device
        drawn = torch.randint(2**62, (), generator=generator, device=device)
        object.__setattr__(self, "seed", int(drawn) if values_visible(drawn) else 0)

    def _draw(self) -> Callable[..., Tensor]:
        """A source of numbers from 0 to 1, of given shape, drawn on the host; always the same sequence."""
        generator = torch.Generator().manual_seed(self.seed)
        return lambda *shape: torch.rand(*shape, generator=generator, dtype=torch.float64, device="cpu")


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
class stochastic(_Seeded):  # noqa: N801
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
        self._count(candidates=self.candidates)
        self._count(rows=self.rows)

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
class rpcholesky(_Seeded):  # noqa: N801
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
            lots = draw(2, _BLOCK).to(factor.rest.device)
            mass = (factor.rest * factor.open).cumsum(-1, dtype=torch.float64)  # (..., n)
            total = mass[..., -1:]
            # Just below 1, as rounding might else lead past the last row with any mass.
            rows = torch.searchsorted(mass, lots[0].clamp(max=1 - 1e-15) * total, right=True)
            rows = rows.clamp(max=mass.shape[-1] - 1)  # where nothing is left in a batch
            return rows, lots[1].to(factor.rest) * factor.rest.take_along_dim(rows, -1)

        return propose


class _InOrder(Selector):
    """Rows in an order known before, without those that depend on earlier ones; Note [least pivot]."""

    def _order(self, factor: Factor, y: Tensor | None, weight: Tensor | None) -> Tensor:
        """All rows, (..., n)."""
        raise NotImplementedError

    def _rule(self, factor: Factor, y: Tensor | None, weight: Tensor | None) -> Propose:
        order = self._order(factor, y, weight).expand_as(factor.rest)
        blocks = iter(order.split(_BLOCK, dim=-1))

        def propose() -> Proposal | None:
            rows = next(blocks, None)
            return None if rows is None else (rows, None)

        return propose


@dataclass(frozen=True)
class pruned(_InOrder):  # noqa: N801
    """What is left when the rows of smallest coefficients are dropped from an LS-SVM, again and again.

    Starts with an LS-SVM of all rows and retrains it on those left after each round. Rows are ranked by how
    long they stay (in one round, by the size of their coefficients), and the basis is the top of the ranking.
    It needs y, with several outputs the norm of the coefficients of a row counts.

    Args:
        reg: regularisation of the LS-SVM, a positive number or tensor of batch shape.
        drop: part of the rows dropped in each round.

    Time: 7 trainings on all rows for drop = 0.05, n^3/3 each. Memory n^2.

    Reference: Suykens, De Brabanter, Lukas and Vandewalle (2002), "Weighted least squares support vector
    machines", 4; Cawley and Talbot (2004), 2.4.
    """

    reg: Tensor | float = field(default=1.0, kw_only=True)
    drop: float = field(default=0.05, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.drop, float) or not 0 < self.drop < 1:
            raise ValueError(f"pruned: drop must be between 0 and 1, got {self.drop}")

    def _order(self, factor: Factor, y: Tensor | None, weight: Tensor | None) -> Tensor:
        K, n = factor.gram.matrix(), factor.rest.shape[-1]
        Y = self._targets(y, n, factor.gram.ndim)
        if weight is not None and (weight.ndim < 1 or weight.shape[-1] != n):
            raise ValueError(f"pruned: weight must have {n} entries, got shape {tuple(weight.shape)}")
        left = torch.arange(n, device=K.device).expand_as(factor.rest)
        dropped: list[Tensor] = []
        while left.shape[-1] > 1:
            size = self._coefficients(K, Y, weight, left).norm(dim=-1)  # (..., r)
            left = left.take_along_dim(size.argsort(dim=-1, descending=True, stable=True), -1)
            stay = left.shape[-1] - max(1, int(self.drop * left.shape[-1]))
            dropped.append(left[..., stay:])
            left = left[..., :stay]
        return torch.cat([left, *reversed(dropped)], -1)

    @staticmethod
    def _targets(y: Tensor | None, n: int, ndim: int) -> Tensor:
        if y is None:
            raise ValueError("pruned: y must be given, as coefficients depend on the targets; got None")
        Y = y.unsqueeze(-1) if y.ndim == ndim - 1 else y
        if Y.ndim != ndim or Y.shape[-2] != n:
            raise ValueError(f"pruned: y must have {n} rows to match X, got shape {tuple(y.shape)}")
        return Y

    def _coefficients(self, K: Tensor, Y: Tensor, weight: Tensor | None, rows: Tensor) -> Tensor:
        K = K.take_along_dim(rows.unsqueeze(-1), -2).take_along_dim(rows.unsqueeze(-2), -1)
        Y = Y.expand(*rows.shape[:-1], *Y.shape[-2:]).take_along_dim(rows.unsqueeze(-1), -2)
        if weight is not None:
            weight = weight.expand(*rows.shape[:-1], -1).take_along_dim(rows, -1)
        return solve_dual(Guard("pruned"), K, Y, self.reg, weight, bias=True).checked().columns


@dataclass(frozen=True)
class random(_Seeded, _InOrder):  # noqa: N801
    """Rows drawn alike, without those that depend on others already drawn. Time n m^2, memory n m."""

    def _order(self, factor: Factor, y: Tensor | None, weight: Tensor | None) -> Tensor:
        return self._draw()(factor.rest.shape[-1]).argsort().to(factor.rest.device)


@dataclass(frozen=True)
class all(_InOrder):  # noqa: N801
    """Every row in its order, also those that depend on others. Time n^3, memory n^2.

    The errors are those of the rows that do not depend on earlier ones to about half the digits of a number,
    Note [least pivot]: bounds from above, as the others may still help.
    """

    m: None = field(default=None, init=False)

    def __call__(
        self, kernel: Kernel, X: Tensor, y: Tensor | None = None, weight: Tensor | None = None
    ) -> Basis:
        """All rows of X (..., n, d), or the first ones until the error is small enough."""
        chosen = super().__call__(kernel, X, y, weight)
        if not values_visible(chosen.indices):
            return chosen
        enough = chosen.errors[..., -1] <= self.tolerance
        size = torch.where(enough & (self.tolerance > 0), chosen.indices[..., -1] + 1, X.shape[-2])
        last = size.unsqueeze(-1) - 1
        place = torch.arange(int(size.max()), device=size.device).minimum(last)  # (..., k)
        before = torch.searchsorted(chosen.indices, place, right=True) - 1  # the last one that counts
        errors = chosen.errors.take_along_dim(before.clamp(min=0), -1)
        empty = kernel.diagonal(X).gt(0).to(errors).mean(-1, keepdim=True)  # the error without any vector
        errors = torch.where(before < 0, empty, errors).detach()
        return Basis(place, errors, size, "tolerance" if chosen.stopped == "tolerance" else "size")

    def _order(self, factor: Factor, y: Tensor | None, weight: Tensor | None) -> Tensor:
        return torch.arange(factor.rest.shape[-1], device=factor.rest.device)
