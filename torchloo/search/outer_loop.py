"""The outer loop of `validate`: prepare, search and score every split; splits of one shape together."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from torchloo.criteria.score import Score, as_held_out
from torchloo.guards import host_labels
from torchloo.machine import KernelMachine
from torchloo.search.compared import Rival, best_of, search_all
from torchloo.search.problem_batch import stack, weight_of
from torchloo.search.starts import takes_kernel_matrix
from torchloo.splits import Split
from torchloo.thresholds import shifted, threshold

__all__ = ["OuterLoop", "columns_of"]


@dataclass(frozen=True)
class _Part:
    """One split, standardised by its training rows."""

    number: int
    X: Tensor
    y: Tensor
    X_test: Tensor
    y_test: Tensor
    weight: Any
    criterion_weight: Any
    clusters: Any


@dataclass(frozen=True)
class OuterLoop:
    """The arguments of `validate` that are the same in all splits."""

    rivals: list[Rival]
    score: Score
    metric: Score
    shift_metric: Score | None
    X: Tensor
    y: Tensor
    """Encoded targets."""
    given: Tensor
    """Given targets, possibly class labels: the argument of functions of y."""
    clusters: object | None
    weight: Any
    criterion_weight: Any
    columns: Tensor | None

    def run(self, pairs: dict[int, Split], rows: dict[int, dict[str, Any]], deadline: float) -> list[str]:
        """Search and score splits of one shape; returns the reasons of early stops."""
        parts = [self._part(number, split) for number, split in pairs.items()]
        problems = stack(
            "validate",
            [part.X for part in parts],
            [part.y for part in parts],
            [part.weight for part in parts],
            [part.criterion_weight for part in parts],
            [part.clusters for part in parts],
        )
        names = [f" in split {part.number}" for part in parts]
        outcomes = search_all(self.rivals, [problems] * len(self.rivals), self.score, deadline, names)
        quiet = not self.rivals[0].plan.progress
        for k, part in enumerate(tqdm(parts, "scores", unit="split", leave=False, disable=quiet)):
            found = best_of(outcomes, k)
            if found is None:  # stopped before it began
                continue
            winner, best = found
            assert best.theta is not None
            space = winner.rival.space
            row: dict[str, Any] = {
                "split": part.number,
                "train": len(part.y),
                "test": len(part.y_test),
            }
            with _named(part.number):
                row |= self._scores(space.machine_at(best.theta), part)
            row["criterion"] = best.value
            row["evaluations"] = sum(outcome.objective.evaluations[k] for outcome in outcomes)
            if len(self.rivals) > 1:
                row["machine"] = winner.rival.name
            rows[part.number] = row | space.named(best.theta)
        return [outcome.stopped for outcome in outcomes if outcome.stopped]

    def check_metric(self, pairs: list[Split]) -> None:
        """Raise, before any search, if the metric is undefined for the test rows of a split."""
        if not self.metric.batched:  # user-defined metrics are only called for the scores
            return
        self.metric.require_targets(self.y)  # of all rows: a split may have one class only
        for number, split in enumerate(pairs):
            y = self.y[split.test.to(self.y.device)]
            with _named(number):
                self.metric(as_held_out(y, y))

    def _part(self, number: int, split: Split) -> _Part:
        train, test = (index.to(self.X.device) for index in split)
        X, X_test = self.X[train], self.X[test]
        if takes_kernel_matrix(self.rivals[0].space.machine):
            X, X_test = X[:, train], X_test[:, train]
        if self.columns is not None:
            X, X_test = _standardised(X, X_test, self.columns)

        def of_training_rows(name: str, weight: Any) -> Any:
            return weight_of("validate", name, weight, self.given, self.y, train)

        clusters = None
        if self.clusters is not None:
            labels = host_labels("validate", self.clusters, len(self.X))
            clusters = labels[split.train.numpy()]
        return _Part(
            number,
            X=X,
            y=self.y[train],
            X_test=X_test,
            y_test=self.y[test],
            weight=of_training_rows("weight", self.weight),
            criterion_weight=of_training_rows("criterion_weight", self.criterion_weight),
            clusters=clusters,
        )

    def _scores(self, machine: Any, part: _Part) -> dict[str, Any]:
        """The metric on the test rows, with the threshold fitted to the training rows."""
        with torch.no_grad():
            outputs = machine.fit(part.X, part.y, part.weight)(part.X_test)
            tested = as_held_out(outputs, part.y_test)
            plain = float(self.metric(tested))
            if self.shift_metric is None:
                return {"score": plain}
            held_out = machine.held_out(part.X, part.y, part.clusters, part.weight)
            # Unweighted, as on the test rows.
            unweighted = held_out._replace(weight=torch.ones_like(held_out.weight))
            shift = threshold(unweighted, self.shift_metric.criterion)
            score = float(self.metric(shifted(tested, shift)))
        return {"score": score, "unshifted": plain, "shift": shift.tolist()}


@contextmanager
def _named(number: int) -> Iterator[None]:
    """Add the number of the split to errors."""
    try:
        yield
    except ValueError as fault:
        raise ValueError(f"validate: split {number} cannot be scored: {fault}") from fault


def _standardised(X: Tensor, X_test: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """Standardise columns by the training rows; constant columns are only centred."""
    centre = X[:, columns].mean(0)
    scale = X[:, columns].std(0)
    scale = torch.where(scale > 0, scale, 1.0)
    results = [X.clone(), X_test.clone()]
    for result in results:
        result[:, columns] = (result[:, columns] - centre) / scale
    return results[0], results[1]


def columns_of(standardise: Any, machine: KernelMachine, X: Tensor) -> Tensor | None:
    """Numbers of the columns to standardise; None for none."""
    if standardise is False or takes_kernel_matrix(machine):
        return None
    if getattr(machine, "basis", None) is not None:
        raise ValueError(
            "validate: standardise must be False for a machine with given basis vectors, which are not "
            f"standardised; got {standardise!r}. Standardise X before, or give basis= a number or a selector"
        )
    d = X.shape[1]
    if standardise is True:
        return torch.arange(d, device=X.device)
    columns = torch.as_tensor(standardise, device=X.device)
    is_index = columns.ndim == 1 and not columns.is_floating_point()
    in_range = (columns >= 0) & (columns < d)
    if not is_index or not bool(in_range.all()):
        raise ValueError(
            f"validate: standardise must be True, False or column numbers below {d}, got {standardise!r}"
        )
    return columns.long()
