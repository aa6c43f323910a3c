"""Splits with clusters: those of equal shapes are searched as one batch, and it equals the loop."""

import numpy as np
import pytest
import torch
from interrupts import interrupted_press

import torchloo as tl
from torchloo.search.outer_loop import OuterLoop
from torchloo.search.problem_batch import Clusters, sizes

DOUBLE = torch.float64
K = tl.kernels


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def grouped(units=20, size=2, outputs=None, seed=0):
    """Rows of equal clusters, in no order, and a smooth function of them that differs between clusters."""
    n = units * size
    clusters = (torch.arange(n) % units)[torch.randperm(n, generator=seeded(seed))]
    X = torch.randn(n, 2, dtype=DOUBLE, generator=seeded(seed + 1)) + clusters.unsqueeze(-1) / 5
    noise = torch.randn(n, outputs or 1, dtype=DOUBLE, generator=seeded(seed + 2))
    Y = torch.stack([(X[:, 0] + k).sin() for k in range(outputs or 1)], -1) + 0.3 * noise
    return X, Y if outputs else Y[:, 0], 3 * clusters + 1


@pytest.fixture
def batches(monkeypatch):
    """The numbers of splits that were searched together."""
    counts, run = [], OuterLoop.run

    def counted(self, pairs, rows, deadline):
        counts.append(len(pairs))
        return run(self, pairs, rows, deadline)

    monkeypatch.setattr(OuterLoop, "run", counted)
    return counts


def together_and_apart(batches, machine, X, y, splits, clusters, **options):
    """One call, which must make one batch of all splits, and a call for each split."""

    def run(some):
        options_here = {"metric": "mse", "generator": seeded(7), "progress": False} | options
        return tl.validate(machine, X, y, some, clusters=clusters, **options_here)

    batch = run(splits)
    assert batches == [len(splits)]
    return batch, [run([split]).table[0] for split in splits]


def assert_alike(batch, rows, rtol=1e-5):
    for received, expected in zip(batch.table, rows, strict=True):
        for name in expected.keys() - {"split", "evaluations"}:  # where a search stops, rounding may decide
            left, right = (torch.tensor(row[name], dtype=DOUBLE) for row in (received, expected))
            torch.testing.assert_close(left, right, rtol=rtol, atol=1e-9, msg=lambda m, name=name: name + m)


OPTIONS = {
    "gradient": {"search": "gradient"},
    "starts": {"search": "gradient", "starts": 3, "max_evaluations": 8},
    "nelder-mead": {"search": "nelder-mead", "max_evaluations": 30},
    "grid": {"search": "grid", "grid": {"reg": [0.1, 1.0, 10.0], "lengthscale": [0.5, 2.0]}},
    "default grid": {"search": "grid"},
    "prior": {"search": "gradient", "prior": 1.0},
    "criterion weight": {"weight": lambda y: 1 + (y > 0).double(), "criterion_weight": lambda y: y.abs() + 1},
    "threshold": {"criterion": "mse", "threshold": "mse", "search": "nelder-mead", "max_evaluations": 20},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_splits_with_clusters_in_one_batch_equal_a_loop_over_them(name, batches):
    X, y, clusters = grouped()
    weight = 0.5 + torch.rand(len(y), dtype=DOUBLE, generator=seeded(9))
    splits = tl.splits.hold_out(len(y), 5, 0.2, clusters=clusters, generator=seeded())
    options = {"weight": weight} | OPTIONS[name]
    machine = tl.LSSVM(K.RBF())
    # A search stops at a relative change of 1e-6, which leaves the parameters the root of that.
    assert_alike(*together_and_apart(batches, machine, X, y, splits, clusters, **options), rtol=1e-4)


@pytest.mark.parametrize(
    "basis",
    [6, tl.basis.random(6, generator=seeded(1)), tl.basis.rpcholesky(6, generator=seeded(2)),
     tl.basis.stochastic(6, generator=seeded(3)), tl.basis.greedy(6), tl.basis.pruned(6)],
    ids=["first", "random", "rpcholesky", "stochastic", "greedy", "pruned"],
)  # fmt: skip
def test_a_basis_is_chosen_among_the_rows_of_a_split_as_they_came(basis, batches):
    X, y, clusters = grouped()
    splits = tl.splits.hold_out(len(y), 4, 0.2, clusters=clusters, generator=seeded())
    machine = tl.SparseLSSVM(K.RBF(), basis=basis)
    grid = {"search": "grid", "grid": {"reg": [0.1, 1.0], "lengthscale": [0.5, 1.0, 2.0]}}
    assert_alike(*together_and_apart(batches, machine, X, y, splits, clusters, **grid), rtol=1e-9)
    batches.clear()
    descent = {"search": "gradient", "max_evaluations": 4}
    assert_alike(*together_and_apart(batches, machine, X, y, splits, clusters, **descent), rtol=1e-6)


def test_several_outputs_and_a_given_matrix_are_put_in_order(batches):
    X, Y, clusters = grouped(outputs=3)
    splits = tl.splits.hold_out(len(Y), 4, 0.2, clusters=clusters, generator=seeded())
    batch, rows = together_and_apart(batches, tl.RLS(K.RBF()), X, Y, splits, clusters)
    assert_alike(batch, rows)
    batches.clear()
    gram = K.RBF(2.0)(X).detach()
    batch, rows = together_and_apart(batches, tl.LSSVM(K.Precomputed()), gram, Y, splits, clusters)
    assert_alike(batch, rows)


def test_more_rows_than_a_start_looks_at_begin_alike(batches):
    X, y, clusters = grouped(units=180)  # the first start is found on 300 evenly spread rows
    splits = tl.splits.hold_out(len(y), 3, 0.1, clusters=clusters, generator=seeded())
    machine = tl.SparseLSSVM(K.RBF(), basis=10)
    options = {"max_evaluations": 1, "standardise": False}
    assert_alike(*together_and_apart(batches, machine, X, y, splits, clusters, **options), rtol=1e-9)


def test_labels_of_two_classes_reach_svc_and_kfd(batches):
    X, y, clusters = grouped()
    y = torch.where(y > 0, 1.0, -1.0).double()
    splits = tl.splits.hold_out(len(y), 3, 0.2, clusters=clusters, generator=seeded())
    options = {"criterion": "smooth_error", "max_evaluations": 3}
    for machine in (tl.SVC(K.RBF()), tl.KFD(K.RBF())):
        batches.clear()
        assert_alike(*together_and_apart(batches, machine, X, y, splits, clusters, **options))


def test_only_splits_of_equal_shapes_are_searched_together(batches):
    X, y, _ = grouped(20, 1)
    clusters = torch.tensor([5] * 4 + [2] * 4 + [8] * 3 + [1] * 3 + [7] * 6)
    options = {"clusters": clusters, "metric": "mse", "max_evaluations": 2, "progress": False}
    result = tl.validate(tl.LSSVM(K.RBF()), X, y, "leave-cluster-out", **options)
    assert sorted(batches) == [1, 2, 2]
    assert [row["split"] for row in result.table] == list(range(5))
    assert [row["test"] for row in result.table] == [3, 4, 4, 6, 3]  # labels ascending
    batches.clear()
    equal_rows = [([0, 4, 5, 8], [1]), ([0, 1, 4, 5], [2]), ([14, 15, 17, 0], [1]), ([8, 9, 0, 3], [1])]
    tl.validate(tl.LSSVM(K.RBF()), X, y, equal_rows, allow_cut_clusters=True, **options)
    assert sorted(batches) == [1, 1, 2]  # 2 + 1 + 1, 2 + 2 (twice) and 3 + 1


def twins(units=20, size=4):
    """Rows of a cluster are nearly the same, and their class is that of the cluster, drawn at random."""
    clusters = torch.arange(units).repeat_interleave(size)
    X = torch.randn(units, 3, dtype=DOUBLE, generator=seeded())[clusters]
    X = X + 0.01 * torch.randn(X.shape, dtype=DOUBLE, generator=seeded(1))
    signs = 1 - 2 * (torch.randperm(units, generator=seeded(2)) % 2)
    return X, signs.double()[clusters], clusters


def test_splits_that_cut_clusters_are_refused_unless_asked_for():
    X, y, clusters = twins()
    grid = {"search": "grid", "grid": {"reg": [0.01], "lengthscale": [0.5]}, "progress": False}
    folds = tl.splits.k_fold(len(y), 4, generator=seeded())
    known = tl.validate(tl.LSSVM(K.RBF()), X, y, folds, clusters=clusters, allow_cut_clusters=True, **grid)
    new = tl.validate(tl.LSSVM(K.RBF()), X, y, "leave-cluster-out", clusters=clusters, **grid)
    assert known.mean < 0.05
    assert new.mean > 0.3  # nothing can be known of a new cluster
    with pytest.raises(ValueError, match=r"split 0 must not cut clusters, .* allow_cut_clusters=True"):
        tl.validate(tl.LSSVM(K.RBF()), X, y, folds, clusters=clusters, **grid)
    whole = ([row for row in range(80) if row not in (4, 5, 6, 7)], [4, 5])  # 6 and 7 are in neither part
    cut = ([row for row in range(80) if row not in (4, 5)], [4, 5])
    assert len(tl.validate(tl.LSSVM(K.RBF()), X, y, [whole], clusters=clusters, **grid).scores) == 1
    with pytest.raises(ValueError, match=r"split 1 .* cluster 1 \(1 such\) has both training"):
        tl.validate(tl.LSSVM(K.RBF()), X, y, [whole, cut], clusters=clusters, **grid)


def test_rows_trained_on_repeatedly_are_left_out_together_or_refused():
    X, y, _ = twins(size=1, units=30)
    drawn = torch.randint(30, (30,), generator=seeded(3))
    bootstrap = (drawn, [row for row in range(30) if row not in drawn])
    grid = {"search": "grid", "grid": {"reg": [0.01], "lengthscale": [0.5]}, "standardise": False}
    options = grid | {"criterion": "error_rate", "progress": False}
    repeated = drawn.bincount().gt(1).nonzero()[0].item()
    with pytest.raises(
        ValueError, match=rf"split 0 .* repeats row {repeated}, .* clusters=torch.arange\(n\)"
    ):
        tl.validate(tl.LSSVM(K.RBF()), X, y, [bootstrap], **options)
    received = tl.validate(tl.LSSVM(K.RBF()), X, y, [bootstrap], clusters=torch.arange(30), **options)
    machine = tl.LSSVM(K.RBF(0.5), 0.01)
    together = tl.criteria.error_rate(machine.lco(X[drawn], y[drawn], drawn)).item()
    assert received.table[0]["criterion"] == pytest.approx(together)
    assert together > tl.criteria.error_rate(machine.loo(X[drawn], y[drawn])).item()


def test_an_interrupt_gives_every_split_of_the_batch_that_was_begun():
    X, y, clusters = grouped(6, 5)
    criterion = interrupted_press(25)
    options = {"clusters": clusters, "metric": "mse", "max_evaluations": 10, "progress": False}
    with pytest.warns(RuntimeWarning, match="validate: interrupted; these are 6 of 6 splits"):
        result = tl.validate(tl.LSSVM(K.RBF()), X, y, "leave-cluster-out", criterion, **options)
    assert len(result.scores) == 6


def test_sorted_rows_share_one_label_vector():
    labels = [[7, 2, 2, 5, 7, 9, 2], [0, 1, 2, 3, 1, 3, 3]]
    clusters = Clusters.of("validate", labels, 7)
    assert clusters.shared.tolist() == [0, 1, 2, 2, 3, 3, 3]
    assert clusters.order.tolist() == [[3, 5, 0, 4, 1, 2, 6], [0, 2, 1, 4, 3, 5, 6]]
    assert sizes(np.array(labels[0])) == sizes(np.array(labels[1])) == (1, 1, 2, 3)
    assert Clusters.of("select", labels[:1], 7).order is None
