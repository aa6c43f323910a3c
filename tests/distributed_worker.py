"""What each of two processes does for test_distributed.py; its results go to <folder>/<rank>.pt."""

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import torchloo as tl

ROWS, FIRST = 60, 35  # process 0 has the first 35 rows
REGS = torch.tensor([0.01, 0.3, 4.0], dtype=torch.float64)
DTYPES = (torch.float32, torch.float64, torch.float32)


def on_the_cpu(make):
    """The function, with what it makes on the CPU whatever the default device."""

    def made():
        with torch.device("cpu"):
            return make()

    return made


MACHINES = {
    "sparse": on_the_cpu(lambda: sparse(rows()[0][:8] + 0.1, 1.4, 0.1)),
    "sparse, refitted": on_the_cpu(lambda: sparse(rows()[0][30:38], 0.1, 1e-8)),
    "lssvm": on_the_cpu(lambda: tl.LSSVM(tl.kernels.Linear(), reg=0.3)),
    "rls": on_the_cpu(lambda: tl.RLS(2.0 * tl.kernels.Linear(), reg=0.3)),
}


def sparse(basis, lengthscale, reg):
    return tl.SparseLSSVM(tl.kernels.RBF(lengthscale), reg, basis=torch.nn.Parameter(basis))


@on_the_cpu
def rows():
    generator = torch.Generator().manual_seed(5)
    X = torch.randn(ROWS, 3, generator=generator, dtype=torch.float64)
    Y = X[:, :2].sin() + 0.1 * torch.randn(ROWS, 2, generator=generator, dtype=torch.float64)
    weight = 0.25 + torch.rand(ROWS, generator=generator, dtype=torch.float64)
    return X, Y, weight


@on_the_cpu
def clusters():
    """Small ones, and in process 0 two with more rows than features; none in both processes."""
    number = torch.arange(ROWS)
    return torch.where(number < FIRST, torch.where(number < 28, number % 2, number), -1 - number % 6)


def own():
    return slice(0, FIRST) if dist.get_rank() == 0 else slice(FIRST, ROWS)


def labels():
    X, y = tl.datasets.twonorm(40, generator=torch.Generator().manual_seed(1))
    return X.double(), y.double()


def gradients(machine, X):
    return {name: p.grad for name, p in machine.named_parameters()} | {"X": X.grad}


def sharded():
    """Held-out rows with a graph, by the sum of the losses of both processes."""
    results = {}
    for name, make in MACHINES.items():
        for labels in (None, clusters()):
            machine, part = make(), own()
            X, Y, weight = (t[part] for t in rows())
            X.requires_grad_()
            if labels is None:
                held_out = tl.distributed.loo(machine, X, Y, weight)
            else:
                held_out = tl.distributed.lco(machine, X, Y, labels[part], weight)
            tl.criteria.press(held_out).backward()
            tl.distributed.sum_gradients(machine)
            detached = [t.detach() if isinstance(t, torch.Tensor) else t for t in held_out]
            results[name, labels is None] = (tl.HeldOut(*detached), gradients(machine, X))
    return results


def streamed():
    results = {}
    for name, make in MACHINES.items():
        machine, part = make(), own()
        stream = tl.Stream(*(t[part] for t in rows()), block=7, progress=False)
        results[name] = {
            "loo": tl.distributed.loo(machine, stream),
            "lco": tl.distributed.lco(machine, stream, clusters=clusters()[part]),
            "path": tl.distributed.path(machine, stream, regs=REGS),
            "fit": tl.distributed.fit(machine, stream)(rows()[0]).detach(),
        }
        tensors = [t[part] for t in rows()]
        of_tensors = {
            "path": tl.distributed.path(machine, *tensors[:2], regs=REGS, weight=tensors[2]),
            "fit": tl.distributed.fit(machine, *tensors)(rows()[0]).detach(),
        }
        assert_alike(of_tensors, results[name])
    return results


def assert_alike(received, expected):
    for call, fields in received.items():
        for one, other in zip(fields, expected[call], strict=True):
            if one is not None:
                torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-9)


@on_the_cpu
def class_labels():
    """Three classes, of which process 0 has two only and process 1 the third."""
    number = torch.arange(ROWS)
    return torch.where(number < FIRST, 10 * (number % 2), 10 + 10 * (number % 2))


def classes():
    """Labels of which no process has all."""
    results = {}
    for name in ("sparse", "lssvm"):
        part = own()
        X = rows()[0]
        labels = class_labels()
        stream = tl.Stream(X[part], labels[part], block=7, progress=False)
        batches = tl.Stream([(X[part], labels[part])], progress=False)
        make = MACHINES[name]
        fitted = tl.distributed.fit(make(), stream)
        of_tensors = tl.distributed.fit(make(), X[part], labels[part])
        assert torch.equal(of_tensors.classes, fitted.classes)
        torch.testing.assert_close(of_tensors(X), fitted(X))
        results[name] = {
            "tensors": [
                t if t is None else t.detach() for t in tl.distributed.loo(make(), X[part], labels[part])
            ],
            "stream": [t if t is None else t.detach() for t in tl.distributed.loo(make(), stream)],
            "batches": [t if t is None else t.detach() for t in tl.distributed.loo(make(), batches)],
            "fit": (fitted.classes, fitted.predict_class(X)),
        }
    return results


def gathered():
    """One loss of all rows, computed alike in both processes."""
    machine = MACHINES["sparse"]()
    part = own()
    X, Y, weight = (t[part] for t in rows())
    X.requires_grad_()
    held_out = tl.distributed.gather(tl.distributed.lco(machine, X, Y, clusters()[part], weight))
    loss = tl.criteria.mse(held_out) ** 2
    loss.backward()
    tl.distributed.sum_gradients(machine)
    return loss.detach(), gradients(machine, X), held_out.clusters, held_out.refitted


def shared_out():
    X, y = labels()
    svc = tl.SVC(tl.kernels.RBF(3.0), C=2.0)
    result = tl.distributed.svc_loo(svc, X, y)
    tl.criteria.hinge(result).backward()
    tl.distributed.sum_gradients(svc)
    signs = tl.distributed.svc_loo(svc, X, y, method="smo", values=False)
    columns = tl.distributed.svc_loo(svc, X, torch.stack([y, y.roll(7)], -1))
    grid = {"reg": [0.1, 1.0, 10.0], "lengthscale": [1.0, 2.0, 4.0, 8.0]}
    machine = tl.LSSVM(tl.kernels.RBF())
    chosen = tl.distributed.select(machine, X, y, "press", grid=grid, progress=False)
    splits = tl.splits.k_fold(40, 5, generator=torch.Generator().manual_seed(0))
    options = {"search": "grid", "grid": grid, "progress": False}
    estimate = tl.distributed.validate(machine, X, y, splits, **options)
    return {
        "share": tl.distributed.share(lambda k: (k, dist.get_rank()), range(5)),
        "svc": (result.outputs.detach(), result.certified, result.resolved_by, svc.log_C.grad),
        "svc gradient": svc.kernel.log_lengthscale.grad,
        "signs": (signs.outputs, signs.errors),
        "columns": (columns.outputs.detach(), columns.errors, columns.refitted),
        "select": (chosen.value, chosen.evaluations, chosen.machine(X).detach()),
        "validate": (estimate.scores, estimate.table),
    }


def interrupted():
    """Process 1 is interrupted at the second of its two splits."""
    X, y = labels()
    scored = []

    def metric(held_out):
        scored.append(True)
        if dist.get_rank() == 1 and len(scored) == 2:
            raise KeyboardInterrupt
        return tl.criteria.mse(held_out)

    splits = tl.splits.k_fold(40, 5, generator=torch.Generator().manual_seed(0))
    options = {"search": "grid", "grid": {"reg": [0.1, 1.0]}, "metric": metric, "progress": False}
    machine = tl.LSSVM(tl.kernels.RBF(3.0))
    return tl.distributed.validate(machine, X, y, splits, **options).table


def twice(machine, X, Y):
    loss = tl.criteria.press(tl.distributed.loo(machine, X, Y)).sum()
    torch.autograd.grad(loss, machine.log_reg, create_graph=True)


def with_graph(wanted, call):
    with torch.set_grad_enabled(wanted):
        return call()


def message(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def added():
    """Gradients of a float32 and a float64 parameter, and of one that only process 1 has."""
    parameters = [torch.nn.Parameter(torch.zeros(2, dtype=dtype)) for dtype in DTYPES]
    for k, parameter in enumerate(parameters[: 2 + dist.get_rank()]):
        parameter.grad = torch.full_like(parameter, 1.0 + k + dist.get_rank())
    tl.distributed.sum_gradients(parameters)
    return [parameter.grad for parameter in parameters]


def calls(X, Y, second):
    """What process 1 calls in another way; each is raised in both processes."""
    make = MACHINES["lssvm"]
    stream = tl.Stream(X, Y, progress=False)
    labels = clusters()[own()]
    narrow = tl.Stream(X, Y[:, 0] if second else Y, progress=False)
    empty = slice(0, 0 if second else None)
    regs = torch.tensor([1.0 + second], dtype=torch.float64)
    solved = tl.distributed.solve(make(), stream)
    distributed = tl.distributed

    def path(regs):
        return message(lambda: distributed.path(make(), X, Y, regs))

    def loo_or_lco():
        return distributed.lco(make(), X, Y, labels) if second else distributed.loo(make(), X, Y)

    by_cluster = distributed.lco(make(), X, Y, labels)
    asking = distributed.loo(machine := make(), X.clone().requires_grad_(), Y).outputs.sum()

    return {
        "loo and gather": message(
            lambda: distributed.gather(by_cluster) if second else distributed.loo(make(), X, Y)
        ),
        "share and select": message(
            lambda: (
                distributed.select(make(), X, Y, grid={"reg": [1.0]})
                if second
                else distributed.share(str, range(2))
            )
        ),
        "backward and sum": message(
            lambda: distributed.sum_gradients(machine) if second else asking.backward()
        ),
        "held_out and path": message(lambda: solved.path(regs) if second else solved.held_out()),
        "held_out and fit": message(lambda: solved.coef if second else solved.held_out()),
        "gathered clusters": message(
            lambda: distributed.gather(by_cluster._replace(clusters=None) if second else by_cluster)
        ),
        "gathered nothing": message(lambda: distributed.gather(None if second else by_cluster)),
        "no grid": message(
            lambda: distributed.select(make(), X, Y, grid={"reg": [] if second else [1.0]}, progress=False)
        ),
        "no items": message(lambda: distributed.share(str, None if second else [1, 2])),
        "no parameters": message(lambda: distributed.sum_gradients(None if second else machine)),
        "stream's outputs": message(lambda: distributed.loo(make(), narrow)),
        "empty shard": message(lambda: distributed.fit(make(), X[empty], Y[empty])),
        "call": message(loo_or_lco),
        "stream and tensors": message(lambda: distributed.loo(make(), *((X, Y) if second else (stream,)))),
        "no clusters": message(lambda: distributed.lco(make(), X, Y, None if second else labels)),
        "streamed call": message(lambda: solved.held_out(labels if second else None)),
        "one folder": message(lambda: solved.held_out(out=Path(sys.argv[1]) / "rows")),
        "no folder": message(lambda: solved.held_out(out="/dev/null/rows" if second else None)),
        "regs": path(regs),
        "no regs": path(None if second else regs),
        "negative regs": path(1 - 2 * (regs - 1)),
        "fit with targets": message(lambda: distributed.fit(make(), stream, Y)),
        "path with weights": message(lambda: distributed.path(make(), stream, regs=regs, weight=Y[:, 0])),
    }


def errors():
    """Each is raised in both processes, and leaves them able to go on."""
    X, Y, weight = (t[own()].clone() for t in rows())
    second = dist.get_rank() == 1
    bad = X.clone()
    if second:
        bad[3] = torch.nan
    make = MACHINES["lssvm"]
    other = tl.LSSVM(tl.kernels.Linear(), reg=0.3 + 0.1 * second)
    chosen = tl.SparseLSSVM(tl.kernels.RBF(), basis=3)
    sure = rows()[0][:6]
    family = (tl.LSSVM, tl.RLS)[second](tl.kernels.Linear(), reg=0.3)
    matern = tl.SparseLSSVM((tl.kernels.RBF, tl.kernels.Matern)[second](), basis=sure)
    permuted = tl.SparseLSSVM(tl.kernels.RBF(), basis=sure.flip(0) if second else sure)
    unsure = tl.SparseLSSVM(tl.kernels.RBF(), basis=6 if second else sure)

    def fails(k):
        if k == 3:
            raise KeyError("item 3")

    stream = tl.Stream(bad, Y, weight, block=8, progress=False)
    return {
        "rows": message(lambda: tl.distributed.loo(make(), bad, Y, weight)),
        "stream": message(lambda: tl.distributed.loo(make(), stream)),
        "clusters": message(lambda: tl.distributed.lco(make(), X, Y, torch.arange(len(X)))),
        "streamed clusters": message(
            lambda: tl.distributed.lco(make(), tl.Stream(X, Y, progress=False), clusters=torch.arange(len(X)))
        ),
        "machine": message(lambda: tl.distributed.loo(other, X, Y)),
        "machine's name": message(lambda: tl.distributed.loo(family, X, Y)),
        "kernel's name": message(lambda: tl.distributed.loo(matern, X, Y)),
        "permuted basis": message(lambda: tl.distributed.loo(permuted, X, Y)),
        "basis": message(lambda: tl.distributed.loo(chosen, X, Y)),
        "one basis": message(lambda: tl.distributed.loo(unsure, X, Y)),
        "kernel": message(lambda: tl.distributed.loo(tl.LSSVM(tl.kernels.RBF()), X, Y)),
        "columns": message(lambda: tl.distributed.loo(make(), X[:, : 2 + second], Y)),
        **calls(X, Y, second),
        "parameters": message(lambda: tl.distributed.sum_gradients([torch.ones(2 + second)])),
        "share": message(lambda: tl.distributed.share(fails, range(4))),
        "twice": message(lambda: twice(make(), X, Y)),
        "graph": message(lambda: with_graph(second, lambda: tl.distributed.loo(make(), X, Y))),
    }


def main(folder, rank):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"file://{folder}/store", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    results = {
        f.__name__: f()
        for f in (sharded, streamed, classes, gathered, added, shared_out, interrupted, errors)
    }
    torch.set_default_device("meta")
    results["meta"] = {f.__name__: f() for f in (sharded, streamed, classes, gathered)}
    results["meta"]["share"] = tl.distributed.share(lambda k: (k, dist.get_rank()), range(5))
    torch.set_default_device("cpu")
    torch.save(results, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
