"""Leave-one-out and leave-cluster-out against refits with 60 digits, however badly conditioned."""

import contextlib
import random
from dataclasses import replace

import pytest
import reference_digits as digits
import torch
from found_draws import FOUND
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mpmath import mp

import torchloo as tl

KERNELS = {"linear": tl.kernels.Linear, "rbf": tl.kernels.RBF, "polynomial": tl.kernels.Polynomial}
EPS = torch.finfo(torch.float64).eps


def make(machine, kernel, reg, n):
    kinds = {"rls": tl.RLS, "lssvm": tl.LSSVM, "kfd": tl.KFD}
    if machine == "sparse":
        return tl.SparseLSSVM(KERNELS[kernel](), reg, basis=max(1, n // 2))
    return kinds[machine](KERNELS[kernel](), reg)


@st.composite
def learning(draw, machines, wide=False):
    """A machine, its kernel, rows, targets, weights and clusters, and the scale of its regularisation.

    Where `wide` is set, a linear kernel has no fewer features than rows.
    """
    machine = draw(st.sampled_from(machines))
    kernel = draw(st.sampled_from(list(KERNELS)))
    n = draw(st.integers(4 if machine == "kfd" else 2, 12))
    d = draw(st.integers(n if wide and kernel == "linear" else 1, 14))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    X = torch.randn(n, d, generator=generator, dtype=torch.float64) * 10 ** draw(st.floats(-1, 1))
    X += draw(st.sampled_from([0.0, 30.0]))
    if n > 2 and draw(st.booleans()):
        X[1] = X[0]
    y = torch.randn(n, generator=generator, dtype=torch.float64)
    if machine == "kfd":
        y = y.sign()
        y[:4] = torch.tensor([1.0, -1.0, 1.0, -1.0])
    weight = 10 ** (12 * torch.rand(n, generator=generator, dtype=torch.float64) - 6)
    if draw(st.booleans()):
        weight = torch.ones_like(weight)
    kinds = [list(range(n)), [i % max(2, n // 3) for i in range(n)]]
    if machine != "kfd":
        kinds.append([0] + [1] * (n - 1))  # one row is left to learn from
    clusters = draw(st.sampled_from(kinds))
    scale = KERNELS[kernel]().diagonal(X).detach().mean().item()
    if machine == "kfd":
        scale = scale**2
    return (machine, kernel, X, y, weight, clusters), scale


@st.composite
def problems(draw):
    """A machine and what it learns from; reg over 20 orders of its scale."""
    problem, scale = draw(learning(["rls", "lssvm", "kfd", "sparse"]))
    return problem, scale * 10 ** draw(st.floats(-10, 10))


@st.composite
def paths(draw):
    """A machine and what it learns from; few or many regs over 20 orders of their scale."""
    problem, scale = draw(learning(["rls", "lssvm", "kfd"], wide=True))
    count = draw(st.sampled_from([4, 7, 7]))
    exponents = draw(st.lists(st.floats(-10, 10), min_size=count, max_size=count))
    return problem, scale * 10 ** torch.tensor(exponents, dtype=torch.float64)


def moved(values, source):
    """The values, each one unit in the last place up or down."""
    signs = torch.tensor([source.choice((-1.0, 1.0)) for _ in range(values.numel())], dtype=values.dtype)
    return values * (1 + EPS * signs.reshape(values.shape))


def movement(machine, kernel, X, y, reg, weight, clusters, basis, expected, seeds):
    """How far refits move at most if rows, targets and weights change by a unit in the last place.

    Kernel values change by a unit of sqrt(k_ii k_jj), but where the machine has the rows of a linear
    kernel to work with.
    """
    by_rows = kernel == "linear" and machine in ("rls", "lssvm")
    worst = mp.mpf(0)
    for seed in seeds:
        source = random.Random(seed)

        def rounding(k_ii, k_jj, source=source):
            return source.choice((-1, 1)) * EPS * mp.sqrt(k_ii * k_jj)

        changed = digits.held_out(
            machine,
            kernel,
            digits.exact(moved(X, source)),
            digits.exact(y if machine == "kfd" else moved(y, source)),
            reg,
            digits.exact(moved(weight, source)),
            clusters,
            basis,
            None if by_rows else rounding,
        )
        worst = max(worst, *(abs(a - b) for a, b in zip(changed, expected, strict=True)))
    return worst


def assert_refitted(problem, reg, outputs, targets, basis=()):
    """The outputs are those of refits with 60 digits, to 1e-8 or to what rounding of the inputs changes."""
    machine, kernel, X, y, weight, clusters = problem
    rows, labels, exact_weight = (digits.exact(t) for t in (X, y, weight))
    reg = mp.mpf(reg.item())
    expected = digits.held_out(machine, kernel, rows, labels, reg, exact_weight, clusters, basis)
    size = max(abs(value) for value in expected) + targets.abs().max().item()
    pairs = zip(outputs.tolist(), expected, strict=True)
    error = max(abs(mp.mpf(output) - value) for output, value in pairs) / size
    if error <= 1e-8:
        return
    given = (machine, kernel, X, y, reg, weight, clusters, basis, expected)
    if error > 100 * movement(*given, range(3)) / size:
        # Changes of random sign may cancel: a few of them may not show how far the refits can move.
        assert error <= 100 * movement(*given, range(3, 24)) / size


@contextlib.contextmanager
def refused_if_undetermined(problem, reg):
    """A machine may refuse what rounding makes indefinite: then the refits are known to no digit."""
    try:
        yield
    except ValueError as refusal:
        if "not positive definite to working precision" not in str(refusal):
            raise
        machine, kernel, X, y, weight, clusters = problem
        reg = mp.mpf(float(reg))
        rows = [digits.exact(t) for t in (X, y, weight)]
        expected = digits.held_out(machine, kernel, *rows[:2], reg, rows[2], clusters)
        size = max(abs(value) for value in expected)
        assert 100 * movement(machine, kernel, X, y, reg, weight, clusters, (), expected, range(8)) >= size


def compare(problem, reg):
    machine, kernel, X, y, weight, clusters = problem
    solver = make(machine, kernel, reg, len(X))
    with refused_if_undetermined(problem, reg):
        fit = solver.solve(X, y, weight)
        basis = [] if fit.kept is None else fit.kept.nonzero()[:, 0].tolist()
        for held_out in (
            replace(fit, rows=None).held_out(clusters),
            solver.lco(X, y, clusters, weight),
        ):  # all at once, by blocks
            assert_refitted(problem, solver.reg, held_out.outputs, held_out.targets, basis)


def compare_path(problem, regs):
    """At the least regularisation, and at the first."""
    machine, kernel, X, y, weight, clusters = problem
    with refused_if_undetermined(problem, regs.min()):
        received = make(machine, kernel, 1.0, len(X)).path(X, y, regs, clusters, weight)
        for r in {0, int(regs.argmin())}:
            assert_refitted(problem, regs[r], received.outputs[r], received.targets[r])


anything = settings(deadline=None, suppress_health_check=list(HealthCheck), database=None)
few = settings(anything, max_examples=200, derandomize=True)
many = settings(anything, max_examples=2000)
few_and_many = pytest.mark.parametrize(
    "examples", [pytest.param(few, id="few"), pytest.param(many, id="many", marks=pytest.mark.slow)]
)


@few_and_many
def test_held_out_outputs_are_those_of_the_refit_to_rounding(examples):
    @examples
    @given(problems())
    def check(problem):
        compare(*problem)

    check()


@few_and_many
def test_outputs_along_a_path_are_those_of_the_refit_to_rounding(examples):
    @examples
    @given(paths())
    def check(path):
        compare_path(*path)

    check()


def randn(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("reg", [1e-6, 1e-10])
@pytest.mark.parametrize("machine", [tl.LSSVM, tl.RLS])
def test_centred_features_of_which_there_are_many_lose_no_digits(machine, reg):
    X = randn(40, 120)
    y = randn(40, seed=1)
    X -= X.mean(0)  # the ones are a null vector of the kernel matrix
    solver = machine(tl.kernels.Linear(), reg)
    quick, dual = solver.loo(X, y).outputs, solver.solve(X, y).held_out().outputs
    rows, targets = digits.exact(X), digits.exact(y)
    K = digits.gram(rows, rows, "linear")
    kept = list(range(1, 40))
    ones = [mp.mpf(1)] * 40
    (expected,) = digits.dual(K, targets, mp.mpf(reg), ones, kept, [0], machine is tl.LSSVM)
    for received in (quick, dual):
        assert abs(received[0].item() - float(expected)) <= 1e-12


ONE_ROW = {
    "lssvm": tl.LSSVM,
    "kfd": tl.KFD,
    "sparse": lambda kernel, reg: tl.SparseLSSVM(kernel, reg, basis=2),
}


@pytest.mark.parametrize("spread", [0.0, 6.0])
@pytest.mark.parametrize("name", ONE_ROW)
@pytest.mark.parametrize("kernel", [tl.kernels.RBF(), tl.kernels.Linear()], ids=["rbf", "linear"])
def test_one_row_to_learn_from_gives_its_own_target(name, kernel, spread):
    for seed in range(100):
        X = randn(8, 5, seed=seed)
        y = randn(8, seed=seed + 100)
        if name == "kfd":
            y = torch.where(torch.arange(8) % 2 == seed % 2, 1.0, y.sign())
            y[1] = -1.0
        generator = torch.Generator().manual_seed(seed)
        weight = 10 ** (spread * (2 * torch.rand(8, dtype=torch.float64, generator=generator) - 1))
        held_out = ONE_ROW[name](kernel, 1e-10).lco(X, y, [0, 1, 1, 1, 1, 1, 1, 1], weight)
        targets = held_out.targets.abs().max().item()
        scale = max(1.0, targets) if name == "kfd" else 1.0  # targets of a light class are large
        assert (held_out.outputs[1:] - held_out.targets[0]).abs().max() <= 1e-9 * scale


@pytest.mark.parametrize("count", [3, 8])
@pytest.mark.parametrize("d", [40, 200])
def test_a_path_of_float32_rows_has_the_digits_of_float32_whatever_its_length(count, d):
    X = randn(60, d).float()
    y = randn(60, seed=1).float()
    regs = torch.logspace(-6, -2, count)
    machine = tl.LSSVM(tl.kernels.Linear())
    received = machine.path(X, y, regs).outputs.double()
    expected = machine.path(X.double(), y.double(), regs.double()).outputs
    assert ((received - expected).abs().amax(-1) <= 1e-6 * expected.abs().amax(-1)).all()


@pytest.mark.parametrize("machine", ["rls", "lssvm"])
@pytest.mark.parametrize("clusters", [list(range(11)), [i % 3 for i in range(11)]], ids=["rows", "sets"])
def test_a_path_of_fewer_features_than_rows_has_the_digits_of_the_rows(machine, clusters):
    """Squared by the normal matrix, a tiny regularisation would be lost beside the heaviest rows."""
    for seed in range(6):
        X = randn(11, 9, seed=seed)
        y = randn(11, seed=seed + 1)
        weight = 10 ** (
            12 * torch.rand(11, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) - 6
        )
        regs = torch.tensor([1e-9, 1.0], dtype=torch.float64)
        solver = make(machine, "linear", 1.0, 11)
        for path in (
            solver.solve_path(X, y, regs, weight).held_out(clusters),
            solver.path(X.unsqueeze(0), y, regs, clusters, weight),  # a batch
        ):
            problem = (machine, "linear", X, y, weight, clusters)
            assert_refitted(problem, regs[0], path.outputs[0].reshape(-1), path.targets[0])


def twins(seed, batch=(), apart=1e-7):
    """A kernel matrix in which rows 0 and 1 nearly coincide, so that their block is nearly singular."""
    X = randn(*batch, 9, 2, seed=seed)
    X[..., 1, :] = X[..., 0, :] + apart
    return tl.kernels.RBF()(X).detach(), randn(*batch, 9, 2, seed=seed + 1)


CLUSTERS = [0, 0, 1, 1, 1, 2, 3, 4, 4]


def test_blocks_close_to_singular_in_some_problems_of_a_batch_equal_their_loop():
    K, Y = twins(0, (3, 2))
    K[1, 0] = torch.eye(9, dtype=torch.float64)
    batch = tl.functional.lssvm(K, Y, 1e-9).held_out(CLUSTERS)
    for i in range(3):
        for j in range(2):
            alone = tl.functional.lssvm(K[i, j], Y[i, j], 1e-9).held_out(CLUSTERS)
            received = batch.outputs[i, j]
            torch.testing.assert_close(received, alone.outputs, rtol=1e-9, atol=1e-9)


def test_gradients_through_blocks_close_to_singular_are_those_of_the_refit():
    K, Y = twins(2, apart=1e-4)
    K.requires_grad_()
    target = randn(9, 2, seed=5)
    outputs = tl.functional.rls(K, Y, 1e-7).held_out(CLUSTERS).outputs
    kept = [2, 3, 4, 5, 6, 7, 8]  # without rows 0 and 1
    system = K[kept][:, kept] + 1e-7 * torch.eye(7)
    refit = K[:2][:, kept] @ torch.linalg.solve(system, Y[kept])
    received = torch.autograd.grad((outputs * target)[:2].sum(), K)[0]
    expected = torch.autograd.grad((refit * target[:2]).sum(), K)[0]
    expected = (expected + expected.mT) / 2
    torch.testing.assert_close(received, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())


@pytest.mark.parametrize("seed", [106, 127, 154, 162, 228])
def test_heavy_and_light_rows_left_out_together_are_solved(seed):
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(8, 9, dtype=torch.float64, generator=generator)
    y = torch.randn(8, dtype=torch.float64, generator=generator)
    weight = 10 ** (12 * torch.rand(8, dtype=torch.float64, generator=generator) - 6)
    for clusters in ([0, 0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 1, 1]):
        compare(("lssvm", "linear", X, y, weight, clusters), 1e-10)


@pytest.mark.parametrize("machine", ["rls", "lssvm"])
def test_copies_left_out_together_are_solved_without_a_factor_of_their_block(machine):
    """Beside 1 / reg, rounding makes it indefinite."""
    y, weight = randn(8, seed=1), torch.ones(8, dtype=torch.float64)
    for seed in (0, 1, 2, 4):
        X = randn(8, 9, seed=seed)
        X[1] = X[0]
        compare((machine, "linear", X, y, weight, [0, 0, 1, 1, 2, 2, 3, 3]), 1e-16)


@pytest.mark.parametrize("function", [tl.functional.rls, tl.functional.lssvm])
def test_matrices_that_are_not_definite_are_refused_in_our_own_words(function):
    K = torch.diag(torch.tensor([1.0, 1.0, -1.0, 1.0, 1.0, 1.0], dtype=torch.float64))
    with pytest.raises(ValueError, match="the regularised matrix is not positive definite"):
        function(K, randn(6, 1), 0.1).held_out([0, 0, 1, 1, 2, 2])


@pytest.mark.parametrize("per_output", [False, True])
@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("machine", [tl.RLS, tl.LSSVM])
def test_a_path_beside_a_row_that_outweighs_all_is_that_of_its_machines(machine, batch, per_output):
    """Its square roots, the singular values, still differ by more than float64 has digits."""
    X, Y, weight = randn(*batch, 9, 3), randn(*batch, 9, 2, seed=1), 0.1 + randn(*batch, 9, seed=2).abs()
    weight[..., 1] = 1e26
    regs = torch.tensor([0.1, 2.0], dtype=torch.float64)
    given = torch.stack([regs, 3 * regs], -1) if per_output else regs
    path = machine(tl.kernels.Linear()).solve_path(X, Y, given, weight)
    held_out = path.held_out()
    for r, reg in enumerate(given.reshape(2, -1)):
        for j, own in enumerate(reg):
            some = slice(j, j + 1) if per_output else slice(None)
            alone = machine(tl.kernels.Linear(), own).solve(X, Y[..., some], weight)
            received = path.features.coef[r][..., some].detach()
            torch.testing.assert_close(received, alone.features.coef.detach(), rtol=1e-9, atol=1e-9)
            received = held_out.outputs[r][..., some].detach()
            torch.testing.assert_close(received, alone.held_out().outputs.detach(), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("seed", [2, 9, 15])
def test_a_tiny_regularisation_of_a_path_with_weights_over_twelve_orders(seed):
    """Rounding that is small beside the heaviest rows is not so beside the lightest."""
    generator = torch.Generator().manual_seed(seed)
    X = 30 + 0.12 * torch.randn(11, 11, dtype=torch.float64, generator=generator)
    y = torch.where(torch.rand(11, generator=generator) > 0.5, 1.0, -1.0).double()
    y[:2] = torch.tensor([1.0, -1.0])
    weight = 10 ** (12 * torch.rand(11, dtype=torch.float64, generator=generator) - 6)
    clusters = [0, 1, 2] * 3 + [0, 1]
    regs = torch.tensor([1e8] * 6 + [1e3], dtype=torch.float64)
    received = tl.KFD(tl.kernels.Linear()).path(X, y, regs, torch.tensor(clusters), weight)
    problem = ("kfd", "linear", X, y, weight, clusters)
    assert_refitted(problem, regs[-1], received.outputs[-1], received.targets[-1])


INNER_PRODUCTS = {
    "linear": tl.kernels.Linear(),
    "polynomial": tl.kernels.Polynomial(offset=100.0),
    "sum": tl.kernels.Linear() + tl.kernels.RBF(2.0),
    "product": tl.kernels.Linear() * tl.kernels.RBF(20.0),
}


@pytest.mark.parametrize("kernel", list(INNER_PRODUCTS))
@pytest.mark.parametrize("machine", ["rls", "lssvm", "kfd", "sparse"])
def test_float32_rows_far_from_the_origin_keep_the_digits_of_float32(machine, kernel):
    """Inner products are nearly constant there: what tells rows apart is lost if they are float32."""
    X = (50 + randn(40, 6)).float()
    y = randn(40, seed=1).sign().float()
    new = (50 + randn(9, 6, seed=2)).float()
    regs = torch.logspace(-1, 2, 4)
    kinds = {"rls": tl.RLS, "lssvm": tl.LSSVM, "kfd": tl.KFD}
    make = kinds.get(machine, lambda *given: tl.SparseLSSVM(*given, basis=12))

    def everything(dtype):
        solver = make(INNER_PRODUCTS[kernel], 1.0)
        rows = X.to(dtype)
        labels = y.to(dtype)
        clusters = torch.arange(40) % 9
        yield solver.loo(rows, labels).outputs
        yield solver.lco(rows, labels, clusters).outputs
        yield solver.path(rows, labels, regs.to(dtype)).outputs
        yield solver.solve(rows, labels).held_out(clusters).outputs
        yield solver.solve(rows, labels)(new.to(dtype))
        yield solver.fit(rows, labels)(new.to(dtype))
        yield solver.frozen()(new.to(dtype))
        yield solver.predictive(new.to(dtype))[1]
        if machine == "sparse":
            stream = tl.Stream(rows, labels, progress=False)
            yield solver.loo(stream).outputs
            yield solver.fit(stream)(new.to(dtype))

    for received, expected in zip(everything(torch.float32), everything(torch.float64), strict=True):
        assert received.dtype == torch.float32
        assert (received - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_gradients_of_float32_rows_far_from_the_origin_are_those_of_float64():
    y = randn(20, seed=1).sign()
    found = []
    for dtype in (torch.float32, torch.float64):
        X = (50 + randn(20, 3)).float().to(dtype).requires_grad_()
        tl.KFD(tl.kernels.Linear()).loo(X, y.to(dtype)).outputs.square().sum().backward()
        found.append(X.grad)
    assert found[0].dtype == torch.float32
    received, expected = found
    assert (received - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("name", list(FOUND))
def test_draws_that_once_failed(name):
    machine, kernel, reg, clusters, *tensors = FOUND[name]
    X, y, weight = (torch.tensor(values, dtype=torch.float64) for values in tensors)
    compare((machine, kernel, X, y, weight, clusters), reg)


@pytest.mark.parametrize("seed", [15, 17, 104, 163])
def test_a_heavy_row_left_out_of_equal_rows_leaves_their_weighted_mean(seed):
    """About the mean of all rows, the feature that equal rows share would be like a second bias."""
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(4, 1, generator=generator, dtype=torch.float64)
    X[:3] = X[0]
    y = torch.randn(4, generator=generator, dtype=torch.float64)
    weight = 10 ** (12 * torch.rand(4, generator=generator, dtype=torch.float64) - 6)
    received = tl.LSSVM(tl.kernels.Linear(), 1e-10).loo(X, y, weight).outputs[3]
    assert (received - (weight[:3] @ y[:3]) / weight[:3].sum()).abs() <= 1e-7
