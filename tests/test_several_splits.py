"""select over several splits: the mean of the criterion, or the median of the parameters."""

import statistics

import pytest
import torch
from interrupts import interrupted_press
from torch import nn

import torchloo as tl

DOUBLE = torch.float64
K = tl.kernels
GRID = {"reg": [0.01, 0.1, 1.0, 10.0], "lengthscale": [0.3, 1.0, 3.0]}


def rows(n=40, seed=0):
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(n, 2, dtype=DOUBLE, generator=generator)
    y = torch.sin(2 * X[:, 0]) + 0.3 * torch.randn(n, dtype=DOUBLE, generator=generator)
    orders = [torch.randperm(n, generator=generator) for _ in range(3)]
    return X, y, [(order[:m], order[m:]) for m, order in zip((20, 20, 25), orders, strict=True)]


def select(machine, X, y, *args, **options):
    return tl.select(machine, X, y, *args, progress=False, **options)


def mean_press(X, y, pairs, reg, lengthscale):
    """The mean PRESS over the training rows of the splits, by plain loops."""
    machine = tl.LSSVM(K.RBF(lengthscale), reg)
    values = [tl.criteria.press(machine.loo(X[train], y[train])).item() for train, _ in pairs]
    return statistics.mean(values)


def test_mean_over_a_grid_is_the_best_of_plain_loops():
    X, y, pairs = rows()
    chosen = select(tl.LSSVM(K.RBF()), X, y, "press", "grid", grid=GRID, splits=pairs)
    expected = {(r, s): mean_press(X, y, pairs, r, s) for r in GRID["reg"] for s in GRID["lengthscale"]}
    best = min(expected, key=expected.get)
    assert chosen.value == pytest.approx(expected[best], rel=1e-9)
    assert (chosen.machine.reg.item(), chosen.machine.kernel.lengthscale.item()) == pytest.approx(best)
    assert chosen.evaluations == len(expected)  # one for each candidate, of all splits together


@pytest.mark.parametrize("search", ["gradient", "nelder-mead"])
def test_mean_has_a_minimum_of_the_mean_criterion(search):
    X, y, pairs = rows()
    chosen = select(tl.LSSVM(K.RBF()), X, y, "press", search, splits=pairs, tolerance=1e-9)
    reg = chosen.machine.reg.item()
    scale = chosen.machine.kernel.lengthscale.item()
    assert chosen.value == pytest.approx(mean_press(X, y, pairs, reg, scale), rel=1e-9)
    for r, s in [(1.05, 1.0), (0.95, 1.0), (1.0, 1.05), (1.0, 0.95)]:
        assert mean_press(X, y, pairs, reg * r, scale * s) > chosen.value


def test_mean_follows_the_path_where_reg_is_all_there_is():
    X, y, pairs = rows()
    kernel = K.RBF(1.0).requires_grad_(False)
    chosen = select(tl.LSSVM(kernel), X, y, splits=pairs)
    reg = chosen.machine.reg.item()
    assert chosen.value == pytest.approx(mean_press(X, y, pairs, reg, 1.0), rel=1e-9)
    assert all(mean_press(X, y, pairs, reg * factor, 1.0) > chosen.value for factor in (0.9, 1.1))


@pytest.mark.parametrize("search", ["gradient", "grid"])
def test_median_is_that_of_searches_in_each_split(search):
    X, y, pairs = rows()
    options = {"search": search} | ({"grid": GRID} if search == "grid" else {})
    alone = [select(tl.LSSVM(K.RBF()), X[train], y[train], "press", **options) for train, _ in pairs]
    chosen = select(tl.LSSVM(K.RBF()), X, y, "press", splits=pairs, join="median", **options)
    reg = statistics.median(each.machine.reg.item() for each in alone)
    scale = statistics.median(each.machine.kernel.lengthscale.item() for each in alone)
    assert chosen.machine.reg.item() == pytest.approx(reg)
    assert chosen.machine.kernel.lengthscale.item() == pytest.approx(scale)
    assert chosen.value == pytest.approx(mean_press(X, y, pairs, reg, scale), rel=1e-9)
    assert chosen.evaluations == sum(each.evaluations for each in alone) + 1
    assert [step.number for step in chosen.history] == list(range(1, chosen.evaluations + 1))


def test_median_of_two_splits_is_their_geometric_mean():
    X, y, pairs = rows()
    regs = [select(tl.RLS(K.Linear()), X[t], y[t]).machine.reg.log() for t, _ in pairs[:2]]
    chosen = select(tl.RLS(K.Linear()), X, y, splits=pairs[:2], join="median")
    torch.testing.assert_close(chosen.machine.reg.log(), sum(regs) / 2)


@pytest.mark.parametrize("join", ["mean", "median"])
def test_machine_is_fitted_to_all_rows(join):
    X, y, pairs = rows()
    chosen = select(tl.LSSVM(K.RBF()), X, y, splits=pairs, join=join).machine
    again = tl.LSSVM(K.RBF(chosen.kernel.lengthscale.item()), chosen.reg.item()).fit(X, y)
    torch.testing.assert_close(chosen(X), again(X))


@pytest.mark.parametrize("join", ["mean", "median"])
def test_clusters_weights_and_given_matrices_are_taken_with_their_rows(join):
    X, y, pairs = rows()
    clusters = torch.arange(40) // 2
    weight = torch.rand(40, dtype=DOUBLE) + 0.5
    gram = K.RBF(1.0)(X).detach()
    options = {"criterion": "press", "splits": pairs, "join": join}
    options |= {"clusters": clusters, "weight": weight}
    given = select(tl.LSSVM(K.Precomputed()), gram, y, **options)
    kernel = K.RBF(1.0).requires_grad_(False)
    chosen = select(tl.LSSVM(kernel), X, y, **options)
    assert given.value == pytest.approx(chosen.value, rel=1e-8)
    machine = tl.LSSVM(kernel, chosen.machine.reg.item())
    held_out = [machine.lco(X[t], y[t], clusters[t], weight[t]) for t, _ in pairs]
    expected = statistics.mean(tl.criteria.press(each).item() for each in held_out)
    assert chosen.value == pytest.approx(expected, rel=1e-8)


def test_functions_of_y_get_the_rows_of_a_split():
    X, y, pairs = rows()
    y = torch.where(y > 0, 1.0, -1.0).to(DOUBLE)
    asked = []

    def weight(labels):
        asked.append(len(labels))
        return tl.balanced_weight(labels)

    select(tl.LSSVM(K.RBF()), X, y, weight=weight, splits=pairs)
    assert asked == [len(y), 20, 20, 25]


@pytest.mark.parametrize("join", ["mean", "median"])
def test_machines_are_compared_by_their_mean_criterion(join):
    X, y, pairs = rows()
    machines = [tl.LSSVM(K.Linear()), tl.LSSVM(K.RBF())]
    alone = [select(each, X, y, splits=pairs, join=join) for each in machines]
    chosen = select(machines, X, y, splits=pairs, join=join)
    assert chosen.value == min(each.value for each in alone)
    assert [row["value"] for row in chosen.table] == [each.value for each in alone]
    assert [step.number for step in chosen.history] == list(range(1, chosen.evaluations + 1))


def test_an_interrupt_keeps_the_splits_that_were_searched():
    X, y, pairs = rows()
    train, _ = pairs[0]
    first = select(tl.LSSVM(K.RBF()), X[train], y[train], "press")
    with pytest.warns(RuntimeWarning, match="select: interrupted; this is the best so far"):
        chosen = select(
            tl.LSSVM(K.RBF()), X, y, splits=pairs, join="median",
            criterion=once_interrupted(first.evaluations),
        )  # fmt: skip
    torch.testing.assert_close(chosen.machine.reg, first.machine.reg)


def once_interrupted(after):
    """PRESS that is interrupted once, after a number of calls."""
    first = interrupted_press(after)
    calls = iter(range(1 << 20))

    def criterion(held_out):
        return held_out.residuals.square().sum() if next(calls) > after else first(held_out)

    return criterion


def network():
    features = nn.Linear(2, 2, dtype=DOUBLE)
    return tl.LSSVM(K.RBF(features=features))


@pytest.mark.parametrize(
    ("machine", "options", "error", "message"),
    [
        (tl.LSSVM(K.RBF()), {"join": "mode", "splits": 3}, ValueError, "join must be one of mean, median"),
        (tl.LSSVM(K.RBF()), {"join": "median"}, ValueError, "join='median' needs several splits"),
        (
            network(),
            {"join": "median", "splits": 3},
            ValueError,
            "features.weight is not one.*use join='mean'",
        ),
        (
            tl.LSSVM(K.RBF()),
            {"splits": [([0, 1, 2], [2])]},
            ValueError,
            "select: split 0 has test rows among",
        ),
        (tl.LSSVM(K.RBF()), {"splits": []}, ValueError, "select: splits must hold at least one pair"),
        (tl.LSSVM(K.RBF()), {"splits": [([0, 0, 1], [2])]}, ValueError, "select: split 0 must contain each"),
    ],
)
def test_refused(machine, options, error, message):
    X, y, _ = rows()
    with pytest.raises(error, match=message):
        select(machine, X, y, **options)


def test_a_stream_has_no_splits():
    X, y, pairs = rows()
    with pytest.raises(TypeError, match="select: splits must be None for a stream"):
        tl.select(tl.RLS(K.Linear()), tl.Stream(X, y), splits=pairs, progress=False)


@pytest.mark.parametrize("join", ["mean", "median"])
def test_a_split_of_one_class_is_named(join):
    X, y, _ = rows()
    y = torch.where(torch.arange(40) < 20, 1.0, -1.0).to(DOUBLE)
    pairs = [(torch.arange(10, 30), torch.arange(5)), (torch.arange(15), torch.arange(30, 40))]
    with pytest.raises(ValueError, match="in split 1"):
        select(tl.LSSVM(K.RBF()), X, y, "wmw", "nelder-mead", splits=pairs, join=join)
