"""The encoding of a table as inputs and targets, learnt from one table and applied to others.

A `Schema` encodes any table that has its columns and rejects others; it is saved with the model as a plain
dictionary.
"""

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from torchloo.classes import one_vs_rest
from torchloo.cli.decimals import MARKS
from torchloo.cli.reading import TableError, pandas
from torchloo.cli.shell import listed

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "CLASSIFICATION",
    "REGRESSION",
    "Column",
    "Schema",
    "days",
    "filled",
    "is_date",
    "is_number",
    "numbers",
    "require_complete",
    "require_fields",
    "row_number",
    "texts",
    "with_dates",
]

CLASSIFICATION, REGRESSION = "classification", "regression"


@dataclass(frozen=True)
class Column:
    """An input column: numbers, dates in days, or text, one-hot encoded (one input for two levels)."""

    name: str
    levels: tuple[str, ...] | None = None
    dates: bool = False
    fill: float | str | None = None
    """The value imputed where one is missing; None if missing values are not allowed."""

    @property
    def inputs(self) -> list[str]:
        """Names of the inputs that encode the column."""
        if self.levels is None:
            return [self.name]
        return [f"{self.name}={level}" for level in self._encoded_levels]

    @property
    def _encoded_levels(self) -> tuple[str, ...]:
        """Levels with an input of their own: all, or the second of two."""
        assert self.levels is not None
        if len(self.levels) == 2:
            return self.levels[1:]
        return self.levels

    def encode(self, series: "pd.Series") -> np.ndarray:
        """(n, number of inputs), float64."""
        if self.dates:
            return days(series)[:, None]
        if self.levels is None:
            return numbers(series)[:, None]
        text = texts(series)
        unknown = ~np.isin(text, self.levels)
        if unknown.any():
            row = int(unknown.argmax())
            known = listed(list(self.levels))
            raise TableError(
                f"column {self.name!r} has the value {str(text[row])!r} in row "
                f"{row_number(series, row)}; known: {known}"
            )
        return (text[:, None] == np.array(self._encoded_levels)).astype(float)


@dataclass(frozen=True)
class Schema:
    """The encoding of a table as inputs and targets."""

    target: str
    columns: tuple[Column, ...]
    centre: tuple[float, ...]
    """Mean of every input, which is subtracted."""
    scale: tuple[float, ...]
    """Standard deviation of every input, by which it is divided."""
    labels: tuple[str, ...] = ()
    """The classes in order; of two, the second is coded +1. Empty for regression."""
    ignored: tuple[str, ...] = ()
    """Columns that may be present and are ignored."""
    decimals: dict[str, str] = field(default_factory=dict)
    """The decimal marks of the training table, by column; see Note [decimal marks]."""

    @property
    def text(self) -> frozenset[str]:
        """Names of the text columns, even where the text looks like numbers."""
        return frozenset(column.name for column in self.columns if column.levels is not None)

    @property
    def task(self) -> str:
        """classification or regression."""
        return CLASSIFICATION if self.labels else REGRESSION

    @property
    def inputs(self) -> list[str]:
        """Names of the inputs, one for each column of the design matrix."""
        return [name for column in self.columns for name in column.inputs]

    def design(self, frame: "pd.DataFrame", ignore_extra: bool = False) -> np.ndarray:
        """The standardised inputs (n, d) of a table; missing values are imputed if the schema says how.

        Raises TableError if columns are missing or, unless `ignore_extra`, if there are other columns.
        """
        self._require_columns(frame, ignore_extra)
        frame = with_dates(frame, [column.name for column in self.columns if column.dates])
        frame = filled(frame, self.columns)
        remedy = "fill them in, or select the model with --missing mean"
        require_complete(frame, [column.name for column in self.columns], remedy)
        raw = np.hstack([column.encode(frame[column.name]) for column in self.columns])
        return (raw - np.array(self.centre)) / np.array(self.scale)

    def codes(self, values: "pd.Series") -> np.ndarray:
        """Targets: numbers (n,); -1 and +1 (n,) for two classes; (n, c) for c classes."""
        if not self.labels:
            return numbers(values)
        labels = texts(values)
        known = {label: k for k, label in enumerate(self.labels)}
        position = np.array([known.get(label, -1) for label in labels])
        if (position < 0).any():
            row = int((position < 0).argmax())
            raise TableError(
                f"target {self.target!r} has the value {str(labels[row])!r} in row "
                f"{row_number(values, row)}; known classes: {listed(list(self.labels))}"
            )
        classes = range(len(self.labels))
        columns = one_vs_rest(position, classes, dtype=torch.float64).numpy()
        return columns[:, 0] if len(self.labels) == 2 else columns

    def decoded(self, outputs: np.ndarray) -> np.ndarray:
        """Outputs (n,), or (n, c) for c classes, as numbers or class labels (n,)."""
        if not self.labels:
            return outputs
        classes = (outputs >= 0).astype(int) if outputs.ndim == 1 else outputs.argmax(1)
        return np.array(self.labels)[classes]

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for torch.save."""
        return asdict(self)

    @classmethod
    def from_dict(cls, plain: object) -> "Schema":
        """The inverse of `as_dict`; ValueError if the dictionary is not a valid schema."""
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
        """Raise if the fields contradict one another."""
        names = [column.name for column in self.columns]
        _require_distinct("names of columns", [*names, self.target, *self.ignored])
        _require_distinct("labels", self.labels)
        if not names or len(self.labels) == 1:
            raise ValueError("schema: there must be at least one column, and labels must be none or several")
        for name, values in (("centre", self.centre), ("scale", self.scale)):
            if len(values) != len(self.inputs) or not np.isfinite(values).all():
                raise ValueError(f"schema: {name} must be {len(self.inputs)} finite numbers")
        if min(self.scale) <= 0:
            raise ValueError("schema: scale must be positive")

    def _require_columns(self, frame: "pd.DataFrame", ignore_extra: bool) -> None:
        wanted = [column.name for column in self.columns]
        missing = [name for name in wanted if name not in frame.columns]
        allowed = {*wanted, *self.ignored, self.target}
        unexpected = [name for name in frame.columns if name not in allowed]
        parts = [f"missing {listed(missing, 20)}"] if missing else []
        if unexpected and not ignore_extra:
            remedy = "" if missing else " (or --ignore-extra)"
            parts.append(f"unexpected {listed(unexpected, 20)}{remedy}")
        if parts:
            raise TableError(f"the columns do not match those of the model: {'; '.join(parts)}")


def require_fields(name: str, plain: object, wanted: Collection[str]) -> dict[str, Any]:
    """Return a dictionary if it has exactly these fields; ValueError otherwise."""
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
    if type(values["dates"]) is not bool or (values["dates"] and levels is not None):
        raise ValueError(f"schema: dates of {name!r} must be True or False, and have no levels")
    column = Column(name, dates=values["dates"], fill=values["fill"])
    if levels is not None:
        column = replace(column, levels=_sequence(f"levels of {name!r}", levels, str))
        _require_distinct(f"levels of {name!r}", levels)
        if len(levels) < 2:
            raise ValueError(f"schema: levels of {name!r} must be at least two, got {len(levels)}")
    _require_fill(column)
    return column


def _require_fill(column: Column) -> None:
    fill = column.fill
    if column.levels is None:
        valid = isinstance(fill, float) and np.isfinite(fill)
    else:
        valid = fill in column.levels
    if fill is not None and not valid:
        raise ValueError(f"schema: fill of {column.name!r} must be a value that the column may have")


def _require_distinct(name: str, values: Collection[str]) -> None:
    if len(set(values)) < len(values):
        raise ValueError(f"schema: {name} must be distinct")


def row_number(values: "pd.DataFrame | pd.Series", place: int) -> int:
    """Number in the file, from 1, of a row of a table from which rows may have been dropped."""
    return int(values.index[place]) + 1


def require_complete(frame: "pd.DataFrame", names: list[str], remedy: str) -> None:
    """Raise if values are missing, naming a remedy, or infinite."""
    missing = {name: frame[name].isna().to_numpy() for name in names}
    bad = {name: flags for name, flags in missing.items() if flags.any()}
    if bad:
        name, flags = next(iter(bad.items()))
        others = f" (and in {len(bad) - 1} more columns)" if len(bad) > 1 else ""
        short = f"; {line}" if (line := frame.attrs.get("short")) else ""
        raise TableError(
            f"missing values: {int(flags.sum())} in column {name!r}, the first in row "
            f"{row_number(frame, int(flags.argmax()))}{others}{short}; {remedy}"
        )
    for name in names:
        if frame[name].dtype.kind != "f":
            continue
        infinite = ~np.isfinite(frame[name].to_numpy())
        if infinite.any():
            row = row_number(frame, int(infinite.argmax()))
            raise TableError(f"column {name!r} is infinite in row {row}")


def filled(frame: "pd.DataFrame", columns: Sequence[Column]) -> "pd.DataFrame":
    """The table with missing values imputed in the columns that have a fill value."""
    imputed = {}
    for column in columns:
        if column.fill is not None and frame[column.name].isna().any():
            imputed[column.name] = frame[column.name].fillna(column.fill)
    return frame.assign(**imputed)


_ISO_DATE = r"\d{4}-\d{2}-\d{2}(?:[T ]\d{2}:\d{2}(?::\d{2}(?:\.\d+)?)?(?:Z|[+-]\d{2}:?\d{2})?)?"


def is_date(series: "pd.Series") -> bool:
    """Whether a column holds dates, by type or as text such as 2020-01-31 or 2020-01-31 12:00."""
    if series.dtype.kind == "M" or isinstance(series.dtype, pandas().DatetimeTZDtype):
        return True
    known = series.dropna()
    if not len(known) or is_number(series) or not all(isinstance(value, str) for value in known):
        return False
    looks_like_dates = bool(known.str.fullmatch(_ISO_DATE).all())
    return looks_like_dates and not _moments(known).isna().any()


def _moments(series: "pd.Series") -> "pd.Series":
    """Times in UTC; missing where the text is not a date."""
    return pandas().to_datetime(series, format="ISO8601", utc=True, errors="coerce")


def with_dates(frame: "pd.DataFrame", names: list[str]) -> "pd.DataFrame":
    """The table with these date columns as days since 1970; missing values stay missing."""
    return frame.assign(**{name: days(frame[name]) for name in names})


def days(series: "pd.Series") -> np.ndarray:
    """Dates (n,) as days since 1970-01-01, NaN where missing; numbers are taken as days."""
    if is_number(series):
        if series.isna().any():
            return series.to_numpy(dtype=float, na_value=np.nan)
        return numbers(series)
    moments = _moments(series)
    wrong = (moments.isna() & series.notna()).to_numpy()
    if wrong.any():
        row = int(wrong.argmax())
        raise TableError(
            f"column {series.name!r} must hold dates such as 2020-01-31, got {str(series.iloc[row])!r} in "
            f"row {row_number(series, row)}"
        )
    since = moments - pandas().Timestamp(0, tz="UTC")
    return (since / pandas().Timedelta(days=1)).to_numpy(dtype=float)


def is_number(series: "pd.Series") -> bool:
    """Whether a column holds real numbers or booleans."""
    types = pandas().api.types
    return types.is_numeric_dtype(series.dtype) and not types.is_complex_dtype(series.dtype)


def numbers(series: "pd.Series") -> np.ndarray:
    """Values (n,) in float64; TableError for text that is not a number."""
    parsed = pandas().to_numeric(series, errors="coerce")
    values = parsed.to_numpy(dtype=float, na_value=np.nan)
    if np.isnan(values).any():
        row = int(np.isnan(values).argmax())
        raise TableError(
            f"column {series.name!r} must hold numbers, got {str(series.iloc[row])!r} in row "
            f"{row_number(series, row)}"
        )
    return values


def texts(series: "pd.Series") -> np.ndarray:
    """Values (n,) as text; whole numbers without a decimal point, so that 1 and 1.0 are the same."""
    if series.dtype.kind == "f":
        return np.array([f"{value:.15g}" for value in series])
    return series.astype(str).to_numpy(dtype=str)
