"""Performance measures of the command: a few for each task, and their values for a trivial predictor.

A measure is called like a criterion of tl.criteria, with a HeldOut, and returns one number. It does not use
the training weights.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

import torchloo as tl
from torchloo.criteria.score import as_held_out
from torchloo.held_out import HeldOut

__all__ = ["ClassTable", "Measure", "OuterEstimate", "baseline", "measures"]


class OuterEstimate(NamedTuple):
    """The outer estimate of one measure."""

    scores: np.ndarray
    """Its value in every split where it is defined."""
    mean: float
    stderr: float


class Measure(NamedTuple):
    """A name, the function, and how its values are averaged and formatted."""

    name: str
    of: Callable[[HeldOut], Tensor]
    percent: bool = False
    places: int | None = None
    """Decimal places; None for four significant digits."""
    root: bool = False
    """Whether the function is a mean of squares and the measure its square root."""

    def value(self, held_out: HeldOut) -> float:
        """The value of the measure."""
        value = float(self.of(held_out))
        return value**0.5 if self.root else value

    def over_splits(self, parts: list[HeldOut]) -> OuterEstimate:
        """The estimate from the test rows of many splits; squares are averaged before the root is taken.

        Splits where the measure is undefined (an AUC with one class only) are ignored.
        """
        values = np.array([float(self.of(part)) for part in parts])
        values = values[~np.isnan(values)]
        n = len(values)
        mean = float(values.mean()) if n else np.nan
        stderr = float(values.std(ddof=1)) / n**0.5 if n > 1 else np.nan
        if not self.root:
            return OuterEstimate(values, mean, stderr)
        root = mean**0.5
        stderr_of_root = stderr / (2 * root) if root else 0.0
        return OuterEstimate(np.sqrt(values), root, stderr_of_root)

    def show(self, value: float) -> str:
        """A value of the measure as text."""
        if self.percent:
            return f"{100 * value:.1f} %"
        if self.places is None:
            return f"{value:.4g}"
        rounded = round(value, self.places) + 0.0  # no minus sign before zero
        return f"{rounded:.{self.places}f}"

    def show_mean(self, mean: float, error: float) -> str:
        """A mean and its standard error as text."""
        if np.isnan(mean):
            return "-"
        if np.isnan(error):
            return self.show(mean)
        if self.percent:
            return f"{100 * mean:.1f} ± {100 * error:.1f} %"
        places = self.places
        if places is None and not 1e-3 <= abs(mean) < 1e6:
            return f"{mean:.3g} ± {error:.2g}"
        if places is None:
            places = 3
            if error:
                places = max(0, 1 - int(np.floor(np.log10(error))))
        return f"{mean:.{places}f} ± {error:.{places}f}"


def measures(y: Tensor, classes: int) -> list[Measure]:
    """The measures for targets y, the most important one first."""
    if not classes:
        variance = y.var(correction=0)
        return [
            Measure("RMSE", _mse, root=True),
            Measure("mean absolute error", lambda held_out: held_out.residuals.abs().mean(-1)),
            Measure("R²", lambda held_out: 1 - _mse(held_out) / variance, places=3),
        ]
    if classes > 2:
        return [
            Measure("misclassification rate (largest output)", _multiclass_error, percent=True),
            Measure("balanced misclassification rate", _balanced, percent=True),
            Measure("cross-entropy (softmax of the outputs)", _cross_entropy, places=3),
        ]
    return [
        Measure("error rate", _error_rate, percent=True),
        Measure("balanced error rate", _balanced, percent=True),
        Measure("area under the ROC curve", _auc, places=3),
    ]


_mse = partial(tl.criteria.mse, weight=None)
_error_rate = partial(tl.criteria.error_rate, weight=None)
_multiclass_error = partial(tl.criteria.multiclass_error, weight=None)
_cross_entropy = partial(tl.criteria.cross_entropy, weight=None)


def _balanced(held_out: HeldOut) -> Tensor:
    """The mean error rate over the classes that occur."""
    return 1 - tl.criteria.class_accuracy(held_out, weight=None).nanmean(-1)


def _auc(held_out: HeldOut) -> Tensor:
    targets = held_out.targets
    if bool(targets.min() > 0) or bool(targets.max() < 0):
        return held_out.outputs.new_tensor(torch.nan)
    return tl.criteria.auc(held_out)


def baseline(y: Tensor) -> HeldOut:
    """The trivial predictor: the mean of the targets or, for classes, the most frequent one."""
    return as_held_out(y.mean(0).expand_as(y), y)


class ClassTable(NamedTuple):
    """Held-out accuracy by class, unweighted; standard errors respect clusters if there are any."""

    confusion: np.ndarray
    """Confusion matrix (c, c): rows are true classes, columns predicted ones; integer counts."""
    accuracy: np.ndarray
    """Accuracy within each class, (c,)."""
    stderr: np.ndarray
    """Standard error of each accuracy, (c,)."""
    overall_accuracy: float
    overall_stderr: float

    @classmethod
    def of(cls, held_out: HeldOut) -> "ClassTable":
        """From the columns of several classes, or the single column of two."""
        members = held_out.targets > 0  # (n, c)
        criterion = tl.criteria.multiclass_error
        if members.ndim == 1:
            members = torch.stack([~members, members], -1)
            criterion = tl.criteria.error_rate
        weights = members.to(held_out.outputs.dtype).unbind(-1)
        errors = [float(tl.standard_error(criterion, held_out, weight)) for weight in weights]
        return cls(
            confusion=tl.criteria.confusion(held_out, weight=None).long().cpu().numpy(),
            accuracy=tl.criteria.class_accuracy(held_out, weight=None).cpu().numpy(),
            stderr=np.array(errors),
            overall_accuracy=1 - float(criterion(held_out, weight=None)),
            overall_stderr=float(tl.standard_error(criterion, held_out, None)),
        )

    def mistaken_for(self, k: int, labels: tuple[str, ...], most: int = 3) -> str:
        """The classes that rows of class k are most often mistaken for, with their counts."""
        counts = self.confusion[k].copy()
        counts[k] = 0
        order = [j for j in np.argsort(-counts, kind="stable") if counts[j]]
        shown = ", ".join(f"{labels[j]} ({counts[j]})" for j in order[:most])
        if len(order) > most:
            shown += ", ..."
        return shown or "·"
