"""Leave-one-out of the SVM: torchloo against scikit-learn's SVC retrained, ratios of one run.

    python scripts/bench/svm_loo.py [--data DIR] [--sets heart,image] [--full] [--method smo]
    python scripts/bench/svm_loo.py --large 10000

For each of the 13 IDA sets (first split), RBF with lengthscale sqrt(d) on standardised inputs and
linear, C in {1, 100}: svm_loo with values and without, against SVC(kernel="precomputed", tol=1e-3)
refitted for what checks 1 and 2 leave open. `total` counts its whole loop, `inside` only fit and
decision_function. At most --most refits (and --seconds of them) are timed and the rest extrapolated
from their mean (marked *); --full does them all. `plain` extrapolates to all n rows. Times are CPU
times of this process, both sides single-threaded, so that other work on the machine counts for neither.
The sides take turns, five of them or more within --seconds, and the best one counts for each; refits that
take longer than --seconds run once. --large N instead calls SVC.loo once on N rows of twonorm, RBF with
lengthscale sqrt(d), C = 1, and prints its time and the peak of memory beyond what the process had before.
"""

import argparse
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from measure import add_data, peak_bytes
from sklearn.svm import SVC

import torchloo as tl
from torchloo.svm import SVMHeldOut, svm_loo

LEAST, MOST = 5, 40  # turns

SETS = (
    "banana", "breast_cancer", "diabetis", "flare_solar", "german", "heart", "image",
    "ringnorm", "splice", "thyroid", "titanic", "twonorm", "waveform",
)  # fmt: skip


def load(folder: Path, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    data = np.load(folder / "ida" / f"{name}.npz")
    rows = (data["train"] if len(data["train"]) else data["train_own"])[0]
    X, y = data["X"][rows], data["y"][rows].astype(float)
    return torch.tensor((X - X.mean(0)) / X.std(0)), torch.tensor(y)


def kernel(X: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "linear":
        return X @ X.T
    d2 = torch.cdist(X, X, compute_mode="donot_use_mm_for_euclid_dist").square()
    return torch.exp(-d2 / (2 * X.shape[1]))


class Refits(NamedTuple):
    """What scikit-learn took for one problem."""

    total: float
    """CPU seconds of the whole loop."""

    inside: float
    """Those within fit and decision_function."""

    plain: float
    """Those of the loop over all n rows."""

    values: dict[int, float]
    """Held-out decision values by row."""

    guessed: bool
    """Whether the loop was cut short and its time extrapolated."""


def timed(function: Callable[[], SVMHeldOut]) -> tuple[float, SVMHeldOut]:
    start = time.process_time()
    result = function()
    return time.process_time() - start, result


def refits(K: np.ndarray, y: np.ndarray, C: float, most: int, budget: float) -> Refits:
    """Retrain without each row that checks 1 and 2 leave open."""
    start = time.process_time()
    full = SVC(C=C, kernel="precomputed", tol=1e-3, cache_size=1000).fit(K, y)
    wrong = full.decision_function(K) * y < 0
    training = time.process_time() - start
    support = np.zeros(len(y), bool)
    support[full.support_] = True
    todo = np.flatnonzero(support & ~wrong)
    chosen = todo if len(todo) <= most else np.random.default_rng(0).choice(todo, most, replace=False)
    total = inside = 0.0
    values = {}
    for r in chosen:
        begin = time.process_time()
        keep = np.arange(len(y)) != r
        K_rest, y_rest, k_r = K[np.ix_(keep, keep)], y[keep], K[r : r + 1, keep]
        middle = time.process_time()
        machine = SVC(C=C, kernel="precomputed", tol=1e-3, cache_size=1000).fit(K_rest, y_rest)
        values[int(r)] = machine.decision_function(k_r)[0]
        end = time.process_time()
        total, inside = total + end - begin, inside + end - middle
        if total > budget:
            break
    share = len(todo) / max(len(values), 1)
    plain = total / max(len(values), 1) * len(y)
    return Refits(training + total * share, training + inside * share, plain, values, len(values) < len(todo))


class Comparison(NamedTuple):
    """The best times of both sides for one problem, and what they found."""

    seconds: float
    quick: float
    held: SVMHeldOut
    labels: SVMHeldOut
    sklearn: Refits


def in_turns(K: torch.Tensor, y: torch.Tensor, C: float, most: int, budget: float, method: str) -> Comparison:
    seconds = quick = math.inf
    loops: list[Refits] = []
    start = time.process_time()
    for turn in range(MOST):
        if turn >= LEAST and time.process_time() - start > budget:
            break
        spent, held = timed(lambda: svm_loo(K, y, C, method=method))
        seconds = min(seconds, spent)
        spent, labels = timed(lambda: svm_loo(K, y, C, method=method, values=False))
        quick = min(quick, spent)
        if not loops or loops[-1].total * (len(loops) + 1) < budget:
            loops.append(refits(K.numpy(), y.numpy(), C, most, budget))
    total, inside, plain = (min(x) for x in list(zip(*loops, strict=True))[:3])
    return Comparison(
        seconds, quick, held, labels, loops[0]._replace(total=total, inside=inside, plain=plain)
    )


def large(n: int) -> None:
    """One call on n rows: time and peak memory."""
    X, y = tl.datasets.twonorm(n, generator=torch.Generator().manual_seed(0))
    machine = tl.SVC(tl.kernels.RBF(X.shape[1] ** 0.5), C=1.0)
    found: list[SVMHeldOut] = []
    start = time.perf_counter()
    with torch.no_grad():
        peak = peak_bytes(lambda: found.append(machine.loo(X, y)))
    seconds, held = time.perf_counter() - start, found[0]
    print(f"twonorm, {n} rows, RBF, C = 1: {seconds:.1f} s, {peak / 2**30:.2f} GiB, {X.dtype}")
    print(f"{int((held.iterations > 0).sum())} paths with events, {int(held.unstable.sum())} rows unstable")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_data(parser)
    parser.add_argument("--sets", default=",".join(SETS))
    parser.add_argument("--most", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=10.0, help="of refits timed for each problem")
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--method", default="auto", choices=("auto", "path", "smo"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--large", type=int, metavar="N", help="only one call on N rows of twonorm")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.large:
        return large(options.large)
    most, budget = (10**9, math.inf) if options.full else (options.most, options.seconds)
    titles = ("values ms", "errors ms", "total x", "inside x", "errors x", "plain x", "differ", "unstable")
    print(f"{'set':<14}{'kernel':<8}{'C':>4}{'n':>6}" + "".join(f"{title:>11}" for title in titles))
    logs: list[list[float]] = []
    svm_loo(torch.eye(4, dtype=torch.float64), torch.tensor([1.0, 1, -1, -1], dtype=torch.float64), 1.0)
    for name in options.sets.split(","):
        X, y = load(options.data, name)
        for kind in ("rbf", "linear"):
            K = kernel(X, kind)
            for C in (1.0, 100.0):
                seconds, quick, held, labels, other = in_turns(K, y, C, most, budget, options.method)
                differ = sum((v >= 0) != bool(held.outputs[r] >= 0) for r, v in other.values.items())
                ratios = [other.total / seconds, other.inside / seconds, other.total / quick]
                ratios.append(other.plain / seconds)
                logs.append([math.log(x) for x in ratios])
                cells = [
                    f"{1e3 * seconds:.1f}",
                    f"{1e3 * quick:.1f}",
                    f"{ratios[0]:.1f}{'*' if other.guessed else ''}",
                ]
                cells += [f"{x:.1f}" for x in ratios[1:]] + [str(differ), str(int(held.unstable.sum()))]
                note = "" if bool((labels.errors == held.errors).all()) else "  values and errors disagree"
                row = "".join(f"{cell:>11}" for cell in cells)
                print(f"{name:<14}{kind:<8}{C:>4.0f}{len(y):>6}{row}{note}", flush=True)
    columns = list(zip(*logs, strict=True))
    means = [math.exp(sum(c) / len(c)) for c in columns]
    least = [math.exp(min(c)) for c in columns]
    print("geometric means: total {:.1f}, inside {:.1f}, errors only {:.1f}, plain {:.1f}".format(*means))
    print("least:           total {:.2f}, inside {:.2f}, errors only {:.2f}, plain {:.1f}".format(*least))


if __name__ == "__main__":
    main()
