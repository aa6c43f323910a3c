"""The result of `probe`: scores, tables as text, and a plot."""

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchloo import criteria
from torchloo.held_out import HeldOut
from torchloo.lssvm import LSSVM
from torchloo.text_table import rendered

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Probe", "ProbeScores"]

_BLUE, _ORANGE, _GREY, _PALE = "#2b6ca3", "#c8641e", "#8d939c", "#dfe3e8"
_NAMES = {"accuracy": "accuracy", "r2": "R²"}
_LABELLED = 30  # classes up to which each has its label


class ProbeScores(NamedTuple):
    """Unweighted held-out scores at one regularisation."""

    accuracy: float
    """Fraction of rows whose class is predicted correctly; NaN in regression."""
    r2: float
    """1 - mean squared residual / variance of the targets, averaged over outputs; NaN for classes."""
    standard_error: float
    """Of accuracy or r2, over rows, or over groups if given."""
    class_accuracy: Tensor | None
    """Accuracy of the rows of each class, (k,); None in regression."""
    log_loss: float
    """Mean -log p of the true class, p = softmax(scale * outputs) with the best scale; NaN in regression."""
    rmse: float
    """Root mean squared residual, averaged over outputs before the root."""


@dataclass(frozen=True, repr=False)
class Probe:
    """The result of `probe`; print it for a table, or `plot` it."""

    head: LSSVM
    """The linear machine at the chosen regularisation, fitted to all rows: head(X), head.predict_class(X)."""
    reg: float
    """The regularisation with the least criterion."""
    regs: Tensor
    """All regularisations, ascending, (R,)."""
    criterion: Tensor
    """Weighted mean squared held-out residual at each of them, (R,)."""
    curve: Tensor
    """Accuracy, or r2, at each of them, (R,)."""
    curve_error: Tensor
    """Standard errors of these, (R,)."""
    held_out: HeldOut
    """Held-out predictions at the chosen regularisation: leave-group-out if groups were given."""
    loo: ProbeScores
    """Scores of leave-one-out."""
    grouped: ProbeScores | None
    """Scores of leave-group-out, if groups were given."""
    columns: int
    """Number of features."""

    @property
    def scores(self) -> ProbeScores:
        """Scores of `held_out`: leave-group-out if groups were given, else leave-one-out."""
        return self.grouped or self.loo

    @property
    def accuracy(self) -> float:
        """Held-out accuracy, see `ProbeScores`."""
        return self.scores.accuracy

    @property
    def r2(self) -> float:
        """Held-out r2, see `ProbeScores`."""
        return self.scores.r2

    @property
    def standard_error(self) -> float:
        """Standard error of accuracy or r2."""
        return self.scores.standard_error

    @property
    def class_accuracy(self) -> Tensor | None:
        """Held-out accuracy of each class, (k,), in the order of head.classes."""
        return self.scores.class_accuracy

    @property
    def log_loss(self) -> float:
        """Held-out log loss, see `ProbeScores`."""
        return self.scores.log_loss

    @property
    def rmse(self) -> float:
        """Held-out root mean squared error."""
        return self.scores.rmse

    @property
    def measure(self) -> str:
        """Name of the score: "accuracy" for classes, "r2" for numbers."""
        return "r2" if self.head.classes is None else "accuracy"

    def __str__(self) -> str:
        classes = "" if self.head.classes is None else f", {len(self.head.classes)} classes"
        lines = [f"linear probe: {self.held_out.weight.shape[-1]} rows, {self.columns} features{classes}"]
        lines += [f"reg {self.reg:.4g}, chosen by {self._criterion_name}", ""]
        summaries = [self._summary("leave-one-out", self.loo)]
        if self.grouped is not None:
            summaries.append(self._summary("leave-group-out", self.grouped))
        lines += rendered(summaries)
        if self.class_accuracy is not None:
            lines += ["", *rendered(self._by_class(), 22)]
        lines += ["", *rendered(self._by_reg(), len(self.regs))]
        ends = (self.regs[0].item(), self.regs[-1].item())
        if self.reg in ends:
            lines.append("the best reg is at the end of the range: give regs= with a wider range")
        return "\n".join(lines)

    __repr__ = __str__

    @property
    def _criterion_name(self) -> str:
        left_out = "leave-one-out" if self.grouped is None else "leave-group-out"
        return f"the mean squared {left_out} residual"

    def _summary(self, name: str, scores: ProbeScores) -> dict[str, Any]:
        summary: dict[str, Any] = {
            "": name,
            self.measure: _share(getattr(scores, self.measure)),
            "std error": _share(scores.standard_error),
        }
        if self.measure == "r2":
            summary["rmse"] = scores.rmse
        else:
            summary["log loss"] = scores.log_loss
        return summary

    def _by_class(self) -> list[dict[str, Any]]:
        assert self.head.classes is not None
        assert self.class_accuracy is not None
        counts = criteria.confusion(self.held_out, weight=None).sum(-1)  # (k,)
        table = zip(self.head.classes.tolist(), counts.long().tolist(), self.class_accuracy, strict=True)
        return [{"class": label, "rows": rows, "accuracy": _share(share)} for label, rows, share in table]

    def _by_reg(self) -> list[dict[str, Any]]:
        values = zip(self.regs.tolist(), self.criterion.tolist(), self.curve, self.curve_error, strict=True)
        return [
            {
                "reg": reg,
                "mean square": mse,
                self.measure: _share(score),
                "std error": _share(error),
                "": "*" if reg == self.reg else "",
            }
            for reg, mse, score, error in values
        ]

    def plot(self, path: Any = None) -> "Figure":
        """Plot the scores over the regularisations, and held-out predictions against targets.

        Args:
            path: file to write, .png or another format of matplotlib; None writes nothing.

        Returns:
            matplotlib's Figure. Needs matplotlib: pip install torchloo[cli].
        """
        figure = _figure(self)
        if path is not None:
            figure.savefig(path, dpi=150)
        return figure


def _share(value: Any) -> str:
    """A fraction, or its standard error, as text."""
    return f"{float(value):.4f}"


def _draw_curves(found: Probe, above: "Axes", below: "Axes") -> None:
    """Accuracy or r2, and the criterion, for each regularisation."""
    columns = (found.regs, found.curve, found.curve_error, found.criterion)
    regs, curve, error, criterion = (column.double().cpu().numpy() for column in columns)
    kind = "leave-one-out" if found.grouped is None else "leave-group-out"
    above.fill_between(regs, curve - error, curve + error, color=_PALE, label="± 1 standard error")
    above.plot(regs, curve, color=_BLUE, marker=".", label=kind)
    below.plot(regs, criterion, color=_BLUE, marker=".")
    if found.grouped is not None:
        value = getattr(found.loo, found.measure)
        above.plot([found.reg], [value], "o", color=_GREY, label="leave-one-out")
    above.set_ylabel(_NAMES[found.measure])
    below.set(ylabel="mean squared\nresidual", xlabel="reg", xscale="log")
    for axes in (above, below):
        axes.axvline(found.reg, color=_ORANGE, linewidth=1, label=f"chosen: {found.reg:.4g}")
        axes.spines[["top", "right"]].set_visible(False)
    above.legend(frameon=False, fontsize="small")


def _draw_classes(found: Probe, axes: "Axes") -> None:
    """Accuracy of every class: with labels, or sorted if there are many classes."""
    assert found.head.classes is not None
    assert found.class_accuracy is not None
    share = found.class_accuracy.double().cpu().numpy()
    if len(share) <= _LABELLED:
        places = np.arange(len(share))
        axes.hlines(places, 0, share, color=_PALE, linewidth=min(9, 180 / len(share)))
        axes.plot(share, places, "o", color=_BLUE, markersize=5)
        axes.set_yticks(places, [str(label) for label in found.head.classes.tolist()])
        axes.invert_yaxis()
        axes.axvline(found.accuracy, color=_ORANGE, linewidth=1)
        axes.set(xlim=(0, 1.01), xlabel="accuracy", ylabel="class")
    else:
        axes.plot(np.arange(1, len(share) + 1), np.sort(share), color=_BLUE)
        axes.axhline(found.accuracy, color=_ORANGE, linewidth=1)
        axes.set(ylim=(-0.02, 1.02), xlabel="classes, by accuracy", ylabel="accuracy of the class")
    _title(found, axes)


def _draw_numbers(found: Probe, axes: "Axes") -> None:
    """Held-out outputs against targets, up to 5000 points."""
    targets, outputs = (
        t.detach().double().cpu().flatten() for t in (found.held_out.targets, found.held_out.outputs)
    )
    some = torch.linspace(0, len(targets) - 1, min(5000, len(targets))).long()
    axes.plot(targets[some], outputs[some], ".", color=_BLUE, alpha=0.5, markersize=6, markeredgewidth=0)
    ends = [targets.min().item(), targets.max().item()]
    axes.plot(ends, ends, color=_ORANGE, linewidth=1)
    axes.set(xlabel="target", ylabel="held-out output")
    _title(found, axes)


def _title(found: Probe, axes: "Axes") -> None:
    """The score of all rows."""
    score = getattr(found.scores, found.measure)
    axes.set_title(
        f"all rows: {_NAMES[found.measure]} {score:.3f} ± {found.standard_error:.3f}", fontsize="medium"
    )
    axes.spines[["top", "right"]].set_visible(False)


def _figure(found: Probe) -> "Figure":
    """Scores over the regularisations on the left, classes or predictions on the right."""
    try:
        figures: Any = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ImportError("Probe.plot: pictures need matplotlib: pip install torchloo[cli]") from error
    figure = figures.Figure(figsize=(9.6, 4.2), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=[1.15, 1])
    _draw_curves(found, *left.subplots(2, 1, sharex=True))
    left.align_ylabels()
    if found.head.classes is None:
        _draw_numbers(found, right.subplots())
    else:
        _draw_classes(found, right.subplots())
    return figure
