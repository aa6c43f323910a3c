"""Leave-one-out of the LS-SVM against training alone: ratios measured in one run, float64.

    python scripts/bench/least_squares.py [--quick] [--repeats 7]

Training is the Cholesky factorisation of K + reg I and one solve; K is given. --quick leaves out
n = 4000. Exits with 1 if a ratio is missed.
"""

import argparse
import subprocess
import sys

import torch
from measure import Table, best_times, peak_bytes

import torchloo as tl
from torchloo.cli.bench import kernel_matrix, loo, loo_with_gradient, targets, train


def against_training(table: Table, n: int, repeats: int, forward: float, backward: float) -> None:
    K = kernel_matrix(n)
    Y = targets(n, 1)
    times = best_times(
        {
            "train": lambda: train(K, Y),
            "forward": lambda: loo(K, Y),
            "forward and backward": lambda: loo_with_gradient(K, Y),
        },
        repeats,
    )
    base = times["train"]
    for what, limit in (("forward", forward), ("forward and backward", backward)):
        seconds = times[what]
        table.row(f"n = {n}: LOO {what} / training ({base:.3f} s)", seconds, seconds / base, limit)


def against_eigh(table: Table, n: int, repeats: int) -> None:
    K = kernel_matrix(n)
    Y = targets(n, 1)
    machine = tl.LSSVM(tl.kernels.Precomputed())
    regs = torch.logspace(-3, 3, 30, dtype=torch.float64)
    clusters = torch.arange(n) % 100
    times = best_times(
        {
            "eigh": lambda: torch.linalg.eigh(K),
            "one": lambda: machine.path(K, Y, regs[:1]),
            "loo": lambda: machine.path(K, Y, regs),
            "lco": lambda: machine.path(K, Y, regs, clusters),
        },
        repeats,
    )
    base = times["eigh"]
    table.row(f"n = {n}: 30 reg by LOO / one eigh ({base:.3f} s)", times["loo"], times["loo"] / base, 1.1)
    table.row(f"n = {n}: 30 reg by LCO, 100 clusters / one eigh", times["lco"], times["lco"] / base, 1.7)
    print(f"n = {n}: up to {times['loo'] / times['one']:.1f} reg, LOO by a Cholesky for each is cheaper")


def batch_against_loop(table: Table, problems: int, repeats: int) -> None:
    n, c = 32, 5
    X = targets(problems, n, 4, seed=2)
    with torch.no_grad():
        K = tl.kernels.RBF(lengthscale=2.0)(X)
    Y = targets(problems, n, c)
    some = max(1, problems // 16)
    times = best_times(
        {
            "batch": lambda: loo_with_gradient(K, Y),
            "loop": lambda: [loo_with_gradient(K[i], Y[i]) for i in range(some)],
        },
        repeats,
    )
    loop = times["loop"] * problems / some
    what = f"{problems} problems of n = {n}, c = {c}: loop / batch, with gradient"
    table.row(what, times["batch"], loop / times["batch"], 20, at_least=True)


def ragged_clusters(table: Table, repeats: int) -> None:
    """Sparse LS-SVM, m = 60: 139 clusters of 22 to 229 rows, hardly two of one size."""
    sizes = 22 + (torch.arange(139) * 1.5).long()
    clusters = torch.repeat_interleave(torch.arange(139), sizes)
    n = len(clusters)
    X = targets(n, 8, seed=3)
    y = targets(n, 1)[:, 0]
    machine = tl.SparseLSSVM(tl.kernels.RBF(lengthscale=3.0), basis=X[:60])

    def gradient(held_out: tl.HeldOut) -> None:
        tl.criteria.press(held_out).backward()

    def forward(call) -> None:
        with torch.no_grad():
            call()

    times = best_times(
        {
            "LOO": lambda: forward(lambda: machine.loo(X, y)),
            "LCO": lambda: forward(lambda: machine.lco(X, y, clusters)),
            "LOO and gradient": lambda: gradient(machine.loo(X, y)),
            "LCO and gradient": lambda: gradient(machine.lco(X, y, clusters)),
        },
        repeats,
    )
    for what, limit in (("", 4.0), (" and gradient", 5.0)):
        seconds = times["LCO" + what]
        ratio = times["LCO" + what] / times["LOO" + what]
        table.row(f"n = {n}, m = 60: LCO{what}, 139 clusters / LOO{what}", seconds, ratio, limit)


def own_regularisations(table: Table, n: int, c: int, repeats: int) -> None:
    """One regularisation for each output: one decomposition against a batch of c factorisations."""
    K = kernel_matrix(n)
    Y = targets(n, c)
    regs = torch.logspace(-1, 1, c, dtype=torch.float64)
    machine = tl.LSSVM(tl.kernels.Precomputed(), regs, reg_per_output=True)

    def batch(inputs: torch.Tensor) -> tl.HeldOut:
        by_output = Y.mT.unsqueeze(-1)
        return tl.functional.lssvm(inputs.expand(c, n, n), by_output, regs).held_out()

    def gradient(call) -> None:
        inputs = K.clone().requires_grad_()
        call(inputs).residuals.square().sum().backward()

    times = best_times(
        {
            "own": lambda: machine.loo(K, Y),
            "batch": lambda: batch(K),
            "own and gradient": lambda: gradient(lambda inputs: machine.loo(inputs, Y)),
            "batch and gradient": lambda: gradient(batch),
        },
        repeats,
    )
    for what, limit in (("", 2.0), (" and gradient", 1.2)):
        seconds = times["own" + what]
        ratio = times["batch" + what] / times["own" + what]
        table.row(
            f"n = {n}, c = {c}: batch / reg_per_output, LOO{what}", seconds, ratio, limit, at_least=True
        )


def buffers(table: Table, n: int, buffer: int, repeats: int) -> None:
    """h-block: every row left out with those about it, against as many trainings as there are rows."""
    K = kernel_matrix(n)
    Y = targets(n, 1)
    sets = tl.splits.h_block(torch.arange(n), buffer)
    machine = tl.LSSVM(tl.kernels.Precomputed())

    def gradient() -> None:
        leaf = K.clone().requires_grad_()
        machine.lso(leaf, Y, sets).residuals.square().sum().backward()

    def forward() -> None:
        with torch.no_grad():
            machine.lso(K, Y, sets)

    times = best_times({"train": lambda: train(K, Y), "": forward, " and gradient": gradient}, repeats)
    for what, limit in (("", 20.0), (" and gradient", 40.0)):
        ratio = times[what] / times["train"]
        table.row(f"n = {n}: h-block of {2 * buffer + 1} rows{what} / training", times[what], ratio, limit)


def memory(n: int) -> None:
    """Print the peak memory of LOO forward, and of forward and backward, in n^2 numbers."""
    K = kernel_matrix(n)
    Y = targets(n, 1)
    loo_with_gradient(K[:64, :64].contiguous(), Y[:64])
    for call in (loo, loo_with_gradient):
        print(peak_bytes(lambda call=call: call(K, Y)) / (8 * n * n))


def measured_memory(table: Table, n: int) -> None:
    """In a process of its own, where no earlier call has left memory behind."""
    command = [sys.executable, __file__, "--memory", str(n)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    table.row(f"n = {n}: peak memory of LOO forward / n^2 numbers", None, float(printed[0]), 3)
    table.row(f"n = {n}: peak memory of LOO forward and backward / n^2", None, float(printed[1]), 5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="leave out n = 4000")
    parser.add_argument("--repeats", type=int, default=7, help="turns of which the best counts")
    parser.add_argument("--memory", type=int, metavar="N", help="only print the peak memory at n = N")
    arguments = parser.parse_args()
    if arguments.memory:
        memory(arguments.memory)
        return
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    table = Table()
    for n, forward, backward in ((1000, 3.3, 7.0), (2000, 2.3, 5.6), (4000, 2.3, 5.6)):
        if n < 4000 or not arguments.quick:
            against_training(table, n, arguments.repeats, forward, backward)
    against_eigh(table, 2000, arguments.repeats)
    batch_against_loop(table, 4096, arguments.repeats)
    ragged_clusters(table, arguments.repeats)
    own_regularisations(table, 1000, 20, arguments.repeats)
    buffers(table, 2000, 20, arguments.repeats)
    measured_memory(table, 2000 if arguments.quick else 4000)
    sys.exit(1 if table.failed else 0)


if __name__ == "__main__":
    main()
