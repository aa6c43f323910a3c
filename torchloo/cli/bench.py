"""`torchloo bench`: the cost of leave-one-out relative to training and to refitting, on this computer.

The scripts in scripts/bench time the same functions at larger sizes.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

import torchloo as tl
from torchloo.cli.predict import require_device
from torchloo.cli.shell import UserError, add_device, add_progress, count, first_line, table

__all__ = ["add", "best_times", "kernel_matrix", "loo", "loo_with_gradient", "run", "targets", "train"]

REG = 1.0


def kernel_matrix(n: int, seed: int = 0, device: str = "cpu") -> Tensor:
    """RBF kernel matrix (n, n) of random points."""
    X = targets(n, 8, seed=seed)
    with torch.no_grad():
        return tl.kernels.RBF(lengthscale=2.0)(X).to(device)


def targets(*shape: int, seed: int = 1, device: str = "cpu") -> Tensor:
    """Standard normal numbers, drawn on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator).to(device)


def train(K: Tensor, Y: Tensor) -> Tensor:
    """Training alone: one Cholesky factorisation and one solve."""
    M = K.clone()
    M.diagonal(dim1=-2, dim2=-1).add_(REG)
    return torch.cholesky_solve(Y, torch.linalg.cholesky(M))


def loo(K: Tensor, Y: Tensor) -> Tensor:
    """Leave-one-out residuals of the LS-SVM."""
    return tl.functional.lssvm(K, Y, REG).held_out().residuals


def loo_with_gradient(K: Tensor, Y: Tensor) -> Tensor | None:
    """The gradient of PRESS in the kernel matrix."""
    K = K.detach().requires_grad_()
    reg = torch.tensor(REG, dtype=K.dtype, device=K.device, requires_grad=True)
    held_out = tl.functional.lssvm(K, Y, reg).held_out()
    held_out.residuals.square().sum().backward()
    return K.grad


def best_times(
    sides: dict[str, Callable[[], object]],
    repeats: int,
    on_turn: Callable[[], object] | None = None,
) -> dict[str, float]:
    """The fastest of `repeats` timings of every side, in seconds, after one untimed warm-up.

    Args:
        sides: functions to time, by name; all are called once per repetition, in turn.
        repeats: number of timed repetitions.
        on_turn: called after every repetition, including the warm-up.
    """
    times = dict.fromkeys(sides, float("inf"))
    for turn in range(repeats + 1):
        for name, call in sides.items():
            _wait()
            start = time.perf_counter()
            result = call()
            _wait()
            elapsed = time.perf_counter() - start
            del result
            if turn:
                times[name] = min(times[name], elapsed)
        if on_turn is not None:
            on_turn()
    return times


def _wait() -> None:
    """Wait for a GPU, whose calls return before the work is done."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


class _Comparison(NamedTuple):
    """Two timings and their ratio."""

    what: str
    over: Callable[[], object]
    under: Callable[[], object]
    factor: float = 1.0
    """The full work is this many times that of `over`."""


def add(commands: Any) -> None:
    """Declare the arguments."""
    parser = commands.add_parser(
        "bench",
        help="time leave-one-out against training and refitting on this computer",
        description="Time leave-one-out against training and against refitting, in float64, and print the "
        "ratios. Takes about 15 seconds on two cores.",
    )
    parser.add_argument("--rows", type=count, default=1000, metavar="N", help="(default: %(default)s)")
    parser.add_argument(
        "--repeats",
        type=count,
        default=5,
        metavar="N",
        help="repetitions, of which the fastest counts (default: %(default)s)",
    )
    add_device(parser)
    add_progress(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Time every comparison and print one table."""
    require_device(args.device)
    if args.rows < 3:
        raise UserError(f"--rows must be at least 3, got {args.rows}")
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {args.device}, float64", flush=True)
    try:
        rows = _timings(args)
    except (RuntimeError, MemoryError) as error:
        raise UserError(f"--rows {args.rows}: {first_line(error)}") from error
    print(f"\n{table(rows)}")
    return 0


def _timings(args: argparse.Namespace) -> list[list[str]]:
    """The rows of the table."""
    rows = [["", "first (s)", "second (s)", "ratio"]]
    comparisons = list(_comparisons(args.rows, args.device))
    turns = len(comparisons) * (args.repeats + 1)
    with tqdm(total=turns, desc="timing", unit="turn", disable=not args.progress) as bar:
        for comparison in comparisons:
            sides = {"over": comparison.over, "under": comparison.under}
            times = best_times(sides, args.repeats, on_turn=bar.update)
            over = times["over"] * comparison.factor
            under = times["under"]
            rows.append([comparison.what, f"{over:.4f}", f"{under:.4f}", f"{over / under:.1f}"])
    return rows


def _comparisons(n: int, device: str) -> Iterator[_Comparison]:
    K = kernel_matrix(n, device=device)
    Y = targets(n, 1, device=device)
    yield _Comparison(f"LOO / training, n = {n}", lambda: loo(K, Y), lambda: train(K, Y))
    yield _Comparison(
        f"LOO with gradient / training, n = {n}", lambda: loo_with_gradient(K, Y), lambda: train(K, Y)
    )
    yield _Comparison(f"{n} refits / LOO", lambda: train(K[1:, 1:], Y[1:]), lambda: loo(K, Y), n)
    machine = tl.LSSVM(tl.kernels.Precomputed()).to(device)
    regs = torch.logspace(-3, 3, 30, dtype=torch.float64, device=device)
    yield _Comparison(
        "LOO for 30 reg / one eigendecomposition",
        lambda: machine.path(K, Y, regs),
        lambda: torch.linalg.eigh(K),
    )
    yield _batch(device)
    yield _svm(device)


def _batch(device: str, problems: int = 1024, some: int = 32) -> _Comparison:
    """Many small problems one by one (only some are timed) against all in one batch."""
    X = targets(problems, 32, 4, seed=2)
    with torch.no_grad():
        K = tl.kernels.RBF(lengthscale=2.0)(X).to(device)
    Y = targets(problems, 32, 5, device=device)
    return _Comparison(
        f"{problems} problems of 32 rows with gradient: one by one / batch",
        lambda: [loo_with_gradient(K[i], Y[i]) for i in range(some)],
        lambda: loo_with_gradient(K, Y),
        problems / some,
    )


def _svm(device: str, n: int = 200, some: int = 10) -> _Comparison:
    """Refits of the SVM without each row (only some are timed) against its leave-one-out."""
    X, y = tl.datasets.twonorm(n, generator=torch.Generator().manual_seed(0))
    X, y = X.to(device), y.to(device)
    svc = tl.SVC(tl.kernels.RBF(lengthscale=4.5)).to(device)

    @torch.no_grad()
    def refits() -> list[Tensor]:
        rows = torch.arange(n, device=device)
        return [svc.solve(X[rows != i], y[rows != i]).coef for i in range(some)]

    return _Comparison(f"SVM: {n} refits / LOO", refits, lambda: svc.loo(X, y), n / some)
