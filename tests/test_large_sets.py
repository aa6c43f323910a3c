"""Sets of more rows than features, of many sizes: exact, with all gradients, and in one pass."""

from dataclasses import replace

import mpmath
import pytest
import reference
import torch
from cases import relative
from counting import Counting
from torch.func import grad, vmap
from torch.testing import assert_close

import torchloo as tl
from torchloo import clusters as partitions
from torchloo.guards import Guard
from torchloo.primal.front import solve_by_passes

F = tl.functional

SIZES = [1, 2, 2, 3, 4, 4, 4, 5, 7, 7, 9, 12]  # with 3 features, from 4 on they are large
ROWS = sum(SIZES)
CLUSTERS = torch.repeat_interleave(torch.arange(len(SIZES)), torch.tensor(SIZES))
CLUSTERS = CLUSTERS[torch.randperm(ROWS, generator=torch.Generator().manual_seed(0))]


@pytest.fixture(autouse=True, params=[0, partitions._WASTED], ids=["every size", "padded"])
def padding(request, monkeypatch):
    """All tests with one group for each size, and with sets of like size in one group."""
    monkeypatch.setattr(partitions, "_WASTED", request.param)
    return request.param


def randn(*shape, seed=1):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def rand(*shape, seed=2):
    return torch.rand(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) + 0.5


def problem(*batch, p=3):
    """Features, targets of two outputs, a penalty that is not diagonal, and weights."""
    A = randn(p, p, seed=3)
    R = A @ A.T + 0.1 * torch.eye(p, dtype=torch.float64)
    return randn(*batch, ROWS, p), randn(*batch, ROWS, 2, seed=4), R, rand(ROWS)


def test_sets_of_many_sizes_equal_delete_and_refit():
    Z, Y, R, weight = problem(2)
    result = F.ridge(Z, Y, R, weight).held_out(CLUSTERS)
    assert not result.refitted.any()
    for k in range(2):
        expected = reference.ridge(Z[k], Y[k], R, weight, CLUSTERS)
        assert relative(result.outputs[k], expected) <= 1e-10


def test_variance_of_large_sets_is_that_of_the_dual_form():
    X, Y, _, weight = problem()
    primal_form = tl.LSSVM(tl.kernels.Linear(), 0.3).lco(X, Y, CLUSTERS, weight)
    dual_form = F.lssvm(X @ X.T, Y, 0.3, weight).held_out(CLUSTERS)
    assert_close(primal_form.outputs, dual_form.outputs, rtol=1e-9, atol=1e-10)
    assert_close(primal_form.variance, dual_form.variance, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("outer", [[], [0, 1, 2, 3]], ids=["every row in a large set", "rows in small sets"])
def test_gradients_of_large_sets_are_exact_to_second_order(outer):
    clusters = torch.tensor([0] * 4 + [1] * 3 + [2] * 3 + [3 + k for k in outer])
    n = len(clusters)
    A = randn(2, 2, seed=3)
    inputs = [t.requires_grad_() for t in (randn(n, 2), randn(n, 2, seed=4), A @ A.T, rand(n))]

    def outcome(Z, Y, R, weight):
        result = F.ridge(Z, Y, (R + R.T) / 2, weight).held_out(clusters)
        return result.residuals, result.variance

    assert torch.autograd.gradcheck(outcome, inputs)
    assert torch.autograd.gradgradcheck(outcome, inputs)


def test_a_path_leaves_out_large_sets_by_its_diagonal_factors():
    X, Y, _, weight = problem()
    regs = torch.logspace(-3, 1, 5, dtype=torch.float64)
    path = tl.LSSVM(tl.kernels.Linear()).path(X, Y, regs, CLUSTERS, weight)
    for r, reg in enumerate(regs):
        one = tl.LSSVM(tl.kernels.Linear(), reg).lco(X, Y, CLUSTERS, weight)
        assert_close(path.outputs[r], one.outputs, rtol=1e-9, atol=1e-10)
        assert_close(path.variance[r], one.variance, rtol=1e-9, atol=1e-10)


def fifty_digits(Z, y, R, clusters):
    """Held-out outputs by delete and refit of the normal equations in 50 digits."""
    outputs = torch.empty(len(y), dtype=torch.float64)
    with mpmath.workdps(50):
        for label in clusters.unique():
            kept = clusters != label
            left = (clusters == label).nonzero()[:, 0].tolist()
            A = mpmath.matrix(Z[kept].tolist())
            b = mpmath.matrix(y[kept].tolist())
            coef = mpmath.lu_solve(A.T * A + mpmath.matrix(R.tolist()), A.T * b)
            for i in left:
                pairs = zip(Z[i].tolist(), coef, strict=True)
                outputs[i] = float(sum(mpmath.mpf(z) * c for z, c in pairs))
    return outputs


@pytest.mark.parametrize(("condition", "limit"), [(1e3, 1e-11), (1e6, 1e-8)])
def test_large_sets_keep_their_digits_with_ill_conditioned_features(condition, limit):
    U, _ = torch.linalg.qr(randn(ROWS, 3))
    V, _ = torch.linalg.qr(randn(3, 3, seed=5))
    Z = U * torch.tensor([1.0, condition**-0.5, 1 / condition], dtype=torch.float64) @ V
    y = randn(ROWS, 1, seed=4)
    R = 1e-2 / condition**2 * torch.eye(3, dtype=torch.float64)
    expected = fifty_digits(Z, y[:, 0], R, CLUSTERS)
    received = F.ridge(Z, y, R).held_out(CLUSTERS)
    large = torch.tensor([SIZES[label] > 3 for label in CLUSTERS])
    assert not received.refitted[large].any()
    assert relative(received.outputs[large, 0], expected[large]) <= limit


def lone_feature(label):
    """A problem in which only the rows of one cluster carry a feature that is hardly penalised."""
    Z, Y, _, weight = problem()
    Z[CLUSTERS.ne(label), 2] = 0
    return Z, Y, torch.diag(torch.tensor([1.0, 1.0, 1e-12], dtype=torch.float64)), weight


@pytest.mark.parametrize("label", [2, 8, 11], ids=["small", "large", "largest"])
def test_sets_whose_leverage_is_one_are_refitted_and_marked(label, monkeypatch):
    Z, Y, R, weight = lone_feature(label)
    expected = reference.ridge(Z, Y, R, weight, CLUSTERS)
    for chunk in (1 << 23, 1):
        monkeypatch.setattr("torchloo.primal.refit._CHUNK", chunk)
        result = F.ridge(Z, Y, R, weight).held_out(CLUSTERS)
        assert result.refitted.nonzero()[:, 0].tolist() == CLUSTERS.eq(label).nonzero()[:, 0].tolist()
        assert relative(result.outputs, expected) <= 1e-8


def test_refits_by_passes_know_a_penalty_that_is_not_the_identity():
    Z, Y, R, weight = lone_feature(8)
    one = torch.ones((), dtype=torch.float64)
    solved = solve_by_passes(Guard("ridge"), Z, weight, Y, one, bias=False, penalty=R)
    received, expected = solved.leave_out(CLUSTERS), F.ridge(Z, Y, R, weight).held_out(CLUSTERS)
    assert received.refitted.equal(CLUSTERS.eq(8))
    assert_close(received.outputs, expected.outputs, rtol=1e-9, atol=1e-10)
    assert_close(received.variance, expected.variance, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("chunk", [1 << 23, 2 * (9 + 2 * ROWS), 1])
def test_lost_sets_of_several_sizes_are_refitted_in_chunks(chunk, monkeypatch):
    """Without the bound on 1 - h nothing would be lost; with a bound of 1 everything is."""
    monkeypatch.setattr("torchloo.primal.refit._CHUNK", chunk)
    Z, Y, R, weight = problem(2)
    plain = F.ridge(Z, Y, R, weight).held_out(CLUSTERS)
    monkeypatch.setattr("torchloo.factors._REFIT_BELOW", 1.0)
    refitted = F.ridge(Z, Y, R, weight).held_out(CLUSTERS)
    assert refitted.refitted.all()
    assert_close(refitted.residuals, plain.residuals, rtol=1e-9, atol=1e-10)
    assert_close(refitted.variance, plain.variance, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("bias", [False, True])
def test_refits_have_the_derivatives_of_the_closed_form(bias, monkeypatch):
    """Of sets of all sizes, to second order; with a bound of 1 on 1 - h everything is refitted."""
    Z, Y, _, weight = problem()
    machine = (tl.LSSVM if bias else tl.RLS)(tl.kernels.Linear(), 0.3)
    inputs = [t.requires_grad_() for t in (Z, Y, weight, machine.log_reg)]
    along = [(7 * t.detach()).cos() for t in inputs]

    def derivatives():
        found = replace(machine.solve(Z, Y, weight), rows=None).held_out(CLUSTERS)
        loss = found.residuals.square().sum() + found.variance.log().sum()
        first = torch.autograd.grad(loss, inputs, create_graph=True)
        second = torch.autograd.grad(first, inputs, along)
        return found.refitted, [*first, *second]

    _, expected = derivatives()
    monkeypatch.setattr("torchloo.factors._REFIT_BELOW", 1.0)
    refitted, received = derivatives()
    assert refitted.all()
    for a, b in zip(received, expected, strict=True):
        assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_lost_large_sets_have_finite_exact_gradients():
    Z, Y, R, weight = lone_feature(8)
    base = Z.clone()
    mask = torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64)
    inputs = [t.requires_grad_() for t in (Z, Y, weight)]

    def along(Z, Y, weight):  # only the first two features: the third one turns the fit around
        return F.ridge(base + (Z - base) * mask, Y, R, weight).held_out(CLUSTERS).outputs

    assert torch.autograd.gradcheck(along, inputs, atol=1e-5, fast_mode=True)


def test_a_float32_penalty_may_be_indefinite_by_the_rounding_of_float32():
    Z, Y, _, weight = lone_feature(8)
    Q = torch.linalg.qr(randn(3, 3, seed=9)).Q
    R = (Q.T @ torch.diag(torch.tensor([1.0, 0.0, 1e-5], dtype=torch.float64)) @ Q).float()
    R = (R + R.T) / 2
    w, V = torch.linalg.eigh(R.double())
    assert w[0] < -1e-9
    given = [t.float() for t in (Z @ Q, Y, R, weight)]
    single = F.ridge(*given).held_out(CLUSTERS)
    assert single.refitted.equal(CLUSTERS.eq(8))
    Z, Y, _, weight = (t.double() for t in given)
    expected = F.ridge(Z, Y, V * w.clamp(min=0) @ V.T, weight).held_out(CLUSTERS)
    assert relative(single.outputs.double(), expected.outputs) <= 1e-5
    with pytest.raises(ValueError, match="ridge: R must be positive semi-definite"):
        F.ridge(Z, Y, R.double(), weight).held_out(CLUSTERS)


def test_variances_of_refitted_sets_have_exact_gradients_in_the_weights_of_other_rows():
    """They are large by a direction of features of which the other rows know nothing."""
    Z, Y, R, weight = lone_feature(8)
    R[2, 2] = 1e-9
    Q = torch.linalg.qr(randn(3, 3, seed=6)).Q
    weight.requires_grad_()
    result = F.ridge(Z @ Q, Y, Q.T @ R @ Q, weight).held_out(CLUSTERS)
    inside = CLUSTERS.eq(8)
    assert result.refitted.equal(inside)
    received = torch.autograd.grad(result.variance[inside, 0].sum(), weight)[0][~inside]
    known = Z[:, :2]
    C = torch.eye(2, dtype=torch.float64) + known[~inside].T @ (
        weight[~inside].unsqueeze(-1) * known[~inside]
    )
    variance = (known[inside] @ torch.linalg.inv(C) * known[inside]).sum()
    expected = torch.autograd.grad(variance, weight)[0][~inside]
    assert relative(received, expected) <= 1e-5


def test_without_a_penalty_a_feature_of_one_large_set_only_is_refused():
    Z, Y, _, weight = lone_feature(8)
    with pytest.raises(ValueError, match="ridge: the regularised matrix is not positive definite"):
        F.ridge(Z, Y, torch.zeros(3, 3, dtype=torch.float64), weight).held_out(CLUSTERS)


def test_transforms_run_through_large_sets():
    Z, Y, R, weight = problem(3)
    labels = CLUSTERS.tolist()  # torch.func has no values of tensors

    def loss(Z, Y):
        return F.ridge(Z, Y, R, weight).held_out(labels).residuals.square().sum()

    received = vmap(grad(loss))(Z, Y)
    for k in range(3):
        expected = grad(loss)(Z[k], Y[k])
        assert_close(received[k], expected, rtol=1e-9, atol=1e-10)
        leaf = Z[k].clone().requires_grad_()
        expected = torch.autograd.grad(loss(leaf, Y[k]), leaf)[0]
        assert_close(received[k], expected, rtol=1e-9, atol=1e-10)


def test_many_large_sets_take_neither_rows_times_sets_nor_a_pass_for_each_size():
    # 60 000 rows: a number for each row and set would take 2 GB, and a graph several of them.
    clusters = torch.repeat_interleave(torch.arange(4000), torch.arange(4000) % 21 + 5)
    X = randn(len(clusters), 3).requires_grad_()
    y = X.detach()[:, 0].sin()
    machine = tl.LSSVM(tl.kernels.Linear(), 1.0)
    held_out = machine.lco(X, y, clusters)
    held_out.residuals.square().sum().backward()
    assert X.grad.isfinite().all()
    for label in (0, 1999, 3999):
        left = clusters == label
        alone = tl.LSSVM(tl.kernels.Linear(), 1.0).fit(X.detach()[~left], y[~left])
        received = held_out.outputs[left].detach()
        expected = alone(X.detach()[left])
        assert_close(received, expected, rtol=1e-9, atol=1e-10)


def test_sets_of_many_sizes_take_few_operations(padding):
    """40 sizes of one set each take a few times what sets of one size take, not 40 times."""
    if not padding:
        pytest.skip("without padding every size has operations of its own")
    sizes = torch.arange(10, 50)
    ragged = torch.repeat_interleave(torch.arange(40), sizes)
    equal = torch.arange(len(ragged)) % 40
    X = randn(len(ragged), 6)
    y = randn(len(ragged), seed=4)

    def operations(clusters):
        machine = tl.SparseLSSVM(tl.kernels.RBF(2.0), basis=X[:20])
        with Counting() as count:
            tl.criteria.press(machine.lco(X, y, clusters)).backward()
        return count.operations

    assert operations(ragged) <= 2 * operations(equal)
