"""From a table to a design matrix: choose and encode the inputs, infer the task, reject bad tables.

Note [missing values]
"error" rejects them; "drop" drops rows that have any in a column in use; "mean" imputes the mean of the
column (for text, the most frequent value), in `predict` too, and drops rows without a target, cluster or
weight. The means are those of all rows: they are not recomputed where rows are held out.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from torchloo.cli.decimals import MARKS, fitting, looks_numeric
from torchloo.cli.reading import TableError
from torchloo.cli.schema import (
    REGRESSION,
    Column,
    Schema,
    is_date,
    is_number,
    numbers,
    require_complete,
    row_number,
    texts,
    with_dates,
)
from torchloo.cli.shell import listed

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["PreparedTable", "Roles", "prepare"]

FEWEST_ROWS = 10
MOST_CLASSES = 50
MOST_NUMBERED_CLASSES = 10  # whole numbers with more distinct values than this are quantities


@dataclass(frozen=True)
class Roles:
    """The roles of columns given by the user; all others are inputs."""

    target: str
    clusters: str | None = None
    weights: str | None = None
    drop: tuple[str, ...] = ()
    task: str | None = None


class PreparedTable(NamedTuple):
    """A table ready for a machine."""

    schema: Schema
    X: np.ndarray
    """Standardised inputs (n, d)."""
    y: np.ndarray
    """Targets, encoded by `Schema.codes`."""
    target: np.ndarray
    """Targets as in the table: numbers, or labels as text."""
    clusters: np.ndarray | None
    """Cluster names (n,) as text."""
    weight: np.ndarray | None
    notes: tuple[str, ...]
    """Notes for the user: ignored columns, how the task was inferred."""
    rows: np.ndarray
    """Number of each row in the table, from 1, (n,)."""


def prepare(
    frame: "pd.DataFrame", roles: Roles, standardise: bool = True, missing: str = "error"
) -> PreparedTable:
    """Check a training table, infer the types of its columns and encode it.

    With standardise=False the inputs must be 0 or 1. For `missing` see Note [missing values].
    """
    _require_roles(frame, roles)
    if len(frame) < FEWEST_ROWS:
        raise TableError(f"the table has {len(frame)} rows; at least {FEWEST_ROWS} are needed")
    given = (roles.target, roles.clusters, roles.weights)
    special = [name for name in given if name is not None]
    inputs = [name for name in frame.columns if name not in special and name not in roles.drop]
    dates = [name for name in inputs if is_date(frame[name])]
    frame = with_dates(frame, dates)
    frame, drop_notes = _complete_rows(frame, special, inputs, missing)
    frame, fills, fill_notes = _imputed(frame, inputs, missing)
    require_complete(frame, special + inputs, "fill them in, or select with --missing drop or mean")
    labels, notes = _classes(frame[roles.target], roles)
    columns, raw, input_notes = _inputs(frame, inputs)
    columns = tuple(
        replace(column, dates=column.name in dates, fill=fills.get(column.name)) for column in columns
    )
    notes += [*drop_notes, *fill_notes, *input_notes]
    if dates:
        notes.append(f"dates, converted to days since 1970: {listed(dates, 20)}")
    if standardise:
        centre = raw.mean(0)
        scale = raw.std(0, ddof=1)
    else:
        _require_binary(columns, raw)
        centre = np.zeros_like(raw[0])
        scale = np.ones_like(raw[0])
    names = [column.name for column in columns]
    schema = Schema(
        target=roles.target,
        columns=columns,
        centre=tuple(centre.tolist()),
        scale=tuple(scale.tolist()),
        labels=labels,
        ignored=tuple(name for name in frame.columns if name not in (*names, roles.target)),
        decimals=dict(frame.attrs.get("decimals", {})),
    )
    target = texts(frame[roles.target]) if labels else numbers(frame[roles.target])
    clusters = None if roles.clusters is None else _clusters(frame[roles.clusters])
    weight = None if roles.weights is None else _weights(frame[roles.weights])
    if clusters is None:
        notes += _duplicates(frame[[*names, roles.target]])
    return PreparedTable(
        schema=schema,
        X=(raw - centre) / scale,
        y=schema.codes(frame[roles.target]),
        target=target,
        clusters=clusters,
        weight=weight,
        notes=tuple(notes),
        rows=frame.index.to_numpy() + 1,
    )


def _complete_rows(
    frame: "pd.DataFrame",
    special: list[str],
    inputs: list[str],
    missing: str,
) -> tuple["pd.DataFrame", list[str]]:
    """The rows to train on, with their index in the table, and a note of how many were dropped."""
    needed = {"error": [], "drop": special + inputs, "mean": special}[missing]
    complete = frame[needed].notna().all(axis=1).to_numpy()
    kept = int(complete.sum())
    if kept < FEWEST_ROWS:
        raise TableError(f"{kept} rows have no missing values; at least {FEWEST_ROWS} are needed")
    dropped = len(frame) - kept
    if not dropped:
        return frame, []
    note = f"{dropped} of {len(frame)} rows are dropped because of missing values"
    return frame[complete], [note]


def _imputed(
    frame: "pd.DataFrame", inputs: list[str], missing: str
) -> tuple["pd.DataFrame", dict[str, float | str], list[str]]:
    """The table with missing inputs imputed, the fill value of each column, and a note."""
    if missing != "mean":
        return frame, {}, []
    fills: dict[str, float | str] = {}
    for name in inputs:
        known = frame[name].dropna()
        if len(known) and is_number(known):
            fills[name] = float(numbers(known).mean())
        elif len(known):
            fills[name] = str(known.mode().iloc[0])
    incomplete = [name for name in fills if frame[name].isna().any()]
    if not incomplete:
        return frame, fills, []
    note = f"missing values imputed by the mean (text: the most frequent value) in {listed(incomplete, 20)}"
    imputed = {name: frame[name].fillna(fills[name]) for name in incomplete}
    return frame.assign(**imputed), fills, [note]


def _require_roles(frame: "pd.DataFrame", roles: Roles) -> None:
    named = {"--target": roles.target, "--clusters": roles.clusters, "--weights": roles.weights}
    named |= {f"--drop {name}": name for name in roles.drop}
    given = [(option, name) for option, name in named.items() if name is not None]
    for k, (option, name) in enumerate(given):
        if name not in frame.columns:
            ignored = f"; {note}" if (note := frame.attrs.get("ignored")) else ""
            raise TableError(
                f"{option}: no column {name!r}; the table has {listed(list(frame.columns), 12)}{ignored}"
            )
        for earlier, other in given[:k]:
            if other == name:
                options = f"{earlier.split()[0]} and {option.split()[0]}"
                raise TableError(f"column {name!r} cannot be both {options}")


def _classes(series: "pd.Series", roles: Roles) -> tuple[tuple[str, ...], list[str]]:
    """The class labels in order, none for a regression; and a note if the task was inferred."""
    distinct = series.nunique()
    if distinct < 2:
        raise TableError(f"target {series.name!r} has the same value in every row")
    numeric = is_number(series) and series.dtype.kind != "b"
    if numeric:
        is_regression = not _looks_like_classes(series, distinct)
        if roles.task == REGRESSION or (roles.task is None and is_regression):
            return (), []
    elif roles.task == REGRESSION:
        raise TableError(f"target {series.name!r} is text, which --task regression cannot predict")
    if distinct > MOST_CLASSES:
        kind, remedy = "text", "is it an identifier, or numbers as text?"
        if is_number(series):
            kind, remedy = "numbers", "for numbers use --task regression"
        raise TableError(
            f"target {series.name!r} is {kind} with {distinct} distinct values, more than {MOST_CLASSES} "
            f"classes; {remedy}"
        )
    labels, counts = np.unique(texts(series), return_counts=True)
    if counts.min() < 2:
        rare = str(labels[counts.argmin()])
        raise TableError(f"class {rare!r} of {series.name!r} has one row; each class needs 2")
    ordered = tuple(sorted(labels.tolist(), key=float)) if numeric else tuple(labels.tolist())
    if numeric and roles.task is None and distinct > 2:
        note = f"{series.name!r} has {distinct} distinct numbers, taken as classes; or use --task regression"
        return ordered, [note]
    return ordered, []


def _looks_like_classes(series: "pd.Series", distinct: int) -> bool:
    """Whether numbers are class labels: two distinct ones, or a few integers with several rows each."""
    integers = bool((series % 1 == 0).all())
    few = distinct <= MOST_NUMBERED_CLASSES and len(series) >= 5 * distinct
    return distinct == 2 or (integers and few)


def _inputs(frame: "pd.DataFrame", names: list[str]) -> tuple[tuple[Column, ...], np.ndarray, list[str]]:
    """The informative columns, their inputs (n, d) before standardisation, and notes of ignored ones."""
    columns, blocks, constant, notes = [], [], [], []
    for name in names:
        series = frame[name]
        if series.nunique() < 2:
            constant.append(name)
            continue
        column = Column(name) if is_number(series) else _text_column(series)
        if column is None:
            distinct = series.nunique()
            notes.append(
                f"column {name!r} is text with {distinct} distinct values in {len(frame)} rows: ignored"
            )
            continue
        columns.append(column)
        blocks.append(column.encode(series))
        if column.levels is None and _counts_the_rows(blocks[-1][:, 0]):
            notes.append(
                f"column {name!r} counts the rows; if it is not a measurement, ignore it with --drop"
            )
    if constant:
        notes.insert(0, f"ignored as constant: {listed(constant, 20)}")
    if not columns:
        raise TableError("no input column is left")
    raw = np.hstack(blocks)
    with np.errstate(over="ignore"):
        spread = raw.std(0)
    if not (np.isfinite(spread) & (spread > 0)).all():
        raise TableError("the variance of an input overflows or underflows; rescale the table")
    return tuple(columns), raw, notes


def _counts_the_rows(values: np.ndarray) -> bool:
    row_numbers = values[0] + np.arange(len(values))
    return values[0] in (0, 1) and np.array_equal(values, row_numbers)


def _text_column(series: "pd.Series") -> Column | None:
    """A one-hot encoded column; None if most rows have a distinct value, as identifiers do."""
    if series.dtype.kind in "mc":
        raise TableError(f"column {series.name!r} holds {series.dtype}; convert it to numbers, or use --drop")
    _require_one_kind(series)
    levels = np.unique(texts(series))
    if len(levels) > len(series) / 2:
        return None
    return Column(str(series.name), tuple(levels.tolist()))


def _require_one_kind(series: "pd.Series") -> None:
    """Raise if a text column mixes numbers with words, or numbers of two notations."""
    numeric = looks_numeric(series)
    if numeric.mean() <= 0.5:
        return
    remedy = "correct it, or ignore the column with --drop"
    if not numeric.all():
        row = int((~numeric).argmax())
        raise TableError(
            f"column {series.name!r} mixes numbers with text, {series.iloc[row]!r} in row "
            f"{row_number(series, row)}; {remedy}"
        )
    if not fitting(series):
        first = [int(series.str.contains(mark, regex=False).argmax()) for mark in MARKS]
        shown = " and ".join(f"{series.iloc[row]!r} in row {row_number(series, row)}" for row in first)
        raise TableError(
            f"column {series.name!r} mixes decimal commas with decimal points, {shown}; {remedy}"
        )


def _require_binary(columns: tuple[Column, ...], raw: np.ndarray) -> None:
    names = [name for column in columns for name in column.inputs]
    is_binary = np.isin(raw, (0, 1)).all(0)  # (d,)
    other = [names[k] for k in np.flatnonzero(~is_binary)]
    if other:
        raise TableError(f"this --kernel needs inputs 0 and 1 only; other values in {listed(other)}")


def _duplicates(frame: "pd.DataFrame") -> list[str]:
    """A note if rows are duplicated although some column has too many distinct values for chance."""
    count = int(frame.duplicated().sum())
    many_values = any(is_number(frame[name]) and frame[name].nunique() > 20 for name in frame)
    if not count or not many_values:
        return []
    rows = "1 row is a duplicate" if count == 1 else f"{count} rows are duplicates"
    return [f"{rows} of another; if they are the same case leave-one-out is optimistic, see --clusters"]


def _clusters(series: "pd.Series") -> np.ndarray:
    names = texts(series)
    if len(np.unique(names)) < 2:
        raise TableError(
            f"cluster column {series.name!r} has one value only, so no rows would be left to train on"
        )
    return names


def _weights(series: "pd.Series") -> np.ndarray:
    values = numbers(series)
    if (values <= 0).any():
        row = int((values <= 0).argmax())
        raise TableError(
            f"weights {series.name!r} must be positive, got {values[row]:g} in row {row_number(series, row)}"
        )
    return values
