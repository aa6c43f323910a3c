"""Criteria of classes, class weights and standard errors, against plain loops."""

import functools
import math

import pytest
import torch
from torch.testing import assert_close

import torchloo as tl
from torchloo import criteria
from torchloo.held_out import HeldOut

DOUBLE = torch.float64


def held_out(classes: int, n: int = 17, batch: tuple = (), seed: int = 0) -> HeldOut:
    """Random outputs and classes, of two in one column; some outputs tie."""
    g = torch.Generator().manual_seed(seed)
    columns = classes if classes > 2 else 1
    f = torch.randn(*batch, n, columns, dtype=DOUBLE, generator=g).round(decimals=1)
    label = torch.arange(n).expand(*batch, n) % classes
    y = tl.one_vs_rest(label, range(classes), dtype=DOUBLE)
    if classes == 2:
        f, y = f[..., 0], y[..., 0]
    weight = 0.5 + torch.rand(*batch, n, dtype=DOUBLE, generator=g)
    return HeldOut(f, y - f, y, weight, None, torch.ones_like(f), weight > 9)


def by_rows(held: HeldOut, weight: torch.Tensor) -> list[tuple[int, int, list[float], float]]:
    """(own class, predicted class, an output for each class, weight) of every row, by plain Python."""
    rows = []
    for f, y, w in zip(held.outputs.tolist(), held.targets.tolist(), weight.tolist(), strict=True):
        if isinstance(f, float):
            rows.append((int(y > 0), int(f >= 0), [-f, f], w))
        else:
            own = next(k for k, value in enumerate(y) if value > 0)
            rows.append((own, f.index(max(f)), f, w))
    return rows


def expected_of(rows: list, k: int, scale: float) -> dict[str, object]:
    """All measures, by plain loops."""
    total = sum(w for *_, w in rows)
    accuracy = []
    for c in range(k):
        of = [(said, w) for own, said, _, w in rows if own == c]
        right = sum(w for said, w in of if said == c)
        accuracy.append(right / sum(w for _, w in of) if of else math.nan)
    matrix = [[sum(w for o, s, _, w in rows if (o, s) == (i, j)) for j in range(k)] for i in range(k)]
    loss = 0.0
    for own, _, f, w in rows:
        chance = math.exp(scale * f[own]) / sum(math.exp(scale * value) for value in f)
        loss -= w * math.log(chance) / total
    wrong = sum(w for own, said, _, w in rows if own != said) / total
    return {"accuracy": accuracy, "confusion": matrix, "cross_entropy": loss, "error": wrong}


@pytest.mark.parametrize("classes", [2, 3, 5])
@pytest.mark.parametrize("weight", ["own", None, "given"])
def test_measures_of_classes_equal_loops(classes, weight):
    held = held_out(classes)
    g = torch.Generator().manual_seed(1)
    given = torch.rand(17, dtype=DOUBLE, generator=g) if weight == "given" else weight
    numbers = {"own": held.weight, None: torch.ones(17), "given": given}[weight]
    expected = expected_of(by_rows(held, numbers), classes, 1.7)
    exact = {"rtol": 1e-12, "atol": 1e-12}
    accuracy = torch.tensor(expected["accuracy"], dtype=DOUBLE)
    assert_close(criteria.class_accuracy(held, given), accuracy, **exact)
    matrix = torch.tensor(expected["confusion"], dtype=DOUBLE)
    assert_close(criteria.confusion(held, given), matrix, **exact)
    loss = criteria.cross_entropy(held, given, scale=1.7)
    assert loss.item() == pytest.approx(expected["cross_entropy"], rel=1e-12)
    if classes > 2:
        assert criteria.multiclass_error(held, given).item() == pytest.approx(expected["error"], rel=1e-12)
    else:
        assert criteria.error_rate(held, given).item() == pytest.approx(expected["error"], rel=1e-12)


def test_balanced_multiclass_error_is_the_mean_over_classes_and_the_error_under_balanced_weights():
    held = held_out(3, n=20)
    expected = expected_of(by_rows(held, torch.ones(20)), 3, 1.0)
    received = criteria.balanced_multiclass_error(held)
    assert received.item() == pytest.approx(1 - sum(expected["accuracy"]) / 3, rel=1e-12)
    assert_close(received, criteria.multiclass_error(held, tl.balanced_weight(held.targets)))
    with pytest.raises(ValueError, match="weight must be omitted"):
        criteria.balanced_multiclass_error(held, torch.ones(20, dtype=DOUBLE))


def test_a_class_without_rows_has_no_accuracy_and_does_not_count():
    f = torch.tensor([[1.0, 0.0, 3.0], [1.0, 0.0, -1.0], [0.0, 2.0, 1.0]])
    y = tl.one_vs_rest([0, 0, 1], range(3))
    one = torch.ones(3)
    held = HeldOut(f, y - f, y, one, None, one, one > 1)
    received = criteria.class_accuracy(held)
    expected = torch.tensor([0.5, 1.0, math.nan])
    assert_close(received, expected, equal_nan=True)
    assert criteria.balanced_multiclass_error(held) == 0.25
    assert criteria.confusion(held).tolist() == [[1, 0, 1], [0, 1, 0], [0, 0, 0]]


@pytest.mark.parametrize("classes", [2, 3])
def test_a_batch_equals_its_loop(classes):
    held = held_out(classes, batch=(2, 3))
    scale = torch.tensor([[0.5], [2.0]], dtype=DOUBLE).expand(2, 3)
    names = ["class_accuracy", "confusion"] + (["balanced_multiclass_error"] if classes > 2 else [])
    for i in range(2):
        for j in range(3):
            fields = [None if field is None else field[i, j] for field in held]
            one = HeldOut(*fields)
            for name in names:
                assert_close(getattr(criteria, name)(held)[i, j], getattr(criteria, name)(one))
            received = criteria.cross_entropy(held, scale=scale)[i, j]
            assert_close(received, criteria.cross_entropy(one, scale=scale[i, j]))


@pytest.mark.parametrize("classes", [2, 3])
def test_gradients_of_cross_entropy(classes):
    held = held_out(classes, batch=(2,))

    def loss(f, weight, scale):
        return criteria.cross_entropy(held._replace(outputs=f), weight, scale=scale)

    scale = torch.tensor([0.7, 1.5], dtype=DOUBLE)
    inputs = [t.clone().requires_grad_() for t in (held.outputs, held.weight, scale)]
    assert torch.autograd.gradcheck(loss, inputs)


def test_two_classes_in_one_column_are_the_columns_minus_f_and_f():
    X = torch.randn(30, 3, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))
    label = (X[:, 0] > 0.2).long()
    machine = tl.LSSVM(tl.kernels.RBF(2.0))
    one = machine.loo(X, label)
    two = machine.loo(X, 2 * torch.eye(2, dtype=DOUBLE)[label] - 1)
    assert_close(criteria.cross_entropy(one, scale=3.0), criteria.cross_entropy(two, scale=3.0))
    assert_close(criteria.class_accuracy(one), criteria.class_accuracy(two))
    assert_close(criteria.confusion(one), criteria.confusion(two))


@pytest.mark.parametrize(
    "name", ["cross_entropy", "class_accuracy", "confusion", "balanced_multiclass_error"]
)
def test_what_is_no_class_is_refused(name):
    held = held_out(3)
    measure = getattr(criteria, name)
    several = held.targets.clone()
    several[4] = 1.0
    with pytest.raises(ValueError, match=f"{name}: targets must have exactly one positive column of 3"):
        measure(held._replace(targets=several))
    with pytest.raises(ValueError, match=f"{name}: targets must be finite"):
        measure(held._replace(targets=several * torch.nan))
    if name in ("cross_entropy", "balanced_multiclass_error"):
        with pytest.raises(ValueError, match=f"{name}: per_output must be False"):
            measure(held, per_output=True)
    two = held_out(2)
    if name == "balanced_multiclass_error":
        with pytest.raises(ValueError, match="use error_rate or balanced_error_rate"):
            measure(two)
    else:
        with pytest.raises(ValueError, match=f"{name}: targets must hold one positive and one negative"):
            measure(two._replace(targets=torch.arange(1.0, 18.0, dtype=DOUBLE)))
    for bad in (0.0, -1.0, math.inf, torch.tensor(-1.0)):
        with pytest.raises(ValueError, match="cross_entropy: scale must be positive"):
            criteria.cross_entropy(held, scale=bad)


def standard_error_by_loops(losses: list[float], weight: list[float], clusters: list[int]) -> float:
    """The root of G / (G - 1) times the sum of squares of what clusters add to the mean."""
    total = sum(weight)
    mean = sum(w * x for w, x in zip(weight, losses, strict=True)) / total
    parts: dict[int, float] = {}
    for x, w, label in zip(losses, weight, clusters, strict=True):
        if w > 0:
            parts[label] = parts.get(label, 0.0) + w * (x - mean) / total
    return math.sqrt(len(parts) / (len(parts) - 1) * sum(part**2 for part in parts.values()))


def losses_by_loops(name: str, held: HeldOut) -> list[float]:
    rows = by_rows(held, held.weight)
    if name in ("error_rate", "multiclass_error"):
        return [float(own != said) for own, said, *_ in rows]
    if name == "cross_entropy":
        return [-f[own] + math.log(sum(math.exp(value) for value in f)) for own, _, f, _ in rows]
    residuals = held.residuals.reshape(len(rows), -1).square()
    return residuals.mean(1).tolist()


@pytest.mark.parametrize(
    ("name", "classes"),
    [("error_rate", 2), ("multiclass_error", 3), ("cross_entropy", 2), ("cross_entropy", 3), ("mse", 3)],
)
@pytest.mark.parametrize("clustered", [False, True])
@pytest.mark.parametrize("weight", ["own", None, "some"])
def test_standard_error_equals_loops(name, classes, clustered, weight):
    held = held_out(classes)
    clusters = torch.tensor([3, 3, -1, 5, 5, 5, 7, 8, 8, 3, 3, 9, 9, 9, 10, 10, 7])
    some = (torch.arange(17) % 4 != 0).to(DOUBLE)
    given = some if weight == "some" else weight
    numbers = {"own": held.weight, None: torch.ones(17), "some": some}[weight].tolist()
    labels = clusters.tolist() if clustered else list(range(17))
    expected = standard_error_by_loops(losses_by_loops(name, held), numbers, labels)
    if clustered:
        held = held._replace(clusters=clusters)
    received = tl.standard_error(getattr(criteria, name), held, given)
    assert received.item() == pytest.approx(expected, rel=1e-10)
    assert_close(tl.standard_error(name, held, given), received)


def test_standard_error_of_an_unweighted_mean_is_the_textbook_one():
    held = held_out(2, n=40)
    wrong = ((held.outputs >= 0) != (held.targets > 0)).double()
    received = tl.standard_error("error_rate", held, None)
    expected = wrong.std() / math.sqrt(40)
    assert_close(received, expected)
    batch = held_out(3, batch=(2,))
    each = [
        tl.standard_error("multiclass_error", HeldOut(*(None if t is None else t[b] for t in batch)))
        for b in range(2)
    ]
    assert_close(tl.standard_error("multiclass_error", batch), torch.stack(each))


def test_standard_error_refuses_what_is_no_mean_over_rows():
    held = held_out(3)
    for name in ("press", "balanced_multiclass_error", "kendall_tau"):
        with pytest.raises(ValueError, match=f"criterion must be a mean over rows, .* got {name}"):
            tl.standard_error(name, held)
    with pytest.raises(ValueError, match="average must be 'outputs'"):
        tl.standard_error("error_rate", held)
    tl.standard_error(functools.partial(criteria.error_rate, average="outputs"), held)
    with pytest.raises(TypeError, match="held_out must be a HeldOut"):
        tl.standard_error("mse", held.outputs)
    alone = HeldOut(*(None if t is None else t[:1] for t in held))
    assert math.isnan(tl.standard_error("mse", alone))


def weights_by_loops(labels: list) -> list[float]:
    classes = set(labels)
    return [len(labels) / (len(classes) * labels.count(label)) for label in labels]


@pytest.mark.parametrize("labels", [[4, 4, 4, 9], [0, 2, 1, 1, 1, 2, 0, 0, 0], [True, False, False]])
def test_balanced_weight_equals_loops(labels):
    given = torch.tensor(labels)
    expected = torch.tensor(weights_by_loops(labels))
    assert_close(tl.balanced_weight(given), expected)
    assert tl.balanced_weight(given).sum().item() == pytest.approx(len(labels))
    assert_close(tl.balanced_weight(given, dtype=DOUBLE).float(), expected)
    assert_close(tl.balanced_weight(tl.one_vs_rest(given)), expected)
    assert_close(tl.balanced_weight(given, sorted(set(labels))), expected)
    batch = torch.stack([given, given.flip(0)])
    assert_close(tl.balanced_weight(batch), torch.stack([expected, expected.flip(0)]))
    assert_close(tl.balanced_weight(tl.one_vs_rest(batch)), tl.balanced_weight(batch))


def test_classes_that_are_missing_do_not_count_for_balanced_weight():
    batch = torch.tensor([[0, 0, 1], [2, 1, 0]])
    expected = torch.tensor([weights_by_loops([0, 0, 1]), weights_by_loops([2, 1, 0])])
    assert_close(tl.balanced_weight(batch), expected)
    assert_close(tl.balanced_weight(batch, [0, 1, 2, 3]), expected)
    each = torch.func.vmap(lambda y: tl.balanced_weight(y, [0, 1, 2]))(batch)
    assert_close(each, expected)
    with pytest.raises(ValueError, match="y must hold at least two classes in every problem"):
        tl.balanced_weight(torch.tensor([[0, 0, 1], [2, 2, 2]]))
    with pytest.raises(ValueError, match=r"y must hold labels of classes only, \[0, 1\], got \[2\]"):
        tl.balanced_weight(batch, [0, 1])


@pytest.mark.parametrize("make", [tl.LSSVM, tl.SVC])
def test_balanced_weights_make_a_rare_class_heard(make):
    g = torch.Generator().manual_seed(0)
    label = torch.tensor([0] * 45 + [1] * 5)
    X = torch.randn(50, 2, generator=g) + label[:, None]
    machine = make(tl.kernels.RBF(2.0))
    plain = criteria.balanced_error_rate(machine.loo(X, label))
    weighed = criteria.balanced_error_rate(machine.loo(X, label, tl.balanced_weight(label)))
    assert weighed < plain
