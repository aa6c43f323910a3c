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
        shown = ", ".join(labels[:6])
        if len(labels) > 6:
            shown += ", ..."
        task = f"{len(labels)} classes of {schema.target!r}: {shown}"
    first = f"{path.name}: {n} rows, {d} input{'s' * (d > 1)}, {task}"
    notes = [f"  note: {note}" for note in prepared.notes]
    return "\n".join([first, *notes])


def held_out(findings: Findings) -> Any:
    """The table held_out.csv: a row for each row of the data."""
    prepared = findings.prepared
    n = len(prepared.y)
    columns: dict[str, np.ndarray] = {"row": prepared.rows, "target": prepared.target}
    columns |= _columns(findings, "loo", findings.loo)
    leverage = findings.leverage
    columns["leverage"] = np.full(n, np.nan) if leverage is None else leverage
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
    choice = findings.choice
    request = findings.request
    first = findings.rows[0]
    settings = ", ".join(_setting(name, value) for name, value, _ in findings.parameters)
    name = request.criterion
    if request.averaged:
        name += f" (mean over {findings.classes} classes)"
    chosen = f"selected: {settings}\n{name} {choice.value:.4g} after {choice.evaluations} evaluations"
    if choice.stopped:
        chosen += f", stopped by the {choice.stopped}"
    head = ["", "baseline", "leave-one-out"]
    if first.lco is not None:
        head.append("leave-cluster-out")
    if first.outer is not None:
        splits = len(first.outer.scores)
        head.append(f"outer ({splits} split{'s' * (splits > 1)})")
    measured = [[row.measure.name, *row.shown()] for row in findings.rows]
    rows = [head, *measured]
    return "\n\n".join([chosen, table(rows), *_by_class(findings)])


def _setting(name: str, value: np.ndarray) -> str:
    """A hyper-parameter and its value, or the range of its values if there is one per input."""
    return f"{name}s {value.min():.3g} to {value.max():.3g}" if value.ndim else f"{name} {value:.4g}"


def _by_class(findings: Findings) -> list[str]:
    """For more than two classes, one line each: rows, held-out accuracy, predicted classes."""
    classes = findings.by_class
    labels = findings.prepared.schema.labels
    if classes is None or len(labels) < 3:
        return []
    counts = classes.confusion
    if len(labels) <= _MAX_COLUMNS:
        mistakes = [f"predicted {label}" for label in labels]
        by_class = [[str(count or "·") for count in row] for row in counts]
        in_all = [str(count) for count in counts.sum(0)]
    else:
        mistakes = ["mistaken for"]
        by_class = [[classes.mistaken_for(k, labels)] for k in range(len(labels))]
        in_all = [""]
    rows = [["class", "rows", f"accuracy ({findings.scheme})", *mistakes]]
    for k, label in enumerate(labels):
        accuracy = _percent(classes.accuracy[k], classes.stderr[k])
        rows.append([label, str(counts[k].sum()), accuracy, *by_class[k]])
    accuracy = _percent(classes.overall_accuracy, classes.overall_stderr)
    rows.append(["all", str(counts.sum()), accuracy, *in_all])
    return [table(rows)]


def _percent(fraction: float, error: float) -> str:
    """A fraction and its standard error in percent."""
    if np.isnan(error):
        return f"{100 * fraction:.1f} %"
    return f"{100 * fraction:.1f} ± {100 * error:.1f} %"
