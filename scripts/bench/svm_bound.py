"""The comparison of BOUND, Table 3: SMO with the dual bound against the same SMO without it.

    python scripts/bench/svm_bound.py [--data DIR] [--quick] [--sets heart,thyroid] [--solvers seeded,pairs]

For each set (first split) and kernel, summed over three points of the paper's grid, epsilon 1e-3:
kernel columns (beta's included), CPU seconds, and the ratios without / with the bound. Prec is the
share of open points whose sign the bound or the gap ball proved. Of each machine at most --points rows are
left out, drawn at random, the same for all solvers; 0 leaves out every row. Four solvers:

    seeded    working sets of 64, started from the full machine (method "smo" of svm_loo)
    unseeded  the same, started from zero
    pairs     seeded, working sets of 2, without the gap ball: the SMO and the rule of the paper
    newton    the default options, without the gap ball: the only one that takes Newton steps, beside which
              the bound has little to save

A problem that needs more than --rounds rounds is cut: `cut` counts them, without and with the bound;
the columns of a cut problem are those read so far, so a ratio with a * is not that of two solved runs.
Signs that differ between the two runs are counted in `differ`.

Seeding saves most of what the bound could have saved. So the last two columns give the columns of the
unseeded solver without the bound, over those of this row's solver without and with it.
"""

import argparse
import math
import time
from typing import NamedTuple

import torch
from measure import add_data
from svm_loo import SETS, load

from torchloo.svm import SVMFit, svm
from torchloo.svm.result import BALL, BOUND, CUT, KKT
from torchloo.svm.smo.loo_smo import leave_one_out_by_smo
from torchloo.svm.smo.options import SMOOptions

QUICK = ("thyroid", "titanic", "heart", "breast_cancer")
LINEAR = [(C, None) for C in (0.01, 1.0, 100.0)]
RBF = [(10 ** (i / 7 * math.log10(500)), 2 ** (-11 * j / 7)) for i, j in ((0, 3), (4, 4), (7, 5))]
PAPER = {"linear": 3.9, "rbf": 2.1}
MOST_TURNS = 5  # runs without and with the bound, in turns
SHORT = 2.0  # seconds that are enough


class Run(NamedTuple):
    """Totals over a grid."""

    columns: int
    seconds: float
    opened: int
    proved: int
    cut: int
    signs: torch.Tensor


def kernel(X: torch.Tensor, rate: float | None) -> torch.Tensor:
    if rate is None:
        return X @ X.T
    return torch.exp(-rate * torch.cdist(X, X, compute_mode="donot_use_mm_for_euclid_dist").square())


def some_rows(n: int, most: int) -> torch.Tensor:
    """A mask (n,) of at most so many rows, or of all if `most` is 0."""
    order = torch.randperm(n, generator=torch.Generator().manual_seed(0))
    return torch.zeros(n, dtype=torch.bool).index_fill(0, order[: most or n], True)


def run(
    K: torch.Tensor,
    y: torch.Tensor,
    box: torch.Tensor,
    fit: SVMFit,
    rows: torch.Tensor,
    options: SMOOptions,
) -> Run:
    """Leave-one-out errors of full machines, stacked, by the SMO, in one call."""
    start = time.process_time()
    end = leave_one_out_by_smo(K, y, box, fit, False, 1e-3, options, rows)
    seconds, by = time.process_time() - start, end.resolved_by
    early, cut = (by == BOUND) | (by == BALL), by == CUT
    opened = early | cut | (by == KKT)
    columns, opened, early, cut = (int(x.sum()) for x in (end.columns, opened, early, cut))
    return Run(columns, seconds, opened, early, cut, end.outputs)


def in_turns(stacked: tuple, variants: list[SMOOptions]) -> list[Run]:
    """The quickest run of each variant; they take turns, several if these are short."""
    runs: list[list[Run]] = []
    while len(runs) < MOST_TURNS and sum(x.seconds for turn in runs for x in turn) < SHORT:
        runs.append([run(*stacked, variant) for variant in variants])
    return [min(turns, key=lambda x: x.seconds) for turns in zip(*runs, strict=True)]


class Row(NamedTuple):
    """One solver without and with the bound."""

    plain: Run
    bound: Run

    @property
    def ratio(self) -> float:
        return _over(self.plain, self.bound)

    def cells(self, unseeded: Run | None) -> str:
        plain, bound = self
        mark = "*" if plain.cut + bound.cut else " "
        cells = f"{plain.opened:>6}{plain.columns:>9}{plain.seconds:>8.2f}{self.ratio:>9.2f}{mark}"
        cells += f"{plain.seconds / bound.seconds:>7.2f}{100 * bound.proved / max(bound.opened, 1):>8.1f}"
        cells += f"{plain.cut:>6}{bound.cut:>5}{int((plain.signs != bound.signs).sum()):>7}"
        if unseeded is None:
            return cells
        return cells + f"{_over(unseeded, plain):>10.2f}{_over(unseeded, bound):>7.2f}"


def _over(first: Run, second: Run) -> float:
    return max(first.columns, 1) / max(second.columns, 1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_data(parser)
    parser.add_argument("--sets", default=",".join(SETS))
    parser.add_argument("--quick", action="store_true", help="the four smallest sets")
    parser.add_argument("--solvers", default="unseeded,seeded,pairs")
    parser.add_argument("--rounds", type=int, default=200, help="rounds of working sets of 64")
    parser.add_argument("--pair-rounds", type=int, default=2000, help="rounds of pairs")
    parser.add_argument("--points", type=int, default=100, help="rows left out of each machine; 0: all")
    options = parser.parse_args()
    torch.set_num_threads(1)
    every = {
        "unseeded": SMOOptions(most_rounds=options.rounds, seed=False, newton=0, gap_ball=True),
        "seeded": SMOOptions(most_rounds=options.rounds, newton=0, gap_ball=True),
        "pairs": SMOOptions(most_rounds=options.pair_rounds, working=2),
        "newton": SMOOptions(),
    }
    solvers = {name: every[name] for name in options.solvers.split(",")}
    titles = f"{'open':>6}{'columns':>9}{'seconds':>8}{'columns x':>10}{'time x':>7}"
    titles += f"{'Prec %':>8}{'cut':>11}{'differ':>7}{'of unseeded x':>17}"
    print(f"{'set':<14}{'kernel':<8}{'solver':<9}{titles}")
    ratios: dict[tuple[str, str], list[tuple[float, float]]] = {}
    seconds: dict[str, dict[str, list[list[float]]]] = {}  # without and with the bound, by solver and set
    for name in QUICK if options.quick else options.sets.split(","):
        X, y = load(options.data, name)
        for kind, grid in (("linear", LINEAR), ("rbf", RBF)):
            K = torch.stack([kernel(X, rate) for _, rate in grid])
            C, labels = torch.tensor([C for C, _ in grid], dtype=y.dtype), y.expand(len(grid), -1)
            stacked = (
                K,
                labels,
                C[:, None].expand_as(labels),
                svm(K, labels, C),
                some_rows(len(y), options.points),
            )
            rows: dict[str, Row] = {}
            for solver, variant in solvers.items():
                variants = [variant._replace(bound=b, gap_ball=b and variant.gap_ball) for b in (False, True)]
                row = Row(*in_turns(stacked, variants))
                rows[solver] = row
                unseeded = rows["unseeded"].plain if "unseeded" in rows else None
                of_unseeded = math.nan if unseeded is None else _over(unseeded, row.bound)
                ratios.setdefault((kind, solver), []).append((row.ratio, of_unseeded))
                seconds.setdefault(solver, {}).setdefault(name, []).append(
                    [row.plain.seconds, row.bound.seconds]
                )
                print(f"{name:<14}{kind:<8}{solver:<9}{row.cells(unseeded)}", flush=True)
    for (kind, solver), pairs in ratios.items():
        own, of_unseeded = (torch.tensor(column) for column in zip(*pairs, strict=True))
        print(
            f"{kind:<7}{solver:<9} columns x: mean {own.mean():.2f}, least {own.min():.2f}; "
            f"of unseeded: mean {of_unseeded.mean():.2f}; {len(pairs)} sets "
            f"(paper, its SMO: mean {PAPER[kind]})"
        )
    for solver, by_set in seconds.items():
        each = torch.tensor([torch.tensor(x).sum(0).tolist() for x in by_set.values()])  # (sets, 2)
        (plain, bound), worst = each.sum(0).tolist(), (each[:, 1] / each[:, 0]).max()
        print(f"{solver:<9} time with / without the bound: {bound / plain:.2f} in all, {worst:.2f} at worst")


if __name__ == "__main__":
    main()
