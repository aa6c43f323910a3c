"""Explicit features, paths and small problems: ratios measured in one run, both sides in turns.

    python scripts/bench/features.py [--quick] [--repeats 5] [--only NAME [--case TEXT]] [--million]
        [--rows N]

ridge   LOO of 30 reg with weights and bias (`LSSVM(Linear()).path`) against RidgeCV of scikit-learn, whose
        cv_results_ are the same weight * residual^2; where rows are fewer than columns, against one eigh of
        an (n, n) matrix and one product X X^T. Ten lines by hand (plain.py) for information.
sparse  SparseLSSVM with an ARD kernel and a fixed basis of m rows: LOO, and PRESS with its gradient in basis,
        lengthscales and reg, against two products. Peak memory beyond the inputs.
stream  PRESS of a Stream and its gradient against the LOO alone; the gradient equals that of rows in memory.
head    PRESS of a linear machine with 10 outputs, float32, and its gradient in X and reg, against autograd;
        single problems and batches of them.
small   RLS with an RBF kernel at n = 50; PRESS of many linear problems of n = 25 with its gradient in X.
counts  Operations dispatched and synchronisations of `path` for 5, 30 and 100 reg.
million One evaluation (value and gradient) of `select` on a Stream against two products; only with --million.

"Two products" are Z^T Z and Z C for Z of n rows and m columns and C (m, m), plain float64 torch.mm in blocks
of 2048 rows of one buffer, summed nowhere; no kernel is evaluated on that side. The plain sides (plain.py)
are what one writes by hand, with autograd for gradients, Cholesky or `torch.linalg.inv`, whichever is the
faster; every one is compared with ours, to 1e-7 in float64 and 1e-3 in float32. --quick leaves out the
largest sizes. Exits with 1 if a ratio is missed or two sides differ. Needs scikit-learn (extra bench).
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

import plain
import torch
from measure import Table, best_times, operations, peak_bytes
from scale import two_products
from sklearn.linear_model import RidgeCV
from torch import Tensor, nn
from tqdm import tqdm

import torchloo as tl

COLUMNS = 20
MIB = 2**20
LIMIT = {torch.float64: 1e-7, torch.float32: 1e-3}
INVERSES = {"Cholesky": plain.cholesky_inverse, "inv": torch.linalg.inv}


def normal(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def rows(n: int, d: int = COLUMNS) -> tuple[Tensor, Tensor]:
    """Standard normal inputs (n, d), and a smooth target with noise."""
    X = normal(n, d)
    return X, X[:, 0].sin() + X[:, 1] * X[:, 2] / 2 + 0.1 * normal(n, seed=1)


def in_turns(what: str, sides: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Best seconds of every side, under a bar that says what is measured."""
    with tqdm(desc=what, total=repeats + 1, unit="turn", leave=False, disable=None) as bar:
        return best_times(sides, repeats, bar.update)


def gradient(loss: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    """Gradients of a loss, in leaves that had none."""
    for leaf in leaves:
        leaf.grad = None
    loss.backward()
    gradients = [leaf.grad for leaf in leaves]
    assert all(g is not None for g in gradients)
    return gradients  # type: ignore[return-value]


def without_graph(call: Callable[[], object]) -> object:
    with torch.no_grad():
        return call()


def faster(times: dict[str, float]) -> tuple[str, float]:
    """The plain side that takes less time, and its seconds."""
    name = min(INVERSES, key=lambda side: times[side])
    return name, times[name]


def ridge(table: Table, quick: bool, repeats: int) -> None:
    for n, d in ((20_000, 50),) if quick else ((20_000, 50), (50_000, 256)):
        if table.wants(f"{n:,} x {d}"):
            against_ridge_cv(table, n, d, repeats)
    if not quick and table.wants("2,000 x 3,000"):
        against_decomposition(table, 2000, 3000, repeats)


class Probe:
    """A weighted problem of n rows and d columns, 30 regularisations, and what each side makes of it."""

    def __init__(self, n: int, d: int) -> None:
        self.X, self.y = rows(n, d)
        self.weight = 0.5 + torch.rand(n, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
        self.regs = max(n, d) * torch.logspace(-3, 3, 30, dtype=torch.float64)

    def ours(self) -> tl.HeldOut:
        return tl.LSSVM(tl.kernels.Linear()).path(self.X, self.y, self.regs, weight=self.weight)

    def theirs(self) -> RidgeCV:
        machine = RidgeCV(alphas=self.regs.numpy(), store_cv_results=True)
        return machine.fit(self.X.numpy(), self.y.numpy(), sample_weight=self.weight.numpy())

    def by_hand(self) -> Tensor:
        return plain.linear_path(self.X, self.y, self.weight, self.regs)

    def compare(self, table: Table) -> None:
        """The mean of weight * residual^2 for every regularisation."""
        ours = (self.weight * self.ours().residuals.square()).mean(-1)
        theirs = torch.from_numpy(self.theirs().cv_results_).mean(0)
        table.agreement("mean w r^2 of each reg, ours and RidgeCV", [ours], [theirs], 1e-9)


def against_ridge_cv(table: Table, n: int, d: int, repeats: int) -> None:
    probe = Probe(n, d)
    shape = f"{n:,} x {d}, LOO of 30 reg"
    # Threads of the other library's BLAS go on spinning for a while; a rest lets them end first.
    rest = partial(time.sleep, 0.1)
    sides = {"ours": probe.ours, "theirs": probe.theirs, "rest": rest, "hand": probe.by_hand}
    times = in_turns(f"ridge {n} x {d}", sides, repeats)
    ratio = times["theirs"] / times["ours"]
    table.row(f"{shape}: RidgeCV ({times['theirs']:.3f} s) / ours", times["ours"], ratio, 8, at_least=True)
    table.info(f"{shape}: ours / ten lines by hand", times["ours"], times["ours"] / times["hand"])
    probe.compare(table)
    table.agreement("residuals, ours and by hand", [probe.ours().residuals], [probe.by_hand()], 1e-7)


def against_decomposition(table: Table, n: int, d: int, repeats: int) -> None:
    probe = Probe(n, d)
    K = probe.X @ probe.X.mT
    sides = {
        "ours": probe.ours,
        "eigh": lambda: torch.linalg.eigh(K),
        "product": lambda: probe.X @ probe.X.mT,
    }
    times = in_turns(f"ridge {n} x {d}", sides, repeats)
    base = times["eigh"] + times["product"]
    what = f"{n:,} x {d:,}, LOO of 30 reg / eigh and X X^T ({base:.3f} s)"
    table.row(what, times["ours"], times["ours"] / base, 1.15)
    probe.compare(table)


def sparse_machine(X: Tensor, m: int) -> tl.SparseLSSVM:
    """An ARD machine whose basis, trainable, starts as the first m rows."""
    lengthscale = torch.full((X.shape[-1],), 5.0, dtype=X.dtype)
    kernel = tl.kernels.RBF(lengthscale=lengthscale)
    return tl.SparseLSSVM(kernel, reg=1.0, basis=nn.Parameter(X[:m].clone()))


def press_gradient(machine: nn.Module, *data: object) -> list[Tensor]:
    """Gradients of PRESS in all parameters."""
    return gradient(tl.criteria.press(machine.loo(*data)), list(machine.parameters()))


def sparse(table: Table, quick: bool, repeats: int) -> None:
    if table.wants("20,000 rows, m = 200"):
        against_products(table, 20_000, 200, repeats, asked=False)
        sparse_agreement(table, 20_000, 200, repeats)
    if not quick and table.wants("200,000 rows, m = 400"):
        against_products(table, 200_000, 400, repeats, asked=True)
    if not table.wants("peak"):
        return
    n, m = (20_000, 200) if quick else (200_000, 400)
    peak = peak_of("sparse", n, m)
    table.row(f"{n:,} rows, m = {m}: LOO, peak MiB beyond the inputs", None, peak / MIB, 700)
    peak = peak_of("sparse-gradient", n, m)
    print(f"  with its gradient: {peak / MIB:.0f} MiB")


def against_products(table: Table, n: int, m: int, repeats: int, asked: bool) -> None:
    X, y = rows(n)
    machine = sparse_machine(X, m)

    def kernel_columns() -> None:
        for part in X.split(2048):
            machine.kernel(part, machine.basis)

    sides = {
        "LOO": lambda: without_graph(lambda: machine.loo(X, y)),
        "PRESS and gradient": lambda: press_gradient(machine, X, y),
        "kernel": lambda: without_graph(kernel_columns),
        "products": two_products(n, m, 2048),
    }
    times = in_turns(f"sparse {n} m = {m}", sides, repeats)
    base = times["products"]
    for what, limit in (("LOO", 1.7), ("PRESS and gradient", 5.0)):
        shown = f"{n:,} rows, m = {m}: {what} / products ({base:.3f} s)"
        if asked:
            table.row(shown, times[what], times[what] / base, limit)
        else:
            table.info(shown, times[what], times[what] / base)
    table.info(f"{n:,} rows, m = {m}: kernel alone / products", times["kernel"], times["kernel"] / base)


def sparse_agreement(table: Table, n: int, m: int, repeats: int) -> None:
    """Values and gradients beside plain torch, and what that takes."""
    X, y = rows(n)
    machine = sparse_machine(X, m)
    leaves = list(machine.parameters())

    def by_hand() -> list[Tensor]:
        residuals = plain.sparse_residuals(
            X, y.unsqueeze(-1), machine.basis, machine.reg, machine.kernel.lengthscale
        )
        return [residuals[:, 0].detach(), *gradient(residuals.square().sum(), leaves)]

    def ours() -> list[Tensor]:
        held_out = machine.loo(X, y)
        return [held_out.residuals.detach(), *gradient(tl.criteria.press(held_out), leaves)]

    times = in_turns(f"sparse {n} m = {m}, plain", {"ours": ours, "hand": by_hand}, repeats)
    ratio = times["ours"] / times["hand"]
    table.info(f"{n:,} rows, m = {m}: PRESS and gradient / plain autograd", times["ours"], ratio)
    table.agreement("residuals and gradients, ours and plain", ours(), by_hand(), 1e-7)


def stream(table: Table, quick: bool, repeats: int) -> None:
    n, m = (20_000, 300) if quick else (200_000, 300)
    X, y = rows(n)
    machine = sparse_machine(X, m)
    source = tl.Stream(X, y, progress=False)
    if not keeps_graph(X[:1000], y[:1000]):
        table.missing(f"{n:,} rows, m = {m}: PRESS and gradient / LOO")
        return
    sides = {
        "LOO": lambda: without_graph(lambda: machine.loo(source)),
        "gradient": lambda: press_gradient(machine, source),
    }
    times = in_turns(f"stream {n} m = {m}", sides, repeats)
    what = f"{n:,} rows, m = {m}: PRESS and gradient / LOO ({times['LOO']:.3f} s)"
    table.row(what, times["gradient"], times["gradient"] / times["LOO"], 2.8)
    received = press_gradient(machine, source)
    expected = press_gradient(machine, X, y)
    table.agreement("gradients, streamed and in memory", received, expected, 1e-8)
    if not table.wants("peak"):
        return
    more = peak_of("stream-gradient", n, m) - peak_of("stream", n, m)
    table.row(f"{n:,} rows, m = {m}: peak MiB beyond that of the LOO", None, more / MIB, 300)


def keeps_graph(X: Tensor, y: Tensor) -> bool:
    """Whether held-out rows of a stream can be differentiated."""
    held_out = sparse_machine(X, 10).loo(tl.Stream(X, y, progress=False))
    return held_out.residuals.requires_grad


def head(table: Table, quick: bool, repeats: int) -> None:
    for n, d, limit in ((4096, 512, 1.0), (20_000, 256, 1.0), (512, 256, 1.3), (64, 640, 1.3)):
        what = f"n = {n:,}, d = {d}, 10 outputs, float32"
        if (n <= 4096 or not quick) and table.wants(what):
            against_autograd(table, what, (n, d), 10, limit, repeats if n > 1000 else 20 * repeats)
    for problems, n, d, limit in ((16, 512, 64, 1.4), (64, 100, 16, 2.6)):
        what = f"{problems} problems of n = {n}, d = {d}, 10 outputs, float32"
        if table.wants(what):
            against_autograd(table, what, (problems, n, d), 10, limit, 5 * repeats)


def against_autograd(
    table: Table,
    what: str,
    shape: tuple[int, ...],
    outputs: int,
    limit: float,
    repeats: int,
) -> None:
    """PRESS of linear problems (..., n, d) and its gradient in X and reg."""
    X = normal(*shape, dtype=torch.float32).requires_grad_()
    Y = normal(*shape[:-1], outputs, dtype=torch.float32, seed=1)
    machine = tl.LSSVM(tl.kernels.Linear(), reg=100.0)  # where float32 by hand keeps its digits too
    log_reg = machine.log_reg.detach().to(X.dtype).requires_grad_()

    def ours() -> list[Tensor]:
        press = tl.criteria.press(machine.loo(X, Y)).sum()
        return gradient(press, [X, machine.log_reg])

    def by_hand(inverse: plain.Inverse) -> list[Tensor]:
        residuals = plain.linear_residuals(X, Y, log_reg.exp(), inverse)
        return gradient(residuals.square().sum() / outputs, [X, log_reg])

    sides = {name: lambda inverse=inverse: by_hand(inverse) for name, inverse in INVERSES.items()}
    times = in_turns(what, {"ours": ours, **sides}, repeats)
    name, base = faster(times)
    table.row(f"{what}: / autograd, {name}", times["ours"], times["ours"] / base, limit)
    said = f"gradients; {base * 1e3:.2f} ms by hand"
    table.agreement(said, ours(), by_hand(INVERSES[name]), LIMIT[X.dtype])


def small(table: Table, quick: bool, repeats: int) -> None:
    if table.wants("RLS, RBF, n = 50"):
        small_kernel(table, 50, 20 * repeats)
    for episodes in (64,) if quick else (64, 1024):
        what = f"{episodes:,} episodes of n = 25, d = 64, c = 5"
        if table.wants(what):
            turns = 5 if episodes > 100 else 20  # calls of a millisecond take more of them
            against_autograd(table, what, (episodes, 25, 64), 5, 1.0, turns * repeats)


def small_kernel(table: Table, n: int, repeats: int) -> None:
    X = normal(n, 5).requires_grad_()
    Y = normal(n, 1, seed=1)
    machine = tl.RLS(tl.kernels.RBF(lengthscale=2.0), reg=0.5)
    leaves = [X, machine.log_reg, machine.kernel.log_lengthscale]

    def by_hand(inverse: plain.Inverse) -> Tensor:
        return plain.rls_residuals(X, Y, machine.reg, machine.kernel.lengthscale, inverse)

    def ours() -> Tensor:
        return machine.loo(X, Y).residuals

    def with_gradient(residuals: Tensor) -> list[Tensor]:
        return [residuals.detach(), *gradient(residuals.square().sum(), leaves)]

    plain_sides = {name: lambda inverse=inverse: by_hand(inverse) for name, inverse in INVERSES.items()}
    sides = {"ours": ours, **plain_sides}
    for what, limit, around in (("LOO", 2.5, without_graph), ("PRESS and gradient", 1.8, None)):
        timed = {
            name: lambda call=call, around=around: around(call) if around else with_gradient(call())
            for name, call in sides.items()
        }
        times = in_turns(f"RLS {what}", timed, repeats)
        name, base = faster(times)
        shown = f"RLS, RBF, n = {n}: {what} / plain, {name} ({base * 1e3:.2f} ms)"
        table.row(shown, times["ours"], times["ours"] / base, limit)
    expected = with_gradient(by_hand(plain.cholesky_inverse))
    table.agreement("residuals and gradients", with_gradient(ours()), expected, 1e-7)


def counts(table: Table, quick: bool, repeats: int) -> None:
    """Of 1000 rows, few enough for one block."""
    X, y = rows(1000)
    machines = {
        "linear": tl.LSSVM(tl.kernels.Linear()),
        "sparse": tl.SparseLSSVM(tl.kernels.RBF(lengthscale=5.0), basis=X[:50]),
    }
    for name, machine in machines.items():
        found = []
        for R in (5, 30, 100):
            regs = torch.logspace(-2, 2, R, dtype=X.dtype)
            count, waits = operations(lambda regs=regs, m=machine: without_graph(lambda: m.path(X, y, regs)))
            table.row(f"{name} path of {R} reg: operations without views", None, count, 300)
            table.row(f"{name} path of {R} reg: synchronisations", None, waits, 3)
            found.append(count)
        table.row(f"{name} path: most operations / fewest", None, max(found) / min(found), 1.0)


def million(table: Table, n: int, m: int) -> None:
    X, y = rows(n)
    what = f"{n:,} rows, m = {m}: one evaluation of select on a Stream"
    try:
        chosen(X[:1000], y[:1000], 10, 1)
    except TypeError as error:
        print(f"  {error}")
        table.missing(what)
        return
    seconds, evaluations = [], []
    for limit in (1, 4):
        start = time.perf_counter()
        evaluations.append(chosen(X, y, m, limit).evaluations)
        seconds.append(time.perf_counter() - start)
        print(f"  select, {evaluations[-1]} evaluations and the fit: {seconds[-1]:.1f} s", flush=True)
    one = (seconds[1] - seconds[0]) / (evaluations[1] - evaluations[0])
    products = best_times({"products": two_products(n, m, 2048)}, 2)["products"]
    table.info(f"{what} / two products", one, one / products)
    print(f"  peak memory of select beyond the data: {peak_of('million', n, m) / MIB:.0f} MiB")


def chosen(X: Tensor, y: Tensor, m: int, limit: int) -> tl.Selection:
    """`select` on a stream, from the values of the machine, with so many evaluations."""
    source = tl.Stream(X, y, progress=False)
    machine = sparse_machine(X, m)
    machine.basis.requires_grad_(False)
    return tl.select(machine, source, start="machine", max_evaluations=limit, progress=False)


def memory(name: str, n: int, m: int) -> None:
    """Print how far one call raises the memory of this process; a small call has gone before it."""
    X, y = rows(n)

    def call(X: Tensor, y: Tensor, m: int) -> object:
        if name == "million":
            return chosen(X, y, m, 1)
        machine = sparse_machine(X, m)
        data = (tl.Stream(X, y, progress=False),) if name.startswith("stream") else (X, y)
        if name.endswith("gradient"):
            return press_gradient(machine, *data)
        return without_graph(lambda: machine.loo(*data))

    call(X[:1000], y[:1000], 10)
    print(peak_bytes(lambda: call(X, y, m)))


def peak_of(name: str, n: int, m: int) -> int:
    """Bytes, from a process of its own, where no earlier call has left memory behind."""
    command = [sys.executable, __file__, "--memory", name, str(n), str(m)]
    return int(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)


GROUPS = {"ridge": ridge, "sparse": sparse, "stream": stream, "head": head, "small": small, "counts": counts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="leave out the largest sizes")
    parser.add_argument("--repeats", type=int, default=5, help="turns of which the best counts")
    parser.add_argument("--only", choices=[*GROUPS, "million"], help="run one group")
    parser.add_argument(
        "--case", default="", help="of it, only rows whose name has this text, e.g. 'd = 640'"
    )
    parser.add_argument("--million", action="store_true", help="select on a Stream too: many minutes")
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of million")
    parser.add_argument("--memory", nargs=3, metavar=("NAME", "N", "M"), help="only print a peak of memory")
    arguments = parser.parse_args()
    if arguments.memory:
        name, n, m = arguments.memory
        memory(name, int(n), int(m))
        return
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    table = Table(arguments.case)
    for name, group in GROUPS.items():
        if arguments.only in (None, name):
            print(name, flush=True)
            group(table, arguments.quick, arguments.repeats)
    if arguments.only == "million" or (arguments.million and arguments.only is None):
        print("million", flush=True)
        million(table, arguments.rows, 500)
    sys.exit(1 if table.failed else 0)


if __name__ == "__main__":
    main()
