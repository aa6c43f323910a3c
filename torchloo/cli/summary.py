"""Text output of `torchloo select`: the table that was read, a summary of the findings, held_out.csv."""

from pathlib import Path
from typing import Any

import numpy as np

from torchloo.cli.findings import Findings
from torchloo.cli.prepare import PreparedTable
from torchloo.cli.reading import pandas
from torchloo.cli.request import HeldOutPredictions
from torchloo.cli.shell import table

__all__ = ["described", "held_out", "summary"]

_MAX_COLUMNS = 8  # classes whose confusion matrix fits into a terminal


def described(path: Path, prepared: PreparedTable) -> str:
    """What was read, with notes about it."""
    schema, (n, d) = prepared.schema, prepared.X.shape
    labels = schema.labels
    task = f"regression of {schema.target!r}"
    if labels:
        shown = ", ".join(labels[:6]) + (", ..." if len(labels) > 6 else "")
        task = f"{len(labels)} classes of {schema.target!r}: {shown}"
    lines = [f"{path.name}: {n} rows, {d} input{'s' * (d > 1)}, {task}"]
    return "\n".join([*lines, *(f"  note: {note}" for note in prepared.notes)])


def held_out(findings: Findings) -> Any:
    """The table held_out.csv: a row for each row of the data."""
    prepared, n = findings.prepared, len(findings.prepared.y)
    columns: dict[str, np.ndarray] = {"row": prepared.rows, "target": prepared.target}
    columns |= _columns(findings, "loo", findings.loo)
    columns["leverage"] = np.full(n, np.nan) if findings.leverage is None else findings.leverage
    if prepared.clusters is not None and findings.lco is not None:
        columns["cluster"] = prepared.clusters
        columns |= _columns(findings, "lco", findings.lco)
    return pandas().DataFrame(columns)


def _columns(findings: Findings, scheme: str, held_out: HeldOutPredictions) -> dict[str, np.ndarray]:
    """Outputs and residuals; for several classes one output each, and the norm of the residuals."""
    outputs = {f"{scheme}_output": held_out.outputs}
    residual = held_out.residuals
    if held_out.outputs.ndim > 1:
        labels = findings.prepared.schema.labels
        outputs = {f"{scheme}_output {label}": held_out.outputs[:, k] for k, label in enumerate(labels)}
        residual = held_out.size
    if findings.classes:
        outputs[f"{scheme}_class"] = findings.predicted(held_out)
    return {**outputs, f"{scheme}_residual": residual}


def summary(findings: Findings) -> str:
    """The findings in a few lines."""
    choice, request, first = findings.choice, findings.request, findings.rows[0]
    settings = ", ".join(_setting(name, value) for name, value, _ in findings.parameters)
    name = request.criterion + f" (mean over {findings.classes} classes)" * request.averaged
    chosen = f"selected: {settings}\n{name} {choice.value:.4g} after {choice.evaluations} evaluations"
    chosen += f", stopped by the {choice.stopped}" if choice.stopped else ""
    head = ["", "guessing", "leave-one-out"]
    head += ["leave-cluster-out"] * (first.lco is not None)
    if first.outer is not None:
        splits = len(first.outer.scores)
        head.append(f"outer ({splits} split{'s' * (splits > 1)})")
    rows = [head, *([row.measure.name, *row.shown()] for row in findings.rows)]
    return "\n\n".join([chosen, table(rows), *_by_class(findings)])


def _setting(name: str, value: np.ndarray) -> str:
    """A hyper-parameter and its value, or the range of its values if there is one per input."""
    return f"{name}s {value.min():.3g} to {value.max():.3g}" if value.ndim else f"{name} {value:.4g}"


def _by_class(findings: Findings) -> list[str]:
    """For more than two classes, one line each: rows, held-out accuracy, predicted classes."""
    of, labels = findings.by_class, findings.prepared.schema.labels
    if of is None or len(labels) < 3:
        return []
    in_full = len(labels) <= _MAX_COLUMNS
    head = ["class", "rows", f"accuracy ({findings.way})"]
    rows = [[*head, *([f"predicted {label}" for label in labels] if in_full else ["mistaken for"])]]
    for k, label in enumerate(labels):
        shown = [str(j or "·") for j in of.confusion[k]] if in_full else [of.mistaken_for(k, labels)]
        rows.append([label, str(of.confusion[k].sum()), _share(of.right[k], of.error[k]), *shown])
    last = ["all", str(of.confusion.sum()), _share(of.all_right, of.all_error)]
    rows.append([*last, *([str(j) for j in of.confusion.sum(0)] if in_full else [""])])
    return [table(rows)]


def _share(share: float, error: float) -> str:
    """A fraction and its standard error in percent."""
    return f"{100 * share:.1f} %" if np.isnan(error) else f"{100 * share:.1f} ± {100 * error:.1f} %"
