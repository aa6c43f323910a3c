"""A million rows on one machine: time beside two plain products, memory, growth, and a linear probe.

    python scripts/bench/scale.py              # 1,000,000 rows, a few minutes on 2 cores, 3 GB
    python scripts/bench/scale.py --rows 50000 # a tenth of a minute, to see whether it runs

Every ratio is of times measured in this run, in turns. The exit status is the number of demands not met.
"""

import argparse
import sys
import time
from collections.abc import Callable

import torch
from measure import Table, best_times, peak_bytes
from torch import Tensor

import torchloo as tl
from torchloo.panels import add_symmetric

COLUMNS = 20


def rows(n: int, d: int = COLUMNS, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Standard normal inputs (n, d), and a smooth target with noise."""
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(n, d, dtype=dtype, generator=generator)
    noise = torch.randn(n, dtype=dtype, generator=generator)
    return X, X[:, 0].sin() + X[:, 1] * X[:, 2] / 2 + 0.1 * noise


def sparse(X: Tensor, m: int) -> tl.SparseLSSVM:
    """An RBF machine whose basis are the first m rows."""
    return tl.SparseLSSVM(tl.kernels.RBF(lengthscale=5.0), reg=1.0, basis=X[:m].clone())


def fit_and_loo(machine: tl.SparseLSSVM, X: Tensor, y: Tensor, progress: bool = False) -> Tensor:
    """Both from one solution, as a user would: the machine is fitted, all held-out outputs come back."""
    solved = machine.solve(tl.Stream(X, y, progress=progress))
    held_out = solved.held_out()
    machine.fit(solved)
    return held_out.outputs


def two_products(n: int, p: int, block: int) -> Callable[[], None]:
    """Z^T Z and Z C^{-1} for every block of n rows of p features, in float64, and nothing else."""
    generator = torch.Generator().manual_seed(0)
    Z = torch.randn(block, p, dtype=torch.float64, generator=generator)
    C = torch.randn(p, p, dtype=torch.float64, generator=generator)
    square, product = torch.zeros_like(C), torch.zeros_like(Z)

    def run() -> None:
        for start in range(0, n, block):
            some = Z[: min(block, n - start)]
            torch.mm(some.mT, some, out=square)
            torch.mm(some, C, out=product[: len(some)])

    return run


def timed(call: Callable[[], object]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def turns(sides: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Best seconds of every side over a few turns; what is timed takes long, so none is thrown away."""
    times = dict.fromkeys(sides, float("inf"))
    for _ in range(repeats):
        for name, call in sides.items():
            times[name] = min(times[name], timed(call))
    return times


def symmetric_product(table: Table, m: int) -> None:
    """What leaving out a triangle saves."""
    V = torch.randn(m, 2048, dtype=torch.float64)
    S = torch.zeros(m, m, dtype=torch.float64)
    times = best_times(
        {"half": lambda: add_symmetric(S, V), "general": lambda: S.addmm_(V, V.mT)}, repeats=10
    )
    table.row(f"symmetric product by panels / general, {m} x 2048", times["half"],
              times["half"] / times["general"], 1.0)  # fmt: skip


def agreement(table: Table, n: int, m: int) -> None:
    """Streamed against in-memory leave-one-out, relative to the largest output."""
    X, y = rows(n)
    machine = sparse(X, m)
    with torch.no_grad():
        whole = machine.loo(X, y).outputs
        streamed = fit_and_loo(machine, X, y)
    difference = (streamed - whole).abs().max()
    error = (difference / whole.abs().max()).item()
    table.row(f"streamed - in memory, {n:,} rows, m = {m}, in 1e-10", None, error / 1e-10, 1.0)


def sparse_rows(table: Table, n: int, m: int, repeats: int) -> None:
    """Time beside two products, memory, and growth in n and m."""
    X, y = rows(n)
    machine = sparse(X, m)
    fit_and_loo(machine, X[: n // 50], y[: n // 50])
    sides = {"loo": lambda: fit_and_loo(machine, X, y), "products": two_products(n, m, 2048)}
    times = turns(sides, repeats)
    table.row(
        f"fit and LOO / two products, {n:,} x {COLUMNS} rows, m = {m}",
        times["loo"], times["loo"] / times["products"], 1.6,
    )  # fmt: skip
    peak = peak_bytes(lambda: fit_and_loo(machine, X, y)) / 2**30
    table.row(f"peak memory beyond the data in GiB, {n:,} rows, m = {m}", None, peak, 2.0)
    part = n // 10
    some = turns({"loo": lambda: fit_and_loo(machine, X[:part], y[:part])}, repeats + 1)
    table.row(f"growth from {part:,} to {n:,} rows / 10", times["loo"], times["loo"] / some["loo"] / 10, 1.15)
    small = sparse(X, m // 4)
    fewer = turns({"loo": lambda: fit_and_loo(small, X[:part], y[:part])}, repeats + 1)
    table.row(
        f"growth from m = {m // 4} to {m}, {part:,} rows", some["loo"], some["loo"] / fewer["loo"], 18.0
    )


def linear_probe(table: Table, n: int, d: int, repeats: int) -> None:
    """30 regularisations of a linear machine on float32 features."""
    X, y = rows(n, d, torch.float32)
    regs = torch.logspace(-2, 4, 30, dtype=torch.float64)
    machine = tl.LSSVM(tl.kernels.Linear())

    def probe(rows: int = n) -> object:
        return machine.path(tl.Stream(X[:rows], y[:rows], progress=False), regs=regs).outputs

    probe(n // 50)
    times = turns({"probe": probe, "products": two_products(n, d, 2048)}, repeats)
    table.row(
        f"linear probe, LOO of 30 reg / two products, {n:,} x {d} float32",
        times["probe"], times["probe"] / times["products"], 1.5,
    )  # fmt: skip
    peak = peak_bytes(probe) / 2**30
    print(f"  its peak memory beyond the data: {peak:.2f} GiB, what comes back included")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--basis", type=int, default=1000, help="basis vectors of the sparse machine")
    parser.add_argument("--features", type=int, default=512, help="columns of the linear probe")
    parser.add_argument("--repeats", type=int, default=2, help="turns; the best of each side counts")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"torch {torch.__version__}, {arguments.threads} threads")
    table = Table()
    symmetric_product(table, arguments.basis)
    agreement(table, min(20_000, arguments.rows), arguments.basis)
    sparse_rows(table, arguments.rows, arguments.basis, arguments.repeats)
    linear_probe(table, arguments.rows, arguments.features, arguments.repeats)
    return table.failed


if __name__ == "__main__":
    sys.exit(main())
