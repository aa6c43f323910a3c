"""probe: its scores against plain loops and scikit-learn, from every kind of rows, and what it refuses."""

import builtins
import math

import numpy as np
import pytest
import torch
from sklearn.linear_model import RidgeClassifierCV
from torch.utils.data import DataLoader, TensorDataset

import torchloo as tl

DOUBLE = torch.float64


def embeddings(n=120, d=8, classes=3, dtype=DOUBLE, seed=0):
    """Features of different scales, and noisy classes of them, labelled 10, 20, ..."""
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(n, d, dtype=DOUBLE, generator=generator) * torch.logspace(0, -1, d, dtype=DOUBLE)
    outputs = X @ torch.randn(d, classes, dtype=DOUBLE, generator=generator)
    noise = torch.randn(n, classes, dtype=DOUBLE, generator=generator)
    return X.to(dtype), 10 * (1 + (outputs + outputs.std() * noise).argmax(-1))


def probe(*args, **options):
    return tl.probe(*args, progress=False, **options)


def refitted(X, Y, reg, weight, sets):
    """Held-out outputs (n, c) by leaving out sets of rows and refitting."""
    outputs = torch.empty_like(Y)
    for rows in sets:
        kept = [i for i in range(len(X)) if i not in rows]
        Z, w = X[kept], weight[kept]
        share = w / w.sum()
        centre = share @ Z
        mean = share @ Y[kept]
        Zc = Z - centre
        A = Zc.T @ (w[:, None] * Zc) + reg * torch.eye(X.shape[1], dtype=DOUBLE)
        coef = torch.linalg.solve(A, Zc.T @ (w[:, None] * (Y[kept] - mean)))
        outputs[rows] = (X[rows] - centre) @ coef + mean
    return outputs


@pytest.mark.parametrize("d", [5, 60])
@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize("grouped", [False, True])
def test_scores_are_those_of_refits(d, classes, grouped):
    X, labels = embeddings(40, d, classes)
    weight = 0.5 + torch.rand(40, dtype=DOUBLE, generator=torch.Generator().manual_seed(1))
    groups = torch.arange(40) % 13 if grouped else None
    regs = [0.01, 1.0, 30.0]
    found = probe(X, labels, groups, regs, weight)
    known = labels.unique()
    Y = torch.stack([torch.where(labels == k, 1.0, -1.0).double() for k in known], -1)
    sets = (
        [(groups == g).nonzero()[:, 0].tolist() for g in range(13)] if grouped else [[i] for i in range(40)]
    )
    coded = Y[:, 1:] if classes == 2 else Y
    values = []
    for r, reg in enumerate(regs):
        outputs = refitted(X, coded, reg, weight, sets)
        squares = weight[:, None] * (coded - outputs).square()
        values.append((squares.sum(0) / weight.sum()).mean().item())
        columns = torch.cat([-outputs, outputs], 1) if classes == 2 else outputs
        right = (known[columns.argmax(1)] == labels).double()
        assert found.curve[r].item() == pytest.approx(right.mean().item())
        if found.reg == reg:
            assert found.accuracy == pytest.approx(right.mean().item())
            for k, label in enumerate(known):
                assert found.class_accuracy[k].item() == pytest.approx(right[labels == label].mean().item())
            own = found.held_out.outputs.reshape(40, -1)
            torch.testing.assert_close(own, outputs, rtol=1e-8, atol=1e-8)
            losses = [
                torch.nn.functional.cross_entropy(scale * columns, (labels // 10) - 1).item()
                for scale in torch.logspace(-2, 2, 4001)
            ]
            assert found.log_loss == pytest.approx(min(losses), rel=1e-5)
    expected = torch.tensor(values, dtype=DOUBLE)
    torch.testing.assert_close(found.criterion, expected, rtol=1e-8, atol=0)
    assert found.reg == regs[values.index(min(values))]
    assert (found.grouped is not None) == grouped
    if grouped:
        alone = tl.LSSVM(tl.kernels.Linear(), found.reg, classes=known).loo(X, labels, weight)
        wrong = tl.criteria.multiclass_error if classes > 2 else tl.criteria.error_rate
        assert found.loo.accuracy == pytest.approx(1 - wrong(alone, weight=None).item())
        assert found.scores is found.grouped


@pytest.mark.parametrize("classes", [2, 5])
def test_the_choice_and_the_head_are_those_of_ridge_classifier_cv(classes):
    X, labels = embeddings(300, 20, classes)
    found = probe(X, labels)
    theirs = RidgeClassifierCV(alphas=found.regs.numpy(), store_cv_results=True).fit(
        X.numpy(), labels.numpy()
    )
    assert found.reg == pytest.approx(theirs.alpha_)
    squares = torch.from_numpy(theirs.cv_results_.reshape(-1, len(found.regs))).mean(0)
    torch.testing.assert_close(found.criterion, squares, rtol=1e-8, atol=0)
    further, _ = embeddings(500, 20, classes, seed=1)
    assert torch.equal(found.head.predict_class(further), torch.from_numpy(theirs.predict(further.numpy())))


def test_the_standard_error_is_that_of_a_share_or_of_groups():
    X, labels = embeddings(400)
    found = probe(X, labels)
    p = found.accuracy
    assert found.standard_error == pytest.approx(math.sqrt(p * (1 - p) / 399), rel=1e-6)
    twice = torch.cat([X, X])
    pairs = torch.arange(800) % 400
    grouped = probe(twice, torch.cat([labels, labels]), pairs)
    assert grouped.standard_error == pytest.approx(found.standard_error, rel=0.1)  # copies tell nothing new
    assert grouped.loo.standard_error < 0.8 * grouped.standard_error


def kinds_of_rows(X, labels, folder):
    """The same rows in every kind of container."""
    np.save(folder / "X.npy", X.numpy())
    mapped = np.load(folder / "X.npy", mmap_mode="r")
    batches = DataLoader(TensorDataset(X, labels), batch_size=50)
    return {
        "arrays": (X.numpy(), labels.numpy()),
        "mapped": (mapped, labels.tolist()),
        "stream": (tl.Stream(X, labels, progress=False),),
        "stream of a map": (tl.Stream(mapped, labels.numpy(), progress=False),),
        "batches": (tl.Stream(batches, progress=False),),
    }


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("grouped", [False, True])
def test_rows_may_come_in_every_kind(tmp_path, classes, grouped):
    X, labels = embeddings(200, 6, classes)
    groups = np.arange(200) % 40 if grouped else None
    regs = torch.logspace(-2, 2, 9)
    expected = probe(X, labels, groups, regs)
    for name, rows in kinds_of_rows(X, labels, tmp_path).items():
        labels_of = rows[1] if len(rows) > 1 else None
        found = probe(rows[0], labels_of, groups, regs)
        torch.testing.assert_close(found.criterion, expected.criterion, rtol=1e-8, atol=0, msg=name)
        assert found.accuracy == expected.accuracy
        assert found.loo.log_loss == pytest.approx(expected.loo.log_loss)
        assert torch.equal(found.head.predict_class(X), expected.head.predict_class(X))


def test_usual_regularisations_follow_the_scale_of_features_and_weights():
    X, labels = embeddings(300, 5)
    found = probe(X, labels)
    assert len(found.regs) == 30
    assert found.regs[0] < found.reg < found.regs[-1]
    scaled = probe(100 * X, labels, weight=torch.full((300,), 3.0, dtype=DOUBLE))
    torch.testing.assert_close(scaled.regs, 3e4 * found.regs)
    assert scaled.accuracy == found.accuracy
    assert probe(tl.Stream(X, labels, progress=False)).reg == pytest.approx(found.reg)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_narrow_features_are_taken_up_to_float32(dtype):
    X, labels = embeddings(200, 6, dtype=dtype)
    found = probe(X, labels)
    exact = probe(X.double(), labels)
    assert found.head.coef.dtype == torch.float32
    assert found.accuracy == pytest.approx(exact.accuracy, abs=0.011)
    assert found.reg == pytest.approx(exact.reg, rel=1e-3)
    assert probe(X.float().half().numpy(), labels).head.coef.dtype == torch.float32


def test_floats_are_numbers_to_be_predicted():
    X, _ = embeddings(150, 6)
    generator = torch.Generator().manual_seed(2)
    y = X @ torch.randn(6, dtype=DOUBLE, generator=generator) + torch.randn(
        150, dtype=DOUBLE, generator=generator
    )
    found = probe(X, y)
    held_out = tl.LSSVM(tl.kernels.Linear(), found.reg).loo(X, y)
    square = tl.criteria.mse(held_out).item()
    assert found.rmse == pytest.approx(math.sqrt(square))
    assert found.r2 == pytest.approx(1 - square / y.var(correction=0).item())
    assert math.isnan(found.accuracy)
    assert found.class_accuracy is None
    both = probe(X, torch.stack([y, 100 * y], -1))
    assert both.r2 == pytest.approx(probe(X, y, regs=both.regs).r2, rel=1e-6)
    assert both.head(X).shape == (150, 2)
    assert "r2" in str(found)


def test_weights_may_be_a_function_of_the_labels():
    X, labels = embeddings(200, 6)
    given = tl.balanced_weight(labels)
    by_name = probe(X, labels, weight=tl.balanced_weight)
    by_tensor = probe(X, labels, weight=given)
    assert torch.equal(by_name.criterion, by_tensor.criterion)


def test_a_long_path_is_cut_and_found_alike(monkeypatch):
    X, labels = embeddings()
    whole = probe(X, labels)
    monkeypatch.setattr("torchloo.probing._TOGETHER", 4 * 120 * 3)
    cut = probe(X, labels)
    torch.testing.assert_close(cut.criterion, whole.criterion, rtol=1e-10, atol=0)
    assert cut.reg == whole.reg


def test_the_table_names_what_was_found():
    X, labels = embeddings()
    found = probe(X, labels, torch.arange(120) % 30)
    text = str(found)
    assert text == repr(found)
    for words in (
        "120 rows, 8 features, 3 classes",
        "leave-one-out",
        "leave-group-out",
        "log loss",
        "std error",
    ):
        assert words in text
    assert sum(line.endswith("*") for line in text.splitlines()) == 1
    assert f"{found.accuracy:.4f}" in text
    assert "wider range" not in text
    assert "give regs= with a wider range" in str(probe(X, labels, regs=[1e5, 1e6]))


@pytest.mark.parametrize("kind", ["classes", "many", "numbers", "groups"])
def test_the_picture_is_written(tmp_path, kind):
    X, labels = embeddings(200, 6, 40 if kind == "many" else 3)
    groups = torch.arange(200) % 50 if kind == "groups" else None
    found = probe(X, X[:, 0] if kind == "numbers" else labels, groups)
    figure = found.plot(tmp_path / "probe.png")
    assert (tmp_path / "probe.png").stat().st_size > 10_000
    assert len(figure.axes) == 3


def test_a_picture_without_matplotlib_names_the_remedy(monkeypatch):
    X, labels = embeddings()
    found = probe(X, labels)
    imported = builtins.__import__

    def without(name, *args, **options):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return imported(name, *args, **options)

    monkeypatch.setattr("torchloo.probe_result.importlib.import_module", without)
    with pytest.raises(
        ImportError, match=r"Probe.plot: pictures need matplotlib: pip install torchloo\[cli\]"
    ):
        found.plot()


X, LABELS = embeddings(30, 4)


@pytest.mark.parametrize(
    ("args", "options", "error", "message"),
    [
        ((X,), {}, TypeError, "labels must be classes or numbers"),
        ((X.long(), LABELS), {}, TypeError, "features must be floating-point numbers, got torch.int64"),
        ((X[0], LABELS), {}, ValueError, r"features must be \(n, d\) with at least 3 rows, got shape \(4,\)"),
        ((X, LABELS[:5]), {}, ValueError, r"for the 30 rows of features, got torch.int64 of shape \(5,\)"),
        ((X, LABELS[:, None]), {}, ValueError, r"got torch.int64 of shape \(30, 1\)"),
        ((X, torch.ones(30).long()), {}, ValueError, "labels must hold at least two classes"),
        ((X, torch.arange(30)), {}, ValueError, r"integer labels are classes.*labels.float\(\)"),
        ((X, LABELS), {"regs": [0.0, 1.0]}, ValueError, "regs must be positive and finite"),
        ((X, LABELS), {"regs": []}, ValueError, "regs must be positive and finite"),
        ((X, LABELS), {"weight": torch.ones(3)}, ValueError, r"weight must have shape \(30,\), got \(3,\)"),
        ((torch.zeros_like(X), LABELS), {}, ValueError, "features must differ between rows"),
        ((tl.Stream(X, LABELS), LABELS), {}, TypeError, "a stream includes labels and weight"),
    ],
)
def test_bad_input_is_named(args, options, error, message):
    with pytest.raises(error, match=f"probe: .*{message}"):
        probe(*args, **options)


def test_bad_values_are_named():
    bad = X.clone()
    bad[3, 1] = torch.nan
    with pytest.raises(ValueError, match="X must be finite"):
        probe(bad, LABELS)
    with pytest.raises(ValueError, match="groups must hold one label for each"):
        probe(X, LABELS, groups=[0, 1])
    with pytest.raises(ValueError, match="weight must be positive"):
        probe(X, LABELS, weight=-torch.ones(30))
