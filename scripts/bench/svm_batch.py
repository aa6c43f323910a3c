"""Leave-one-out and leave-cluster-out of many SVMs: one call against one after another.

    python scripts/bench/svm_batch.py [--data DIR] [--repeats 6] [--rows 400]

64 pairs (C, lengthscale) of banana: the grid of Franc, Laskov and Mueller 2008, section 5, 8 values of C
from 1 to 500, 8 rates from 1 to 2^-11. And 256 problems of 50 rows of twonorm, RBF with lengthscale sqrt(d),
C = 1: decision values, errors only, and 10 clusters left out by each method. All sides run in turn; the best
of each counts, as wall-clock time with the threads that torch has by default.
"""

import argparse
from collections.abc import Callable
from functools import partial

import torch
from measure import Table, add_data, best_times
from svm_loo import load

import torchloo as tl
from torchloo.svm import svm_lco, svm_loo


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_data(parser)
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--rows", type=int, default=400)
    options = parser.parse_args()
    X, y = (part[: options.rows] for part in load(options.data, "banana"))
    steps = torch.arange(8, dtype=torch.float64) / 7
    rates, C = 2 ** (-11 * steps), 500**steps
    lengthscales = (2 * rates) ** -0.5

    def together() -> torch.Tensor:
        machine = tl.SVC(tl.kernels.RBF(lengthscales[:, None, None]), C=C)
        with torch.no_grad():
            return machine.loo(X, y).outputs

    def one_after_another() -> torch.Tensor:
        rows = []
        for lengthscale in lengthscales.tolist():
            for bound in C.tolist():
                with torch.no_grad():
                    rows.append(tl.SVC(tl.kernels.RBF(lengthscale), C=bound).loo(X, y).outputs)
        return torch.stack(rows).reshape(8, 8, -1)

    seconds = best_times({"loop": one_after_another, "call": together}, options.repeats)
    difference = float((together() - one_after_another()).abs().max())
    print(f"{len(y)} rows, {torch.get_num_threads()} threads")
    print(f"largest difference between one call and one after another {difference:.1e}")
    table = Table()
    ratio = seconds["loop"] / seconds["call"]
    table.row("64 pairs, one after another / in one call", seconds["call"], ratio, 3, at_least=True)
    clusters = torch.arange(50) % 10
    held_out: dict[str, Callable[..., tl.svm.SVMHeldOut]] = {
        "values": svm_loo,
        "errors": partial(svm_loo, values=False),
        "10 clusters": partial(svm_lco, clusters=clusters),
        '10 clusters, "smo"': partial(svm_lco, clusters=clusters, method="smo"),
    }
    for name, function in held_out.items():
        seconds = best_times(small(function), options.repeats)
        ratio = seconds["loop"] / seconds["call"]
        limit = 10 if "clusters" in name else 15
        table.row(f"256 problems of 50 rows, {name}", seconds["call"], ratio, limit, at_least=True)


def small(function: Callable[..., tl.svm.SVMHeldOut]) -> dict[str, Callable[[], torch.Tensor]]:
    """256 problems of 50 rows, one after another and in one call."""
    X, y = tl.datasets.twonorm(256 * 50, generator=torch.Generator().manual_seed(0))
    X, y = X.double().view(256, 50, -1), y.double().view(256, 50)
    K = tl.kernels.RBF(X.shape[-1] ** 0.5)(X).detach()

    def one_after_another() -> torch.Tensor:
        return torch.stack([function(k, z, 1.0).outputs for k, z in zip(K, y, strict=True)])

    return {"loop": one_after_another, "call": lambda: function(K, y, 1.0).outputs}


if __name__ == "__main__":
    main()
