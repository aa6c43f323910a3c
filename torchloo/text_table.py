"""Tables as text."""

from typing import Any

__all__ = ["rendered"]


def rendered(table: list[dict[str, Any]], most: int = 12) -> list[str]:
    """The rows of a table as aligned text, the middle of a long one left out; what a row lacks is blank."""
    names = list(dict.fromkeys(name for row in table for name, v in row.items() if not isinstance(v, list)))
    cells = [names, *([_cell(row.get(name, "")) for name in names] for row in table)]
    widths = [max(len(row[j]) for row in cells) for j in range(len(names))]
    lines = ["  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells]
    return lines if len(lines) <= most + 1 else [*lines[: most - 1], "...", *lines[-1:]]


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
