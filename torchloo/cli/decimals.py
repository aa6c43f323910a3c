"""Numbers as people write them in text files: decimal commas, and marks between thousands."""

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

_SPACES = " \u00a0\u202f'\u2019"  # marks between thousands that are never decimal marks


@dataclass(frozen=True)
class _Reading:
    """A way to write numbers: the decimal mark, and what may stand between thousands beside `_SPACES`."""

    decimal: str
    thousands: str

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """All numbers written so."""
        grouped = rf"[1-9]\d{{0,2}}(?P<mark>[{self.thousands}{_SPACES}])\d{{3}}(?:(?P=mark)\d{{3}})*"
        decimal = re.escape(self.decimal)
        mantissa = rf"(?:(?:{grouped}|\d+)(?:{decimal}\d*)?|{decimal}\d+)"
        return re.compile(rf"\s*[-+]?{mantissa}(?:[eE][-+]?\d+)?\s*", re.ASCII)

    def fits(self, value: object) -> bool:
        """Whether a value is text that is a number written so."""
        return isinstance(value, str) and self.pattern.fullmatch(value) is not None

    def number(self, text: str) -> float:
        """The number that a text is."""
        return float(re.sub(f"[{self.thousands}{_SPACES}]", "", text).replace(self.decimal, "."))


_READINGS = {",": _Reading(",", "."), ".": _Reading(".", ",")}
MARKS = tuple(_READINGS)
"""The decimal marks."""


def looks_numeric(values: "pd.Series") -> np.ndarray:
    """Which values (n,) of a column of text are numbers, however written."""
    readings = _READINGS.values()
    return np.array([any(reading.fits(value) for reading in readings) for value in values], dtype=bool)


def fitting(values: "pd.Series") -> list[str]:
    """The decimal marks with which all values of a column of text are numbers; none where 1,5 meets 2.5."""
    marks = [mark for mark, reading in _READINGS.items() if all(map(reading.fits, values))]
    return [] if len(marks) == 2 and _have(values, ",") and _have(values, r"\.") else marks


def _have(values: "pd.Series", pattern: str) -> bool:
    """Whether some value of a column of text has the pattern in it."""
    return bool(values.str.contains(pattern, na=False).any())


def with_numbers(
    frame: "pd.DataFrame",
    as_text: Callable[[], "pd.DataFrame"],
    text: Collection[str],
    separator: str,
    known: Mapping[str, str],
) -> tuple["pd.DataFrame", dict[str, str], list[str]]:
    """A table of a text file whose numbers with decimal commas or marks between thousands are numbers.

    Note [decimal marks]
    A column is read with the decimal mark that fits all of its values: 1,5 has a decimal comma, 1,234.5
    a comma between thousands. Where both marks fit, as in 1,234, the first of these decides: the model's
    table, unless other columns of the file contradict it; the other columns of the file, if they agree;
    the separator. Beside separating commas the comma of 1,234 is one between thousands, beside other
    separators a decimal comma; the point of 1.234 is a decimal point.

    Args:
        frame: the table as read with decimal points.
        as_text: gives the same table with all columns as text.
        text: names of columns that stay text.
        separator: the separator of the file.
        known: the decimal mark of each column of the model's table that has one.

    Returns:
        The table, the decimal marks of its columns, and notes for the user. No marks are looked for where
        all columns are plain numbers and words, and `known` is empty.
    """
    kinds = {name: frame[name].dtype.kind for name in frame.columns if name not in text}
    words = [name for name, kind in kinds.items() if kind == "O"]
    if not known and not any(_marks_of(frame[name].dropna()) for name in words):
        return frame, {}, []
    raw = as_text()
    possible = {name: _marks_of(raw[name].dropna()) for name, kind in kinds.items() if kind in "Of"}
    marks = _decided({name: found for name, found in possible.items() if found}, words, separator, known)
    frame = frame.copy()
    for name, mark in marks.items():
        if name in words or mark == ",":  # others have been read already
            frame[name] = raw[name].map(_READINGS[mark].number, na_action="ignore").astype(float)
    return frame, marks, _notes(raw, marks)


def _marks_of(values: "pd.Series") -> list[str]:
    """The decimal marks that may be meant in a column of text; none in one of words or of digits alone."""
    marks = fitting(values) if len(values) else []
    return marks if marks and _have(values, rf"[,.{_SPACES}]") else []


def _decided(
    possible: Mapping[str, list[str]], words: Collection[str], separator: str, known: Mapping[str, str]
) -> dict[str, str]:
    """One decimal mark for each column; see Note [decimal marks]."""
    certain = {name: marks[0] for name, marks in possible.items() if len(marks) == 1}
    contradicted = any(known.get(name, mark) != mark for name, mark in certain.items())
    others = set(certain.values())
    decided = {}
    for name in possible:
        by_separator = "," if name in words and separator != "," else "."
        in_file = others.copy().pop() if len(others) == 1 else by_separator
        decided[name] = certain.get(name) or (in_file if contradicted else known.get(name, in_file))
    return decided


def _notes(raw: "pd.DataFrame", marks: Mapping[str, str]) -> list[str]:
    commas = [name for name, mark in marks.items() if mark == "," and _have(raw[name], ",")]
    between = {mark: rf"\d[{reading.thousands}{_SPACES}]\d" for mark, reading in _READINGS.items()}
    grouped = [name for name, mark in marks.items() if _have(raw[name], between[mark])]
    notes = [("read with a decimal comma", commas), ("read with marks between thousands", grouped)]
    return [f"{said}: {listed(names, 20)}" for said, names in notes if names]
