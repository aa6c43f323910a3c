"""Float32 rows: products in float32 where that is accurate, in float64 where it is not; both are close."""

import pytest
import torch
from counting import Counting
from torch import nn

import torchloo as tl

N = 300
SIZES = [*range(1, 17)] * 2  # of clusters; from 7, or 10, or 19 rows on they have more rows than features
CLUSTERS = torch.repeat_interleave(torch.arange(len(SIZES)), torch.tensor(SIZES))
CLUSTERS = torch.cat([CLUSTERS, torch.full((N - len(CLUSTERS),), len(SIZES))])
LIMIT = 1e-3  # of the spread of the targets, or of the largest entry of a gradient


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rows(offset=0.0, lonely=False):
    """Float32 rows with weights; of the lonely, one row has a feature that no other has."""
    X = randn(N, 6) + offset
    if lonely:
        X[:, 5] = offset
        X[7, 5] += 300.0
    Y = (X[:, :1] - offset).sin() + 0.3 * randn(N, 2, seed=1) + 2 * offset
    return X, Y, 0.3 + randn(N, seed=2).abs()


def basis(offset):
    return randn(9, 6, seed=3) + offset


def near_copies(offset):
    return torch.cat([basis(offset), basis(offset) + 1e-2])


MACHINES = {
    "rls": lambda reg, offset: tl.RLS(tl.kernels.Linear(), reg * N),
    "lssvm": lambda reg, offset: tl.LSSVM(tl.kernels.Linear(), reg * N),
    "sparse": lambda reg, offset: tl.SparseLSSVM(
        tl.kernels.RBF(3.0), reg * N, basis=nn.Parameter(basis(offset))
    ),
    "near copies": lambda reg, offset: tl.SparseLSSVM(
        tl.kernels.RBF(30.0), reg * N, basis=nn.Parameter(near_copies(offset))
    ),
}
CALLS = {
    "loo": lambda machine, data: machine.loo(**data),
    "lco": lambda machine, data: machine.lco(**data, clusters=CLUSTERS),
    "path": lambda machine, data: machine.path(**data, regs=_along(machine)),
    "path of clusters": lambda machine, data: machine.path(**data, regs=_along(machine), clusters=CLUSTERS),
}


def _along(machine):
    return machine.reg.detach() * torch.tensor([1.0, 10.0])


@pytest.fixture
def in_float64(monkeypatch):
    """A function that calls another with all products in float64."""

    def call(work):
        with monkeypatch.context() as patch:
            patch.setattr("torchloo.primal.machines.SINGLE", 1e-30)
            patch.setattr("torchloo.primal.solved.SINGLE", 1e-30)
            return work()

    return call


def given(data, streamed):
    X, y, weight = data
    if streamed:
        return {"X": tl.Stream(X, y, weight, block=64, progress=False)}
    return {"X": X, "y": y, "weight": weight}


@pytest.mark.parametrize("streamed", [False, True], ids=["memory", "stream"])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize(("offset", "lonely"), [(0.0, False), (100.0, False), (0.0, True)])
def test_held_out_rows_are_those_of_products_in_float64(name, call, streamed, offset, lonely, in_float64):
    data = rows(offset, lonely)
    spread = data[1].std(0).max() if name != "rls" else data[1].square().mean().sqrt()
    for reg in (1e-4, 1e-2, 1.0, 1e2, 1e4):
        machine = MACHINES[name](reg, offset)
        received = CALLS[call](machine, given(data, streamed))
        expected = in_float64(lambda machine=machine: CALLS[call](machine, given(data, streamed)))
        assert torch.equal(received.refitted, expected.refitted)
        assert (received.outputs - expected.outputs).abs().max() <= LIMIT * spread
        assert (received.variance / expected.variance).log().abs().max() <= LIMIT


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", ["lssvm", "sparse"])
def test_gradients_are_those_of_products_in_float64(name, call, in_float64):
    X, y, weight = data = [t.requires_grad_() for t in rows()]

    def gradients(machine):
        held_out = CALLS[call](machine, {"X": X, "y": y, "weight": weight})
        return torch.autograd.grad(
            held_out.residuals.square().sum(), [*data, *machine.parameters()], allow_unused=True
        )

    for reg in (1e-2, 1.0, 1e2):
        machine = MACHINES[name](reg, 0.0)
        pairs = zip(gradients(machine), in_float64(lambda machine=machine: gradients(machine)), strict=True)
        for received, expected in pairs:
            if expected is not None:
                assert (received - expected).abs().max() <= LIMIT * expected.abs().max()


@pytest.mark.parametrize("streamed", [False, True], ids=["memory", "stream"])
@pytest.mark.parametrize("name", ["rls", "lssvm", "near copies"])
def test_float32_serves_where_the_condition_allows_and_else_float64_does(name, streamed, monkeypatch):
    from torchloo.primal.moments import Moments

    kinds, add = [], Moments.add
    monkeypatch.setattr(Moments, "add", lambda self, Z, *rest: kinds.append(Z.dtype) or add(self, Z, *rest))
    X, y, weight = rows()
    X[:, 0] = X[:, 1] + 1e-3 * X[:, 0]
    for reg, expected in ((1.0, torch.float32), (1e-12, torch.float64)):
        kinds.clear()
        MACHINES[name](reg, 0.0).loo(**given((X, y, weight), streamed))
        assert kinds[-1] == expected
        assert kinds.count(torch.float32) <= (5 if expected == torch.float32 else 1)


def test_whether_float32_serves_is_read_once_at_the_end():
    X, y, weight = rows()
    with torch.no_grad(), Counting() as counting:
        MACHINES["lssvm"](1.0, 0.0).loo(X, y, weight)
    assert counting.synchronisations == 1


def test_of_several_blocks_an_accelerator_is_waited_for_as_often_as_of_one(monkeypatch):
    """A CPU, which waits for nothing, looks at the first block too: float64 then begins early."""
    from torchloo import guards
    from torchloo.primal.machines import Expansion

    X, y, weight = rows()
    monkeypatch.setattr(Expansion, "size", 64)
    looks = {}
    for free in ({"cpu"}, set()):
        monkeypatch.setattr(guards, "_READ_AT_NO_COST", free)
        for name in ("lssvm", "sparse"):
            with torch.no_grad(), Counting() as counting:
                held_out = MACHINES[name](1.0, 0.0).loo(X, y, weight)
            looks[name, len(free)] = counting.synchronisations
            assert bool(held_out.outputs.isfinite().all())
    assert looks["lssvm", 0] == 1
    assert looks["sparse", 0] == 2  # its basis is looked at before anything is computed
    assert looks["lssvm", 1] == 2


@pytest.mark.parametrize("name", ["lssvm", "sparse"])
def test_values_that_are_not_finite_are_named_before_anything_is_done_again(name):
    X, y, weight = rows()
    with pytest.raises(ValueError, match="X must be finite"):
        MACHINES[name](1.0, 0.0).loo(X.index_fill(0, torch.tensor([3]), torch.nan), y, weight)
    with pytest.raises(ValueError, match="Y must be finite"):
        MACHINES[name](1.0, 0.0).loo(X, y.index_fill(0, torch.tensor([3]), torch.inf), weight)


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize(("offset", "lonely"), [(0.0, False), (100.0, False), (0.0, True)])
def test_machines_solved_from_a_stream_are_those_of_products_in_float64(name, offset, lonely, in_float64):
    data = rows(offset, lonely)
    X_new = rows(offset)[0][:50]
    spread = data[1].std(0).max() if name != "rls" else data[1].square().mean().sqrt()

    def solved(machine):
        found = machine.solve(**given(data, streamed=True))
        return machine.fit(found)(X_new), found.path(_along(machine)).outputs, found.held_out().outputs

    for reg in (1e-4, 1e-2, 1.0, 1e2, 1e4):
        machine = MACHINES[name](reg, offset)
        pairs = zip(solved(machine), in_float64(lambda machine=machine: solved(machine)), strict=True)
        for received, expected in pairs:
            assert (received - expected).abs().max() <= LIMIT * spread
