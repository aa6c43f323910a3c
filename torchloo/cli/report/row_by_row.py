"""Row by row: held-out predictions against true values."""

import numpy as np

from torchloo.cli.findings import Findings
from torchloo.cli.report import pictures
from torchloo.cli.report.markup import figure, number, paragraph, section, table

__all__ = ["agreement", "residuals"]

_MAX_LISTED = 8
_MAX_CURVES = 8
_MAX_COLUMNS = 8  # of a confusion matrix that fits the page


def agreement(findings: Findings) -> str:
    """Held-out predictions against targets, or a confusion matrix and ROC curves."""
    if not findings.classes:
        svg = pictures.agreement(findings.prepared.y, findings.inner.outputs)
        caption = (
            "Each point is a row: its true value on the horizontal axis, the prediction by a machine that "
            f"had not seen it{_cluster(findings)} on the vertical one ({findings.way}). The closer to the "
            "line, the better."
        )
        return section("Row by row", figure(svg, caption, square=True))
    return section("Row by row", _confusion(findings), _curves(findings))


def _cluster(findings: Findings) -> str:
    return "" if findings.lco is None else ", or any row of its cluster"


def _confusion(findings: Findings) -> str:
    """True classes against predicted ones."""
    labels, of = findings.prepared.schema.labels, findings.by_class
    assert of is not None
    if len(labels) > _MAX_COLUMNS:
        return _mistakes(findings)
    rows, kinds = [], {}
    for i, true in enumerate(labels):
        counts = of.confusion[i].tolist()
        rows.append([true, *(str(k or "·") for k in counts), f"{1 - counts[i] / sum(counts):.0%}"])
        kinds.update({(i, j + 1): "hit" if i == j else "miss" for j, k in enumerate(counts) if k})
    words = (
        f"Every row was predicted by a machine that had not seen it{_cluster(findings)} ({findings.way}). "
        "Each line is a true class, each column a predicted one: correct predictions are blue, errors orange."
    )
    head = ["true class", *(f"predicted {label}" for label in labels), "wrong"]
    return paragraph(words) + table(head, rows, kinds)


def _mistakes(findings: Findings) -> str:
    """For many classes: how often each is mistaken, and for which others."""
    labels, of, rows = findings.prepared.schema.labels, findings.by_class, []
    assert of is not None
    for k, true in enumerate(labels):
        rows.append([true, f"{of.confusion[k].sum()}", f"{1 - of.right[k]:.0%}", of.mistaken_for(k, labels)])
    words = (
        f"Every row was predicted by a machine that had not seen it{_cluster(findings)} ({findings.way}). "
        "Each line is a true class; the last column lists the classes that its rows were mistaken for."
    )
    return paragraph(words) + table(["true class", "rows", "wrong", "mistaken for"], rows)


def _curves(findings: Findings) -> str:
    labels, out = findings.prepared.schema.labels, findings.inner.outputs
    scores = [(labels[1], out)] if out.ndim == 1 else [(name, out[:, k]) for k, name in enumerate(labels)]
    shown = scores[:_MAX_CURVES]
    curves = [(label, findings.prepared.target == label, score) for label, score in shown]
    which = "ROC curves of the" if len(shown) > 1 else f"ROC curve of class {labels[1]} by the"
    which = f"ROC curves of the first {len(shown)} classes by the" if len(shown) < len(scores) else which
    caption = (
        f"{which} {findings.way} outputs. A lower threshold finds more rows of a class, at the price of "
        "more false positives. The nearer to the upper left corner, the better; the dashed line is guessing."
    )
    return figure(pictures.roc(curves), caption, square=True)


def residuals(findings: Findings) -> str:
    """Residuals, leverage, and the rows with the largest errors."""
    parts = [_spread(findings)]
    if findings.leverage is not None:
        caption = (
            f"Size of the residual against leverage, by {findings.way}; the most extreme rows are labelled "
            "with their numbers. A row with a leverage near 1 mostly determines its own fit. If its residual "
            "is large too, it deserves a look."
        )
        svg = pictures.leverage(findings.leverage, findings.inner.size, findings.prepared.rows)
        parts.append(figure(svg, caption))
    title = "Residuals" if findings.leverage is None else "Residuals and leverage"
    return section(title, *parts, _worst(findings))


def _spread(findings: Findings) -> str:
    labels, target = findings.prepared.schema.labels, findings.prepared.target
    outputs = findings.inner.outputs
    if not labels:
        caption = (
            "Residuals: the true value minus the held-out prediction. They should scatter evenly about the "
            "line; a bend means that the machine misses some structure, a funnel that the noise varies."
        )
        return figure(pictures.residuals(outputs, findings.inner.residuals), caption)
    if len(labels) == 2:
        groups = [(f"class {label}", outputs[target == label]) for label in labels]
        caption = (
            f"Outputs for the rows of each class, by {findings.way}. Above zero the machine predicts "
            f"{labels[1]}, below zero {labels[0]}; where the colours overlap, "
            "the classes are hard to tell apart."
        )
        return figure(pictures.score_histogram(groups, f"{findings.way} output"), caption)
    caption = (
        f"By how much the true class of each row leads over the next best one, by {findings.way}. Rows "
        "left of zero are predicted wrongly; those near zero are close calls."
    )
    svg = pictures.score_histogram([("rows", -findings.misfit)], "lead of the true class over the next best")
    return figure(svg, caption)


def _worst(findings: Findings) -> str:
    order = np.argsort(-findings.misfit, kind="stable")[:_MAX_LISTED]
    predicted = findings.predicted(findings.inner)
    target, leverage = findings.prepared.target, findings.leverage
    name, values = "size of residual", findings.inner.size
    if findings.classes > 2:
        name, values = "lead of the true class", -findings.misfit
    head = ["row", "true", "held-out prediction", name] + ["leverage"] * (leverage is not None)
    rows = []
    for i in order:
        pair = [str(value[i]) if findings.classes else number(value[i]) for value in (target, predicted)]
        cells = [str(findings.prepared.rows[i]), *pair, number(values[i])]
        rows.append(cells if leverage is None else [*cells, f"{leverage[i]:.2f}"])
    words = (
        "The rows that were predicted worst; row 1 is the first below the column names. "
        "Mistakes in the data often show here."
    )
    return paragraph(words) + table(head, rows)
