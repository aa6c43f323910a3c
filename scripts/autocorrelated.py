"""How leave-one-out flatters on an autocorrelated series, and what a buffer about each row does about it.

    python scripts/autocorrelated.py [--rows 300] [--seeds 20] [--seed 0] [--device cpu] [--quick]
                                     [--out scripts/autocorrelated.png]

Two slow inputs (autoregressive, 0.98 from step to step) act on a target with autocorrelated noise (0.95). The
neighbours in time of a row have nearly its inputs and nearly its noise, so that a machine flexible enough to
learn the noise looks good to leave-one-out. Lengthscale and regularisation are chosen on a grid by
leave-one-out and by h-block with several buffers; the future error is that on 4000 later rows of the same
process.

Medians of 20 series: leave-one-out says 0.34 of machines whose future error is 0.78. Of those chosen with a
buffer of 20 steps h-block says 0.57 (future error 0.77), with one of 80 steps 0.67 (0.80). What a buffer
mends is the estimate: the machines chosen are about as good as those of leave-one-out. Writes a table and
the picture (needs matplotlib).
"""

import argparse
import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

import torchloo as tl

BUFFERS = [0, 2, 5, 10, 20, 40, 80]  # 0 is leave-one-out
LENGTHSCALES = [0.3, 1.0, 3.0]
REGS = [1e-2, 1e-1, 1.0, 1e1, 1e2]
FUTURE = 4000
GAP = 200  # steps after which the noise is forgotten


def autoregressive(steps: int, columns: int, coefficient: float, generator: torch.Generator) -> Tensor:
    """A stationary series (steps, columns) of unit variance."""
    shocks = torch.randn(steps, columns, dtype=torch.float64, generator=generator)
    values = [shocks[0]]
    for shock in shocks[1:]:
        values.append(coefficient * values[-1] + math.sqrt(1 - coefficient**2) * shock)
    return torch.stack(values)


def series(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs (rows, 2) and targets (rows,) in the order of time."""
    generator = torch.Generator().manual_seed(seed)
    X = autoregressive(rows, 2, 0.98, generator)
    noise = autoregressive(rows, 1, 0.95, generator)[:, 0]
    return X, torch.sin(2 * X[:, 0]) + 0.5 * X[:, 1] + 0.5 * noise


def grid() -> Iterator[tl.LSSVM]:
    for lengthscale in LENGTHSCALES:
        for reg in REGS:
            yield tl.LSSVM(tl.kernels.RBF(lengthscale), reg)


@torch.no_grad()
def one_seed(rows: int, seed: int, device: str) -> list[tuple[float, float]]:
    """Root mean squared errors for every buffer: the estimate that was least, and the future one."""
    X, y = (values.to(device) for values in series(rows + GAP + FUTURE, seed))
    past = slice(None, rows)
    later = slice(rows + GAP, None)
    future = []
    for machine in grid():
        error = machine.fit(X[past], y[past])(X[later]) - y[later]
        future.append(error.square().mean().sqrt().item())
    found = []
    for buffer in BUFFERS:
        sets = tl.splits.h_block(torch.arange(rows), buffer)
        held_out = [machine.lso(X[past], y[past], sets) for machine in grid()]
        estimates = [tl.criteria.mse(each).sqrt().item() for each in held_out]
        best = min(range(len(estimates)), key=estimates.__getitem__)
        found.append((estimates[best], future[best]))
    return found


def quartiles(values: Tensor) -> Tensor:
    """Lower quartile, median and upper quartile over the first axis."""
    return values.quantile(torch.tensor([0.25, 0.5, 0.75], dtype=values.dtype), 0)


def draw(estimates: Tensor, future: Tensor, out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    places = range(len(BUFFERS))
    for values, name, colour in (
        (future, "future error of the selected machine", "tab:orange"),
        (estimates, "its cross-validation estimate", "tab:blue"),
    ):
        low, middle, high = quartiles(values)
        axes.plot(places, middle, "o-", color=colour, label=name)
        axes.fill_between(places, low, high, color=colour, alpha=0.2, linewidth=0)
    axes.set_xticks(places, ["0\n(leave-one-out)", *map(str, BUFFERS[1:])])
    axes.set_xlabel("buffer left out on either side of a row, in steps")
    axes.set_ylabel("root mean squared error")
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(frameon=False, loc="lower right")
    axes.set_title(f"Median and quartiles of {len(estimates)} series", loc="left", fontsize=10)
    figure.savefig(out, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=300, help="rows to learn from")
    parser.add_argument("--seeds", type=int, default=20, help="how many series")
    parser.add_argument("--seed", type=int, default=0, help="of the first series")
    parser.add_argument("--device", default="cpu", help="where to compute")
    parser.add_argument("--quick", action="store_true", help="three series of 200 rows")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".png"), help="the picture")
    args = parser.parse_args()
    rows, seeds = (200, 3) if args.quick else (args.rows, args.seeds)
    numbers = range(args.seed, args.seed + seeds)
    found = torch.tensor([one_seed(rows, seed, args.device) for seed in tqdm(numbers, unit="series")])
    estimates, future = found.double().unbind(-1)  # (seeds, buffers)
    print(f"{seeds} series of {rows} rows; medians of root mean squared errors")
    print(f"{'buffer':>8}{'estimate':>10}{'future':>10}{'ratio':>8}")
    for k, buffer in enumerate(BUFFERS):
        estimate = quartiles(estimates[:, k])[1].item()
        error = quartiles(future[:, k])[1].item()
        print(f"{buffer:>8}{estimate:>10.3f}{error:>10.3f}{error / estimate:>8.2f}")
    draw(estimates, future, args.out)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
