"""The work of `torchloo select`: choose a machine, look at what it says held out, estimate how well."""

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
_MOST_ROWS_OF_PATH = 2000


class SearchResult(NamedTuple):
    """What the search came to."""

    machine: Any
    """A fitted machine."""
    value: float
    history: list[float]
    """The criterion at every evaluation."""
    evaluations: int
    seconds: float
    """About what another such search would take."""
    stopped: str
    """Why the search ended early, or nothing."""


class MeasureRow(NamedTuple):
    """One measure by every way of estimating it; None where there is none."""

    measure: Measure
    guess: float
    loo: float
    lco: float | None
    outer: OuterEstimate | None

    def shown(self) -> list[str]:
        """The values that there are, as text."""
        values = [self.guess, self.loo] + ([] if self.lco is None else [self.lco])
        shown = [self.measure.show(value) for value in values]
        if self.outer is not None:
            shown.append(self.measure.show_mean(self.outer.mean, self.outer.stderr))
        return shown


class Parameter(NamedTuple):
    """A hyper-parameter of the machine that was chosen."""

    name: str
    value: np.ndarray
    """One number (), or one for each input (d,)."""
    meaning: str


@dataclass(frozen=True)
class Findings:
    """All that the report tells; arrays are in the order of the table."""

    request: Request
    prepared: PreparedTable
    choice: SearchResult
    parameters: list[Parameter]
    relevance: np.ndarray | None
    """By how much the kernel falls over one standard deviation of each input, (d,); None unless it has
    parameters for each."""
    path: tuple[np.ndarray, np.ndarray] | None
    """Regularisations and the criterion at each."""
    loo: HeldOutPredictions
    lco: HeldOutPredictions | None
    """Leave-cluster-out, where there are clusters."""
    leverage: np.ndarray | None
    rows: list[MeasureRow]
    by_class: ClassTable | None
    """The inner answers class by class; None for regression."""
    uncertainty: Uncertainty

    @property
    def classes(self) -> int:
        """Number of classes; 0 for regression."""
        return len(self.prepared.schema.labels)

    @property
    def inner(self) -> HeldOutPredictions:
        """The answers that the settings were chosen by: with its cluster out, where there are clusters."""
        return self.loo if self.lco is None else self.lco

    @property
    def way(self) -> str:
        """What the inner answers are called."""
        return "leave-one-out" if self.lco is None else "leave-cluster-out"

    @property
    def badness(self) -> np.ndarray:
        """How badly rows are predicted (n,): |residual|; of classes, how far the true one lies behind."""
        outputs = self.inner.outputs
        if not self.classes:
            return self.inner.size
        if outputs.ndim == 1:
            return -self.prepared.y * outputs
        own = self.prepared.y > 0  # (n, c)
        return np.where(own, -np.inf, outputs).max(1) - outputs[own]

    def said(self, answers: HeldOutPredictions) -> np.ndarray:
        """Outputs as the user knows the target: numbers or labels."""
        return self.prepared.schema.said(answers.outputs)


def _how(data: TrainingData, request: Request) -> dict[str, Any]:
    """What a selection and its repetition in every split have in common."""
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
        **_how(data, request),
    )
    seconds = selection.evaluations * _seconds_of_one(selection.machine, data, request)
    history = [float(record.value) for record in selection.history]
    stopped = selection.table[0]["stopped"]
    return SearchResult(selection.machine, selection.value, history, selection.evaluations, seconds, stopped)


@torch.no_grad()
def _seconds_of_one(machine: Any, data: TrainingData, request: Request) -> float:
    """About the time of one evaluation; the first of a process are slower and tell nothing."""
    start = time.perf_counter()
    if data.clusters is None:
        machine.loo(data.X, data.y, data.weight)
    else:
        machine.lco(data.X, data.y, data.clusters, data.weight)
    return (time.perf_counter() - start) * (3 if request.search == "gradient" else 1)


def estimate(
    data: TrainingData, request: Request, splits: list[Split], of: list[Measure]
) -> list[OuterEstimate] | None:
    """The outer estimate of every measure: the whole selection repeated in every split."""
    if not splits:
        return None
    tested: list[HeldOut] = []

    def metric(held_out: HeldOut) -> Tensor:
        """Keep the test rows of each split, so that every measure can be taken of them."""
        tested.append(held_out)
        return of[0].of(held_out)

    tl.validate(
        request.spec.build().to(request.device),
        data.X,
        data.y,
        splits=splits,
        metric=metric,
        standardise=request.standardise,
        **_how(data, request),
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
    """Everything that the chosen machine says held out."""
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
        loo=data.answers(loo),
        lco=None if lco is None else data.answers(lco),
        leverage=None if leverage is None else data.restored(leverage),
        rows=_rows(measures(y, classes), y, ways, outer),
        by_class=ClassTable.of(inner) if classes else None,
        uncertainty=Uncertainty.of(inner, classes, data, request.spec.rows > 0),
    )


def _of_table(held_out: Any, y: Tensor) -> HeldOut:
    """Held-out rows with the targets of the table, not a machine's own codes."""
    return held_out._replace(targets=y, residuals=y - held_out.outputs)


def _rows(
    of: list[Measure], y: Tensor, ways: list[HeldOut | None], outer: list[OuterEstimate] | None
) -> list[MeasureRow]:
    """Every measure by every way, leave-one-out and leave-cluster-out."""
    rows = []
    for k, measure in enumerate(of):
        inner, clusters = (None if way is None else measure.value(way) for way in ways)
        assert inner is not None
        rows.append(
            MeasureRow(measure, measure.value(guess(y)), inner, clusters, None if outer is None else outer[k])
        )
    return rows


def _parameters(machine: KernelMachine, unit: str) -> list[Parameter]:
    """All that are declared, by their names, or by their paths where several have one name."""
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
        return None  # what it falls by is not the same everywhere
    return (1 - kernel(points[:1], points[1:])[0] / size[0]).cpu().numpy()


def _path(data: TrainingData, request: Request, choice: SearchResult) -> tuple[np.ndarray, np.ndarray] | None:
    """The criterion over six decades of regularisation about the chosen one; None where that is dear."""
    machine = choice.machine
    dear = len(data.y) > _MOST_ROWS_OF_PATH
    if dear or not isinstance(machine, LeastSquares) or request.criterion_function.takes_fit:
        return None
    regs = machine.reg * torch.logspace(-3, 3, 49, dtype=data.X.dtype, device=data.X.device)
    try:
        path = machine.path(data.X, data.y, regs, data.clusters, data.weight)
        values = request.score(path)
    except ValueError:  # the smallest may be too small to factorise with
        return None
    return regs.cpu().numpy(), values.cpu().numpy()
