"""Choosing basis vectors: errors on Boston, speed on many rows, kernel matrices of sparse rows.

    python scripts/bench/basis.py [--rows 20000] [--size 100] [--repeats 3] [--out basis.png]

The greedy choice keeps a matrix of all pairs of rows: 3.2 GB at 20,000 rows, twice that while it is made.
Draws the error curves (needs matplotlib). Exits with 1 if a ratio is missed.
"""

import argparse
import itertools
import statistics
import sys
import time
import warnings
from pathlib import Path

import torch
from measure import Table, add_data, best_times

import torchloo as tl

SEEDS = 10
QUIET = {"progress": False}


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def boston(data: Path) -> tuple[torch.Tensor, torch.Tensor]:
    X, y, _, _ = tl.datasets.benchmark("boston", data)
    return (X - X.mean(0)) / X.std(0, correction=0), y


def curves(table: Table, data: Path, m: int = 200) -> dict[str, torch.Tensor]:
    """Error curves (seeds, m) by name, on Boston; one row where nothing is random."""
    X, y = boston(data)
    kernel = tl.kernels.RBF.from_rate(0.05)
    made = {
        "greedy": [tl.basis.greedy(m, **QUIET)],
        "stochastic": [tl.basis.stochastic(m, generator=seeded(s), **QUIET) for s in range(SEEDS)],
        "pivoted": [tl.basis.pivoted(m, **QUIET)],
        "rpcholesky": [tl.basis.rpcholesky(m, generator=seeded(s), **QUIET) for s in range(SEEDS)],
        "random": [tl.basis.random(m, generator=seeded(s), **QUIET) for s in range(SEEDS)],
        "pruned": [tl.basis.pruned(m, **QUIET)],
    }
    errors = {
        name: torch.stack([choose(kernel, X, y).errors for choose in some]) for name, some in made.items()
    }
    final = {name: statistics.median(some[:, -1].tolist()) for name, some in errors.items()}
    for name in made:
        ratio = final[name] / final["greedy"]
        if name == "rpcholesky":
            table.row(f"Boston, m = {m}: error of rpcholesky / greedy, median", None, ratio, 1.6)
        else:
            print(f"  Boston, m = {m}: {name} {final[name]:.5f}, {ratio:.2f} times greedy's")
    return errors


def speed(table: Table, n: int, m: int, repeats: int) -> None:
    """Time of the choice on n rows; the greedy one, which takes minutes, is measured once."""
    X = torch.randn(n, 8, dtype=torch.float64, generator=seeded(0))
    kernel = tl.kernels.RBF(lengthscale=2.0)
    sides = {
        "rpcholesky": lambda: tl.basis.rpcholesky(m, generator=seeded(0), **QUIET)(kernel, X),
        "pivoted": lambda: tl.basis.pivoted(m, **QUIET)(kernel, X),
        "stochastic": lambda: tl.basis.stochastic(m, generator=seeded(0), **QUIET)(kernel, X),
        "random": lambda: tl.basis.random(m, generator=seeded(0), **QUIET)(kernel, X),
    }
    times = best_times(sides, repeats)
    errors = {name: choose().errors[-1].item() for name, choose in sides.items()}
    start = time.perf_counter()
    chosen = tl.basis.greedy(m, **QUIET)(kernel, X)
    errors["greedy"] = chosen.errors[-1].item()
    times["greedy"] = time.perf_counter() - start
    for name, seconds in times.items():
        print(f"  n = {n}, m = {m}: {name} {seconds:.3f} s, error {errors[name]:.3f}")
    ratio = times["greedy"] / times["rpcholesky"]
    what = f"n = {n}, m = {m}: time of greedy / rpcholesky"
    table.row(what, times["rpcholesky"], ratio, 20, at_least=True)


def sparse_rows(data: Path, repeats: int) -> None:
    """Kernel matrices of HIVA from CSR rows and from dense rows, in turns."""
    X, _, _, _ = tl.datasets.benchmark("hiva", data)
    S = X.to_sparse_csr()
    filled = S.values().numel() / X.numel()
    for kernel in (tl.kernels.Linear(), tl.kernels.Polynomial(), tl.kernels.Boolean(0.01)):
        with torch.no_grad():
            expected = kernel(X)
            gap = ((kernel(S) - expected).abs().max() / expected.abs().max()).item()
            sides = {"dense": lambda k=kernel: k(X), "sparse": lambda k=kernel: k(S)}
            times = best_times(sides, repeats)
        name = type(kernel).__name__
        ratio = times["sparse"] / times["dense"]
        print(
            f"  HIVA {tuple(X.shape)}, {filled:.1%} filled, {name}: CSR {times['sparse']:.3f} s, "
            f"dense {times['dense']:.3f} s, ratio {ratio:.2f}, gap {gap:.1e}"
        )


def draw(errors: dict[str, torch.Tensor], out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7.5, 4.8), layout="constrained")
    ends = []
    for name, some in errors.items():
        m = some.shape[-1]
        x = range(1, m + 1)
        middle = some.median(0).values
        (line,) = axes.plot(x, middle, linewidth=1.6)
        if len(some) > 1:
            axes.fill_between(x, some.amin(0), some.amax(0), color=line.get_color(), alpha=0.2, linewidth=0)
        ends.append([middle[-1].log10().item(), name, line.get_color()])
    ends.sort()
    for before, after in itertools.pairwise(ends):  # names one above the other
        after[0] = max(after[0], before[0] + 0.1)
    for height, name, color in ends:
        axes.text(m + 3, 10**height, name, color=color, va="center")
    axes.set(
        yscale="log",
        xlim=(1, m),
        xlabel="basis vectors",
        ylabel="mean relative reconstruction error",
        title=f"Boston, RBF of rate 0.05: medians and ranges of {SEEDS} seeds",
    )
    axes.grid(which="both", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(out, dpi=150)
    print(f"  drawn: {out}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_data(parser)
    parser.add_argument("--rows", type=int, default=20000, help="rows of the synthetic set")
    parser.add_argument("--size", type=int, default=100, help="vectors chosen among them")
    parser.add_argument("--repeats", type=int, default=3, help="turns of which the best counts")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("basis.png"), help="the picture")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", message="Sparse CSR tensor support")
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    table = Table()
    draw(curves(table, arguments.data), arguments.out)
    speed(table, arguments.rows, arguments.size, arguments.repeats)
    sparse_rows(arguments.data, arguments.repeats)
    sys.exit(1 if table.failed else 0)


if __name__ == "__main__":
    main()
