"""Pahikkala, Boberg and Salakoski (2006), leave-cluster-out of RLS: Figure 1 and the cost.

    python scripts/reproduce/rls.py --data DATA [--quick] [--jobs 2] [--out reproduction] [--splits 10]

Figure 1: Kendall's tau_b within clusters by leave-one-out (LOO) and leave-cluster-out (LCO) over lambda =
2^-15 to 2^14, and on clusters that were not learned from. The paper's parses of 200 sentences are not
available; the same is done on Parkinsons (subjects), vowel (speakers), school (schools), MQ2008 (queries, its
official folds), `datasets.clustered` and made-up parses. As in the paper, 100 clusters, or half of those
there are (50 of those that are made up), of at most 20 rows are learned from, and as many others are
tested on.

Cost: the time of leave-cluster-out against the number of folds, which the paper says is O(m^3 / n).
"""

import argparse
import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
from experiment import (
    Piece,
    in_turns,
    mean_and_error,
    options,
    pictures,
    run,
    slope,
    write_picture,
    write_table,
)
from torch import Tensor

import torchloo as tl

POWERS = range(-15, 15)
LEARNED, MOST = 100, 20  # clusters, rows of each
MADE_UP = 50  # clusters of the sets that are made up

# What the paper reads off its Figure 1: lambda preferred, and tau of it on 100 new sentences.
PAPER = {
    "": "the paper: parses",
    "LOO prefers": "2^-2",
    "LCO prefers": "2^4",
    "largest LOO - LCO": "over 0.3",
    "test tau, LOO's lambda": 0.37,
    "test tau, LCO's lambda": 0.38,
    "difference": 0.01,
}


class Rows(NamedTuple):
    """Rows of a data set, as what a kernel is computed from."""

    X: Tensor
    y: Tensor
    clusters: Tensor

    def only(self, rows: Tensor) -> "Rows":
        return Rows(self.X[rows], self.y[rows], self.clusters[rows])


# The data sets, each as rows to learn from and rows to test on


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def grouped(name: str, data: Path, distinct: bool = False) -> Rows:
    """A benchmark with clusters; distinct: one row for each input of a cluster."""
    X, y, clusters, _ = tl.datasets.benchmark(name, data)
    assert clusters is not None
    if name == "vowel":  # eleven problems, one vowel against the others each
        y = torch.nn.functional.one_hot(y.long()).to(X)
    if name == "parkinsons":
        y = y[:, 1]  # total UPDRS
    rows = Rows(X, y, clusters)
    if not distinct:
        return rows
    labelled = torch.cat([clusters.unsqueeze(-1).to(X), X], -1)
    _, member = torch.unique(labelled, dim=0, return_inverse=True)
    first = torch.full((int(member.max()) + 1,), len(X)).scatter_reduce(
        0, member, torch.arange(len(X)), "amin"
    )
    return rows.only(first.sort().values)


def some_rows(rows: Rows, names: Tensor, generator: torch.Generator, most: int = MOST) -> Rows:
    """At most so many rows, drawn at random, of each of the clusters named."""
    order = torch.randperm(len(rows.clusters), generator=generator)
    chosen = [order[rows.clusters[order] == name][:most] for name in names]
    return rows.only(torch.cat(chosen))


def halves(rows: Rows, seed: int, learned: int) -> tuple[Rows, Rows]:
    """Random clusters to learn from, and as many to test on."""
    generator = seeded(seed)
    names = rows.clusters.unique()
    names = names[torch.randperm(len(names), generator=generator)]
    count = min(learned, len(names) // 2)
    return tuple(some_rows(rows, part, generator) for part in (names[:count], names[count:][:learned]))


def mq2008(data: Path, fold: int, learned: int | None) -> tuple[Rows, Rows]:
    """Official fold 0 to 4: queries of its three training parts (None: all of them), its test part."""
    X, y, query, extra = tl.datasets.benchmark("mq2008", data)
    rows = Rows(X, y, query)
    part = torch.as_tensor(extra["part"]).long() - 1
    train = torch.isin(part, (fold + torch.arange(3)) % 5)
    learn = rows.only(train)
    test = rows.only(part == (fold + 4) % 5)
    if learned is None:
        return learn, test
    generator = seeded(fold)
    names = learn.clusters.unique()
    names = names[torch.randperm(len(names), generator=generator)[:learned]]
    return some_rows(learn, names, generator), test


def clustered(seed: int, learned: int) -> tuple[Rows, Rows]:
    rows = Rows(*tl.datasets.clustered(2 * learned, MOST, generator=seeded(seed)))
    return halves(rows, seed, learned)


def parses(
    seed: int,
    learned: int,
    kinds: int,
    own: float,
    noise: float,
    links: int = 20,
) -> tuple[Rows, Rows]:
    """Made-up parses of sentences, the target being the share of right links, as the paper's F-score.

    A sentence has `links` places, with two links to choose from, each of one of so many kinds; a link is
    right the more likely the better its kind. A parse takes the wrong one at random, more often in harder
    sentences. Features are the counts of each kind, which all sentences share, and an indicator of every
    link by itself, which only parses of the same sentence can share.

    Args:
        own: weight of the second part in the kernel, from 0 to 1.
        noise: standard deviation of what is added to the target.
    """
    generator, sentences = seeded(seed), 2 * learned
    quality = torch.randn(kinds, generator=generator, dtype=torch.float64)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    kind = torch.randint(kinds, (sentences, links, 2), generator=generator)
    better = quality[kind].diff(dim=-1)[..., 0]  # of the second link
    right = (uniform(sentences, links) < torch.sigmoid(2 * better)).long()  # which of the two
    hardness = 0.15 + 0.5 * uniform(sentences, 1, 1)
    wrong = (uniform(sentences, MOST, links) < hardness).long()  # (sentences, parses, links)
    taken = (right.unsqueeze(1) + wrong) % 2
    kinds_taken = kind.unsqueeze(1).expand(-1, MOST, -1, -1).gather(-1, taken.unsqueeze(-1))[..., 0]
    counts = torch.nn.functional.one_hot(kinds_taken, kinds).sum(-2).double()
    link = torch.nn.functional.one_hot(taken, 2).double().flatten(2)  # (sentences, parses, 2 links)
    place = torch.arange(sentences)
    known = place[:learned]  # a link of another sentence is met by no row that is learned from
    indicators = torch.zeros(sentences, MOST, learned, 2 * links, dtype=torch.float64)
    indicators[known, :, known] = link[known]
    X = torch.cat([math.sqrt(1 - own) * counts, math.sqrt(own) * indicators.flatten(2)], -1) / math.sqrt(
        links
    )
    y = 1 - wrong.double().mean(-1)
    y = y + noise * torch.randn(y.shape, generator=generator, dtype=torch.float64)
    clusters = place.repeat_interleave(MOST)
    learn = clusters < learned
    rows = Rows(X.flatten(0, 1), y.flatten(), clusters)
    return rows.only(learn), rows.only(~learn)


def split_of(name: str, data: Path, split: int, learned: int) -> tuple[Rows, Rows]:
    """Rows to learn from and to test on."""
    match name:
        case "parkinsons" | "vowel" | "school":
            return halves(grouped(name, data), split, learned)
        case "school, distinct inputs":
            return halves(grouped("school", data, distinct=True), split, learned)
        case "mq2008":
            return mq2008(data, split, learned)
        case "mq2008, all queries":
            return mq2008(data, split, None)
        case "clustered":
            return clustered(split, min(learned, MADE_UP))
        case "made-up parses":
            return parses(split, min(learned, MADE_UP), kinds=400, own=0.2, noise=0.02)
        case "made-up, common links":
            return parses(split, min(learned, MADE_UP), kinds=60, own=0.0, noise=0.02)
        case "made-up, noisy scores":
            return parses(split, min(learned, MADE_UP), kinds=400, own=0.2, noise=0.2)
    raise ValueError(f"no data set {name!r}")


CASES = [
    ("parkinsons", "RBF"),
    ("parkinsons", "linear"),
    ("vowel", "RBF"),
    ("vowel", "linear"),
    ("school", "RBF"),
    ("school", "linear"),
    ("school, distinct inputs", "linear"),
    ("mq2008", "RBF"),
    ("mq2008", "linear"),
    ("mq2008, all queries", "linear"),
    ("clustered", "RBF"),
    ("made-up parses", "linear"),
    ("made-up, common links", "linear"),
    ("made-up, noisy scores", "linear"),
]


# One split


def standardised(learn: Rows, test: Rows) -> tuple[Rows, Rows]:
    """By the rows that are learned from: inputs of mean 0 and deviation 1 and targets of mean 0."""
    mean = learn.X.mean(0)
    deviation = learn.X.std(0)
    middle = learn.y.mean(0)
    deviation = torch.where(deviation > 0, deviation, 1.0)
    return tuple(Rows((part.X - mean) / deviation, part.y - middle, part.clusters) for part in (learn, test))


def tau(outputs: Tensor, rows: Rows) -> list[float]:
    """Kendall's tau_b within clusters for every lambda, of outputs (R, n) or (R, n, c).

    Outputs of equal inputs are ties, which rounding must not order.
    """
    outputs = outputs.round(decimals=9)
    targets = rows.y.expand_as(outputs)
    weight = torch.ones(outputs.shape[:2], dtype=outputs.dtype)
    variance = torch.ones_like(outputs)
    refitted = torch.zeros(outputs.shape[:2], dtype=torch.bool)
    predicted = tl.HeldOut(outputs, targets - outputs, targets, weight, rows.clusters, variance, refitted)
    return tl.criteria.kendall_tau(predicted).tolist()


def rmse(outputs: Tensor, rows: Rows) -> list[float]:
    squares = (outputs - rows.y).square().flatten(1)
    return squares.mean(-1).sqrt().tolist()


def neighbours(K: Tensor, clusters: Tensor, k: int = 5) -> float:
    """Share of the k rows nearest to a row, by the kernel, that are of its cluster."""
    diagonal = K.diagonal()
    distance = diagonal.unsqueeze(-1) + diagonal - 2 * K
    nearest = distance.fill_diagonal_(math.inf).topk(k, largest=False).indices  # (n, k)
    return (clusters[nearest] == clusters.unsqueeze(-1)).double().mean().item()


@torch.no_grad()
def one_split(name: str, kernel_name: str, data: Path, split: int, learned: int) -> dict[str, Any]:
    """Curves over lambda: tau and RMSE by LOO, by LCO and on new clusters."""
    learn, test = split_of(name, data, split, learned)
    if not name.startswith("made-up"):
        learn, test = standardised(learn, test)
    else:
        middle = learn.y.mean()
        learn = learn._replace(y=learn.y - middle)
        test = test._replace(y=test.y - middle)
    kernel = tl.kernels.Linear()
    if kernel_name != "linear":
        kernel = tl.kernels.RBF(math.sqrt(learn.X.shape[-1]))
    regs = torch.tensor([2.0**power for power in POWERS], dtype=torch.float64)
    solved = tl.RLS(kernel.double()).solve_path(learn.X, learn.y, regs)
    outputs = {
        "LOO": (solved.held_out().outputs, learn),
        "LCO": (solved.held_out(learn.clusters).outputs, learn),
        "test": (solved(test.X), test),
    }
    some = torch.randperm(len(learn.y), generator=seeded(0))[:2000]
    return {
        "rows": len(learn.y),
        "clusters": len(learn.clusters.unique()),
        "neighbours": neighbours(kernel(learn.X[some]), learn.clusters[some]),
        "tau": {way: tau(values, rows) for way, (values, rows) in outputs.items()},
        "rmse": {way: rmse(values, rows) for way, (values, rows) in outputs.items()},
    }


# The cost


@torch.no_grad()
def cost(rows: int, numbers: list[int], repeats: int) -> dict[str, Any]:
    """CPU seconds of leave-cluster-out for one lambda, once K is decomposed, and of retraining for folds."""
    X = torch.randn(rows, 8, dtype=torch.float64, generator=seeded(0))
    y = torch.randn(rows, 1, dtype=torch.float64, generator=seeded(1))
    K = tl.kernels.RBF(lengthscale=2.0).double()(X)
    eigenvalues, V = torch.linalg.eigh(K)
    regs = torch.logspace(-2, 2, 8, dtype=torch.float64)  # enough for one decomposition to serve all
    solved = tl.RLS(tl.kernels.Precomputed()).solve_path(K, y, regs)

    def equation_9(held: Tensor) -> Tensor:
        """Held-out outputs of folds (n, rows / n)."""
        shrunk = V * (eigenvalues / (eigenvalues + 1.0))  # B = shrunk V^T
        fitted = (shrunk @ (V.T @ y))[held]
        B = shrunk[held] @ V[held].mT  # (n, rows / n, rows / n)
        identity = torch.eye(held.shape[1], dtype=B.dtype)
        return torch.linalg.solve(identity - B, fitted - B @ y[held])

    def retrain(kept: Tensor) -> Tensor:
        M = K[kept][:, kept] + torch.eye(int(kept.sum()), dtype=K.dtype)
        return K[~kept][:, kept] @ torch.cholesky_solve(y[kept], torch.linalg.cholesky(M))

    found = []
    for n in numbers:
        clusters = torch.arange(rows) % n
        held = torch.arange(rows).reshape(-1, n).T  # (n, rows / n)
        labels = None if n == rows else clusters
        sides = {
            "library": lambda labels=labels: solved.held_out(labels),
            "equation (9)": lambda held=held: equation_9(held),
            "retraining": lambda kept=clusters != 0: retrain(kept),
        }
        times = in_turns(sides, repeats)
        factor = {"library": 1 / len(regs), "equation (9)": 1, "retraining": n}
        least = {side: min(each) * factor[side] for side, each in times.items()}
        found.append({"folds": n, **least})
    eigh = in_turns({"eigh": lambda: torch.linalg.eigh(K)}, repeats)["eigh"]
    return {"folds": found, "eigh": min(eigh)}


# Tables and pictures


def curves(found: dict[str, Any], name: str, kernel: str, splits: int, what: str) -> dict[str, Tensor]:
    """(splits, lambda) by LOO, LCO, test."""
    results = [found[_piece(name, kernel, split)][what] for split in range(splits)]
    return {
        way: torch.tensor([one[way] for one in results], dtype=torch.float64)
        for way in ("LOO", "LCO", "test")
    }


def _piece(name: str, kernel: str, split: int) -> str:
    return f"{name}, {kernel}, split {split}"


def preferred(curve: Tensor) -> str:
    """The lambda at which the mean over splits is best."""
    return f"2^{POWERS[int(curve.mean(0).argmax())]}"


def write_figure(found: dict[str, Any], splits: dict[str, int], args: argparse.Namespace) -> None:
    rows: list[dict[str, Any]] = []
    errors = []
    for name, kernel in CASES:
        count = splits[name]
        curve = curves(found, name, kernel, count, "tau")
        first = found[_piece(name, kernel, 0)]
        mean = {way: values.mean(0) for way, values in curve.items()}
        each = torch.arange(count)
        chosen = {way: curve["test"][each, curve[way].argmax(-1)] for way in ("LOO", "LCO")}
        gap = mean["LOO"] - mean["LCO"]
        widest = gap[gap.abs().argmax()].item()
        difference, error = mean_and_error((chosen["LCO"] - chosen["LOO"]).tolist())
        neighbours = [found[_piece(name, kernel, k)]["neighbours"] for k in range(count)]
        rows.append(
            {
                "": f"{name}, {kernel}",
                "splits": count,
                "clusters": first["clusters"],
                "rows": first["rows"],
                "own neighbours": f"{mean_and_error(neighbours)[0]:.0%} ({1 / first['clusters']:.0%})",
                "best LOO tau": f"{mean['LOO'].max():.3f}",
                "best LCO tau": f"{mean['LCO'].max():.3f}",
                "LOO prefers": preferred(curve["LOO"]),
                "LCO prefers": preferred(curve["LCO"]),
                "largest LOO - LCO": f"{widest:+.3f}",
                "test tau, LOO's lambda": f"{chosen['LOO'].mean():.3f}",
                "test tau, LCO's lambda": f"{chosen['LCO'].mean():.3f}",
                "difference": difference,
                "s.e.": error,
            }
        )
        errors.append(error_row(found, name, kernel, count))
    paper = {column: PAPER.get(column) for column in rows[0]}
    write_table("rls_figure_1", [paper, *rows], args)
    write_table("rls_errors", errors, args)
    draw_curves(found, splits, args)


def error_row(found: dict[str, Any], name: str, kernel: str, count: int) -> dict[str, Any]:
    """Root mean squared errors: what LOO and LCO say of the machine that each chooses, and the true one."""
    curve = curves(found, name, kernel, count, "rmse")
    row: dict[str, Any] = {"": f"{name}, {kernel}"}
    each = torch.arange(count)
    for way in ("LOO", "LCO"):
        best = curve[way].argmin(-1)
        estimate = curve[way][each, best].mean().item()
        true = curve["test"][each, best].mean().item()
        row |= {
            f"{way} estimate": estimate,
            f"{way}'s choice, new clusters": true,
            f"{way}: true / estimate": true / estimate,
        }
    return row


def draw_curves(found: dict[str, Any], splits: dict[str, int], args: argparse.Namespace) -> None:
    drawn = [case for case in CASES if case[1] == "RBF" or case[0].startswith(("made-up", "school, d"))]
    columns = 3
    figure, axes = pictures(math.ceil(len(drawn) / columns), columns, (4.6, 3.2))
    for place in axes.flat[len(drawn) :]:
        place.set_visible(False)
    styles = {"LOO": ("--", "tab:blue"), "LCO": ("-", "tab:blue"), "test": ("-", "tab:orange")}
    labels = {"LOO": "leave-one-out", "LCO": "leave-cluster-out", "test": "new clusters"}
    for (name, kernel), place in zip(drawn, axes.flat, strict=False):
        curve = curves(found, name, kernel, splits[name], "tau")
        for way, (style, colour) in styles.items():
            mean = curve[way].mean(0)
            place.plot(POWERS, mean, style, color=colour, label=labels[way])
            if way != "test":
                best = int(mean.argmax())
                place.plot(
                    POWERS[best], mean[best], "o", color=colour, fillstyle="none" if way == "LOO" else "full"
                )
        place.set_title(f"{name}, {kernel}", loc="left", fontsize=10)
        place.set(xlabel=r"$\log_2 \lambda$", ylabel=r"$\tau_b$")
    axes.flat[0].legend(frameon=False, fontsize=8)
    write_picture("rls_figure_1", figure, args)


def write_cost(found: list[dict[str, float]], eigh: float, rows: int, args: argparse.Namespace) -> None:
    sides = {
        "equation (9)": "equation (9)",
        "library": "this library",
        "retraining": "retraining for every fold",
    }
    table = [
        {"folds": entry["folds"], **{f"{label} (s)": entry[side] for side, label in sides.items()}}
        for entry in found
    ]
    for most in (8, 96):  # up to here products of m^3 / n outweigh passes over the m^2 numbers of V; and not
        some = [entry for entry in found if entry["folds"] <= most]
        folds = [entry["folds"] for entry in some]
        fitted = {
            f"{label} (s)": slope(folds, [entry[side] for entry in some]) for side, label in sides.items()
        }
        table.append({"folds": f"slope, 2 to {most} folds", **fitted})
    table.append({"folds": "eigendecomposition (s)", "this library (s)": eigh})
    write_table("rls_cost", table, args)
    figure, axes = pictures(size=(6.8, 4.6))
    for (side, label), mark in zip(sides.items(), "ox^", strict=True):
        axes.loglog([e["folds"] for e in found], [e[side] for e in found], f"{mark}-", label=label)
    axes.axhline(eigh, color="0.5", linestyle="--", linewidth=1)
    axes.text(rows, eigh * 1.1, "the eigendecomposition itself", color="0.4", fontsize=9, ha="right")
    start = found[0]["library"] * found[0]["folds"]
    axes.loglog(folds, [start / n for n in folds], ":", color="black", label="proportional to 1 / n")
    axes.set(xlabel="folds n", ylabel=r"CPU seconds for one $\lambda$")
    axes.set_title(f"Leave-cluster-out of m = {rows} rows")
    axes.legend(frameon=False, fontsize=9)
    write_picture("rls_cost", figure, args)


def main() -> None:
    args = options(__doc__, splits=10)
    learned = 20 if args.quick else LEARNED
    splits = {name: min(args.splits, 5) if name.startswith("mq2008") else args.splits for name, _ in CASES}
    pieces = [
        Piece(_piece(name, kernel, split), one_split, (name, kernel, args.data, split, learned))
        for name, kernel in CASES
        for split in range(splits[name])
    ]
    write_figure(run(pieces, args), splits, args)
    rows, repeats = (480, 2) if args.quick else (1440, 3)
    folds = [n for n in (2, 4, 8, 16, 32, 96, 240, 480, 1440) if n <= rows]
    timed = run([Piece(f"cost of {rows} rows", cost, (rows, folds, repeats))], args, jobs=1)
    (found,) = timed.values()
    write_cost(found["folds"], found["eigh"], rows, args)


if __name__ == "__main__":
    main()
