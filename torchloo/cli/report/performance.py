"""Predictive performance: the summary, the estimates side by side, and the clusters."""

import numpy as np

from torchloo.cli.findings import Findings, MeasureRow
from torchloo.cli.measures import OuterEstimate
from torchloo.cli.report import pictures
from torchloo.cli.report.markup import figure, paragraph, section, table, text, tile
from torchloo.cli.request import HeldOutPredictions

__all__ = ["clusters", "estimates", "summary"]

_MAX_CLUSTERS = 20
_TITLE = "Performance on new rows"


def summary(findings: Findings) -> str:
    """One sentence and a few numbers."""
    main = findings.rows[0]
    value, way = _best(main)
    baseline = main.measure.show(main.baseline)
    new = "rows of new clusters" if findings.lco is not None else "new rows"
    if findings.classes:
        lead = (
            f"On {new}, the machine is wrong in <strong>{text(value)}</strong> of the cases; "
            f"the baseline, always predicting the most frequent class, would be wrong in {text(baseline)}."
        )
    else:
        lead = (
            f"On {new}, the root mean square error of the machine is about <strong>{text(value)}</strong>; "
            f"that of the baseline, always predicting the mean, would be {text(baseline)}."
        )
    tiles = [tile(value, f"{main.measure.name}, {way}", main=True)]
    for row in findings.rows[1:]:
        value, way = _best(row)
        tiles.append(tile(value, f"{row.measure.name}, {way}"))
    tiles.append(tile(baseline, f"{main.measure.name}, baseline"))
    return paragraph(lead, "lead") + f'<ul class="tiles">\n{"".join(tiles)}</ul>\n'


def _best(row: MeasureRow) -> tuple[str, str]:
    """The least biased estimate of a measure, and its name."""
    if row.outer is not None:
        return row.measure.show_mean(row.outer.mean, row.outer.stderr), "outer estimate"
    if row.lco is not None:
        return row.measure.show(row.lco), "leave-cluster-out"
    return row.measure.show(row.loo), "leave-one-out"


def estimates(findings: Findings) -> str:
    """The outer estimate beside the optimistic inner one."""
    outer = findings.rows[0].outer
    inner = findings.scheme
    if outer is None:
        words = (
            "No outer estimate was requested. The hyper-parameters were selected on the same rows that these "
            f"numbers are computed from, so {inner} is a little optimistic."
        )
        return section(_TITLE, _estimate_table(findings), paragraph(words))
    name = findings.rows[0].measure.name
    number = len(outer.scores)
    words = (
        f"The <strong>outer estimate</strong> is the one to quote. {_set_aside(findings, number)}, all "
        "steps were repeated on the rest (standardising, selecting the hyper-parameters, training), and the "
        "rows set aside were predicted. ± is the standard error of the mean. The inner estimate, by "
        f"{inner} at the selected hyper-parameters, is optimistic, as they were selected to optimise it."
    )
    if _overfits(findings.rows[0], outer):
        words += (
            " Here the two differ greatly: the hyper-parameters overfit these rows. A kernel with fewer of "
            "them (<code>--kernel rbf</code>), or a prior on them (<code>--prior 1</code>), may generalise "
            "better."
        )
    caption = (
        f"The {name} in each of the {number} splits. Solid: the outer estimate, over all of them. Dashed: "
        f"the inner estimate, by {inner}. The better the inner estimate is than the outer one, the more "
        "the hyper-parameters overfit."
    )
    svg = pictures.outer_scores(outer.scores, outer.mean, _inner(findings.rows[0]), name)
    return section(_TITLE, _estimate_table(findings), paragraph(words), figure(svg, caption))


def _overfits(row: MeasureRow, outer: OuterEstimate) -> bool:
    """Whether the outer estimate is worse than the inner one, significantly and by a wide margin."""
    worse = outer.mean - _inner(row)
    return worse > 3 * outer.stderr and worse > 0.15 * _inner(row)


def _set_aside(findings: Findings, splits: int) -> str:
    clusters = findings.prepared.clusters
    if clusters is None:
        return f"{splits} times, a tenth of the rows was set aside"
    if splits == len(np.unique(clusters)):
        return f"Each of the {splits} clusters was set aside in turn"
    return f"{splits} times, a tenth of the clusters was set aside"


def _estimate_table(findings: Findings) -> str:
    first = findings.rows[0]
    head = ["", "baseline", "leave-one-out"]
    if first.lco is not None:
        head.append("leave-cluster-out")
    if first.outer is not None:
        head.append("outer estimate")
    rows = [[row.measure.name, *row.shown()] for row in findings.rows]
    last = len(head) - 1
    marked = {(i, last): "best" for i in range(len(rows))}
    return table(head, rows, marked)


def _inner(row: MeasureRow) -> float:
    return row.loo if row.lco is None else row.lco


def clusters(findings: Findings) -> str:
    """Leave-one-out against leave-cluster-out, and the clusters one by one."""
    main = findings.rows[0]
    clusters = findings.prepared.clusters
    if clusters is None or findings.lco is None or main.lco is None:
        return ""
    words = (
        f"Leaving out one row at a time, the {main.measure.name} is {main.measure.show(main.loo)}; leaving "
        f"out the whole cluster of the row, it is {main.measure.show(main.lco)}. Where the second is much "
        "worse, rows of one cluster resemble one another: then leave-one-out estimates the performance on "
        "further rows of known clusters, and only leave-cluster-out that on new clusters."
    )
    names, member, counts = np.unique(clusters, return_inverse=True, return_counts=True)
    lco = _loss(findings, findings.lco, member)
    loo = _loss(findings, findings.loo, member)
    order = np.argsort(-lco, kind="stable")[:_MAX_CLUSTERS]
    label = "error rate" if findings.classes else "root mean square of the residuals"
    rows = [f"{names[k]} ({counts[k]})" for k in order]
    svg = pictures.bars(rows, lco[order], label, ("leave-cluster-out", "leave-one-out"), loo[order])
    which = "The clusters"
    if len(order) < len(names):
        which = f"The {len(order)} hardest of {len(names)} clusters"
    caption = (
        f"{which}, with their numbers of rows. Blue: predicted by a machine trained without the cluster; "
        "grey: by machines trained without the row only. Longer bars are worse."
    )
    return section("Clusters", paragraph(text(words)), figure(svg, caption))


def _loss(findings: Findings, predictions: HeldOutPredictions, member: np.ndarray) -> np.ndarray:
    """The error of each cluster: its error rate, or the root mean square residual."""
    if findings.classes:
        wrong = findings.predicted(predictions) != findings.prepared.target
        return np.bincount(member, wrong) / np.bincount(member)
    squares = np.bincount(member, predictions.residuals**2)
    return np.sqrt(squares / np.bincount(member))
