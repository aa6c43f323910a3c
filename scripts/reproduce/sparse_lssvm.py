"""Cawley and Talbot (2004), exact leave-one-out of the sparse LS-SVM: Table 1 and Figures 1 to 4.

    python scripts/reproduce/sparse_lssvm.py --data DATA [--quick] [--jobs 2] [--out reproduction]

Motorcycle: dense and sparse fits (Figure 1), explicit and fast leave-one-out (Figure 2), their times (Table
1) and relative difference E_r. Boston: reconstruction error against the number of basis vectors (Figure 3),
times of explicit and fast leave-one-out against the number of rows (Figure 4).

The hyper-parameters that the paper prints cannot be what they are called; `readings` tries every reading of
them. Times are CPU seconds of one process of one thread, for any --jobs.
"""

import argparse
import math
from pathlib import Path
from typing import Any

import torch
from experiment import (
    Piece,
    beside,
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

# The paper's figures.
EXPLICIT, FAST = (0.396950, 1.212448e-3), (0.003072, 1.479775e-5)  # mean seconds and standard error
E_R = 7.6e-6
VECTORS = 15  # of Motorcycle
BOSTON_VECTORS = 200

# What it prints as sigma^-2 and gamma: Motorcycle, Boston.
PRINTED = {"motorcycle": (13.1, 1.2055e-3), "boston": (4.36, 2.89e4)}

# The reading of them that is used: exp(-d^2 / sigma^2) of these sigma, and these ridges (`readings`).
MOTORCYCLE = (13.1, 1.2055e-3)
BOSTON = (4.36, 506 / 2.89e4)

BOSTON_ROWS = [100, 150, 200, 250, 300, 400, 506]
MORE_ROWS = [1000, 2000, 4000, 8000, 16000]
EXPLICIT_REFITS = 10  # timed among all in Figure 4
FAST_CALLS = 20  # in a trial of Table 1, one of which takes a millisecond or less


def gaussian(sigma: float) -> tl.kernels.RBF:
    """exp(-d^2 / sigma^2)."""
    return tl.kernels.RBF.from_rate(sigma**-2).double()


def standardised(X: Tensor) -> Tensor:
    return (X - X.mean(0)) / X.std(0)


def load(name: str, data: Path) -> tuple[Tensor, Tensor]:
    """Motorcycle in milliseconds, as it is; Boston standardised, as in the paper."""
    if name == "motorcycle":
        return tl.datasets.motorcycle()
    X, y, _, _ = tl.datasets.benchmark("boston", data)
    return standardised(X), y


def partition(n: int, seed: int) -> Tensor:
    """Ten folds."""
    return tl.folds(n, 10, generator=torch.Generator().manual_seed(seed))


# Which numbers are meant


def search(name: str, data: Path, seed: int) -> dict[str, float]:
    """Hyper-parameters of the LS-SVM by ten-fold cross-validation and the simplex method, as in the paper."""
    X, y = load(name, data)
    chosen = tl.select(
        tl.LSSVM(tl.kernels.RBF()).double(),
        X,
        y,
        criterion=tl.criteria.mse,
        search="nelder-mead",
        clusters=partition(len(y), seed),
        progress=False,
    )
    sigma = math.sqrt(2) * chosen.machine.kernel.lengthscale.item()
    return {"sigma": sigma, "ridge": chosen.machine.reg.item(), "rmse": math.sqrt(chosen.value)}


def meanings(name: str, data: Path) -> dict[str, tuple[Tensor, float]]:
    """Inputs and sigma of what the paper's first number may mean."""
    X, _ = load(name, data)
    printed, _ = PRINTED[name]
    raw = "milliseconds" if name == "motorcycle" else "standardised"
    tried = {}
    for scale, inputs in {raw: X, "standardised": standardised(X)}.items():
        tried[f"{printed} is sigma^-2, {scale}"] = inputs, printed**-0.5
        tried[f"{printed} is sigma, {scale}"] = inputs, printed
    return tried


@torch.no_grad()
def readings(name: str, data: Path, seeds: int) -> list[dict[str, Any]]:
    """Ten-fold error, and vectors until the basis is singular, of what the paper's numbers may mean."""
    _, y = load(name, data)
    n, (_, gamma) = len(y), PRINTED[name]
    ridges = {
        "1 / (2 gamma)": 0.5 / gamma,
        "l / (2 gamma)": 0.5 * n / gamma,
        "gamma": gamma,
        "l / gamma": n / gamma,
    }
    grid = torch.logspace(-8, 4, 49, dtype=torch.float64)
    regs = torch.cat([torch.tensor(list(ridges.values()), dtype=torch.float64), grid])
    rows = []
    for meaning, (X, sigma) in meanings(name, data).items():
        kernel = gaussian(sigma)
        chosen = tl.basis.greedy(progress=False)(kernel, X)
        machine = tl.LSSVM(kernel)
        errors = [
            tl.criteria.mse(machine.path(X, y, regs, clusters=partition(n, seed))).sqrt()
            for seed in range(seeds)
        ]
        rmse = torch.stack(errors).mean(0)  # (R,)
        best = rmse[len(ridges) :].argmin()
        row = {
            f"ridge {name} = {value:.3g}": rmse[k].item() for k, (name, value) in enumerate(ridges.items())
        }
        least = {"least RMSE": rmse[len(ridges) + best].item(), "at ridge": grid[best].item()}
        rows.append({"": meaning, **row, **least, "vectors": len(chosen.indices)})
    return rows


# Motorcycle


@torch.no_grad()
def explicit(machine: tl.SparseLSSVM, X: Tensor, y: Tensor, rows: range | None = None) -> Tensor:
    """Leave-one-out residuals by training without each row."""
    residuals = []
    for i in range(len(y)) if rows is None else rows:
        kept = torch.arange(len(y)) != i
        machine.fit(X[kept], y[kept])
        residuals.append(y[i] - machine(X[i : i + 1])[0])
    return torch.stack(residuals)


@torch.no_grad()
def fast(machine: tl.SparseLSSVM, X: Tensor, y: Tensor) -> Tensor:
    """Leave-one-out residuals in closed form."""
    return machine.loo(X, y).residuals


class Printed:
    """The paper's formulas, by normal equations: Z = [K_xz 1], R = blockdiag(ridge K_zz, 0)."""

    def __init__(self, kernel: tl.kernels.RBF, ridge: float, basis: Tensor, X: Tensor, y: Tensor) -> None:
        with torch.no_grad():
            Kxz = kernel(X, basis)
            Kzz = kernel(basis)
        ones = torch.ones(len(X), 1, dtype=X.dtype)
        self.Z = torch.cat([Kxz, ones], -1)
        self.y = y
        self.R = torch.block_diag(ridge * Kzz, torch.zeros(1, 1, dtype=X.dtype))

    def explicit(self) -> Tensor:
        residuals = []
        for i in range(len(self.y)):
            kept = torch.arange(len(self.y)) != i
            Z, y = self.Z[kept], self.y[kept]
            p = torch.linalg.solve(self.R + Z.T @ Z, Z.T @ y)
            residuals.append(self.y[i] - self.Z[i] @ p)
        return torch.stack(residuals)

    def fast(self) -> Tensor:
        C = self.R + self.Z.T @ self.Z
        e = self.y - self.Z @ torch.linalg.solve(C, self.Z.T @ self.y)
        h = (torch.linalg.solve(C, self.Z.T) * self.Z.T).sum(0)
        return e / (1 - h)


def relative(explicit: Tensor, fast: Tensor) -> float:
    """E_r, equation (6)."""
    return ((explicit - fast).norm() / explicit.norm()).item()


def motorcycle_machines(choose: tl.basis.Selector) -> tuple[tl.LSSVM, tl.SparseLSSVM, Tensor, Tensor]:
    """Dense and sparse machines, and the data."""
    X, y = load("motorcycle", Path())
    sigma, ridge = MOTORCYCLE
    basis = X[choose(gaussian(sigma), X).indices]
    return tl.LSSVM(gaussian(sigma), ridge), tl.SparseLSSVM(gaussian(sigma), ridge, basis=basis), X, y


@torch.no_grad()
def motorcycle(vectors: int | None, seed: int | None = None) -> dict[str, Any]:
    """Fits and leave-one-out residuals.

    Args:
        vectors: of the basis; None: until it is singular.
        seed: of the stochastic choice; None: the greedy one.
    """
    if seed is None:
        choose = tl.basis.greedy(vectors, progress=False)
    else:
        choose = tl.basis.stochastic(vectors, progress=False, generator=torch.Generator().manual_seed(seed))
    dense, sparse, X, y = motorcycle_machines(choose)
    basis = sparse.basis.detach()
    t = torch.linspace(0, 60, 241, dtype=torch.float64).unsqueeze(-1)
    fits = {"dense": dense.fit(X, y)(t), "sparse": sparse.fit(X, y)(t)}
    residuals = {"explicit": explicit(sparse, X, y), "fast": fast(sparse, X, y)}
    printed = Printed(gaussian(MOTORCYCLE[0]), MOTORCYCLE[1], basis, X, y)
    within = (t[:, 0] >= X.min()) & (t[:, 0] <= X.max())
    difference = (fits["dense"] - fits["sparse"]).abs()
    gap = difference[within].max() / fits["dense"].abs().max()
    return {
        "vectors": len(basis),
        "basis": basis[:, 0].tolist(),
        "condition": torch.linalg.cond(gaussian(MOTORCYCLE[0])(basis)).item(),
        "t": t[:, 0].tolist(),
        **{name: values.tolist() for name, values in fits.items()},
        **{f"{name} LOO": (y - values).tolist() for name, values in residuals.items()},
        "dense RMSE": tl.criteria.mse(dense.loo(X, y)).sqrt().item(),
        "sparse RMSE": residuals["fast"].square().mean().sqrt().item(),
        "gap": gap.item(),
        "E_r": relative(residuals["explicit"], residuals["fast"]),
        "E_r printed": relative(printed.explicit(), printed.fast()),
    }


# Times


def motorcycle_times(trials: int) -> dict[str, list[float]]:
    """Table 1, by this library and by the plain normal equations."""
    _, sparse, X, y = motorcycle_machines(tl.basis.greedy(VECTORS, progress=False))
    sigma, ridge = MOTORCYCLE
    printed = Printed(gaussian(sigma), ridge, sparse.basis.detach(), X, y)
    sides = {
        "explicit": lambda: explicit(sparse, X, y),
        "fast": lambda: [fast(sparse, X, y) for _ in range(FAST_CALLS)],
        "explicit printed": printed.explicit,
        "fast printed": lambda: [printed.fast() for _ in range(FAST_CALLS)],
    }
    calls = {"fast": FAST_CALLS, "fast printed": FAST_CALLS}
    times = in_turns(sides, trials)
    return {name: [each / calls.get(name, 1) for each in times[name]] for name in sides}


def boston_times(data: Path, rows: int, trials: int) -> dict[str, Any]:
    """Figure 4 at one number of rows, 200 basis vectors of Boston.

    Above 506 rows are Boston's with noise of a tenth of a standard deviation, drawn with replacement. Of the
    refits of the explicit form a few are timed, and stand for all.
    """
    X, y = load("boston", data)
    generator = torch.Generator().manual_seed(rows)
    sigma, ridge = BOSTON
    chosen = tl.basis.greedy(BOSTON_VECTORS, progress=False)(gaussian(sigma), X)
    machine = tl.SparseLSSVM(gaussian(sigma), ridge, basis=X[chosen.indices])
    if rows <= len(y):
        order = torch.randperm(len(y), generator=generator)[:rows]
        X, y = X[order], y[order]
    else:
        drawn = torch.randint(len(y), (rows,), generator=generator)
        noise = 0.1 * torch.randn(rows, X.shape[-1], dtype=X.dtype, generator=generator)
        X = X[drawn] + noise
        y = y[drawn]
    some = range(EXPLICIT_REFITS)
    sides = {"explicit": lambda: explicit(machine, X, y, some), "fast": lambda: fast(machine, X, y)}
    times = in_turns(sides, trials)
    return {
        "rows": rows,
        "explicit": [each * rows / EXPLICIT_REFITS for each in times["explicit"]],
        "fast": times["fast"],
    }


def reconstruction(data: Path, sigma: float, selector: str, seed: int, most: int) -> list[float]:
    """Figure 3: mean relative reconstruction error after each vector."""
    X, _ = load("boston", data)
    if selector == "greedy":
        choose = tl.basis.greedy(most, progress=False)
    else:
        choose = tl.basis.stochastic(most, progress=False, generator=torch.Generator().manual_seed(seed))
    return choose(gaussian(sigma), X).errors.tolist()


# Tables and pictures


def write_searches(found: dict[str, Any], seeds: int, args: argparse.Namespace) -> None:
    rows = []
    for name in ("motorcycle", "boston"):
        results = torch.tensor(
            [[found[f"{name} search {s}"][key] for key in ("sigma", "ridge", "rmse")] for s in range(seeds)]
        )
        low = results.amin(0)
        middle = results.median(0).values
        high = results.amax(0)
        row = {"": name, "partitions": seeds, "printed": " and ".join(f"{v:g}" for v in PRINTED[name])}
        for k, key in enumerate(("sigma", "ridge", "RMSE")):
            row[key] = f"{middle[k]:.3g} ({low[k]:.3g} to {high[k]:.3g})"
        rows.append(row)
    write_table("sparse_lssvm_search", rows, args)
    for name in ("motorcycle", "boston"):
        write_table(f"sparse_lssvm_readings_{name}", found[f"{name} readings"], args)


def write_motorcycle(found: dict[str, Any], seeds: int, args: argparse.Namespace) -> None:
    kinds = {
        "greedy, 15": [found["motorcycle 15"]],
        "greedy, until singular": [found["motorcycle full"]],
        f"stochastic, 15, {seeds} seeds": [
            found[f"motorcycle 15 stochastic {seed}"] for seed in range(seeds)
        ],
    }
    columns = {
        "basis vectors": "vectors",
        "condition of K_SS": "condition",
        "E_r, ours": "E_r",
        "E_r, normal equations": "E_r printed",
        "dense - sparse fit": "gap",
        "LOO RMSE, dense": "dense RMSE",
        "LOO RMSE, sparse": "sparse RMSE",
    }
    rows = [{"": "paper", "basis vectors": VECTORS, "E_r, normal equations": E_R}]
    for kind, some in kinds.items():
        entries = {column: _range([result[key] for result in some]) for column, key in columns.items()}
        rows.append({"": kind, **entries})
    write_table("sparse_lssvm_motorcycle", rows, args)
    at_15 = found["motorcycle 15"]
    X, y = load("motorcycle", Path())
    figure, axes = pictures(1, 2, (6.2, 4.4))
    for one in axes:
        one.set(xlabel="time (ms)", ylabel="acceleration (g)")
    axes[0].plot(X[:, 0], y, ".", color="0.6", label="data")
    axes[0].plot(at_15["t"], at_15["dense"], color="tab:blue", linewidth=3, alpha=0.5, label="dense LS-SVM")
    axes[0].plot(at_15["t"], at_15["sparse"], "--", color="tab:red", label=f"sparse, {VECTORS} basis vectors")
    floor = y.min().item() - 12
    axes[0].plot(at_15["basis"], [floor] * VECTORS, "|", color="tab:red", markersize=9, label="basis vectors")
    axes[0].set_title("Figure 1: dense and sparse fit", loc="left")
    axes[1].plot(X[:, 0], y, ".", color="0.6", label="data")
    axes[1].plot(X[:, 0], at_15["explicit LOO"], "x", color="tab:blue", markersize=5, label="explicit")
    axes[1].plot(
        X[:, 0],
        at_15["fast LOO"],
        "D",
        color="tab:red",
        markersize=6,
        fillstyle="none",
        linewidth=0.5,
        label="fast",
    )
    axes[1].set_title("Figure 2: leave-one-out outputs", loc="left")
    for one in axes:
        one.legend(frameon=False)
    write_picture("sparse_lssvm_figures_1_2", figure, args)


def _range(values: list[float]) -> str:
    """Least and largest, or the one there is."""
    low, high = (f"{value:.3g}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def write_times(found: dict[str, Any], args: argparse.Namespace) -> None:
    times = {name: mean_and_error(values) for name, values in found.items()}
    rows = [
        beside("explicit (s)", times["explicit"][0], EXPLICIT[0], times["explicit"][1], EXPLICIT[1]),
        beside("fast (s)", times["fast"][0], FAST[0], times["fast"][1], FAST[1]),
    ]
    paper, paper_error = _ratio(EXPLICIT, FAST)
    for what, kind in (
        ("explicit / fast, this library", ""),
        ("explicit / fast, normal equations", " printed"),
    ):
        ours, error = _ratio(times[f"explicit{kind}"], times[f"fast{kind}"])
        rows.append(beside(what, ours, paper, error, paper_error))
    write_table("sparse_lssvm_table1", rows, args)


def _ratio(over: tuple[float, float], under: tuple[float, float]) -> tuple[float, float]:
    """Of two means with standard errors."""
    value = over[0] / under[0]
    return value, value * math.hypot(over[1] / over[0], under[1] / under[0])


def write_reconstruction(found: dict[str, Any], seeds: int, args: argparse.Namespace) -> None:
    figure, axes = pictures(size=(6.8, 4.6))
    rows = []
    for colour, sigma, label in (
        ("tab:blue", BOSTON[0], "sigma = 4.36"),
        ("tab:orange", BOSTON[0] ** -0.5, "sigma^-2 = 4.36, as printed"),
    ):
        greedy = found[f"basis {sigma:.3f} greedy"]
        drawn = torch.tensor([found[f"basis {sigma:.3f} stochastic {s}"] for s in range(seeds)])
        count = range(1, len(greedy) + 1)
        axes.plot(count, greedy, color=colour, label=f"{label}: greedy")
        axes.plot(count, drawn.median(0).values, ":", color="black")
        row = {"": label}
        for m in (50, 100, 200, 300, 400):
            if m <= len(greedy):
                row[f"greedy, {m}"] = greedy[m - 1]
        middle = drawn.median(0).values
        low = drawn.amin(0)
        high = drawn.amax(0)
        k = min(BOSTON_VECTORS, len(greedy)) - 1
        row[f"stochastic, {k + 1}"] = f"{middle[k]:.3g} ({low[k]:.3g} to {high[k]:.3g})"
        rows.append(row)
    axes.plot([], [], ":", color="black", label=f"stochastic, median of {seeds}")
    axes.axvline(BOSTON_VECTORS, color="0.5", linewidth=1)
    axes.text(BOSTON_VECTORS + 4, 0.25, "the paper: negligible\nfrom about 200 on", color="0.4", fontsize=9)
    axes.set(xlabel="basis vectors", ylabel="mean relative reconstruction error", ylim=(0, 1))
    axes.set_xlim(0, len(greedy))
    axes.legend(frameon=False, fontsize=8, loc="upper right")
    axes.set_title("Figure 3: Boston", loc="left")
    write_picture("sparse_lssvm_figure_3", figure, args)
    write_table("sparse_lssvm_figure_3", rows, args)


def write_growth(found: list[dict[str, Any]], args: argparse.Namespace) -> None:
    sides = ("explicit", "fast")
    rows = [
        {
            "rows": entry["rows"],
            **{f"{side} (s)": mean_and_error(entry[side])[0] for side in sides},
            "ratio": mean_and_error(entry["explicit"])[0] / mean_and_error(entry["fast"])[0],
        }
        for entry in found
    ]
    size = max(BOSTON_ROWS)
    labels = {side: side for side in sides}
    for name, some in (
        (f"slope, 200 to {size}", [row for row in rows if 200 <= row["rows"] <= size]),
        ("slope, from 2000 on", [row for row in rows if row["rows"] >= 2000]),
    ):
        if len(some) > 1:
            count = [row["rows"] for row in some]
            fitted = {f"{side} (s)": slope(count, [row[f"{side} (s)"] for row in some]) for side in sides}
            rows.append({"rows": name, **fitted})
            power, span = name.split(", ")
            labels = {side: f"{side}, {power} {fitted[f'{side} (s)']:.2f} {span}" for side in sides}
    write_table("sparse_lssvm_figure_4", rows, args)
    figure, axes = pictures(size=(6.8, 4.6))
    count = [entry["rows"] for entry in found]
    for side, mark in zip(sides, ("x", "D"), strict=True):
        axes.loglog(count, [row[f"{side} (s)"] for row in rows[: len(found)]], f"{mark}-", label=labels[side])
    axes.axvspan(size, max(count), color="0.95", zorder=0)
    axes.text(size * 1.05, axes.get_ylim()[0] * 1.5, "more rows than the paper has", color="0.4", fontsize=8)
    axes.set(xlabel="rows l", ylabel="CPU seconds (mean)")
    axes.set_title(f"Figure 4: {BOSTON_VECTORS} basis vectors, one thread", loc="left")
    axes.legend(frameon=False)
    write_picture("sparse_lssvm_figure_4", figure, args)


def main() -> None:
    args = options(__doc__)
    seeds, trials, most = (2, 5, 250) if args.quick else (10, 100, 450)
    data = args.data
    pieces = [
        Piece(f"{name} search {seed}", search, (name, data, seed))
        for name in ("motorcycle", "boston")
        for seed in range(seeds)
    ]
    pieces += [Piece(f"{name} readings", readings, (name, data, seeds)) for name in ("motorcycle", "boston")]
    pieces += [Piece("motorcycle 15", motorcycle, (VECTORS,)), Piece("motorcycle full", motorcycle, (None,))]
    pieces += [Piece(f"motorcycle 15 stochastic {s}", motorcycle, (VECTORS, s)) for s in range(seeds)]
    for sigma in (BOSTON[0], BOSTON[0] ** -0.5):
        name = f"basis {sigma:.3f}"
        pieces.append(Piece(f"{name} greedy", reconstruction, (data, sigma, "greedy", 0, most)))
        pieces += [
            Piece(f"{name} stochastic {seed}", reconstruction, (data, sigma, "stochastic", seed, most))
            for seed in range(min(seeds, 5))
        ]
    found = run(pieces, args)
    write_searches(found, seeds, args)
    write_motorcycle(found, seeds, args)
    write_reconstruction(found, min(seeds, 5), args)
    rows = [100, 200, 400, 1000] if args.quick else BOSTON_ROWS + MORE_ROWS
    timed = [Piece("times of Table 1", motorcycle_times, (trials,))]
    timed += [
        Piece(f"times of Figure 4, {n} rows", boston_times, (data, n, 2 if args.quick else 10)) for n in rows
    ]
    times = run(timed, args, jobs=1)
    write_times(times.pop("times of Table 1"), args)
    write_growth(list(times.values()), args)


if __name__ == "__main__":
    main()
