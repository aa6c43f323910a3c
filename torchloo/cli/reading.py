"""Read tables from CSV, Parquet and .npz files, with checks."""

import contextlib
import csv
import importlib
import re
import zipfile
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from torchloo.cli.decimals import with_numbers
from torchloo.cli.shell import listed

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["TableError", "pandas", "read_table"]


class TableError(ValueError):
    """A table that cannot be used; the message is one line and names the remedy."""


def read_table(
    path: Path,
    text: Collection[str] = (),
    decimals: Mapping[str, str] | None = None,
) -> tuple["pd.DataFrame", list[str]]:
    """Read a file; returns the table and notes for the user.

    CSV may be separated by commas, semicolons, tabs or bars; numbers may have a decimal comma and thousands
    separators (Note [decimal marks]). Parquet needs pyarrow. In an .npz, an array (n,) is a column
    of its own name, and an array (n, d) is d columns, named by an array `feature_names` (d,) or by numbers.

    Args:
        path: the file.
        text: columns that are read as text, even if all values in a CSV file look like numbers or booleans.
        decimals: decimal marks by column, as in `attrs["decimals"]` of an earlier table, which resolve
            ambiguous numbers in a CSV file.
    """
    pandas()
    readers: dict[str, Any] = {".parquet": _parquet, ".npz": _npz}
    read_csv = partial(_csv, text=text, decimals=decimals or {})
    readers |= dict.fromkeys((".csv", ".tsv", ".txt"), read_csv)
    read = readers.get(path.suffix.lower())
    if read is None:
        raise TableError(f"{str(path)!r} must be a .csv, .parquet or .npz file")
    if not path.is_file():
        raise TableError(f"{str(path)!r} " + ("is a folder" if path.is_dir() else "does not exist"))
    if path.stat().st_size == 0:
        raise TableError(f"{str(path)!r} is empty")
    try:
        frame, notes = read(path)
    except OSError as error:
        raise TableError(f"cannot read {str(path)!r}: {error.strerror or error}") from error
    if not len(frame):
        raise TableError(f"{str(path)!r} has column names but no rows")
    return frame, notes


def pandas() -> ModuleType:
    """Import pandas; TableError if it is not installed."""
    try:
        return importlib.import_module("pandas")
    except ImportError as error:
        raise TableError("reading tables needs pandas: pip install torchloo[cli]") from error


def _csv(path: Path, text: Collection[str], decimals: Mapping[str, str]) -> tuple["pd.DataFrame", list[str]]:
    pd = pandas()
    encoding, notes = _encoding(path)
    separator = _separator(path, encoding)

    def read(**options: Any) -> Any:
        return pd.read_csv(path, sep=separator, encoding=encoding, **options)

    def as_text() -> Any:
        return _stripped(read(skipinitialspace=True, dtype=str))

    try:
        names = read(header=None, nrows=1, dtype=str, keep_default_na=False).iloc[0]
        kinds = {name: str for name in names if name.strip() in text}
        frame = _stripped(read(low_memory=False, skipinitialspace=True, dtype=kinds))
    except pd.errors.EmptyDataError as error:
        raise TableError(f"{str(path)!r} is empty") from error
    except pd.errors.ParserError as error:
        reason = str(error).strip().removeprefix("Error tokenizing data. C error: ").splitlines()[0]
        raise TableError(f"{str(path)!r} is not a table: {reason}") from error
    if not frame.index.equals(pd.RangeIndex(len(frame))):  # pandas reads unnamed fields as an index
        raise TableError(f"{str(path)!r} has rows with more fields than the header has names")
    _require_distinct(path, [str(name).strip() for name in names])
    frame, marks, number_notes = with_numbers(frame, as_text, text, separator, decimals)
    frame.attrs["decimals"] = marks
    if frame.iloc[:, -1].isna().any():  # as in every line with too few fields
        frame.attrs["short"] = _short_line(path, encoding, separator)
    frame, index_notes = _without_row_numbers(frame)
    return frame, notes + number_notes + index_notes


def _separator(path: Path, encoding: str) -> str:
    """The separator of the header line."""
    with path.open(encoding=encoding) as file:
        first = next(filter(str.strip, file), "")
    outside = re.sub(r'"[^"]*"', "", first)  # ignore separators within quotes
    return max(",;\t|", key=outside.count)


def _short_line(path: Path, encoding: str, separator: str) -> str:
    """The first line with fewer fields than the header has names, in words; "" if there is none."""
    expected = 0
    with path.open(encoding=encoding, newline="") as file, contextlib.suppress(csv.Error):
        lines = csv.reader(file, delimiter=separator, skipinitialspace=True)
        for fields in lines:
            expected = expected or len(fields)
            if len(fields) < expected and any(map(str.strip, fields)):
                return f"line {lines.line_num} has {len(fields)} of {expected} fields"
    return ""


def _stripped(frame: "pd.DataFrame") -> "pd.DataFrame":
    frame.columns = [str(name).strip() for name in frame.columns]
    return frame


def _encoding(path: Path) -> tuple[str, list[str]]:
    """UTF-8, or else Windows-1252, with a note."""
    content = path.read_bytes()
    if b"\0" in content:
        raise TableError(f"{str(path)!r} is not a text file, or not in UTF-8")
    for encoding in ("utf-8-sig", "cp1252"):
        try:
            content.decode(encoding)
        except UnicodeDecodeError:
            continue
        if encoding == "utf-8-sig":
            return encoding, []
        return encoding, ["the file is not UTF-8: read as Windows-1252"]
    raise TableError(f"{str(path)!r} is not UTF-8 text")


def _require_distinct(path: Path, names: list[str]) -> None:
    twice = sorted({name for name in names if name and names.count(name) > 1})
    if twice:
        raise TableError(f"{str(path)!r} has several columns named {listed(twice)}")


def _without_row_numbers(frame: "pd.DataFrame") -> tuple["pd.DataFrame", list[str]]:
    """Ignore an unnamed first column of row numbers, as pandas writes it."""
    first = frame.iloc[:, 0]
    counts_rows = first.dtype.kind == "i" and first.is_unique
    if frame.columns[0].startswith("Unnamed: ") and counts_rows:
        return frame.iloc[:, 1:], ["the first column is unnamed and counts the rows: ignored"]
    return frame, []


def _parquet(path: Path) -> tuple["pd.DataFrame", list[str]]:
    try:
        importlib.import_module("pyarrow")
    except ImportError as error:
        raise TableError("reading Parquet needs pyarrow: pip install pyarrow") from error
    try:
        frame = pandas().read_parquet(path, engine="pyarrow").reset_index(drop=True)
    except Exception as error:  # pyarrow's own errors, whatever their class
        lines = str(error).splitlines()
        reason = lines[0] if lines else type(error).__name__
        raise TableError(f"{str(path)!r} is not a Parquet file: {reason}") from error
    frame.attrs.clear()  # other programs may have stored their own
    names = [str(name) for name in frame.columns]
    _require_distinct(path, names)
    frame.columns = names
    return frame, []


def _npz(path: Path) -> tuple["pd.DataFrame", list[str]]:
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except (ValueError, KeyError, EOFError, OSError, zipfile.BadZipFile) as error:
        raise TableError(f"{str(path)!r} is not an .npz archive of plain arrays") from error
    tables = {name: array for name, array in arrays.items() if array.ndim in (1, 2)}
    if not tables:
        raise TableError(f"{str(path)!r} holds no array of one or two dimensions")
    first = next(iter(tables.values()))
    n = len(tables.get("X", first))
    used = {name: array for name, array in tables.items() if len(array) == n}
    columns: dict[str, np.ndarray] = {}
    for name, array in used.items():
        for column, values in _columns_of(name, array, arrays.get("feature_names")):
            if column in columns:
                raise TableError(f"{str(path)!r} has several columns named {column!r}")
            columns[column] = values
    ignored = sorted(set(arrays) - {"feature_names"} - set(used))
    notes = [f"arrays without {n} rows are ignored: {listed(ignored)}"] if ignored else []
    frame = pandas().DataFrame(columns)
    frame.attrs["ignored"] = "".join(notes)
    return frame, notes


def _columns_of(name: str, array: np.ndarray, names: np.ndarray | None) -> list[tuple[str, np.ndarray]]:
    if array.ndim == 1:
        return [(name, array)]
    if name == "X" and names is not None and names.shape == (array.shape[1],):
        return [(str(given), array[:, j]) for j, given in enumerate(names)]
    return [(f"{name}{j}", array[:, j]) for j in range(array.shape[1])]
