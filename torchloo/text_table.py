"""Tables as text."""

from typing import Any

__all__ = ["rendered"]


def rendered(table: list[dict[str, Any]], most: int = 12) -> list[str]:
    """The rows of a table as aligned text, the middle of a long one left out."""
    names = [name for name, value in table[0].items() if not isinstance(value, list)] if table else []
    cells = [names, *([_cell(row[name]) for name in names] for row in table)]
    widths = [max(len(row[j]) for row in cells) for j in range(len(names))]
    lines = ["  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells]
    return lines if len(lines) <= most + 1 else [*lines[: most - 1], "...", *lines[-1:]]


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
