"""Several regularisations of one problem: solved paths, and one regularisation for each output."""

import copy

import pytest
import torch
from cases import CASES, IDS, problem, relative
from torch.testing import assert_close

import torchloo as tl
from torchloo import spectral

every_smoother = pytest.mark.parametrize("case", CASES, ids=IDS)
RAGGED = [7, 7, -2, 30, 30, 30, 4, 4, 4, 4, 4, 9]
both = pytest.mark.parametrize("clusters", [None, RAGGED], ids=["rows", "ragged"])
# Few are factorised one by one, many come from one decomposition.
counts = pytest.mark.parametrize("c", [2, 7], ids=["few", "many"])


def per_output(case, reg, **options):
    """The machine of a case with one regularisation for each output."""
    machine = case.make(1.0)
    basis = {"basis": machine.rows} if case.name == "sparse" else {}
    return type(machine)(machine.kernel, reg, reg_per_output=True, **basis, **options)


def regs_of(*shape):
    return torch.logspace(-3, 2, shape[-1], dtype=torch.float64).expand(shape) * torch.rand(shape).double()


def held_out(machine, X, y, clusters, weight):
    return machine.loo(X, y, weight) if clusters is None else machine.lco(X, y, clusters, weight)


@every_smoother
@both
@counts
@pytest.mark.parametrize("weighted", [False, True])
def test_reg_per_output_equals_one_machine_for_each_output(case, clusters, c, weighted):
    X, Y, weight = problem(12, c=c)
    Y = case.targets(Y)
    weight = weight if weighted else None
    regs = regs_of(c)
    machine = per_output(case, regs)
    result = held_out(machine, X, Y, clusters, weight)
    fit = machine.solve(X, Y, weight)
    from_fit = fit.held_out(clusters)
    machine.fit(X, Y, weight)
    ones = torch.ones(12, dtype=torch.float64)
    for j in range(c):
        one = case.make(regs[j])
        alone = held_out(one, X, Y[:, j], clusters, weight)
        expected = case.expected(X, Y[:, j : j + 1], regs[j], ones if weight is None else weight, clusters)
        for found in (result, from_fit):
            assert relative(found.outputs[:, j], expected[:, 0]) <= 1e-8
            assert_close(found.variance[:, j], alone.variance, rtol=1e-8, atol=1e-9)
        solved = one.solve(X, Y[:, j], weight)
        assert_close(fit.coef[..., j], solved.coef, rtol=1e-7, atol=1e-8)
        assert_close(fit.bias[j], solved.bias, rtol=1e-8, atol=1e-8)
        assert_close(fit.outputs[:, j], solved.outputs, rtol=1e-8, atol=1e-8)
        assert_close(fit.leverage[:, j], solved.leverage, rtol=1e-8, atol=1e-9)
        assert_close(fit.annihilator()[j], solved.annihilator(), rtol=1e-7, atol=1e-8)
        assert_close(fit(X)[:, j], solved.outputs, rtol=1e-8, atol=1e-8)
        assert_close(machine(X)[:, j], solved.outputs, rtol=1e-8, atol=1e-8)


def test_own_regularisations_are_taken_a_few_at_a_time_where_there_are_sets(monkeypatch):
    X, Y, weight = problem(40, c=9)
    machine = tl.LSSVM(tl.kernels.RBF(), regs_of(9), reg_per_output=True)
    labels = torch.arange(40) // 3

    def gradients():
        result = machine.lco(X, Y, labels, weight)
        slopes = torch.autograd.grad(
            result.outputs.square().sum() + result.variance.sum(), machine.parameters()
        )
        return *result, *slopes

    together = gradients()
    sizes = []
    original = spectral.form.Spectral.held_out

    def watched(self, regs, *given):
        sizes.append(regs.shape[-1])
        return original(self, regs, *given)

    monkeypatch.setattr(spectral.path, "_TOGETHER", 2 * 40 * 40)
    monkeypatch.setattr(spectral.form.Spectral, "held_out", watched)
    for received, expected in zip(gradients(), together, strict=True):
        assert_close(received, expected)
    assert set(sizes) == {1, 2}


@every_smoother
@both
@counts
def test_a_batch_with_reg_per_output_equals_its_loop(case, clusters, c):
    X, Y, weight = problem(12, c=c, batch=(3,))
    Y = case.targets(Y)
    regs = regs_of(3, c)
    result = held_out(per_output(case, regs), X, Y, clusters, weight)
    one_problem = held_out(per_output(case, regs), X[0], Y[0], clusters, weight[0])
    assert one_problem.outputs.shape == (3, 12, c)
    for i in range(3):
        one = held_out(per_output(case, regs[i]), X[i], Y[i], clusters, weight[i])
        assert_close(result.outputs[i], one.outputs, rtol=1e-8, atol=1e-8)
        assert_close(result.variance[i], one.variance, rtol=1e-8, atol=1e-8)
        same = held_out(per_output(case, regs[i]), X[0], Y[0], clusters, weight[0])
        assert_close(one_problem.outputs[i], same.outputs, rtol=1e-8, atol=1e-8)


@every_smoother
@pytest.mark.parametrize("clusters", [None, [3, 3, 1, 5, 5, 5, 1, 8]], ids=["rows", "ragged"])
@pytest.mark.parametrize(("c", "batch"), [(2, ()), (6, ()), (6, (2,))], ids=["few", "many", "batch"])
def test_gradcheck_in_every_regularisation(case, clusters, c, batch):
    X, Y, weight = problem(8, d=2, c=c, batch=batch, seed=1)
    Y = case.targets(Y)
    template = per_output(case, regs_of(*batch, c))

    def call(X, y, weight, log_reg):
        machine = copy.copy(template)
        machine._parameters = {"log_reg": None}
        machine.__dict__["log_reg"] = log_reg
        y = Y if case.labels else y
        result = held_out(machine, X, y, clusters, weight)
        fit = machine.solve(X, y, weight)
        return result.outputs, result.variance, fit.coef, fit.bias

    log_reg = template.log_reg.detach().clone()
    inputs = [t.requires_grad_() for t in (X, Y.clone(), weight, log_reg)]
    assert torch.autograd.gradcheck(call, inputs, atol=1e-6, fast_mode=True)
    outputs = call(*inputs)[0]
    (slopes,) = torch.autograd.grad(outputs[..., 1].square().sum(), log_reg)
    assert (slopes[..., 1] != 0).all()
    assert (slopes[..., 0] == 0).all()  # of another output


@every_smoother
@pytest.mark.parametrize("count", [3, 13], ids=["few", "many"])
@pytest.mark.parametrize("own", [False, True], ids=["shared", "own"])
def test_a_solved_path_equals_single_solves(case, count, own):
    X, Y, weight = problem(12, c=2)
    Y = case.targets(Y)
    regs = torch.logspace(-6, 6, count, dtype=torch.float64)
    regs = torch.stack([regs, regs.flip(0)], -1) if own else regs
    path = case.make().solve_path(X, Y, regs, weight)
    assert path.bias.shape == (count, 2)
    for r in range(count):
        for j in range(2):
            reg = regs[r, j] if own else regs[r]
            one = case.make(reg).solve(X, Y, weight)
            scale = one.coef.abs().max()
            assert ((path.coef[r, :, j] - one.coef[:, j]).abs().max() / scale) <= 1e-7
            assert_close(path.bias[r, j], one.bias[j], rtol=1e-7, atol=1e-8)
            assert_close(path(X)[r, :, j], one.outputs[:, j], rtol=1e-7, atol=1e-8)
            assert_close(path.outputs[r, :, j], one.outputs[:, j], rtol=1e-7, atol=1e-8)
    for clusters in (None, RAGGED):
        expected = case.make().path(X, Y, regs, clusters, weight)
        received = path.held_out(clusters)
        # Not `refitted`: rows by blocks and all at once round differently, and so doubt different sets.
        for name in ("outputs", "residuals", "targets", "weight", "variance"):
            assert_close(getattr(received, name), getattr(expected, name), rtol=1e-9, atol=1e-9, msg=name)


@every_smoother
@pytest.mark.parametrize("count", [2, 8], ids=["few", "many"])
def test_gradcheck_of_the_coefficients_of_a_path(case, count):
    X, Y, weight = problem(8, d=2, c=2, seed=1)
    Y = case.targets(Y)
    regs = torch.logspace(-1, 1, count, dtype=torch.float64).requires_grad_()

    def call(X, y, weight, regs):
        path = case.make().solve_path(X, Y if case.labels else y, regs, weight)
        return path.coef, path.bias

    inputs = [t.requires_grad_() for t in (X, Y.clone(), weight)]
    assert torch.autograd.gradcheck(call, (*inputs, regs), atol=1e-6, fast_mode=True)


@pytest.mark.parametrize("make", [tl.RLS, tl.LSSVM], ids=["rls", "lssvm"])
def test_coefficients_of_a_path_are_accurate_far_from_the_origin_and_at_tiny_regularisations(make):
    X, Y, weight = problem(40, d=50, c=2, seed=4)
    regs = torch.logspace(-9, 3, 13, dtype=torch.float64)
    for kernel, inputs in ((tl.kernels.RBF(7.0), X), (tl.kernels.Linear(), X + 1e3)):
        path = make(kernel).solve_path(inputs, Y, regs, weight)
        for r, reg in enumerate(regs):
            one = make(kernel, reg).solve(inputs, Y, weight)
            assert relative(path.coef[r], one.coef) <= 1e-6
            assert relative(path.outputs[r], one.outputs) <= 1e-7


@pytest.mark.parametrize("stream", [False, True], ids=["memory", "stream"])
@pytest.mark.parametrize("make", ["linear", "sparse"])
def test_reg_per_output_of_many_rows(make, stream):
    X, Y, weight = problem(500, d=4, c=3)
    regs = torch.tensor([0.1, 3.0, 50.0], dtype=torch.float64)
    labels = torch.arange(500) // 9

    def machine(reg, **options):
        if make == "linear":
            return tl.LSSVM(tl.kernels.Linear(), reg, **options)
        return tl.SparseLSSVM(tl.kernels.RBF(2.0), reg, basis=X[:20].clone(), **options)

    together = machine(regs, reg_per_output=True)
    rows = (tl.Stream(X, Y, weight, block=64, progress=False),) if stream else (X, Y, weight)
    outputs = together.loo(*rows).outputs
    clusters = (*rows[:2], labels, *rows[2:]) if not stream else (rows[0], None, labels)
    grouped = together.lco(*clusters).outputs
    together.fit(*rows)
    tl.criteria.press(together.loo(*rows)).backward()
    for j, reg in enumerate(regs):
        one = machine(reg)
        received = outputs[:, j]
        expected = one.loo(X, Y[:, j], weight).outputs
        assert_close(received, expected, rtol=1e-9, atol=1e-9)
        received = grouped[:, j]
        expected = one.lco(X, Y[:, j], labels, weight).outputs
        assert_close(received, expected, rtol=1e-9, atol=1e-9)
        received = together(X)[:, j]
        expected = one.fit(X, Y[:, j], weight)(X)
        assert_close(received, expected, rtol=1e-9, atol=1e-9)
        tl.criteria.press(one.loo(X, Y[:, j], weight)).backward()
        share = together.log_reg.grad[j] * 3  # a mean over outputs
        assert_close(share, one.log_reg.grad, rtol=1e-7, atol=1e-9)


def test_a_solved_path_of_a_stream_has_the_coefficients_of_single_machines():
    X, Y, weight = problem(300, d=4, c=2)
    regs = torch.logspace(-2, 2, 5, dtype=torch.float64)
    machine = tl.LSSVM(tl.kernels.Linear())
    path = machine.solve_path(tl.Stream(X, Y, weight, block=64, progress=False), regs=regs)
    expected = machine.solve_path(X, Y, regs, weight)
    assert_close(path.coef, expected.features.coef)
    assert_close(path.offset, expected.features.offset)
    assert_close(path.held_out().outputs, expected.held_out().outputs)
    with pytest.raises(ValueError, match="fit takes one machine, got a path of 5"):
        machine.fit(path)


def test_select_finds_a_regularisation_for_each_output():
    generator = torch.Generator().manual_seed(5)
    X = torch.randn(60, 3, dtype=torch.float64, generator=generator)
    noise = torch.tensor([0.01, 0.7], dtype=torch.float64)
    Y = X.sum(1, keepdim=True).sin() + noise * torch.randn(60, 2, dtype=torch.float64, generator=generator)
    start = torch.ones(2, dtype=torch.float64)
    machine = tl.LSSVM(tl.kernels.RBF(2.0), start, reg_per_output=True)
    machine.kernel.log_lengthscale.requires_grad_(False)
    found = tl.select(machine, X, Y, progress=False)
    assert found.machine.reg.shape == (2,)
    assert found.machine.reg[1] > 5 * found.machine.reg[0]
    for j in range(2):  # each is where the criterion of its own output is least
        nearby = found.machine.reg[j].detach() * torch.logspace(-0.5, 0.5, 11, dtype=torch.float64)
        path = tl.LSSVM(tl.kernels.RBF(2.0)).path(X, Y[:, j], nearby)
        assert tl.criteria.press(path).argmin() in (4, 5, 6)
    several = tl.select(machine, X, Y, search="nelder-mead", starts=2, progress=False, max_evaluations=60)
    assert abs(several.value / found.value - 1) < 0.01
    values = [0.1, 10.0, [found.machine.reg[0].item(), found.machine.reg[1].item()]]
    chosen = tl.select(machine, X, Y, search="grid", grid={"reg": values}, progress=False)
    assert_close(chosen.machine.reg, found.machine.reg)
    assert_close(chosen.value, found.value)
    assert tl.select(machine, X, Y, search="grid", progress=False).value < 1.1 * found.value
    with pytest.raises(ValueError, match="reg must belong to one machine"):
        tl.select(tl.LSSVM(tl.kernels.RBF(), start), X, Y, progress=False)


def test_state_survives_copies_and_repr_tells_the_regularisations():
    machine = tl.RLS(tl.kernels.RBF(), torch.tensor([0.5, 2.0]), reg_per_output=True)
    assert "reg=[0.5, 2] per output" in str(machine)
    twin = copy.deepcopy(machine)
    assert twin.reg_per_output
    assert_close(twin.reg, machine.reg)


def test_a_reg_that_does_not_fit_the_outputs_is_refused():
    X, Y, _ = problem(12, c=3)
    with pytest.raises(ValueError, match=r"reg must be a tensor \(\.\.\., c\).*reg_per_output=True, got 1"):
        tl.LSSVM(tl.kernels.RBF(), 1.0, reg_per_output=True)
    for kernel in (tl.kernels.RBF(), tl.kernels.Linear()):
        machine = tl.LSSVM(kernel, torch.ones(2), reg_per_output=True)
        for call in (machine.loo, machine.solve, machine.fit):
            with pytest.raises(ValueError, match=r"one number for each of the 3 outputs.*got shape \(2,\)"):
                call(X, Y)
    with pytest.raises(ValueError, match=r"reg must hold one number for each of the 1 outputs"):
        machine.loo(X, Y[:, 0])
    with pytest.raises(TypeError, match="regs must be regularisations"):
        machine.solve_path(X, Y)


@pytest.mark.parametrize("c", [2, 7], ids=["few", "many"])
def test_pairs_are_left_out_with_the_regularisation_of_their_output(c):
    X, Y, weight = problem(20, c=c)
    regs = regs_of(c)
    fit = tl.LSSVM(tl.kernels.RBF(), regs, reg_per_output=True).solve(X, Y.sign(), weight)
    received = tl.criteria.leave_pair_out_auc(fit, per_output=True)
    for j, reg in enumerate(regs):
        alone = tl.LSSVM(tl.kernels.RBF(), reg).solve(X, Y[:, j].sign(), weight)
        assert_close(received[j], tl.criteria.leave_pair_out_auc(alone))


@both
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", ["linear", "sparse"])
def test_a_path_goes_on_by_singular_values_where_eigenvalues_do_not_converge(
    name, dtype, clusters, monkeypatch
):
    X, Y, weight = (t.to(dtype) for t in problem(12, c=2))
    kernel = tl.kernels.Linear() if name == "linear" else tl.kernels.RBF(3.0)
    machine = tl.LSSVM(kernel) if name == "linear" else tl.SparseLSSVM(kernel, basis=X[:3])
    regs = torch.logspace(-2, 2, 7, dtype=dtype)
    expected = machine.path(X, Y, regs, clusters, weight)

    def fails(*args):
        raise torch.linalg.LinAlgError("linalg.eigh: The algorithm failed to converge")

    monkeypatch.setattr(torch.linalg, "eigh", fails)
    assert_close(machine.path(X, Y, regs, clusters, weight).outputs, expected.outputs)
    assert_close(machine.solve_path(X, Y, regs, weight).held_out(clusters).outputs, expected.outputs)
    with pytest.raises(ValueError, match="X must be finite"):
        machine.path(X * torch.nan, Y, regs, clusters, weight)


def test_features_whose_squares_overflow_have_no_path():
    X, Y, _ = problem(12)
    with pytest.raises(ValueError, match="not positive definite to working precision"):
        tl.LSSVM(tl.kernels.Linear()).path(X * 1e200, Y, torch.logspace(-2, 2, 7, dtype=X.dtype))
