"""The torchloo command.

A subcommand is a pair of functions: `_add_<name>` describes its arguments, `_run_<name>` does its
work and returns the exit code. What the user got wrong ends in one line and exit code 2.
"""

import argparse
import copy
import io
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from tqdm import tqdm

import torchloo as tl

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code: 0 done, 2 wrong use, 130 interrupted."""
    args = _parser().parse_args(argv)
    try:
        return args.run(args)
    except _UserError as error:
        print(f"torchloo {args.command}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"torchloo {args.command}: interrupted", file=sys.stderr)
        return 130


class _UserError(Exception):
    """Something that the user can put right; its text is one line."""


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def _parser() -> _Parser:
    parser = _Parser(prog="torchloo", description="Kernel machines with exact leave-one-out.")
    parser.add_argument("--version", action="version", version=f"torchloo {tl.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    for add in (_add_demo,):
        add(commands)
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 on, got {text!r}")
    return int(text)


def _png(text: str) -> Path:
    """A path that a picture can be written to, found out before any work is done."""
    path = Path(text)
    if path.suffix.lower() != ".png":
        raise argparse.ArgumentTypeError(f"must end in .png, got {text!r}")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"must be a file, got the folder {text!r}")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"the folder {str(path.parent)!r} does not exist")
    if not os.access(path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"the folder {str(path.parent)!r} cannot be written to")
    return path


def _write(path: Path, content: bytes) -> None:
    """Write all of a file or nothing: a failure leaves what was there before."""
    part = path.with_name(path.name + ".part")
    try:
        part.write_bytes(content)
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise _UserError(f"cannot write {str(path)!r}: {error.strerror}") from error


def _figure(**options: Any) -> "Figure":
    """An empty figure, drawn without a display; only the pictures need matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise _UserError("pictures need matplotlib: pip install torchloo[cli]") from error
    return Figure(**options)


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of text under each other: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for name, *cells in rows:
        padded = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        lines.append("   ".join([name.ljust(widths[0]), *padded]).rstrip())
    return "\n".join(lines)


class _State(NamedTuple):
    """A machine's hyper-parameters, and what they lead to on its training data."""

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


def _add_demo(commands: Any) -> None:
    parser = commands.add_parser(
        "demo",
        help="fit the motorcycle data by leave-one-out gradients",
        description="Fit an RBF LS-SVM to the motorcycle data, its hyper-parameters chosen by gradient "
        "descent on PRESS; print what that brought and how the closed form compares with refits, and "
        "draw a picture.",
    )
    parser.add_argument(
        "--out",
        type=_png,
        default="motorcycle.png",
        metavar="FILE",
        help="the picture (default: %(default)s)",
    )
    parser.add_argument(
        "--steps", type=_count, default=200, metavar="N", help="optimiser steps (default: %(default)s)"
    )
    parser.add_argument("--no-progress", dest="progress", action="store_false", help="show no progress bar")
    parser.set_defaults(run=_run_demo)


def _run_demo(args: argparse.Namespace) -> int:
    figure = _figure(figsize=(8, 5), layout="constrained")  # first, as it may be missing
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
    _write(args.out, content.getvalue())
    print(f"picture: {args.out}")
    return 0


@contextmanager
def _one_thread() -> Iterator[None]:
    """Matrices this small gain nothing from threads, and lose much where the cores are busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _descend(machine: tl.LSSVM, X: Tensor, y: Tensor, steps: int, progress: bool) -> None:
    """Adam on PRESS over the log-parameters of the kernel and the regularisation."""
    # The first gradients are the largest by far: forget them sooner than by default (0.999).
    optimiser = torch.optim.Adam(machine.parameters(), lr=0.3, betas=(0.9, 0.97))
    bar = tqdm(range(steps), desc="descending", unit="step", disable=not progress)
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
            seen = torch.arange(len(y)) != i
            outputs.append(refitted.fit(X[seen], y[seen])(X[i : i + 1]))
        return torch.cat(outputs)

    closed_seconds, closed = _timed(lambda: machine.loo(X, y).outputs, times=100)
    refit_seconds, explicit = _timed(refit_each, times=1)
    return _Refits(closed_seconds, refit_seconds, (closed - explicit).abs().max().item())


def _timed(function: Callable[[], Tensor], times: int) -> tuple[float, Tensor]:
    """The mean time of several calls, and what the last one returned."""
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
            _table(descent),
            _table(comparison) + f"\nlargest difference of the outputs: {refits.difference:.1e} g",
        ]
    )


def _draw(axes: "Axes", X: Tensor, y: Tensor, grid: Tensor, before: _State, after: _State) -> None:
    """Data, fits and leave-one-out outputs, with a thin line from each point to its held-out output."""
    times, curve_times = X[:, 0].numpy(), grid[:, 0].numpy()
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
