"""Model selection and outer validation: ratios measured in one run, float64.

    python scripts/bench/selection.py [searches] [starts] [splits] [ada] [--quick] [--data DIR]

searches  ARD RBF LS-SVM on Boston and german: PRESS and leave-one-out evaluations of "gradient" (5 starts,
          all of them counted) beside "nelder-mead" (1 start, at most 200 evaluations a parameter).
starts    20 starts as one batch against one start, at n = 64; at larger n the batch in chunks against the
          same evaluations one by one.
splits    100 hold-out splits of heart, and leave-speaker-out of two vowels with leave-speaker-out inside,
          Nelder-Mead in each: as batches against split by split.
ada       quadratic LS-SVM on ADA by PRESS: time and memory of one `select`, and the balanced error rate of
          an outer loop of 20 splits beside the 0.1687 of Cawley (2006), Table III, row 02.

Without names all four are run; --quick makes them small. Exits with 1 if a ratio is missed.
"""

import argparse
import sys
import time
from pathlib import Path

import torch
from measure import Table, add_data, best_times, peak_bytes
from tqdm import tqdm

import torchloo as tl
from torchloo.search import objective

PARTS = ("searches", "starts", "splits", "ada")
CONTINUOUS = [1, 14, 17, 19, 23, 29]  # columns of ADA; 39 is constant, all others are 0 or 1
PAPER = 0.1687
REMARKS = """
The paper altered the bias (I-A), so its numbers belong beside those with tl.threshold. It made 100 splits,
not 20, and took logarithms of two features and cut two more at thresholds; as its feature numbers do not fit
this file, here the six continuous columns are standardised and no more (logarithms of the two most skewed
ones make it no better). A shift that the test rows choose for themselves gives what the paper has, which
its final entry, with a test error of 0.1845 (Table V), did not keep: that is near the honest numbers here.
The paper's 0.1740 (row 07) is for weighted training and an unweighted PRESS, as here.
"""


def standardised(data: Path, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    X, y, *_ = tl.datasets.benchmark(name, data)
    return (X - X.mean(0)) / X.std(0), y


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def searches(table: Table, data: Path, quick: bool) -> None:
    for name in ("boston", "german"):
        X, y = standardised(data, name)
        rows = torch.randperm(len(y), generator=seeded())[: 60 if quick else len(y)]
        X, y = X[rows], y[rows]
        machine = tl.LSSVM(tl.kernels.RBF(torch.ones(X.shape[1])))
        results, seconds = {}, {}
        for label, search, starts in (
            ("gradient, 1 start", "gradient", 1),
            ("gradient, 5 starts", "gradient", 5),
            ("nelder-mead, 1 start", "nelder-mead", 1),
        ):
            begin = time.perf_counter()
            results[label] = tl.select(machine, X, y, search=search, starts=starts, generator=seeded())
            seconds[label] = time.perf_counter() - begin
            found = results[label]
            print(f"{name}, {len(y)} rows, {label}: PRESS {found.value:.6g}, {found.evaluations} evaluations")
        gradient, simplex = results["gradient, 5 starts"], results["nelder-mead, 1 start"]
        what, spent = f"{name}: gradient, 5 starts, / nelder-mead: PRESS", seconds["gradient, 5 starts"]
        table.row(what, spent, gradient.value / simplex.value, 1.0)
        what, spent = f"{name}: nelder-mead / gradient: evaluations", seconds["nelder-mead, 1 start"]
        table.row(what, spent, simplex.evaluations / gradient.evaluations, 5.0, at_least=True)


def toy(n: int, d: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = seeded()
    X = torch.randn(n, d, dtype=torch.float64, generator=generator)
    return X, torch.sin(X[:, 0]) + 0.3 * torch.randn(n, dtype=torch.float64, generator=generator)


def one_by_one(call):
    """The same call with chunks of one candidate."""

    def run() -> object:
        entries = objective.ENTRIES
        objective.ENTRIES = {"cpu": 1, "cuda": 1}
        try:
            return call()
        finally:
            objective.ENTRIES = entries

    return run


def starts(table: Table, data: Path, quick: bool) -> None:
    def searching(n: int, runs: int, search: str):
        X, y = toy(n)
        machine = tl.LSSVM(tl.kernels.RBF(torch.ones(8)))
        options = {"starts": runs, "max_evaluations": 12, "tolerance": 1e-12, "progress": False}
        return lambda: tl.select(machine, X, y, search=search, generator=seeded(), **options)

    for search in ("gradient", "nelder-mead"):
        sides = {"one": searching(64, 1, search), "twenty": searching(64, 20, search)}
        times = best_times(sides, 3 if quick else 10)
        what = f"n = 64, {search}: 20 starts / 1 start, 12 evaluations each"
        table.row(what, times["twenty"], times["twenty"] / times["one"], 8.0)
    for n in (128, 243) if quick else (128, 243, 500, 1000):
        batch = searching(n, 8, "gradient")
        times = best_times({"batch": batch, "loop": one_by_one(batch)}, 5 if quick or n > 400 else 9)
        table.row(f"n = {n}, gradient: 8 starts in chunks / one by one", times["batch"],
                  times["batch"] / times["loop"], 1.05)  # fmt: skip


def splits(table: Table, data: Path, quick: bool) -> None:
    X, y, *_ = tl.datasets.benchmark("heart", data)
    pairs = tl.splits.hold_out(len(y), 10 if quick else 100, generator=seeded())
    in_batches(table, f"heart, {len(pairs)} hold-outs", X, y, pairs)
    X, y, speakers, _ = tl.datasets.benchmark("vowel", data)
    rows = y < 2
    X = X[rows]
    y = 2 * y[rows] - 1
    speakers = speakers[rows]
    pairs = tl.splits.leave_cluster_out(speakers)[: 5 if quick else None]
    in_batches(table, f"two vowels, {len(pairs)} speakers left out", X, y, pairs, speakers)


def in_batches(table: Table, what: str, X: torch.Tensor, y: torch.Tensor, pairs: list, clusters=None) -> None:
    machine = tl.LSSVM(tl.kernels.RBF())

    def validated(some, progress=False):
        options = {"search": "nelder-mead", "clusters": clusters, "progress": progress}
        return tl.validate(machine, X, y, some, **options)

    print(validated(pairs, progress=True))
    sides = {"batch": lambda: validated(pairs), "loop": lambda: [validated([pair]) for pair in pairs]}
    times = best_times(sides, 1)
    what = f"{what}, Nelder-Mead: split by split / batch"
    table.row(what, times["batch"], times["loop"] / times["batch"], 1.0, at_least=True)


def _summary(rates: torch.Tensor) -> tuple[float, float]:
    """Mean and its standard error."""
    return rates.mean().item(), rates.std().item() / len(rates) ** 0.5


def peeked(
    machine: tl.LSSVM,
    X: torch.Tensor,
    y: torch.Tensor,
    columns: list[int],
    pairs: list,
) -> torch.Tensor:
    """Balanced error rates of the splits if the test rows themselves choose the shift: too good."""
    rates = []
    for train, test in tqdm(pairs, desc="peeking", leave=False):
        Z = X.clone()
        known = X[train][:, columns]
        Z[:, columns] = (X[:, columns] - known.mean(0)) / known.std(0)
        f = machine.fit(Z[train], y[train])(Z[test]).detach()
        one = torch.ones_like(f)
        tested = tl.HeldOut(f, y[test] - f, y[test], one, None, one, one > 1)
        f = f + tl.threshold(tested, "balanced_error_rate")
        rates.append(tl.criteria.balanced_error_rate(tested._replace(outputs=f, residuals=y[test] - f)))
    return torch.stack(rates)


def ada(table: Table, data: Path, quick: bool) -> None:
    X, y, *_ = tl.datasets.benchmark("ada", data)
    X = X[:, torch.arange(48) != 39]
    columns = [j - (j > 39) for j in CONTINUOUS]
    if quick:
        X, y = X[:600], y[:600]
    machine = tl.LSSVM(tl.kernels.Polynomial(degree=2))
    Z = X.clone()
    chosen = Z[:, columns]
    Z[:, columns] = (chosen - chosen.mean(0)) / chosen.std(0)
    begin, found = time.perf_counter(), []
    peak = peak_bytes(lambda: found.append(tl.select(machine, Z, y)))
    seconds = time.perf_counter() - begin
    print(found[0])
    table.row(f"ADA, {len(y)} rows, quadratic: one select, minutes", seconds, seconds / 60, 10.0)
    table.row("ADA: peak memory of it in GiB", None, peak / 2**30, 4.0)
    rows = []
    for what, weight in (("", None), (", weighted training", tl.balanced_weight)):
        options = {"standardise": columns, "threshold": "balanced_error_rate", "tolerance": 1e-4}
        pairs = tl.splits.hold_out(len(y), 3 if quick else 20, generator=seeded())
        begin = time.perf_counter()
        result = tl.validate(machine, X, y, pairs, metric="balanced_error_rate", weight=weight,
                             criterion_weight=None, **options)  # fmt: skip
        seconds = time.perf_counter() - begin
        print(f"\nPRESS, quadratic{what} ({seconds / 60:.1f} min)\n{result}\n")
        plain = torch.tensor([row["unshifted"] for row in result.table])
        rows.append((f"threshold 0{what}", *_summary(plain)))
        rows.append((f"tl.threshold in each split{what}", result.mean, result.stderr))
    plain = peeked(found[0].machine, X, y, columns, pairs)
    rows.append(("the test rows' own shift, hyper-parameters of all", *_summary(plain)))
    print(f"{'balanced error rate of the outer loop':<50}{'mean':>8}{'stderr':>9}{'paper':>9}")
    for (name, mean, stderr), paper in zip(rows, (PAPER, PAPER, 0.1740, 0.1740, PAPER), strict=True):
        print(f"{name:<50}{mean:>8.4f}{stderr:>9.4f}{paper:>9.4f}")
    print(REMARKS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="part", help=f"some of {', '.join(PARTS)}; default: all")
    parser.add_argument("--quick", action="store_true", help="small problems and few splits")
    add_data(parser)
    arguments = parser.parse_args()
    for part in arguments.parts:
        if part not in PARTS:
            parser.error(f"part must be one of {', '.join(PARTS)}, got {part!r}")
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    table = Table()
    functions = {"searches": searches, "starts": starts, "splits": splits, "ada": ada}
    for part in arguments.parts or PARTS:
        functions[part](table, arguments.data, arguments.quick)
    sys.exit(1 if table.failed else 0)


if __name__ == "__main__":
    main()
