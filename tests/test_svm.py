"""The SVM and its leave-one-out against plain refits."""

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from svm_problems import problems, rbf, toy
from torch import Tensor
from torch.testing import assert_close

import torchloo as tl
from torchloo.svm import SVC, svm, svm_lco, svm_loo
from torchloo.svm import result as code
from torchloo.svm.proof.certify import Held, gap_ball_sign, value_bound
from torchloo.svm.proof.checks import check_correct_unused, check_error, check_norm, sufficiency_checks
from torchloo.svm.records import SVMProblem
from torchloo.svm.solve import exact
from torchloo.svm.solve.exact import solve_exactly
from torchloo.svm.solve.interior import first_solutions
from torchloo.svm.solve.low_rank import in_double

sklearn_svm = pytest.importorskip("sklearn.svm")


def refit(K: Tensor, y: Tensor, C: float, rows: Tensor, weight: Tensor | None = None) -> Tensor:
    """Decision values at `rows` of scikit-learn's SVC that never saw them."""
    keep = torch.ones_like(y, dtype=torch.bool)
    keep[rows] = False
    if len(y[keep].unique()) == 1:
        return y[keep][:1].expand(len(rows))
    machine = sklearn_svm.SVC(C=C, kernel="precomputed", tol=1e-9)
    machine.fit(K[keep][:, keep].numpy(), y[keep].numpy(), None if weight is None else weight[keep].numpy())
    return torch.from_numpy(machine.decision_function(K[rows][:, keep].numpy()))


def refit_all(K: Tensor, y: Tensor, C: float, weight: Tensor | None = None) -> Tensor:
    return torch.cat([refit(K, y, C, torch.tensor([r]), weight) for r in range(len(y))])


def assert_optimal(K: Tensor, y: Tensor, C: float) -> None:
    """The full machine satisfies the conditions of the optimum."""
    fit = svm(K, y, C)
    alpha, margin = fit.coef * y, y * fit.outputs - 1
    scale = 1e-7 * max(1.0, C)
    assert bool((alpha >= -scale).all() & (alpha <= C + scale).all())
    assert abs(float(fit.coef.sum())) <= scale * len(y)
    inside = (alpha > 1e-6 * C) & (alpha < (1 - 1e-6) * C)
    assert_close(margin[inside], torch.zeros_like(margin[inside]), atol=1e-6, rtol=0)
    assert bool((margin[alpha <= 1e-6 * C] >= -1e-6).all() & (margin[alpha >= (1 - 1e-6) * C] <= 1e-6).all())


@settings(max_examples=60, deadline=None)
@given(problems())
def test_full_solution_satisfies_its_optimality_conditions(problem):
    assert_optimal(*problem)


@pytest.mark.parametrize("seed", [415, 859, 1062])
def test_boxes_far_larger_than_any_coefficient_hide_no_negative_one(seed):
    """A third free point of separable classes had a coefficient of -1e-3 of the largest, 1e-11 of the box."""
    X, y = toy(seed, n=25, d=3)
    X[:, 0] += 5 * y
    K, every = X @ X.T, torch.arange(25)
    alpha = svm(K, y, 1e6).coef * y
    assert float(alpha.min()) >= -1e-9 * float(alpha.max())
    held = svm_loo(K, y, 1e6)
    for r in range(25):
        keep = every != r
        expected = svm(K[keep][:, keep], y[keep], 1e6).from_kernel(K[r : r + 1, keep])[0]
        assert_close(held.outputs[r], expected, atol=1e-7, rtol=1e-7)


@settings(max_examples=60, deadline=None)
@given(problems())
def test_loo_equals_plain_refits(problem):
    K, y, C = problem
    held = svm_loo(K, y, C)
    for r in range(len(y)):
        keep = torch.arange(len(y)) != r
        rest = y[keep]
        if len(rest.unique()) == 1:
            expected = rest[0]
        else:
            expected = svm(K[keep][:, keep], rest, C).from_kernel(K[r : r + 1, keep])[0]
        # Coefficients of size C carry rounding of size 1e-16 C times the condition of the free set.
        assert_close(held.outputs[r], expected, atol=1e-6 * max(1.0, C / 1e3), rtol=1e-6)
    assert bool((held.certified ^ held.unstable).all())


@settings(max_examples=60, deadline=None)
@given(problems())
def test_no_check_contradicts_the_path(problem):
    K, y, C = problem
    held, labels = svm_loo(K, y, C), svm_loo(K, y, C, values=False)
    sure = held.certified & labels.certified
    assert bool((held.errors == labels.errors)[sure].all())
    fit = svm(K, y, C)
    box = torch.full_like(y, C)
    sure = held.certified & (held.outputs.abs() > 1e-6)
    doubt = value_bound(K.diagonal(), fit.coef * y, y * fit.outputs - 1, box, in_double(K).rounding)
    assert not bool((check_norm(K, y, fit.coef * y, fit.outputs, box, doubt) & held.errors & sure).any())
    by = sufficiency_checks(K, y, fit.coef * y, fit.outputs, box, doubt)
    assert not bool(((by > 1) & held.errors & sure).any())


@pytest.mark.parametrize("C", [0.01, 1.0, 100.0])
@pytest.mark.parametrize("kernel", ["rbf", "linear"])
def test_loo_equals_scikit_learn(kernel, C):
    X, y = toy(3, n=40)
    K = rbf(X) if kernel == "rbf" else X @ X.T
    # LIBSVM's own accuracy, not ours: its values wander by 1e-4 for the linear kernel at C = 100.
    assert_close(svm_loo(K, y, C).outputs, refit_all(K, y, C), atol=1e-3, rtol=1e-3)


def test_weights_scale_the_box_of_each_row():
    X, y = toy(4, n=40)
    weight = torch.where(y > 0, 3.0, 0.5).double()
    held = svm_loo(rbf(X), y, 2.0, weight)
    assert_close(held.outputs, refit_all(rbf(X), y, 2.0, weight), atol=1e-5, rtol=1e-5)


def test_splitting_a_row_of_weight_two_changes_nothing():
    X, y = toy(5)
    weight = torch.ones_like(y)
    weight[7] = 2
    whole = svm_lco(rbf(X), y, 1.5, range(30), weight)
    X2, y2 = torch.cat([X, X[7:8]]), torch.cat([y, y[7:8]])
    split = svm_lco(rbf(X2), y2, 1.5, [*range(30), 7])
    assert_close(split.outputs[:30], whole.outputs, atol=1e-8, rtol=1e-8)


@pytest.mark.parametrize("method", ["auto", "smo"])
def test_lco_equals_refits(method):
    X, y = toy(6, n=36)
    K, clusters = rbf(X), torch.arange(36) % 5 * 3
    held = svm_lco(K, y, 3.0, clusters, method=method, epsilon=1e-8)
    for label in clusters.unique():
        rows = (clusters == label).nonzero()[:, 0]
        assert_close(held.outputs[rows], refit(K, y, 3.0, rows), atol=1e-4, rtol=1e-4)  # LIBSVM's accuracy


def test_clusters_that_leave_one_class_each_say_its_label():
    X, y = toy(6, n=20)
    for method in ("auto", "smo"):
        held = svm_lco(rbf(X), y, 1.0, (y > 0).long(), method=method)
        assert_close(held.outputs, -y)
        assert bool(held.certified.all())


def test_smo_certifies_clusters_and_refuses_a_negative_epsilon():
    X, y = toy(6, n=36)
    held = svm_lco(rbf(X), y, 3.0, torch.arange(36) % 5, method="smo", epsilon=1e-6)
    exact = svm_lco(rbf(X), y, 3.0, torch.arange(36) % 5)
    assert bool(held.certified[exact.outputs.abs() > 0.05].all())
    assert not bool((held.certified & (held.errors != exact.errors)).any())
    with pytest.raises(ValueError, match="epsilon must be positive"):
        svm_lco(rbf(X), y, 3.0, torch.arange(36) % 5, epsilon=-1.0)


def test_smo_without_a_free_vector_equals_refits():
    """The bias has an interval, which rows at a bound, used or not, hold up."""
    for seed in range(30):
        X, y = toy(seed, n=6, d=1)
        K, C = X @ X.T, 10 ** (-3 + 3 * seed / 30)
        held = svm_loo(K, y, C, method="smo", epsilon=1e-8)
        assert_close(held.outputs, svm_loo(K, y, C).outputs, rtol=1e-6, atol=1e-6)


def test_lco_of_single_rows_is_loo():
    X, y = toy(7)
    assert_close(svm_lco(rbf(X), y, 2.0, range(30)).outputs, svm_loo(rbf(X), y, 2.0).outputs)


@pytest.mark.parametrize("values", [True, False])
def test_smo_agrees_with_the_path(values):
    X, y = toy(8, n=60)
    K = rbf(X)
    path, smo = svm_loo(K, y, 5.0), svm_loo(K, y, 5.0, method="smo", values=values, epsilon=1e-9)
    assert bool((path.errors == smo.errors).all())
    if values:
        assert_close(smo.outputs, path.outputs, atol=1e-6, rtol=1e-6)
    assert not bool((smo.certified & (smo.errors != path.errors)).any())


def test_gradients_equal_differences_of_refits():
    X, y = toy(9, d=3)
    X, y = torch.cat([X, X[:5]]), torch.cat([y, y[:5]])  # with copies
    direction = torch.randn(len(y), generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def value(lengthscale: Tensor, C: Tensor) -> Tensor:
        return svm_loo(rbf(X, lengthscale), y, C).outputs @ direction

    parameters = [torch.tensor(p, dtype=torch.float64, requires_grad=True) for p in (1.3, 2.0)]
    received = torch.autograd.grad(value(*parameters), parameters)
    h = 1e-5
    with torch.no_grad():
        a, b = parameters
        expected = (
            (value(a + h, b) - value(a - h, b)) / (2 * h),
            (value(a, b + h) - value(a, b - h)) / (2 * h),
        )
    assert_close(received, expected, atol=1e-6, rtol=1e-6)


def difference(value, x: Tensor, h: float = 1e-5) -> Tensor:
    """Central differences of a scalar function of one number."""
    with torch.no_grad():
        return (value(x + h) - value(x - h)) / (2 * h)


@pytest.mark.parametrize("C", [0.01, 2.0])
def test_gradients_of_clusters_equal_differences_of_refits(C):
    X, y = toy(9, d=3)
    X, y = torch.cat([X, X[:5]]), torch.cat([y, y[:5]])
    direction = torch.randn(len(y), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    clusters = torch.arange(len(y)) % 6

    def value(lengthscale: Tensor, C: Tensor) -> Tensor:
        return svm_lco(rbf(X, lengthscale), y, C, clusters).outputs @ direction

    a, b = (torch.tensor(p, dtype=torch.float64, requires_grad=True) for p in (1.3, C))
    received = torch.autograd.grad(value(a, b), [a, b])
    expected = difference(lambda x: value(x, b), a), difference(lambda x: value(a, x), b, 1e-5 * C)
    assert_close(received, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("C", [0.01, 2.0])
def test_gradients_are_the_same_for_machines_in_many_parts(C, monkeypatch):
    from torchloo.svm import gradient

    X, y = toy(9, d=3)
    X, y = torch.cat([X, X[:5]]), torch.cat([y, y[:5]])

    def gradients() -> list[Tensor]:
        K = rbf(X).requires_grad_()
        values = svm_loo(K, y, C), svm_lco(K, y, C, torch.arange(len(y)) % 6)
        return [torch.autograd.grad(held.outputs.square().sum(), K)[0] for held in values]

    together = gradients()
    monkeypatch.setattr(gradient, "_TOGETHER", 1)
    monkeypatch.setattr(gradient, "_ROWS", 100)
    assert_close(gradients(), together, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("C", [10.0, 1e6])
def test_gradients_in_a_box_far_larger_than_any_coefficient(C):
    X, y = toy(9, n=12)
    X[:, 0] += 3 * y
    direction = torch.randn(12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def value(scale: Tensor) -> Tensor:
        return svm_loo(X @ X.T * scale + 1e-3 * torch.eye(12), y, C).outputs @ direction

    a = torch.tensor(1.3, dtype=torch.float64, requires_grad=True)
    assert_close(torch.autograd.grad(value(a), a)[0], difference(value, a), atol=1e-6, rtol=1e-5)


def test_gradients_without_a_free_vector_follow_the_midpoint():
    """All coefficients at a small C: the bias lies between two points, and both move it."""
    X, y = toy(9, n=12)
    y = torch.tensor([1.0, -1.0] * 6, dtype=torch.float64)

    def value(lengthscale: Tensor) -> Tensor:
        return svm_loo(rbf(X, lengthscale), y, 1e-3).outputs.square().sum()

    a = torch.tensor(1.3, dtype=torch.float64, requires_grad=True)
    fit = svm(rbf(X, a.detach()), y, 1e-3)
    assert bool((fit.coef.abs() > 0.999e-3).all())
    assert_close(torch.autograd.grad(value(a), a)[0], difference(value, a), atol=1e-9, rtol=1e-6)


def test_the_label_of_one_class_has_no_gradient():
    X, y = toy(15, n=8)
    y = -torch.ones_like(y)
    y[4] = 1
    K = rbf(X).requires_grad_()
    assert not bool(torch.autograd.grad(svm_loo(K, y, 1.0).outputs[4], K)[0].any())
    clusters = [0, 0, 0, 0, 1, 1, 2, 2]
    assert not bool(torch.autograd.grad(svm_lco(K, y, 1.0, clusters).outputs[4], K)[0].any())


def test_adding_a_constant_to_the_kernel_changes_nothing():
    X, y = toy(10)
    assert_close(svm_loo(rbf(X) + 3.0, y, 2.0).outputs, svm_loo(rbf(X), y, 2.0).outputs, atol=1e-8, rtol=1e-8)


def test_permuting_rows_permutes_outputs():
    X, y = toy(11)
    order = torch.randperm(30, generator=torch.Generator().manual_seed(0))
    assert_close(svm_loo(rbf(X[order]), y[order], 2.0).outputs, svm_loo(rbf(X), y, 2.0).outputs[order])


def test_loo_ignores_own_label_of_a_lost_cause():
    X, y = toy(12)
    held = svm_loo(rbf(X), y, 2.0)
    r = int(held.outputs.abs().argmax())
    flipped = y.clone()
    flipped[r] = -y[r]
    assert_close(svm_loo(rbf(X), flipped, 2.0).outputs[r], held.outputs[r])


def test_a_batch_equals_its_loop():
    X, y = toy(13)
    K = torch.stack([rbf(X, s) for s in (0.5, 1.0, 2.0)])
    C = torch.tensor([1.0, 10.0, 100.0], dtype=torch.float64)
    batch = svm_loo(K, y, C)
    for t in range(3):
        assert_close(batch.outputs[t], svm_loo(K[t], y, C[t]).outputs)


def test_the_only_row_of_a_class_leaves_the_other_label():
    X, y = toy(15)
    y = -torch.ones_like(y)
    y[4] = 1
    held = svm_loo(rbf(X), y, 1.0)
    assert held.outputs[4] == -1
    assert bool(held.errors[4])


def test_dtype_survives_and_summary_counts_every_point():
    X, y = toy(16)
    held = svm_loo(rbf(X).float(), y.float(), 1.0)
    assert held.outputs.dtype == torch.float32
    assert str(held).startswith("SVM held out: 30 points")


def test_checks_of_table_one_are_as_printed():
    assert check_correct_unused(torch.tensor([0.0, 0.5])).tolist() == [True, False]
    doubt = torch.tensor([0.01, 0.01])
    assert check_error(torch.tensor([1.0, -1.0]), torch.tensor([-0.1, -0.1]), doubt).tolist() == [True, False]
    assert not bool(check_error(torch.tensor([1.0, -1.0]), torch.tensor([-0.1, -0.1]), 20 * doubt).any())


@pytest.mark.parametrize("kernel", [tl.kernels.Linear(), tl.kernels.RBF(1.5), tl.kernels.Precomputed()])
def test_module_equals_function_and_round_trips(kernel):
    X, y = toy(17)
    X = X @ X.T if isinstance(kernel, tl.kernels.Precomputed) else X
    K = kernel(X).detach()
    machine = SVC(kernel, C=2.0).fit(X, y)
    assert_close(machine(X), svm(K, y, 2.0).outputs, rtol=1e-9, atol=1e-9)
    assert_close(machine.loo(X, y).outputs, svm_loo(K, y, 2.0).outputs)
    assert_close(machine.lco(X, y, [0, 1, 2] * 10).outputs, svm_lco(K, y, 2.0, [0, 1, 2] * 10).outputs)
    other = SVC(copy.deepcopy(kernel), C=7.0)
    other.load_state_dict(machine.state_dict())
    assert_close(other(X), machine(X), rtol=0, atol=0)
    assert_close(pickle.loads(pickle.dumps(machine))(X), machine(X), rtol=0, atol=0)


def test_module_keeps_support_vectors_only():
    X, y = toy(19, noise=0.2)
    machine = SVC(tl.kernels.RBF(1.5), C=10.0).fit(X, y)
    assert len(machine.support) == (machine.solve(X, y).coef != 0).sum() < len(X)


def test_a_smooth_criterion_can_be_descended():
    X, y = toy(20)
    machine = SVC(tl.kernels.RBF(0.3), C=30.0)
    optimiser = torch.optim.Adam(machine.parameters(), lr=0.1)
    losses = []
    for _ in range(15):
        optimiser.zero_grad()
        loss = tl.criteria.smooth_error(machine.loo(X, y), gamma=3.0)
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.05


def test_criteria_of_values_refuse_labels():
    X, y = toy(21)
    held_out = SVC(tl.kernels.RBF(1.0)).loo(X, y, values=False)
    assert_close(tl.criteria.error_rate(held_out), held_out.errors.double().mean())
    with pytest.raises(ValueError, match="only their signs; use values=True"):
        tl.criteria.hinge(held_out)
    with pytest.raises(ValueError, match="variance must not be NaN"):
        tl.criteria.log_density(SVC(tl.kernels.RBF(1.0)).loo(X, y))


@pytest.mark.parametrize("values", [True, False])
def test_a_box_far_larger_than_any_coefficient(values):
    """Separable, C = 1e6: coefficients of 1e-2 are not nothing."""
    for seed in range(40):
        X, y = toy(seed, 5, 3)
        X[:, 0] += 5 * y
        K = X @ X.T
        held = svm_loo(K, y, 1e6, values=values)
        for r in range(5):
            kept = [i for i in range(5) if i != r]
            if len(y[kept].unique()) == 2:
                expected = svm(K[kept][:, kept], y[kept], 1e6).from_kernel(K[r : r + 1, kept])[0]
                received = held.outputs[r]
                assert_close(received, expected if values else expected.sign(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("seed", [7, 8, 14, 16, 47])
def test_boxes_far_smaller_than_one(seed):
    """Separable, C = 1e-4: nearly all coefficients at a bound, which they may meet where the path ends."""
    for d in (1, 3):
        X, y = toy(seed, 23, d)
        X[:, 0] += 5 * y
        K = rbf(X)
        held = svm_loo(K, y, 1e-4)
        for r in range(23):
            kept = torch.arange(23) != r
            fit = svm(K[kept][:, kept], y[kept], 1e-4)
            assert float(fit.gap) <= 1e-15
            assert_close(held.outputs[r], fit.from_kernel(K[r : r + 1, kept])[0], rtol=1e-8, atol=1e-8)


def test_a_large_problem_with_every_coefficient_at_a_bound():
    """All variables settle at once, and the interior point has no variable left to drop."""
    X, y = toy(27, n=400, noise=5.0)
    y[: len(y) // 2], y[len(y) // 2 :] = 1.0, -1.0
    fit = svm(X @ X.T, y, 1e-5)
    assert float(fit.gap) <= 1e-12
    assert bool((fit.coef.abs() >= 0.999e-5).all())


def test_a_kernel_of_zeros_has_only_a_bias():
    y = torch.tensor([1.0, -1.0, -1.0, -1.0], dtype=torch.float64)
    held = svm_loo(torch.zeros(4, 4, dtype=torch.float64), y, 0.1)
    assert held.outputs.tolist() == [-1.0] * 4


def test_tensors_without_values_are_refused():
    X, y = torch.empty(6, 2, device="meta"), torch.empty(6, device="meta")
    with pytest.raises(RuntimeError, match="needs to see the values"):
        SVC(tl.kernels.RBF(1.0)).to("meta").loo(X, y)


def test_float32_stays_float32():
    X, y = toy(25)
    machine = SVC(tl.kernels.RBF(1.0))
    single, double = machine.loo(X.float(), y.float()), machine.loo(X, y)
    assert single.outputs.dtype == torch.float32
    assert_close(single.outputs.double(), double.outputs, rtol=1e-3, atol=1e-3)
    assert machine.fit(X.float(), y.float())(X.float()).dtype == torch.float32


def test_batched_kernel_parameters_equal_their_loop():
    X, y = toy(26)
    lengthscales = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    together = SVC(tl.kernels.RBF(lengthscales[:, None]), C=2.0).loo(X, y).outputs
    for k, lengthscale in enumerate(lengthscales):
        one = SVC(tl.kernels.RBF(lengthscale), C=2.0).loo(X, y).outputs
        assert_close(together[k], one, rtol=1e-8, atol=1e-8)


def test_more_problems_than_are_followed_together(monkeypatch):
    """A smooth kernel and many support vectors: blocks are joined and packed while paths exchange."""
    monkeypatch.setattr("torchloo.svm.path.follow._BLOCK", 64)
    monkeypatch.setattr("torchloo.svm.path.follow._WORTH_PACKING", 1000)
    X, y = toy(23, n=180, noise=3.0)
    K, C = rbf(X, 3.0), torch.tensor([0.5, 5.0, 50.0], dtype=torch.float64)
    together = svm_loo(K, y, C)
    assert int((together.iterations > 0).sum()) > 256
    assert bool((together.certified | together.unstable).all())
    for k in range(3):
        assert_close(together.outputs[k], svm_loo(K, y, C[k]).outputs, rtol=1e-8, atol=1e-8)
        for r in range(0, 180, 15):
            kept = [i for i in range(180) if i != r]
            alone = svm(K[kept][:, kept], y[kept], C[k]).from_kernel(K[r : r + 1, kept])[0]
            assert_close(together.outputs[k, r], alone, rtol=1e-7, atol=1e-7)


def test_a_gap_that_is_not_a_number_proves_nothing():
    X, y = toy(24)
    K = rbf(X)
    alpha = torch.full((2, 30), 0.1, dtype=torch.float64)
    r = torch.tensor([4, 5])
    u = (alpha * y) @ K
    box = torch.ones(2, 30, dtype=torch.float64).scatter(1, r[:, None], 0.0)
    bias = torch.tensor([0.0, torch.nan], dtype=torch.float64)
    held = Held(alpha, u, y, box, r, in_double(K)[1], torch.zeros_like(r))
    sign, gap, _ = gap_ball_sign(K[None], held, bias)
    assert gap.isnan().tolist() == [False, True]
    assert sign[1] == 0


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"y": torch.zeros(4, dtype=torch.float64)}, "labels -1 and \\+1"),
        ({"y": torch.ones(4, dtype=torch.float64)}, "both classes"),
        ({"y": torch.ones(3, dtype=torch.float64)}, "4 entries"),
        ({"C": 0.0}, "C must be positive"),
        ({"K": torch.full((4, 4), torch.nan, dtype=torch.float64)}, "finite"),
        ({"K": torch.ones(4, 3, dtype=torch.float64)}, "square"),
        ({"K": -torch.eye(4, dtype=torch.float64)}, "positive semi-definite"),
        ({"method": "fast"}, "method"),
        ({"C": torch.ones(2), "K": torch.eye(4, dtype=torch.float64).expand(3, 4, 4)}, "must broadcast"),
        ({"K": torch.eye(4, dtype=torch.float64).expand(0, 4, 4)}, "empty batch"),
        ({"rows": torch.tensor([1, 2])}, "rows must be boolean"),
        ({"epsilon": -1.0}, "epsilon"),
    ],
)
def test_bad_input_raises(change, match):
    good = {"K": torch.eye(4, dtype=torch.float64), "y": torch.tensor([1.0, 1, -1, -1]).double(), "C": 1.0}
    with pytest.raises(ValueError, match=match):
        svm_loo(**(good | change))


def test_a_box_beyond_the_dtype_is_refused():
    K, y = torch.eye(4), torch.tensor([1.0, 1, -1, -1])
    for C in (1e39, 1e-50):
        with pytest.raises(ValueError, match="C must be positive"):
            svm_loo(K, y, C)


def test_an_indefinite_kernel_is_named_with_its_eigenvalue():
    X, y = toy(18)
    K = torch.tanh(2 * X @ X.T - 1)
    K = K - K.diagonal().min().clamp(max=0) * torch.eye(30)
    with pytest.raises(ValueError, match="smallest eigenvalue"):
        svm(K, y, 1000.0)


@pytest.mark.parametrize("values", [True, False])
def test_an_event_of_a_variable_without_a_column_is_noticed(values, monkeypatch):
    """With columns for two variables beside the free ones most paths miss an event and are repeated."""
    from torchloo.svm.path import unlearn

    X, y = toy(31, n=90, noise=1.0)
    K = rbf(X, 1.5)
    expected = svm_loo(K, y, 8.0, method="path", values=values)
    followed = []
    one_pass = unlearn._unlearn

    def counted(problem, full, targets, *others, whole):
        followed.append(len(targets.kept))
        return one_pass(problem, full, targets, *others, whole=whole)

    monkeypatch.setattr(unlearn, "_unlearn", counted)
    monkeypatch.setattr(unlearn, "_FEW", 10)
    monkeypatch.setattr(unlearn, "_NEAREST", 2)
    monkeypatch.setattr(unlearn, "_SHARE", 1000)
    received = svm_loo(K, y, 8.0, method="path", values=values)
    assert len(followed) == 2
    assert followed[1] > followed[0] // 3
    assert_close(received.outputs, expected.outputs, rtol=1e-8, atol=1e-8)
    assert bool(received.certified.all())
    assert int((received.resolved_by == expected.resolved_by).sum()) == 90


@pytest.mark.parametrize("kernel", ["linear", "smooth", "rough"])
def test_machines_that_share_a_kernel_matrix_are_solved_as_each_alone(kernel):
    X, y = toy(32, n=270, d=2)
    K = X @ X.T if kernel == "linear" else rbf(X, 8.0 if kernel == "smooth" else 0.2)
    C = torch.tensor([[0.01, 1.0], [30.0, 1000.0]], dtype=torch.float64)
    together = svm_loo(K, y, C)
    assert bool((together.certified | together.unstable).all())
    for i in range(2):
        for j in range(2):
            alone = svm_loo(K.clone(), y, C[i, j])
            assert_close(together.outputs[i, j], alone.outputs, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize(("rank", "found"), [(1, True), (40, True), (90, False), (300, False)])
def test_a_low_rank_is_found_and_proved(rank, found):
    from torchloo.svm.solve.low_rank import low_rank_factors

    generator = torch.Generator().manual_seed(rank)
    G = torch.randn(300, rank, generator=generator, dtype=torch.float64)
    K = G @ G.T
    (factor,) = low_rank_factors(K[None])
    assert (factor is not None) == found
    if factor is not None:
        assert factor.shape[1] <= 75
        assert_close(factor @ factor.T, K, rtol=0, atol=1e-9 * float(K.diagonal().mean()))


@pytest.mark.parametrize("seed", [0, 1, 3, 4])
def test_variables_that_settle_early_leave_a_problem_with_a_solution(seed):
    """The kernel is almost constant: variables at wrong bounds left a y^T alpha that no other could mend."""
    X, y = toy(seed, n=310, noise=1.0)
    for lengthscale in (16.0, 20.0, 25.0):
        for C in (0.1, 0.3, 0.5, 1.0):
            assert_optimal(rbf(X, lengthscale), y, C)


@pytest.mark.parametrize("C", [1.0, 1e4])
def test_a_linear_kernel_in_float32_is_given_its_rank_back(C):
    """Directions that rounding has added would take most paths to a refit, and values off by 0.1."""
    X, y = toy(400, n=300, d=12, noise=0.8)
    single, double = svm_loo((X @ X.T).float(), y.float(), C), svm_loo(X @ X.T, y, C)
    assert bool((single.certified | single.unstable).all())
    assert int(single.refitted.sum()) <= int(double.refitted.sum())
    assert_close(single.outputs.double(), double.outputs, rtol=1e-3, atol=1e-3)
    clusters = torch.arange(300) % 3
    both = [svm_lco(K, y.to(K), C, clusters).outputs.double() for K in (X @ X.T, (X @ X.T).float())]
    assert_close(*both, rtol=1e-3, atol=1e-3)


def test_a_kernel_is_replaced_within_its_rounding_only():
    X, _ = toy(41, n=120, d=3)
    linear, single = X @ X.T, (X @ X.T).float()
    assert in_double(linear)[0] is linear
    assert_close(in_double(rbf(X).float())[0], rbf(X).float().double(), rtol=0, atol=0)
    near, rounding, _ = in_double(single)
    assert int(torch.linalg.matrix_rank(near, hermitian=True)) == 3
    assert float((near - single).abs().max()) <= 1e-6 * float(single.diagonal().max())
    for matrix in (single, linear):  # what is told of the rounding covers both
        assert bool(((near - matrix).abs() <= torch.outer(rounding, rounding)).all())
    # A direction of its own, small but far above rounding, stays.
    more = linear + 1e-4 * torch.outer(X[:, 0] * X[:, 1], X[:, 0] * X[:, 1])
    assert int(torch.linalg.matrix_rank(in_double(more.float())[0], hermitian=True)) == 4


def test_a_machine_that_is_not_solved_is_no_candidate_of_a_search(monkeypatch):
    def only_small_boxes(problem):
        full = solve_exactly(problem)
        wrong = full._replace(slip=torch.ones_like(full.slip), margin=torch.full_like(full.margin, -1.0))
        return full.where(problem.box.amax(1) < 50, wrong)

    monkeypatch.setattr("torchloo.svm.fit.solve_exactly", only_small_boxes)
    X, y = toy(27)
    machine, grid = SVC(tl.kernels.RBF(1.0), C=100.0), {"C": [100.0, 2.0]}
    with pytest.raises(ValueError, match="no solution found, the relative duality gap is"):
        machine.loo(X, y)
    chosen = tl.select(machine, X, y, "error_rate", "grid", grid=grid, progress=False)
    assert chosen.machine.C.item() == pytest.approx(2.0)
    assert [entry.value < torch.inf for entry in chosen.history] == [False, True]


def _problem(K, y, box):
    """One problem as the solvers take it."""
    every, one = torch.arange(len(y)), torch.ones(1, dtype=torch.float64)
    return SVMProblem(K[None], y[None], box[None], box[None], every[None], one, torch.zeros_like(y)[None])


def test_a_free_set_at_the_edge_of_dependence_stays_as_it_is():
    """Cholesky as it comes may doubt what pivots in their best order do not."""
    K, y = torch.ones(3, 3, dtype=torch.float64), torch.tensor([1.0, -1.0, 1.0]).double()
    free, upper = torch.tensor([[True, True, False]]), torch.tensor([[False, False, True]])
    sets = exact.Sets(torch.full((1, 3), 0.5).double(), torch.zeros(1).double(), free, upper)
    received = exact._drop_dependent(_problem(K, y, torch.ones_like(y)), sets, free)
    assert all(torch.equal(*pair) for pair in zip(received, sets, strict=True))


@pytest.mark.parametrize(("C", "lengthscale"), [(4.46, 8.3), (1.0, 20.0)])
def test_a_class_that_is_never_predicted_has_answers_in_time(C, lengthscale):
    """All margins of the larger class are 0 to six digits: paths and homotopies would go on for ever."""
    X, _ = toy(34, n=60)
    y = torch.where((X[:, 0].abs() < 0.3) & (torch.arange(60) % 2 == 0), 1.0, -1.0).double()
    K = torch.exp(-torch.cdist(X, X).square() / (2 * lengthscale**2))
    held = svm_loo(K, y, C)
    assert bool((held.certified | held.unstable).all())
    for r in range(0, 60, 7):
        kept = torch.arange(60) != r
        expected = svm(K[kept][:, kept], y[kept], C).from_kernel(K[r : r + 1, kept])[0]
        assert_close(held.outputs[r], expected, rtol=1e-5, atol=1e-5)


def test_a_refit_starts_from_the_full_machine(monkeypatch):
    """One path misses an event among margins that hardly differ; its refit needs no interior point."""
    generator = torch.Generator().manual_seed(29)
    X = torch.randn(120, 2, dtype=torch.float64, generator=generator)
    noise = 0.3 * torch.randn(120, dtype=torch.float64, generator=generator)
    y = torch.where(X.norm(dim=1) + noise > 1.25, 1.0, -1.0).double()
    K = torch.exp(-1e-3 * torch.cdist(X, X).square())
    calls = []

    def counted(*problem):
        calls.append(problem)
        return first_solutions(*problem)

    monkeypatch.setattr(exact, "first_solutions", counted)
    held = svm_loo(K, y, 1.0)
    anew = (held.resolved_by == code.REFIT).nonzero()[:, 0].tolist()
    assert len(anew) == 1
    assert len(calls) == 1
    assert bool(held.certified.all())
    kept = torch.arange(120) != anew[0]
    expected = svm(K[kept][:, kept], y[kept], 1.0).from_kernel(K[anew, :][:, kept])[0]
    assert_close(held.outputs[anew[0]], expected, rtol=1e-7, atol=1e-7)


def test_outputs_without_a_gradient_can_enter_a_graph():
    X, y = toy(35)
    K = rbf(X)
    for held in (svm_loo(K, y, 2.0), svm_lco(K, y, 2.0, torch.arange(30) // 3), svm_loo(K, y, K.new_ones(2))):
        scale = torch.ones(30, dtype=torch.float64, requires_grad=True)
        (held.outputs * scale).square().sum().backward()
        assert_close(scale.grad, 2 * held.outputs.square().reshape(-1, 30).sum(0))


@pytest.mark.parametrize("seed", [3, 25, 53])
def test_one_positive_row_and_weights_of_six_orders_of_magnitude(seed):
    """Homotopies fail and so does the solution for the sets, but the interior point was good."""
    X, y = toy(seed, n=57)
    y[:], y[seed] = -1, 1
    weight = 10 ** (6 * torch.rand(57, generator=torch.Generator().manual_seed(seed)).double() - 3)
    fit = svm(rbf(X, 20.0), y, 1.0, weight)
    assert float(fit.gap) <= 1e-6 * float(fit.coef.abs().sum())
    alpha = fit.coef * y
    assert bool((alpha >= 0).all() & (alpha <= (1 + 1e-9) * weight).all())


def test_a_nearly_singular_free_set_has_margin_zero_and_balance():
    X, _ = toy(3, n=25, d=3)
    y = torch.where(torch.arange(25) % 3 == 0, 1.0, -1.0).double()
    y[10:] = 1
    free = torch.arange(25) < 6
    box = torch.full_like(y, 3e4)
    sets = exact.Sets(box[None], torch.zeros(1).double(), free[None], ~free[None])
    problem = _problem(rbf(X, 30.0), y, box)
    equations = exact._equations(problem, sets.free)
    solution = exact._active_set_solution(problem, sets, equations, tight=False)
    assert float(solution.margin[0, free].abs().max()) <= 1e-8
    assert abs(float(solution.alpha[0] @ y)) <= 1e-6


def test_labels_too_near_zero_to_be_proved_are_followed_to_the_end():
    """C = 1e7: a path that stops just past zero proves nothing, and a refit would take its time."""
    X, y = toy(2, n=90, d=85, noise=3.0)
    labels, held = svm_loo(X @ X.T, y, 1e7, values=False), svm_loo(X @ X.T, y, 1e7)
    assert bool(labels.certified.all())
    assert not bool(labels.refitted.any())
    assert_close(labels.errors, held.errors)


@pytest.mark.filterwarnings("ignore:svm_loo. rounding has made K indefinite")
@pytest.mark.parametrize("seed", [1, 5, 9, 11])
def test_a_smooth_kernel_that_float32_has_made_indefinite_is_solved(seed):
    X, y = toy(seed, n=44, d=1, noise=5.0)
    K = rbf(X, 20.0)
    assert float(torch.linalg.eigvalsh(K.float().double())[0]) < -1e-8
    single = svm_loo(K.float(), y.float(), 1.0)
    assert_close(single.outputs.double(), svm_loo(K, y, 1.0).outputs, rtol=1e-4, atol=1e-4)
    assert bool(single.certified.all())


def test_what_is_added_to_an_indefinite_kernel_is_told(monkeypatch):
    from torchloo.svm import fit

    solve, tries = fit.solve_exactly, []

    def fails_once(problem):
        tries.append(problem.K[0].diagonal().mean().item())
        if len(tries) == 1:
            raise torch.linalg.LinAlgError("not positive definite")
        return solve(problem)

    X, y = toy(36)
    K = rbf(X)
    K -= (torch.linalg.eigvalsh(K)[0] + 1e-12) * torch.eye(30)
    monkeypatch.setattr(fit, "solve_exactly", fails_once)
    with pytest.warns(
        RuntimeWarning, match="rounding has made K indefinite; .*e-12 was added to its diagonal"
    ):
        svm(K, y, 1.0)
    assert tries[1] > tries[0]
