"""Several classes: one SVM, and one Fisher discriminant, for each column of the labels."""

import copy
import functools
import io
import pickle

import numpy as np
import pytest
import torch
from reference_svm import loo_by_enumeration
from svm_problems import rbf
from torch import Tensor
from torch.testing import assert_close

import torchloo as tl
from torchloo.svm import RESOLVED_BY, SVC, svm_loo

DOUBLE = torch.float64
N = 30
CLUSTERS = torch.arange(N).flip(0) // 4 * 3  # the last one has two rows


def three_classes(seed: int = 0, n: int = N, batch: tuple[int, ...] = ()) -> tuple[Tensor, Tensor, Tensor]:
    """X (..., n, 2), labels (..., n, 3) one class against the rest, and weights (..., n)."""
    g = torch.Generator().manual_seed(seed)
    X = torch.randn(*batch, n, 2, dtype=DOUBLE, generator=g)
    level = X[..., 0] + 0.4 * torch.randn(*batch, n, dtype=DOUBLE, generator=g)
    k = (level > -0.4).long() + (level > 0.5).long()
    k[..., :6] = torch.arange(6) // 2  # two rows of each at least
    Y = 2 * torch.nn.functional.one_hot(k, 3).to(DOUBLE) - 1
    return X, Y, 0.5 + torch.rand(*batch, n, dtype=DOUBLE, generator=g)


def machine(C: float = 2.0) -> SVC:
    return SVC(tl.kernels.RBF(1.2), C=C)


def held_out(svc: SVC, X, Y, clusters, weight=None, **options):
    if clusters is None:
        return svc.loo(X, Y, weight, **options)
    return svc.lco(X, Y, clusters, weight, **options)


@pytest.mark.parametrize("C", [0.3, 30.0])
def test_every_column_equals_delete_and_refit_by_enumeration(C):
    X, Y, _ = three_classes(n=7)
    held = machine(C).loo(X, Y)
    K = rbf(X, 1.2).numpy()
    expected = np.stack([loo_by_enumeration(K, Y[:, j].numpy(), C) for j in range(3)], 1)
    assert_close(held.outputs.detach(), torch.from_numpy(expected), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("clusters", [None, CLUSTERS], ids=["rows", "clusters"])
@pytest.mark.parametrize("weighted", [False, True])
def test_held_out_outputs_equal_those_of_machines_fitted_without_the_rows(clusters, weighted):
    X, Y, weight = three_classes()
    weight = weight if weighted else torch.ones_like(weight)
    held = held_out(machine(), X, Y, clusters, weight if weighted else None)
    labels = torch.arange(N) if clusters is None else clusters
    for label in labels.unique():
        left, kept = labels == label, labels != label
        refitted = machine().fit(X[kept], Y[kept], weight[kept])
        expected = refitted(X[left])
        assert_close(held.outputs[left], expected, rtol=1e-7, atol=1e-7)
        for j in range(3):  # and those of a machine that knows one column only
            alone = machine().fit(X[kept], Y[kept, j], weight[kept])
            received = held.outputs[left, j]
            expected = alone(X[left])
            assert_close(received, expected, rtol=1e-7, atol=1e-7)
    assert_close(held.residuals, Y - held.outputs)
    assert_close(held.weight, weight)
    assert torch.equal(held.targets, Y)


EFFORT = ("iterations", "kernel_columns", "newton_steps")


@pytest.mark.parametrize(
    ("clusters", "options"),
    [
        (None, {}),
        (None, {"method": "smo"}),
        (None, {"values": False}),
        (CLUSTERS, {}),
        (CLUSTERS, {"method": "smo"}),
    ],
    ids=["loo", "loo by smo", "signs", "lco", "lco by smo"],
)
@pytest.mark.parametrize("batch", [(), (2, 1)], ids=["one", "batch"])
def test_every_field_holds_what_each_column_alone_gives(clusters, options, batch):
    X, Y, weight = three_classes(1, batch=batch)
    held = held_out(machine(), X, Y, clusters, weight, **options)
    columns = [held_out(machine(), X, Y[..., j], clusters, weight, **options) for j in range(3)]
    for name in held._fields:
        received = getattr(held, name)
        expected = [getattr(column, name) for column in columns]
        if name == "refitted":
            assert torch.equal(received, torch.stack(expected, -1).any(-1))
        elif name in ("weight", "clusters", "values"):
            assert received is expected[0] or bool(torch.as_tensor(received == expected[0]).all())
        elif name in EFFORT and (clusters is not None or "method" in options):
            # Rounding, which is not that of one machine alone, breaks ties of the SMO otherwise.
            alone = torch.stack(expected, -1)
            assert received.shape == alone.shape
            assert int((received - alone).abs().sum()) <= 0.03 * int(alone.sum())
        else:
            assert received.shape == Y.shape
            assert_close(received, torch.stack(expected, -1), equal_nan=True)
    assert held.weight.shape == held.refitted.shape == Y.shape[:-1]


def test_the_output_axis_is_that_of_the_labels():
    X, Y, _ = three_classes()
    y = Y[:, 0]
    flat = machine().loo(X, y)
    column = machine().loo(X, y[:, None])
    assert flat.outputs.shape == (N,)
    assert column.outputs.shape == (N, 1)
    assert torch.equal(flat.outputs, column.outputs[:, 0])
    for labels in (y, y[:, None], Y):
        svc = machine().fit(X, labels)
        assert svc(X[:5]).shape == labels[:5].shape
        assert machine().solve(X, labels).outputs.shape == labels.shape


@pytest.mark.parametrize("clusters", [None, CLUSTERS], ids=["rows", "clusters"])
def test_gradients_equal_differences(clusters):
    X, Y, weight = three_classes(2)
    scale = torch.randn(N, 3, dtype=DOUBLE, generator=torch.Generator().manual_seed(5))

    def loss(X: Tensor, weight: Tensor, log_C: Tensor, log_lengthscale: Tensor) -> Tensor:
        svc = machine()
        parameters = {"log_C": log_C, "kernel.log_lengthscale": log_lengthscale}
        call = torch.func.functional_call
        asked = _Asked(svc, lambda svc: held_out(svc, X, Y, clusters, weight).outputs)
        return (scale * call(asked, {"svc." + name: p for name, p in parameters.items()}, ())).sum()

    at = [X, weight, torch.tensor(0.3, dtype=DOUBLE), torch.tensor(0.1, dtype=DOUBLE)]
    inputs = [t.clone().requires_grad_() for t in at]
    gradients = torch.autograd.grad(loss(*inputs), inputs)
    generator = torch.Generator().manual_seed(7)
    h = 1e-6
    for k, gradient in enumerate(gradients):
        step = torch.randn(at[k].shape, dtype=DOUBLE, generator=generator)
        above, below = (loss(*at[:k], at[k] + shift, *at[k + 1 :]) for shift in (h * step, -h * step))
        received = (gradient * step).sum()
        expected = (above - below) / (2 * h)
        assert_close(received, expected, rtol=1e-5, atol=1e-6)


class _Asked(torch.nn.Module):
    def __init__(self, svc, question):
        super().__init__()
        self.svc, self.question = svc, question

    def forward(self):
        return self.question(self.svc)


def test_problems_that_share_a_kernel_matrix_add_up_their_gradients():
    X, Y, _ = three_classes(3)
    C = torch.tensor([[0.5], [5.0]], dtype=DOUBLE)
    shared = rbf(X).requires_grad_()
    svm_loo(shared, Y.mT, C).outputs.square().sum().backward()  # batch (2, 3) of one matrix
    alone = rbf(X).requires_grad_()
    for c in C[:, 0]:
        for j in range(3):
            svm_loo(alone, Y[:, j], c).outputs.square().sum().backward()
    assert_close(shared.grad, alone.grad)


def test_a_fitted_machine_round_trips_and_its_solution_predicts_alike():
    X, Y, weight = three_classes(4)
    X_new = three_classes(5)[0]
    svc = machine().fit(X, Y, weight)
    expected = svc(X_new)
    assert svc.support.shape[0] < N
    assert svc.coef.shape == (len(svc.support), 3)
    fit = machine().solve(X, Y, weight)
    assert_close(fit.from_kernel(svc.kernel(X_new, X)), expected)
    assert fit.gap.shape == fit.bias.shape == (3,)
    buffer = io.BytesIO()
    torch.save(svc.state_dict(), buffer)
    buffer.seek(0)
    loaded = machine(7.0)
    loaded.load_state_dict(torch.load(buffer, weights_only=True))
    for twin in (loaded, copy.deepcopy(svc), pickle.loads(pickle.dumps(svc))):
        assert torch.equal(twin(X_new), expected)


def test_batches_of_data_and_of_parameters_equal_their_loops():
    X, Y, weight = three_classes(6, batch=(2,))
    together = machine().fit(X, Y, weight)(X)
    lengthscales = torch.tensor([[0.7], [1.2]], dtype=DOUBLE)
    C = torch.tensor([0.5, 2.0], dtype=DOUBLE)
    varied = SVC(tl.kernels.RBF(lengthscales), C).loo(X[0], Y[0]).outputs
    for b in range(2):
        expected = machine().fit(X[b], Y[b], weight[b])(X[b])
        assert_close(together[b], expected)
        alone = SVC(tl.kernels.RBF(lengthscales[b, 0]), C[b]).loo(X[0], Y[0]).outputs
        assert_close(varied[b], alone, rtol=1e-8, atol=1e-8)


def test_the_only_row_of_a_class_leaves_the_label_of_the_others():
    X, Y, _ = three_classes(8)
    Y[Y[:, 2] > 0] = torch.tensor([1.0, -1.0, -1.0], dtype=DOUBLE)
    Y[9] = torch.tensor([-1.0, -1.0, 1.0], dtype=DOUBLE)
    held = machine().loo(X, Y)
    assert held.outputs[9, 2] == -1
    assert RESOLVED_BY[held.resolved_by[9, 2]] == "one class left"
    assert bool(held.errors[9, 2])


def test_the_summary_counts_points_and_machines():
    X, Y, _ = three_classes()
    held = machine().loo(X, Y)
    first, *others = str(held).splitlines()
    assert first.startswith(f"SVM held out: 30 points by each of 3 machines, {int(held.errors.sum())} errors")
    assert sum(int(line.split("(")[0].split()[-1]) for line in others) == 90
    assert str(machine().loo(X, Y[:, 0])).startswith("SVM held out: 30 points, ")


def spoilt(Y: Tensor, column: int, value: float) -> Tensor:
    Y = Y.clone()
    Y[..., column] = value
    return Y


@pytest.mark.parametrize("make", [machine, lambda: tl.KFD(tl.kernels.RBF())], ids=["svc", "kfd"])
@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda Y: spoilt(Y, 1, -1.0), "y must hold both classes, got one only in column 1"),
        (lambda Y: spoilt(Y, 2, 1.0), "y must hold both classes, got one only in column 2"),
        (lambda Y: spoilt(Y, 0, 1.0)[:, :1], "y must hold both classes, got one only$"),
        (lambda Y: spoilt(Y, 0, 1.0)[:, 0], "y must hold both classes, got one only$"),
        (lambda Y: spoilt(Y, 0, 2.0), r"y must hold labels -1 and \+1 only"),
        (lambda Y: Y[:, :0], r"y must have 30 rows to match X, .* got shape \(30, 0\)"),
        (lambda Y: Y[:7], r"y must have 30 rows to match X, .* got shape \(7, 3\)"),
        (lambda Y: Y.float(), "y must have the dtype of X"),
    ],
)
def test_bad_labels_are_named_and_change_nothing(make, change, match):
    X, Y, _ = three_classes()
    fitted = make().fit(X, Y)
    before = fitted(X)
    for method in (fitted.fit, fitted.solve, fitted.loo):
        with pytest.raises((ValueError, TypeError), match=match):
            method(X, change(Y))
    with pytest.raises((ValueError, TypeError), match=match):
        fitted.lco(X, change(Y), CLUSTERS)
    assert torch.equal(fitted(X), before)


def test_the_column_of_one_entry_of_a_batch_is_named():
    X, Y, _ = three_classes(batch=(2,))
    Y[1, :, 2] = -1
    for one in (machine(), tl.KFD(tl.kernels.RBF())):
        with pytest.raises(ValueError, match="got one only in column 2"):
            one.loo(X, Y)


def test_a_weight_of_the_wrong_length_is_refused_in_its_own_shape():
    X, Y, weight = three_classes()
    with pytest.raises(ValueError, match=r"weight must have 30 entries to match X, got shape \(4,\)"):
        machine().loo(X, Y, weight[:4])
    with pytest.raises(ValueError, match=r"weight must have 30 entries to match X, got shape \(\)"):
        machine().loo(X, Y, weight[0])


def test_criteria_see_every_column():
    X, Y, _ = three_classes(9)
    held = machine().loo(X, Y)
    columns = [machine().loo(X, Y[:, j]) for j in range(3)]
    for name in ("press", "error_rate", "balanced_error_rate", "smooth_error", "hinge", "auc", "smooth_wmw"):
        criterion = getattr(tl.criteria, name)
        each = torch.stack([criterion(column) for column in columns])
        assert_close(criterion(held, per_output=True), each)
        averaged = criterion(held) if name == "press" else criterion(held, average="outputs")
        assert_close(averaged, each.mean())
    shifts = tl.threshold(held, "balanced_error_rate")
    assert_close(shifts, torch.stack([tl.threshold(column, "balanced_error_rate") for column in columns]))

    def own(one):  # a field that only an SVM has
        return one.errors.double().mean()

    assert tl.threshold(held, own).tolist() == [0.0] * 3


def test_threshold_refuses_a_metric_that_compares_columns():
    X, Y, _ = three_classes()
    with pytest.raises(ValueError, match=r"threshold: metric must be of one column, .* got multiclass_error"):
        tl.threshold(machine().loo(X, Y), "multiclass_error")
    for metric, match in (("multiclass_error", "of one column"), ("leave_pair_out_auc", "takes a Fit")):
        with pytest.raises(ValueError, match=f"validate: threshold must .*{match}"):
            tl.validate(machine(), X, Y, 2, "press", threshold=metric, progress=False)


MACHINES = {"svc": lambda: SVC(tl.kernels.RBF()), "kfd": lambda: tl.KFD(tl.kernels.RBF())}


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("search", ["gradient", "nelder-mead", "grid"])
def test_select_finds_machines_for_all_classes(name, search):
    X, Y, _ = three_classes(10)
    X = X + 4 * Y[:, :2]
    penalty = "C" if name == "svc" else "reg"
    grid = {penalty: [0.3, 3.0], "lengthscale": [1.0, 2.0]} if search == "grid" else None
    smooth = functools.partial(tl.criteria.smooth_error, average="outputs")
    options = {"grid": grid, "max_evaluations": 15, "progress": False}
    chosen = tl.select(MACHINES[name](), X, Y, smooth, search, **options)
    said = chosen.machine(X).argmax(1)
    assert (said == Y.argmax(1)).double().mean() > 0.8
    assert chosen.value == pytest.approx(smooth(chosen.machine.loo(X, Y)).item(), rel=1e-6)
    assert chosen.value <= chosen.history[0].value


@pytest.mark.parametrize("name", MACHINES)
def test_splits_searched_together_equal_splits_searched_alone(name):
    X, Y, _ = three_classes(11)
    pairs = tl.splits.k_fold(N, 3, generator=torch.Generator().manual_seed(0))
    options = {
        "criterion": "multiclass_error",
        "search": "nelder-mead",
        "max_evaluations": 8,
        "threshold": "error_rate",
        "progress": False,
    }
    together = tl.validate(MACHINES[name](), X, Y, pairs, **options)
    assert together.metric == together.criterion == "multiclass_error"
    for k, pair in enumerate(pairs):
        alone = tl.validate(MACHINES[name](), X, Y, [pair], **options)
        assert together.scores[k] == pytest.approx(float(alone.scores[0]), abs=1e-12)
        assert together.table[k]["criterion"] == pytest.approx(alone.table[0]["criterion"], rel=1e-8)
        assert len(together.table[k]["shift"]) == 3


@pytest.mark.parametrize("search", ["gradient", "grid"])
@pytest.mark.parametrize("criterion", ["error_rate", "smooth_error", "auc"])
def test_a_criterion_of_two_classes_is_refused_before_any_search(search, criterion, monkeypatch):
    monkeypatch.setattr("torchloo.search.run._search", lambda *args: pytest.fail("searched"))
    X, Y, _ = three_classes()
    with pytest.raises(
        ValueError, match=f"select: criterion cannot be evaluated: {criterion}: average must be"
    ):
        tl.select(tl.LSSVM(tl.kernels.RBF()), X, Y, criterion, search, progress=False)
    numbers = Y.argmax(1).to(DOUBLE) + 1
    with pytest.raises(
        ValueError, match=f"criterion cannot be evaluated: {criterion}: targets must hold one"
    ):
        tl.select(tl.LSSVM(tl.kernels.RBF()), X, numbers, criterion, search, progress=False)


def test_select_by_multiclass_error_finds_what_the_mean_over_columns_misses():
    """Of ten classes, a machine that says no to each errs in a tenth of the columns, and in most rows."""
    generator = torch.Generator().manual_seed(3)
    label = torch.arange(100) % 10
    centres = torch.randn(10, 20, dtype=DOUBLE, generator=generator)
    X = centres[label] + 1.5 * torch.randn(100, 20, dtype=DOUBLE, generator=generator)
    Y = 2 * torch.nn.functional.one_hot(label, 10).to(DOUBLE) - 1
    regs = [10.0**k for k in range(-2, 5)]
    kernel = tl.kernels.RBF(5.0)
    kernel.log_lengthscale.requires_grad_(False)
    options = {"search": "grid", "grid": {"reg": regs}, "progress": False}
    chosen = tl.select(tl.LSSVM(kernel), X, Y, "multiclass_error", **options)
    held = [tl.LSSVM(kernel, reg).loo(X, Y).outputs for reg in regs]
    errors = [(f.argmax(1) != label).double().mean().item() for f in held]
    assert chosen.value == pytest.approx(min(errors))
    assert chosen.machine.reg.item() == pytest.approx(regs[int(np.argmin(errors))])
    columns = [((f >= 0) != (Y > 0)).double().mean().item() for f in held]
    assert errors[int(np.argmin(columns))] > min(errors) > 2 * min(columns)
