"""No tensor on a stray device, no look at values in a least-squares route; devices without a device."""

import copy
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.utils.backend_registration
from cases import BASIS, CASES, IDS, problem
from counting import Counting
from fake_cuda import fake_cuda
from torch.testing import assert_close

import torchloo as tl
from torchloo.panels import WIDE
from torchloo.sklearn import LOOClassifier, LOORegressor

every_machine = pytest.mark.parametrize("case", CASES, ids=IDS)
RAGGED = [7, 7, 2, 3, 3, 3, 4, 4]
N = len(RAGGED)
OVERLAPPING = [([0], [0, 1]), ([2, 1], [2, 1]), ([5], list(range(7)))]


def calls(machine, X, y, weight, regs):
    """Every public way through a machine, as held-out or plain outputs."""
    yield machine.loo(X, y, weight).outputs
    yield machine.lco(X, y, RAGGED, weight).outputs
    yield machine.solve(X, y, weight).leverage
    for some in (regs, regs[:2]):
        yield machine.path(X, y, some, None, weight).outputs
        yield machine.path(X, y, some, RAGGED, weight).outputs
        yield machine.solve_path(X, y, some, weight).coef
    yield machine.lso(X, y, OVERLAPPING, weight).outputs
    yield machine.fit(X.detach(), y.detach(), weight.detach())(X)


@every_machine
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_meta_device_runs_forward_and_backward(case, dtype):
    X = torch.empty(2, N, 3, device="meta", dtype=dtype, requires_grad=True)
    y = torch.empty(2, N, device="meta", dtype=dtype, requires_grad=not case.labels)
    weight = torch.empty(N, device="meta", dtype=dtype, requires_grad=True)
    regs = torch.empty(12, device="meta", dtype=dtype)
    machine = case.make().to("meta")
    for outputs in calls(machine, X, y, weight, regs):
        assert outputs.device.type == "meta"
        assert outputs.dtype == dtype
        if outputs.requires_grad:
            grads = torch.autograd.grad(outputs.sum(), (X, weight), allow_unused=True)
            assert all(grad is None or grad.device.type == "meta" for grad in grads)


def machine_on_cuda(case):
    one = torch.ones((), device="cuda", dtype=torch.float64)
    kernel = tl.kernels.Linear() if "linear" in case.name else tl.kernels.RBF(one)
    if case.name == "sparse":
        return tl.SparseLSSVM(kernel, one, basis=BASIS)
    return {"rls": tl.RLS, "lssvm": tl.LSSVM, "kfd": tl.KFD}[case.name.split("-")[0]](kernel, one)


@every_machine
def test_fake_cuda_meets_no_tensor_of_another_device(case):
    with fake_cuda():
        X = torch.empty(2, N, 3, device="cuda", dtype=torch.float64)
        y = torch.empty(2, N, device="cuda", dtype=torch.float64)
        weight = torch.empty(N, device="cuda", dtype=torch.float64)
        regs = torch.empty(12, device="cuda", dtype=torch.float64)
        for outputs in calls(machine_on_cuda(case), X, y, weight, regs):
            assert outputs.device.type == "cuda"


def test_class_labels_on_fake_cuda_meet_no_tensor_of_another_device():
    with fake_cuda():
        X = torch.empty(2, N, 3, device="cuda", dtype=torch.float64)
        labels = torch.zeros(2, N, device="cuda", dtype=torch.long)
        reg = torch.ones((), device="cuda", dtype=torch.float64)
        machine = tl.LSSVM(tl.kernels.RBF(reg), reg, classes=torch.arange(3))  # which stay on the host
        held_out = machine.loo(X, labels)
        assert held_out.outputs.device.type == "cuda"
        for measure in ("multiclass_error", "cross_entropy", "class_accuracy", "confusion"):
            assert getattr(tl.criteria, measure)(held_out).device.type == "cuda"
        assert tl.balanced_weight(labels, classes=torch.arange(3)).device.type == "cuda"
        assert machine.fit(X, labels).predict_class(X).device.type == "cuda"


def test_fake_cuda_would_notice_a_stray_tensor():
    with fake_cuda(), pytest.raises(Exception, match="device"):
        torch.empty(3, device="cuda") + torch.empty(3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@every_machine
def test_cuda_agrees_with_cpu(case):
    X, Y, weight = problem(N)
    y = case.targets(Y)[..., 0]
    regs = torch.logspace(-2, 2, 12, dtype=torch.float64)
    expected = list(calls(case.make(), X, y, weight, regs))
    machine = copy.deepcopy(case.make()).cuda()
    received = list(calls(machine, X.cuda(), y.cuda(), weight.cuda(), regs.cuda()))
    for here, there in zip(expected, received, strict=True):
        assert_close(there.cpu(), here)


def test_one_synchronisation_checks_all_values(monkeypatch):
    looks = []
    original = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: looks.append(1) or original(self))
    X, Y, weight = problem(N)
    tl.LSSVM(tl.kernels.RBF()).solve(X, Y, weight)
    assert len(looks) == 1


def test_leave_one_out_of_a_small_problem_is_few_operations():
    """Small problems cost what they dispatch: 27 operations when this was written."""
    X, Y, _ = problem(50)
    machine = tl.RLS(tl.kernels.RBF(), 0.5)
    with torch.no_grad(), Counting() as counting:
        machine.loo(X, Y[:, 0])
    assert counting.operations < 30, counting.calls
    assert counting.synchronisations == 1


@pytest.mark.parametrize("weighted", [False, True])
def test_leave_one_out_of_episodes_is_few_operations(weighted):
    """A linear machine with a bias, on fewer rows than features, with its gradient."""
    X, Y, weight = problem(25, d=64, c=5, batch=(4,))
    X.requires_grad_()
    machine = tl.LSSVM(tl.kernels.Linear())
    with Counting() as counting:
        tl.criteria.press(machine.loo(X, Y, weight if weighted else None)).sum().backward()
    assert counting.operations < 70, counting.calls
    assert counting.synchronisations == 1


def test_counting_leaves_out_views_and_sees_every_look_at_values():
    t = torch.arange(6.0)
    with Counting() as counting:
        t.view(2, 3).mT[0].unsqueeze(-1).expand(2, 4).detach()
    assert (counting.operations, counting.synchronisations) == (0, 0)
    looks = [t.tolist, lambda: t[0].item(), t.nonzero, lambda: t[t > 2], lambda: torch.equal(t, t + 1)]
    for look in looks:
        with Counting() as counting:
            look()
        assert counting.synchronisations == 1
    with Counting() as counting:
        t.add_(1).mul(2)
    assert counting.calls == {"add_": 1, "mul": 1}


@pytest.fixture
def default_meta():
    """Tensors made without a device land on the meta device, where no value can be read."""
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


@every_machine
def test_the_default_device_does_not_matter(case, request):
    X, Y, weight = problem(N)
    y = case.targets(Y)[..., 0]
    regs = torch.logspace(-2, 2, 12, dtype=torch.float64)
    machine = case.make()
    expected = [outputs.detach() for outputs in calls(machine, X, y, weight, regs)]
    request.getfixturevalue("default_meta")
    for received, outputs in zip(calls(machine, X, y, weight, regs), expected, strict=True):
        assert_close(received.detach(), outputs)
        if received.requires_grad:
            received.sum().backward()


@every_machine
@pytest.mark.parametrize("n", [N, 4 * N, WIDE + 1], ids=["few rows", "clusters of one size", "many rows"])
def test_every_field_is_where_the_rows_are_whatever_the_default_device(case, n, request):
    X, Y, weight = problem(n)
    y = case.targets(Y)[..., 0]
    clusters = RAGGED if n == N else [i % (n // 4) for i in range(n)]
    regs = torch.logspace(-2, 2, 3, dtype=torch.float64)
    machine = case.make()
    request.getfixturevalue("default_meta")
    for held_out in (
        machine.loo(X, y, weight),
        machine.lco(X, y, clusters, weight),
        machine.solve(X, y, weight).held_out(),
        machine.lso(X, y, OVERLAPPING, weight),
        machine.path(X, y, regs, clusters, weight),
    ):
        tensors = [field for field in held_out if isinstance(field, torch.Tensor)]
        assert len(tensors) >= 6
        assert {field.device.type for field in tensors} == {"cpu"}


def test_criteria_searches_and_validation_ignore_the_default_device(request):
    X, Y, weight = problem(30)
    y = Y[:, 0].sign()
    labels = torch.arange(30) % 3
    machine = tl.LSSVM(tl.kernels.RBF())
    given = tl.LSSVM(tl.kernels.RBF(), classes=[2, 0, 1])
    clusters = [i % 5 for i in range(30)]
    generator = torch.Generator().manual_seed(0)
    splits = tl.splits.k_fold(30, 3, generator=generator)
    request.getfixturevalue("default_meta")
    held_out = machine.loo(X, y, weight)
    for name in tl.criteria.__all__:
        criterion = getattr(tl.criteria, name)
        if hasattr(criterion, "lower_is_better"):
            of_columns = machine.loo(X, labels, weight) if criterion.targets == "one-vs-rest" else held_out
            solved = machine.solve(X, y) if criterion.takes_fit else of_columns
            by_cluster = name == "kendall_tau"
            value = criterion(machine.lco(X, y, clusters) if by_cluster else solved)
            assert value.device.type == "cpu"
    assert tl.criteria.class_accuracy(held_out).device.type == "cpu"
    assert tl.criteria.confusion(held_out).device.type == "cpu"
    assert tl.standard_error("mse", held_out).device.type == "cpu"
    assert tl.balanced_weight(y).device.type == tl.balanced_weight(labels).device.type == "cpu"
    assert tl.one_vs_rest([0, 1, 0]).device.type == "cpu"
    assert given.loo(X, labels).outputs.device.type == "cpu"
    assert machine.fit(X, labels).predict_class(X).device.type == "cpu"
    assert isinstance(tl.threshold(held_out, "error_rate"), torch.Tensor | float)
    for search in ("gradient", "nelder-mead", "grid"):
        grid = {"reg": [0.1, 1.0], "lengthscale": [1.0, 2.0]} if search == "grid" else None
        options = {"grid": grid} if grid else {"starts": 2}
        chosen = tl.select(machine, X, y, search=search, progress=False, **options)
        assert chosen.machine(X).device.type == "cpu"
    result = tl.validate(machine, X, y, splits=splits, metric="error_rate", progress=False)
    assert 0 <= result.mean <= 1


@pytest.mark.parametrize("kernel", [tl.kernels.RBF(1.2), tl.kernels.Linear(), tl.kernels.Precomputed()])
def test_svc_makes_its_tensors_where_the_data_are(kernel):
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(40, 3, generator=generator).repeat(2, 1)[:60]  # copies among them
    y = torch.where(X[:, 0] + torch.randn(60, generator=generator) > 0, 1.0, -1.0)
    X = X @ X.T if isinstance(kernel, tl.kernels.Precomputed) else X
    weight = torch.rand(60, generator=generator) + 0.5
    clusters = torch.arange(60) % 7
    machine = tl.SVC(kernel, C=3.0)
    several = torch.stack([y, -y], 1)

    def calls():
        for method in ("auto", "path", "smo"):
            for values in (True, False):
                yield machine.loo(X, y, weight, method=method, values=values).outputs
        for method in ("auto", "smo"):
            yield machine.lco(X, y, clusters, weight, method=method).outputs
        yield machine.loo(X, several).outputs
        yield machine.solve(X, y, weight).outputs
        yield machine.fit(X, y, weight)(X)
        for held in (machine.loo, lambda *given: machine.lco(given[0], given[1], clusters, given[2])):
            points = X.clone().requires_grad_()
            yield torch.autograd.grad(held(points, y, weight).outputs.square().sum(), points)[0]

    expected = list(calls())
    torch.set_default_device("meta")
    try:
        received = list(calls())
    finally:
        torch.set_default_device(None)
    for there, here in zip(received, expected, strict=True):
        assert there.device.type == "cpu"
        assert_close(there, here, rtol=0, atol=0)


@pytest.mark.skipif(
    not hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch has no devices in Python",
)
@pytest.mark.parametrize(
    "kinds", [["rbf"], pytest.param(["linear", "precomputed", "batch"], marks=pytest.mark.slow)]
)
def test_svc_runs_on_another_device_and_agrees_with_the_cpu(kinds):
    """Values, errors, clusters, fits, predictions and gradients, see another_device.py."""
    script = Path(__file__).with_name("svm_elsewhere.py")
    done = subprocess.run([sys.executable, script, *kinds], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [25] * len(kinds)


@pytest.mark.parametrize("at_once", [False, True], ids=["passes", "all at once"])
def test_refitted_rows_and_their_gradients_ignore_the_default_device(at_once, request):
    X, Y, weight = problem(12)
    X[:, 0] = 0.0
    X[3, 0] = X[5:7, 1] = 20.0  # a feature that one row alone has
    X[:, 2] = X[:, 1] + 1e-5 * X[:, 2]  # solved by QR
    X.requires_grad_()
    regs = torch.tensor([1e-7, 1.0], dtype=torch.float64)
    machine = tl.LSSVM(tl.kernels.Linear(), 1e-7)

    def answers():
        for clusters in (None, [i // 2 for i in range(12)]):
            for solved in (machine.solve(X, Y, weight), machine.solve_path(X, Y, regs, weight)):
                held_out = replace(solved, rows=None if at_once else solved.rows).held_out(clusters)
                assert held_out.refitted.any()
                yield held_out.outputs.detach()
                yield torch.autograd.grad(held_out.outputs.square().sum(), X)[0]

    expected = list(answers())
    torch.set_default_device("meta")
    request.addfinalizer(lambda: torch.set_default_device(None))
    for one, other in zip(answers(), expected, strict=True):
        assert_close(one, other)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_sparse_rows_ignore_the_default_device(request):
    X = torch.randn(30, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).relu()
    X = X.to_sparse_csr()
    y = X.to_dense().sum(1).sin()
    machines = [
        tl.LSSVM(tl.kernels.RBF()),
        tl.RLS(tl.kernels.Linear()),
        tl.SparseLSSVM(tl.kernels.RBF(), basis=5),
    ]
    machines.append(tl.SparseLSSVM(tl.kernels.RBF(), basis=tl.basis.pivoted(5)))

    def answers():
        return [t.detach() for m in machines for t in (m.loo(X, y).outputs, m.fit(X, y)(X))]

    expected = answers()
    torch.set_default_device("meta")
    request.addfinalizer(lambda: torch.set_default_device(None))
    for one, other in zip(answers(), expected, strict=True):
        assert_close(one, other)


def test_what_is_made_of_held_out_rows_ignores_the_default_device(request):
    X = torch.randn(40, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = X[:, 0].sin()
    labels = (X[:, 0] > 0).long()
    machine = tl.LSSVM(tl.kernels.RBF(1.0))

    estimators = [LOORegressor(*names, random_state=0) for names in (("sparse",), ("lssvm", "ard", "mse"))]

    def answers():
        fitted = machine.fit(X, y)
        return [
            *tl.intervals.jackknife_plus(machine, X, y, X[:5]),
            tl.calibrate(machine.loo(X, labels))(X[:5, 0]),
            tl.diagnose(machine, X, y).leverage,
            tl.probe(X, labels, progress=False).held_out.outputs,
            machine.lso(X, y, tl.splits.h_block(X[:, 0], 0.1)).outputs.detach(),
            fitted.frozen()(X[:5]),
            *(torch.from_numpy(estimator.fit(X, y).predict(X[:5])) for estimator in estimators),
            torch.from_numpy(LOOClassifier("svc", search=None).fit(X, labels).predict_proba(X[:5])),
            *(t.detach() for t in fitted.predictive(X[:5])),
            *scores(machine.loo(X, y)),
        ]

    def scores(held_out):
        tau, log_density = tl.criteria.kendall_tau, tl.criteria.log_density
        found = (tau(held_out), tau(held_out, clusters=None), log_density(held_out, noise=0.3))
        return (score.detach() for score in found)

    expected = answers()
    torch.set_default_device("meta")
    request.addfinalizer(lambda: torch.set_default_device(None))
    for one, other in zip(answers(), expected, strict=True):
        assert_close(one, other)
