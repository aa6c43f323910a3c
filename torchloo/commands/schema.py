"""How a table becomes inputs and targets, learnt from one table and applied to others.

A `Schema` codes any table that has its columns, and refuses one without them; as a plain dictionary it
is saved beside a machine.
"""

from collections.abc import Collection
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from torchloo.classes import one_vs_rest
from torchloo.commands.decimals import MARKS
from torchloo.commands.reading import TableError, pandas
from torchloo.commands.shell import listed

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "CLASSIFICATION",
    "REGRESSION",
    "Column",
    "Schema",
    "is_number",
    "numbers",
    "require_complete",
    "require_fields",
    "texts",
]

CLASSIFICATION, REGRESSION = "classification", "regression"


@dataclass(frozen=True)
class Column:
    """An input column: numbers as they are, or text as one 0/1 input for each level (two levels: one)."""

    name: str
    levels: tuple[str, ...] | None = None

    @property
    def inputs(self) -> list[str]:
        """Names of the inputs that the column becomes."""
        if self.levels is None:
            return [self.name]
        return [f"{self.name}={level}" for level in self.levels[len(self.levels) == 2 :]]

    def encode(self, series: "pd.Series") -> np.ndarray:
        """(n, number of inputs), float64."""
        if self.levels is None:
            return numbers(series)[:, None]
        text = texts(series)
        unknown = ~np.isin(text, self.levels)
        if unknown.any():
            row = int(unknown.argmax())
            known = listed(list(self.levels))
            raise TableError(
                f"column {self.name!r} has the value {str(text[row])!r} in row {row + 1}; known: {known}"
            )
        return (text[:, None] == np.array(self.levels[len(self.levels) == 2 :])).astype(float)


@dataclass(frozen=True)
class Schema:
    """How a table becomes inputs and targets; see the fields."""

    target: str
    columns: tuple[Column, ...]
    centre: tuple[float, ...]
    """Subtracted from every input."""
    scale: tuple[float, ...]
    """Every input is divided by it."""
    labels: tuple[str, ...] = ()
    """The classes in order; of two, the second is +1. Empty for regression."""
    ignored: tuple[str, ...] = ()
    """Columns that may be there and are not looked at."""
    decimals: dict[str, str] = field(default_factory=dict)
    """The decimal marks of the table that it was learnt from, by column; see Note [decimal marks]."""

    @property
    def text(self) -> frozenset[str]:
        """Names of the columns that hold text, whatever it looks like."""
        return frozenset(column.name for column in self.columns if column.levels is not None)

    @property
    def task(self) -> str:
        """classification or regression."""
        return CLASSIFICATION if self.labels else REGRESSION

    @property
    def inputs(self) -> list[str]:
        """Names of the inputs, one for each column of the design matrix."""
        return [name for column in self.columns for name in column.inputs]

    def design(self, frame: "pd.DataFrame") -> np.ndarray:
        """The standardised inputs (n, d) of a table that has the columns of the schema."""
        self._require_columns(frame)
        require_complete(frame, [column.name for column in self.columns])
        raw = np.hstack([column.encode(frame[column.name]) for column in self.columns])
        return (raw - np.array(self.centre)) / np.array(self.scale)

    def codes(self, values: "pd.Series") -> np.ndarray:
        """Targets: numbers (n,); -1 and +1 (n,) for two classes; (n, c) for c classes."""
        if not self.labels:
            return numbers(values)
        labels, order = texts(values), {label: k for k, label in enumerate(self.labels)}
        position = np.array([order.get(label, -1) for label in labels])
        if (position < 0).any():
            row = int((position < 0).argmax())
            raise TableError(
                f"target {self.target!r} has the value {str(labels[row])!r} in row {row + 1}; "
                f"the machine knows {listed(list(self.labels))}"
            )
        columns = one_vs_rest(position, range(len(self.labels)), dtype=torch.float64).numpy()
        return columns[:, 0] if len(self.labels) == 2 else columns

    def said(self, outputs: np.ndarray) -> np.ndarray:
        """Outputs (n,), or (n, c) for c classes, as the user knows the target: numbers or labels."""
        if not self.labels:
            return outputs
        names = np.array(self.labels)
        return names[(outputs >= 0).astype(int)] if outputs.ndim == 1 else names[outputs.argmax(1)]

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for torch.save."""
        return asdict(self)

    @classmethod
    def from_dict(cls, plain: object) -> "Schema":
        """What `as_dict` gave; ValueError says what is wrong with anything else."""
        values = require_fields("schema", plain, [each.name for each in fields(cls)])
        columns = tuple(_column(column) for column in _sequence("columns", values["columns"], dict))
        tuples = {name: _sequence(name, values[name], str) for name in ("labels", "ignored")}
        tuples |= {name: _sequence(name, values[name], float) for name in ("centre", "scale")}
        target, decimals = values["target"], values["decimals"]
        if not isinstance(target, str):
            raise ValueError(f"schema: target must be text, got {type(target).__name__}")
        if not isinstance(decimals, dict) or not all(type(name) is str for name in decimals):
            raise ValueError("schema: decimals must have a decimal mark for each of some columns")
        if not all(isinstance(mark, str) and mark in MARKS for mark in decimals.values()):
            raise ValueError(f"schema: decimals must be {listed(list(MARKS))}")
        schema = cls(target=target, columns=columns, decimals=dict(decimals), **tuples)
        schema._require_consistent()
        return schema

    def _require_consistent(self) -> None:
        """Refuse fields that do not fit together."""
        names = [column.name for column in self.columns]
        _require_distinct("names of columns", [*names, self.target, *self.ignored])
        _require_distinct("labels", self.labels)
        if not names or len(self.labels) == 1:
            raise ValueError("schema: there must be a column at least, and no single label")
        for name, values in (("centre", self.centre), ("scale", self.scale)):
            if len(values) != len(self.inputs) or not np.isfinite(values).all():
                raise ValueError(f"schema: {name} must be {len(self.inputs)} finite numbers")
        if min(self.scale) <= 0:
            raise ValueError("schema: scale must be positive")

    def _require_columns(self, frame: "pd.DataFrame") -> None:
        wanted = [column.name for column in self.columns]
        missing = [name for name in wanted if name not in frame.columns]
        allowed = {*wanted, *self.ignored, self.target}
        unexpected = [name for name in frame.columns if name not in allowed]
        parts = [f"missing {listed(missing, 20)}"] if missing else []
        parts += [f"unexpected {listed(unexpected, 20)}"] if unexpected else []
        if parts:
            raise TableError(f"the columns do not match those of the model: {'; '.join(parts)}")


def require_fields(name: str, plain: object, wanted: Collection[str]) -> dict[str, Any]:
    """A dictionary that has all of these fields and no others; ValueError for anything else."""
    if not isinstance(plain, dict):
        raise ValueError(f"{name} must be a dictionary, got {type(plain).__name__}")
    missing = [each for each in wanted if each not in plain]
    if missing or len(plain) > len(wanted):
        wrong = f"{listed(missing)} missing" if missing else "unknown fields"
        raise ValueError(f"{name} must have the fields {', '.join(wanted)}: {wrong}")
    return plain


def _sequence(name: str, values: object, kind: type) -> tuple[Any, ...]:
    if not isinstance(values, list | tuple) or not all(type(value) is kind for value in values):
        raise ValueError(f"schema: {name} must be a list of {kind.__name__}")
    return tuple(values)


def _column(plain: object) -> Column:
    values = require_fields("schema: a column", plain, [each.name for each in fields(Column)])
    name, levels = values["name"], values["levels"]
    if not isinstance(name, str):
        raise ValueError(f"schema: the name of a column must be text, got {type(name).__name__}")
    if levels is None:
        return Column(name)
    column = Column(name, _sequence(f"levels of {name!r}", levels, str))
    _require_distinct(f"levels of {name!r}", levels)
    if len(levels) < 2:
        raise ValueError(f"schema: levels of {name!r} must be two at least, got {len(levels)}")
    return column


def _require_distinct(name: str, values: Collection[str]) -> None:
    if len(set(values)) < len(values):
        raise ValueError(f"schema: {name} must be distinct")


def require_complete(frame: "pd.DataFrame", names: list[str]) -> None:
    """No missing values, no infinities."""
    missing = {name: frame[name].isna().to_numpy() for name in names}
    bad = {name: flags for name, flags in missing.items() if flags.any()}
    if bad:
        name, flags = next(iter(bad.items()))
        others = f" (and in {len(bad) - 1} more columns)" if len(bad) > 1 else ""
        raise TableError(
            f"missing values: {int(flags.sum())} in column {name!r}, the first in row "
            f"{int(flags.argmax()) + 1}{others}; fill them in or remove them first"
        )
    for name in names:
        if frame[name].dtype.kind == "f" and not np.isfinite(values := frame[name].to_numpy()).all():
            row = int((~np.isfinite(values)).argmax()) + 1
            raise TableError(f"column {name!r} is infinite in row {row}")


def is_number(series: "pd.Series") -> bool:
    """Whether a column holds real numbers; booleans count as such."""
    types = pandas().api.types
    return types.is_numeric_dtype(series.dtype) and not types.is_complex_dtype(series.dtype)


def numbers(series: "pd.Series") -> np.ndarray:
    """Values (n,) in float64; text that is none is refused."""
    values = pandas().to_numeric(series, errors="coerce").to_numpy(dtype=float, na_value=np.nan)
    if np.isnan(values).any():
        row = int(np.isnan(values).argmax())
        raise TableError(
            f"column {series.name!r} must hold numbers, got {str(series.iloc[row])!r} in row {row + 1}"
        )
    return values


def texts(series: "pd.Series") -> np.ndarray:
    """Values (n,) as text; whole numbers without a point, so that 1 and 1.0 are the same."""
    if series.dtype.kind == "f":
        return np.array([f"{value:.15g}" for value in series])
    return series.astype(str).to_numpy(dtype=str)
