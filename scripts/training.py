"""What the scripts that train networks share: their options, their optimiser, and how results are shown."""

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from torch import Tensor

__all__ = ["adam", "cells", "mean_and_error", "options", "panels"]

RATE = 2e-3  # of weights


def options(description: str, quick: str, picture: Path) -> argparse.Namespace:
    """The command line: device, first seed, quick run, and where the picture goes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0, help="the first of the seeds")
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--out", type=Path, default=picture, help="the picture")
    return parser.parse_args()


def adam(weights: Iterable[Tensor], logs: Iterable[Tensor], log_rate: float) -> torch.optim.Adam:
    """Adam for weights and, at a rate of their own, for logarithms of positive numbers."""
    of_weights = {"params": list(weights), "lr": RATE}
    of_logs = {"params": list(logs), "lr": log_rate}
    return torch.optim.Adam([of_weights, of_logs])


def mean_and_error(values: Tensor) -> tuple[Tensor, Tensor]:
    """Mean over the seeds, the first axis, and its standard error."""
    return values.mean(0), values.std(0) / len(values) ** 0.5


def cells(values: Tensor) -> str:
    """Columns of values (seeds, columns) as cells of a Markdown table: mean ± standard error."""
    mean, error = mean_and_error(values)
    return " | ".join(f"{m:.3f} ± {e:.3f}" for m, e in zip(mean, error, strict=True))


def panels(count: int, size: tuple[float, float], **options: Any) -> tuple[Any, Any]:
    """A figure with panels side by side, without upper and right frame and with horizontal grid lines."""
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, count, figsize=size, layout="constrained", **options)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", alpha=0.3)
    return figure, axes
