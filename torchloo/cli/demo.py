"""`torchloo demo`: fit the motorcycle data, with hyper-parameters by gradient descent on PRESS."""

import argparse
import copy
import io
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

import torchloo as tl
from torchloo.cli.shell import UserError, add_out, add_progress, count, table, write

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["add", "run"]


def _figure(**options: Any) -> "Figure":
    """An empty figure that needs no display."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError("plotting needs matplotlib: pip install torchloo[cli]") from error
    return Figure(**options)


class _State(NamedTuple):
    """Hyper-parameters of a machine, and the resulting fit and errors on its training data."""

    lengthscale: float
    reg: float
    press: float
    rmse: float
    loo: Tensor  # (n,) leave-one-out outputs
    curve: Tensor  # (m,) outputs on the grid of the picture


class _Refits(NamedTuple):
    """Leave-one-out by the closed form against n explicit refits."""

    closed_seconds: float
    refit_seconds: float
    difference: float


def add(commands: Any) -> None:
    """Declare the arguments."""
    parser = commands.add_parser(
        "demo",
        help="fit the motorcycle data by gradient descent on a leave-one-out loss",
        description="Fit an RBF LS-SVM to the motorcycle data with hyper-parameters selected by gradient "
        "descent on PRESS, compare closed-form leave-one-out with explicit refits, and plot the result.",
    )
    add_out(parser, "motorcycle.png")
    parser.add_argument(
        "--steps", type=count, default=200, metavar="N", help="optimiser steps (default: %(default)s)"
    )
    add_progress(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Optimise, compare with refits, and plot."""
    figure = _figure(figsize=(8, 5), layout="constrained")  # first, since matplotlib may be missing
    X, y = tl.datasets.motorcycle()
    grid = torch.linspace(0, 60, 601, dtype=X.dtype).unsqueeze(-1)  # (m, 1)
    machine = tl.LSSVM(tl.kernels.RBF(lengthscale=20.0), reg=1.0)

    print(f"motorcycle data: {len(y)} points; RBF LS-SVM, {args.steps} steps of Adam on PRESS", flush=True)
    with _one_thread():
        before = _state(machine, X, y, grid)
        _descend(machine, X, y, args.steps, args.progress)
        after = _state(machine, X, y, grid)
        refits = _compare_with_refits(machine, X, y)

    print(f"\n{_summary(before, after, refits, len(y))}\n")
    _draw(figure.subplots(), X, y, grid, before, after)
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=150)
    write(args.out, content.getvalue())
    print(f"plot: {args.out}")
    return 0


@contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread: matrices this small gain nothing from more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _descend(machine: tl.LSSVM, X: Tensor, y: Tensor, steps: int, progress: bool) -> None:
    """Adam on PRESS over the log-parameters of the kernel and the regularisation."""
    # The first gradients are by far the largest: forget them sooner than by default (0.999).
    optimiser = torch.optim.Adam(machine.parameters(), lr=0.3, betas=(0.9, 0.97))
    bar = tqdm(range(steps), desc="optimising", unit="step", disable=not progress)
    for _ in bar:
        optimiser.zero_grad()
        press = tl.criteria.press(machine.loo(X, y))
        press.backward()
        optimiser.step()
        bar.set_postfix(PRESS=f"{press.item():.0f}", refresh=False)


@torch.no_grad()
def _state(machine: tl.LSSVM, X: Tensor, y: Tensor, grid: Tensor) -> _State:
    assert isinstance(machine.kernel, tl.kernels.RBF)
    held_out = machine.loo(X, y)
    return _State(
        lengthscale=machine.kernel.lengthscale.item(),
        reg=machine.reg.item(),
        press=tl.criteria.press(held_out).item(),
        rmse=tl.criteria.mse(held_out).sqrt().item(),
        loo=held_out.outputs,
        curve=machine.fit(X, y)(grid),
    )


@torch.no_grad()
def _compare_with_refits(machine: tl.LSSVM, X: Tensor, y: Tensor) -> _Refits:
    refitted = copy.deepcopy(machine)

    def refit_each() -> Tensor:
        outputs = []
        for i in range(len(y)):
            others = torch.arange(len(y)) != i
            refitted.fit(X[others], y[others])
            outputs.append(refitted(X[i : i + 1]))
        return torch.cat(outputs)

    closed_seconds, closed = _timed(lambda: machine.loo(X, y).outputs, times=100)
    refit_seconds, explicit = _timed(refit_each, times=1)
    difference = (closed - explicit).abs().max().item()
    return _Refits(closed_seconds, refit_seconds, difference)


def _timed(function: Callable[[], Tensor], times: int) -> tuple[float, Tensor]:
    """The mean time of several calls, and the result of the last one."""
    start = time.perf_counter()
    for _ in range(times):
        result = function()
    return (time.perf_counter() - start) / times, result


def _summary(before: _State, after: _State, refits: _Refits, n: int) -> str:
    descent = [
        ["", "before", "after"],
        ["PRESS (g^2)", f"{before.press:.0f}", f"{after.press:.0f}"],
        ["LOO RMSE (g)", f"{before.rmse:.2f}", f"{after.rmse:.2f}"],
        ["lengthscale (ms)", f"{before.lengthscale:.2f}", f"{after.lengthscale:.2f}"],
        ["reg", f"{before.reg:.4f}", f"{after.reg:.4f}"],
    ]
    comparison = [
        ["leave-one-out", "closed form", f"{n} refits", "ratio"],
        [
            "time (ms)",
            f"{1e3 * refits.closed_seconds:.2f}",
            f"{1e3 * refits.refit_seconds:.2f}",
            f"{refits.refit_seconds / refits.closed_seconds:.0f}",
        ],
    ]
    return "\n\n".join(
        [
            table(descent),
            table(comparison) + f"\nlargest difference of the outputs: {refits.difference:.1e} g",
        ]
    )


def _draw(axes: "Axes", X: Tensor, y: Tensor, grid: Tensor, before: _State, after: _State) -> None:
    """Data, fits and leave-one-out outputs, with a thin line from each point to its held-out output."""
    times = X[:, 0].numpy()
    curve_times = grid[:, 0].numpy()
    ink, blue, orange, grey = "#333333", "#2b6ca3", "#c8641e", "#9a9a9a"
    axes.axhline(0, color="#dddddd", linewidth=0.8, zorder=0)
    axes.vlines(times, y.numpy(), after.loo.numpy(), color=orange, alpha=0.35, linewidth=0.8, zorder=1)
    axes.plot(
        curve_times,
        before.curve.numpy(),
        color=grey,
        linewidth=1.2,
        linestyle=(0, (5, 3)),
        zorder=2,
        label=f"fit before (LOO RMSE {before.rmse:.1f} g)",
    )
    axes.plot(
        curve_times,
        after.curve.numpy(),
        color=blue,
        linewidth=1.8,
        zorder=3,
        label=f"fit after (LOO RMSE {after.rmse:.1f} g)",
    )
    axes.scatter(
        times,
        after.loo.numpy(),
        s=14,
        facecolor="white",
        edgecolor=orange,
        linewidth=0.9,
        zorder=4,
        label="leave-one-out outputs and residuals",
    )
    axes.scatter(times, y.numpy(), s=11, color=ink, linewidth=0, zorder=5, label="data")
    axes.set_xlim(0, 60)
    axes.set_xlabel("time after impact (ms)")
    axes.set_ylabel("acceleration of the head (g)")
    axes.set_title("Motorcycle data: RBF LS-SVM, hyper-parameters by gradient descent on PRESS", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right", fontsize=9)
