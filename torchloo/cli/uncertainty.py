"""Uncertainty of a model: calibrated class probabilities, and training rows for prediction intervals."""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import torchloo as tl
from torchloo.calibration import Platt, Temperature
from torchloo.cli.request import TrainingData
from torchloo.cli.schema import Schema, require_fields
from torchloo.held_out import HeldOut

__all__ = ["MOST_ROWS", "TrainingRows", "Uncertainty", "require_tensor"]

MOST_ROWS = {"dense": 5_000, "explicit": 100_000}
"""Most training rows that are kept for intervals: by a dense machine, or by one on few features."""


class TrainingRows(NamedTuple):
    """The training rows of a regression, for `tl.intervals.jackknife_plus`."""

    X: Tensor
    """Standardised inputs, (n, d)."""
    y: Tensor
    """(n,)."""
    weight: Tensor
    """(n,)."""
    clusters: Tensor
    """Cluster labels (n,); all distinct if there are no clusters."""

    @classmethod
    def of(cls, data: TrainingData) -> "TrainingRows":
        """From the training data, on the CPU."""
        n = len(data.y)
        weight = torch.ones_like(data.y) if data.weight is None else data.weight
        clusters = torch.arange(n) if data.clusters is None else data.clusters
        return cls(data.X.cpu(), data.y.cpu(), weight.cpu(), clusters)

    @classmethod
    def from_dict(cls, plain: object, rows: int, inputs: int) -> "TrainingRows":
        """The inverse of `_asdict`; ValueError if the dictionary is not valid."""
        values = cls(**require_fields("rows", plain, cls._fields))
        shapes = {"X": (rows, inputs), "y": (rows,), "weight": (rows,), "clusters": (rows,)}
        for name, value in values._asdict().items():
            dtype = torch.int64 if name == "clusters" else torch.float64
            require_tensor(f"rows: {name}", value, shapes[name], dtype)
        if not (values.weight > 0).all():
            raise ValueError("rows: weight must be positive")
        if (values.clusters == values.clusters[0]).all():
            raise ValueError("rows: there must be at least two clusters")
        return values

    def intervals(self, machine: Any, X: Tensor, level: float) -> np.ndarray:
        """Lower and upper ends of the prediction intervals, (2, q)."""
        inputs = self.X.to(X.device)
        targets = self.y.to(X.device)
        weight = self.weight.to(X.device)
        all_distinct = len(self.clusters.unique()) == len(self.clusters)
        clusters = None if all_distinct else self.clusters
        ends = tl.intervals.jackknife_plus(machine, inputs, targets, X, level, clusters, weight=weight)
        return torch.stack(ends).cpu().numpy()


class Uncertainty(NamedTuple):
    """The calibration of a classifier, or the training rows of a regression; None if not available."""

    calibration: Platt | Temperature | None
    rows: TrainingRows | None

    @classmethod
    def of(cls, held_out: HeldOut, classes: int, data: TrainingData, keep_rows: bool) -> "Uncertainty":
        """From held-out predictions and the training data."""
        calibration = tl.calibrate(held_out).cpu() if classes else None
        return cls(calibration, TrainingRows.of(data) if keep_rows else None)

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for torch.save."""
        state = {} if self.calibration is None else self.calibration.state_dict()
        numbers = {name: float(value) for name, value in state.items()}
        rows = {} if self.rows is None else self.rows._asdict()
        return {"calibration": numbers, "rows": rows}

    @classmethod
    def from_dict(cls, plain: object, schema: Schema, rows: int) -> "Uncertainty":
        """The inverse of `as_dict`; ValueError if the dictionary is not valid."""
        values = require_fields("uncertainty", plain, ("calibration", "rows"))
        calibration = _calibration(values["calibration"], len(schema.labels))
        if not rows:
            require_fields("rows", values["rows"], ())
            return cls(calibration, None)
        return cls(calibration, TrainingRows.from_dict(values["rows"], rows, len(schema.inputs)))

    def columns(
        self,
        schema: Schema,
        machine: Any,
        X: Tensor,
        outputs: np.ndarray,
        level: float,
    ) -> dict[str, np.ndarray]:
        """Columns for predictions.csv: an interval, or the probability of every class."""
        if self.rows is not None:
            lower, upper = self.rows.intervals(machine, X, level)
            return {"lower": lower, "upper": upper}
        if self.calibration is None:
            return {}
        with torch.no_grad():
            probability = self.calibration(torch.from_numpy(outputs)).numpy()
        if probability.ndim == 1:
            probability = np.stack([1 - probability, probability], 1)
        return {f"probability {label}": probability[:, k] for k, label in enumerate(schema.labels)}


def _calibration(plain: object, classes: int) -> Platt | Temperature | None:
    if not classes:
        require_fields("calibration", plain, ())
        return None
    kind = Platt if classes == 2 else Temperature
    numbers = require_fields("calibration", plain, list(kind().state_dict()))
    if not all(type(number) is float and np.isfinite(number) for number in numbers.values()):
        raise ValueError("calibration must be finite numbers")
    return kind(**numbers)


def require_tensor(name: str, value: object, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raise ValueError unless a value is a dense, finite tensor of this shape and dtype."""
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.device.type != "cpu":
        raise ValueError(f"{name} must be a dense tensor")
    if value.dtype != dtype or value.shape != shape:
        raise ValueError(
            f"{name} must be {dtype} of shape {shape}, got {value.dtype} of shape {tuple(value.shape)}"
        )
    if not value.isfinite().all():
        raise ValueError(f"{name} must be finite")
