"""A table as `torchloo select` works on it: what is asked, the tensors, and answers in its own order."""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchloo.catalogue import KERNELS
from torchloo.commands.spec import Spec
from torchloo.commands.tables import Prepared
from torchloo.criteria import CRITERIA
from torchloo.held_out import HeldOut

__all__ = ["Answers", "Plan", "Problem"]


@dataclass(frozen=True)
class Plan:
    """What is asked for."""

    spec: Spec
    criterion: str
    search: str
    prior: float | None
    outer: int
    seed: int
    device: str
    progress: bool
    time_budget: float | None = None
    """Seconds for searches, of the choice and of the outer estimate together."""
    several_classes: bool = False
    """One column of targets for each of more than two classes."""

    @property
    def time_of_each(self) -> float | None:
        """Seconds for the choice, and as many for the outer estimate if there is one."""
        return None if self.time_budget is None else self.time_budget / (2 if self.outer else 1)

    @property
    def standardise(self) -> bool:
        """Whether inputs are standardised; those of a kernel of binary inputs stay 0 and 1."""
        return not KERNELS[self.spec.kernel].binary

    @property
    def unit(self) -> str:
        """What distances between inputs are measured in."""
        return "standard deviations" if self.standardise else "the unit of the inputs"

    @property
    def criterion_function(self) -> Any:
        """The criterion itself."""
        return CRITERIA[self.criterion]

    @property
    def averaged(self) -> bool:
        """Whether the criterion is a mean over the classes, each against the rest."""
        return self.several_classes and self.criterion_function.targets in ("numbers", "signs")

    @property
    def score(self) -> Any:
        """The criterion as the search calls it."""
        asked = self.averaged and self.criterion_function.targets == "signs"
        return partial(self.criterion_function, average="outputs") if asked else self.criterion_function


class Answers(NamedTuple):
    """What was said of every row held out, (n,) or (n, c), in the order of the table."""

    outputs: np.ndarray
    residuals: np.ndarray

    @property
    def size(self) -> np.ndarray:
        """How far off each row is (n,): |residual|, for several classes the norm."""
        return np.abs(self.residuals) if self.residuals.ndim == 1 else np.linalg.norm(self.residuals, axis=1)


class Problem(NamedTuple):
    """A prepared table as tensors, rows in the order in which the machine sees them."""

    X: Tensor
    y: Tensor
    weight: Tensor | None
    clusters: Tensor | None
    order: Tensor
    """Row of the table for each row here, (n,)."""

    @classmethod
    def of(cls, prepared: Prepared, plan: Plan) -> "Problem":
        """Rows stay as they are, but for a sparse machine, whose basis is the first rows: it is drawn."""
        n = len(prepared.y)
        generator = torch.Generator().manual_seed(plan.seed)
        order = torch.randperm(n, generator=generator) if plan.spec.machine == "sparse" else torch.arange(n)
        pick = order.numpy()
        clusters = None
        if prepared.clusters is not None:
            clusters = torch.from_numpy(np.unique(prepared.clusters, return_inverse=True)[1][pick])
        weight = None if prepared.weight is None else torch.tensor(prepared.weight[pick], device=plan.device)
        X, y = (torch.tensor(array[pick], device=plan.device) for array in (prepared.X, prepared.y))
        return cls(X, y, weight, clusters, order)

    def restored(self, values: Tensor) -> np.ndarray:
        """Values (n, ...) in the order of the table."""
        result = np.empty(values.shape)
        result[self.order.numpy()] = values.detach().cpu().numpy()
        return result

    def answers(self, held_out: HeldOut) -> Answers:
        """Held-out outputs and residuals in the order of the table."""
        return Answers(self.restored(held_out.outputs), self.restored(held_out.residuals))
