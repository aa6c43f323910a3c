"""A request to `torchloo select`: its options, the training data as tensors, and the outer splits."""

from collections.abc import Collection
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchloo.cli.prepare import PreparedTable
from torchloo.cli.schema import Schema, require_fields
from torchloo.cli.shell import UserError
from torchloo.criteria import CRITERIA
from torchloo.held_out import HeldOut
from torchloo.kernels.kernel import KERNELS
from torchloo.machine import KernelMachine
from torchloo.machine.kernel_machine import MACHINES
from torchloo.splits import Split, resolve

__all__ = ["HeldOutPredictions", "Request", "Spec", "TrainingData", "outer_splits"]


@dataclass(frozen=True)
class Spec:
    """The construction of a machine, before it is fitted."""

    machine: str
    kernel: str
    inputs: int
    basis: int = 0
    rows: int = 0
    """Number of training rows that the model keeps for prediction intervals."""

    @classmethod
    def from_dict(cls, plain: object, schema: Schema) -> "Spec":
        """Read a saved specification; ValueError if it is not valid for the schema."""
        names = [each.name for each in fields(cls)]
        spec = cls(**require_fields("machine", plain, names))
        _require_one_of("machine", spec.machine, MACHINES)
        _require_one_of("kernel", spec.kernel, KERNELS)
        if type(spec.inputs) is not int or spec.inputs != len(schema.inputs):
            raise ValueError(f"machine: inputs must be {len(schema.inputs)}, as in the schema")
        if type(spec.basis) is not int or (spec.basis > 0) != (spec.machine == "sparse"):
            raise ValueError("machine: basis must be positive for a sparse machine, and 0 for others")
        if type(spec.rows) is not int or spec.rows < 0 or (spec.rows and schema.labels):
            raise ValueError("machine: rows must be a number of rows, and 0 for classification")
        if MACHINES[spec.machine].needs_classes and not schema.labels:
            raise ValueError(f"machine: {spec.machine} needs labels")
        return spec

    def build(self) -> KernelMachine:
        """The unfitted machine."""
        options = {"basis": self.basis} if self.machine == "sparse" else {}
        return MACHINES[self.machine](KERNELS[self.kernel](self.inputs), **options)


def _require_one_of(name: str, value: object, known: Collection[str]) -> None:
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}")


@dataclass(frozen=True)
class Request:
    """The options of one run, resolved and checked."""

    spec: Spec
    criterion: str
    search: str
    prior: float | None
    outer: int
    seed: int
    device: str
    progress: bool
    time_budget: float | None = None
    """Seconds for all searches: the selection and the outer estimate together."""
    several_classes: bool = False
    """Whether there are more than two classes, with one column of targets each."""

    @property
    def time_of_each(self) -> float | None:
        """Seconds for the selection, and the same for the outer estimate if there is one."""
        if self.time_budget is None:
            return None
        return self.time_budget / 2 if self.outer else self.time_budget

    @property
    def standardise(self) -> bool:
        """Whether inputs are standardised; for a kernel of binary inputs they are not."""
        return not KERNELS[self.spec.kernel].binary

    @property
    def unit(self) -> str:
        """The unit of distances between inputs."""
        return "standard deviations" if self.standardise else "the unit of the inputs"

    @property
    def criterion_function(self) -> Any:
        """The criterion as a function."""
        return CRITERIA[self.criterion]

    @property
    def averaged(self) -> bool:
        """Whether the criterion is averaged over one-vs-rest columns."""
        return self.several_classes and self.criterion_function.targets in ("numbers", "signs")

    @property
    def score(self) -> Any:
        """The criterion as it is passed to the search."""
        criterion = self.criterion_function
        if self.averaged and criterion.targets == "signs":
            return partial(criterion, average="outputs")
        return criterion


class HeldOutPredictions(NamedTuple):
    """Held-out predictions of every row, (n,) or (n, c), in the row order of the table."""

    outputs: np.ndarray
    residuals: np.ndarray

    @property
    def size(self) -> np.ndarray:
        """Absolute residual of each row (n,); for several classes the norm of its residuals."""
        if self.residuals.ndim == 1:
            return np.abs(self.residuals)
        return np.linalg.norm(self.residuals, axis=1)


class TrainingData(NamedTuple):
    """A prepared table as tensors, rows in the order in which the machine is trained on them."""

    X: Tensor
    y: Tensor
    weight: Tensor | None
    clusters: Tensor | None
    order: Tensor
    """Row number in the table of each row here, (n,)."""

    @classmethod
    def of(cls, prepared: PreparedTable, request: Request) -> "TrainingData":
        """Convert a table; rows are shuffled for a sparse machine, whose basis is the first rows."""
        n = len(prepared.y)
        generator = torch.Generator().manual_seed(request.seed)
        shuffled = request.spec.machine == "sparse"
        order = torch.randperm(n, generator=generator) if shuffled else torch.arange(n)
        pick = order.numpy()
        clusters = None
        if prepared.clusters is not None:
            _, numbers = np.unique(prepared.clusters, return_inverse=True)
            clusters = torch.from_numpy(numbers[pick])
        weight = None
        if prepared.weight is not None:
            weight = torch.tensor(prepared.weight[pick], device=request.device)
        X = torch.tensor(prepared.X[pick], device=request.device)
        y = torch.tensor(prepared.y[pick], device=request.device)
        return cls(X, y, weight, clusters, order)

    def restored(self, values: Tensor) -> np.ndarray:
        """Values (n, ...) in the order of the table."""
        result = np.empty(values.shape)
        result[self.order.numpy()] = values.detach().cpu().numpy()
        return result

    def predictions(self, held_out: HeldOut) -> HeldOutPredictions:
        """Held-out outputs and residuals in the order of the table."""
        return HeldOutPredictions(self.restored(held_out.outputs), self.restored(held_out.residuals))


def outer_splits(prepared: PreparedTable, data: TrainingData, request: Request) -> list[Split]:
    """Random hold-outs of 10 % of the rows, or of the clusters if there are any; none for --outer 0.

    If there are at most as many clusters as splits requested, each cluster is held out once.
    """
    if not request.outer:
        return []
    few_clusters = data.clusters is not None and len(data.clusters.unique()) <= request.outer
    scheme = "leave-cluster-out" if few_clusters else request.outer
    generator = torch.Generator().manual_seed(request.seed)
    splits = resolve(scheme, len(data.y), data.clusters, generator)
    if MACHINES[request.spec.machine].needs_classes:
        _require_classes(prepared, data, request.spec.machine, splits)
    return splits


def _require_classes(prepared: PreparedTable, data: TrainingData, machine: str, splits: list[Split]) -> None:
    """Raise if a split has no training row of some class and the machine needs all classes."""
    target = prepared.target[data.order.numpy()]
    for label in prepared.schema.labels:
        member = target == label
        without = sum(not member[split.train.numpy()].any() for split in splits)
        if without:
            raise UserError(
                f"--machine {machine} needs rows of every class, but {without} of {len(splits)} outer splits "
                f"hold out all {member.sum()} rows of {label!r}; use --machine lssvm or --outer 0"
            )
