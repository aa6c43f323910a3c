"""A linear probe with 30 regularisations against RidgeClassifierCV of scikit-learn, in one run.

    python scripts/bench/probe.py [--rows 50000] [--columns 768] [--classes 10] [--repeats 3]

Features are normal, with standard deviations from 1 down to 0.03, in float32 as embeddings are; classes are
the largest of noisy linear functions of them. Both sides try the same regularisations (alphas), choose by the
leave-one-out squared error, and fit a head; `tl.probe` gives accuracies and their standard errors for every
regularisation as well. RidgeClassifierCV runs once in float32 and once in float64, of which the faster
counts; ours `--repeats` times, of which the best counts. Compared are the squared error of every
regularisation (theirs in float64), the one chosen, and the accuracy on further rows. For information,
`tl.select` of reg alone for 20,000 x 384 beside one `path` of 30 regularisations. Exits with 1 if the ratio
is missed or the sides differ. Needs scikit-learn (extra bench).
"""

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from measure import Table, peak_bytes
from sklearn.linear_model import RidgeClassifierCV
from torch import Tensor

import torchloo as tl

MIB = 2**20
TEST = 10_000


def embeddings(n: int, d: int, classes: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(n, d, generator=generator) * torch.logspace(0, -1.5, d)
    outputs = X @ torch.randn(d, classes, generator=generator)
    noise = torch.randn(n, classes, generator=generator)
    return X, (outputs + 3 * outputs.std() * noise).argmax(-1)


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def ridge(X: np.ndarray, labels: np.ndarray, alphas: np.ndarray) -> RidgeClassifierCV:
    return RidgeClassifierCV(alphas=alphas, store_cv_results=True).fit(X, labels)


def chosen_reg(table: Table, repeats: int) -> None:
    """`tl.select` with reg as its only parameter, which goes along paths."""
    X, labels = embeddings(20_000, 384, 10)
    machine = tl.LSSVM(tl.kernels.Linear())
    regs = len(X) * torch.logspace(-4, 3, 30)
    selections = [timed(lambda: tl.select(machine, X, labels, progress=False)) for _ in range(repeats)]
    seconds, chosen = min(selections, key=lambda run: run[0])
    path = min(timed(lambda: without_graph(machine.path, X, labels, regs))[0] for _ in range(repeats))
    what = f"20,000 x 384, 10 classes: select of reg ({chosen.evaluations} evaluations) / a path of 30"
    table.info(what, seconds, seconds / path)


@torch.no_grad()
def without_graph(call: Callable[..., Any], *arguments: Any) -> Any:
    return call(*arguments)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--columns", type=int, default=768)
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3, help="runs of ours, of which the best counts")
    arguments = parser.parse_args()
    n, d = arguments.rows, arguments.columns
    X, labels = embeddings(n + TEST, d, arguments.classes)
    X, X_test = X.split([n, TEST])
    labels, labels_test = labels.split([n, TEST])
    scale = n * X.var(0).mean().item()
    regs = scale * torch.logspace(-4, 3, 30, dtype=torch.float64)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads", flush=True)
    table = Table()
    chosen_reg(table, arguments.repeats)
    runs = [timed(lambda: tl.probe(X, labels, regs=regs, progress=False)) for _ in range(arguments.repeats)]
    ours, found = min(runs, key=lambda run: run[0])
    print(f"  ours {ours:.2f} s, accuracy {found.accuracy:.4f} +- {found.standard_error:.4f}", flush=True)
    peak = peak_bytes(lambda: tl.probe(X, labels, regs=regs, progress=False))
    print(
        f"  peak memory beyond the features ({X.numel() * 4 / MIB:.0f} MiB): {peak / MIB:.0f} MiB", flush=True
    )
    seconds, theirs = {}, None
    for dtype in (np.float32, np.float64):
        rows = X.numpy().astype(dtype)
        seconds[dtype], theirs = timed(lambda rows=rows: ridge(rows, labels.numpy(), regs.numpy()))
        print(f"  RidgeClassifierCV in {dtype.__name__}: {seconds[dtype]:.2f} s", flush=True)
    assert theirs is not None
    what = f"{n:,} x {d}, {arguments.classes} classes, 30 reg: RidgeClassifierCV / ours"
    table.row(what, ours, min(seconds.values()) / ours, 3, at_least=True)
    expected = torch.from_numpy(theirs.cv_results_.reshape(-1, len(regs))).mean(0)
    table.agreement("mean squared error of every reg, ours and theirs", [found.criterion], [expected], 1e-5)
    table.agreement("reg", [torch.tensor([found.reg])], [torch.tensor([float(theirs.alpha_)])], 1e-6)
    accuracies = [
        (found.head.predict_class(X_test) == labels_test).double().mean(),
        torch.tensor(theirs.score(X_test.numpy(), labels_test.numpy())),
    ]
    print(f"  on {TEST:,} further rows: ours {accuracies[0]:.4f}, theirs {accuracies[1]:.4f}")
    table.agreement("accuracy on further rows", accuracies[:1], accuracies[1:], 1e-3)
    sys.exit(1 if table.failed else 0)


if __name__ == "__main__":
    main()
