import copy
import functools
import itertools
import math
import pickle
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from torchloo import criteria
from torchloo.criteria import pairs
from torchloo.guards import Guard
from torchloo.held_out import HeldOut

SHAPES = [((), 0), ((), 3), ((2, 3), 0), ((2, 3), 2)]
SMOOTH = ["press", "mse", "smooth_error", "hinge", "squared_hinge", "smooth_wmw", "log_density"]
WEIGHTED = ["press", "mse", "error_rate", "smooth_error", "hinge", "squared_hinge", "log_density"]
UNWEIGHTED = ["balanced_error_rate", "wmw", "auc", "smooth_wmw", "kendall_tau"]
HIGHER = ["auc", "kendall_tau", "log_density", "leave_pair_out_auc"]
CLASSES = ["balanced_error_rate", "wmw", "auc", "smooth_wmw"]
ONE_CLASS_WILL_DO = ["error_rate", "smooth_error", "hinge", "squared_hinge"]
SIGNS = CLASSES + ONE_CLASS_WILL_DO


def make(batch=(), c=0, n=13, seed=0, clusters=None, classes=True, ties=True, dtype=torch.float64):
    """A HeldOut of made-up numbers; c = 0: no output axis; class counts differ over the batch."""
    g = torch.Generator().manual_seed(seed)
    shape = (*batch, n) + ((c,) if c else ())
    f = torch.randn(shape, generator=g, dtype=dtype)
    f = (2 * f).round() / 2 if ties else f  # many ties, and outputs that are exactly 0
    y = torch.randn(shape, generator=g, dtype=dtype)
    if classes:
        y = torch.where(
            y > 0.3, *torch.tensor([1.5, -0.7], dtype=dtype)
        )  # coded targets: only the sign is the class
        y.select(len(batch), 0).fill_(1.5)
        y.select(len(batch), 1).fill_(-0.7)
    else:
        y = y.round()
    weight = torch.rand((*batch, n), generator=g, dtype=dtype) + 0.5
    variance = torch.rand(shape, generator=g, dtype=dtype) + 0.5
    return HeldOut(f, y - f, y, weight, clusters, variance, torch.zeros(*batch, n, dtype=torch.bool))


def loop(name, f, r, y, w, v, clusters):
    """Each criterion from its definition, by plain loops over lists of numbers."""
    n = len(f)
    t = [math.copysign(1, value) for value in y]
    margin = [a * b for a, b in zip(t, f, strict=True)]
    wrong = [((f[i] < 0) and t[i] > 0) or ((f[i] >= 0) and t[i] < 0) for i in range(n)]
    pairs = [(f[i], f[j]) for i in range(n) for j in range(n) if t[i] > 0 and t[j] < 0]
    if name == "press":
        return sum(w[i] * r[i] ** 2 for i in range(n))
    if name == "mse":
        return sum(w[i] * r[i] ** 2 for i in range(n)) / sum(w)
    if name == "error_rate":
        return sum(w[i] for i in range(n) if wrong[i]) / sum(w)
    if name == "balanced_error_rate":
        weights = [n / (2 * t.count(t[i])) for i in range(n)]
        return sum(weights[i] for i in range(n) if wrong[i]) / n
    if name == "smooth_error":
        return sum(w[i] / (1 + math.exp(10 * margin[i])) for i in range(n)) / sum(w)
    if name == "hinge":
        return sum(w[i] * max(0, 1 - margin[i]) for i in range(n))
    if name == "squared_hinge":
        return sum(w[i] * max(0, 1 - margin[i]) ** 2 for i in range(n))
    if name == "auc":
        return sum(1.0 if a > b else 0.5 if a == b else 0.0 for a, b in pairs) / len(pairs)
    if name == "wmw":
        return sum(1.0 if a < b else 0.5 if a == b else 0.0 for a, b in pairs) / len(pairs)
    if name == "smooth_wmw":
        return sum(1 / (1 + math.exp(10 * (a - b))) for a, b in pairs) / len(pairs)
    if name == "log_density":
        s2 = sum(w[i] * r[i] ** 2 / v[i] for i in range(n)) / sum(w)
        log = [-0.5 * math.log(2 * math.pi * s2 * v[i]) - r[i] ** 2 / (2 * s2 * v[i]) for i in range(n)]
        return sum(w[i] * log[i] for i in range(n)) / sum(w)
    taus = []
    for label in set(clusters):
        members = [i for i in range(n) if clusters[i] == label]
        signs = [
            ((y[i] > y[j]) - (y[i] < y[j]), (f[i] > f[j]) - (f[i] < f[j]))
            for i, j in itertools.combinations(members, 2)
        ]
        in_y = sum(a != 0 for a, _ in signs)
        in_f = sum(b != 0 for _, b in signs)
        if in_y:
            taus.append(sum(a * b for a, b in signs) / math.sqrt(in_y * in_f) if in_f else 0.0)
    return sum(taus) / len(taus)


def expected(name, h, weight="own"):
    """The loop over every entry of the batch and every output: batch + (c,), or the batch."""
    w = h.weight if weight == "own" else torch.ones_like(h.weight) if weight is None else weight
    w = w.expand(h.weight.shape)
    axis = h.outputs.ndim == h.weight.ndim + 1
    rows = [x.movedim(h.weight.ndim - 1, -1) for x in (h.outputs, h.residuals, h.targets, h.variance)]
    values = torch.zeros(rows[0].shape[:-1], dtype=h.outputs.dtype)
    labels = [0] * w.shape[-1] if h.clusters is None else h.clusters.tolist()
    for index in itertools.product(*map(range, values.shape)):
        f, r, y, v = (x[index].tolist() for x in rows)
        w_i = w[index[:-1] if axis else index].tolist()
        values[index] = loop(name, f, r, y, w_i, v, labels)
    return values


@pytest.mark.parametrize("name", WEIGHTED + UNWEIGHTED)
@pytest.mark.parametrize(("batch", "c"), SHAPES)
def test_equals_its_definition(name, batch, c):
    h, criterion = make(batch, c), getattr(criteria, name)
    whole = expected(name, h)
    assert_close(criterion(h, per_output=True), whole)
    assert_close(criterion(h), whole.mean(-1) if c else whole)


@pytest.mark.parametrize("name", WEIGHTED)
def test_weight_overrides_that_of_the_held_out(name):
    h = make((2, 3), 2)
    criterion = getattr(criteria, name)
    own = h.weight.flip(-1)
    row = h.weight[0, 0].clone()
    row[3] = 0  # a row that does not count
    for weight in (None, own, row, h.weight[0]):
        assert_close(criterion(h, weight=weight), expected(name, h, weight).mean(-1))


@pytest.mark.parametrize("name", UNWEIGHTED)
def test_unweighted_criterion_ignores_training_weights_and_refuses_others(name):
    h = make()
    criterion = getattr(criteria, name)
    assert_close(criterion(h), criterion(h, weight=None))
    received = criterion(h)
    expected = criterion(h._replace(weight=torch.ones_like(h.weight)))
    assert_close(received, expected)
    with pytest.raises(ValueError, match=f"{name}: weight must be omitted"):
        criterion(h, weight=h.weight)


def test_balanced_error_rate_is_the_error_rate_under_balanced_weights():
    h = make((2, 3), n=20)
    assert_close(
        criteria.balanced_error_rate(h), criteria.error_rate(h, weight=criteria.balanced_weight(h.targets))
    )


def test_balanced_weight_gives_each_class_half_of_n():
    y = make((2, 3)).targets
    w = criteria.balanced_weight(y)
    assert w.dtype == y.dtype
    assert w.shape == y.shape
    received = (w * (y > 0)).sum(-1)
    expected = torch.full((2, 3), 6.5, dtype=y.dtype)
    assert_close(received, expected)
    received = w.sum(-1)
    expected = torch.full((2, 3), 13.0, dtype=y.dtype)
    assert_close(received, expected)
    with pytest.raises(ValueError, match="balanced_weight: y must hold both classes"):
        criteria.balanced_weight(torch.ones_like(y))


def test_zero_predicts_the_positive_class():
    zero = torch.zeros(2)
    y = torch.tensor([1.0, -1.0])
    h = HeldOut(zero, y, y, torch.ones(2), None, torch.ones(2), zero > 0)
    assert_close(criteria.error_rate(h), torch.tensor(0.5))
    assert_close(criteria.error_rate(h._replace(outputs=-zero)), torch.tensor(0.5))


@pytest.mark.parametrize("name", SMOOTH)
@pytest.mark.parametrize("c", [0, 2])
def test_gradients_are_right_once_and_twice(name, c):
    h = make((2,), c, n=7, ties=False)
    criterion = getattr(criteria, name)

    def value(outputs, variance, weight):
        changed = h._replace(outputs=outputs, residuals=h.targets - outputs, variance=variance, weight=weight)
        return criterion(changed)

    inputs = [t.clone().requires_grad_() for t in (h.outputs, h.variance, h.weight)]
    assert torch.autograd.gradcheck(value, inputs)
    assert torch.autograd.gradgradcheck(value, inputs)


@pytest.mark.parametrize("name", SMOOTH)
def test_gradients_are_finite_on_ties_and_far_away(name):
    h = make((2,), 2)
    f = (h.outputs * 1e4).requires_grad_()
    getattr(criteria, name)(h._replace(outputs=f, residuals=h.targets - f)).sum().backward()
    assert f.grad.isfinite().all()


def test_attributes_say_direction_and_differentiability():
    for name in [*WEIGHTED, *UNWEIGHTED, "leave_pair_out_auc", "multiclass_error"]:
        criterion = getattr(criteria, name)
        assert criterion.lower_is_better == (name not in HIGHER)
        assert criterion.differentiable == (name in SMOOTH)
        assert criterion.takes_fit == (name == "leave_pair_out_auc")
        assert (criterion.targets == "signs") == (name in [*SIGNS, "leave_pair_out_auc"])
        assert pickle.loads(pickle.dumps(criterion)) is copy.deepcopy(criterion) is criterion
        assert criterion.__name__ == name
        direction = "Higher is better" if name in HIGHER else "Lower is better"
        assert direction in criterion.__doc__
        assert ("Not differentiable" in criterion.__doc__) == (name not in SMOOTH)


@pytest.mark.parametrize("name", [name for name in WEIGHTED + UNWEIGHTED if name not in SMOOTH])
def test_discontinuous_criteria_return_no_graph(name):
    h = make()
    f = h.outputs.requires_grad_()
    assert not getattr(criteria, name)(h._replace(residuals=h.targets - f)).requires_grad


def test_smooth_criteria_tend_to_their_steps():
    h = make((2, 3), 2, ties=False, n=30)
    sharp = functools.partial(criteria.smooth_wmw, gamma=1e6)
    assert_close(sharp(h), criteria.wmw(h), atol=1e-3, rtol=0)
    received = criteria.smooth_error(h, gamma=1e6)
    expected = criteria.error_rate(h)
    assert_close(received, expected, atol=1e-3, rtol=0)


def test_smooth_wmw_in_small_blocks_is_the_same(monkeypatch):
    h = make((2,), 3, n=40)
    f = h.outputs.requires_grad_()
    whole = criteria.smooth_wmw(h)
    (whole_grad,) = torch.autograd.grad(whole.sum(), f)
    monkeypatch.setattr(pairs, "PAIRS", 7)
    blocks = criteria.smooth_wmw(h)
    assert_close(blocks, whole)
    assert_close(torch.autograd.grad(blocks.sum(), f)[0], whole_grad)


def test_torch_func_goes_through_smooth_wmw():
    h = make((4,), ties=False)

    def value(f, y):
        return criteria.smooth_wmw(h._replace(outputs=f, targets=y, weight=torch.ones_like(f)))

    f = h.outputs.clone().requires_grad_()
    (plain,) = torch.autograd.grad(value(f, h.targets).sum(), f)
    received = torch.func.vmap(torch.func.grad(value))(h.outputs, h.targets)
    assert_close(received, plain)


def test_a_million_rows_are_ranked_by_sorting():
    h = make(n=10**6, ties=False)
    received = criteria.auc(h) + criteria.wmw(h)
    expected = torch.ones((), dtype=torch.float64)
    assert_close(received, expected)
    assert abs(criteria.auc(h).item() - 0.5) < 0.01
    assert abs(criteria.kendall_tau(h).item()) < 0.01


@pytest.mark.parametrize(("batch", "c"), SHAPES)
def test_kendall_tau_is_averaged_over_the_clusters_that_have_one(batch, c):
    labels = torch.tensor([7, -3, 7, 7, 100, -3, -3, 7, -3, 2, 2, 7, -3])  # 100 alone; not sorted
    h = make(batch, c, clusters=labels, classes=False)
    whole = expected("kendall_tau", h)
    assert_close(criteria.kendall_tau(h, per_output=True), whole)
    given = h._replace(clusters=None)
    assert_close(criteria.kendall_tau(given, clusters=labels.tolist(), per_output=True), whole)
    assert_close(criteria.kendall_tau(h, clusters=None), criteria.kendall_tau(given))


def test_kendall_tau_without_differing_targets_raises():
    h = make((2,), clusters=torch.arange(13))
    with pytest.raises(ValueError, match="kendall_tau: targets must differ within at least one cluster"):
        criteria.kendall_tau(h)


def test_kendall_tau_counts_tied_outputs_as_zero():
    h = make(clusters=torch.tensor([0] * 6 + [1] * 7), classes=False)
    f = h.targets.clone()
    f[:6] = 0
    assert_close(criteria.kendall_tau(h._replace(outputs=f)).item(), 0.5)


def test_log_density_of_its_own_noise_is_largest():
    h = make((2,), 3, classes=False)
    best = criteria.log_density(h, per_output=True)
    squares = h.weight[..., None] * h.residuals**2 / h.variance
    s2 = squares.sum(-2) / h.weight.sum(-1, keepdim=True)
    assert_close(criteria.log_density(h, noise=s2, per_output=True), best)
    for factor in (0.9, 1.1):
        assert (criteria.log_density(h, noise=factor * s2, per_output=True) < best).all()
    flat = make((2,))
    normal = torch.distributions.Normal(flat.outputs, (0.3 * flat.variance).sqrt())
    density = normal.log_prob(flat.targets).mean(-1)
    assert_close(criteria.log_density(flat, weight=None, noise=0.3), density)


class PairFit(NamedTuple):
    targets: Tensor
    dual: Tensor
    P: Tensor

    def annihilator(self):
        return self.P


def pair_problem(batch=(2,), n=9, c=2, bias=True, twins=False):
    g = torch.Generator().manual_seed(3)
    X = torch.randn(*batch, n, 2, generator=g, dtype=torch.float64)
    if twins:
        X[..., 1::2, :] = X[..., : n - 1 : 2, :]  # twin rows, mostly of both classes
    Y = torch.where(torch.randn(*batch, n, c, generator=g) > 0.4, 1.0, -1.0).double()
    Y[..., 0, :], Y[..., 1, :] = 1, -1
    M = torch.exp(-(torch.cdist(X, X) ** 2)) + 0.1 * torch.eye(n, dtype=torch.float64)
    P = torch.linalg.inv(M)
    if bias:
        eta = P.sum(-1, keepdim=True)
        P = P - eta @ eta.mT / eta.sum(-2, keepdim=True)
    return M, PairFit(Y, P @ Y, P)


def refit_without_pairs(M, Y, bias):
    """Delete both rows of each pair, solve what is left, and count."""
    n = len(Y)
    score = 0.0
    pairs = 0
    for i, j in itertools.product(range(n), range(n)):
        if Y[i] > 0 > Y[j]:
            rest = [k for k in range(n) if k not in (i, j)]
            A = torch.zeros(n - 1, n - 1, dtype=M.dtype)
            A[:-1, :-1] = M[rest][:, rest]
            A[:-1, -1] = A[-1, :-1] = float(bias)
            A[-1, -1] = 0.0 if bias else 1.0
            right = torch.cat([Y[rest], torch.zeros(1, dtype=M.dtype)])
            solution = torch.linalg.solve(A, right)
            gap = ((M[i, rest] - M[j, rest]) @ solution[:-1]).item()
            score = score + (0.5 if abs(gap) < 1e-10 else float(gap > 0))
            pairs = pairs + 1
    return score / pairs


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("twins", [True, False])
@pytest.mark.parametrize("block", [1 << 21, 1])
def test_leave_pair_out_auc_equals_deleting_two_and_refitting(bias, twins, block, monkeypatch):
    monkeypatch.setattr(pairs, "PAIRS", block)
    M, fit = pair_problem(bias=bias, twins=twins)
    received = criteria.leave_pair_out_auc(fit, per_output=True)
    wanted = [[refit_without_pairs(M[b], fit.targets[b, :, k], bias) for k in range(2)] for b in range(2)]
    assert_close(received, torch.tensor(wanted, dtype=torch.float64))
    assert_close(criteria.leave_pair_out_auc(fit), received.mean(-1))
    assert_close(criteria.leave_pair_out_auc(PairFit(*(t[0] for t in fit))), received[0].mean(-1))


def test_leave_pair_out_auc_refuses_one_class():
    _, fit = pair_problem()
    with pytest.raises(ValueError, match="leave_pair_out_auc: targets must hold both classes"):
        criteria.leave_pair_out_auc(fit._replace(targets=fit.targets.abs()))


@pytest.mark.parametrize("name", CLASSES)
def test_one_class_raises(name):
    h = make((2,))
    y = h.targets.clone()
    y[1] = 1.0  # one entry of the batch is enough
    with pytest.raises(ValueError, match=f"{name}: targets must hold both classes"):
        getattr(criteria, name)(h._replace(targets=y))


@pytest.mark.parametrize("name", ONE_CLASS_WILL_DO)
def test_rows_of_one_class_have_an_error(name):
    h = make((2,))
    h = h._replace(targets=torch.ones_like(h.targets))
    assert_close(getattr(criteria, name)(h), expected(name, h))


@pytest.mark.parametrize("name", SIGNS)
@pytest.mark.parametrize(
    ("labels", "got"),
    [
        ([1.0, 2.0, 3.0], "one positive and one negative value, got 1.0 and 3.0"),
        ([-2.0, 1.0, -1.0], "one positive and one negative value, got -1.0 and -2.0"),
        ([1.0, 1.0, 2.0], "one positive and one negative value, got 1.0 and 2.0"),
        ([0.0, 1.0, 1.0], "positive or negative labels, got 0"),
        ([math.nan, 1.0, -1.0], "finite, got NaN"),
    ],
)
def test_targets_that_are_no_two_classes_are_refused(name, labels, got):
    """In one column of one entry of a batch, too."""
    criterion = getattr(criteria, name)
    h = make((2,), 3)
    bad = torch.tensor(labels, dtype=torch.float64)[torch.arange(13) % 3]
    y = h.targets.clone()
    y[1, :, 2] = bad
    for targets, options in ((y, {}), (y, {"per_output": True}), (y, {"average": "outputs"})):
        with pytest.raises(ValueError, match=f"{name}: targets must .*{got}"):
            criterion(h._replace(targets=targets), **options)
    with pytest.raises(ValueError, match=f"{name}: targets must .*{got}"):
        criterion(make()._replace(targets=bad))
    with pytest.raises(ValueError, match=f"balanced_weight: y must .*{got}"):
        criteria.balanced_weight(bad)


def test_numbers_are_no_classes_for_leave_pair_out_auc():
    _, fit = pair_problem()
    with pytest.raises(
        ValueError, match="leave_pair_out_auc: targets must hold one positive and one negative"
    ):
        criteria.leave_pair_out_auc(fit._replace(targets=fit.targets.cumsum(-2) + 0.5))


def classes_of(h, label, positive=1.0, negative=-1.0):
    """The HeldOut with targets of one class against the rest, label (..., n)."""
    own = torch.nn.functional.one_hot(label, h.outputs.shape[-1]) > 0
    y = torch.where(own, *torch.tensor([positive, negative], dtype=h.outputs.dtype))
    return h._replace(targets=y, residuals=y - h.outputs)


def several_classes(batch=(), c=3, n=13, **options):
    h = make(batch, c, n, **options)
    label = torch.randint(c, (*batch, n), generator=torch.Generator().manual_seed(1))
    label[..., : 2 * c] = torch.arange(2 * c) % c
    return classes_of(h, label), label


@pytest.mark.parametrize("name", SIGNS)
@pytest.mark.parametrize("batch", [(), (2, 3)])
def test_the_mean_over_columns_of_classes_must_be_asked_for(name, batch):
    h, _ = several_classes(batch)
    criterion, whole = getattr(criteria, name), expected(name, h)
    with pytest.raises(
        ValueError, match=f"{name}: average must be 'outputs' .* 3 one-vs-rest columns, .*multiclass_error"
    ):
        criterion(h)
    assert_close(criterion(h, average="outputs"), whole.mean(-1))
    assert_close(criterion(h, per_output=True), whole)
    with pytest.raises(ValueError, match=f"{name}: average must be None or 'outputs', got 'classes'"):
        criterion(h, average="classes")
    y = h.targets.clone()
    y[..., 0, :] = 1.0  # a row of all three: no classes, but three problems
    several = h._replace(targets=y, residuals=y - h.outputs)
    assert_close(criterion(several), expected(name, several).mean(-1))
    if batch:
        y[1, 2] = h.targets[1, 2]  # one entry of the batch is enough
        with pytest.raises(ValueError, match=f"{name}: average must be 'outputs'"):
            criterion(h._replace(targets=y))


def test_leave_pair_out_auc_over_classes_must_be_asked_for():
    _, fit = pair_problem()
    y = fit.targets[..., :1]
    classes = fit._replace(targets=torch.cat([y, -y], -1))
    with pytest.raises(ValueError, match="leave_pair_out_auc: average must be 'outputs'"):
        criteria.leave_pair_out_auc(classes)
    each = criteria.leave_pair_out_auc(classes, per_output=True)
    assert_close(criteria.leave_pair_out_auc(classes, average="outputs"), each.mean(-1))


@pytest.mark.parametrize("batch", [(), (2, 3)])
@pytest.mark.parametrize("codes", [(1.0, -1.0), (1.0, 0.0), (1.5, -0.7)])
def test_multiclass_error_counts_rows_whose_largest_output_is_of_another_class(batch, codes):
    h, label = several_classes(batch)
    h = classes_of(h, label, *codes)
    weights = {"own": h.weight, None: torch.ones_like(h.weight), h.weight.flip(-1): h.weight.flip(-1)}
    for given, w in weights.items():
        received = criteria.multiclass_error(h, weight=given)
        assert received.shape == batch
        for index in itertools.product(*map(range, batch)):
            rows = zip(h.outputs[index].tolist(), label[index].tolist(), w[index].tolist(), strict=True)
            wrong = sum(weight for f, own, weight in rows if f.index(max(f)) != own)  # ties: the first
            assert received[index].item() == pytest.approx(wrong / w[index].sum().item())


def test_multiclass_error_is_not_the_mean_of_the_errors_of_the_columns():
    label = torch.arange(40) % 10
    f = torch.full((40, 10), -0.5, dtype=torch.float64)  # no column is ever said to be the class
    h = classes_of(make(c=10, n=40)._replace(outputs=f), label)
    assert criteria.error_rate(h, weight=None, average="outputs").item() == pytest.approx(0.1)
    assert criteria.multiclass_error(h, weight=None).item() == pytest.approx(0.9)


def test_multiclass_error_refuses_what_has_no_one_class_a_row():
    h, _ = several_classes((2,))
    with pytest.raises(ValueError, match="multiclass_error: per_output must be False"):
        criteria.multiclass_error(h, per_output=True)
    for flat in (make((2,)), make((2,), 1)):
        with pytest.raises(
            ValueError, match="multiclass_error: outputs must have a column for each of several"
        ):
            criteria.multiclass_error(flat)
    for value in (1.0, -1.0):  # all of the classes, or none
        y = h.targets.clone()
        y[1, 4] = value
        with pytest.raises(
            ValueError, match="multiclass_error: targets must have exactly one positive column of 3"
        ):
            criteria.multiclass_error(h._replace(targets=y))
    f = h.outputs.clone()
    f[0, 0, 0] = math.nan
    with pytest.raises(ValueError, match="multiclass_error: outputs must be finite"):
        criteria.multiclass_error(h._replace(outputs=f))


@pytest.mark.parametrize("name", [*SIGNS, "multiclass_error"])
def test_demands_on_targets_wait_for_the_device_once_and_not_where_values_are_unseen(name, monkeypatch):
    h, _ = several_classes((2,))
    criterion = getattr(criteria, name)
    asked = []
    check = Guard.check

    def counted(guard):
        asked.append(len(guard._demands))
        check(guard)

    monkeypatch.setattr(Guard, "check", counted)
    options = {} if name == "multiclass_error" else {"average": "outputs"}
    value = criterion(h, **options)
    assert len([flags for flags in asked if flags]) == 1
    del asked[:]
    meta = HeldOut(*(t.to("meta") if isinstance(t, Tensor) else t for t in h))
    assert criterion(meta).shape == (2,)
    assert not any(asked)
    if name != "smooth_wmw":  # whose blocks are of the sizes of the classes

        def one(f, r, y, w):
            return criterion(h._replace(outputs=f, residuals=r, targets=y, weight=w))

        received = torch.func.vmap(one)(h.outputs, h.residuals, h.targets, h.weight)
        assert_close(received, value)
        assert not any(asked)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"targets": torch.zeros(13).double()}, ValueError, "targets must be positive or negative labels"),
        ({"targets": torch.ones(12).double()}, ValueError, r"targets must have the outputs' shape \(13,\)"),
        ({"outputs": torch.full((13,), math.nan).double()}, ValueError, "outputs must be finite"),
        ({"outputs": torch.ones(13, 2, 2).double()}, ValueError, "outputs must be"),
        ({"outputs": torch.ones(0).double(), "weight": torch.ones(0).double()}, ValueError, ".* not empty"),
        ({"targets": torch.ones(13)}, TypeError, "targets must have the dtype of outputs"),
        ({"outputs": torch.ones(13, dtype=torch.int64)}, TypeError, "outputs must be float32 or float64"),
    ],
)
def test_a_bad_held_out_raises(change, error, match):
    with pytest.raises(error, match=f"error_rate: {match}"):
        criteria.error_rate(make()._replace(**change))


@pytest.mark.parametrize(
    ("weight", "error", "match"),
    [
        (torch.ones(12).double(), ValueError, r"weight must be \(13,\)"),
        (torch.ones(1).double(), ValueError, r"weight must be \(13,\)"),
        (torch.ones(13, 1).double(), ValueError, r"weight must be \(13,\)"),
        (-torch.ones(13).double(), ValueError, "not negative"),
        (torch.zeros(13).double(), ValueError, "positive in at least one row"),
        (torch.full((13,), math.nan).double(), ValueError, "finite"),
        (torch.ones(13), TypeError, "weight must have the dtype"),
        ([1.0] * 13, TypeError, "weight must be a torch tensor"),
        ("mine", ValueError, "'own', None or a tensor"),
    ],
)
def test_a_bad_weight_raises(weight, error, match):
    with pytest.raises(error, match=match):
        criteria.mse(make(), weight=weight)


def test_what_is_no_held_out_raises():
    with pytest.raises(TypeError, match="press: held_out must be a HeldOut, got Tensor"):
        criteria.press(torch.ones(3))
    for bad in (0.0, -1.0, math.inf):
        with pytest.raises(ValueError, match="gamma must be positive"):
            criteria.smooth_wmw(make(), gamma=bad)
        with pytest.raises(ValueError, match="noise must be positive"):
            criteria.log_density(make(), noise=bad)
    perfect = make()._replace(residuals=torch.zeros(13).double())
    with pytest.raises(ValueError, match="log_density: residuals must not all be zero"):
        criteria.log_density(perfect)


@pytest.mark.parametrize("name", WEIGHTED + UNWEIGHTED)
def test_criteria_run_on_the_meta_device_and_keep_float32(name):
    h = make((2,), 3, dtype=torch.float32)
    value = getattr(criteria, name)(h)
    meta = HeldOut(*(t.to("meta") if isinstance(t, Tensor) else t for t in h))
    f = meta.outputs.requires_grad_()
    received = getattr(criteria, name)(meta._replace(residuals=meta.targets - f))
    assert received.device.type == "meta"
    assert received.shape == value.shape == (2,)
    assert received.dtype == value.dtype == torch.float32
    if name in SMOOTH:
        assert torch.autograd.grad(received.sum(), f)[0].shape == f.shape
