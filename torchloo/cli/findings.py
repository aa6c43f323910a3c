"""The work of `torchloo select`: select a machine, collect its held-out predictions, estimate its error."""

import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import torchloo as tl
from torchloo.cli.measures import ClassTable, Measure, OuterEstimate, baseline, measures
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
    baseline: float
    loo: float
    lco: float | None
    outer: OuterEstimate | None

    def shown(self) -> list[str]:
        """The available values as text."""
        values = [self.baseline, self.loo, self.lco]
        shown = [self.measure.show(value) for value in values if value is not None]
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
    def scheme(self) -> str:
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
        true = self.prepared.y > 0  # (n, c)
        best_of_others = np.where(true, -np.inf, outputs).max(1)
        return best_of_others - outputs[true]

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
    return SearchResult(
        machine=selection.machine,
        value=selection.value,
        history=[float(record.value) for record in selection.history],
        evaluations=selection.evaluations,
        seconds=selection.evaluations * _seconds_of_one(selection.machine, data, request),
        stopped=selection.table[0]["stopped"],
    )


@torch.no_grad()
def _seconds_of_one(machine: Any, data: TrainingData, request: Request) -> float:
    """Estimated time of one evaluation, measured now, as the first evaluations of a process are slower."""
    start = time.perf_counter()
    machine.held_out(data.X, data.y, data.clusters, data.weight)
    seconds = time.perf_counter() - start
    return 3 * seconds if request.search == "gradient" else seconds


def estimate(
    data: TrainingData,
    request: Request,
    splits: list[Split],
    measures: list[Measure],
) -> list[OuterEstimate] | None:
    """The outer estimate of every measure: the whole selection is repeated in every split."""
    if not splits:
        return None
    tested: list[HeldOut] = []

    def metric(held_out: HeldOut) -> Tensor:
        """Keep the test rows of each split, to compute every measure from them afterwards."""
        tested.append(held_out)
        return measures[0].of(held_out)

    tl.validate(
        request.spec.build().to(request.device),
        data.X,
        data.y,
        splits=splits,
        metric=metric,
        standardise=request.standardise,
        **_search_arguments(data, request),
    )
    return [measure.over_splits(tested) for measure in measures]


@torch.no_grad()
def examine(
    prepared: PreparedTable,
    request: Request,
    data: TrainingData,
    choice: SearchResult,
    outer: list[OuterEstimate] | None,
) -> Findings:
    """Held-out predictions and diagnostics of the selected machine."""
    machine = choice.machine
    X = data.X
    y = data.y
    weight = data.weight
    loo = machine.loo(X, y, weight)
    lco = None if data.clusters is None else machine.lco(X, y, data.clusters, weight)
    leverage = machine.solve(X, y, weight).leverage if isinstance(machine, LeastSquares) else None
    loo_of_table = _of_table(loo, y)
    lco_of_table = None if lco is None else _of_table(lco, y)
    inner = loo_of_table if lco_of_table is None else lco_of_table
    classes = len(prepared.schema.labels)
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
        rows=_rows(measures(y, classes), loo_of_table, lco_of_table, outer),
        by_class=ClassTable.of(inner) if classes else None,
        uncertainty=Uncertainty.of(inner, classes, data, request.spec.rows > 0),
    )


def _of_table(held_out: Any, y: Tensor) -> HeldOut:
    """Held-out predictions with the targets of the table instead of the codes of the machine."""
    return held_out._replace(targets=y, residuals=y - held_out.outputs)


def _rows(
    measures: list[Measure],
    loo: HeldOut,
    lco: HeldOut | None,
    outer: list[OuterEstimate] | None,
) -> list[MeasureRow]:
    """Every measure, by leave-one-out and, if there are clusters, by leave-cluster-out."""
    trivial = baseline(loo.targets)
    return [
        MeasureRow(
            measure,
            baseline=measure.value(trivial),
            loo=measure.value(loo),
            lco=None if lco is None else measure.value(lco),
            outer=None if outer is None else outer[k],
        )
        for k, measure in enumerate(measures)
    ]


def _parameters(machine: KernelMachine, unit: str) -> list[Parameter]:
    """All declared hyper-parameters, by name, or by path where several have the same name."""
    found = []
    for path, logarithm in machine.named_parameters():
        owner, _, leaf = path.rpartition(".")
        declared = Positive.of(machine.get_submodule(owner), leaf)
        if declared is not None:
            meaning = declared.meaning
            if declared.unit == "inputs":
                meaning += f", in {unit}"
            value = logarithm.exp().cpu().numpy()
            found.append(Parameter(path, value, meaning))
    short_names = [each.name.rpartition(".")[2].removeprefix("log_") for each in found]
    return [
        each._replace(name=name) if short_names.count(name) == 1 else each
        for each, name in zip(found, short_names, strict=True)
    ]


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
    origin = X.new_zeros(1, d)
    unit_vectors = torch.eye(d, dtype=X.dtype, device=X.device)
    diagonal = kernel.diagonal(torch.cat([origin, unit_vectors]))
    if not torch.allclose(diagonal, diagonal[:1]):
        return None  # not stationary: the decrease depends on where it is measured
    decrease = 1 - kernel(origin, unit_vectors)[0] / diagonal[0]
    return decrease.cpu().numpy()


def _path(data: TrainingData, request: Request, choice: SearchResult) -> tuple[np.ndarray, np.ndarray] | None:
    """The criterion over six decades of reg around the selected one; None where that is too costly."""
    machine = choice.machine
    if len(data.y) > _MAX_ROWS_OF_PATH or not isinstance(machine, LeastSquares):
        return None
    if request.criterion_function.takes_fit:
        return None
    factors = torch.logspace(-3, 3, 49, dtype=data.X.dtype, device=data.X.device)
    regs = machine.reg * factors
    try:
        path = machine.path(data.X, data.y, regs, data.clusters, data.weight)
        values = request.score(path)
    except ValueError:  # the smallest reg may be too small for a factorisation
        return None
    return regs.cpu().numpy(), values.cpu().numpy()
