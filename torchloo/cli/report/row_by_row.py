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
            "Each point is a row: its true value on the horizontal axis, its held-out prediction, by a "
            f"machine trained without it{_cluster(findings)}, on the vertical one ({findings.scheme}). The "
            "closer to the line, the better."
        )
        return section("Row by row", figure(svg, caption, square=True))
    return section("Row by row", _confusion(findings), _curves(findings))


def _cluster(findings: Findings) -> str:
    return "" if findings.lco is None else " and the other rows of its cluster"


def _confusion(findings: Findings) -> str:
    """True classes against predicted ones."""
    labels = findings.prepared.schema.labels
    classes = findings.by_class
    assert classes is not None
    if len(labels) > _MAX_COLUMNS:
        return _mistakes(findings)
    rows, kinds = [], {}
    for i, true in enumerate(labels):
        counts = classes.confusion[i].tolist()
        wrong = 1 - counts[i] / sum(counts)
        rows.append([true, *(str(count or "·") for count in counts), f"{wrong:.0%}"])
        for j, count in enumerate(counts):
            if count:
                kinds[i, j + 1] = "hit" if i == j else "miss"
    words = (
        f"{_predicted_without(findings)} Each line is a true class, each column a predicted one: correct "
        "predictions are blue, errors orange."
    )
    head = ["true class", *(f"predicted {label}" for label in labels), "wrong"]
    return paragraph(words) + table(head, rows, kinds)


def _mistakes(findings: Findings) -> str:
    """For many classes: how often each is mistaken, and for which others."""
    labels = findings.prepared.schema.labels
    classes = findings.by_class
    assert classes is not None
    rows = []
    for k, true in enumerate(labels):
        count = classes.confusion[k].sum()
        wrong = 1 - classes.accuracy[k]
        rows.append([true, f"{count}", f"{wrong:.0%}", classes.mistaken_for(k, labels)])
    words = (
        f"{_predicted_without(findings)} Each line is a true class; the last column lists the classes that "
        "its rows were mistaken for."
    )
    return paragraph(words) + table(["true class", "rows", "wrong", "mistaken for"], rows)


def _predicted_without(findings: Findings) -> str:
    return f"Every row was predicted by a machine trained without it{_cluster(findings)} ({findings.scheme})."


def _curves(findings: Findings) -> str:
    labels = findings.prepared.schema.labels
    outputs = findings.inner.outputs
    if outputs.ndim == 1:
        scores = [(labels[1], outputs)]
    else:
        scores = list(zip(labels, outputs.T, strict=True))
    shown = scores[:_MAX_CURVES]
    curves = [(label, findings.prepared.target == label, score) for label, score in shown]
    if len(shown) < len(scores):
        which = f"ROC curves of the first {len(shown)} classes by the"
    elif len(shown) > 1:
        which = "ROC curves of the"
    else:
        which = f"ROC curve of class {labels[1]} by the"
    caption = (
        f"{which} {findings.scheme} outputs. A lower threshold finds more rows of a class, at the price of "
        "more false positives. The nearer to the upper left corner, the better; the dashed line is chance."
    )
    return figure(pictures.roc(curves), caption, square=True)


def residuals(findings: Findings) -> str:
    """Residuals, leverage, and the rows with the largest errors."""
    parts = [_spread(findings)]
    if findings.leverage is not None:
        caption = (
            f"Size of the residual against leverage, by {findings.scheme}; the most extreme rows are "
            "labelled with their numbers. A row with a leverage near 1 mostly determines its own fit. If its "
            "residual is large too, it is worth checking."
        )
        svg = pictures.leverage(findings.leverage, findings.inner.size, findings.prepared.rows)
        parts.append(figure(svg, caption))
    title = "Residuals" if findings.leverage is None else "Residuals and leverage"
    return section(title, *parts, _worst(findings))


def _spread(findings: Findings) -> str:
    labels = findings.prepared.schema.labels
    target = findings.prepared.target
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
            f"Outputs for the rows of each class, by {findings.scheme}. Above zero the machine predicts "
            f"{labels[1]}, below zero {labels[0]}; where the colours overlap, "
            "the classes are hard to tell apart."
        )
        return figure(pictures.score_histogram(groups, f"{findings.scheme} output"), caption)
    caption = (
        f"The margin of each row, its output for the true class minus the largest other output, by "
        f"{findings.scheme}. Rows left of zero are misclassified."
    )
    svg = pictures.score_histogram([("rows", -findings.misfit)], "margin of the true class")
    return figure(svg, caption)


def _worst(findings: Findings) -> str:
    order = np.argsort(-findings.misfit, kind="stable")[:_MAX_LISTED]
    predicted = findings.predicted(findings.inner)
    target = findings.prepared.target
    leverage = findings.leverage
    name, values = "size of residual", findings.inner.size
    if findings.classes > 2:
        name, values = "margin of the true class", -findings.misfit
    head = ["row", "true", "held-out prediction", name]
    if leverage is not None:
        head.append("leverage")
    show = str if findings.classes else number
    rows = []
    for i in order:
        row = str(findings.prepared.rows[i])
        cells = [row, show(target[i]), show(predicted[i]), number(values[i])]
        if leverage is not None:
            cells.append(f"{leverage[i]:.2f}")
        rows.append(cells)
    words = (
        "The rows with the largest held-out errors; row 1 is the first below the column names. "
        "Mistakes in the data are often found among them."
    )
    return paragraph(words) + table(head, rows)
