"""Proofs by the active set, against rational arithmetic."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from svm_problems import rbf, solved, toy
from torch.testing import assert_close

from torchloo.svm import svm_lco, svm_loo
from torchloo.svm.proof.active import proved_sign, value_error
from torchloo.svm.proof.certify import Held, gap_ball_sign
from torchloo.svm.records import Exact, SVMProblem


def _solved(K, y, C):
    """One problem and its solution, without the axis of the stack."""
    problem, full = solved(K, y, torch.full_like(y, C))
    return SVMProblem(*(x[0] for x in problem[:-1])), Exact(*(x[0] for x in full[:-1]))


def _held(problem, alpha, box=None):
    """One solution, whose target is row 0."""
    y, u, first = problem.y, (alpha * problem.y) @ problem.K, torch.zeros(1, dtype=torch.long)
    return Held(alpha[None], u[None], y, problem.box if box is None else box, first, problem.rounding, first)


def _solve(M, rhs):
    """Gaussian elimination of rationals."""
    M = [[*row, r] for row, r in zip(M, rhs, strict=True)]
    for k in range(len(M)):
        pivot = next(i for i in range(k, len(M)) if M[i][k] != 0)
        M[k], M[pivot] = M[pivot], M[k]
        for i in range(len(M)):
            if i != k and M[i][k] != 0:
                factor = M[i][k] / M[k][k]
                M[i] = [a - factor * b for a, b in zip(M[i], M[k], strict=True)]
    return [row[-1] / row[k] for k, row in enumerate(M)]


def _exactly(problem, alpha):
    """Decision values of the active set of alpha in rational arithmetic, and whether it is optimal."""
    K = [[Fraction(k) for k in row] for row in problem.K.tolist()]
    y, box = ([Fraction(v) for v in x.tolist()] for x in (problem.y, problem.box))
    a = [Fraction(v) * t for v, t in zip(alpha.tolist(), y, strict=True)]
    m = len(y)
    S = [i for i in range(m) if 0 < a[i] * y[i] < box[i]]
    U = [i for i in range(m) if a[i] * y[i] >= box[i]]
    M = [[Fraction(0)] + [Fraction(1)] * len(S)] + [[Fraction(1)] + [K[i][j] for j in S] for i in S]
    rhs = [-sum(a[j] for j in U)] + [y[i] - sum(K[i][j] * a[j] for j in U) for i in S]
    bias, *free = _solve(M, rhs)
    for i, value in zip(S, free, strict=True):
        a[i] = value
    f = [sum(K[i][j] * a[j] for j in S + U) + bias for i in range(m)]
    inside = all(0 <= a[i] * y[i] <= box[i] for i in S)
    sides = all((y[i] * f[i] - 1) * (-1 if i in U else 1) >= 0 for i in range(m) if i not in S)
    return f, inside and sides


@pytest.mark.parametrize("C", [1.0, 30.0, 1e3, 1e6])
@pytest.mark.parametrize("kernel", ["linear", "rbf"])
@pytest.mark.parametrize("seed", range(3))
def test_decision_values_are_off_by_no_more_than_is_said(seed, kernel, C):
    X, y = toy(seed, n=14)
    problem, full = _solved(X @ X.T if kernel == "linear" else rbf(X), y, C)
    held = _held(problem, full.alpha)
    error = value_error(problem.K[None], held, full.bias[None])[0]
    exact, optimal = _exactly(problem, full.alpha)
    assert optimal
    assert bool(error.isfinite().all())
    f = held.u[0] + full.bias
    for value, truth, most in zip(f.tolist(), exact, error.tolist(), strict=True):
        assert abs(Fraction(value) - truth) <= Fraction(most)
    assert float(error.max()) <= 1e-9 * max(1.0, C)


@given(st.integers(0, 10**6), st.sampled_from([0.1, 10.0, 1e4]), st.sampled_from([1e-12, 1e-8, 1e-4, 1e-1]))
def test_what_is_proved_of_a_disturbed_solution_is_true(seed, C, size):
    X, y = toy(seed, n=10)
    problem, full = _solved(rbf(X), y, C)
    g = torch.Generator().manual_seed(seed)
    noise = size * C * torch.randn(10, generator=g, dtype=torch.float64)
    touched = torch.rand(10, generator=g) < 0.5
    alpha = (full.alpha + noise * touched).clamp_min(0).minimum(problem.box)
    held = _held(problem, alpha)
    error = value_error(problem.K[None], held, full.bias[None])[0]
    if bool(error.isinf().any()):
        assert bool(error.isinf().all())
        return
    exact, optimal = _exactly(problem, alpha)
    assert optimal
    f = held.u[0] + full.bias
    for value, truth, most in zip(f.tolist(), exact, error.tolist(), strict=True):
        assert abs(Fraction(value) - truth) <= Fraction(most)


def test_a_wrong_active_set_proves_nothing():
    X, y = toy(3, n=25)
    problem, full = _solved(rbf(X), y, 1.0)
    K, y, box = problem.K, problem.y, problem.box

    def proved(alpha):
        return bool(value_error(K[None], _held(problem, alpha), full.bias[None]).isfinite().all())

    assert proved(full.alpha)
    i = int(full.free.nonzero()[0])
    assert not proved(full.alpha.index_fill(0, torch.tensor([i]), 0.0))
    assert not proved(torch.where(torch.arange(len(y)) == i, box, full.alpha))
    j = int((~full.free & ~full.upper).nonzero()[0])
    assert not proved(full.alpha + 1e-3 * (torch.arange(len(y)) == j))
    assert not proved(torch.where(full.free, 0.0, full.alpha))  # no variable is free
    copies = torch.cat([torch.arange(len(y)), torch.tensor([i])])  # a free set that is singular
    parts = {"y": y[copies], "box": box[copies], "rounding": problem.rounding[copies]}
    twice = problem._replace(K=K[copies][:, copies], **parts)
    half = full.alpha[copies].index_copy(0, torch.tensor([i, len(y)]), full.alpha[[i, i]] / 2)
    error = value_error(twice.K[None], _held(twice, half), full.bias[None])
    assert bool(error.isinf().all())


def test_a_variable_without_a_box_has_no_wrong_side():
    X, y = toy(5, n=20)
    _, full = _solved(rbf(X), y, 1.0)
    r = int(((full.margin < -0.5) & full.upper).nonzero()[0])
    others = torch.arange(20) != r
    _, without = _solved(rbf(X)[others][:, others], y[others], 1.0)
    alpha = torch.zeros(20, dtype=torch.float64).masked_scatter(others, without.alpha)
    u, target = (alpha * y) @ rbf(X), torch.tensor([r])
    box, rounding = torch.ones(20, dtype=torch.float64), torch.zeros(20, dtype=torch.float64)
    still_there = Held(alpha[None], u[None], y, box, target, rounding, torch.zeros_like(target))
    gone = still_there._replace(own=torch.zeros(1, dtype=torch.float64))
    assert bool(value_error(rbf(X)[None], gone, without.bias[None]).isfinite().all())
    assert bool(value_error(rbf(X)[None], still_there, without.bias[None]).isinf().all())


@pytest.mark.parametrize("n", [60, 200])
def test_large_C_leaves_nothing_unstable(n):
    """The gap ball is wide there: half of these rows would be open, and refitted in vain."""
    X, y = toy(n, n=n, d=n // 20)
    held = svm_loo(X @ X.T, y, 1e6)
    assert bool(held.certified.all())
    assert not bool(held.refitted.any())
    assert bool(svm_lco(X @ X.T, y, 1e6, torch.arange(n) % 5).certified.all())
    near = svm_loo(X @ X.T, y, 1e5)  # nothing changes any more but the scale of the slack
    assert_close(held.outputs, near.outputs, rtol=1e-3, atol=1e-3)


def test_the_active_set_is_asked_only_where_the_ball_is_too_wide():
    X, y = toy(200, n=200, d=10)
    problem, full = _solved(X @ X.T, y, 1e6)
    held = _held(problem, full.alpha)
    alpha, u, first = held.alpha.expand(200, -1), held.u.expand(200, -1), held.table.expand(200)
    held = held._replace(alpha=alpha, u=u, target=torch.arange(200), table=first)
    bias = full.bias.expand(200)
    ball, both = (proof(problem.K[None], held, bias) for proof in (gap_ball_sign, proved_sign))
    assert int((ball.sign == 0).sum()) > 20
    assert bool((both != 0).all())
    assert bool((both[ball.sign != 0] == ball.sign[ball.sign != 0]).all())
