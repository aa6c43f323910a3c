"""Is the leave-one-out exact? svm_loo against scikit-learn's SVC refitted, and against our own SMO.

    python scripts/bench/svm_exact.py [--data DIR] [--sets heart,image] [--most 60] [--cache DIR]

52 problems: 13 IDA sets (first split), RBF with lengthscale sqrt(d) on standardised inputs and
linear, C in {1, 100}. SVC (precomputed kernel, tol 1e-6) is refitted without each support vector, or
without --most of them; the other rows are compared with SVC's full machine. A fit that reaches
--max-iter has not converged: its value is not compared; its sign is, and where it differs again after
ten, a hundred and a thousand times as many iterations.
LIBSVM keeps K in single precision, whatever it is given. Where its value is more than 1e-3 away ("far",
with the linear kernel only), both sides do the row again on inputs of so few bits that their K is exact
in single precision; "exact K" is the largest difference then,
"(open)" counts rows for which LIBSVM does not converge even then.
On sets of at most 200 rows `smo` runs to a relative duality gap of 1e-12, from zero, for 30 rows.
All rows of all problems take hours, most of them in LIBSVM; --cache keeps its values.
"""

import argparse
import math
import warnings
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from measure import add_data
from sklearn.exceptions import ConvergenceWarning
from sklearn.svm import SVC
from svm_loo import SETS, kernel, load
from tqdm import tqdm

from torchloo.svm import SVMHeldOut, svm_loo
from torchloo.svm.smo.bound import primal_objective
from torchloo.svm.smo.options import SMOOptions
from torchloo.svm.smo.rounds import smo

SMALL, SAMPLE = 200, 30
FAR = 1e-3  # from scikit-learn's value
LONGER = 10, 100, 1000  # times as many iterations


class Reference(NamedTuple):
    """Decision values of scikit-learn's held-out machines."""

    rows: np.ndarray
    values: np.ndarray
    converged: np.ndarray
    support: int  # support vectors of the full machine


def fit(K: np.ndarray, y: np.ndarray, C: float, max_iter: int) -> SVC:
    return SVC(C=C, kernel="precomputed", tol=1e-6, cache_size=1000, max_iter=max_iter).fit(K, y)


def refit(K: np.ndarray, y: np.ndarray, C: float, r: int, max_iter: int) -> tuple[float, bool]:
    """f(x_r) of the machine without r, and whether it converged."""
    keep = np.arange(len(y)) != r
    machine = fit(K[np.ix_(keep, keep)], y[keep], C, max_iter)
    return machine.decision_function(K[r : r + 1, keep])[0], machine.fit_status_ == 0


def refits(K: np.ndarray, y: np.ndarray, C: float, options: argparse.Namespace) -> Reference:
    """Unused rows by the full machine, support vectors by a machine each, in random order."""
    full = fit(K, y, C, options.max_iter)
    alpha = np.zeros(len(y))
    alpha[full.support_] = np.abs(full.dual_coef_[0])
    has_free = ((alpha > 0) & (alpha < C)).any()
    unused = np.flatnonzero(alpha == 0) if has_free else np.arange(0)
    values = full.decision_function(K)[unused]
    outcome = [(r, v, full.fit_status_ == 0) for r, v in zip(unused, values, strict=True)]
    order = np.random.default_rng(options.seed).permutation(np.setdiff1d(np.arange(len(y)), unused))
    outcome += [(r, *refit(K, y, C, r, options.max_iter)) for r in tqdm(order[: options.most], leave=False)]
    rows, values, converged = (np.array(x) for x in zip(*outcome, strict=True))
    return Reference(rows, values, converged, len(order))


def cached(path: Path | None, *problem) -> Reference:
    """The reference from `path`, or computed and kept there."""
    if path is None:
        return refits(*problem)
    if not path.exists():
        np.savez(path, **refits(*problem)._asdict())
    stored = np.load(path)
    return Reference(*(stored[name] for name in Reference._fields))


class Comparison(NamedTuple):
    """Counts and largest differences of one problem, or of all."""

    compared: int
    converged: int
    signs: int
    signs_unconverged: int
    signs_longer: int
    value: float
    far: int
    exact_kernel: float
    exact_open: int
    unstable: int
    neither: int
    smo_solved: int
    smo_value: float

    def plus(self, other: "Comparison") -> "Comparison":
        return Comparison(
            *(max(a, b) if isinstance(a, float) else a + b for a, b in zip(self, other, strict=True))
        )


def compare(X: torch.Tensor, y: torch.Tensor, kind: str, C: float, ref: Reference, most: int) -> Comparison:
    K = kernel(X, kind)
    held = svm_loo(K, y, C)
    outputs = held.outputs.numpy()[ref.rows]
    stable = ~held.unstable.numpy()[ref.rows]
    differ = stable & ((outputs >= 0) != (ref.values >= 0))
    longer = [
        still_differs(K.numpy(), y.numpy(), C, ref.rows[i], outputs[i], most)
        for i in tqdm(np.flatnonzero(differ & ~ref.converged), leave=False)
    ]
    gaps = np.abs(outputs - ref.values) * ref.converged
    far = ref.rows[gaps > FAR]
    linear = kind == "linear" and len(far)
    exact_kernel, exact_open = (
        with_exact_kernel(X, y, C, far, LONGER[1] * most) if linear else (0.0, len(far))
    )
    solved, difference = smo_difference(K, y, C, held) if len(y) <= SMALL else (0, 0.0)
    return Comparison(
        compared=len(ref.rows),
        converged=int(ref.converged.sum()),
        signs=int((differ & ref.converged).sum()),
        signs_unconverged=len(longer),
        signs_longer=sum(map(int, longer)),
        value=float(gaps.max(initial=0.0)),
        far=len(far),
        exact_kernel=exact_kernel,
        exact_open=exact_open,
        unstable=int(held.unstable.sum()),
        neither=int((~held.certified & ~held.unstable).sum()),
        smo_solved=solved,
        smo_value=difference,
    )


def still_differs(K: np.ndarray, y: np.ndarray, C: float, r: int, output: float, most: int) -> bool:
    """Whether the sign of f(x_r) differs from that of the output however many iterations are allowed."""
    for factor in LONGER:
        value, converged = refit(K, y, C, r, factor * most)
        if value * output > 0 or converged:
            break
    return value * output <= 0


def with_exact_kernel(
    X: torch.Tensor, y: torch.Tensor, C: float, rows: np.ndarray, most: int
) -> tuple[float, int]:
    """Largest difference at the rows on inputs so rounded that single precision holds X X^T exactly.

    And how many rows are left open because SVC does not converge. Entries of X X^T are multiples of
    step^2 and at most the largest squared norm, so of 24 bits.
    """
    step = 2.0 ** (math.ceil(math.log2(float(X.square().sum(1).max())) / 2) - 12)
    K = kernel((X / step).round() * step, "linear")
    if bool((K.float() != K).any()):
        raise AssertionError("single precision does not hold the kernel matrix of the rounded inputs")
    outputs = svm_loo(K, y, C).outputs.numpy()
    values, converged = zip(
        *(refit(K.numpy(), y.numpy(), C, r, most) for r in tqdm(rows, leave=False)), strict=True
    )
    difference = np.abs(outputs[rows] - values)[np.array(converged)]
    return float(difference.max(initial=0.0)), len(rows) - len(difference)


def smo_difference(K: torch.Tensor, y: torch.Tensor, C: float, held: SVMHeldOut) -> tuple[int, float]:
    """Of SAMPLE rows, those that our SMO solved from zero to a relative gap of 1e-12; largest difference."""
    n = len(y)
    rows = torch.randperm(n, generator=torch.Generator().manual_seed(0))[:SAMPLE]
    box = C * (1 - torch.eye(n, dtype=K.dtype))[rows]
    labels = y.expand_as(box).contiguous()
    options = SMOOptions(working=n, most_rounds=4)
    end = smo(K[None], labels, box, torch.zeros_like(box), epsilon=1e-10, options=options)
    primal, _ = primal_objective(end)
    dual = end.alpha.sum(1) - (end.alpha * y * (end.F + y)).sum(1) / 2
    solved = (primal - dual) <= 1e-12 * (1 + primal)
    outputs = (end.F + y).gather(1, rows[:, None])[:, 0] + end.bias
    difference = outputs - held.outputs[rows]
    return int(solved.sum()), max(difference[solved].abs().tolist(), default=0.0)


def cells(row: Comparison) -> str:
    return "".join(f"{x:>11.1e}" if isinstance(x, float) else f"{x:>11}" for x in row)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_data(parser)
    parser.add_argument("--sets", default=",".join(SETS))
    parser.add_argument("--most", type=int, help="support vectors of each problem; default all")
    parser.add_argument("--max-iter", type=int, default=300_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cache", type=Path, help="folder that keeps scikit-learn's values")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", ConvergenceWarning)  # counted in the table
    titles = ["compared", "converged", "signs", "(unconv.)", "(longer)", "value", "far", "exact K", "(open)"]
    titles += ["unstable", "neither", "smo rows", "smo value"]
    print(f"{'set':<14}{'kernel':<8}{'C':>4}{'n':>6}{'open':>6}" + "".join(f"{t:>11}" for t in titles))
    total = Comparison(0, 0, 0, 0, 0, 0.0, 0, 0.0, 0, 0, 0, 0, 0.0)
    for name in options.sets.split(","):
        X, y = load(options.data, name)
        for kind in ("rbf", "linear"):
            for C in (1.0, 100.0):
                path = options.cache and options.cache / f"{name}_{kind}_{C:.0f}.npz"
                ref = cached(path, kernel(X, kind).numpy(), y.numpy(), C, options)
                row = compare(X, y, kind, C, ref, options.max_iter)
                total = total.plus(row)
                label = f"{name:<14}{kind:<8}{C:>4.0f}{len(y):>6}{int(ref.support):>6}"
                print(label + cells(row), flush=True)
    print(f"{'all':<38}" + cells(total))


if __name__ == "__main__":
    main()
