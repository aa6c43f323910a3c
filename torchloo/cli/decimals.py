"""Numbers in text files with decimal commas or thousands separators."""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from torchloo.cli.shell import listed

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["MARKS", "fitting", "looks_numeric", "with_numbers"]

_SPACES = " \u00a0\u202f'\u2019"  # thousands separators that are never decimal marks


@dataclass(frozen=True)
class _Reading:
    """A number format: the decimal mark, and the thousands separator besides `_SPACES`."""

    decimal: str
    thousands: str

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Matches numbers of this format."""
        grouped = rf"[1-9]\d{{0,2}}(?P<mark>[{self.thousands}{_SPACES}])\d{{3}}(?:(?P=mark)\d{{3}})*"
        decimal = re.escape(self.decimal)
        mantissa = rf"(?:(?:{grouped}|\d+)(?:{decimal}\d*)?|{decimal}\d+)"
        return re.compile(rf"\s*[-+]?{mantissa}(?:[eE][-+]?\d+)?\s*", re.ASCII)

    def fits(self, value: object) -> bool:
        """Whether a value is text and a number of this format."""
        return isinstance(value, str) and self.pattern.fullmatch(value) is not None

    def number(self, text: str) -> float:
        """Parse a text."""
        return float(re.sub(f"[{self.thousands}{_SPACES}]", "", text).replace(self.decimal, "."))


_READINGS = {",": _Reading(",", "."), ".": _Reading(".", ",")}
MARKS = tuple(_READINGS)
"""The decimal marks."""


def looks_numeric(values: "pd.Series") -> np.ndarray:
    """Which values (n,) of a text column are numbers in any format."""
    numeric = [any(reading.fits(value) for reading in _READINGS.values()) for value in values]
    return np.array(numeric, dtype=bool)


def fitting(values: "pd.Series") -> list[str]:
    """The decimal marks with which all values of a text column are numbers; none for 1,5 beside 2.5."""
    marks = [mark for mark, reading in _READINGS.items() if all(map(reading.fits, values))]
    mixed = len(marks) == 2 and _have(values, ",") and _have(values, r"\.")
    return [] if mixed else marks


def _have(values: "pd.Series", pattern: str) -> bool:
    """Whether some value of a text column matches the pattern."""
    return bool(values.str.contains(pattern, na=False).any())


def with_numbers(
    frame: "pd.DataFrame",
    as_text: Callable[[], "pd.DataFrame"],
    text: Collection[str],
    separator: str,
    known: Mapping[str, str],
) -> tuple["pd.DataFrame", dict[str, str], list[str]]:
    """Parse the columns of a text file that have decimal commas or thousands separators.

    Note [decimal marks]
    A column is read with the decimal mark that fits all of its values: 1,5 has a decimal comma, 1,234.5
    a comma as thousands separator. If both marks fit, as in 1,234, the first of these decides: the table of
    the model, unless other columns of the file contradict it; the other columns of the file, if they agree;
    the field separator. In a comma-separated file the comma of 1,234 is a thousands separator, in others a
    decimal comma; the point of 1.234 is a decimal point.

    Args:
        frame: the table as read with decimal points.
        as_text: gives the same table with all columns as text.
        text: names of columns to be left as text.
        separator: the field separator of the file.
        known: the decimal mark of each column of the model's table that has one.

    Returns:
        The table, the decimal marks of its columns, and notes for the user. Nothing is parsed again if all
        columns are plain numbers or words and `known` is empty.
    """
    kinds = {name: frame[name].dtype.kind for name in frame.columns if name not in text}
    unparsed = [name for name, kind in kinds.items() if kind == "O"]
    if not known and not any(_marks_of(frame[name].dropna()) for name in unparsed):
        return frame, {}, []
    raw = as_text()
    possible = {}
    for name, kind in kinds.items():
        if kind in "Of" and (marks_of_column := _marks_of(raw[name].dropna())):
            possible[name] = marks_of_column
    marks = _decided(possible, unparsed, separator, known)
    frame = frame.copy()
    for name, mark in marks.items():
        if name in unparsed or mark == ",":  # others are parsed already
            numbers = raw[name].map(_READINGS[mark].number, na_action="ignore")
            frame[name] = numbers.astype(float)
    return frame, marks, _notes(raw, marks)


def _marks_of(values: "pd.Series") -> list[str]:
    """The possible decimal marks of a text column; none if it holds words, or digits only."""
    marks = fitting(values) if len(values) else []
    return marks if marks and _have(values, rf"[,.{_SPACES}]") else []


def _decided(
    possible: Mapping[str, list[str]],
    unparsed: Collection[str],
    separator: str,
    known: Mapping[str, str],
) -> dict[str, str]:
    """One decimal mark for each column; see Note [decimal marks]."""
    certain = {name: marks[0] for name, marks in possible.items() if len(marks) == 1}
    contradicted = any(known.get(name, mark) != mark for name, mark in certain.items())
    marks_in_file = set(certain.values())
    decided = {}
    for name in possible:
        if len(marks_in_file) == 1:
            (in_file,) = marks_in_file
        else:
            in_file = "," if name in unparsed and separator != "," else "."
        by_model = in_file if contradicted else known.get(name, in_file)
        decided[name] = certain.get(name, by_model)
    return decided


def _notes(raw: "pd.DataFrame", marks: Mapping[str, str]) -> list[str]:
    commas, grouped = [], []
    for name, mark in marks.items():
        if mark == "," and _have(raw[name], ","):
            commas.append(name)
        separators = _READINGS[mark].thousands + _SPACES
        if _have(raw[name], rf"\d[{separators}]\d"):
            grouped.append(name)
    notes = [("read with a decimal comma", commas), ("read with thousands separators", grouped)]
    return [f"{note}: {listed(names, 20)}" for note, names in notes if names]
