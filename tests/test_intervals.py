"""Prediction intervals: closed form and refits, coverage, groups."""

import math

import pytest
import torch
from cases import CASES, IDS, problem, relative
from torch.testing import assert_close

import torchloo as tl

every_smoother = pytest.mark.parametrize("case", CASES, ids=IDS)
N = 14
RAGGED = [7, 7, -2, 30, 30, 30, 4, 4, 4, 4, 4, 9, 9, 30]
METHODS = ["jackknife_plus", "jackknife_minmax", "cv_plus"]


def kth(values, k):
    """The k-th smallest of a list, which has infinite ends."""
    values = sorted(values)
    return -math.inf if k < 1 else math.inf if k > len(values) else values[k - 1]


def by_refits(case, method, X, Y, reg, weight, clusters, X_new, level, rows=None):
    """Ends (q, c) by a refit for each row, as Barber et al. write them."""
    labels = list(range(len(X))) if clusters is None else [int(label) for label in clusters]
    targets = case.make(reg).solve(X, Y, weight).targets  # coded, for KFD
    said, errors = [], []
    for i in range(len(X)) if rows is None else rows:
        kept = [j for j in range(len(X)) if labels[j] != labels[i]]
        given = (X, Y, torch.as_tensor(reg, dtype=X.dtype), weight, kept)
        held_out = case.refit_at(*given, X[i : i + 1])[0]
        errors.append((targets[i] - held_out).abs())
        said.append(case.refit_at(*given, X_new))
    n, alpha = len(said), 1 - level
    high = math.ceil(round((1 - alpha) * (n + 1), 9))
    low = math.floor(round(alpha * (n + 1), 9))
    lower = torch.empty_like(said[0])
    upper = torch.empty_like(said[0])
    for q in range(len(X_new)):
        for j in range(Y.shape[1]):
            f = [float(s[q, j]) for s in said]
            R = [float(e[j]) for e in errors]
            if method == "jackknife_minmax":
                lower[q, j] = min(f) - kth(R, high)
                upper[q, j] = max(f) + kth(R, high)
            else:
                lower[q, j] = kth([a - r for a, r in zip(f, R, strict=True)], low)
                upper[q, j] = kth([a + r for a, r in zip(f, R, strict=True)], high)
    return lower, upper


@every_smoother
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("clusters", [None, RAGGED], ids=["rows", "ragged"])
@pytest.mark.parametrize("reg", [1e-3, 0.5])
def test_intervals_equal_those_of_refits(case, method, clusters, reg):
    if method == "cv_plus" and clusters is None:
        clusters = tl.folds(N, 4, torch.Generator().manual_seed(0))
    X, Y, weight = problem(N, c=2)
    X_new, _, _ = problem(6, seed=5)
    Y = case.targets(Y)
    function = getattr(tl.intervals, method)
    received = function(case.make(reg), X, Y, X_new, 0.8, clusters, weight=weight)
    expected = by_refits(case, method, X, Y, reg, weight, clusters, X_new, 0.8)
    for ends in zip(received, expected, strict=True):
        assert relative(*ends) <= 1e-8


@every_smoother
def test_intervals_of_a_batch_equal_its_loop_and_do_not_depend_on_chunks(case, monkeypatch):
    X, Y, weight = problem(N, c=1, batch=(2,))
    X_new, _, _ = problem(5, batch=(2,), seed=5)
    y = case.targets(Y)[..., 0]
    received = tl.intervals.jackknife_plus(case.make(0.1), X, y, X_new, weight=weight, level=0.8)
    monkeypatch.setattr(tl.intervals, "_ENTRIES", 2 * N)
    for b in range(2):
        alone = tl.intervals.jackknife_plus(case.make(0.1), X[b], y[b], X_new[b], weight=weight[b], level=0.8)
        assert alone[0].shape == (5,)
        for many, one in zip(received, alone, strict=True):
            assert_close(many[b], one, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("method", METHODS[:2])
def test_groups_take_their_own_errors_only(method):
    case = CASES[1]
    X, Y, weight = problem(N, c=1)
    X_new, _, _ = problem(6, seed=5)
    groups, groups_new = torch.arange(N) % 2, [1, 0, 0, 1, 5, 1]  # none of group 5 was trained on
    given = (case.make(0.1), X, Y, X_new, 0.7)
    lower, upper = getattr(tl.intervals, method)(*given, weight=weight, groups=groups, groups_new=groups_new)
    for q, group in enumerate(groups_new):
        rows = [i for i in range(N) if int(groups[i]) == group]
        if not rows:
            assert lower[q].item() == -math.inf
            assert upper[q].item() == math.inf
            continue
        ends = by_refits(case, method, X, Y, 0.1, weight, None, X_new[q : q + 1], 0.7, rows)
        received = (lower[q], upper[q])
        expected = (ends[0][0], ends[1][0])
        assert_close(received, expected, rtol=1e-8, atol=1e-9)


def test_too_few_rows_for_the_level_give_infinite_ends():
    X, Y, _ = problem(9, c=1)
    machine = tl.LSSVM(tl.kernels.RBF(), 0.1)
    finite = tl.intervals.jackknife_plus(machine, X, Y[:, 0], X[:2], level=0.9)  # k = 9
    assert all(bool(end.isfinite().all()) for end in finite)
    for end in tl.intervals.jackknife_plus(machine, X, Y[:, 0], X[:2], level=0.91):
        assert bool(end.isinf().all())


def regression(count, rows, heteroscedastic, seed):
    """Batches of noisy rows of one curve, (count, rows, 1) and (count, rows)."""
    generator = torch.Generator().manual_seed(seed)
    X = 6 * torch.rand(count, rows, 1, dtype=torch.float64, generator=generator)
    noise = torch.randn(count, rows, dtype=torch.float64, generator=generator)
    scale = 0.05 + 0.15 * X[..., 0] if heteroscedastic else 0.3
    return X, (2 * X[..., 0]).sin() + scale * noise


@pytest.mark.parametrize("heteroscedastic", [False, True])
@pytest.mark.parametrize("method", ["jackknife_plus", "cv_plus"])
def test_mean_coverage_over_200_data_sets_is_nominal(method, heteroscedastic):
    X, y = regression(200, 60, heteroscedastic, seed=1)
    X_new, y_new = regression(200, 200, heteroscedastic, seed=2)
    machine = tl.LSSVM(tl.kernels.RBF(0.7), 0.3)
    clusters = None if method == "jackknife_plus" else tl.folds(60, 10, torch.Generator().manual_seed(0))
    lower, upper = getattr(tl.intervals, method)(machine, X, y, X_new, 0.9, clusters)
    coverage = ((lower <= y_new) & (y_new <= upper)).double().mean().item()
    assert 0.88 <= coverage <= 0.92


def test_mondrian_intervals_cover_every_group_at_the_level():
    X, y = regression(200, 60, True, seed=1)
    X_new, y_new = regression(200, 200, True, seed=2)
    order, order_new = X.argsort(1), X_new.argsort(1)  # so that groups are the same rows of every set
    X = X.take_along_dim(order, 1)
    X_new = X_new.take_along_dim(order_new, 1)
    y = y.take_along_dim(order[..., 0], 1)
    y_new = y_new.take_along_dim(order_new[..., 0], 1)
    groups, groups_new = torch.arange(60) >= 30, torch.arange(200) >= 100  # quiet and noisy halves
    machine = tl.LSSVM(tl.kernels.RBF(0.7), 0.3)
    plain = tl.intervals.jackknife_plus(machine, X, y, X_new)
    own = tl.intervals.jackknife_plus(
        machine, X, y, X_new, groups=groups.long(), groups_new=groups_new.long()
    )
    covered = [((low <= y_new) & (y_new <= high)).double() for low, high in (plain, own)]
    assert covered[0][:, 100:].mean() < 0.86  # the noisy half, with the errors of both
    assert covered[0][:, :100].mean() > 0.94
    for half in (slice(0, 100), slice(100, 200)):
        assert 0.88 <= covered[1][:, half].mean().item() <= 0.93


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
def test_sparse_rows_have_the_intervals_of_dense_ones():
    X, Y, _ = problem(N, d=3, c=1)
    machine = tl.LSSVM(tl.kernels.Polynomial(degree=2), 0.5)
    expected = tl.intervals.jackknife_plus(machine, X, Y[:, 0], X[:4], 0.8)
    received = tl.intervals.jackknife_plus(machine, X.to_sparse_csr(), Y[:, 0], X[:4].to_sparse_csr(), 0.8)
    assert_close(received, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(
    ("change", "exception", "message"),
    [
        ({"level": 90}, ValueError, "level must be above 0 and below 1, e.g. 0.9, got 90"),
        ({"machine": tl.SVC(tl.kernels.RBF())}, TypeError, "least-squares machine, got SVC"),
        ({"y": torch.ones(N).long()}, TypeError, "class labels"),
        ({"X": tl.Stream(torch.ones(N, 3), torch.ones(N))}, TypeError, "X must be a tensor"),
        ({"groups": [0] * N}, ValueError, "groups and groups_new must be given together"),
        (
            {"groups": [0] * N, "groups_new": [0]},
            ValueError,
            "groups_new must hold one label for each of the 4",
        ),
        ({"X_new": torch.ones(3).double()}, ValueError, "X_new must be rows"),
        ({"X_new": torch.ones(4, 2).double()}, ValueError, "3 columns"),
        ({"clusters": [0] * N}, ValueError, "a cluster holds all"),
    ],
)
def test_bad_input_raises(change, exception, message):
    X, Y, _ = problem(N, c=1)
    given = {"machine": tl.LSSVM(tl.kernels.RBF()), "X": X, "y": Y[:, 0], "X_new": X[:4]} | change
    with pytest.raises(exception, match=message):
        tl.intervals.jackknife_plus(**given)
