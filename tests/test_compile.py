"""torch.compile of a loss with leave-one-out in it, as one graph; forward mode, which is refused."""

import shutil

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev
from torch.testing import assert_close

import torchloo as tl
from torchloo import kernels

# Warnings of torch about itself.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch._prims_common.check:FutureWarning"),
]


def randn(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


N, D = 9, 3
Y = randn(N, seed=1).sign()
KERNELS = {
    "linear": kernels.Linear,
    "rbf": lambda: kernels.RBF(lengthscale=torch.tensor([1.0, 2.0, 3.0])),
    "matern 1/2": lambda: kernels.Matern(0.5, lengthscale=2.0),
    "matern 5/2": lambda: kernels.Matern(2.5, lengthscale=2.0),
    "composite": lambda: 2.0 * kernels.RBF(2.0) + kernels.Boolean(0.1) * kernels.Polynomial(2),
    "precomputed": kernels.Precomputed,
}
MACHINES = {
    "RLS": lambda kernel: tl.RLS(kernel, reg=0.5),
    "LSSVM": lambda kernel: tl.LSSVM(kernel, reg=0.5),
    "KFD": lambda kernel: tl.KFD(kernel, reg=0.5),
    "SparseLSSVM": lambda kernel: tl.SparseLSSVM(kernel, reg=0.5, basis=randn(4, D, seed=2)),
}
PAIRS = [
    (machine, kernel)
    for machine in MACHINES
    for kernel in KERNELS
    if (machine, kernel) != ("SparseLSSVM", "precomputed")
]


def rows(kernel):
    X = randn(N, D)
    return X @ X.mT + torch.eye(N, dtype=X.dtype) if kernel == "precomputed" else X


def press(machine, X, y=Y):
    return tl.criteria.press(machine.loo(X, y))


def assert_compiled_equals_eager(machine, X, y, backend):
    torch._dynamo.reset()
    compiled = torch.compile(press, fullgraph=True, backend=backend)
    leaves = [X.requires_grad_(), *machine.parameters()]
    received = compiled(machine, X, y)
    expected = press(machine, X, y)
    assert_close(received, expected)
    assert_close(torch.autograd.grad(received, leaves), torch.autograd.grad(expected, leaves))


@pytest.mark.parametrize(("machine", "kernel"), PAIRS)
def test_compiled_as_one_graph_it_equals_eager(machine, kernel):
    assert_compiled_equals_eager(MACHINES[machine](KERNELS[kernel]()), rows(kernel), Y, "aot_eager")


@pytest.mark.parametrize("kernel", ["linear", "rbf"])
def test_batches_with_many_columns_compile(kernel):
    """So many that distances are one product, and that the quick form would be tried if values were seen."""
    kernel = kernels.Linear() if kernel == "linear" else kernels.RBF(5.0)
    X = randn(2, N, 20)
    y = randn(2, N, seed=1)
    machine = tl.LSSVM(kernel, reg=torch.tensor([1.0, 2.0]))
    compiled = torch.compile(lambda X: press(machine, X, y), fullgraph=True, backend="aot_eager")
    assert_close(compiled(X), press(machine, X, y))


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor_gives_the_same():
    assert_compiled_equals_eager(tl.LSSVM(kernels.RBF(3.0)), randn(N, 20), Y, "inductor")


def test_values_are_not_looked_at_under_compile():
    machine = tl.LSSVM(kernels.RBF())
    X = randn(N, D)
    X[2, 1] = torch.nan
    with pytest.raises(ValueError, match="X must be finite"):
        press(machine, X)
    assert torch.compile(press, fullgraph=True, backend="aot_eager")(machine, X).isnan()


FEW_FEATURES = [("RLS", "linear"), ("LSSVM", "linear"), ("SparseLSSVM", "linear")]


@pytest.mark.parametrize(("machine", "kernel"), FEW_FEATURES)
def test_forward_mode_of_few_features_equals_reverse_mode(machine, kernel):
    X = rows(kernel)
    machine = MACHINES[machine](KERNELS[kernel]())

    def loss(X):
        return press(machine, X)

    assert_close(jacfwd(loss)(X), grad(loss)(X))
    assert_close(hessian(loss)(X), jacrev(grad(loss))(X))


@pytest.mark.parametrize(("machine", "kernel"), [pair for pair in PAIRS if pair not in FEW_FEATURES])
def test_forward_mode_is_refused_in_one_sentence(machine, kernel):
    X = rows(kernel)
    machine = MACHINES[machine](KERNELS[kernel]())

    def loss(X):
        return press(machine, X)

    for derivative in (jacfwd, hessian):
        with pytest.raises(NotImplementedError, match="forward-mode derivatives"):
            derivative(loss)(X)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode derivatives"):
        loss(forward_ad.make_dual(X, torch.ones_like(X)))
    assert jacrev(grad(loss))(X).shape == X.shape * 2


def test_labels_in_a_tensor_break_the_graph_without_a_warning():
    torch._dynamo.reset()
    machine = tl.LSSVM(kernels.RBF()).requires_grad_(False)
    X, clusters = randn(N, D), torch.arange(N) % 3
    compiled = torch.compile(lambda X: machine.lco(X, Y, clusters).outputs, backend="eager")
    assert_close(compiled(X), machine.lco(X, Y, clusters).outputs)
