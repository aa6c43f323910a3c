"""Gradients by blocks of rows: in memory or streamed, in blocks of any size, against all rows at once."""

import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from counting import Counting
from torch import nn
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import torchloo as tl
from torchloo import panels
from torchloo.primal.machines import Expansion

N = 60
RAGGED = torch.tensor([0] * 25 + [1] * 9 + [2] * 3 + [3] * 3 + list(range(10, 10 + N - 40)))
CLUSTERS = {"rows": None, "ragged": RAGGED, "halves": torch.arange(N) % 2}


def randn(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def rows(c=2):
    X = randn(N, 4)
    Y = X[:, :1].sin() + 0.3 * randn(N, c, seed=1)
    return X, Y, 0.3 + randn(N, seed=2).abs()


def lonely():
    """A feature that one row alone has, one that two rows of a cluster have, one that every other row has."""
    X, Y, weight = rows()
    alone = torch.zeros(3, N, dtype=torch.float64)
    alone[0, 5], alone[1, 34:36], alone[2, ::2] = 20.0, 10.0, 1.0
    X[:, 1:] *= alone.T
    return X, Y, weight


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh()).double()


def ard():
    return tl.kernels.RBF(torch.tensor([1.0, 2.0, 1.5, 3.0]))


MACHINES = {
    "rls": lambda: tl.RLS(tl.kernels.Linear(), 0.3),
    "lssvm": lambda: tl.LSSVM(2.0 * tl.kernels.Linear() + tl.kernels.Linear(), 0.3),
    "sparse": lambda: tl.SparseLSSVM(ard(), 0.1, basis=nn.Parameter(randn(7, 4, seed=4))),
    "dropped": lambda: tl.SparseLSSVM(ard(), 0.1, basis=torch.cat([randn(5, 4, seed=4)] * 2)),
    "network": lambda: tl.LSSVM(tl.kernels.Linear(features=network()), 0.3),
    "deep basis": lambda: tl.SparseLSSVM(
        tl.kernels.RBF(2.0, features=network()), 0.1, basis=randn(7, 4, seed=4)
    ),
    "networks inside": lambda: tl.SparseLSSVM(
        ard() + tl.kernels.Matern(1.5, 2.0, features=network()), 0.1, basis=randn(7, 4, seed=4)
    ),
}
every_machine = pytest.mark.parametrize("name", MACHINES)
every_set = pytest.mark.parametrize("clusters", CLUSTERS.values(), ids=CLUSTERS)


def gradients(machine, held_out, inputs):
    """Of all differentiable fields, each weighed by random numbers."""
    fields = (held_out.outputs, held_out.residuals, held_out.variance)
    loss = sum((field * randn(*field.shape, seed=k)).sum() for k, field in enumerate(fields))
    wanted = [*inputs, *machine.parameters()]
    return [
        torch.zeros_like(t) if g is None else g
        for t, g in zip(wanted, torch.autograd.grad(loss, wanted, allow_unused=True), strict=True)
    ]


def all_at_once(solved, clusters=None):
    """Held-out rows by differentiable operations on all rows at once, instead of passes."""
    return replace(solved, rows=None).held_out(clusters)


def compare(received, expected, limit):
    """Each to a part of its largest entry, or of 1: what is smaller is a difference of larger numbers."""
    for ours, theirs in zip(received, expected, strict=True):
        assert_close(ours, theirs, rtol=0, atol=limit * max(1.0, theirs.abs().max().item()))


class Largest(TorchDispatchMode):
    """The largest number of elements of a new tensor while it is entered."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not function.is_view:
            self.elements = max(self.elements, result.numel())
        return result


@pytest.mark.parametrize("basis", [None, 100], ids=["linear", "sparse"])
def test_fit_on_tensors_goes_over_blocks_and_equals_solve(basis):
    X = randn(20_000, 20)
    Y = randn(20_000, 2, seed=1)
    weight = 0.5 + randn(20_000, seed=2).abs()
    if basis is None:
        machine = tl.LSSVM(tl.kernels.Linear(), reg=0.3)
    else:
        machine = tl.SparseLSSVM(tl.kernels.RBF(5.0), reg=0.3, basis=basis)
    with Largest() as largest:
        machine.fit(X, Y, weight)
    assert largest.elements < len(X) * (basis or 20) / 2  # no matrix of all rows and features
    solved = machine.solve(X, Y, weight)
    X_new = randn(9, 20, seed=3)
    assert_close(machine(X_new), solved(X_new).detach(), rtol=1e-9, atol=1e-10)
    rows_new = X_new - solved.features.centre if basis is None else machine.kernel(X_new, X[:basis])
    expected = solved.variance_at(rows_new, None).detach()
    received = machine.predictive(X_new)[1].detach()
    assert_close(received, expected, rtol=1e-9, atol=1e-12)


@every_machine
@every_set
@pytest.mark.parametrize("block", [7, 10**6])
def test_gradients_equal_those_of_all_rows_at_once(name, clusters, block, monkeypatch):
    monkeypatch.setattr(Expansion, "size", block)
    machine = MACHINES[name]()
    inputs = [t.requires_grad_() for t in rows()]
    X, Y, weight = inputs
    received = machine.loo(X, Y, weight) if clusters is None else machine.lco(X, Y, clusters, weight)
    expected = all_at_once(machine.solve(X, Y, weight), clusters)
    for ours, theirs in zip(received, expected, strict=True):
        assert_close(ours, theirs, rtol=1e-9, atol=1e-10)
    compare(gradients(machine, received, inputs), gradients(machine, expected, inputs), 1e-9)


@every_set
@pytest.mark.parametrize("name", ["rls", "lssvm"])
def test_gradients_of_refitted_rows_and_sets_equal_those_of_all_rows_at_once(name, clusters, monkeypatch):
    monkeypatch.setattr(Expansion, "size", 16)
    inputs = [t.requires_grad_() for t in lonely()]
    machine = {"rls": tl.RLS, "lssvm": tl.LSSVM}[name](tl.kernels.Linear(), 1e-5)
    X, Y, weight = inputs
    received = machine.loo(X, Y, weight) if clusters is None else machine.lco(X, Y, clusters, weight)
    expected = all_at_once(machine.solve(X, Y, weight), clusters)
    assert received.refitted.any()
    assert torch.equal(received.refitted, expected.refitted)
    compare(received[:2], expected[:2], 1e-9)
    compare(gradients(machine, received, inputs), gradients(machine, expected, inputs), 1e-8)


@pytest.mark.parametrize("clusters", [None, torch.tensor([0, 1, 1, 1, 2, 2])], ids=["rows", "sets"])
@pytest.mark.parametrize("sparse", [False, True], ids=["linear", "sparse"])
def test_gradients_of_a_row_without_which_all_are_equal_do_not_cancel(sparse, clusters):
    X, Y, weight = randn(6, 1 if sparse else 2), randn(6, 2, seed=1), 0.3 + randn(6, seed=2).abs()
    X[1:] = X[1]
    machine = tl.LSSVM(tl.kernels.Linear())
    if sparse:
        machine = tl.SparseLSSVM(tl.kernels.RBF(2.0), basis=X[:2].clone())
    regs = torch.tensor([1e-3, 1e-9], dtype=torch.float64)
    X, Y, weight, regs = wanted = [t.requires_grad_() for t in (X, Y, weight, regs)]
    received = machine.path(X, Y, regs, clusters, weight)
    assert received.refitted[-1].any()
    expected = all_at_once(machine.solve_path(X, Y, regs, weight), clusters)
    ours, theirs = (gradients(nn.ParameterList(), held_out, wanted) for held_out in (received, expected))
    for received, expected in zip(ours, theirs, strict=True):
        assert_close(received, expected, rtol=0, atol=1e-6 * expected.abs().max().item())


def test_refitted_rows_do_not_depend_on_the_mean_of_the_targets():
    X, Y = randn(8, 6), (randn(8, seed=1) * 2**20).round() / 2**20  # exact beside the offset
    machine, clusters = tl.LSSVM(tl.kernels.Linear(), 1e-8), torch.arange(8) % 2
    here, there = (machine.lco(X, targets, clusters) for targets in (Y, Y + 2**20))
    assert here.refitted.all()
    compare([there.residuals.detach()], [here.residuals.detach()], 1e-9)


def test_held_out_sets_do_not_depend_on_the_mean_of_the_targets():
    X, Y = randn(9, 3), (randn(9, seed=1) * 2**20).round() / 2**20  # exact beside the offset
    weight, clusters = 10 ** (6 * randn(9, seed=2).clamp(-1, 1)), torch.arange(9) % 3
    machine = tl.SparseLSSVM(tl.kernels.RBF(2.0), 0.1, basis=X[:2].clone())
    here, there = (machine.lco(X, targets, clusters, weight) for targets in (Y, Y + 2**20))
    compare([there.residuals.detach()], [here.residuals.detach()], 1e-11)


@pytest.mark.parametrize("Machine", [tl.RLS, tl.LSSVM])
def test_gradients_of_float32_rows_are_those_of_the_same_in_float64(Machine):
    X, Y, weight = (randn(8, *shape, seed=seed).float() for shape, seed in (((3,), 3), ((), 53), ((), 12)))
    X[0] *= 300
    found = []
    for dtype in (torch.float32, torch.float64):
        inputs = [t.to(dtype).requires_grad_() for t in (X, Y, 100**weight)]
        machine = Machine(tl.kernels.Linear(), 2.0**-10)
        loss = (machine.loo(*inputs).residuals * torch.arange(8)).sum()
        found.append([g.double() for g in torch.autograd.grad(loss, [*inputs, machine.log_reg])])
    for received, expected in zip(*found, strict=True):
        assert_close(received, expected, rtol=0, atol=4e-7 * expected.abs().max().item())


def test_problems_of_a_batch_that_are_lost_only_beside_each_other_are_refitted():
    """Without the first problem, which is solved from its rows, the second is by its normal equations."""
    X, Y = randn(3, 12, 3), randn(3, 12, seed=1)
    X[0, 0] *= 1e6
    X[1, 0] *= 3
    machine, regs = tl.RLS(tl.kernels.Linear()), torch.tensor([2e-5, 1.0])
    received = machine.path(X, Y, regs)
    assert received.refitted.any(-1).any(0).tolist() == [True, True, False]
    single = [machine.path(X[k], Y[k], regs).outputs for k in range(3)]
    compare([received.outputs], [torch.stack(single, 1)], 1e-9)


@pytest.mark.parametrize("together", [1, 1 << 20], ids=["one by one", "all machines"])
def test_a_path_refits_the_sets_that_each_of_its_machines_loses(together, monkeypatch):
    monkeypatch.setattr("torchloo.primal.sets._TOGETHER", together)
    (X, Y, weight), regs = lonely(), torch.tensor([1.0, 1e-2, 1e-5, 1e-7], dtype=torch.float64)
    path = tl.LSSVM(tl.kernels.Linear()).path(X, Y, regs, RAGGED, weight)
    assert not path.refitted[0].any()
    assert path.refitted[-1].any()
    for r, reg in enumerate(regs):
        one = tl.LSSVM(tl.kernels.Linear(), reg).lco(X, Y, RAGGED, weight)
        compare([path.outputs[r]], [one.outputs.detach()], 1e-9)


@every_set
@pytest.mark.parametrize("per_output", [False, True])
@pytest.mark.parametrize("together", [1, 1 << 20], ids=["one by one", "all machines"])
@pytest.mark.parametrize("name", ["lssvm", "sparse"])
def test_gradients_of_a_path_are_those_of_its_machines(name, per_output, clusters, together, monkeypatch):
    monkeypatch.setattr("torchloo.primal.sets._TOGETHER", together)
    X, Y, weight = inputs = [t.requires_grad_() for t in rows()]
    regs = torch.logspace(-2, 1, 4, dtype=torch.float64)
    regs = (torch.stack([regs, 2 * regs], 1) if per_output else regs).requires_grad_()
    machine = MACHINES[name]()
    received = machine.path(X, Y, regs, clusters, weight)
    parts = []
    for row in regs if per_output else regs.unsqueeze(1):
        columns = [
            all_at_once(_with_reg(machine, reg).solve(X, y, weight), clusters)
            for reg, y in zip(row, Y.split(1, 1) if per_output else [Y], strict=True)
        ]
        parts.append(
            [torch.cat(fields, -1) for fields in zip(*([h[0], h[1], h[5]] for h in columns), strict=True)]
        )
    outputs, residuals, variance = (torch.stack(fields) for fields in zip(*parts, strict=True))
    expected = received._replace(outputs=outputs, residuals=residuals, variance=variance)
    wanted = [*inputs, regs]
    parameters = nn.ParameterList(machine.kernel.parameters())
    compare(gradients(parameters, received, wanted), gradients(parameters, expected, wanted), 1e-8)


def _with_reg(machine, reg):
    """The same machine, sharing everything, with a regularisation that belongs to a graph."""
    twin = copy.copy(machine)
    twin._parameters = dict(machine._parameters, log_reg=None)
    twin.__dict__["log_reg"] = reg.log()
    return twin


@every_machine
@every_set
def test_a_stream_is_differentiable_like_a_tensor(name, clusters):
    X, Y, weight = rows()
    machine = MACHINES[name]()
    expected = machine.loo(X, Y, weight) if clusters is None else machine.lco(X, Y, clusters, weight)
    expected = gradients(machine, expected, [])
    for block in (9, 1000):
        stream = tl.Stream(X, Y, weight, block=block, progress=False)
        received = machine.loo(stream) if clusters is None else machine.lco(stream, clusters=clusters)
        compare(gradients(machine, received, []), expected, 1e-8)
        regs = torch.tensor([0.1, 1.0], dtype=torch.float64, requires_grad=True)
        assert torch.autograd.grad(machine.path(stream, regs=regs).residuals.square().sum(), regs)[0].all()


def test_without_grad_mode_or_with_files_no_graph_is_kept(tmp_path):
    X, Y, weight = rows()
    machine = MACHINES["sparse"]()
    stream = tl.Stream(X, Y, weight, progress=False)
    assert machine.loo(stream).residuals.requires_grad
    assert not machine.solve(stream).held_out(out=tmp_path).residuals.requires_grad
    with torch.no_grad():
        assert not machine.loo(stream).residuals.requires_grad


def test_a_stream_says_that_its_rows_have_derivatives_of_order_one():
    X, Y, weight = rows()
    machine = MACHINES["lssvm"]()
    loss = tl.criteria.press(machine.loo(tl.Stream(X, Y, weight, progress=False)))
    with pytest.raises(RuntimeError, match="derivatives of order one only"):
        torch.autograd.grad(loss.sum(), machine.log_reg, create_graph=True)


@pytest.mark.parametrize("name", ["lssvm", "sparse"])
def test_second_derivatives_in_memory_are_those_of_all_rows_at_once(name):
    X, Y, weight = rows()
    machine = MACHINES[name]()
    received, expected = [], []
    for found, held_out in (
        (received, machine.loo(X, Y, weight)),
        (expected, all_at_once(machine.solve(X, Y, weight))),
    ):
        (first,) = torch.autograd.grad(tl.criteria.press(held_out).sum(), machine.log_reg, create_graph=True)
        found.append(torch.autograd.grad(first, machine.log_reg)[0])
    assert_close(received, expected)


def from_rows(X):
    """Targets and weights that are functions of the rows."""
    return X[:, :2].sin(), X[:, 2].exp()


@pytest.mark.parametrize(
    ("machine", "others"),
    [
        (tl.SparseLSSVM(tl.kernels.RBF(2.0), 0.1, basis=7), lambda X: rows()[1:]),
        (tl.SparseLSSVM(tl.kernels.RBF(2.0), 0.1, basis=tl.basis.pivoted(7)), from_rows),
        (tl.LSSVM(tl.kernels.Linear(), 0.1), from_rows),
    ],
    ids=["basis", "selected basis, targets and weights", "targets and weights"],
)
@every_set
def test_what_is_computed_from_the_rows_counts_once_in_gradients_with_a_graph(machine, others, clusters):
    X = rows()[0].requires_grad_()

    def gradient(create_graph):
        Y, weight = others(X)
        held_out = machine.held_out(X, Y, clusters, weight)
        loss = tl.criteria.press(held_out).sum() + held_out.variance.sum()
        return torch.autograd.grad(loss, X, create_graph=create_graph)[0]

    assert_close(gradient(create_graph=True), gradient(create_graph=False))


def batch_of_problems(shape, bad):
    """Problems (*shape, n, d) of their own; those with the numbers `bad` have rows that must be refitted."""
    count = math.prod(shape)
    problems = [lonely() if k in bad else rows() for k in range(count)]
    noise = randn(count, N, 4, seed=7)
    stacked = [torch.stack(parts) for parts in zip(*problems, strict=True)]
    stacked[0] = stacked[0] * (1 + 0.1 * noise)
    return [t.unflatten(0, shape).requires_grad_() for t in stacked]


BATCHES = pytest.mark.parametrize(
    ("shape", "bad"),
    [((5,), ()), ((2, 3), (1, 4)), ((3,), (0, 1, 2))],
    ids=["regular", "some refitted", "all refitted"],
)


@every_set
@BATCHES
@pytest.mark.parametrize("block", [16, 10**6])
@pytest.mark.parametrize("Machine", [tl.RLS, tl.LSSVM])
def test_a_batch_of_problems_equals_single_ones(Machine, shape, bad, clusters, block, monkeypatch):
    monkeypatch.setattr(Expansion, "size", block)
    X, Y, weight = inputs = batch_of_problems(shape, bad)
    machine = Machine(
        tl.kernels.Linear(), 1e-5 * (1 + torch.arange(math.prod(shape))).reshape(shape).double()
    )
    received = machine.held_out(X, Y, clusters, weight)
    assert received.refitted.flatten(0, -2).any(1).nonzero()[:, 0].tolist() == list(bad)
    single = []
    for k in np.ndindex(*shape):
        one = _with_reg(Machine(tl.kernels.Linear()), machine.reg[k])
        single.append(one.held_out(X[k], Y[k], clusters, weight[k]))
    expected = [torch.stack(part).unflatten(0, shape) for part in zip(*(h[:3] for h in single), strict=True)]
    variance = torch.stack([h.variance for h in single]).unflatten(0, shape)
    expected = received._replace(
        outputs=expected[0], residuals=expected[1], targets=expected[2], variance=variance
    )
    compare(received[:3], expected[:3], 1e-10)
    compare(gradients(machine, received, inputs), gradients(machine, expected, inputs), 1e-8)


@every_set
@pytest.mark.parametrize("per_output", [False, True])
def test_a_path_of_a_batch_equals_those_of_single_problems(per_output, clusters):
    X, Y, weight = inputs = batch_of_problems((2, 2), (3,))
    regs = torch.logspace(-6, 1, 3, dtype=torch.float64)
    regs = (torch.stack([regs, 2 * regs], 1) if per_output else regs).requires_grad_()
    machine = tl.LSSVM(tl.kernels.Linear())
    received = machine.path(X, Y, regs, clusters, weight)
    assert received.residuals.shape == (3, 2, 2, N, 2)
    paths = [machine.path(X[k], Y[k], regs, clusters, weight[k]) for k in np.ndindex(2, 2)]
    fields = [torch.stack(part, 1).unflatten(1, (2, 2)) for part in zip(*(h[:2] for h in paths), strict=True)]
    variance = torch.stack([h.variance for h in paths], 1).unflatten(1, (2, 2))
    expected = received._replace(outputs=fields[0], residuals=fields[1], variance=variance)
    compare(received[:2], expected[:2], 1e-9)
    wanted = [*inputs, regs]
    nothing = nn.ParameterList()
    compare(gradients(nothing, received, wanted), gradients(nothing, expected, wanted), 1e-7)


def test_second_derivatives_of_a_batch_are_those_of_all_rows_at_once():
    X, Y, weight = batch_of_problems((3,), ())
    machine = tl.LSSVM(tl.kernels.Linear(), 0.3)
    hessians = []
    for held_out in (machine.loo(X, Y, weight), all_at_once(machine.solve(X, Y, weight))):
        loss = tl.criteria.press(held_out).sum()
        (first,) = torch.autograd.grad(loss, X, create_graph=True)
        hessians.append(torch.autograd.grad(first.square().sum(), [X, machine.log_reg]))
    compare(hessians[0], hessians[1], 1e-8)


def test_a_batch_takes_as_many_operations_as_one_problem():
    counts = []
    for batch in ((), (8,), (4, 4)):
        X, Y = randn(*batch, N, 4).requires_grad_(), randn(*batch, N, 2, seed=1)
        machine = tl.LSSVM(tl.kernels.Linear(), 0.3)
        with Counting() as counting:
            tl.criteria.press(machine.loo(X, Y)).sum().backward()
        counts.append(counting.operations)
    assert max(counts) <= 1.1 * counts[0]


@pytest.mark.parametrize("search", ["gradient", "grid"])
@pytest.mark.parametrize("clusters", [None, RAGGED], ids=["rows", "ragged"])
def test_a_search_over_a_stream_finds_what_one_over_tensors_finds(search, clusters):
    X, Y, weight = rows(c=1)
    y = Y[:, 0]
    grid = (
        {"reg": [0.01, 0.1, 1.0], "lengthscale": [[1.0] * 4, [2.0, 1.0, 2.0, 1.0]]}
        if search == "grid"
        else None
    )
    machine = tl.SparseLSSVM(ard(), 0.1, basis=randn(9, 4, seed=4))
    options = {"search": search, "clusters": clusters, "grid": grid, "max_evaluations": 15, "progress": False}
    if search == "grid":
        del options["max_evaluations"]
    expected = tl.select(machine, X, y, weight=weight, **options)
    stream = tl.Stream(X, y, weight, block=11, progress=False)
    received = tl.select(machine, stream, **options)
    assert received.evaluations == expected.evaluations
    assert received.value == pytest.approx(expected.value, rel=1e-6)
    assert_close(received.machine(X), expected.machine(X), rtol=1e-4, atol=1e-4)


def test_a_search_over_a_stream_says_what_it_cannot_serve():
    X, Y, weight = rows(c=1)
    stream = tl.Stream(X, Y[:, 0], weight, progress=False)
    machine = MACHINES["sparse"]()
    with pytest.raises(TypeError, match="select: a stream includes y and weight"):
        tl.select(machine, stream, Y[:, 0], progress=False)
    with pytest.raises(TypeError, match="select: a stream needs a machine with few features"):
        tl.select(tl.SVC(ard()), stream, progress=False)
    with pytest.raises(TypeError, match="a linear kernel, or SparseLSSVM"):
        tl.select(tl.LSSVM(ard()), stream, progress=False)


def test_parameters_that_change_between_solve_and_held_out_are_noticed():
    X, Y, weight = rows()
    machine = MACHINES["sparse"]()
    solved = machine.solve(tl.Stream(X, Y, weight, progress=False))
    with torch.no_grad():
        machine.kernel.log_lengthscale.add_(0.1)
    held_out = solved.held_out()  # that of the machine that was solved
    with pytest.raises(RuntimeError, match="parameters of the machine were changed in place"):
        held_out.residuals.sum().backward()


@pytest.mark.parametrize("name", ["lssvm", "sparse"])
def test_a_path_takes_as_many_operations_however_many_regularisations(name):
    counts = [counted_path(name, many, None) for many in (5, 30, 100)]
    assert len(set(counts)) == 1
    assert counts[0][0] <= 300
    assert counts[0][1] <= 3


@pytest.mark.parametrize("name", ["lssvm", "sparse"])
def test_a_path_by_clusters_takes_few_operations_however_many_regularisations(name):
    few = counted_path(name, 5, RAGGED)
    many = counted_path(name, 100, RAGGED)
    assert few[0] <= 350
    assert many[0] <= 1.5 * few[0]  # sets of many sizes are padded to fewer where that is cheap
    assert many[1] <= few[1] + 2 <= 12


def counted_path(name, many, clusters):
    """Operations and synchronisations of a path of so many regularisations."""
    X, Y, weight = rows()
    machine = MACHINES[name]()
    regs = torch.logspace(-2, 2, many, dtype=torch.float64)
    with torch.no_grad(), Counting() as count:
        machine.path(X, Y, regs, clusters, weight)
    return count.operations, count.synchronisations


def test_the_order_of_rows_changes_no_digit_that_a_nearly_dependent_basis_has():
    """An inverted panel of a factor must not carry its rounding into the panels below it."""
    generator = torch.Generator().manual_seed(40)
    X = torch.randn(1100, 2, generator=generator, dtype=torch.float64)
    y = X[:, 0].sin() + 0.3 * torch.randn(1100, generator=generator, dtype=torch.float64)
    basis = torch.linspace(-2, 2, 130, dtype=torch.float64)[:, None].expand(-1, 2)
    machine = tl.SparseLSSVM(tl.kernels.RBF(2.0**0.5), 1e-5, basis=basis)
    with torch.no_grad():
        expected = machine.loo(X, y).variance
        for _ in range(3):
            order = torch.randperm(1100, generator=generator)
            variance = machine.loo(X[order], y[order]).variance
            assert (variance - expected[order]).abs().max() <= 1e-8 * expected.mean()


@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize("by_feature", [True, False])
@pytest.mark.parametrize("more", [0, 1])
def test_products_into_memory_of_any_layout_are_products(batch, by_feature, more):
    """Features of each row may be contiguous, or each feature of all rows; a row may follow them."""
    generator = torch.Generator().manual_seed(1)
    A, V, W = (torch.randn(*batch, *shape, generator=generator) for shape in ((5, 5), (5, 7), (7, 5)))
    V = W.mT if by_feature else V
    out = panels.room_like(V, 5 + more)
    assert (out.stride(-2) == 1) == by_feature
    torch.testing.assert_close(panels.matmul_into(out[..., :5, :], A, V), A @ V)
    torch.testing.assert_close(out[..., :5, :], A @ V)
    panels.add_matmul(out[..., :5, :], A, V, factor=-2.0)
    torch.testing.assert_close(out[..., :5, :], -(A @ V))
