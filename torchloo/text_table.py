"""Tables as text."""

from collections.abc import Sequence
from typing import Any

__all__ = ["aligned", "rendered"]


def aligned(rows: Sequence[Sequence[str]], left: int = 1, gap: str = "   ") -> list[str]:
    """Rows of text as lines: the first `left` columns aligned to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = []
        for column, (cell, width) in enumerate(zip(row, widths, strict=True)):
            cells.append(cell.ljust(width) if column < left else cell.rjust(width))
        lines.append(gap.join(cells).rstrip())
    return lines


def rendered(table: list[dict[str, Any]], most: int = 12) -> list[str]:
    """The rows of a table as lines of text; a missing value is blank, the middle of a long table omitted.

    Values that are lists are not shown.
    """
    scalars = [_scalars(row) for row in table]
    names = list(dict.fromkeys(name for row in scalars for name in row))
    cells = []
    for row in scalars:
        cells.append([_cell(row.get(name, "")) for name in names])
    lines = aligned([names, *cells], left=0, gap="  ")
    if len(lines) <= most + 1:
        return lines
    return [*lines[: most - 1], "...", lines[-1]]


def _scalars(row: dict[str, Any]) -> dict[str, Any]:
    """A row without the values that are lists."""
    return {name: value for name, value in row.items() if not isinstance(value, list)}


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
