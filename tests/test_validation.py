"""validate and threshold: nothing of the test rows is seen, and batches equal loops."""

import functools
import math

import numpy as np
import pytest
import torch
from interrupts import interrupted_press

import torchloo as tl

DOUBLE = torch.float64
K = tl.kernels


def labelled(n=50, d=3, seed=0, noise=0.6):
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(n, d, dtype=DOUBLE, generator=generator)
    y = X[:, 0] + noise * torch.randn(n, dtype=DOUBLE, generator=generator)
    return X, torch.where(y > 0.5, 1.0, -1.0).double()


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def validate(machine, X, y, *args, **options):
    return tl.validate(machine, X, y, *args, progress=False, **options)


def by_hand(machine, X, y, splits, criterion, metric, search, **options):
    """The outer loop in plain steps, one split after another."""
    scores = []
    for train, test in splits:
        centre = X[train].mean(0)
        scale = X[train].std(0)
        inner = (X[train] - centre) / scale
        outer = (X[test] - centre) / scale
        chosen = tl.select(machine, inner, y[train], criterion, search, progress=False, **options)
        f = chosen.machine(outer)
        one = torch.ones(len(test), dtype=DOUBLE)
        scores.append(metric(tl.HeldOut(f, y[test] - f, y[test], one, None, one, one > 1)).item())
    return scores


@pytest.mark.parametrize("search", ["gradient", "nelder-mead", "grid"])
def test_splits_in_one_batch_equal_a_loop_over_them(search):
    X, y = labelled()
    splits = tl.splits.hold_out(len(y), 6, 0.2, generator=seeded())
    result = validate(tl.LSSVM(K.RBF()), X, y, splits, "press", "mse", search)
    expected = by_hand(tl.LSSVM(K.RBF()), X, y, splits, "press", tl.criteria.mse, search)
    torch.testing.assert_close(result.scores, torch.tensor(expected, dtype=DOUBLE), rtol=1e-4, atol=0)
    assert result.mean == pytest.approx(sum(expected) / 6, rel=1e-4)
    assert result.stderr == pytest.approx(result.scores.std().item() / math.sqrt(6))


def test_starts_in_a_batch_of_splits_equal_those_of_a_loop():
    X, y = labelled(40)
    splits = tl.splits.k_fold(len(y), 4, generator=seeded())
    machine = tl.LSSVM(K.RBF(torch.ones(3)))
    options = {"max_evaluations": 8, "starts": 3}
    result = validate(machine, X, y, splits, metric="mse", generator=seeded(5), **options)
    scores = []
    for split in splits:
        alone = validate(machine, X, y, [split], metric="mse", generator=seeded(5), **options)
        scores.append(alone.scores)
    expected = torch.cat(scores)
    torch.testing.assert_close(result.scores, expected, rtol=1e-6, atol=0)


def test_pure_noise_is_at_chance_though_the_criterion_is_far_below():
    machine = tl.LSSVM(K.RBF(torch.ones(50)))
    scores = []
    for seed in range(3):
        generator = seeded(seed)
        X = torch.randn(200, 50, dtype=DOUBLE, generator=generator)
        y = torch.ones(200, dtype=DOUBLE)
        y[torch.randperm(200, generator=generator)[:100]] = -1
        chosen = tl.select(machine, X, y, progress=False, max_evaluations=60)
        assert chosen.value < 0.75 * 200  # the best constant has a PRESS above 200
        assert tl.criteria.error_rate(chosen.machine.loo(X, y)) < 0.35
        splits = tl.splits.k_fold(200, 5, generator=generator)
        outer = validate(machine, X, y, splits, metric="error_rate", max_evaluations=30)
        assert sum(row["criterion"] for row in outer.table) / 5 < 0.75 * 160
        scores.append(outer.mean)
    assert abs(sum(scores) / 3 - 0.5) < 0.061  # three standard errors of 600 tosses


def test_nothing_of_the_test_rows_reaches_the_selection():
    X, y = labelled()
    split = tl.splits.hold_out(len(y), 1, 0.2, generator=seeded())[0]
    spoilt_X, spoilt_y = X.clone(), y.clone()
    spoilt_X[split.test] = 1e3 * torch.randn(10, 3, dtype=DOUBLE, generator=seeded(1))
    spoilt_y[split.test] = -y[split.test]
    options = {"weight": tl.balanced_weight, "threshold": "balanced_error_rate", "metric": "error_rate"}
    rows = [
        validate(tl.LSSVM(K.RBF()), *data, [split], **options).table[0]
        for data in ((X, y), (spoilt_X, spoilt_y))
    ]
    for name in ("criterion", "shift", "reg", "kernel.lengthscale", "evaluations"):
        assert rows[0][name] == rows[1][name]


def test_standardisation_is_of_the_training_rows_and_can_be_chosen():
    X, y = labelled()
    splits = tl.splits.k_fold(len(y), 5, generator=seeded())
    wild = X * torch.tensor([1.0, 1e3, 1e-3], dtype=DOUBLE) + 5
    machine = tl.LSSVM(K.RBF())
    plain, scaled = (validate(machine, Z, y, splits, metric="mse") for Z in (X, wild))
    torch.testing.assert_close(plain.scores, scaled.scores, rtol=1e-5, atol=0)
    some = validate(machine, wild, y, splits, metric="mse", standardise=[1, 2])
    raw = validate(machine, X, y, splits, metric="mse", standardise=False)
    assert not torch.allclose(some.scores, raw.scores)
    first = [select_first(machine, Z, y, splits, s) for Z, s in ((wild, [1, 2]), (X, False), (X, True))]
    assert first[0] != first[1] != first[2]
    for bad in ([7], 2.5, [0.5]):
        with pytest.raises(ValueError, match="validate: standardise must be True, False or column numbers"):
            validate(machine, X, y, splits, standardise=bad)


def select_first(machine, X, y, splits, standardise):
    return validate(machine, X, y, splits[:1], standardise=standardise, max_evaluations=1).table[0][
        "criterion"
    ]


def test_a_constant_column_of_a_split_does_no_harm():
    X, y = labelled()
    X[:, 2] = 0
    X[0, 2] = 1  # constant in the split that tests on row 0
    splits = [(list(range(1, 50)), [0]), (list(range(40)), list(range(40, 50)))]
    assert bool(validate(tl.LSSVM(K.RBF()), X, y, splits).scores.isfinite().all())


def test_metric_follows_the_targets_unless_given():
    X, y = labelled()
    assert validate(tl.LSSVM(K.RBF()), X, y, 3, generator=seeded()).metric == "error_rate"
    assert validate(tl.LSSVM(K.RBF()), X, 2 * y, 3, generator=seeded()).metric == "mse"

    def largest(held_out):
        return held_out.residuals.abs().max()

    result = validate(tl.LSSVM(K.RBF()), X, y, 3, metric=largest, generator=seeded())
    assert result.metric == "largest"
    assert result.mean > 0


def test_the_metric_of_several_columns_is_that_of_classes_where_every_row_has_one():
    X, _ = labelled()
    label = (X[:, 0] > -0.4).long() + (X[:, 0] > 0.5).long()
    own = torch.nn.functional.one_hot(label, 3).double()
    splits = tl.splits.k_fold(50, 5, generator=seeded())
    options = {"standardise": False, "search": "grid", "grid": {"reg": [0.1], "lengthscale": [1.0]}}
    for Y in (2 * own - 1, own):  # coded -1, +1 or 0, 1
        result = validate(tl.LSSVM(K.RBF()), X, Y, splits, **options)
        assert result.metric == "multiclass_error"
        for (train, test), score in zip(splits, result.scores, strict=True):
            machine = tl.LSSVM(K.RBF(1.0), 0.1).fit(X[train], Y[train])
            said = machine(X[test]).argmax(1)
            assert score.item() == pytest.approx((said != label[test]).double().mean().item())
    two = torch.stack([X[:, 0] > 0, X[:, 1] > 0], -1)
    pair = [(list(range(40)), [int(k) for k in range(40, 50) if two[k].sum() == 1])]  # by chance one in each
    result = validate(tl.LSSVM(K.RBF()), X, 2 * two.double() - 1, pair, **options)
    assert result.metric == "error_rate"
    machine = tl.LSSVM(K.RBF(1.0), 0.1).fit(X[:40], 2 * two[:40].double() - 1)
    f = machine(X[pair[0][1]])
    assert result.mean == pytest.approx(((f >= 0) != two[pair[0][1]]).double().mean().item())
    opposite = torch.stack([X[:, 0], -X[:, 0]], -1)  # numbers, though one of them is positive
    assert validate(tl.LSSVM(K.RBF()), X, opposite, splits, **options).metric == "mse"


def test_labels_that_are_no_two_classes_have_no_error_rate_though_every_split_tests_one():
    X, _ = labelled(30)
    label = torch.arange(30) % 3 + 1
    splits = [((label != k).nonzero()[:, 0], (label == k).nonzero()[:, 0]) for k in (1, 2, 3)]
    with pytest.raises(
        ValueError, match="validate: metric cannot be evaluated: error_rate: targets must hold one"
    ):
        validate(tl.LSSVM(K.RBF()), X, label.double(), splits, metric="error_rate", max_evaluations=2)


@pytest.mark.parametrize("clusters", [None, torch.arange(80) // 2])
def test_threshold_is_fitted_inside_each_split(clusters):
    X, y = labelled(80)
    splits = tl.splits.hold_out(len(y), 3, 0.25, clusters=clusters, generator=seeded())
    options = {
        "metric": "balanced_error_rate",
        "weight": lambda labels: 1 + (labels > 0).double(),
        "clusters": clusters,
        "standardise": False,
        "max_evaluations": 10,
    }
    result = validate(tl.LSSVM(K.RBF()), X, y, splits, threshold="balanced_error_rate", **options)
    plain = validate(tl.LSSVM(K.RBF()), X, y, splits, **options)
    assert [row["unshifted"] for row in result.table] == plain.scores.tolist()
    for (train, test), row in zip(splits, result.table, strict=True):
        rows = X[train], y[train], 1 + (y[train] > 0).double()
        fitted = tl.LSSVM(K.RBF(row["kernel.lengthscale"]), row["reg"]).fit(*rows)
        held_out = fitted.loo(*rows) if clusters is None else fitted.lco(*rows[:2], clusters[train], rows[2])
        shift = tl.threshold(held_out, tl.criteria.balanced_error_rate)
        assert row["shift"] == pytest.approx(shift.item(), abs=1e-6)
        assert row["score"] == pytest.approx(ber(fitted(X[test]) + shift, y[test]))
    assert "without the threshold" in str(result)


def test_weights_are_made_inside_each_split():
    X, y = labelled()
    seen = []

    def weight(labels):
        seen.append(len(labels))
        return tl.balanced_weight(labels)

    validate(tl.LSSVM(K.RBF()), X, y, tl.splits.k_fold(50, 5, generator=seeded()), weight=weight)
    assert seen == [40] * 5
    fixed = torch.rand(50, dtype=DOUBLE) + 0.5
    splits = tl.splits.k_fold(50, 2, generator=seeded())
    result = validate(tl.LSSVM(K.RBF()), X, y, splits, weight=fixed, metric="mse", max_evaluations=1)
    for (train, test), row in zip(splits, result.table, strict=True):
        centre = X[train].mean(0)
        scale = X[train].std(0)
        Z, Z_test = ((X[rows] - centre) / scale for rows in (train, test))
        machine = tl.LSSVM(K.RBF(row["kernel.lengthscale"]), row["reg"])
        held_out = machine.loo(Z, y[train], fixed[train])
        assert row["criterion"] == pytest.approx(tl.criteria.press(held_out).item(), rel=1e-6)
        outputs = machine.fit(Z, y[train], fixed[train])(Z_test)
        assert row["score"] == pytest.approx((y[test] - outputs).square().mean().item(), rel=1e-6)


def test_clusters_are_left_out_inside_and_outside():
    X, y, clusters = tl.datasets.clustered(8, 6, generator=seeded())
    machine = tl.LSSVM(K.RBF())
    outside = validate(machine, X, y, "leave-cluster-out", clusters=clusters, standardise=False)
    assert [row["test"] for row in outside.table] == [6] * 8
    row = outside.table[0]
    train = clusters != 0
    chosen = tl.LSSVM(K.RBF(row["kernel.lengthscale"]), row["reg"])
    held_out = chosen.lco(X[train], y[train], clusters[train])
    assert row["criterion"] == pytest.approx(tl.criteria.press(held_out).item(), rel=1e-6)
    drawn = validate(machine, X, y, 3, clusters=clusters, generator=seeded(), max_evaluations=3)
    assert [row["test"] for row in drawn.table] == [6] * 3


def test_a_given_kernel_matrix_is_cut_by_rows_and_columns():
    X, y = labelled()
    gram = K.RBF(2.0)(X).detach()
    splits = tl.splits.k_fold(50, 5, generator=seeded())
    fixed = tl.LSSVM(K.RBF(2.0))
    fixed.kernel.log_lengthscale.requires_grad_(False)
    expected = validate(fixed, X, y, splits, metric="mse", standardise=False)
    result = validate(tl.LSSVM(K.Precomputed()), gram, y, splits, metric="mse")
    torch.testing.assert_close(result.scores, expected.scores, rtol=1e-5, atol=0)


def test_svc_and_several_outputs_are_validated():
    X, y = labelled(40)
    result = validate(tl.SVC(K.RBF()), X, y, 2, "smooth_error", generator=seeded(), max_evaluations=4)
    assert result.scores.shape == (2,)
    Y = torch.stack([X[:, 0].sin(), X[:, 1]], -1)
    assert validate(tl.RLS(K.RBF()), X, Y, 2, generator=seeded()).mean < 0.5


def test_an_interrupt_gives_what_there_is():
    X, y, _ = tl.datasets.clustered(6, 5, generator=seeded())
    clusters = torch.repeat_interleave(torch.arange(6), torch.tensor([2, 3, 4, 6, 7, 8]))  # one by one
    criterion = interrupted_press(25)
    with pytest.warns(RuntimeWarning, match=r"these are \d of 6 splits, 1 of them searched in part$"):
        result = validate(
            tl.LSSVM(K.RBF()), X, y, "leave-cluster-out", criterion, clusters=clusters, max_evaluations=10
        )
    assert 1 < len(result.scores) == len(result.table) < 6


def test_an_interrupt_of_a_batch_tells_that_all_its_splits_are_searched_in_part():
    X, y, clusters = tl.datasets.clustered(6, 5, generator=seeded())
    criterion = interrupted_press(25)
    with pytest.warns(RuntimeWarning, match="these are 6 of 6 splits, 6 of them searched in part$"):
        result = validate(tl.LSSVM(K.RBF()), X, y, "leave-cluster-out", criterion, clusters=clusters)
    assert len(result.scores) == 6


def test_table_and_text_are_readable():
    X, y = labelled()
    result = validate(tl.LSSVM(K.RBF(torch.ones(3))), X, y, 20, generator=seeded(), max_evaluations=2)
    assert list(result.table[0])[:4] == ["split", "train", "test", "score"]
    assert len(result.table[0]["kernel.lengthscale"]) == 3
    text = str(result)
    assert text.startswith("error_rate 0.")
    assert "(20 splits)" in text
    assert max(map(len, text.splitlines())) < 110
    assert len(text.splitlines()) < 22


def test_hold_out_is_repeated_and_reproducible():
    splits = tl.splits.hold_out(50, 7, 0.1, generator=seeded())
    again = tl.splits.hold_out(50, 7, 0.1, generator=seeded())
    for split, other in zip(splits, again, strict=True):
        assert len(split.test) == 5
        assert torch.equal(torch.cat(split).sort().values, torch.arange(50))
        assert torch.equal(split.test, other.test)
    assert len({tuple(split.test.tolist()) for split in splits}) == 7


def test_every_row_is_tested_once_by_folds_and_clusters():
    clusters = torch.tensor([3, 3, 1, 1, 1, 9])
    for splits in (tl.splits.k_fold(6, 3, generator=seeded()), tl.splits.leave_cluster_out(clusters)):
        assert sorted(torch.cat([test for _, test in splits]).tolist()) == list(range(6))
    for _, test in tl.splits.hold_out(6, 5, 0.4, clusters=clusters, generator=seeded()):
        held = set(clusters[test].tolist())
        assert sum(int((clusters == label).sum()) for label in held) == len(test)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"splits": "k-fold"},
            ValueError,
            "splits must be a number, 'leave-cluster-out' with clusters given",
        ),
        ({"splits": "leave-cluster-out"}, ValueError, "splits must be a number, 'leave-cluster-out'"),
        ({"splits": []}, ValueError, "splits must hold at least one pair"),
        ({"splits": [([0, 1, 2], [2])]}, ValueError, "split 0 has test rows among its training rows"),
        ({"splits": [([0, 1], [2])]}, ValueError, "split 0 must have at least 3 training rows"),
        ({"splits": [([0, 1, 99], [2])]}, ValueError, "row numbers must be between 0 and 49"),
        ({"splits": [([0.0, 1.0, 3.0], [2])]}, ValueError, "expected integer row numbers"),
        ({"splits": 3.5}, ValueError, "splits must be pairs"),
        ({"metric": "best"}, ValueError, "metric must be one of"),
        ({"metric": "leave_pair_out_auc"}, ValueError, "metric must be of outputs"),
        ({"threshold": "best"}, ValueError, "threshold must be one of"),
        ({"colour": 1}, TypeError, "unknown argument 'colour'; the options of a search are starts"),
        ({"search": "random"}, ValueError, "search must be one of"),
        ({"weight": torch.ones(3, dtype=DOUBLE)}, ValueError, r"weight must have shape \(50,\)"),
    ],
)
def test_bad_options_are_named(options, error, message):
    X, y = labelled()
    with pytest.raises(error, match=f"validate: .*{message}"):
        validate(tl.LSSVM(K.RBF()), X, y, **({"splits": 2} | options))


def test_bad_splits_are_named():
    with pytest.raises(ValueError, match="hold_out: repeats must be a whole number"):
        tl.splits.hold_out(10, 0)
    with pytest.raises(ValueError, match="hold_out: fraction must be between 0 and 1"):
        tl.splits.hold_out(10, 1, 1.0)
    with pytest.raises(ValueError, match="hold_out: needs at least 2 rows or clusters, got 1"):
        tl.splits.hold_out(5, 1, clusters=[1] * 5)
    with pytest.raises(ValueError, match="folds: k must be an integer from 2"):
        tl.splits.k_fold(5, 6)
    with pytest.raises(ValueError, match="leave_cluster_out: clusters must have at least 2 labels"):
        tl.splits.leave_cluster_out([1, 1])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: tl.folds(True, 2), "folds: n must be a whole number"),
        (lambda: tl.folds(5, True), "folds: k must be an integer from 2 to n = 5, got True"),
        (lambda: tl.splits.hold_out(True, 2), "hold_out: n must be a whole number"),
        (lambda: tl.splits.hold_out(5, True), "hold_out: repeats must be a whole number"),
        (lambda: tl.splits.k_fold(5, 2, True), "k_fold: repeats must be a whole number"),
        (lambda: tl.splits.k_fold(5, 2, 0), "k_fold: repeats must be a whole number, 1 or more, got 0"),
    ],
)
def test_numbers_of_splits_are_whole(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def every_split(integer):
    def seeded():
        return torch.Generator().manual_seed(0)

    splits = [
        *tl.splits.hold_out(integer(12), integer(3), generator=seeded()),
        *tl.splits.k_fold(integer(12), integer(3), integer(2), generator=seeded()),
        *tl.splits.leave_cluster_out([0, 0, 1, 1]),
        *tl.splits.resolve(integer(2), 12, None, seeded()),
        *tl.splits.resolve([([0, 1, 2], [3])], 12, None, None),
    ]
    return [tl.folds(integer(12), integer(5), seeded()), *(rows for split in splits for rows in split)]


def test_splits_are_on_the_host_whatever_the_default_device():
    expected = every_split(int)
    with torch.device("meta"):  # what torch.set_default_device sets
        received = every_split(int)
    for a, b in zip(received, expected, strict=True):
        assert torch.equal(a, b)


def test_numbers_of_splits_may_be_integers_of_numpy():
    for a, b in zip(every_split(np.int64), every_split(int), strict=True):
        assert torch.equal(a, b)


def held_out_of(f, y):
    one = torch.ones_like(y)
    return tl.HeldOut(f, y - f, y, one if y.ndim == 1 else one[..., 0], None, torch.ones_like(f), one > 1)


def ber(f, y):
    wrong = (f >= 0) != (y > 0)
    return (wrong[y > 0].double().mean() + wrong[y < 0].double().mean()).item() / 2


@pytest.mark.parametrize("seed", range(5))
def test_threshold_is_the_best_of_all_shifts(seed):
    X, y = labelled(30, seed=seed)
    f = X[:, 0] - 1.0
    shift = tl.threshold(held_out_of(f, y), "balanced_error_rate").item()
    shifts = [*torch.linspace(-5, 5, 2001).tolist(), *(-f - 1e-9).tolist(), *(-f + 1e-9).tolist()]
    assert ber(f + shift, y) == pytest.approx(min(ber(f + s, y) for s in shifts))
    if ber(f, y) == ber(f + shift, y):
        assert shift == 0


@pytest.mark.parametrize("metric", [tl.criteria.error_rate, tl.criteria.balanced_error_rate])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("seed", range(3))
def test_threshold_by_counting_errors_in_order_equals_scoring_every_shift(metric, dtype, seed):
    X, y = labelled(60, seed=seed)
    f = (4 * X[:, 0] - 1).round().div(4).to(dtype)  # with ties
    held_out = held_out_of(f, y.to(dtype))
    weight = torch.rand(60, generator=torch.Generator().manual_seed(seed)).to(dtype)
    held_out = held_out._replace(weight=weight)
    every = functools.partial(metric)  # a callable that is not known to count errors
    assert torch.equal(tl.threshold(held_out, metric), tl.threshold(held_out, every))


def test_threshold_serves_columns_and_batches_alone(monkeypatch):
    X, y = labelled(30)
    outputs = [X[:, 0] - 1, X[:, 0] + 0.4]
    alone = torch.stack([tl.threshold(held_out_of(f, y), "error_rate") for f in outputs])
    columns = held_out_of(torch.stack(outputs, -1), torch.stack([y, y], -1))
    assert torch.equal(tl.threshold(columns, "error_rate"), alone)
    batch = held_out_of(torch.stack(outputs), torch.stack([y, y]))
    batch = batch._replace(weight=torch.ones(2, 30, dtype=DOUBLE))
    assert torch.equal(tl.threshold(batch, "error_rate"), alone)
    monkeypatch.setattr("torchloo.thresholds._ENTRIES", 90)
    assert torch.equal(tl.threshold(batch, "error_rate"), alone)


def test_threshold_maximises_what_is_better_higher_and_refuses_what_it_cannot_use():
    _, y = labelled(30)

    def accuracy(held_out):
        return ((held_out.outputs >= 0) == (held_out.targets > 0)).double().mean()

    accuracy.lower_is_better = False
    held_out = held_out_of(y - 3, y)
    assert tl.threshold(held_out, accuracy).item() == 3
    with pytest.raises(ValueError, match="threshold: metric must be of held-out outputs"):
        tl.threshold(held_out, "leave_pair_out_auc")
    with pytest.raises(TypeError, match="threshold: held_out must be a HeldOut, got Tensor"):
        tl.threshold(y, "error_rate")
    svc = tl.SVC(K.RBF())
    X, y = labelled(30)
    with pytest.raises(ValueError, match="threshold: held_out must hold decision values"):
        tl.threshold(svc.loo(X, y, values=False), "error_rate")


@pytest.mark.parametrize("metric", ["auc", "balanced_error_rate", "kendall_tau", "log_density"])
def test_a_metric_that_test_rows_cannot_have_is_refused_before_any_search(monkeypatch, metric):
    monkeypatch.setattr("torchloo.search.outer_loop.search_all", lambda *args: pytest.fail("searched"))
    X, y = labelled()
    negative = (y < 0).nonzero()[:4, 0].tolist()
    pair = ([i for i in range(50) if i not in negative], negative)
    with pytest.raises(ValueError, match=f"validate: split 0 cannot be scored: {metric}: "):
        validate(tl.LSSVM(K.RBF()), X, y, [pair], metric=metric)
    columns = torch.stack([y, y], -1)
    with pytest.raises(ValueError, match=f"validate: split 0 cannot be scored: {metric}: "):
        validate(tl.LSSVM(K.RBF()), X, columns, [pair], metric=metric)


@pytest.mark.parametrize(
    "call", [tl.select, lambda *args, **options: tl.validate(*args, splits=2, **options)]
)
@pytest.mark.parametrize("weight", [None, tl.balanced_weight])
def test_a_criterion_without_a_weight_is_refused_before_any_search(call, weight):
    asked = []

    def plain(held_out):
        asked.append(held_out)
        return held_out.residuals.square().mean()

    def weighted(held_out, weight=None):
        return plain(held_out)

    def anything(held_out, **options):
        return plain(held_out)

    X, y = labelled()
    options = {"search": "grid", "grid": {"reg": [1.0]}, "progress": False}
    with pytest.raises(
        TypeError, match="criterion must take weight= if criterion_weight is given, and plain"
    ):
        call(tl.LSSVM(K.RBF()), X, y, criterion=plain, criterion_weight=weight, **options)
    assert not asked
    call(tl.LSSVM(K.RBF()), X, y, criterion=plain, **options)
    for criterion in (weighted, anything, functools.partial(weighted)):
        call(tl.LSSVM(K.RBF()), X, y, criterion=criterion, criterion_weight=weight, **options)
    assert asked


def test_a_split_that_cannot_be_used_is_named():
    X, y = labelled()
    both = [int((y > 0).nonzero()[0]), int((y < 0).nonzero()[0])]
    negative = (y < 0).nonzero()[:, 0].tolist()
    others = [i for i in range(50) if i not in negative[:5]]
    pairs = [([i for i in range(50) if i not in both], both), (others, negative[:5])]
    with pytest.raises(ValueError, match="validate: split 1 cannot be scored: auc: targets must hold both"):
        validate(tl.LSSVM(K.RBF()), X, y, pairs, metric="auc", max_evaluations=2)

    def one_class_is_enough(held_out):
        return held_out.residuals.abs().mean()

    assert (
        len(validate(tl.LSSVM(K.RBF()), X, y, pairs, metric=one_class_is_enough, max_evaluations=2).scores)
        == 2
    )
    pairs = [(others[:25], negative[:5]), (negative[5:30], others[:5])]
    with pytest.raises(ValueError, match="no candidate could be evaluated in split 1: kfd: y must hold both"):
        validate(tl.KFD(K.RBF()), X, y, pairs, max_evaluations=2)


def test_wild_scales_are_warned_of_where_nothing_is_standardised():
    X, y = labelled()
    X = X * torch.tensor([1.0, 1e4, 1.0], dtype=DOUBLE)
    with pytest.warns(UserWarning, match="validate: the columns of X have standard deviations"):
        validate(tl.LSSVM(K.RBF()), X, y, 2, standardise=False, max_evaluations=1, generator=seeded())


def test_a_given_basis_is_not_left_behind_by_standardisation():
    X, y = labelled()
    machine = tl.SparseLSSVM(K.RBF(), basis=X[:5])
    with pytest.raises(ValueError, match="standardise"):
        validate(machine, X + 100, y, 3)
    assert len(validate(machine, X, y, 3, standardise=False).scores) == 3


def test_an_interrupt_while_scoring_keeps_what_was_scored():
    X, y = labelled()
    calls = []

    def metric(held_out, **options):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return tl.criteria.error_rate(held_out, **options)

    with pytest.warns(RuntimeWarning, match="these are 3 of 6 splits$"):
        result = validate(tl.LSSVM(K.RBF()), X, y, 6, metric=metric, generator=seeded())
    assert len(result.scores) == 3
