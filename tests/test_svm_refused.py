"""What an SVM refuses, and weights, batches and counts in which a mistake could hide."""

from functools import partial

import pytest
import torch
from svm_problems import rbf, toy

import torchloo as tl
from torchloo.svm import RESOLVED_BY, fit, svm, svm_lco, svm_loo
from torchloo.svm.path import unlearn


class _Tanh(tl.kernels.Kernel):
    """The sigmoid kernel, which is none."""

    def _evaluate(self, X, Z):
        return torch.tanh(X @ (X if Z is None else Z).mT)


@pytest.mark.parametrize("C", [0.01, 1.0, 1000.0])
@pytest.mark.parametrize("seed", range(4))
def test_an_indefinite_kernel_is_refused_whether_or_not_the_solver_fails(seed, C):
    X, y = toy(seed, n=30, d=3)
    K = torch.tanh(X @ X.T)
    least = float(torch.linalg.eigvalsh(K)[0])
    assert least < -0.01
    calls = (
        lambda: svm(K, y, C),
        lambda: svm_loo(K, y, C),
        lambda: svm_loo(K, y, C, method="smo"),
        lambda: svm_lco(K, y, C, torch.arange(30) % 3),
        lambda: tl.SVC(_Tanh(), C=C).loo(X, y),
    )
    for call in calls:
        with pytest.raises(
            ValueError, match=f"positive semi-definite, its smallest eigenvalue is {least:.3g}"
        ):
            call()


def test_copies_do_not_hide_an_indefinite_kernel():
    K = 2 * torch.ones(12, 12, dtype=torch.float64) - torch.eye(12, dtype=torch.float64)
    twice = torch.arange(12).repeat(2)
    y = torch.tensor([1.0, -1.0] * 12, dtype=torch.float64)
    with pytest.raises(ValueError, match="its smallest eigenvalue is -2"):
        svm_loo(K[twice][:, twice], y, 1.0)


def test_asymmetry_does_not_hide_behind_a_larger_matrix():
    X, y = toy(1)
    K = rbf(X)
    crooked = K + 0.5 * torch.triu(torch.ones_like(K), 1)
    with pytest.raises(ValueError, match="K must be symmetric"):
        svm_loo(torch.stack([1e8 * K, crooked]), y, 1.0)


def test_weights_over_many_orders_do_not_hide_the_lightest_row():
    """Without the last row both classes weigh the same, so that every coefficient is at its tiny box."""
    for seed in range(120):
        g = torch.Generator().manual_seed(seed)
        n = 2 * int(torch.randint(2, 5, (), generator=g)) + 1
        X = torch.randn(n, 2, generator=g, dtype=torch.float64)
        y = torch.tensor([1.0, -1.0] * n, dtype=torch.float64)[:n]
        order = 8 * torch.rand(n // 2 + 1, generator=g, dtype=torch.float64) - 4
        box = 1e-7 * (10**order).repeat_interleave(2)[:n]
        K = X @ X.T
        outputs = svm_loo(K, y, 1.0, box).outputs
        u = [sum(float(K[i, j] * y[j] * box[j]) for j in range(n - 1)) for i in range(n)]
        low = max(-1 - u[i] for i in range(n - 1) if y[i] < 0)
        high = min(1 - u[i] for i in range(n - 1) if y[i] > 0)
        if low < high:
            assert abs(float(outputs[-1]) - (u[-1] + (low + high) / 2)) < 1e-8


def test_the_effort_of_refits_is_counted(monkeypatch):
    """Some of these rows have f = 0, which nothing can prove, a refit neither: it is for paths given up."""
    X, y = toy(2, n=24, d=2)
    K = X.clamp(-1, 1).round()
    K = K @ K.T
    held = svm_loo(K, y, 0.5)
    assert bool(held.unstable.any())
    assert not bool(held.refitted.any())
    monkeypatch.setattr(unlearn, "follow", partial(unlearn.follow, most_events=1))
    held = svm_loo(K, y, 0.5)
    assert bool(held.refitted.any())
    assert not bool(held.kernel_columns.any())  # the exact solver is no SMO
    clusters = svm_lco(K, y, 0.5, torch.arange(24) % 4)
    assert bool((clusters.kernel_columns > 0).all())
    assert bool((clusters.iterations > 0).any())


def test_wrong_options_are_named():
    X, y = toy(3)
    K = rbf(X)
    for epsilon in ("x", None, -1.0, float("nan")):
        for call in (svm_loo, lambda *a, **k: svm_lco(*a, range(30), **k)):
            with pytest.raises(ValueError, match="epsilon must be positive and finite, got"):
                call(K, y, 1.0, method="smo", epsilon=epsilon)
    with pytest.raises(TypeError, match=r"rows must be a boolean tensor \(30,\), got list"):
        svm_loo(K, y, 1.0, rows=[True] * 30)
    with pytest.raises(ValueError, match=r"rows must be boolean \(30,\), got torch.int64 \(30,\)"):
        svm_loo(K, y, 1.0, rows=torch.arange(30))
    K[0, 0] = -2.0
    least = float(torch.linalg.eigvalsh(K)[0])
    with pytest.raises(ValueError, match=f"svm_loo: K must be .* its smallest eigenvalue is {least:.3g};"):
        svm_loo(K, y, 1.0)


@pytest.mark.parametrize("options", [{}, {"values": False}, {"method": "smo"}], ids=["auto", "errors", "smo"])
def test_nothing_comes_back_of_rows_that_are_not_asked_for(options):
    X, y = toy(5, n=40)
    K, asked = rbf(X).requires_grad_(), torch.arange(40) % 3 == 0
    every, some = svm_loo(K, y, 1.0, **options), svm_loo(K, y, 1.0, rows=asked, **options)
    for name in ("outputs", "errors", "certified", "resolved_by", "unstable"):
        torch.testing.assert_close(getattr(some, name)[asked], getattr(every, name)[asked])
    assert bool(some.outputs[~asked].isnan().all())
    assert not bool((some.errors | some.certified | some.unstable)[~asked].any())
    assert set(some.resolved_by[~asked].tolist()) == {RESOLVED_BY.index("not asked for")}
    assert "not asked for" in str(some)
    with pytest.raises(ValueError, match="error_rate: outputs must be finite"):
        tl.criteria.error_rate(some)
    if not options:
        given, received = (torch.autograd.grad(held.outputs[asked].sum(), K)[0] for held in (every, some))
        torch.testing.assert_close(received, given)


def test_problems_that_one_solution_would_fail_are_solved_in_halves(monkeypatch):
    solve, sizes = fit.solve_exactly, []

    def failing(problem):
        sizes.append(len(problem.y))
        if len(problem.y) > 1:
            raise torch.linalg.LinAlgError("not converged")
        return solve(problem)

    X, y = toy(6, n=20)
    K, C = rbf(X), torch.tensor([0.1, 1.0, 10.0]).double()
    expected = svm(K, y, C)
    monkeypatch.setattr(fit, "solve_exactly", failing)
    received = svm(K, y, C)
    assert sorted(sizes) == [1, 1, 1, 2, 3]
    for name in ("coef", "bias", "outputs"):
        torch.testing.assert_close(getattr(received, name), getattr(expected, name))


def test_an_error_says_which_box_bound_of_a_batch_has_no_solution():
    X, y = toy(7, n=30, noise=0.3)
    machine = tl.SVC(tl.kernels.Linear(), C=torch.tensor([1.0, 1e12, 0.1]).double())
    weight = torch.ones_like(y).index_fill(0, torch.tensor([3]), 2.0)
    with pytest.raises(ValueError, match=r"no solution found, .* at a box bound of 2e\+12; scale the inputs"):
        machine.loo(1e6 * X, y, weight)
