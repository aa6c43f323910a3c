"""Leverage, residuals, Cook's distance, exact changes of criteria, suspect labels."""

import pytest
import torch
from cases import CASES, IDS, problem
from torch.testing import assert_close

import torchloo as tl

every_smoother = pytest.mark.parametrize("case", CASES, ids=IDS)
N = 14
RAGGED = [7, 7, -2, 30, 30, 30, 4, 4, 4, 4, 4, 9, 9, 30]


def sets_of(clusters):
    labels = list(range(N)) if clusters is None else clusters
    return [[i for i in range(N) if labels[i] == label] for label in sorted(set(labels))]


def test_ordinary_least_squares_has_the_textbook_values():
    X, Y, _ = problem(N, c=1)
    y = Y[:, 0]
    found = tl.diagnose(tl.LSSVM(tl.kernels.Linear(), 1e-9), X, y)
    Z = torch.cat([X, torch.ones(N, 1, dtype=X.dtype)], 1)
    H = Z @ torch.linalg.solve(Z.T @ Z, Z.T)
    e = y - H @ y
    h = H.diagonal()
    p = Z.shape[1]
    s2 = e.square().sum() / (N - p)
    assert_close(found.leverage, h, rtol=1e-7, atol=1e-8)
    expected = e / (s2 * (1 - h)).sqrt()
    assert_close(found.studentised, expected, rtol=1e-7, atol=1e-8)
    expected = e.square() * h / (p * s2 * (1 - h) ** 2)
    assert_close(found.cook, expected, rtol=1e-7, atol=1e-8)


@every_smoother
@pytest.mark.parametrize("clusters", [None, RAGGED], ids=["rows", "ragged"])
def test_cook_is_the_change_of_the_outputs_of_a_refit(case, clusters):
    X, Y, weight = problem(N, c=2)
    Y = case.targets(Y)
    found = tl.diagnose(case.make(0.1), X, Y, clusters, weight=weight)
    fit = found.fit
    reg = torch.tensor(0.1, dtype=torch.float64)
    e = fit.targets - fit.outputs
    s2 = (weight[:, None] * e.square()).sum(0) / (N - found.leverage.sum())
    for k, left in enumerate(sets_of(clusters)):
        kept = [i for i in range(N) if i not in left]
        moved = fit.outputs - case.refit_at(X, Y, reg, weight, kept, X)
        expected = (weight[:, None] * moved.square()).sum(0) / (s2 * found.leverage.sum())
        assert_close(found.cook[k], expected.mean(), rtol=1e-7, atol=1e-9)


@every_smoother
@pytest.mark.parametrize("clusters", [None, RAGGED], ids=["rows", "ragged"])
@pytest.mark.parametrize("criterion", ["mse", "log_density", lambda held_out: held_out.residuals.abs().max()])
def test_change_is_that_of_the_criterion_without_the_rows(case, clusters, criterion):
    if case.coded or case.name == "sparse":
        pytest.skip("without a row, a machine of its own has another coding or basis; see the next test")
    X, Y, weight = problem(N, c=2)
    machine = case.make(0.1)
    received = tl.diagnose(machine, X, Y, clusters, weight=weight).change(criterion)
    function = getattr(tl.criteria, criterion) if isinstance(criterion, str) else criterion

    def value(rows):
        given = X[rows], Y[rows]
        if clusters is None:
            return function(machine.loo(*given, weight[rows]))
        return function(machine.lco(*given, [clusters[i] for i in rows], weight[rows]))

    for k, left in enumerate(sets_of(clusters)):
        expected = value([i for i in range(N) if i not in left]) - value(list(range(N)))
        assert_close(received[k], expected, rtol=1e-7, atol=1e-9)


def test_change_of_a_sparse_machine_keeps_its_basis():
    X, Y, weight = problem(N, c=1)
    machine = tl.SparseLSSVM(tl.kernels.RBF(1.3), 0.1, basis=X[:5].clone())
    received = tl.diagnose(machine, X, Y, weight=weight).change("press")
    before = tl.criteria.press(machine.loo(X, Y, weight))
    for i in range(N):
        kept = [j for j in range(N) if j != i]
        after = tl.criteria.press(machine.loo(X[kept], Y[kept], weight[kept]))
        assert_close(received[i], after - before, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("machine", [tl.LSSVM, tl.KFD])
def test_wrong_labels_are_suspect_and_the_table_and_picture_show_them(machine, tmp_path):
    generator = torch.Generator().manual_seed(0)
    X, y = tl.datasets.twonorm(120, generator=generator)
    wrong = torch.tensor([3, 50, 77])
    y[wrong] = -y[wrong]
    found = tl.diagnose(machine(tl.kernels.RBF(5.0)), X, y)
    assert set(wrong.tolist()) <= set(found.suspects()[:6].tolist())
    lines = str(found).splitlines()
    assert lines[0].startswith("120 rows, ")
    assert len(lines) == 13
    assert int(lines[3].split()[0]) == int(found.suspects()[0])
    found.plot(tmp_path / "diagnosis.png")
    assert (tmp_path / "diagnosis.png").stat().st_size > 10_000


def test_several_classes_and_numbers():
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(90) % 3
    X = 2 * torch.eye(3).double()[labels] + 0.5 * torch.randn(90, 3, generator=generator).double()
    labels[10] = (labels[10] + 1) % 3
    diagnosis = tl.diagnose(tl.LSSVM(tl.kernels.RBF(2.0)), X, labels)
    assert int(diagnosis.suspects()[0]) == 10
    y = X[:, 0].clone()
    y[7] += 20
    found = tl.diagnose(tl.LSSVM(tl.kernels.RBF(2.0)), X, y, torch.arange(90) // 2)
    assert found.suspicion is None
    assert found.suspects().tolist()[0] == 7
    assert "90 rows in 45 clusters" in str(found)


def test_bad_input_raises():
    X, Y, _ = problem(N, c=1)
    machine = tl.LSSVM(tl.kernels.RBF())
    with pytest.raises(TypeError, match="least-squares machine, got SVC"):
        tl.diagnose(tl.SVC(tl.kernels.RBF()), X, Y.sign())
    with pytest.raises(ValueError, match="one problem"):
        tl.diagnose(machine, X.expand(2, N, 3), Y)
    with pytest.raises(TypeError, match="X must be a tensor"):
        tl.diagnose(machine, tl.Stream(X, Y), None)
    with pytest.raises(ValueError, match="criterion must be"):
        tl.diagnose(machine, X, Y).change("nonsense")
    with pytest.raises(ValueError, match="3 clusters"):
        tl.diagnose(machine, X, Y, [0, 1] * (N // 2)).change("mse")
