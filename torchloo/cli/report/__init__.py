"""The report of `torchloo select`: one self-contained page, pictures and style inside it.

Nothing is fetched when the page is opened: its content policy forbids it.
"""

import re
from importlib import resources
from typing import NamedTuple

import torchloo as tl
from torchloo.cli.findings import Findings
from torchloo.cli.report import machine_section, performance, row_by_row
from torchloo.cli.report.markup import paragraph, section, text

__all__ = ["Source", "page"]

_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


class Source(NamedTuple):
    """Where the findings come from."""

    file: str
    command: str


def page(findings: Findings, source: Source) -> str:
    """The whole page as text."""
    target = text(findings.prepared.schema.target)
    n, d = findings.prepared.X.shape
    style = (resources.files("torchloo") / "data" / "report.css").read_text(encoding="utf-8")
    kind = "Classification" if findings.classes else "Regression"
    sections = [
        performance.summary(findings),
        machine_section.data(findings),
        performance.estimates(findings),
        row_by_row.agreement(findings),
        row_by_row.residuals(findings),
        performance.clusters(findings),
        machine_section.machine(findings),
        _files(findings, source),
    ]
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Predicting {target} ({text(source.file)})</title>
<link rel="icon" href="data:,">
<style>
{style}</style>
</head>
<body>
<h1>Predicting {target}</h1>
<p class="sub">{kind} from {text(source.file)}: {n} rows, {d} input{"s" * (d > 1)}</p>
{"".join(sections)}<footer>Written by torchloo {tl.__version__}. Leave-one-out is exact: the held-out
prediction of a row is that of the machine trained without it.</footer>
</body>
</html>
"""


def _files(findings: Findings, source: Source) -> str:
    leverage = "" if findings.leverage is None else " and its leverage"
    words = (
        "<code>model.pt</code> is the machine, for <code>torchloo predict</code>. "
        f"<code>held_out.csv</code> has the held-out prediction of every row, its residual{leverage}. "
        "This command reproduces all of them:"
    )
    command = re.sub(r"(--[a-z-]+)", r'<span class="option">\1</span>', text(source.command))
    return section("Files", paragraph(words), f"<pre><code>{command}</code></pre>\n")
