"""The work of `torchloo select`: select a machine, collect its held-out predictions, estimate its error."""

import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import torchloo as tl
from torchloo.cli.measures import ClassTable, Measure, OuterEstimate, guess, measures
from torchloo.cli.prepare import PreparedTable
from torchloo.cli.request import HeldOutPredictions, Request, TrainingData
from torchloo.cli.uncertainty import Uncertainty
from torchloo.held_out import HeldOut
from torchloo.kernels import Kernel
from torchloo.machine import KernelMachine, LeastSquares
from torchloo.positive import Positive
from torchloo.splits import Split

__all__ = ["Findings", "MeasureRow", "choose", "estimate", "examine"]

# An eigendecomposition for the curve of regularisations is worth a few seconds, not minutes.
_MAX_ROWS_OF_PATH = 2000


class SearchResult(NamedTuple):
    """The result of the search."""

    machine: Any
    """A fitted machine."""
    value: float
    history: list[float]
    """The criterion at every evaluation."""
    evaluations: int
    seconds: float
    """Estimated time of another search like it."""
    stopped: str
    """Why the search ended early; empty if it did not."""


class MeasureRow(NamedTuple):
    """One measure, estimated in several ways; None where an estimate was not made."""

    measure: Measure
    guess: float
    loo: float
    lco: float | None
    outer: OuterEstimate | None

    def shown(self) -> list[str]:
        """The available values as text."""
        values = [self.guess, self.loo] + ([] if self.lco is None else [self.lco])
        shown = [self.measure.show(value) for value in values]
        if self.outer is not None:
            shown.append(self.measure.show_mean(self.outer.mean, self.outer.stderr))
        return shown


class Parameter(NamedTuple):
    """A hyper-parameter of the selected machine."""

    name: str
    value: np.ndarray
    """One number (), or one for each input (d,)."""
    meaning: str


@dataclass(frozen=True)
class Findings:
    """Everything that the report shows; arrays are in the row order of the table."""

    request: Request
    prepared: PreparedTable
    choice: SearchResult
    parameters: list[Parameter]
    relevance: np.ndarray | None
    """Relative decrease of the kernel over one standard deviation of each input, (d,); None unless the kernel
    has one parameter per input."""
    path: tuple[np.ndarray, np.ndarray] | None
    """Regularisations, and the criterion at each."""
    loo: HeldOutPredictions
    lco: HeldOutPredictions | None
    """Leave-cluster-out predictions, if there are clusters."""
    leverage: np.ndarray | None
    rows: list[MeasureRow]
    by_class: ClassTable | None
    """Held-out accuracy by class; None for regression."""
    uncertainty: Uncertainty

    @property
    def classes(self) -> int:
        """Number of classes; 0 for regression."""
        return len(self.prepared.schema.labels)

    @property
    def inner(self) -> HeldOutPredictions:
        """The held-out predictions that the selection used: leave-cluster-out if there are clusters."""
        return self.loo if self.lco is None else self.lco

    @property
    def way(self) -> str:
        """Name of the held-out scheme of `inner`."""
        return "leave-one-out" if self.lco is None else "leave-cluster-out"

    @property
    def misfit(self) -> np.ndarray:
        """Prediction error of each row (n,): |residual|; for classes, minus the margin of the true class."""
        outputs = self.inner.outputs
        if not self.classes:
            return self.inner.size
        if outputs.ndim == 1:
            return -self.prepared.y * outputs
        own = self.prepared.y > 0  # (n, c)
        return np.where(own, -np.inf, outputs).max(1) - outputs[own]

    def predicted(self, predictions: HeldOutPredictions) -> np.ndarray:
        """Predicted targets in the user's terms: numbers or class labels."""
        return self.prepared.schema.decoded(predictions.outputs)


def _search_arguments(data: TrainingData, request: Request) -> dict[str, Any]:
    """Arguments that `select`, and `validate` for its splits, have in common."""
    return {
        "criterion": request.score,
        "search": request.search,
        "clusters": data.clusters,
        "weight": data.weight,
        "prior": request.prior,
        "time_budget": request.time_of_each,
        "generator": torch.Generator().manual_seed(request.seed),
        "progress": request.progress,
    }


def choose(data: TrainingData, request: Request) -> SearchResult:
    """Select the hyper-parameters by the criterion."""
    selection = tl.select(
        request.spec.build().to(request.device),
        data.X,
        data.y,
        **_search_arguments(data, request),
    )
    seconds = selection.evaluations * _seconds_of_one(selection.machine, data, request)
    history = [float(record.value) for record in selection.history]
    stopped = selection.table[0]["stopped"]
    return SearchResult(selection.machine, selection.value, history, selection.evaluations, seconds, stopped)


@torch.no_grad()
def _seconds_of_one(machine: Any, data: TrainingData, request: Request) -> float:
    """Estimated time of one evaluation, measured now, as the first evaluations of a process are slower."""
    start = time.perf_counter()
    if data.clusters is None:
        machine.loo(data.X, data.y, data.weight)
    else:
        machine.lco(data.X, data.y, data.clusters, data.weight)
    return (time.perf_counter() - start) * (3 if request.search == "gradient" else 1)


def estimate(
    data: TrainingData, request: Request, splits: list[Split], of: list[Measure]
) -> list[OuterEstimate] | None:
    """The outer estimate of every measure: the whole selection is repeated in every split."""
    if not splits:
        return None
    tested: list[HeldOut] = []

    def metric(held_out: HeldOut) -> Tensor:
        """Keep the test rows of each split, to compute every measure from them afterwards."""
        tested.append(held_out)
        return of[0].of(held_out)

    tl.validate(
        request.spec.build().to(request.device),
        data.X,
        data.y,
        splits=splits,
        metric=metric,
        standardise=request.standardise,
        **_search_arguments(data, request),
    )
    return [measure.over_splits(tested) for measure in of]


@torch.no_grad()
def examine(
    prepared: PreparedTable,
    request: Request,
    data: TrainingData,
    choice: SearchResult,
    outer: list[OuterEstimate] | None,
) -> Findings:
    """Held-out predictions and diagnostics of the selected machine."""
    machine, X, y, weight = choice.machine, data.X, data.y, data.weight
    loo = machine.loo(X, y, weight)
    lco = None if data.clusters is None else machine.lco(X, y, data.clusters, weight)
    leverage = machine.solve(X, y, weight).leverage if isinstance(machine, LeastSquares) else None
    ways = [None if way is None else _of_table(way, y) for way in (loo, lco)]
    classes = len(prepared.schema.labels)
    inner = ways[0] if ways[1] is None else ways[1]
    assert inner is not None
    return Findings(
        request=request,
        prepared=prepared,
        choice=choice,
        parameters=_parameters(machine, request.unit),
        relevance=_relevance(machine.kernel, X),
        path=_path(data, request, choice),
        loo=data.predictions(loo),
        lco=None if lco is None else data.predictions(lco),
        leverage=None if leverage is None else data.restored(leverage),
        rows=_rows(measures(y, classes), y, ways, outer),
        by_class=ClassTable.of(inner) if classes else None,
        uncertainty=Uncertainty.of(inner, classes, data, request.spec.rows > 0),
    )


def _of_table(held_out: Any, y: Tensor) -> HeldOut:
    """Held-out predictions with the targets of the table instead of the codes of the machine."""
    return held_out._replace(targets=y, residuals=y - held_out.outputs)


def _rows(
    of: list[Measure], y: Tensor, ways: list[HeldOut | None], outer: list[OuterEstimate] | None
) -> list[MeasureRow]:
    """Every measure, by leave-one-out and, if there are clusters, by leave-cluster-out."""
    rows = []
    for k, measure in enumerate(of):
        inner, clusters = (None if way is None else measure.value(way) for way in ways)
        assert inner is not None
        rows.append(
            MeasureRow(measure, measure.value(guess(y)), inner, clusters, None if outer is None else outer[k])
        )
    return rows


def _parameters(machine: KernelMachine, unit: str) -> list[Parameter]:
    """All declared hyper-parameters, by name, or by path where several have the same name."""
    found = []
    for path, logarithm in machine.named_parameters():
        owner, _, leaf = path.rpartition(".")
        declared = Positive.of(machine.get_submodule(owner), leaf)
        if declared is not None:
            meaning = declared.meaning + f", in {unit}" * (declared.unit == "inputs")
            found.append(Parameter(path, logarithm.exp().cpu().numpy(), meaning))
    short = [each.name.rpartition(".")[2].removeprefix("log_") for each in found]
    pairs = zip(found, short, strict=True)
    return [each._replace(name=name) if short.count(name) == 1 else each for each, name in pairs]


def _relevance(kernel: Kernel, X: Tensor) -> np.ndarray | None:
    """1 - k(0, e_j) / k(0, 0), (d,), of a stationary kernel that has parameters for each input; else None."""
    per_input = [
        name
        for part in kernel.modules()
        for name, value in part.named_parameters(recurse=False)
        if value.ndim and Positive.of(part, name)
    ]
    if not per_input:
        return None
    d = X.shape[1]
    points = torch.cat([X.new_zeros(1, d), torch.eye(d, dtype=X.dtype, device=X.device)])
    size = kernel.diagonal(points)
    if not torch.allclose(size, size[:1]):
        return None  # not stationary: the decrease depends on where it is measured
    return (1 - kernel(points[:1], points[1:])[0] / size[0]).cpu().numpy()


def _path(data: TrainingData, request: Request, choice: SearchResult) -> tuple[np.ndarray, np.ndarray] | None:
    """The criterion over six decades of reg around the selected one; None where that is too costly."""
    machine = choice.machine
    if len(data.y) > _MAX_ROWS_OF_PATH or not isinstance(machine, LeastSquares):
        return None
    if request.criterion_function.takes_fit:
        return None
    regs = machine.reg * torch.logspace(-3, 3, 49, dtype=data.X.dtype, device=data.X.device)
    try:
        path = machine.path(data.X, data.y, regs, data.clusters, data.weight)
        values = request.score(path)
    except ValueError:  # the smallest reg may be too small for a factorisation
        return None
    return regs.cpu().numpy(), values.cpu().numpy()
