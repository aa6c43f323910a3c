"""The pictures of the report: small functions from numbers to SVG text.

Labels stay text, in the fonts of the reader.
"""

import importlib
import io
import re
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np

from torchloo.cli.reading import TableError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

__all__ = [
    "agreement",
    "bars",
    "criterion_curve",
    "leverage",
    "outer_scores",
    "reg_curve",
    "require",
    "residuals",
    "roc",
    "roc_points",
    "score_histogram",
]

INK, BLUE, ORANGE, GREY, PALE = "#2c3038", "#2b6ca3", "#c8641e", "#8d939c", "#dfe3e8"
SEVERAL = ["#2b6ca3", "#c8641e", "#3d8b5f", "#8a5ba6", "#b8892b", "#4aa0b5", "#b5476b", "#6b7280"]
DASHED = (0, (4, 3))
FONTS = "system-ui, 'Segoe UI', 'Helvetica Neue', Arial, sans-serif"
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "torchloo",
    "font.size": 10.5,
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": INK,
    "text.parse_math": False,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
    "axes.formatter.useoffset": False,
    "axes.formatter.limits": (-6, 9),
}


def require() -> None:
    """Raise, before any work is done, if pictures cannot be drawn."""
    try:
        importlib.import_module("matplotlib")
    except ImportError as error:
        raise TableError("the report needs matplotlib: pip install torchloo[cli]") from error


class _Canvas(AbstractContextManager["_Canvas"]):
    """Axes in the style of the report; `svg` once they are drawn."""

    def __init__(self, width: float = 6.4, height: float = 4.0) -> None:
        from matplotlib import rc_context
        from matplotlib.figure import Figure

        self._context = rc_context(_STYLE)
        self._context.__enter__()
        self._figure = Figure(figsize=(width, height), layout="constrained")
        self.axes: Axes = self._figure.subplots()
        self.svg = ""

    def __exit__(self, kind: Any, *rest: Any) -> None:
        try:
            if kind is None:
                self.svg = self._drawn()
        finally:
            self._context.__exit__(kind, *rest)

    def _drawn(self) -> str:
        buffer = io.StringIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))  # equal runs give equal files
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # glyphs that matplotlib's own font lacks: the reader's has them
            self._figure.savefig(buffer, format="svg", transparent=True, dpi=200, metadata=nothing)
        svg = buffer.getvalue()
        svg = svg[svg.index("<svg") :]
        return re.sub(r"'DejaVu Sans'[^;\"]*", FONTS, svg)


def _points(axes: "Axes", x: np.ndarray, y: np.ndarray, color: str = BLUE, label: str | None = None) -> None:
    """Points that stay legible, and files that stay small, when there are many."""
    n = len(x)
    if n <= 300:
        size, alpha = 18, 0.75
    elif n <= 2000:
        size, alpha = 10, 0.5
    else:
        size, alpha = 5, 0.3
    axes.scatter(x, y, s=size, color=color, alpha=alpha, linewidth=0, rasterized=n > 1500, label=label)


def _plain_numbers(axis: "Axis") -> None:
    """Label a logarithmic axis with a few plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(numticks=9))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _logarithmic_if_wide(axes: "Axes", values: np.ndarray) -> None:
    """Make the vertical axis logarithmic for positive values of very different sizes."""
    finite = values[np.isfinite(values)]
    if finite.min() > 0 and finite.max() > 20 * finite.min():
        axes.set_yscale("log")
        _plain_numbers(axes.yaxis)


def criterion_curve(values: Sequence[float], name: str, lower_is_better: bool) -> str:
    """The criterion at every evaluation, and the best so far."""
    tried = np.array(values, dtype=float)
    tried[~np.isfinite(tried)] = np.nan  # settings for which there was no solution
    better = np.fmin if lower_is_better else np.fmax
    best = better.accumulate(tried)
    steps = np.arange(1, len(tried) + 1)
    with _Canvas(6.4, 3.4) as canvas:
        axes = canvas.axes
        axes.scatter(steps, tried, s=12, color=GREY, linewidth=0, label="tried")
        axes.step(steps, best, where="post", color=BLUE, linewidth=1.8, label="best so far")
        if lower_is_better:
            _logarithmic_if_wide(axes, tried)
        axes.set_xlabel("settings tried")
        axes.set_ylabel(name)
        axes.locator_params(axis="x", integer=True)
        axes.legend()
    return canvas.svg


def reg_curve(regs: np.ndarray, values: np.ndarray, chosen: float, name: str) -> str:
    """The criterion against the regularisation, all else as chosen."""
    with _Canvas(6.4, 3.4) as canvas:
        axes = canvas.axes
        axes.plot(regs, values, color=BLUE, linewidth=1.8)
        axes.axvline(chosen, color=ORANGE, linewidth=1.2, linestyle=DASHED, label="chosen")
        axes.set_xscale("log")
        _plain_numbers(axes.xaxis)
        _logarithmic_if_wide(axes, values)
        axes.set_xlabel("reg")
        axes.set_ylabel(name)
        axes.legend()
    return canvas.svg


def agreement(target: np.ndarray, output: np.ndarray) -> str:
    """Held-out predictions against true values; the diagonal is perfect agreement."""
    both = np.concatenate([target, output])
    low, high = both.min(), both.max()
    margin = 0.04 * (high - low)
    ends = (low - margin, high + margin)
    with _Canvas(5.2, 5.0) as canvas:
        axes = canvas.axes
        axes.plot(ends, ends, color=ORANGE, linewidth=1.2, zorder=0, label="perfect agreement")
        _points(axes, target, output)
        axes.set_xlim(*ends)
        axes.set_ylim(*ends)
        axes.set_aspect("equal")
        axes.set_xlabel("true value")
        axes.set_ylabel("held-out prediction")
        axes.legend(loc="upper left")
    return canvas.svg


def roc(curves: Sequence[tuple[str, np.ndarray, np.ndarray]]) -> str:
    """ROC curves: for each its label, the labels as booleans and the scores."""
    with _Canvas(5.2, 5.0) as canvas:
        axes = canvas.axes
        axes.plot([0, 1], [0, 1], color=GREY, linewidth=1, linestyle=DASHED, label="chance")
        for k, (label, positive, score) in enumerate(curves):
            false_rate, true_rate = roc_points(positive, score)
            axes.plot(false_rate, true_rate, color=SEVERAL[k % 8], linewidth=1.8, label=label)
        axes.set_xlim(-0.01, 1.01)
        axes.set_ylim(-0.01, 1.01)
        axes.set_aspect("equal")
        axes.set_xlabel("false positive rate")
        axes.set_ylabel("true positive rate")
        axes.legend(loc="lower right")
    return canvas.svg


def roc_points(positive: np.ndarray, score: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """False and true positive rates at every threshold, from none to all; ties move together."""
    order = np.argsort(-score, kind="stable")
    positive, score = positive[order], score[order]
    last = np.append(np.diff(score) != 0, True)  # the last row of each run of equal scores
    true_positives = positive.cumsum()[last]
    false_positives = (~positive).cumsum()[last]
    true_rate = true_positives / max(1, true_positives[-1])
    false_rate = false_positives / max(1, false_positives[-1])
    return np.append(0, false_rate), np.append(0, true_rate)


def score_histogram(groups: Sequence[tuple[str, np.ndarray]], xlabel: str) -> str:
    """Held-out scores of each group; the decision threshold is zero."""
    all_scores = np.concatenate([scores for _, scores in groups])
    count = min(40, max(10, len(all_scores) // 15))
    bins = np.histogram_bin_edges(all_scores, bins=count)
    with _Canvas(6.4, 3.6) as canvas:
        axes = canvas.axes
        for k, (label, scores) in enumerate(groups):
            axes.hist(scores, bins=bins.tolist(), color=SEVERAL[k], alpha=0.6, label=label)
        axes.axvline(0, color=INK, linewidth=1)
        axes.set_xlabel(xlabel)
        axes.set_ylabel("rows")
        axes.locator_params(axis="y", integer=True)
        if len(groups) > 1:
            axes.legend()
    return canvas.svg


def residuals(output: np.ndarray, residual: np.ndarray) -> str:
    """Held-out residuals against outputs, which show trends and unequal noise."""
    with _Canvas(6.4, 3.6) as canvas:
        axes = canvas.axes
        axes.axhline(0, color=ORANGE, linewidth=1.2, zorder=0)
        _points(axes, output, residual)
        axes.set_xlabel("held-out prediction")
        axes.set_ylabel("residual")
    return canvas.svg


def leverage(values: np.ndarray, residual: np.ndarray, numbers: np.ndarray) -> str:
    """Size of the held-out residual against the leverage; extreme rows are labelled by their numbers."""
    size = np.abs(residual)
    with _Canvas(6.4, 3.6) as canvas:
        axes = canvas.axes
        _points(axes, values, size)
        for row in _farthest(values, size):
            axes.annotate(
                str(numbers[row]),
                (values[row], size[row]),
                (4, 3),
                textcoords="offset points",
                fontsize=8.5,
                color=GREY,
            )
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("leverage: how much the row determines its own fit")
        axes.set_ylabel("size of the held-out residual")
    return canvas.svg


def _farthest(x: np.ndarray, y: np.ndarray, most: int = 6) -> list[int]:
    """The rows farthest from the origin whose labels do not overlap."""
    x = x / max(x.max(), 1e-300)
    y = y / max(y.max(), 1e-300)
    farthest_first = np.argsort(-(x + y)).tolist()
    chosen: list[int] = []
    for row in farthest_first[: 5 * most]:
        across = abs(x[chosen] - x[row])
        up = abs(y[chosen] - y[row])
        distances = np.maximum(across, up)
        if (distances > 0.06).all():
            chosen.append(row)
    return chosen[:most]


def outer_scores(scores: np.ndarray, mean: float, inner: float, name: str) -> str:
    """The scores of the outer splits, their mean, and the optimistic inner estimate."""
    with _Canvas(6.4, 2.9) as canvas:
        axes = canvas.axes
        bins = min(30, max(8, len(scores) // 4))
        axes.hist(scores, bins=bins, color=PALE, edgecolor="white")
        axes.axvline(mean, color=BLUE, linewidth=2, label="outer estimate")
        axes.axvline(inner, color=ORANGE, linewidth=1.6, linestyle=DASHED, label="inner estimate")
        axes.set_xlabel(name)
        axes.set_ylabel("splits")
        axes.locator_params(axis="y", integer=True)
        axes.legend()
    return canvas.svg


def bars(
    names: Sequence[str],
    values: np.ndarray,
    xlabel: str,
    labels: tuple[str, str] | None = None,
    others: np.ndarray | None = None,
) -> str:
    """Horizontal bars, the first on top, each with a thin bar below it if there are other values."""
    with _Canvas(6.4, 0.9 + 0.27 * len(names)) as canvas:
        axes = canvas.axes
        positions = np.arange(len(names))[::-1]
        first, second = labels or (None, None)
        if others is None:
            axes.barh(positions, values, color=BLUE, height=0.62)
        else:
            axes.barh(positions + 0.1, values, color=BLUE, height=0.48, label=first)
            axes.barh(positions - 0.27, others, color=GREY, height=0.2, label=second)
            axes.legend(loc="lower right")
        short_names = [name if len(name) <= 32 else name[:31] + "…" for name in names]
        axes.set_yticks(positions, short_names)
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel(xlabel)
        axes.set_ylim(-0.6, len(names) - 0.4)
    return canvas.svg
