"""What every machine obeys; and what those of least squares do, which are linear in their targets."""

import copy
import io
import pickle

import pytest
import torch
from cases import CASES, IDS, MACHINES, problem, relative
from torch.testing import assert_close

import torchloo as tl

every_machine = pytest.mark.parametrize("case", MACHINES, ids=[case.name for case in MACHINES])
every_smoother = pytest.mark.parametrize("case", CASES, ids=IDS)
N = 12
RAGGED = [7, 7, -2, 30, 30, 30, 4, 4, 4, 4, 4, 9]  # sizes 1, 1, 2, 3, 5: neither sorted nor contiguous
ALL_BUT_ONE = [1] * (N - 1) + [0]
CLUSTERS = [None, RAGGED, ALL_BUT_ONE, list(range(N))[::-1], [0, 1] * (N // 2)]
CLUSTER_IDS = ["rows", "ragged", "all-but-one", "singles", "halves"]


def held_out(machine, X, y, clusters, weight=None):
    return machine.held_out(X, y, clusters, weight)


@every_machine
@pytest.mark.parametrize("clusters", CLUSTERS, ids=CLUSTER_IDS)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("c", [None, 1, 3])
@pytest.mark.parametrize("batch", [(), (2, 3)], ids=["one", "batch"])
def test_held_out_equals_delete_and_refit(case, clusters, weighted, c, batch):
    batch = batch if case.least_squares else batch[:1]  # refits of an SVM take their time
    X, Y, weight = problem(N, c=c or 1, batch=batch)
    Y = case.targets(Y)
    ones = torch.ones_like(weight)
    result = held_out(
        case.make(0.1), X, Y[..., 0] if c is None else Y, clusters, weight if weighted else None
    )
    expected = case.expected(X, Y, 0.1, weight if weighted else ones, clusters)
    outputs = result.outputs.unsqueeze(-1) if c is None else result.outputs
    assert outputs.shape == expected.shape
    assert relative(outputs, expected) <= 1e-8
    assert_close(result.residuals, result.targets - result.outputs)
    assert_close(result.weight, weight if weighted else ones)


@every_machine
@pytest.mark.parametrize("clusters", CLUSTERS[:3], ids=CLUSTER_IDS[:3])
@pytest.mark.parametrize("reg", [1e-4, 1e2])
def test_duplicate_rows_and_bad_conditioning(case, clusters, reg):
    X, Y, weight = problem(N, seed=3)
    X[7], X[8] = X[2], X[2]  # copies of a basis row too
    Y = case.targets(Y)
    result = held_out(case.make(reg), X, Y, clusters, weight)
    assert relative(result.outputs, case.expected(X, Y, reg, weight, clusters)) <= 1e-8


@every_smoother
@pytest.mark.parametrize("clusters", CLUSTERS[:2], ids=CLUSTER_IDS[:2])
@pytest.mark.parametrize("count", [3, 13], ids=["few", "many"])
@pytest.mark.parametrize("per_output", [False, True])
def test_path_equals_delete_and_refit(case, clusters, count, per_output):
    X, Y, weight = problem(N, c=2)
    Y = case.targets(Y)
    regs = torch.logspace(-6, 6, count, dtype=torch.float64)
    if per_output:
        regs = torch.stack([regs, regs.flip(0)], -1)
    result = case.make().path(X, Y, regs, clusters, weight)
    assert result.outputs.shape == (count, *Y.shape)
    assert result.weight.shape == result.refitted.shape == (count, N)
    for r in range(count):
        for j in range(2):
            reg = regs[r, j] if per_output else regs[r]
            expected = case.expected(X, Y, reg, weight, clusters)[:, j]
            assert relative(result.outputs[r, :, j], expected) <= 1e-8


@every_smoother
@pytest.mark.parametrize("clusters", CLUSTERS[:2], ids=CLUSTER_IDS[:2])
def test_path_of_a_batch_equals_single_solves(case, clusters):
    X, Y, weight = problem(N, c=2, batch=(2,))
    y = case.targets(Y)[..., 0]
    regs = torch.logspace(-2, 2, 11, dtype=torch.float64)
    result = case.make().path(X, y, regs, clusters, weight)
    assert result.outputs.shape == (11, 2, N)
    for r, reg in enumerate(regs):
        single = held_out(case.make(reg), X, y, clusters, weight)
        assert_close(result.outputs[r], single.outputs, rtol=1e-9, atol=1e-9)
        assert_close(result.variance[r], single.variance, rtol=1e-8, atol=1e-9)


class _Asked(torch.nn.Module):
    """A question to a machine as a module, so that functional_call can replace the parameters."""

    def __init__(self, machine, question):
        super().__init__()
        self.machine, self.question = machine, question

    def forward(self, X, y, weight):
        return self.question(self.machine, X, y, weight)


def differentiable(case, Y, question):
    """The answer as a function of points, targets, weights and parameters, and the parameters."""
    asked = _Asked(case.make(0.3), question)
    names = [name for name, _ in asked.named_parameters()]

    def call(X, y, weight, *parameters):
        values = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(asked, values, (X, Y if case.labels else y, weight))

    return call, [p.detach().clone().requires_grad_() for p in asked.parameters()]


def outputs_and_variance(clusters):
    def question(machine, X, y, weight):
        result = held_out(machine, X, y, clusters, weight)
        return result.outputs, result.variance

    return question


def solution(machine, X, y, weight):
    fit = machine.solve(X, y, weight)
    return fit.coef, fit.bias, fit.outputs, fit.leverage


@every_machine
@pytest.mark.parametrize("clusters", [None, [3, 3, 1, 5, 5, 5, 1]], ids=["rows", "ragged"])
@pytest.mark.parametrize("duplicates", [False, True])
def test_gradcheck_in_points_targets_weights_and_parameters(case, clusters, duplicates):
    if duplicates and not case.least_squares:
        pytest.skip("where copies part, an SVM has a kink")
    X, Y, weight = problem(7, d=2, c=2, seed=1)
    if duplicates:
        X[6] = X[1]  # of which the sparse machine has one in its basis
    Y = case.targets(Y)
    call, parameters = differentiable(case, Y, outputs_and_variance(clusters))
    inputs = [t.requires_grad_() for t in (X, Y.clone(), weight)]
    assert torch.autograd.gradcheck(call, (*inputs, *parameters), atol=1e-6, fast_mode=not case.least_squares)


@every_smoother
def test_gradcheck_of_the_solution_itself(case):
    X, Y, weight = problem(7, d=2, c=2, seed=1)
    Y = case.targets(Y)
    call, parameters = differentiable(case, Y, solution)
    inputs = [t.requires_grad_() for t in (X, Y.clone(), weight)]
    assert torch.autograd.gradcheck(call, (*inputs, *parameters), atol=1e-6)


@every_smoother
def test_second_derivatives_are_exact(case):
    X, Y, weight = problem(6, d=2, c=1, seed=2)
    Y = case.targets(Y)
    call, parameters = differentiable(case, Y, outputs_and_variance([0, 0, 1, 1, 1, 2]))
    inputs = [t.requires_grad_() for t in (X, Y.clone(), weight)]
    assert torch.autograd.gradgradcheck(lambda *a: call(*a)[0], (*inputs, *parameters), atol=1e-5)


@every_smoother
@pytest.mark.parametrize("clusters", [None, [3, 3, 1, 5, 5, 5, 1]], ids=["rows", "ragged"])
def test_gradcheck_along_the_path(case, clusters):
    X, Y, weight = problem(7, d=2, c=2, seed=1)
    X[6] = X[5]  # repeated eigenvalues
    Y = case.targets(Y)
    regs = torch.logspace(-1, 1, 10, dtype=torch.float64).requires_grad_()

    def call(X, y, weight, regs):
        return case.make().path(X, Y if case.labels else y, regs, clusters, weight).outputs

    inputs = [t.requires_grad_() for t in (X, Y.clone(), weight)]
    assert torch.autograd.gradcheck(call, (*inputs, regs), atol=1e-6)


@every_machine
@pytest.mark.parametrize("clusters", CLUSTERS[:2], ids=CLUSTER_IDS[:2])
def test_gradients_equal_differences_of_the_refit(case, clusters):
    X, Y, weight = problem(N, c=1)
    Y = case.targets(Y)
    direction = [torch.randn_like(t) for t in (X, Y, weight)]
    if case.labels:
        direction[1].zero_()

    def moved(step):
        return X + step * direction[0], Y + step * direction[1], weight + step * direction[2]

    def loss_of_refit(step):
        x, y, w = moved(step)
        return (case.expected(x, y, 0.1, w, clusters) ** 2).sum()

    step = torch.zeros((), dtype=torch.float64, requires_grad=True)
    x, y, w = moved(step)
    if case.labels:
        y = Y
    loss = (held_out(case.make(0.1), x, y, clusters, w).outputs ** 2).sum()
    (received,) = torch.autograd.grad(loss, step)
    h = 1e-5
    expected = (loss_of_refit(h) - loss_of_refit(-h)) / (2 * h)
    assert_close(received, expected, rtol=1e-6, atol=1e-8)


@every_machine
def test_loo_ignores_own_target(case):
    X, Y, weight = problem(N, c=1)
    if case.coded:
        pytest.skip("the coding of KFD's targets depends on all labels")
    Y = case.targets(Y)
    before = case.make(0.1).loo(X, Y, weight).outputs
    for i in range(N):
        changed = Y.clone()
        changed[i] = -Y[i] if case.labels else Y[i] + 100.0
        received = case.make(0.1).loo(X, changed, weight).outputs[i]
        assert_close(received, before[i], rtol=1e-9, atol=1e-9)


@every_machine
@pytest.mark.parametrize("clusters", CLUSTERS[:2], ids=CLUSTER_IDS[:2])
def test_permuting_rows_permutes_outputs(case, clusters):
    X, Y, weight = problem(N)
    Y = case.targets(Y)
    order = torch.randperm(N)
    machine = case.make(0.1)
    if case.name == "sparse":
        machine = tl.SparseLSSVM(machine.kernel, 0.1, basis=X[:5].clone())
    before = held_out(machine, X, Y, clusters, weight).outputs
    labels = None if clusters is None else torch.tensor(clusters)[order]
    after = held_out(machine, X[order], Y[order], labels, weight[order]).outputs
    assert_close(after, before[order], rtol=1e-9, atol=1e-9)


@every_machine
@pytest.mark.parametrize("clusters", CLUSTERS[:2], ids=CLUSTER_IDS[:2])
def test_batch_equals_its_loop(case, clusters):
    X, Y, weight = problem(N, batch=(2, 2))
    Y = case.targets(Y)
    reg = torch.tensor([[0.1, 1.0], [10.0, 0.5]], dtype=torch.float64)
    result = held_out(case.make(reg), X, Y, clusters, weight)
    for i in range(2):
        for j in range(2):
            one = held_out(case.make(reg[i, j]), X[i, j], Y[i, j], clusters, weight[i, j])
            assert_close(result.outputs[i, j], one.outputs, rtol=1e-9, atol=1e-9)
            received = result.variance[i, j]
            assert_close(received, one.variance, rtol=1e-9, atol=1e-9, equal_nan=True)


@every_machine
def test_many_reg_broadcast_over_one_problem(case):
    X, Y, weight = problem(N)
    Y = case.targets(Y)
    regs = torch.tensor([0.1, 1.0, 10.0], dtype=torch.float64)
    together = case.make(regs).loo(X, Y, weight).outputs
    for r, reg in enumerate(regs):
        expected = case.make(reg).loo(X, Y, weight).outputs
        assert_close(together[r], expected, rtol=1e-10, atol=1e-10)


@every_machine
def test_a_row_of_weight_two_is_two_rows_held_out_together(case):
    if case.coded:
        pytest.skip("splitting a row changes the columns of K, which are KFD's features")
    X, Y, _ = problem(N)
    Y = case.targets(Y)
    weight = torch.ones(N, dtype=torch.float64)
    weight[-1] = 2.0
    machine = case.make(0.1)
    if case.name == "sparse":
        machine = tl.SparseLSSVM(machine.kernel, 0.1, basis=X[:5].clone())
    heavy = machine.lco(X, Y, list(range(N)), weight).outputs
    split = machine.lco(torch.cat([X, X[-1:]]), torch.cat([Y, Y[-1:]]), [*range(N), N - 1]).outputs
    assert_close(split[:N], heavy, rtol=1e-9, atol=1e-9)
    assert_close(split[N], heavy[N - 1], rtol=1e-9, atol=1e-9)


@every_machine
def test_solve_fit_and_forward_agree(case):
    X, Y, weight = problem(N)
    Y = case.targets(Y)
    for y in (Y, Y[..., 0]):
        machine = case.make(0.1).fit(X, y, weight)
        fit = machine.solve(X, y, weight)
        assert machine(X).shape == y.shape
        assert_close(machine(X), fit.outputs, rtol=1e-8, atol=1e-8)
        if case.least_squares:
            targets = fit.targets if y.ndim == 2 else fit.targets[..., 0]
            assert_close(targets - fit.outputs, fit.residuals)
        K_new = machine.kernel(X, X[:5] if case.name == "sparse" else X)
        assert_close(fit.from_kernel(K_new), fit.outputs, rtol=1e-8, atol=1e-8)


@every_smoother
def test_leverage_is_the_derivative_of_an_output_in_its_target(case):
    X, Y, weight = problem(N, c=1)
    fit = case.make(0.1).solve(X, case.targets(Y), weight)
    P = fit.annihilator()
    assert_close(P @ fit.targets, fit.dual, rtol=1e-8, atol=1e-9)
    ridge = 0.1 / weight
    assert_close(1 - ridge * P.diagonal(), fit.leverage, rtol=1e-9, atol=1e-10)
    if not case.labels:
        jacobian = torch.autograd.functional.jacobian(
            lambda y: case.make(0.1).solve(X, y, weight).outputs, Y[:, 0]
        )
        assert_close(jacobian.diagonal(), fit.leverage, rtol=1e-8, atol=1e-9)


@every_machine
@pytest.mark.parametrize("clusters", CLUSTERS[:2], ids=CLUSTER_IDS[:2])
def test_float32_stays_float32_and_close(case, clusters):
    X, Y, weight = problem(N)
    Y = case.targets(Y)
    exact = held_out(case.make(0.3), X, Y, clusters, weight)
    single = held_out(case.make(0.3), X.float(), Y.float(), clusters, weight.float())
    for name in ("outputs", "residuals", "targets", "weight", "variance"):
        assert getattr(single, name).dtype == torch.float32, name
    assert relative(single.outputs.double(), exact.outputs) <= 1e-3
    assert case.make(0.3).fit(X.float(), Y.float())(X.float()).dtype == torch.float32


@every_machine
def test_inputs_are_left_as_they_were(case):
    X, Y, weight = problem(N)
    Y = case.targets(Y)
    copies = [t.clone() for t in (X, Y, weight)]
    machine = case.make(0.1)
    machine.fit(X, Y, weight)
    machine.lco(X, Y, RAGGED, weight)
    if case.least_squares:
        machine.path(X, Y, torch.logspace(-1, 1, 12, dtype=torch.float64), None, weight)
    for tensor, before in zip((X, Y, weight), copies, strict=True):
        assert torch.equal(tensor, before)


@every_machine
@pytest.mark.parametrize("flat", [True, False])
def test_state_dict_pickle_and_deepcopy_round_trip(case, flat):
    X, Y, weight = problem(N)
    Y = case.targets(Y)
    machine = case.make(0.1).fit(X, Y[..., 0] if flat else Y, weight)
    buffer = io.BytesIO()
    torch.save(machine.state_dict(), buffer)
    buffer.seek(0)
    fresh = case.make(7.0)
    fresh.load_state_dict(torch.load(buffer, weights_only=True))
    for other in (fresh, pickle.loads(pickle.dumps(machine)), copy.deepcopy(machine)):
        assert_close(other(X), machine(X), rtol=0, atol=0)
        assert_close(getattr(other, case.penalty), getattr(machine, case.penalty))


@every_machine
def test_to_moves_parameters_and_coefficients(case):
    X, Y, _ = problem(N)
    machine = case.make(0.1).fit(X, case.targets(Y)).float()
    assert machine.coef.dtype == torch.float32
    assert machine(X.float()).dtype == torch.float32


@every_machine
@pytest.mark.parametrize("clusters", [None, RAGGED], ids=["rows", "clusters"])
def test_autocast_leaves_solves_alone(case, clusters):
    X, Y, weight = (t.float() for t in problem(N))
    Y = case.targets(Y)
    found = []
    for enabled in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            machine = case.make(0.1)
            outputs = machine.held_out(X, Y, clusters, weight).outputs
            predicted = machine.fit(X, Y, weight)(X)
        gradient = torch.autograd.grad(outputs.square().sum(), getattr(machine, "log_" + case.penalty))
        found.append((outputs, *gradient, predicted))
    assert_close(found[1], found[0], rtol=0, atol=0)


@every_machine
def test_inference_mode(case):
    X, Y, weight = problem(N)
    Y = case.targets(Y)
    with torch.inference_mode():
        inside = case.make(0.1).loo(X, Y, weight).outputs
    expected = case.make(0.1).loo(X, Y, weight).outputs.detach()
    assert_close(inside, expected)


@every_machine
def test_an_error_leaves_a_fitted_machine_as_it_was(case):
    X, Y, weight = problem(N)
    Y = case.targets(Y)
    machine = case.make(0.1).fit(X, Y, weight)
    before = machine(X).clone()
    broken = X.clone()
    broken[3, 0] = torch.nan
    with pytest.raises(ValueError, match="must be finite"):
        machine.fit(broken, Y, weight)
    assert torch.equal(machine(X), before)


@every_machine
def test_forward_before_fit_says_so(case):
    with pytest.raises(RuntimeError, match="call fit"):
        case.make()(torch.zeros(2, 3, dtype=torch.float64))


@every_machine
def test_gradients_reach_a_feature_extractor(case):
    X, Y, _ = problem(N)
    Y = case.targets(Y)
    machine = case.make(0.1)
    machine.kernel.features = torch.nn.Linear(3, 3).double()
    tl.criteria.press(machine.loo(X, Y)).backward()
    for name, parameter in machine.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


@every_machine
def test_fit_warns_where_it_cuts_a_graph_and_nowhere_else(case):
    X, Y, weight = problem(N)
    y = case.targets(Y)[:, 0]
    remedy = "solve" if case.least_squares else "loo"  # which does keep the graph
    for given in ((X.clone().requires_grad_(), y, weight), (X, y, weight.clone().requires_grad_())):
        assert getattr(case.make().requires_grad_(False), remedy)(*given).outputs.requires_grad
        with pytest.warns(UserWarning, match=rf"\.fit keeps no graph.*use {remedy}") as seen:
            case.make().fit(*given)
        assert len(seen) == 1
        assert seen[0].filename == __file__
        with torch.no_grad():
            case.make().fit(*given)
    case.make().fit(X, y, weight)


@every_machine
@pytest.mark.parametrize("clusters", [None, RAGGED], ids=["rows", "ragged"])
def test_what_was_computed_does_not_change_with_the_tensors_it_came_from(case, clusters):
    X, Y, weight = problem(N)
    y = case.targets(Y)[:, 0]
    result = held_out(case.make(), X, y, clusters, weight)
    before = [field.clone() if isinstance(field, torch.Tensor) else field for field in result]
    y.neg_()
    weight.add_(1.0)
    X.zero_()
    for field, kept in zip(result, before, strict=True):
        assert_close(field, kept, equal_nan=True)


@every_smoother
def test_a_fit_keeps_its_targets_and_notices_changed_inputs(case):
    X, Y, weight = problem(N)
    y = case.targets(Y)[:, 0]
    expected = case.make().loo(X, y, weight)
    fit = case.make().solve(X, y, weight)
    y.neg_()
    weight.add_(1.0)
    assert_close(fit.held_out().outputs, expected.outputs)
    X.mul_(2.0)
    if "linear" in case.name:  # the others have made kernel matrices of their own from X
        for call in (fit.held_out, lambda: fit.leverage, fit.annihilator):
            with pytest.raises(RuntimeError, match="the inputs were changed in place after solve"):
                call()
    else:
        assert_close(fit.held_out().outputs, expected.outputs)


@every_smoother
@pytest.mark.parametrize("count", [2, 9])
def test_a_solved_path_keeps_its_regularisations(case, count):
    X, Y, weight = problem(N)
    y = case.targets(Y)[:, 0]
    regs = torch.logspace(-2, 1, count, dtype=torch.float64)
    expected = case.make().path(X, y, regs, None, weight)
    path = case.make().solve_path(X, y, regs, weight)
    regs.mul_(10)
    assert_close(path.held_out().outputs, expected.outputs)


def test_a_basis_is_copied_unless_it_is_a_parameter():
    X, Y, _ = problem(N)
    basis = X[:4].clone()
    parameter = torch.nn.Parameter(basis.clone())
    machine = tl.SparseLSSVM(tl.kernels.RBF(), basis=basis)
    before = machine.loo(X, Y).outputs
    basis.zero_()
    assert_close(machine.loo(X, Y).outputs, before)
    assert tl.SparseLSSVM(tl.kernels.RBF(), basis=parameter).basis is parameter


@every_machine
def test_targets_without_batch_axes_are_those_of_every_problem(case):
    X, _, weight = problem(N, batch=(2, 3))
    Y = case.targets(problem(N)[1])
    machine = case.make(0.3)
    for y in (Y, Y[:, 0]):
        each = y.expand(2, 3, *y.shape)
        shared = machine.loo(X, y, weight)
        alone = machine.loo(X, each, weight)
        for name in ("outputs", "residuals", "targets", "variance"):
            assert_close(getattr(shared, name), getattr(alone, name), equal_nan=True)
        new = X[..., :2, :]
        received = machine.solve(X, y, weight)(new)
        expected = machine.fit(X, each, weight)(new)
        assert_close(received, expected)


@every_machine
def test_targets_of_other_rows_are_refused_by_their_shape(case):
    X, Y, _ = problem(N)
    y = case.targets(Y)[:, 0]
    for batch in (X[1:].expand(3, N - 1, 3), X.reshape(N, 1, 3, 1).expand(N, 1, 3, 2)):
        with pytest.raises(ValueError, match=r"y must have \d+ rows to match X.*got shape \(12,\)"):
            case.make().loo(batch, y)


@every_machine
def test_rows_of_another_width_are_refused_by_the_name_that_the_caller_knows(case):
    X, Y, _ = problem(N)
    machine = case.make().fit(X, case.targets(Y))
    with pytest.raises(ValueError, match=r"X must have 3 columns, as in fit, got shape \(12, 2\)"):
        machine(X[:, :2])


def test_a_fit_gives_outputs_from_kernel_rows_by_a_name_that_says_so():
    K = torch.eye(4, dtype=torch.float64)
    for fit in (
        tl.functional.rls(K, K, 1.0),
        tl.functional.svm(K, torch.tensor([1.0, -1.0, 1.0, -1.0]).double(), 1.0),
    ):
        assert not hasattr(fit, "predict")
        assert fit.from_kernel(K).shape[0] == 4
