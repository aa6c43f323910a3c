"""The picture of a probe: its scores along the regularisations, and beside them its classes or numbers."""

import importlib
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from torchloo.probing import Probe

__all__ = ["probe_figure"]

_BLUE, _ORANGE, _GREY, _PALE = "#2b6ca3", "#c8641e", "#8d939c", "#dfe3e8"
_NAMES = {"accuracy": "accuracy", "r2": "R²"}
_LABELLED = 30  # classes up to which each has its label


def _draw_curves(found: "Probe", above: "Axes", below: "Axes") -> None:
    """Accuracy or r2, and the criterion, for each regularisation."""
    regs, curve, error = (t.double().cpu().numpy() for t in (found.regs, found.curve, found.curve_error))
    kind = "leave-one-out" if found.grouped is None else "leave-group-out"
    above.fill_between(regs, curve - error, curve + error, color=_PALE, label="± 1 standard error")
    above.plot(regs, curve, color=_BLUE, marker=".", label=kind)
    below.plot(regs, found.criterion.double().cpu().numpy(), color=_BLUE, marker=".")
    if found.grouped is not None:
        value = getattr(found.loo, found.measure)
        above.plot([found.reg], [value], "o", color=_GREY, label="leave-one-out")
    above.set_ylabel(_NAMES[found.measure])
    below.set(ylabel="mean squared\nresidual", xlabel="reg", xscale="log")
    for axes in (above, below):
        axes.axvline(found.reg, color=_ORANGE, linewidth=1, label=f"chosen: {found.reg:.4g}")
        axes.spines[["top", "right"]].set_visible(False)
    above.legend(frameon=False, fontsize="small")


def _draw_classes(found: "Probe", axes: "Axes") -> None:
    """Accuracy of every class, with its label or, of many classes, sorted."""
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


def _draw_numbers(found: "Probe", axes: "Axes") -> None:
    """Held-out outputs beside targets, of up to 5000 numbers."""
    targets, outputs = (
        t.detach().double().cpu().flatten() for t in (found.held_out.targets, found.held_out.outputs)
    )
    some = torch.linspace(0, len(targets) - 1, min(5000, len(targets))).long()
    axes.plot(targets[some], outputs[some], ".", color=_BLUE, alpha=0.5, markersize=6, markeredgewidth=0)
    ends = [targets.min().item(), targets.max().item()]
    axes.plot(ends, ends, color=_ORANGE, linewidth=1)
    axes.set(xlabel="target", ylabel="held-out output")
    _title(found, axes)


def _title(found: "Probe", axes: "Axes") -> None:
    """The score of all rows."""
    score = getattr(found.scores, found.measure)
    axes.set_title(
        f"all rows: {_NAMES[found.measure]} {score:.3f} ± {found.standard_error:.3f}", fontsize="medium"
    )
    axes.spines[["top", "right"]].set_visible(False)


def probe_figure(found: "Probe") -> "Figure":
    """What `Probe.plot` returns."""
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
