"""Variances at new points, and weights of the targets there."""

import copy
import io
import pickle

import pytest
import reference
import torch
from cases import BASIS, CASES, IDS, gram, problem, relative
from torch.testing import assert_close

import torchloo as tl

every_smoother = pytest.mark.parametrize("case", CASES, ids=IDS)
N = 12


def expected_variance(case, X, reg, weight, kept, X_new):
    """By plain formulas, of the machine of the kept rows."""
    K, K_new = (gram(A, X, "linear" if "linear" in case.name else "rbf") for A in (X, X_new))
    if case.name in ("sparse", "kfd"):
        m = BASIS if case.name == "sparse" else len(X)
        R = torch.zeros(m + 1, m + 1, dtype=X.dtype)
        penalty = K[:m, :m] if case.name == "sparse" else torch.eye(m, dtype=X.dtype)
        R[:m, :m] = reg * penalty
        Z = reference.with_ones(K[:, :m])
        Z_new = reference.with_ones(K_new[:, :m])
        return reference.variance_of_features(Z[kept], R, Z_new, reg, weight[kept])
    own = torch.stack(
        [gram(x[None], x[None], "linear" if "linear" in case.name else "rbf")[0, 0] for x in X_new]
    )
    bias = "lssvm" in case.name
    return reference.variance_of_kernel(K[kept][:, kept], K_new[:, kept], own, reg, weight[kept], bias)


@every_smoother
@pytest.mark.parametrize("d", [3, 15], ids=["few", "many"])
@pytest.mark.parametrize("reg", [0.01, 1.0])
def test_predictive_is_the_output_and_the_variance_of_a_gaussian_process(case, d, reg):
    X, Y, weight = problem(N, d=d)
    X_new, _, _ = problem(9, d=d, seed=5)
    machine = case.make(reg).fit(X, case.targets(Y), weight)
    expected = expected_variance(case, X, reg, weight, list(range(N)), X_new)
    for mean, variance in (
        machine.predictive(X_new),
        machine.solve(X, case.targets(Y), weight).predictive(X_new),
    ):
        assert_close(mean, machine(X_new))
        assert variance.shape == (9,)
        assert relative(variance, expected) <= 1e-8


@every_smoother
@pytest.mark.parametrize("d", [3, 15], ids=["few", "many"])
def test_variance_without_a_row_and_its_noise_are_the_held_out_variance(case, d):
    X, Y, weight = problem(N, d=d, c=1)
    held_out = case.make(0.1).loo(X, case.targets(Y), weight)
    for i in range(N):
        kept = [j for j in range(N) if j != i]
        if case.coded:  # whose columns of K stay
            variance = expected_variance(case, X, 0.1, weight, kept, X[i : i + 1])
        else:
            basis = {"basis": X[:BASIS].clone()} if case.name == "sparse" else {}
            machine = type(case.make())(case.make().kernel, 0.1, **basis)
            machine.fit(X[kept], Y[kept], weight[kept])
            variance = machine.predictive(X[i : i + 1])[1]
        received = variance + 0.1 / weight[i]
        assert_close(received, held_out.variance[i], rtol=1e-8, atol=1e-10)


@every_smoother
@pytest.mark.parametrize("d", [3, 15], ids=["few", "many"])
def test_predictive_survives_state_pickle_and_copies(case, d):
    X, Y, weight = problem(N, d=d, c=1)
    X_new, _, _ = problem(4, d=d, seed=5)
    machine = case.make(0.1).fit(X, case.targets(Y)[:, 0], weight)
    expected = machine.predictive(X_new)
    file = io.BytesIO()
    torch.save(machine.state_dict(), file)
    file.seek(0)
    loaded = case.make(3.0).fit(X[:8], case.targets(Y)[:8, 0])
    loaded.load_state_dict(torch.load(file, weights_only=True))
    for other in (loaded, pickle.loads(pickle.dumps(machine)), copy.deepcopy(machine)):
        assert_close(other.predictive(X_new), expected, rtol=1e-9, atol=1e-11)


@every_smoother
def test_states_from_before_there_was_a_variance_load(case):
    X, Y, _ = problem(N, c=1)
    machine = case.make(0.1).fit(X, case.targets(Y))
    state = {k: v for k, v in machine.state_dict().items() if k not in ("noise", "points", "spread")}
    for other in (case.make(), case.make().fit(X, case.targets(Y))):
        other.load_state_dict(state)
        assert_close(other(X), machine(X))
        with pytest.raises(RuntimeError, match="fit"):
            other.predictive(X)


@every_smoother
def test_predictive_of_a_batch_equals_its_loop(case):
    X, Y, weight = problem(N, c=1, batch=(2,))
    X_new, _, _ = problem(5, batch=(2,), seed=5)
    Y = case.targets(Y)
    mean, variance = case.make(0.1).fit(X, Y, weight).predictive(X_new)
    shared = case.make(0.1).fit(X, Y, weight).predictive(X_new[0])[1]
    for b in range(2):
        one = case.make(0.1).fit(X[b], Y[b], weight[b])
        received = (mean[b], variance[b])
        expected = one.predictive(X_new[b])
        assert_close(received, expected, rtol=1e-8, atol=1e-10)
        expected = one.predictive(X_new[0])[1]
        assert_close(shared[b], expected, rtol=1e-8, atol=1e-10)
        received = one.predictive(X_new)[1][b]
        assert_close(received, variance[b], rtol=1e-8, atol=1e-10)


@every_smoother
@pytest.mark.parametrize("d", [2, 9], ids=["few", "many"])
def test_weights_give_the_outputs_and_are_differentiable(case, d):
    X, Y, weight = problem(7, d=d, c=2, seed=1)
    Y = case.targets(Y)
    X_new, _, _ = problem(3, d=d, seed=5)
    fit = case.make(0.3).solve(X, Y, weight)
    received = fit.weights_at(X_new) @ fit.targets
    expected = fit(X_new)
    assert_close(received, expected, rtol=1e-9, atol=1e-10)
    received = fit.weights_at(X).diagonal()
    assert_close(received, fit.leverage, rtol=1e-9, atol=1e-10)

    def call(X, weight, X_new):
        fit = case.make(0.3).solve(X, Y, weight)
        return fit.weights_at(X_new), fit.predictive(X_new)[1]

    inputs = [t.requires_grad_() for t in (X, weight, X_new)]
    assert torch.autograd.gradcheck(call, inputs, atol=1e-6)


@every_smoother
def test_variance_of_a_fitted_machine_is_differentiable_in_new_points(case):
    X, Y, _ = problem(N, c=1)
    machine = case.make(0.1).fit(X, case.targets(Y))
    X_new = problem(3, seed=5)[0].requires_grad_()
    assert torch.autograd.gradcheck(lambda x: machine.predictive(x)[1], X_new)


@every_smoother
def test_variance_of_float32_rows_is_float32_and_close(case):
    X, Y, _ = problem(N, c=1)
    Y = case.targets(Y)
    expected = case.make(0.3).fit(X, Y).predictive(X)[1]
    received = case.make(0.3).fit(X.float(), Y.float()).predictive(X.float())[1]
    assert received.dtype == torch.float32
    assert relative(received.double(), expected) <= 1e-3


def test_a_machine_is_factorised_once_for_all_its_variances():
    X, Y, _ = problem(N, c=1)
    machine = tl.LSSVM(tl.kernels.RBF(), 0.1).fit(X, Y)
    before = machine._solved_again()
    _ = machine.predictive(X)
    assert machine._solved_again() is before
    with torch.no_grad():
        machine.kernel.log_lengthscale += 0.1
    assert machine._solved_again() is not before


@pytest.mark.parametrize("case", [CASES[4], CASES[5]], ids=[IDS[4], IDS[5]])
def test_variance_after_a_stream_equals_that_of_rows_in_memory(case):
    X, Y, weight = problem(40, c=1)
    X_new, _, _ = problem(6, seed=5)
    streamed = case.make(0.1).fit(tl.Stream(X, Y, weight=weight, block=7, progress=False))
    expected = case.make(0.1).fit(X, Y, weight).predictive(X_new)
    assert_close(streamed.predictive(X_new), expected, rtol=1e-8, atol=1e-10)


def test_a_kernel_that_is_not_known_has_no_variance():
    X, Y, _ = problem(N, c=1)
    K = tl.kernels.RBF()(X).detach()
    machine = tl.LSSVM(tl.kernels.Precomputed(), 0.1).fit(K, Y)
    with pytest.raises(TypeError, match="Precomputed"):
        machine.predictive(K)
    with pytest.raises(RuntimeError, match="not fitted"):
        tl.LSSVM(tl.kernels.RBF()).predictive(X)


def test_one_regularisation_for_each_output_is_refused_with_a_remedy():
    X, Y, _ = problem(N, c=2)
    for machine in (tl.LSSVM, tl.RLS):
        own = machine(tl.kernels.RBF(), torch.tensor([0.1, 1.0]), reg_per_output=True).fit(X, Y)
        with pytest.raises(RuntimeError, match="one machine for each output"):
            own.predictive(X)
        with pytest.raises(TypeError, match="solve it for each of them"):
            own.solve(X, Y).weights_at(X)
