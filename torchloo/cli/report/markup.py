"""HTML elements. Text is escaped here; only `paragraph` takes HTML."""

import base64
import html
from collections.abc import Mapping, Sequence

__all__ = ["figure", "items", "number", "paragraph", "section", "table", "text", "tile"]


def text(value: object) -> str:
    """A value as escaped text."""
    return html.escape(str(value))


def number(value: float) -> str:
    """Four significant digits; large numbers in full, with commas."""
    return f"{float(f'{value:.4g}'):,.0f}" if 1e4 <= abs(value) < 1e12 else f"{value:.4g}"


def section(title: str, *parts: str) -> str:
    """A section with a heading."""
    return f"<section>\n<h2>{text(title)}</h2>\n{''.join(parts)}</section>\n"


def paragraph(words: str, kind: str = "") -> str:
    """A paragraph of HTML."""
    return f'<p class="{kind}">{words}</p>\n' if kind else f"<p>{words}</p>\n"


def items(lines: Sequence[str]) -> str:
    """A list of texts; empty for none."""
    listed = "".join(f"<li>{text(line)}</li>\n" for line in lines)
    return f'<ul class="notes">\n{listed}</ul>\n' if listed else ""


def figure(svg: str, caption: str, square: bool = False) -> str:
    """An embedded picture with a caption."""
    data = base64.b64encode(svg.encode()).decode()
    kind = ' class="square"' if square else ""
    return (
        f'<figure>\n<img{kind} alt="{text(caption)}" src="data:image/svg+xml;base64,{data}">\n'
        f"<figcaption>{text(caption)}</figcaption>\n</figure>\n"
    )


def table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    kinds: Mapping[tuple[int, int], str] | None = None,
    words: bool = False,
) -> str:
    """A table of texts; kinds: CSS classes of cells (row, column); words: align all columns left."""
    kinds = kinds or {}
    top = "".join(f'<th scope="col">{text(name)}</th>' for name in head)
    lines = []
    for i, row in enumerate(rows):
        cells = (
            f'<td class="{kinds[i, j]}">{text(cell)}</td>' if (i, j) in kinds else f"<td>{text(cell)}</td>"
            for j, cell in enumerate(row)
        )
        lines.append(f"<tr>{''.join(cells)}</tr>\n")
    opening = '<table class="words">' if words else "<table>"
    body = f"<thead><tr>{top}</tr></thead>\n<tbody>\n{''.join(lines)}</tbody>"
    return f'<div class="scroll">{opening}\n{body}</table></div>\n'


def tile(value: str, label: str, main: bool = False) -> str:
    """A highlighted value."""
    kind = "tile main" if main else "tile"
    return f'<li class="{kind}"><b>{text(value)}</b><span>{text(label)}</span></li>\n'
