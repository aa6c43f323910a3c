"""Exact leave-one-out of support vector machines (Franc, Laskov and Mueller 2008): Tables 2 and 3, Figure 1.

    python scripts/reproduce/bound.py --data DIR [--quick] [--jobs 2] [--splits 100] [--out DIR]
        [--full-epsilon]

Table 2: C, and the width of a Gaussian kernel, by the least mean leave-one-out error over the first five
training splits, on the paper's grids, or as medians of what each of the five prefers; then the error on the
test rows of every split. The leave-one-out is the exact path. Table 3: kernel columns and CPU seconds of the
SMO of the paper without and with its dual bound, for some rows, drawn at random, of the first training split;
and of the exact path for the same rows.
Figure 1: leave-one-out error and cost against epsilon with an exact full machine, and with --full-epsilon
also with every machine, the full one too, solved to epsilon from zero, as in the paper.
"""

import math
import statistics
import time
from argparse import Namespace
from pathlib import Path
from typing import Any, NamedTuple

import ida
import numpy as np
import torch
from experiment import Piece, mean_and_error, options, pictures, run, write_picture, write_table
from torch import Tensor

import torchloo as tl

KINDS = ("linear", "RBF")
SELECTED_ON = 5
C_LINEAR = [10.0**i for i in range(-2, 3)]
C_RBF = [10 ** (i / 7 * math.log10(500)) for i in range(8)]
RATES = [2 ** (-11 * i / 7) for i in range(8)]  # printed without the minus: heart's error would be 41 %

# Leave-one-out error; test error, its standard deviation; in %, linear and RBF.
TABLE_2 = {
    "banana": ((41.40, 47.80, 4.58), (8.55, 10.43, 0.44)),
    "breast_cancer": ((27.20, 29.00, 4.83), (23.00, 26.06, 4.91)),
    "diabetis": ((22.05, 23.44, 1.70), (21.50, 23.27, 1.65)),
    "flare_solar": ((32.85, 32.33, 1.82), (32.31, 34.04, 2.04)),
    "german": ((24.91, 24.06, 2.22), (23.71, 23.61, 2.23)),
    "heart": ((14.24, 15.22, 3.22), (13.53, 15.55, 3.36)),
    "image": ((15.48, 15.34, 0.84), (2.94, 3.15, 0.63)),
    "ringnorm": ((23.45, 24.59, 0.67), (1.10, 1.60, 0.11)),
    "splice": ((15.36, 16.20, 0.59), (10.60, 10.95, 0.64)),
    "thyroid": ((8.43, 10.16, 2.60), (2.29, 4.87, 2.28)),
    "titanic": ((21.20, 23.01, 4.62), (15.47, 23.99, 3.47)),
    "twonorm": ((2.50, 2.90, 0.27), (2.25, 2.59, 0.18)),
    "waveform": ((10.90, 12.95, 0.54), (8.85, 10.50, 0.43)),
}
# Without / with the bound: seconds, kernel columns; and Prec in %; linear and RBF.
TABLE_3 = {
    "banana": ((9.9, 12.3, 56.9), (5.1, 6.1, 81.9)),
    "breast_cancer": ((2.0, 2.1, 64.2), (1.5, 1.6, 55.6)),
    "diabetis": ((6.3, 7.2, 93.1), (1.4, 1.5, 54.8)),
    "flare_solar": ((1.0, 1.1, 59.3), (2.2, 2.4, 50.3)),
    "german": ((4.2, 4.4, 82.0), (1.1, 1.1, 31.3)),
    "heart": ((1.9, 2.1, 83.1), (1.1, 1.2, 50.3)),
    "image": ((12.9, 14.9, 98.3), (2.9, 3.1, 75.3)),
    "ringnorm": ((2.8, 3.0, 91.8), (1.4, 1.4, 39.1)),
    "splice": ((1.5, 1.5, 74.5), (1.0, 1.0, 14.6)),
    "thyroid": ((3.2, 5.2, 66.0), (1.5, 2.4, 80.3)),
    "titanic": ((1.0, 1.0, 17.6), (5.7, 2.7, 50.2)),
    "twonorm": ((1.9, 2.2, 89.1), (1.0, 1.0, 22.2)),
    "waveform": ((2.4, 2.6, 90.7), (1.1, 1.1, 30.9)),
}


EPSILON = 1e-3
M, USEFUL = 10, 0.5  # the efficiency test of the paper's section 4


def machine(C: Tensor | float, rate: Tensor | float | None) -> tl.SVC:
    """The paper's machine, linear where there is no rate; or several of them as a batch."""
    return tl.SVC(tl.kernels.Linear() if rate is None else tl.kernels.RBF.from_rate(rate), C)


# Table 2


def leave_one_out(data: Path, name: str, C: float, rates: list[float | None]) -> dict[str, Any]:
    """Errors in % by the exact path, one list over the first training splits for each rate.

    Only errors are asked for: decision values, which `tl.select` would hand to a criterion, take up to 100
    times as long where a kernel is almost constant.
    """
    whole = ida.load(data, name, SELECTED_ON)
    trained_on = [whole.rows(split)[:2] for split in range(len(whole.splits))]
    start = time.process_time()
    errors = [
        [100 * machine(C, rate).loo(X, y, values=False).errors.double().mean().item() for X, y in trained_on]
        for rate in rates
    ]
    return {"errors": errors, "seconds": time.process_time() - start}


def test_errors(data: Path, name: str, C: float, rate: float | None, splits: list[int]) -> list[float]:
    """Error rates in % on the test rows of some splits."""
    whole = ida.load(data, name)
    errors = []
    for split in splits:
        X, y, X_test, y_test = whole.rows(split)
        outputs = machine(C, rate).fit(X, y)(X_test)
        errors.append(100 * ((outputs >= 0) != (y_test > 0)).double().mean().item())
    return errors


class Choice(NamedTuple):
    """What was selected for a set and a kernel."""

    errors: list[float]
    """Leave-one-out errors in each training split."""
    C: float
    rate: float | None
    ties: int
    """Points of the grid with the same mean error."""
    each_best: float
    """The mean of the least error in every split, were each allowed a machine of its own."""
    median: tuple[float, float | None]
    """Medians of C and rate of those machines, of several in a split the first."""
    seconds: float
    """CPU seconds of all leave-one-out errors of the grid."""


def selected(args: Namespace) -> dict[tuple[str, str], Choice]:
    """The points of the grids with the least mean leave-one-out error, the first of several."""
    grids: dict[str, tuple[list[float], list[float | None]]]
    grids = {"linear": (C_LINEAR, [None]), "RBF": (C_RBF, list(RATES))}
    pieces = {
        (name, kind, C): Piece(f"loo {name} {kind} C {C:.4g}", leave_one_out, (args.data, name, C, rates))
        for name in by_cost(args)
        for kind, (boxes, rates) in grids.items()
        for C in boxes
    }
    found = run(list(pieces.values()), args)
    return {(name, kind): _best(kind, pieces, found, name) for name in by_cost(args) for kind in KINDS}


def _best(kind: str, pieces: Any, found: Any, name: str) -> Choice:
    """What is selected from all points of a grid."""
    own = {key[2]: found[piece.name] for key, piece in pieces.items() if key[:2] == (name, kind)}
    rates = [None] if kind == "linear" else RATES
    points = [
        (each, C, rate)
        for C, result in own.items()
        for each, rate in zip(result["errors"], rates, strict=True)
    ]
    errors, C, rate = min(points, key=lambda point: sum(point[0]))
    ties = sum(abs(sum(point[0]) - sum(errors)) < 1e-9 for point in points)
    each = [min(points, key=lambda point: point[0][split]) for split in range(len(errors))]
    least = [point[0][split] for split, point in enumerate(each)]
    median = (
        statistics.median(point[1] for point in each),
        None if rate is None else statistics.median(point[2] for point in each),
    )
    seconds = sum(result["seconds"] for result in own.values())
    return Choice(errors, C, rate, ties, sum(least) / len(least), median, seconds)


def by_cost(args: Namespace) -> list[str]:
    """The sets, those that take most of the time last."""
    if args.quick:
        return list(ida.SMALL)
    return sorted(
        ida.SETS, key=lambda name: (name in ida.LARGE, name in ("german", "flare_solar", "diabetis"))
    )


def table_2(args: Namespace, choices: dict[tuple[str, str], Choice]) -> None:
    """Leave-one-out and test error of the selected machines."""
    tests = {}
    for (name, kind), choice in choices.items():
        count = len(ida.load(args.data, name, args.splits).splits)
        for C, rate in dict.fromkeys([(choice.C, choice.rate), choice.median]):
            point = f"C {C:.4g}" + ("" if rate is None else f" rate {rate:.4g}")
            for first in range(0, count, 10):
                numbers = list(range(first, min(first + 10, count)))
                called = f"test {name} {kind} {point} splits {numbers[0]} to {numbers[-1]}"
                tests[name, kind, C, rate, first] = Piece(
                    called, test_errors, (args.data, name, C, rate, numbers)
                )
    found = run(list(tests.values()), args)
    held_out, tested = [], []
    for name, kind in [(name, kind) for name in ida.SETS for kind in KINDS if (name, kind) in choices]:
        choice, (loo, test, deviation) = choices[name, kind], TABLE_2[name][KINDS.index(kind)]
        predefined = ida.load(args.data, name, args.splits).predefined
        mean, error = mean_and_error(choice.errors)
        rows = sum(len(train) for train, _ in ida.load(args.data, name, SELECTED_ON).splits)
        row = {"": f"{name}, {kind}", "paper": loo, "each split's best": choice.each_best}
        row |= {"difference, rows": round((choice.each_best - loo) * rows / 100), "of rows": rows}
        row |= {"best of all splits": mean, "s.e.": error, "C": choice.C, "rate": choice.rate}
        held_out.append(row | {"ties": choice.ties, "predefined": min(SELECTED_ON, predefined)})
        paper_error = deviation / math.sqrt(20 if name in ida.LARGE else 100)
        row = {"": f"{name}, {kind}", "paper": test, "paper's s.e.": paper_error}
        for title, point in (("best", (choice.C, choice.rate)), ("median", choice.median)):
            own = [piece for key, piece in tests.items() if key[:4] == (name, kind, *point)]
            mean, error = mean_and_error([e for piece in own for e in found[piece.name]])
            row |= {title: mean, f"{title}, s.e.": error}
            row |= {f"{title}, difference / s.e.": (mean - test) / math.hypot(error, paper_error)}
        row |= {"median C": choice.median[0], "median rate": choice.median[1]}
        splits = len(ida.load(args.data, name, args.splits).splits)
        tested.append(row | {"splits": splits, "predefined": predefined})
    write_table("bound_table2_loo", held_out, args)
    write_table("bound_table2_test", tested, args)


# Table 3


def drawn(data: Path, name: str, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """X and y of the first training split, and a mask of so many of its rows, drawn at random."""
    X, y, _, _ = ida.load(data, name, 1).rows(0)
    rows = torch.zeros(len(y), dtype=torch.bool)
    rows[torch.randperm(len(y), generator=torch.Generator().manual_seed(0))[:count]] = True
    return X, y, rows


def smo_costs(data: Path, name: str, kind: str, count: int, most_rounds: int) -> dict[str, Any]:
    """Kernel columns and CPU seconds for so many rows of the first training split, over the whole grid.

    Of the SMO without the bound, with it, and of the exact path. A problem that takes more than most_rounds
    pairs is cut, and its columns count up to there.
    """
    X, y, rows = drawn(data, name, count)
    if kind == "linear":
        batch = machine(torch.tensor(C_LINEAR, dtype=X.dtype), None)
    else:
        points = torch.tensor([(C, rate) for C in C_RBF[::2] for rate in RATES[::2]], dtype=X.dtype)
        batch = machine(points[:, 0], points[:, 1:])
    T = len(batch.C)
    X, y = X.expand(T, -1, -1), y.expand(T, -1)
    costs: dict[str, Any] = {}
    for title, bound in (("standard", False), ("proposed", True)):
        smo = tl.svm.SMOOptions(
            working=2, bound=bound, gap_ball=False, trials=M, useful=USEFUL, most_rounds=most_rounds
        )
        start = time.process_time()
        held_out = batch.loo(X, y, method="smo", values=False, epsilon=EPSILON, rows=rows, smo=smo)
        seconds = time.process_time() - start
        by = held_out.resolved_by[:, rows]
        opened, proved, cut = (
            int(torch.isin(by, torch.tensor(codes)).sum()) for codes in (OPEN, PROVED, CUT)
        )
        columns = int(held_out.kernel_columns[:, rows].sum())
        costs[title] = {"seconds": seconds, "columns": columns, "open": opened, "proved": proved, "cut": cut}
        costs[title]["errors"] = held_out.errors[:, rows].sum(1).tolist()
    start = time.process_time()
    held_out = batch.loo(X, y, values=False, rows=rows)
    costs["exact"] = {
        "seconds": time.process_time() - start,
        "errors": held_out.errors[:, rows].sum(1).tolist(),
    }
    return costs


RESOLVED = list(tl.svm.RESOLVED_BY)
PROVED = [RESOLVED.index("dual bound")]
CUT = [RESOLVED.index("not solved: out of rounds")]
OPEN = [*PROVED, *CUT, RESOLVED.index("epsilon-KKT")]


def table_3(args: Namespace, choices: dict[tuple[str, str], Choice]) -> None:
    """The dual bound's gain, and the exact path beside it."""
    count = 30
    most_rounds = {kind: 1000 if args.quick else full for kind, full in (("linear", 10_000), ("RBF", 2000))}
    pieces = {
        (name, kind): Piece(
            f"smo {name} {kind}, {count} rows, {most_rounds[kind]} rounds",
            smo_costs,
            (args.data, name, kind, count, most_rounds[kind]),
        )
        for name in by_cost(args)
        for kind in KINDS
    }
    found = run(list(pieces.values()), args)
    for kind in KINDS:
        rows = []
        for name in [name for name in ida.SETS if (name, kind) in pieces]:
            costs, paper = found[pieces[name, kind].name], TABLE_3[name][KINDS.index(kind)]
            standard, proposed, exact = costs["standard"], costs["proposed"], costs["exact"]
            rows.append({
                "": name,
                "time x, paper": paper[0],
                "time x": standard["seconds"] / proposed["seconds"],
                "columns x, paper": paper[1],
                "columns x": standard["columns"] / max(1, proposed["columns"]),
                "Prec %, paper": paper[2],
                "Prec %": 100 * proposed["proved"] / max(1, proposed["open"]),
                "open": standard["open"],
                "cut": f"{standard['cut']}, {proposed['cut']}",
                "columns": standard["columns"],
                "standard, s": standard["seconds"],
                "standard / exact path": standard["seconds"] / exact["seconds"],
                "exact path, all 5 splits, s": choices[name, kind].seconds,
            })  # fmt: skip
        write_table(f"bound_table3_{kind}", rows, args)


# Figure 1


def full_machine(K: np.ndarray, y: np.ndarray, C: float, epsilon: float) -> tuple[np.ndarray, float, int]:
    """alpha, bias and kernel columns of the SMO of Keerthi et al. 2001 from zero to epsilon."""
    alpha, F, steps = np.zeros(len(y)), -y.copy(), 0
    while True:
        up = np.where(y > 0, alpha < C, alpha > 0)
        low = np.where(y > 0, alpha > 0, alpha < C)
        i, j = np.where(up, F, np.inf).argmin(), np.where(low, F, -np.inf).argmax()
        if F[j] - F[i] <= epsilon or steps == MOST_STEPS:
            return alpha, -(F[i] + F[j]) / 2, 2 * steps
        room_i = C - alpha[i] if y[i] > 0 else alpha[i]
        room_j = alpha[j] if y[j] > 0 else C - alpha[j]
        curvature = max(K[i, i] + K[j, j] - 2 * K[i, j], 1e-12)
        step = min((F[j] - F[i]) / curvature, room_i, room_j)
        alpha[i] = np.clip(alpha[i] + y[i] * step, 0, C)
        alpha[j] = np.clip(alpha[j] - y[j] * step, 0, C)
        F += step * (K[i] - K[j])
        steps += 1


EPSILONS = (1e-3, 1e-2, 1e-1, 3e-1, 1.0)
MOST_STEPS, MOST_ROUNDS = 100_000, 5_000  # pairs of the full machine, and of one without a row


def to_epsilon(
    data: Path, name: str, C: float, rate: float, epsilon: float, count: int, full_too: bool
) -> dict[str, Any]:
    """Leave-one-out errors of some rows by machines solved to epsilon, and what they cost.

    With full_too everything is solved to epsilon from zero, Algorithm 1 of the paper: its checks believe the
    full machine, as far from the optimum as it may be. Otherwise the full machine is exact, and those without
    a row start from it: what `method="smo"` does.
    """
    X, y, rows = drawn(data, name, count)
    svc, opened, columns = machine(C, rate), rows, 0
    smo = tl.svm.SMOOptions(working=2, seed=not full_too, most_rounds=MOST_ROUNDS)
    errs = torch.zeros_like(rows)
    if full_too:
        K = svc.kernel(X).detach()
        found, bias, columns = full_machine(K.numpy(), y.numpy(), C, epsilon)
        alpha = torch.from_numpy(found)
        wrong = y * (K @ (alpha * y) + bias) < 0
        errs, opened = (alpha > 0) & wrong, rows & (alpha > 0) & ~wrong
    cut = 0
    if bool(opened.any()):
        held_out = svc.loo(X, y, method="smo", epsilon=epsilon, rows=opened, smo=smo)
        errs = torch.where(opened, held_out.errors, errs)
        columns += int(held_out.kernel_columns[opened].sum())
        cut = int((held_out.resolved_by[opened] == CUT[0]).sum())
    return {"errors": 100 * errs[rows].double().mean().item(), "columns": columns, "cut": cut}


def exact_errors(data: Path, name: str, C: float, rate: float, count: int) -> float:
    """The same errors by the exact path."""
    X, y, rows = drawn(data, name, count)
    return 100 * machine(C, rate).loo(X, y, values=False, rows=rows).errors[rows].double().mean().item()


def figure_1(args: Namespace) -> None:
    """Errors of the machine with the least, and kernel columns of all, against epsilon."""
    sets = ("thyroid", "titanic") if args.quick else ("banana", "german", "image")
    count, epsilons = (30, EPSILONS[1::3]) if args.quick else (50, EPSILONS)
    grid = [(C, rate) for C in C_RBF[1:5:3] for rate in RATES[1:4:2]]
    ways = (False, True) if args.full_epsilon else (False,)
    exact = {
        (name, point): Piece(
            f"exact {name} C {point[0]:.4g} rate {point[1]:.4g}, {count} rows",
            exact_errors,
            (args.data, name, *point, count),
        )
        for name in sets
        for point in grid
    }
    pieces = {
        (name, way, epsilon, point): Piece(
            f"epsilon {epsilon:.4g} {name} C {point[0]:.4g} rate {point[1]:.4g}, {count} rows, "
            + FULL_MACHINE[way],
            to_epsilon,
            (args.data, name, *point, epsilon, count, way),
        )
        for name in sets
        for way in ways
        for epsilon in epsilons
        for point in grid
    }
    results = run([*exact.values(), *pieces.values()], args)
    table = []
    figure, axes = pictures(2, len(sets), size=(4.0, 3.0))
    for (top, bottom), name in zip(axes.T, sets, strict=True):
        best = min(grid, key=lambda point: results[exact[name, point].name])
        for way in ways:
            rows = []
            for epsilon in epsilons:
                own = {point: results[pieces[name, way, epsilon, point].name] for point in grid}
                row = {"": name, "full machine": FULL_MACHINE[way], "epsilon": epsilon}
                row |= {"selected at epsilon, %": min(each["errors"] for each in own.values())}
                row |= {"selected exactly, %": own[best]["errors"]}
                row |= {"exact, %": results[exact[name, best].name]}
                row |= {key: sum(each[key] for each in own.values()) for key in ("columns", "cut")}
                rows.append(row)
            table += rows
            called, color = f"full machine {FULL_MACHINE[way]}", "tab:red" if way else "tab:blue"
            for column, style in (("selected at epsilon, %", "o-"), ("selected exactly, %", "x--")):
                label = f"{called}, {column[:-3]}"
                top.semilogx(epsilons, [row[column] for row in rows], style, color=color, label=label)
            bottom.loglog(epsilons, [row["columns"] for row in rows], "o-", color=color, label=called)
        top.axhline(results[exact[name, best].name], color="grey", linewidth=1, label="exact path")
        top.set(title=name, ylim=(0, None))
        bottom.set(xlabel="$\\varepsilon$")
    axes[0, 0].set(ylabel="leave-one-out error, %")
    axes[1, 0].set(ylabel="kernel columns")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), ncols=3, loc="outside lower center", fontsize=8)
    write_table("bound_figure1", table, args)
    write_picture("bound_figure1", figure, args)


FULL_MACHINE = {False: "exact", True: "to epsilon"}


def main() -> None:
    args = options(
        __doc__,
        splits=100,
        quick_splits=10,
        flags={"--full-epsilon": "Figure 1 also with the full machine solved to epsilon, as in the paper"},
    )
    choices = selected(args)
    table_2(args, choices)
    table_3(args, choices)
    figure_1(args)


if __name__ == "__main__":
    main()
