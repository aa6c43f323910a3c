"""What is peculiar to the closed forms and to single machines."""

import mpmath
import pytest
import reference
import torch
from cases import relative
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import grad, jacrev, vmap
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import torchloo as tl
from torchloo import dual, primal
from torchloo.clusters import Partition
from torchloo.guards import broadcast_shapes
from torchloo.panels import triangular_inverse
from torchloo.spectral import path as spectral_path

F = tl.functional


def spd(n, condition, seed=0):
    """A symmetric positive definite matrix with eigenvalues from 1/condition to 1."""
    generator = torch.Generator().manual_seed(seed)
    V, _ = torch.linalg.qr(torch.randn(n, n, dtype=torch.float64, generator=generator))
    w = torch.logspace(0, -torch.tensor(condition).log10().item(), n, dtype=torch.float64)
    K = (V * w) @ V.T
    return (K + K.T) / 2


def randn(*shape, seed=1):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def rand(*shape, seed=2):
    return torch.rand(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) + 0.5


def fifty_digits(K, y, reg, clusters, bias):
    """Held-out outputs of the dual machines by delete and refit in 50 digits; K of mpf, y of floats."""
    n = len(y)
    labels = range(n) if clusters is None else clusters
    outputs = [None] * n
    for label in set(labels):
        left = [i for i in range(n) if labels[i] == label]
        kept = [i for i in range(n) if labels[i] != label]
        size = len(kept) + bias
        system = mpmath.matrix(size, size)
        right = mpmath.matrix(size, 1)
        for row, i in enumerate(kept):
            for column, j in enumerate(kept):
                system[row, column] = K[i, j]
            system[row, row] += mpmath.mpf(reg)
            right[row] = mpmath.mpf(y[i])
            if bias:
                system[row, size - 1] = system[size - 1, row] = 1
        solution = mpmath.lu_solve(system, right)
        for i in left:
            f = solution[size - 1] if bias else mpmath.mpf(0)
            outputs[i] = float(f + sum(K[i, j] * solution[row] for row, j in enumerate(kept)))
    return torch.tensor(outputs, dtype=torch.float64)


@pytest.mark.parametrize("machine", ["rls", "lssvm", "kfd"])
@pytest.mark.parametrize("clusters", [None, [0, 0, 1, 2, 2, 2, 2, 3, 4, 4]], ids=["rows", "ragged"])
@pytest.mark.parametrize(("condition", "limit"), [(1e6, 1e-8), (1e12, 1e-3)])
def test_dual_form_against_fifty_digits(machine, clusters, condition, limit):
    K = spd(10, 1e8 if machine == "kfd" else 1e16)  # KFD squares it
    fit = getattr(F, machine)(K, randn(10, 1).sign() if machine == "kfd" else randn(10, 1), 1 / condition)
    with mpmath.workdps(50):
        exact = mpmath.matrix(K.tolist())
        exact = exact * exact.T if machine == "kfd" else exact
        targets = fit.targets[:, 0].tolist()
        expected = fifty_digits(exact, targets, 1 / condition, clusters, machine != "rls")
    assert relative(fit.held_out(clusters).outputs[:, 0], expected) <= limit


@pytest.mark.parametrize("condition", [1e2, 1e6])
@pytest.mark.parametrize("clusters", [None, [0, 0, 1, 2, 2, 2, 2, 3, 4, 4]], ids=["rows", "ragged"])
def test_a_chosen_condition_number(condition, clusters):
    K = spd(10, condition)
    Y = randn(10, 2)
    weight = rand(10)
    for function, refit in ((F.rls, reference.rls), (F.lssvm, reference.lssvm)):
        expected = refit(K, Y, 1 / condition, weight, clusters)
        received = function(K, Y, 1 / condition, weight).held_out(clusters).outputs
        assert relative(received, expected) <= 1e-8


def test_float32_at_condition_one_thousand():
    K, Y = spd(10, 1e3), randn(10, 1)
    expected = reference.lssvm(K, Y, 1e-3, torch.ones(10, dtype=torch.float64))
    received = F.lssvm(K.float(), Y.float(), 1e-3).held_out().outputs
    assert relative(received.double(), expected) <= 1e-3


@pytest.mark.parametrize("n", [5, 300])
def test_panels_equal_whole_products(n):
    """More rows than a panel, so that every branch of the triangular products runs."""
    K, Y = spd(n, 1e3), randn(n, 2)
    fit = F.lssvm(K, Y, 0.1)
    ones = torch.ones(n, 1, dtype=torch.float64)
    bordered = torch.cat(
        [
            torch.cat([K + 0.1 * torch.eye(n, dtype=K.dtype), ones], 1),
            torch.cat([ones.T, torch.zeros(1, 1, dtype=K.dtype)], 1),
        ]
    )
    P = torch.linalg.inv(bordered)[:n, :n]
    assert_close(fit.annihilator(), P, rtol=1e-9, atol=1e-10)
    leaf = K.clone().requires_grad_()
    held_out = F.lssvm((leaf + leaf.T) / 2, Y, 0.1).held_out()
    held_out.residuals.square().sum().backward()
    a = P @ Y
    d = P.diagonal().unsqueeze(-1)
    r = a / d
    abar = 2 * r / d
    dbar = (-2 * r * r / d).sum(-1)
    U = P @ abar
    expected = -(P * dbar) @ P - (U @ a.T + a @ U.T) / 2
    assert_close(leaf.grad, expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("n", [90, 200, 400, 600])
@pytest.mark.parametrize("condition", [10.0, 1e6])
def test_triangular_inverse_of_a_batch(n, condition):
    """By forward substitution, by narrow panels and by wide ones."""
    L = torch.linalg.cholesky(torch.stack([spd(n, condition, seed) for seed in range(2)]))
    unit = torch.eye(n, dtype=torch.float64).expand(2, n, n)
    limit = 1e-14 * n * condition**0.5
    assert_close(triangular_inverse(L) @ L, unit, rtol=0, atol=limit)
    assert_close(L @ triangular_inverse(L), unit, rtol=0, atol=limit)
    leaf = L.clone().requires_grad_()
    assert_close(triangular_inverse(leaf).detach(), triangular_inverse(L), rtol=0, atol=limit)


def nearly_interpolated():
    """Row 0 alone carries a feature that is hardly penalised: its leverage is 1 to working precision."""
    Z = randn(9, 3)
    Z[:, 2] = 0
    Z[0, 2] = 1
    return Z, randn(9, 2), torch.diag(torch.tensor([1.0, 1.0, 1e-12], dtype=torch.float64))


@pytest.mark.parametrize("clusters", [None, [0, 0, 1, 1, 2, 2, 3, 3, 3]], ids=["rows", "pairs"])
def test_rows_whose_leverage_is_one_are_refitted_and_marked(clusters):
    Z, Y, R = nearly_interpolated()
    weight = rand(9)
    result = F.ridge(Z, Y, R, weight).held_out(clusters)
    marked = [i for i in range(9) if clusters is not None and clusters[i] == clusters[0]] or [0]
    assert result.refitted.nonzero()[:, 0].tolist() == marked
    assert relative(result.outputs, reference.ridge(Z, Y, R, weight, clusters)) <= 1e-8


def test_refitted_rows_have_finite_exact_gradients():
    Z, Y, R = nearly_interpolated()

    def outputs(Z, Y, weight):
        return F.ridge(Z, Y, R, weight).held_out().outputs

    inputs = (Z.requires_grad_(), Y.requires_grad_(), rand(9).requires_grad_())
    # Moving the lone feature of other rows by 1e-6 turns the fit around: only the first two features move.
    mask = torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64)
    base = Z.detach().clone()

    def along(Z, Y, weight):
        return outputs(base + (Z - base) * mask, Y, weight)

    assert torch.autograd.gradcheck(along, inputs, atol=1e-5)


def test_refits_in_a_batch_stay_in_their_problem():
    Z, Y, R = nearly_interpolated()
    harmless = randn(9, 3, seed=5)
    together = F.ridge(torch.stack([harmless, Z]), Y, R).held_out()
    assert together.refitted.sum(-1).tolist() == [0, 1]
    expected = F.ridge(Z, Y, R).held_out().outputs
    assert_close(together.outputs[1], expected)
    expected = F.ridge(harmless, Y, R).held_out().outputs
    assert_close(together.outputs[0], expected)


@pytest.mark.parametrize("far", [1e6, 1e7])
def test_an_outlier_that_is_refitted_is_exact(far):
    X, Y = randn(40, 2), randn(40, 1)
    X[0] = torch.tensor([0.0, far])
    result = tl.LSSVM(tl.kernels.Linear(), 1.0).loo(X, Y)
    assert result.refitted.nonzero()[:, 0].tolist() == [0]
    alone = tl.LSSVM(tl.kernels.Linear(), 1.0).fit(X[1:], Y[1:])(X[:1])
    assert relative(result.outputs[:1], alone) <= 1e-8
    clusters = [0, 0, *range(1, 39)]
    pair = tl.LSSVM(tl.kernels.Linear(), 1.0).fit(X[2:], Y[2:])(X[:2])
    received = tl.LSSVM(tl.kernels.Linear(), 1.0).lco(X, Y, clusters).outputs[:2]
    assert relative(received, pair) <= 1e-8


def test_variance_of_refitted_rows_is_that_of_the_dual_form():
    Z = randn(9, 2)
    Y = randn(9, 1)
    weight = rand(9)
    Z[0] = torch.tensor([0.0, 1e4])
    primal_form = F.ridge(Z, Y, 0.5 * torch.eye(2, dtype=torch.float64), weight).held_out()
    dual_form = F.rls(Z @ Z.T / 0.5, Y, 1.0, weight).held_out()
    assert primal_form.refitted[0]
    assert_close(primal_form.variance, dual_form.variance, rtol=1e-6, atol=1e-9)


def test_clusters_larger_than_the_features_need_no_blocks_of_their_size():
    n = 20_000  # blocks would take n^2 / 2 numbers, 1.6 GB
    X, Y = randn(n, 3), randn(n, 1)
    clusters = torch.arange(n) % 2
    received = tl.LSSVM(tl.kernels.Linear(), 1.0).lco(X, Y, clusters).outputs
    expected = tl.LSSVM(tl.kernels.Linear(), 1.0).fit(X[::2], Y[::2])(X[1::2])
    assert_close(received[1::2], expected, rtol=1e-9, atol=1e-10)


def test_features_far_from_the_origin_do_not_spoil_a_machine_with_bias():
    X, Y = randn(20, 3), randn(20, 1)
    machine = tl.LSSVM(tl.kernels.Linear(), reg=0.1)
    near = machine.loo(X, Y).outputs
    far = machine.loo(X + 1e5, Y).outputs
    assert relative(far, near) <= 1e-9
    wide = randn(6, 9)
    near = machine.loo(wide, Y[:6]).outputs
    far = machine.loo(wide + 1e5, Y[:6]).outputs
    assert relative(far, near) <= 1e-8
    single = (X + 1e5).float()
    fit = machine.fit(single, Y.float())
    received = fit(single)
    expected = machine.solve(single, Y.float()).outputs
    assert relative(received, expected) <= 1e-4


def test_primal_and_dual_forms_agree():
    X = randn(8, 3)
    Y = randn(8, 2)
    weight = rand(8)
    machine = tl.LSSVM(tl.kernels.Linear(), reg=0.3)
    primal_fit = machine.solve(X, Y, weight)
    dual_fit = F.lssvm(X @ X.T, Y, 0.3, weight)
    assert isinstance(primal_fit.form, primal.Primal)
    for name in ("coef", "bias", "outputs", "leverage", "dual"):
        assert_close(getattr(primal_fit, name), getattr(dual_fit, name), rtol=1e-9, atol=1e-10)
    assert_close(primal_fit.annihilator(), dual_fit.annihilator(), rtol=1e-9, atol=1e-10)
    received = primal_fit.held_out().variance
    expected = dual_fit.held_out().variance
    assert_close(received, expected, rtol=1e-9, atol=1e-10)


def test_wide_linear_kernels_take_the_dual_form():
    X, Y = randn(5, 9), randn(5, 1)
    machine = tl.RLS(tl.kernels.Linear(), reg=0.3)
    assert isinstance(machine.solve(X, Y).form, dual.Dual)
    received = machine.fit(X, Y)(X)
    expected = machine.solve(X, Y).outputs
    assert_close(received, expected)
    assert machine.coef.shape == (9, 1)  # weights of the features, whichever form they came from


def test_dependent_basis_vectors_are_dropped_and_change_nothing():
    X, Y = randn(15, 2), randn(15, 1)
    kernel = tl.kernels.RBF(1.0)
    basis = torch.cat([X[:4], X[1:3], X[:1]])
    with torch.no_grad():
        repeated = F.sparse_lssvm(kernel(basis), kernel(X, basis), Y, 0.1)
        plain = F.sparse_lssvm(kernel(X[:4]), kernel(X, X[:4]), Y, 0.1)
    assert repeated.kept.sum() == 4
    received = repeated.held_out().outputs
    expected = plain.held_out().outputs
    assert_close(received, expected, rtol=1e-9, atol=1e-10)
    received = repeated.from_kernel(kernel(X, basis))
    assert_close(received, plain.outputs, rtol=1e-9, atol=1e-10)
    machine = tl.SparseLSSVM(kernel, 0.1, basis=basis).fit(X, Y)
    assert machine.dropped.item() == 3


def test_motorcycle_with_a_singular_basis_is_exact():
    """The first 20 rows: K_zz has condition 1e32 at every reg."""
    X, y = tl.datasets.motorcycle()
    X = (X - X.mean()) / X.std()
    machine = tl.SparseLSSVM(tl.kernels.RBF(0.5), 0.1, basis=20).fit(X, y)
    assert machine.dropped.item() > 0
    outputs = machine.loo(X, y).outputs
    for i in (0, 40, 90, 132):
        kept = [j for j in range(133) if j != i]
        refit = tl.SparseLSSVM(tl.kernels.RBF(0.5), 0.1, basis=X[:20]).fit(X[kept], y[kept])
        assert abs(refit(X[i : i + 1]) - outputs[i]) <= 1e-8 * y.abs().max()


def test_a_basis_of_all_rows_takes_the_dual_form_and_is_the_dense_machine():
    X, Y = randn(10, 2), randn(10, 1)
    kernel = tl.kernels.RBF(0.7)
    sparse = tl.SparseLSSVM(kernel, 0.2, basis=10)
    assert isinstance(sparse.solve(X, Y).form, dual.Dual)
    received = sparse.loo(X, Y).outputs
    expected = tl.LSSVM(kernel, 0.2).loo(X, Y).outputs
    assert_close(received, expected, rtol=1e-8, atol=1e-9)


def test_trainable_basis_receives_exact_gradients():
    X, Y = randn(9, 2), randn(9, 1)
    kernel = tl.kernels.RBF(1.0)

    def outputs(basis):
        return F.sparse_lssvm(kernel(basis), kernel(X, basis), Y, 0.1).held_out().outputs

    assert torch.autograd.gradcheck(outputs, (randn(3, 2, seed=7).requires_grad_(),))
    machine = tl.SparseLSSVM(kernel, 0.1, basis=torch.nn.Parameter(X[:3].clone()))
    tl.criteria.press(machine.loo(X, Y)).backward()
    assert machine.basis.grad.abs().sum() > 0


def test_adding_a_constant_to_the_kernel_changes_nothing_with_a_bias():
    K, Y = spd(9, 1e2), randn(9, 2)
    before = F.lssvm(K, Y, 0.1).held_out().outputs
    received = F.lssvm(K + 5.0, Y, 0.1).held_out().outputs
    assert_close(received, before, rtol=1e-9, atol=1e-10)


def test_infinite_reg_gives_the_weighted_mean_of_the_others():
    K = spd(9, 1e2)
    Y = randn(9, 1)
    weight = rand(9)
    received = F.lssvm(K, Y, 1e12, weight).held_out().outputs[:, 0]
    total = weight.sum()
    sums = (weight * Y[:, 0]).sum()
    expected = (sums - weight * Y[:, 0]) / (total - weight)
    assert_close(received, expected, rtol=1e-9, atol=1e-10)


def test_rls_is_linear_in_its_targets():
    K = spd(9, 1e2)
    Y = randn(9, 1)
    other = randn(9, 1, seed=3)
    targets = torch.cat([Y, other, 2 * Y - other], 1)
    held = F.rls(K, targets, 0.1).held_out().outputs
    received = held[:, 2]
    expected = 2 * held[:, 0] - held[:, 1]
    assert_close(received, expected)


def test_kfd_direction_is_fishers():
    """alpha is proportional to (N + mu I)^{-1} (m_1 - m_2), KFD eq. 4."""
    X = randn(14, 2)
    y = torch.tensor([1.0, -1.0, -1.0, 1.0, -1.0, 1.0, -1.0] * 2, dtype=torch.float64)
    K = tl.kernels.RBF(1.0)(X).detach()
    alpha = F.kfd(K, y[:, None], 0.3).coef[:, 0]
    N = 0.3 * torch.eye(14, dtype=torch.float64)
    means = []
    for label in (1, -1):
        columns = K[:, y == label]
        mean = columns.mean(1, keepdim=True)
        N += (columns - mean) @ (columns - mean).T
        means.append(mean[:, 0])
    direction = torch.linalg.solve(N, means[0] - means[1])
    cosine = alpha @ direction / (alpha.norm() * direction.norm())
    assert_close(cosine, torch.ones_like(cosine), rtol=0, atol=1e-10)


def test_variance_is_the_gaussian_process_one():
    """Without bias and weights: the predictive variance of a GP with noise reg, refitted without i."""
    K, Y = spd(8, 1e2), randn(8, 1)
    received = F.rls(K, Y, 0.3).held_out().variance[:, 0]
    for i in range(8):
        kept = [j for j in range(8) if j != i]
        k = K[i, kept]
        M = K[kept][:, kept] + 0.3 * torch.eye(7, dtype=torch.float64)
        expected = K[i, i] + 0.3 - k @ torch.linalg.solve(M, k)
        assert_close(received[i], expected)


def loo_press(K, Y, reg, weight):
    return F.lssvm(K, Y, reg, weight).held_out().residuals.square().sum()


def test_torch_func_grad_and_vmap_over_the_functional_forms():
    K = torch.stack([spd(6, 10.0, seed) for seed in range(3)])
    Y = randn(3, 6, 1)
    reg = rand(3)
    weight = rand(3, 6)
    gradients = vmap(grad(loo_press, argnums=(0, 1, 2, 3)))(K, Y, reg, weight)
    inputs = [t.clone().requires_grad_() for t in (K, Y, reg, weight)]
    expected = torch.autograd.grad(F.lssvm(*inputs).held_out().residuals.square().sum(), inputs)
    for received, right in zip(gradients, expected, strict=True):
        assert_close(received, right)
    values = vmap(loo_press, in_dims=(None, None, 0, None))(K[0], Y[0], reg, weight[0])
    assert_close(values, torch.stack([loo_press(K[0], Y[0], r, weight[0]) for r in reg]))


def test_torch_func_second_derivatives():
    K = spd(5, 10.0)
    Y = randn(5, 1)
    weight = rand(5)
    reg = torch.tensor(0.4, dtype=torch.float64)
    received = jacrev(grad(loo_press, argnums=2), argnums=2)(K, Y, reg, weight)
    h = 1e-4
    values = [loo_press(K, Y, reg + step, weight) for step in (-h, 0.0, h)]
    expected = (values[0] - 2 * values[1] + values[2]) / h**2
    assert_close(received, expected, rtol=1e-5, atol=1e-6)


def test_torch_func_over_ridge_and_clusters():
    Z = randn(3, 7, 2)
    Y = randn(3, 7, 1)
    R = torch.eye(2, dtype=torch.float64)

    def press(Z, Y):
        return F.ridge(Z, Y, R).held_out([0, 0, 1, 1, 1, 2, 2]).residuals.square().sum()

    received = vmap(grad(press))(Z, Y)
    for i in range(3):
        assert_close(received[i], grad(press)(Z[i], Y[i]))
        leaf = Z[i].clone().requires_grad_()
        (expected,) = torch.autograd.grad(press(leaf, Y[i]), leaf)
        assert_close(received[i], expected)


def test_batched_gradients_of_one_backward():
    K = spd(5, 10.0).requires_grad_()
    Y = randn(5, 1)
    outputs = F.lssvm(K, Y, 0.2).held_out().outputs[:, 0]
    eye = torch.eye(5, dtype=torch.float64)
    (together,) = torch.autograd.grad(outputs, K, eye, is_grads_batched=True, retain_graph=True)
    for i in range(5):
        (one,) = torch.autograd.grad(outputs[i], K, retain_graph=True)
        assert_close(together[i], one)


@pytest.mark.parametrize(("dtype", "most", "limit"), [(torch.float64, 10, 1e-8), (torch.float32, 6, 1e-3)])
def test_path_is_exact_for_weights_of_very_different_size(dtype, most, limit):
    X, Y = randn(20, 2), randn(20, 1)
    weight = 10 ** (most * rand(20) - most / 2)
    regs = torch.logspace(-1, 1, 8, dtype=torch.float64)
    machine = tl.LSSVM(tl.kernels.RBF(0.7))
    received = machine.path(X.to(dtype), Y.to(dtype), regs, None, weight.to(dtype)).outputs
    for r, reg in enumerate(regs):
        expected = tl.LSSVM(tl.kernels.RBF(0.7), reg).loo(X, Y, weight).outputs
        assert relative(received[r].double(), expected) <= limit


@pytest.mark.parametrize("per_output", [False, True])
def test_path_in_chunks_has_the_same_values_and_gradients(per_output, monkeypatch):
    """Two folds: the blocks of all regularisations would be many times n^2, so they come in chunks."""
    monkeypatch.setattr(spectral_path, "_TOGETHER", 1)
    K = spd(8, 10.0).requires_grad_()
    Y = randn(8, 2).requires_grad_()
    regs = torch.logspace(-1, 1, 7, dtype=torch.float64)
    regs = torch.stack([regs, regs.flip(0)], -1) if per_output else regs
    clusters = [0, 1] * 4
    together = tl.LSSVM(tl.kernels.Precomputed()).path(K, Y, regs, clusters).outputs
    outputs = []
    for row in regs.reshape(7, -1):
        single = [F.lssvm(K, Y, reg).held_out(clusters).outputs for reg in row]
        outputs.append(torch.cat([single[0][:, :1], single[-1][:, 1:]], 1))
    separate = torch.stack(outputs)
    assert_close(together, separate, rtol=1e-9, atol=1e-10)
    gradients = [torch.autograd.grad(t.square().sum(), (K, Y)) for t in (together, separate)]
    assert_close(gradients[0], gradients[1], rtol=1e-8, atol=1e-9)


class Dispatched(TorchDispatchMode):
    """Names of the operations that are run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.names.append(operation.name().split("::")[1].split(".")[0])
        return operation(*args, **(kwargs or {}))


def path_operations(machine, X, Y, count, clusters):
    regs = torch.logspace(-3, 3, count, dtype=torch.float64)
    with torch.no_grad(), Dispatched() as dispatched:
        machine.path(X, Y, regs, clusters, rand(40))
    return dispatched.names


@pytest.mark.parametrize("machine", [tl.LSSVM, tl.RLS, tl.KFD])
@pytest.mark.parametrize("kernel", [tl.kernels.RBF, tl.kernels.Linear])
@pytest.mark.parametrize("clusters", [None, [i % 13 for i in range(40)]], ids=["rows", "sets"])
def test_a_path_takes_as_many_operations_however_many_regularisations(machine, kernel, clusters):
    X = randn(40, 60)
    Y = randn(40, 1).sign()
    few, many = (path_operations(machine(kernel()), X, Y, count, clusters) for count in (10, 90))
    assert few == many
    assert many.count("_linalg_eigh") == 1
    assert "_linalg_svd" not in many


@pytest.mark.parametrize("machine", [tl.LSSVM, tl.RLS])
def test_usual_regularisations_are_not_factorised(machine, monkeypatch):
    monkeypatch.setattr(spectral_path.Each, "along_regs", None)
    X, Y = randn(400, 2), randn(400, 1)  # eigenvalues down to rounding
    kernel = tl.kernels.RBF()
    regs = torch.logspace(-6, 3, 10, dtype=torch.float64)
    received = machine(kernel).path(X, Y, regs, None, rand(400)).outputs
    for r in range(10):
        expected = machine(kernel, regs[r]).loo(X, Y, rand(400)).outputs
        assert relative(received[r], expected) <= 1e-7  # at reg 1e-6 a factorisation has no more digits


def test_weights_of_a_larger_batch_than_the_targets():
    X = randn(8, 2)
    Y = randn(8, 1).sign()
    weight = rand(3, 8)
    Y[:2] = torch.tensor([[1.0], [-1.0]])
    for machine in (tl.KFD(tl.kernels.RBF()), tl.LSSVM(tl.kernels.RBF()), tl.LSSVM(tl.kernels.Linear())):
        together = machine.loo(X, Y, weight).outputs
        for k in range(3):
            expected = machine.loo(X, Y, weight[k]).outputs
            assert_close(together[k], expected, rtol=1e-9, atol=1e-10)


def test_ridge_takes_a_batch_of_penalties():
    Z, Y = randn(7, 2), randn(7, 1)
    R = torch.eye(2, dtype=torch.float64) * torch.tensor([0.1, 1.0, 10.0], dtype=torch.float64)[:, None, None]
    together = F.ridge(Z, Y, R).held_out().outputs
    for k in range(3):
        expected = F.ridge(Z, Y, R[k]).held_out().outputs
        assert_close(together[k], expected)


@pytest.mark.parametrize("machine", [tl.RLS, tl.LSSVM, tl.KFD])
def test_precomputed_matrices_are_not_stored(machine):
    X = randn(9, 2)
    y = randn(9).sign()
    y[:2] = torch.tensor([1.0, -1.0])
    K = tl.kernels.RBF(1.0)(X).detach()
    K_new = tl.kernels.RBF(1.0)(randn(4, 2, seed=9), X).detach()
    given = machine(tl.kernels.Precomputed(), 0.3).fit(K, y)
    computed = machine(tl.kernels.RBF(1.0), 0.3).fit(X, y)
    assert_close(given(K_new), computed(randn(4, 2, seed=9)))
    assert given.support.shape == (9, 1)
    with pytest.raises(ValueError, match="9 columns"):
        given(K_new[:, :5])


def test_features_are_evaluated_once():
    calls = []
    net = torch.nn.Linear(2, 2).double()
    net.register_forward_hook(lambda *_: calls.append(1))
    X, Y = randn(9, 2), randn(9, 1)
    sum_of_kernels = tl.kernels.Sum(tl.kernels.Linear(), tl.kernels.RBF(), features=net)
    for kernel in (tl.kernels.Linear(features=net), 2.0 * tl.kernels.RBF(features=net), sum_of_kernels):
        calls.clear()
        tl.LSSVM(kernel).loo(X, Y)
        assert len(calls) == 1


def test_path_says_that_it_is_differentiable_once():
    """Also where a derivative comes to the parameter of a kernel by its second derivative alone."""
    X, y = randn(5, 2), randn(5, seed=1)
    machine = tl.LSSVM(tl.kernels.RBF(1.0))
    outputs = machine.path(X, y, torch.logspace(-1, 1, 12, dtype=torch.float64)).outputs
    parameter = machine.kernel.log_lengthscale
    (first,) = torch.autograd.grad(outputs.square().sum(), parameter, create_graph=True)
    with pytest.raises(RuntimeError, match="derivatives of order one only"):
        torch.autograd.grad(first, parameter)


@st.composite
def problems(draw):
    n = draw(st.integers(2, 9))
    seed = draw(st.integers(0, 10**6))
    condition = 10.0 ** draw(st.integers(0, 6))
    labels = draw(st.lists(st.integers(-3, 3), min_size=n, max_size=n))
    clusters = labels if len(set(labels)) > 1 else None
    weight = None
    if draw(st.booleans()):
        weight = rand(n, seed=seed) * 10.0 ** draw(st.integers(-1, 1))
    return (
        spd(n, condition, seed),
        randn(n, draw(st.integers(1, 3)), seed=seed + 1),
        1 / condition,
        weight,
        clusters,
    )


@given(problems())
@settings(max_examples=60, deadline=None)
def test_any_problem_equals_delete_and_refit(drawn):
    K, Y, reg, weight, clusters = drawn
    weights = torch.ones(len(K), dtype=torch.float64) if weight is None else weight
    for function, refit in ((F.rls, reference.rls), (F.lssvm, reference.lssvm)):
        expected = Y - refit(K, Y, reg, weights, clusters)  # outputs may be nothing but rounding
        received = function(K, Y, reg, weight).held_out(clusters).residuals
        assert relative(received, expected) <= 1e-8


@given(st.lists(st.integers(-5, 5), min_size=1, max_size=30))
def test_a_partition_holds_every_row_once_with_its_cluster(labels):
    if len(set(labels)) < 2:
        with pytest.raises(ValueError, match="holds all"):
            Partition.of("f", labels, len(labels), torch.device("cpu"))
        return
    partition = Partition.of("f", labels, len(labels), torch.device("cpu"))
    rows = [row for group in partition.groups for row in group.flatten().tolist()]
    assert sorted(rows) == list(range(len(labels)))
    for group in partition.groups:
        for cluster in group.tolist():
            assert len({labels[row] for row in cluster}) == 1
            assert len(cluster) == labels.count(labels[cluster[0]])
    values = randn(len(labels), 2)
    assert torch.equal(partition.scatter(partition.gather(values), len(labels)), values)


def test_folds_are_balanced_and_seeded():
    labels = tl.folds(23, 5, torch.Generator().manual_seed(3))
    assert sorted(torch.bincount(labels).tolist()) == [4, 4, 5, 5, 5]
    assert torch.equal(labels, tl.folds(23, 5, torch.Generator().manual_seed(3)))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own
def test_compiled_functions_give_the_same_values_and_gradients():
    K = spd(5, 10.0).requires_grad_()
    Y = randn(5, 1)
    reg = torch.tensor(0.3, dtype=torch.float64)
    weight = rand(5)
    compiled = torch.compile(loo_press, backend="eager")
    received = compiled(K, Y, reg, weight)
    expected = loo_press(K, Y, reg, weight)
    assert_close(received, expected)
    assert_close(torch.autograd.grad(received, K), torch.autograd.grad(expected, K))


def test_clusters_of_one_row_in_any_order_have_the_gradients_of_leave_one_out():
    K = spd(6, 10.0).requires_grad_()
    Y = randn(6, 1)
    fit = F.lssvm(K, Y, 0.2)
    target = randn(6, 1, seed=8)
    losses = [(fit.held_out(clusters).outputs * target).sum() for clusters in (None, [5, 1, 4, 0, 3, 2])]
    assert_close(*(torch.autograd.grad(loss, K, retain_graph=True)[0] for loss in losses))


@pytest.mark.parametrize("function", [F.rls, F.lssvm])
def test_a_solution_is_that_of_the_matrix_at_the_time(function):
    K, Y = spd(6, 10.0), randn(6, 2)
    expected = function(K.clone(), Y, 0.2)
    fit = function(K, Y, 0.2)
    K.mul_(3.0)
    assert_close(fit.coef, expected.coef, rtol=0, atol=0)
    assert_close(fit.bias, expected.bias, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # torch's own
def test_forward_mode_is_refused_instead_of_ignored():
    K, Y = spd(5, 10.0), randn(5, 1)
    with torch.autograd.forward_ad.dual_level():
        moved = torch.autograd.forward_ad.make_dual(K, torch.ones_like(K))
        with pytest.raises(NotImplementedError, match="forward-mode derivatives"):
            F.rls(moved, Y, 0.2).held_out()


def test_shapes_broadcast_as_torch_broadcasts_them():
    for shapes in ([(), ()], [(3,), ()], [(2, 1), (3,)], [(1, 4), (5, 1, 1), ()], [(0,), (1,)]):
        assert broadcast_shapes(*shapes) == torch.broadcast_shapes(*shapes)
    for shapes in ([(2,), (3,)], [(0,), (2,)], [(2, 3), (2, 1, 4)]):
        with pytest.raises(RuntimeError):
            broadcast_shapes(*shapes)
