"""Outputs of solved machines at new inputs: those of a refit, and their gradients through both sides."""

import pytest
import reference
import torch
from cases import CASES, IDS, MACHINES, Case, gram, problem, relative
from torch.testing import assert_close

import torchloo as tl

every_machine = pytest.mark.parametrize("case", MACHINES, ids=[case.name for case in MACHINES])
every_smoother = pytest.mark.parametrize("case", CASES, ids=IDS)
N, Q = 12, 4


def trained_only(case: Case, X, Y, reg, weight, X_new):
    """What a machine trained on the rows X says of X_new, for one problem."""
    if case.coded:
        targets = reference.code(Y, weight)
        return reference.solve_kfd(gram(X, X, "rbf"), targets, reg, weight)(gram(X_new, X, "rbf"))
    rows = torch.cat([X, X_new])
    count = len(X_new)
    targets = torch.cat([Y, Y[:2], Y[: count - 2]])  # those of the new rows do not matter
    weights = torch.cat([weight, weight.new_ones(count)])
    return case.expected(rows, targets, reg, weights, [0] * len(X) + [1] * count)[len(X) :]


def new_points(batch=(), seed=5, dtype=torch.float64):
    return torch.randn(*batch, Q, 3, dtype=dtype, generator=torch.Generator().manual_seed(seed))


@every_machine
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("c", [None, 3])
@pytest.mark.parametrize("batch", [(), (2,)], ids=["one", "episodes"])
def test_outputs_at_new_inputs_are_those_of_a_refit(case, weighted, c, batch):
    X, Y, weight = problem(N, c=c or 1, batch=batch)
    Y = case.targets(Y)
    X_new = new_points(batch)
    weights = weight if weighted else torch.ones_like(weight)
    targets = Y[..., 0] if c is None else Y
    machine = case.make(0.1)
    outputs = machine.solve(X, targets, weight if weighted else None)(X_new)
    problems = zip(*(t.reshape(-1, *t.shape[len(batch) :]) for t in (X, Y, weights, X_new)), strict=True)
    expected = torch.stack([trained_only(case, x, y, 0.1, w, new) for x, y, w, new in problems])
    expected = expected.reshape(*batch, Q, c or 1)
    assert relative(outputs, expected[..., 0] if c is None else expected) <= 1e-8
    assert_close(outputs, machine.fit(X, targets, weight if weighted else None)(X_new), rtol=1e-12, atol=0)


@every_smoother
def test_badly_conditioned_problems_keep_their_digits(case):
    X, Y, weight = problem(N, seed=3)
    X[7] = X[2]
    Y = case.targets(Y)
    X_new = new_points()
    outputs = case.make(1e-4).solve(X, Y, weight)(X_new)
    assert relative(outputs, trained_only(case, X, Y, 1e-4, weight, X_new)) <= 1e-8


class Episode(torch.nn.Module):
    """The outputs at new inputs as a function of everything that they depend on."""

    def __init__(self, machine):
        super().__init__()
        self.machine = machine

    def forward(self, X, Y, weight, X_new):
        return self.machine.solve(X, Y, weight)(X_new)


@every_smoother
@pytest.mark.parametrize("batch", [(), (2,)], ids=["one", "episodes"])
def test_gradients_run_through_both_sides(case, batch):
    X, Y, weight = problem(6, c=2, batch=batch)
    Y = case.targets(Y)
    X_new = new_points(batch)
    episode = Episode(case.make(0.3))
    names = [name for name, _ in episode.named_parameters()]

    def call(X, Y, weight, X_new, *parameters):
        return torch.func.functional_call(
            episode, dict(zip(names, parameters, strict=True)), (X, Y, weight, X_new)
        )

    inputs = [X, Y, weight, X_new, *(p.detach().clone() for p in episode.parameters())]
    for k, tensor in enumerate(inputs):
        tensor.requires_grad_(k != 1 or not case.labels)
    assert torch.autograd.gradcheck(call, inputs)
    if not batch:
        assert torch.autograd.gradgradcheck(call, inputs)


def test_a_network_and_a_basis_are_trained_by_the_loss_at_new_inputs():
    X, Y, _ = problem(N, c=1, batch=(3,))
    X_new = new_points((3,))
    network = torch.nn.Linear(3, 2, bias=False).double()  # on a shift of the features no output depends
    basis = torch.nn.Parameter(X[0, :5].clone())
    for machine in (
        tl.LSSVM(tl.kernels.Linear(features=network), reg=0.1),
        tl.KFD(tl.kernels.RBF(features=network), reg=0.1),
        tl.SparseLSSVM(tl.kernels.RBF(features=network), reg=0.1, basis=basis),
    ):
        machine.zero_grad()
        y = Y[..., 0].sign() if isinstance(machine, tl.KFD) else Y[..., 0]
        machine.solve(X, y)(X_new).square().mean().backward()
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in machine.parameters())


@every_smoother
def test_vmap_over_episodes_is_their_batch(case):
    X, Y, weight = problem(N, c=2, batch=(3,))
    Y = case.targets(Y)
    X_new = new_points((3,))
    machine = case.make(0.3)
    together = machine.solve(X, Y, weight)(X_new)
    mapped = torch.func.vmap(lambda *episode: machine.solve(*episode[:3])(episode[3]))(X, Y, weight, X_new)
    assert_close(mapped, together, rtol=1e-9, atol=1e-12)


@every_smoother
def test_a_batch_of_regularisations_predicts_one_set_of_inputs(case):
    X, Y, weight = problem(N)
    Y = case.targets(Y)
    X_new = new_points()
    outputs = case.make(torch.tensor([0.1, 10.0], dtype=torch.float64)).solve(X, Y, weight)(X_new)
    assert outputs.shape == (2, Q, 2)
    for reg, received in zip((0.1, 10.0), outputs, strict=True):
        assert_close(received, case.make(reg).solve(X, Y, weight)(X_new))


@every_machine
def test_single_precision_stays_single(case):
    X, Y, _ = problem(N)
    X = X.float()
    Y = case.targets(Y).float()
    X_new = new_points().float()
    outputs = case.make(1.0).solve(X, Y)(X_new)
    assert outputs.dtype == torch.float32
    assert_close(outputs, case.make(1.0).fit(X, Y)(X_new))
    expected = case.make(1.0).solve(X.double(), Y.double())(X_new.double())
    assert relative(outputs, expected) <= 1e-3


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_precomputed_and_sparse_rows():
    X, Y, _ = problem(N)
    X_new = new_points()
    kernel = tl.kernels.Polynomial(degree=2)
    expected = tl.LSSVM(kernel, 0.5).solve(X, Y)(X_new)
    precomputed = tl.LSSVM(tl.kernels.Precomputed(), 0.5).solve(kernel(X), Y)
    assert_close(precomputed(kernel(X_new, X)), expected)
    received = tl.LSSVM(kernel, 0.5).solve(X.to_sparse_csr(), Y)(X_new.to_sparse_csr())
    assert_close(received, expected)


@pytest.mark.parametrize("kernel", [tl.kernels.RBF(1.5), tl.kernels.Linear()], ids=["rbf", "linear"])
def test_support_vector_machines_give_values_without_a_graph(kernel):
    X, Y, _ = problem(N, c=3)
    X_new = new_points().requires_grad_()
    machine = tl.SVC(kernel, C=2.0)
    solved = machine.solve(X.requires_grad_(), MACHINES[-1].targets(Y))
    assert not solved(X_new).requires_grad
    assert_close(solved(X_new), solved.from_kernel(kernel(X_new, X)).detach())


@pytest.mark.parametrize(
    "machine",
    [
        tl.LSSVM(tl.kernels.Linear(), 0.3),
        tl.RLS(tl.kernels.Linear(), 0.3),
        tl.SparseLSSVM(tl.kernels.RBF(1.3), 0.3, basis=7),
    ],
    ids=["lssvm", "rls", "sparse"],
)
@pytest.mark.parametrize("c", [None, 2])
def test_a_solved_stream_predicts_as_it_was_solved(machine, c):
    X, Y, weight = problem(60, c=c or 1)
    y = Y[:, 0] if c is None else Y
    X_new = new_points()
    solved = machine.solve(tl.Stream(X, y, weight, block=13, progress=False))
    expected = machine.solve(X, y, weight)(X_new).detach()
    assert_close(solved(X_new), expected, rtol=1e-9, atol=1e-12)
    with torch.no_grad():
        for parameter in machine.kernel.parameters():
            parameter.add_(1.0)
    assert_close(solved(X_new), expected, rtol=1e-9, atol=1e-12)
    with pytest.raises(TypeError, match="X_new must have the dtype of the stream"):
        solved(X_new.float())
    with pytest.raises(ValueError, match="X_new must be finite"):
        solved(X_new / 0)


def test_a_fit_of_matrices_names_what_to_use():
    X, Y, _ = problem(N)
    K = tl.kernels.RBF()(X)
    for fit in (tl.functional.rls(K, Y, 1.0), tl.functional.kfd(K, Y.sign(), 1.0)):
        with pytest.raises(TypeError, match=r"Fit.from_kernel\(K_new\)"):
            fit(new_points())
    with pytest.raises(TypeError, match=r"SVMFit.from_kernel\(K_new\)"):
        tl.functional.svm(K.detach(), MACHINES[-1].targets(Y)[:, 0], 1.0)(new_points())


def test_what_has_changed_since_solve_is_noticed():
    X, Y, _ = problem(N)
    X_new = new_points()
    machine = tl.LSSVM(tl.kernels.RBF(), 0.5)
    solved = machine.solve(X, Y)
    with torch.no_grad():
        machine.kernel.log_lengthscale.add_(1.0)
    with pytest.raises(RuntimeError, match="parameters of the kernel were changed after solve"):
        solved(X_new)
    solved = machine.solve(X, Y)
    machine.kernel.log_lengthscale = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))
    with pytest.raises(RuntimeError, match="parameters of the kernel were changed after solve"):
        solved(X_new)
    solved = machine.solve(X, Y)
    X[0] = 0.0
    with pytest.raises(RuntimeError, match="inputs were changed in place after solve"):
        solved(X_new)


@every_machine
def test_new_inputs_are_checked(case):
    X, Y, _ = problem(N)
    solved = case.make().solve(X, case.targets(Y))
    X_new = new_points()
    with pytest.raises(ValueError, match=r"X must have 3 columns, as in fit, got shape \(4, 2\)"):
        solved(X_new[:, :2])
    with pytest.raises(ValueError, match="X must be finite"):
        solved(X_new / 0)
    with pytest.raises(TypeError, match="must have the dtype of X"):
        solved(X_new.float())
