"""The base classes of selectors: a rule that proposes rows, and conditions to stop."""

from collections.abc import Callable
from dataclasses import InitVar, dataclass, field

import torch
from torch import Tensor
from tqdm import tqdm

from torchloo.basis.pivots import Basis, Factor, NormalisedKernel, Proposal
from torchloo.guards import Guard, values_visible, whole_number
from torchloo.kernels import Kernel

__all__ = ["BLOCK", "Propose", "Seeded", "Selector"]

Propose = Callable[[], Proposal | None]

BLOCK = 64
"""Number of rows proposed at once by rules that can."""


@dataclass(frozen=True)
class Selector:
    """A rule for selecting basis vectors, with stopping conditions.

    Args:
        m: largest number of vectors; None for the number of rows.
        tolerance: mean relative reconstruction error at which to stop.
        progress: show a progress bar after a few seconds.
    """

    m: int | None = None
    tolerance: float = field(default=0.0, kw_only=True)
    progress: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        if self.m is not None:
            self._count("m")
        if not isinstance(self.tolerance, float | int) or not 0 <= self.tolerance < 1:
            raise ValueError(f"{self._name}: tolerance must be from 0 to below 1, got {self.tolerance}")

    @torch.no_grad()
    def __call__(
        self, kernel: Kernel, X: Tensor, y: Tensor | None = None, weight: Tensor | None = None
    ) -> Basis:
        """Choose among the rows of X (..., n, d); only `pruned` uses y (..., n) or (..., n, c) and weight.

        X may be (..., n, *event), where the kernel has an `event_dim`.
        """
        guard = Guard(self._name)
        gram = NormalisedKernel(guard, kernel, X)
        n = gram.n
        if self.m is not None and self.m > n:
            raise ValueError(f"{self._name}: m must be at most the number of rows, {n}, got {self.m}")
        m = n if self.m is None else self.m
        factor = Factor(guard, gram, m, self.tolerance)
        propose = self._rule(factor, y, weight)
        with tqdm(
            total=m,
            desc=self._name,
            unit="vector",
            delay=3,
            leave=False,
            disable=not self.progress,
        ) as bar:
            return factor.grow(propose, bar.update)

    def _rule(self, factor: Factor, y: Tensor | None, weight: Tensor | None) -> Propose:
        """A function that proposes the next rows, given the factor so far."""
        raise NotImplementedError

    @property
    def _name(self) -> str:
        return type(self).__name__

    def _count(self, name: str) -> None:
        """Require a positive integer argument, and store it as an int."""
        count = whole_number(self._name, name, getattr(self, name))
        object.__setattr__(self, name, count)


@dataclass(frozen=True)
class Seeded(Selector):
    """A random rule: the same random numbers at every call, from a seed drawn at construction."""

    generator: InitVar[torch.Generator | None] = field(default=None, kw_only=True)
    seed: int = field(init=False)

    def __post_init__(self, generator: torch.Generator | None) -> None:
        super().__post_init__()
        device = "cpu" if generator is None else generator.device
        drawn = torch.randint(2**62, (), generator=generator, device=device)
        seed = int(drawn) if values_visible(drawn) else 0
        object.__setattr__(self, "seed", seed)

    def _draw(self) -> Callable[..., Tensor]:
        """A source of uniform random numbers of a given shape, on the CPU; always the same sequence."""
        generator = torch.Generator().manual_seed(self.seed)
        return lambda *shape: torch.rand(*shape, generator=generator, dtype=torch.float64, device="cpu")
