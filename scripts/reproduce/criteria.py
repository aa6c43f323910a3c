"""Cawley (2006), "Leave-one-out cross-validation based model selection criteria for weighted LS-SVMs".

Tables II to VI and Figure 1 on ADA, HIVA and SYLVA: five criteria, with and without weights in training and
in selection, and five kernels, 70 experiments in all. Every experiment chooses its hyper-parameters again in
every split, shifts its outputs by the threshold that is best in leave-one-out, and is tested on the tenth of
the rows that was left out.

    python scripts/reproduce/criteria.py --quick            # 2 splits, one kernel parameter, a minute
    python scripts/reproduce/criteria.py                    # 10 splits: each row is tested on once
    python scripts/reproduce/criteria.py --splits 100       # as many as the paper has

All experiments with one kernel and the same training weights differ only in how they read the same held-out
outputs: these come from one path for each kernel parameter, and serve five criteria.
"""

import functools
import math
from typing import Any, NamedTuple

import numpy as np
import torch
from experiment import Piece, beside, options, pictures, run, write_picture, write_table
from torch import Tensor

import torchloo as tl

SETS = ("ada", "hiva", "sylva")
KERNELS = ("Linear", "Quadratic", "Cubic", "Boolean", "RBF")
CRITERIA = {
    "PRESS": tl.criteria.press,
    "HINGE": tl.criteria.hinge,
    "HINGE2": tl.criteria.squared_hinge,
    "WMW": tl.criteria.wmw,
    "ERATE": tl.criteria.error_rate,
}


class Experiment(NamedTuple):
    """Which criterion chooses, and where errors of the two classes weigh alike."""

    criterion: str
    weighted_training: bool
    weighted_selection: bool

    def __str__(self) -> str:
        marks = "".join("w" if on else "-" for on in self[1:])
        return f"{self.criterion} {marks}"


EXPERIMENTS = [
    Experiment(criterion, training, selection)
    for criterion in CRITERIA
    for training, selection in ((False, False), (True, False), (True, True))
    if not (criterion == "WMW" and selection)  # which has no weights
]

# The paper's Table III by set: five kernels for each experiment, in its order. A minus stands where our scan
# of the paper cannot be read (rows 10, 27, 28 and 62).
TABLE_3 = {
    "ada": """
        .1766 .1687 .1701 .1649 .1676   .1740 .1740 .1685 .1763 .1754   .1757 .1691 .1681 .1736 .1670
        .1880 .1721 .1725 .1723 .1751   .1876 .1765 .1737 .1976 .1970   .1972 .1699 .1738 .1733 .1716
        .1783 .1667 .1701 .1689 .1686   .1801 .1667 .1661 .1929 .1818   .1747 .1694 .1670 .1717 .1681
        .1691 .1700 .1688 .1672 .1692   .1769 .1727 .1675 .1746 .1714
        .1748 .1681 .1682 .1709 .1685   .1821   -   .1716 .1827 .1824   .1765 .1728 .1684 .1721 .1710""",
    "hiva": """
        .2727 .2769 .2549 .2622 .2530   .2724 .2848 .2658 .2654 .2754   .2830 .2965 .2654 .2828 .2972
        .2906 .2741 .2551 .2563 .2677   .2824 .2740 .2549 .2615 .2817   .2699   -     -   .2753 .2693
        .2670 .2628 .2581 .2603 .2613   .2723 .2689 .2639 .2649 .2767   .2797 .2863 .2588 .2936 .2860
        .2749 .2621 .2786 .2660 .2675   .2740 .2632 .2784 .2638 .2735
        .2745 .2627 .2665 .2571 .2711   .2735   -   .2624 .2628 .2797   .2745 .2742 .2740 .2807 .2787""",
    "sylva": """
        .0156 .0098 .0100 .1155 .1160   .0124 .0101 .0102 .1151   -     .0236 .0098 .0106 .1153 .1148
        .0670 .0106 .0099 .1150 .1153   .0477 .0115 .0099 .1159 .1159   .0721   -     -   .1155 .1153
        .0155 .0114 .0094 .1152 .1150   .0130 .0107 .0103 .1153 .1152   .0275 .0101 .0096 .1149 .1153
        .0109 .0091 .0102 .1167 .1152   .0122 .0095 .0097 .1159 .1160
        .0112 .0096 .0107 .1159 .1157   .0844   -   .0106 .1160 .1155   .0116 .0095 .0101 .1148 .1159""",
}
FACTORS = (*CRITERIA, "Training", "Selection", *KERNELS)
TABLE_4 = {
    "ada": "-.4729 .6871 -.2796 -.6645 -.2087 .8832 -.7922 .5679 -.6471 -.7513 .0629 -.1711",
    "hiva": "-.1077 -.3774 -.4189 -.1184 -.3169 .4943 .8001 .1422 .0343 -.8821 -.6189 -.0149",
    "sylva": "-.0615 .1203 -.0554 -.0830 .0165 .0420 -.0236 -.5275 -.9257 -.9274 1.1598 1.1577",
}
# Tables V and VI: balanced errors in training and in the test, the guess of each table, its test score.
TABLES_5_AND_6 = {
    "ada": {"train": 0.1490, "test": 0.1845, "guess": (0.1683, 0.1742), "score": (0.2007, 0.1947)},
    "hiva": {"train": 0.0180, "test": 0.2804, "guess": (0.2475, 0.2776), "score": (0.3131, 0.2814)},
    "sylva": {"train": 0.0028, "test": 0.0067, "guess": (0.0048, 0.0065), "score": (0.0085, 0.0067)},
}
# The paper's test parts have ten times as many rows as the training parts that ours are folds of.
TEST_PART_TOO = math.sqrt(1 + 1 / 10)  # the standard errors of both sides in units of ours
TABLE_2 = {"ada": (46, 72.1), "hiva": (1617, 91.8), "sylva": (211, 76.7)}  # columns that vary, % of zeros


# The data, as section III says.

# Columns of ADA, known by their values (ages up to 90, years of education up to 16, gains up to 99999): the
# challenge of 2007, whose files these are, has other columns at the numbers that the paper names.
HOURS = 1
WEIGHT = 14
EDUCATION = 17
AGE = 19
LOSS = 23
GAIN = 29


class Rows(NamedTuple):
    """What one split trains on and tests on."""

    X: Tensor
    """(n, d)."""
    y: Tensor
    """(n,)."""
    balanced: Tensor
    """Weights of eq. 18, (n,), of classes counted before rows are set aside."""
    X_test: Tensor
    y_test: Tensor
    ruled_out: Tensor
    """Test rows that are negative by a feature that no positive training row has, bool (m,)."""


@functools.cache
def read(data: Any, name: str) -> tuple[Tensor, Tensor]:
    """All rows of a set: X (n, d) as it is, y (n,)."""
    with np.load(data / "wcci2006" / f"{name}.npz", allow_pickle=False) as file:
        return torch.from_numpy(file["X"]).double(), torch.from_numpy(file["y"]).double()


def split_rows(data: Any, name: str, form: str, number: int) -> Rows:
    """Split `number` of a set, pre-processed by what its training rows show.

    Args:
        form: "paper", or another reading of section III, one of OTHER_FORMS.
    """
    X, y = read(data, name)
    if name == "ada" and form != "raw":
        X = ada_features(X, EDUCATION if form == "log education" else WEIGHT)
    X = X[:, X.amax(0) > X.amin(0)]
    generator = torch.Generator().manual_seed(number // 10)
    train, test = tl.splits.k_fold(len(y), 10, generator=generator)[number % 10]
    continuous = ((X != 0) & (X != 1)).any(0)
    never = ~(X[train][y[train] > 0] != 0).any(0)  # features of no positive row, (d,)
    negative = (X[:, never] != 0).any(1) & torch.tensor(name == "sylva" and form == "paper")
    if continuous.any():
        deviation, mean = torch.std_mean(X[train], 0)
        X = torch.where(continuous, (X - mean) / deviation, X)
    kept = ~negative[train]
    balanced = tl.balanced_weight(y[train])
    return Rows(X[train][kept], y[train][kept], balanced[kept], X[test], y[test], negative[test])


def ada_features(X: Tensor, second_log: int) -> Tensor:
    """ADA with logarithms of two columns, and gains and losses as whether they exceed a threshold."""
    X = X.clone()
    for column in (AGE, second_log):
        X[:, column] = X[:, column].log()
    X[:, GAIN] = (X[:, GAIN] > 44).double()
    X[:, LOSS] = (X[:, LOSS] > 0).double()  # the paper's number is missing in our scan
    return X


# Machines and their hyper-parameters.


class Effort(NamedTuple):
    """How much is computed."""

    steps: int
    """Kernel parameters that are tried, a factor of 4 apart."""
    basis: int
    """Rows in the basis of a sparse machine."""


FULL = Effort(steps=3, basis=300)
QUICK = Effort(steps=1, basis=150)


class Candidate(NamedTuple):
    """A kernel, and features whose inner products it is: of all of its feature space, or of a basis."""

    kernel: Any
    X: Tensor
    """Features of the rows to train on, (n, p)."""
    X_test: Tensor
    regs: Tensor
    """Regularisations that are tried, (R,)."""


def candidates(kernel: str, rows: Rows, effort: Effort, number: int) -> list[Candidate]:
    """All kernel parameters that are tried: offsets and rates are relative to the mean of |x|^2.

    The linear kernel is its own features where these are few. All others are sparse LS-SVMs on the same
    random rows, `tl.SparseLSSVM(kernel, reg, basis)`, whose features are computed once for all experiments.
    """
    size = rows.X.square().sum(1).mean().item()
    drawn = torch.randperm(len(rows.X), generator=torch.Generator().manual_seed(number))
    basis = rows.X[drawn[: effort.basis]]
    steps = [1.0, 0.25, 0.0625][: effort.steps] if kernel != "Linear" else [1.0]
    made = []
    for step in steps:
        own = kernel_of(kernel, step, size)
        regs = own.diagonal(rows.X).mean() * 10.0 ** torch.arange(-4.0, 2.6, 0.5, dtype=torch.float64)
        if kernel == "Linear" and basis.shape[1] <= effort.basis:
            made.append(Candidate(own, rows.X, rows.X_test, regs))
        else:
            features = [basis_features(own, X, basis) for X in (rows.X, rows.X_test)]
            made.append(Candidate(own, *features, regs))
    return made


def kernel_of(kernel: str, step: float, size: float) -> Any:
    """A kernel whose offset is so many times the mean of |x|^2, or whose rate so many times its inverse."""
    if kernel == "Linear":
        return tl.kernels.Linear()
    if kernel == "Boolean":
        return tl.kernels.Boolean(math.expm1(step / size))  # exp(step x.z / size)
    if kernel == "RBF":
        return tl.kernels.RBF.from_rate(step / size)
    return tl.kernels.Polynomial(degree=2 if kernel == "Quadratic" else 3, offset=step * size)


def basis_features(kernel: Any, X: Tensor, basis: Tensor) -> Tensor:
    """Features of a sparse LS-SVM: their inner products are those of projections on the basis."""
    w, V = torch.linalg.eigh(kernel(basis))
    kept = w > len(w) * torch.finfo(w.dtype).eps * w[-1]
    return kernel(X, basis) @ (V[:, kept] / w[kept].sqrt())


# One split: all experiments with one kernel.


@torch.no_grad()
def one_split(data: Any, name: str, form: str, kernel: str, number: int, effort: Effort) -> dict[str, Any]:
    """What every experiment with a kernel does in a split: {experiment: counts and rates}."""
    rows = split_rows(data, name, form, number)
    tried = candidates(kernel, rows, effort, number)
    outcome = {}
    for training in (False, True):
        weight = rows.balanced if training else None
        paths = [tl.LSSVM(tl.kernels.Linear()).path(one.X, rows.y, one.regs, weight=weight) for one in tried]
        tested: dict[tuple[int, int], dict[str, Any]] = {}
        for experiment in EXPERIMENTS:
            if experiment.weighted_training == training:
                values = torch.stack([score(path, experiment, rows) for path in paths])  # (P, R)
                best, reg = divmod(int(values.argmin()), values.shape[1])
                if (best, reg) not in tested:
                    held_out = entry(paths[best], reg, rows)
                    tested[best, reg] = tested_machine(tried[best], reg, held_out, rows, weight)
                edge = reg in (0, values.shape[1] - 1)
                outcome[str(experiment)] = tested[best, reg] | {"edge": edge}
    return outcome


@torch.no_grad()
def dense_split(data: Any, name: str, kernel: str, number: int, effort: Effort) -> dict[str, Any]:
    """PRESS without weights: the machine that it chooses on the basis, and the dense one like it."""
    rows = split_rows(data, name, "paper", number)
    tried = candidates(kernel, rows, effort, number)
    paths = [tl.LSSVM(tl.kernels.Linear()).path(one.X, rows.y, one.regs) for one in tried]
    values = torch.stack([tl.criteria.press(path) for path in paths])
    best, reg = divmod(int(values.argmin()), values.shape[1])
    dense = tl.LSSVM(tried[best].kernel, reg=tried[best].regs[reg].item()).loo(rows.X, rows.y)
    return {
        form: {
            "press": tl.criteria.press(held_out, weight=None).item(),
            "wmw": tl.criteria.wmw(held_out).item(),
            "loo": weighted_error(held_out.outputs + tl.threshold(held_out, tl.criteria.error_rate), rows),
        }
        for form, held_out in (
            ("basis", entry(paths[best], reg, rows)),
            ("dense", dense._replace(weight=rows.balanced)),
        )
    }


def score(path: tl.HeldOut, experiment: Experiment, rows: Rows) -> Tensor:
    """The criterion of an experiment along a path, (R,)."""
    criterion: Any = CRITERIA[experiment.criterion]
    if experiment.criterion == "WMW":
        return criterion(path)
    return criterion(path, weight=rows.balanced if experiment.weighted_selection else None)


def entry(path: tl.HeldOut, reg: int, rows: Rows) -> tl.HeldOut:
    """The held-out outputs of one regularisation of a path, the classes weighing alike."""
    one = {name: value[reg] for name, value in path._asdict().items() if isinstance(value, Tensor)}
    return path._replace(**one | {"targets": rows.y, "weight": rows.balanced})


def tested_machine(
    candidate: Candidate,
    number: int,
    held_out: tl.HeldOut,
    rows: Rows,
    weight: Tensor | None,
) -> dict[str, Any]:
    """Errors of a machine, regularisation `number` of those tried: in the test, in training, held out."""
    reg = candidate.regs[number].item()
    machine = tl.LSSVM(tl.kernels.Linear(), reg=reg)
    machine.fit(candidate.X, rows.y, weight)
    shift = tl.threshold(held_out, tl.criteria.error_rate)
    outputs = machine(candidate.X_test)
    ruled = torch.where(rows.ruled_out, -torch.inf, outputs + shift)
    left = ~rows.ruled_out
    return {
        "kernel": repr(candidate.kernel),
        "reg": reg,
        "of": [int((rows.y_test < 0).sum()), int((rows.y_test > 0).sum())],
        "wrong": wrong(ruled, rows.y_test),
        "without shift": wrong(torch.where(rows.ruled_out, -torch.inf, outputs), rows.y_test),
        "without rule": wrong(outputs + shift, rows.y_test),
        "of rows left": [int((left & (rows.y_test < 0)).sum()), int((left & (rows.y_test > 0)).sum())],
        "rows left": wrong((outputs + shift)[left], rows.y_test[left]),
        "loo": weighted_error(held_out.outputs + shift, rows),
        "train": weighted_error(machine(candidate.X) + shift, rows),
    }


def wrong(outputs: Tensor, y: Tensor) -> list[int]:
    """How many negative and how many positive rows are on the wrong side."""
    positive = outputs >= 0
    return [int((positive & (y < 0)).sum()), int((~positive & (y > 0)).sum())]


def weighted_error(outputs: Tensor, rows: Rows) -> float:
    """The balanced error rate of all training rows, those that were set aside counting as right."""
    mistaken = (outputs >= 0) != (rows.y > 0)
    positives = (rows.y > 0).sum()  # no positive row is set aside, and weighs l / (2 l+)
    every = 2 * positives * rows.balanced[rows.y > 0][0]
    return ((mistaken * rows.balanced).sum() / every).item()


# Tables.


def balanced_error(counts: list[list[int]], of: list[list[int]]) -> float:
    """The mean over splits of the mean of the two rates."""
    rates = torch.tensor(counts, dtype=torch.float64) / torch.tensor(of)
    return rates.mean().item()


def sampling_error(counts: list[list[int]], of: list[list[int]]) -> float:
    """Standard error of a balanced error rate, that of sampling the rows: ten splits test each of them once.

    Of one class the binomial one, with one error more than were seen, as none seen is not none to come.
    """
    tested = torch.tensor(of).sum(0)
    rates = (torch.tensor(counts, dtype=torch.float64).sum(0) + 1) / tested
    repeats = max(1, len(of) // 10)
    variance = rates * (1 - rates) / (tested / repeats)
    return (variance.sum().sqrt() / 2).item()


class Results:
    """What the pieces gave, by set, kernel and experiment."""

    def __init__(self, args: Any, results: dict[str, Any]) -> None:
        self.args, self.results = args, results

    def splits(self, name: str, kernel: str, experiment: Experiment, form: str = "paper") -> list[Any]:
        """One entry for each split."""
        pieces = [piece_name(name, form, kernel, number) for number in range(self.args.splits)]
        return [self.results[piece][str(experiment)] for piece in pieces]

    def estimate(
        self,
        name: str,
        kernel: str,
        experiment: Experiment,
        what: str = "wrong",
        form: str = "paper",
    ) -> tuple[float, float]:
        """The balanced error rate and its standard error."""
        splits = self.splits(name, kernel, experiment, form)
        counts = [one[what] for one in splits]
        of = [one["of rows left" if what == "rows left" else "of"] for one in splits]
        return balanced_error(counts, of), sampling_error(counts, of)


def piece_name(name: str, form: str, kernel: str, number: int) -> str:
    """Name of the piece of a split."""
    return f"{name} {form} {kernel} split {number}"


def paper_table_3(name: str) -> list[list[float | None]]:
    """The paper's figures, by experiment and kernel."""
    cells = [None if cell == "-" else float(cell) for cell in TABLE_3[name].split()]
    return [cells[i : i + len(KERNELS)] for i in range(0, len(cells), len(KERNELS))]


def table_2(args: Any) -> None:
    """The data."""
    rows = []
    for name in SETS:
        X, y = read(args.data, name)
        varying = int((X.amax(0) > X.amin(0)).sum())
        zeros = (X == 0).double().mean().item() * 100
        columns, sparsity = TABLE_2[name]
        first = split_rows(args.data, name, "paper", 0)
        rows.append(
            {
                "": name.upper(),
                "positive": int((y > 0).sum()),
                "negative": int((y < 0).sum()),
                "d": X.shape[1],
                "d that vary, paper": columns,
                "ours": varying,
                "zeros %, paper": sparsity,
                "ours %": zeros,
                "rows trained on (first split)": len(first.y),
            }
        )
    write_table("criteria_table2", rows, args)


def table_3(args: Any, found: Results) -> None:
    """Every experiment: the balanced error rate beside the paper's."""
    for name in SETS:
        rows = []
        for experiment, line in zip(EXPERIMENTS, paper_table_3(name), strict=True):
            for kernel, paper in zip(KERNELS, line, strict=True):
                ours, error = found.estimate(name, kernel, experiment)
                plain, _ = found.estimate(name, kernel, experiment, "without shift")
                edges = sum(one["edge"] for one in found.splits(name, kernel, experiment))
                row = {
                    "no.": len(rows) + 1,
                    "criterion": experiment.criterion,
                    "training": "weighted" if experiment.weighted_training else "",
                    "selection": "weighted" if experiment.weighted_selection else "",
                    "kernel": kernel,
                }
                figures = beside("", ours, paper, error, error)
                figures = {key: value for key, value in figures.items() if key not in ("", "paper's s.e.")}
                more: dict[str, Any] = {"without shift": plain, "reg at an end": f"{edges}/{args.splits}"}
                if name == "sylva":
                    more |= rows_left(found, kernel, experiment, paper)
                rows.append(row | figures | more)
        write_table(f"criteria_table3_{name}", rows, args)


def rows_left(
    found: Results, kernel: str, experiment: Experiment, paper: float | None
) -> dict[str, float | None]:
    """The error rate of SYLVA's test rows that no feature rules out, beside the paper's figure."""
    ours, error = found.estimate("sylva", kernel, experiment, "rows left")
    figures = beside("", ours, paper, error, error)
    return {
        "rows left": ours,
        "rows left, s.e.": error,
        "rows left, difference / s.e.": figures["difference / s.e."],
    }


def table_4(args: Any, found: Results) -> None:
    """Regression of Table III on its factors: the paper's, ours from the paper's figures, and from ours."""
    columns: dict[str, list[float]] = {}
    for name in SETS:
        paper = [cell for line in paper_table_3(name) for cell in line]
        ours = [
            found.estimate(name, kernel, experiment)[0] for experiment in EXPERIMENTS for kernel in KERNELS
        ]
        columns[f"{name.upper()}, paper"] = [float(cell) for cell in TABLE_4[name].split()]
        columns["from its Table III, " + name.upper()] = factor_weights(paper)
        columns["ours, " + name.upper()] = factor_weights(ours)
    rows = [
        {"factor": factor} | {column: weights[i] for column, weights in columns.items()}
        for i, factor in enumerate(FACTORS)
    ]
    write_table("criteria_table4", rows, args)


def factor_weights(table: list[float | None]) -> list[float]:
    """Weights of the factors in a standardised Table III, of all solutions the one of least norm."""
    design = [
        [experiment.criterion == name for name in CRITERIA]
        + [experiment.weighted_training, experiment.weighted_selection]
        + [kernel == name for name in KERNELS]
        for experiment in EXPERIMENTS
        for kernel in KERNELS
    ]
    known = [i for i, cell in enumerate(table) if cell is not None]
    target = torch.tensor([table[i] for i in known], dtype=torch.float64)
    target = (target - target.mean()) / target.std()
    factors = torch.tensor([design[i] for i in known], dtype=torch.float64)
    return (torch.linalg.pinv(factors) @ target).tolist()


def tables_5_and_6(args: Any, found: Results) -> None:
    """The challenge: the model of the least leave-one-out error, its guess by that error or by validation."""
    everything = [(kernel, experiment) for kernel in KERNELS for experiment in EXPERIMENTS]
    for number, guesser in enumerate(("loo", "validation")):
        rows = []
        for name in SETS:
            by_model = {model: found.splits(name, *model) for model in everything}
            chosen, guesses = [], []
            for split in range(args.splits):
                model = min(everything, key=lambda model: by_model[model][split]["loo"])
                chosen.append(by_model[model][split])
                others = [one for k, one in enumerate(by_model[model]) if k != split] or [chosen[-1]]
                validated = balanced_error([one["wrong"] for one in others], [one["of"] for one in others])
                guesses.append(chosen[-1]["loo"] if guesser == "loo" else validated)
            counts = [one["wrong"] for one in chosen]
            of = [one["of"] for one in chosen]
            ber = balanced_error(counts, of)
            sigma = sampling_error(counts, of)
            guess = sum(guesses) / len(guesses)
            miss = abs(guess - ber)
            paper = TABLES_5_AND_6[name]
            rows.append(
                {
                    "": name.upper(),
                    "train, paper": paper["train"],
                    "ours": sum(one["train"] for one in chosen) / len(chosen),
                    "test, paper": paper["test"],
                    "ours ": ber,
                    "s.e.": sigma,
                    "difference / s.e.": (ber - paper["test"]) / (sigma * TEST_PART_TOO),
                    "guess, paper": paper["guess"][number],
                    "ours  ": guess,
                    "guess error, paper": abs(paper["guess"][number] - paper["test"]),
                    "ours   ": miss,
                    "score, paper": paper["score"][number],
                    "ours    ": ber + miss * (1 - math.exp(-miss / sigma)),
                }
            )
        write_table(f"criteria_table{5 + number}", rows, args)


def other_readings(args: Any, found: Results) -> None:
    """What else section III, the bias and SYLVA's reduced rows may mean: PRESS without weights and with."""
    readings = [("ada", "paper", ["Linear"], ("wrong", "without shift"))]
    readings += [(name, form, ["Linear"], ("wrong", "without shift")) for name, form in OTHER_FORMS]
    readings += [("sylva", "paper", KERNELS, ("wrong", "without shift", "without rule"))]
    rows = []
    for name, form, kernels, whats in readings:
        for kernel in kernels:
            for experiment in EXPERIMENTS[:2]:
                paper = paper_table_3(name)[EXPERIMENTS.index(experiment)][KERNELS.index(kernel)]
                for what in whats:
                    ours, error = found.estimate(name, kernel, experiment, what, form)
                    head = {
                        "set": name.upper(),
                        "rows": form,
                        "experiment": str(experiment),
                        "kernel": kernel,
                    }
                    figures = beside("", ours, paper, error, error)
                    shown = what.replace("wrong", "as in Table III")
                    figures = {k: v for k, v in figures.items() if k not in ("", "paper's s.e.")}
                    rows.append(head | {"outputs": shown} | figures)
    write_table("criteria_readings", rows, args)


def basis_against_dense(args: Any, results: dict[str, Any]) -> None:
    """What the basis costs: leave-one-out of machines on it, and of dense ones with the same kernel."""
    rows = []
    for name, kernel in DENSE:
        result = results[f"{name} {kernel} dense split 0"]
        row: dict[str, Any] = {"": f"{name.upper()}, {kernel.lower()}"}
        for measure, label in (("press", "PRESS"), ("wmw", "1 - AUC"), ("loo", "BER")):
            row[f"{label}, basis"] = result["basis"][measure]
            row[f"{label}, dense"] = result["dense"][measure]
        rows.append(row)
    write_table("criteria_basis", rows, args)


def figure_1(args: Any) -> None:
    """The losses that bound the zero-one loss, as the library computes them for t f."""
    margin = torch.linspace(-1.5, 2.5, 4001, dtype=torch.float64).unsqueeze(-1)  # (4001, 1): one row each
    one = torch.ones_like(margin)
    held_out = tl.HeldOut(margin, one - margin, one, one, None, one, one > 1)
    figure, axes = pictures(size=(6.0, 4.0))
    losses = {"zero-one": tl.criteria.error_rate, "hinge": tl.criteria.hinge}
    losses["squared hinge"] = tl.criteria.squared_hinge
    for (label, loss), style in zip(losses.items(), ("-", "--", "-."), strict=True):
        axes.plot(margin[:, 0], loss(held_out), style, label=label, linewidth=1.8)
    axes.set(xlabel="$t f(x)$", ylabel="loss", xlim=(-1.5, 2.5), ylim=(-0.1, 4.0))
    axes.set_title("The hinge and the squared hinge bound the zero-one loss (Figure 1)", fontsize=10)
    axes.legend(frameon=False)
    write_picture("criteria_figure1", figure, args)


def figure_table_3(args: Any, found: Results) -> None:
    """Table III at a glance: our figures against the paper's, a panel for each set.

    Hollow in SYLVA's: Boolean and RBF on the test rows that no feature rules out.
    """
    figure, axes = pictures(1, len(SETS), size=(4.2, 4.9))
    for panel, name in zip(axes, SETS, strict=True):
        for k, kernel in enumerate(KERNELS):
            points = beside_paper(found, name, kernel, "wrong")
            style = {"color": f"C{k}", "markersize": 5}
            panel.plot(*points, "o^sDv"[k], label=kernel, alpha=0.7, **style)
            if name == "sylva" and kernel in ("Boolean", "RBF"):
                panel.plot(
                    *beside_paper(found, name, kernel, "rows left"), "o^sDv"[k], fillstyle="none", **style
                )
        error = found.estimate(name, "Linear", EXPERIMENTS[0])[1]
        limits = [*panel.get_xlim(), *panel.get_ylim()]
        ends = [min(limits), max(limits)]
        panel.plot(ends, ends, color="0.4", linewidth=0.8)
        band = 2 * math.sqrt(2) * error
        panel.fill_between(ends, [e - band for e in ends], [e + band for e in ends], color="0.9", zorder=0)
        panel.set(xlim=ends, ylim=ends, xlabel="paper", ylabel="ours", title=f"{name.upper()}: BER", aspect=1)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    write_picture("criteria_table3", figure, args)


def beside_paper(found: Results, name: str, kernel: str, what: str) -> tuple[list[float], list[float]]:
    """The paper's figures of a kernel that can be read, and ours."""
    paper = [line[KERNELS.index(kernel)] for line in paper_table_3(name)]
    ours = [found.estimate(name, kernel, experiment, what)[0] for experiment in EXPERIMENTS]
    readable = [(theirs, own) for theirs, own in zip(paper, ours, strict=True) if theirs is not None]
    return [theirs for theirs, _ in readable], [own for _, own in readable]


OTHER_FORMS = (("ada", "raw"), ("ada", "log education"), ("sylva", "all rows"))
DENSE = (("ada", "Cubic"), ("hiva", "Cubic"), ("sylva", "Cubic"), ("sylva", "RBF"))


def main() -> None:
    args = options(__doc__, splits=10)
    effort = QUICK if args.quick else FULL
    jobs = [(name, "paper", kernel) for name in SETS for kernel in KERNELS]
    jobs += [(name, form, "Linear") for name, form in OTHER_FORMS]
    pieces = [
        Piece(piece_name(*job, number), one_split, (args.data, *job, number, effort))
        for number in range(args.splits)
        for job in jobs
    ]
    pieces += [
        Piece(f"{name} {kernel} dense split 0", dense_split, (args.data, name, kernel, 0, effort))
        for name, kernel in DENSE
    ]
    results = run(pieces, args)
    found = Results(args, results)
    table_2(args)
    table_3(args, found)
    table_4(args, found)
    tables_5_and_6(args, found)
    other_readings(args, found)
    basis_against_dense(args, results)
    figure_1(args)
    figure_table_3(args, found)


if __name__ == "__main__":
    main()
