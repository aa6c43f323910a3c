"""Jackknife+ prediction intervals in closed form beside MAPIE, which refits for every row.

    python scripts/bench/intervals.py [--rows 300] [--new 200] [--repeats 3]

Both sides make 90 % intervals of the same kernel ridge regression at the same new rows: MAPIE's
CrossConformalRegressor with n folds over scikit-learn's KernelRidge, and tl.intervals.jackknife_plus with
RLS. They run in turn, the best of each counts. Exits with 1 where the ratio is below 100 or the sides differ
by more than 1e-8. Needs mapie and scikit-learn (extra peers).
"""

import argparse
import sys

import torch
from mapie.regression import CrossConformalRegressor
from measure import Table, best_times
from sklearn.kernel_ridge import KernelRidge
from sklearn.model_selection import LeaveOneOut
from torch import Tensor

import torchloo as tl

RATE, REG, LEVEL = 0.5, 0.3, 0.9


def rows(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    X = 6 * torch.rand(count, 2, dtype=torch.float64, generator=generator)
    noise = torch.randn(count, dtype=torch.float64, generator=generator)
    return X, (2 * X[:, 0]).sin() * X[:, 1] + 0.3 * noise


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=300)
    parser.add_argument("--new", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    X, y = rows(options.rows, generator)
    X_new, y_new = rows(options.new, generator)
    machine = tl.RLS(tl.kernels.RBF.from_rate(RATE), REG)

    def closed_form() -> Tensor:
        return torch.stack(tl.intervals.jackknife_plus(machine, X, y, X_new, LEVEL), -1)

    def refits() -> Tensor:
        ridge = KernelRidge(kernel="rbf", gamma=RATE, alpha=REG)
        peer = CrossConformalRegressor(ridge, confidence_level=LEVEL, method="plus", cv=LeaveOneOut())
        _, ends = peer.fit_conformalize(X.numpy(), y.numpy()).predict_interval(X_new.numpy())
        return torch.from_numpy(ends[..., 0])

    ends, peers = closed_form(), refits()
    difference = float((ends - peers).abs().max())
    covered = (ends[:, 0] <= y_new) & (y_new <= ends[:, 1])
    print(
        f"{options.rows} rows, {options.new} new ones; largest difference of an end {difference:.1e}; ",
        end="",
    )
    print(f"{covered.double().mean():.1%} of the new targets covered")
    seconds = best_times({"closed": closed_form, "refits": refits}, options.repeats)
    table = Table()
    ratio = seconds["refits"] / seconds["closed"]
    table.row("MAPIE, n folds / jackknife_plus", seconds["closed"], ratio, 100, at_least=True)
    return int(difference > 1e-8 or ratio < 100)


if __name__ == "__main__":
    sys.exit(main())
