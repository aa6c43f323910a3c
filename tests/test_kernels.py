"""Kernels: their formulas, composition, accuracy, derivatives, errors and devices."""

import copy
import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import gradcheck, gradgradcheck
from torch.func import functional_call, grad, jacrev, vmap
from torch.testing import assert_close

from torchloo.kernels import (
    RBF,
    Boolean,
    Kernel,
    Linear,
    Matern,
    Polynomial,
    Precomputed,
    Product,
    Scaled,
    Sum,
)

D = 3
ARD = torch.tensor([0.7, 1.1, 2.3], dtype=torch.float64)


def points(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def with_duplicates(n: int = 5, d: int = D) -> Tensor:
    X = points(n, d)
    X[n - 1] = X[0]
    return X


def squared(x: list[float], z: list[float], lengthscale: list[float]) -> float:
    return math.fsum(((a - b) / s) ** 2 for a, b, s in zip(x, z, lengthscale, strict=True))


def dot(x: list[float], z: list[float]) -> float:
    return math.fsum(a * b for a, b in zip(x, z, strict=True))


def matern(nu: float, x: list[float], z: list[float], lengthscale: list[float]) -> float:
    a = math.sqrt(2 * nu * squared(x, z, lengthscale))
    polynomial = {0.5: 1.0, 1.5: 1 + a, 2.5: 1 + a + a * a / 3}[nu]
    return polynomial * math.exp(-a)


def by_loops(formula, X: Tensor, Z: Tensor) -> Tensor:
    return torch.tensor([[formula(x, z) for z in Z.tolist()] for x in X.tolist()], dtype=torch.float64)


FORMULAS = {
    "linear": (Linear(), dot),
    "quadratic": (Polynomial(), lambda x, z: (dot(x, z) + 1) ** 2),
    "cubic": (Polynomial(degree=3, offset=0.4), lambda x, z: (dot(x, z) + 0.4) ** 3),
    "homogeneous": (Polynomial(degree=2, offset=0.0), lambda x, z: dot(x, z) ** 2),
    "boolean": (Boolean(rate=0.3), lambda x, z: 1.3 ** dot(x, z)),
    "rbf": (RBF(lengthscale=0.8), lambda x, z: math.exp(-squared(x, z, [0.8] * D) / 2)),
    "rbf ard": (RBF(lengthscale=ARD), lambda x, z: math.exp(-squared(x, z, ARD.tolist()) / 2)),
    "rbf rate": (RBF.from_rate(0.6), lambda x, z: math.exp(-0.6 * squared(x, z, [1.0] * D))),
    "rbf rates": (
        RBF.from_rate([0.5, 2.0, 3.0]),
        lambda x, z: math.exp(-squared(x, z, [math.sqrt(1 / eta) for eta in (0.5, 2.0, 3.0)])),
    ),
    "matern 1/2": (Matern(nu=0.5, lengthscale=0.8), lambda x, z: matern(0.5, x, z, [0.8] * D)),
    "matern 3/2": (Matern(nu=1.5, lengthscale=0.8), lambda x, z: matern(1.5, x, z, [0.8] * D)),
    "matern 5/2 ard": (Matern(nu=2.5, lengthscale=ARD), lambda x, z: matern(2.5, x, z, ARD.tolist())),
    "sum": (
        RBF() + Linear(),
        lambda x, z: math.exp(-squared(x, z, [1.0] * D) / 2) + dot(x, z),
    ),
    "product": (Matern(nu=1.5) * Boolean(), lambda x, z: matern(1.5, x, z, [1.0] * D) * 2 ** dot(x, z)),
    "scaled": (2.5 * Linear() * 2, lambda x, z: 5 * dot(x, z)),
}
SMOOTH = [name for name in FORMULAS if name != "matern 1/2"]
STATIONARY = [RBF(0.9), RBF(ARD), Matern(0.5, 0.9), Matern(1.5, 0.9), Matern(2.5, ARD)]


def pure(kernel: Kernel, *data: Tensor):
    """The kernel as a function of its data and parameters, and both as leaves that need gradients."""
    names = [name for name, _ in kernel.named_parameters()]
    leaves = [t.detach().clone().requires_grad_() for t in (*data, *kernel.parameters())]

    def function(*leaves: Tensor) -> Tensor:
        parameters = dict(zip(names, leaves[len(data) :], strict=True))
        return functional_call(kernel, parameters, leaves[: len(data)])

    return function, leaves


@pytest.mark.parametrize("name", FORMULAS)
def test_kernel_matrix_equals_formula_by_loops(name):
    kernel, formula = FORMULAS[name]
    X = with_duplicates()
    Z = points(4, D, seed=1)
    received = kernel(X, Z)
    expected = by_loops(formula, X, Z)
    assert_close(received, expected, rtol=1e-13, atol=1e-14)
    assert_close(kernel(X), by_loops(formula, X, X), rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("batch", [(), (2, 3)])
def test_diagonal_is_that_of_the_matrix(name, batch):
    kernel = FORMULAS[name][0]
    X = points(*batch, 70, D)
    received = kernel.diagonal(X)
    expected = kernel(X).diagonal(dim1=-2, dim2=-1)
    assert_close(received, expected, rtol=1e-13, atol=1e-14)


def test_diagonal_of_batches_of_kernels_of_features_and_of_kernels_of_your_own():
    class Mine(Kernel):
        def _evaluate(self, X: Tensor, Z: Tensor | None) -> Tensor:
            return X @ (X if Z is None else Z).mT + 1

    X = points(70, D)
    rates = torch.tensor([0.1, 0.2], dtype=torch.float64)
    net = nn.Linear(D, 2).double()
    for kernel in (Boolean(rates), rates * RBF(rates.unsqueeze(-1)), Mine(), Polynomial(features=net)):
        received = kernel.diagonal(X)
        expected = kernel(X).diagonal(dim1=-2, dim2=-1)
        assert_close(received, expected)
    received = Precomputed().diagonal(X @ X.T)
    expected = X.square().sum(-1)
    assert_close(received, expected)


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize(("x_batch", "z_batch"), [((2, 3), (2, 3)), ((2, 1), (3,)), ((), (2,))])
def test_batch_equals_its_loop(name, x_batch, z_batch):
    kernel = FORMULAS[name][0]
    X = points(*x_batch, 5, D)
    Z = points(*z_batch, 4, D, seed=1)
    batch = torch.broadcast_shapes(x_batch, z_batch)
    pairs = zip(
        X.expand(*batch, 5, D).reshape(-1, 5, D), Z.expand(*batch, 4, D).reshape(-1, 4, D), strict=True
    )
    expected = torch.stack([kernel(x, z) for x, z in pairs]).reshape(*batch, 5, 4)
    assert_close(kernel(X, Z), expected, rtol=1e-12, atol=1e-14)
    if x_batch == z_batch:
        assert_close(kernel(X).flatten(0, 1), torch.stack([kernel(x) for x in X.flatten(0, 1)]))


@pytest.mark.parametrize("kind", [RBF, lambda s: Matern(0.5, s), lambda s: Matern(2.5, s)])
@pytest.mark.parametrize("x_batch", [(), (4, 2)])
def test_lengthscales_of_two_dimensions_are_a_batch(kind, x_batch):
    X = points(*x_batch, 5, D)
    shared = torch.tensor([[0.5], [2.0]], dtype=torch.float64)
    ard = torch.stack([ARD, 2 * ARD])
    for lengthscale in (shared, ard):
        received = kind(lengthscale)(X)
        assert received.shape == (*(x_batch or (2,)), 5, 5)
        for b, own in enumerate(lengthscale):
            one = kind(own if own.numel() > 1 else own.item())
            assert_close(received.select(-3, b), one(X.select(-3, b) if x_batch else X))


@pytest.mark.parametrize(
    "kind", [Boolean, lambda v: Polynomial(3, v), lambda v: Scaled(RBF(), v), lambda v: Linear() * v]
)
def test_scalar_parameters_take_a_batch(kind):
    X = points(2, 5, D)
    values = torch.tensor([0.5, 2.0], dtype=torch.float64)
    received = kind(values)(X)
    expected = torch.stack([kind(v.item())(x) for v, x in zip(values, X, strict=True)])
    assert_close(received, expected)
    received = kind(values)(X[0])
    expected = torch.stack([kind(v.item())(X[0]) for v in values])
    assert_close(received, expected)


@pytest.mark.parametrize("d", [1, D, 16, 17, 40])
@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_unit_diagonal_and_symmetry_are_exact(d, batch, dtype):
    X = points(*batch, 700, d, dtype=dtype) + 3  # several tiles
    for kernel in (RBF(1.7), Matern(0.5), Matern(1.5), Matern(2.5)):
        K = kernel(X)
        assert K.dtype == dtype
        assert bool((K.diagonal(dim1=-2, dim2=-1) == 1).all())
        assert torch.equal(K, K.mT)
    for kernel in (Linear(), Polynomial(), Boolean(0.01)):
        assert torch.equal(kernel(X), kernel(X).mT)


@pytest.mark.parametrize("d", [D, 40])
def test_tiles_fit_together(d):
    X = points(700, d)
    Z = points(900, d, seed=1)
    scale = math.sqrt(d)
    for A, B in ((X, None), (X, Z), (Z, X)):
        other = A if B is None else B
        difference = torch.stack([(a - other).square().sum(-1) for a in A])
        received = RBF(scale)(A, B)
        expected = torch.exp(-difference / (2 * d))
        assert_close(received, expected, rtol=1e-12, atol=1e-14)
        received = Matern(0.5, scale)(A, B)
        expected = torch.exp(-(difference / d).sqrt())
        assert_close(received, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("d", [1, D, 40])
@pytest.mark.parametrize("kernel", [RBF(0.9), Matern(0.5, 0.9), Matern(1.5, 0.9), Matern(2.5, 0.9)], ids=str)
def test_float32_far_from_the_origin_keeps_distances(kernel, d):
    X = points(30, d, dtype=torch.float32) / math.sqrt(d) + 1e4
    X[1], X[2] = X[0], X[0] + 1e-2
    Z = X[:7] + 0.25
    for B in (None, Z):
        received = kernel(X, B)
        expected = kernel(X.double(), None if B is None else B.double())
        assert received.dtype == torch.float32
        assert_close(received, expected.float(), rtol=1e-6, atol=1e-7)
    x = X.clone().requires_grad_()
    x64 = X.double().requires_grad_()
    cotangent = points(30, 30, dtype=torch.float32)
    (received,) = torch.autograd.grad(kernel(x), x, cotangent)
    (expected,) = torch.autograd.grad(kernel(x64), x64, cotangent.double())
    assert_close(received, expected.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("d", [D, 40])
def test_a_shift_changes_nothing(d):
    X = torch.round(points(30, d) * 2**20) / 2**20  # so that the shifted points are exact
    for kernel in (RBF(3.0), Matern(0.5, 3.0), Matern(1.5, 3.0), Matern(2.5, 3.0)):
        assert_close(kernel(X + 2**24), kernel(X), rtol=1e-13, atol=1e-14)
        received = kernel(X + 2**24, X[:4] + 2**24)
        expected = kernel(X, X[:4])
        assert_close(received, expected, rtol=1e-13, atol=1e-14)


def test_an_outlier_spoils_no_other_distance():
    X = points(20, D, dtype=torch.float32)
    expected = RBF()(X)
    X[5] = 1e7
    keep = [i for i in range(20) if i != 5]
    assert_close(RBF()(X)[keep][:, keep], expected[keep][:, keep], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("d", [D, 40])
def test_matern_half_resolves_tiny_distances(d):
    X = points(6, d) * 10
    Z = X.clone()
    Z[:, 0] += 2.0**-30 * Z[:, 0].abs()
    distance = (Z[:, 0] - X[:, 0]).abs()
    received = 1 - Matern(0.5)(X, Z).diagonal()
    assert_close(received, distance, rtol=1e-6, atol=0)
    received = Matern(0.5)(X, X.clone()).diagonal()
    expected = torch.ones(6, dtype=torch.float64)
    assert_close(received, expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", SMOOTH)
def test_gradients_with_duplicate_rows_pass_gradcheck(name):
    kernel = FORMULAS[name][0]
    function, leaves = pure(kernel, with_duplicates())
    assert gradcheck(function, leaves)
    assert gradgradcheck(function, leaves)
    X = with_duplicates()
    function, leaves = pure(kernel, X, torch.cat([X[:2], points(2, D, seed=1)]))
    assert gradcheck(function, leaves)
    assert gradgradcheck(function, leaves)


@pytest.mark.parametrize("kernel", [RBF(4.0), Matern(1.5, 4.0), Matern(2.5, 4.0)], ids=str)
def test_gradients_of_the_matmul_route_pass_gradcheck(kernel):
    function, leaves = pure(kernel, with_duplicates(4, 17))
    assert gradcheck(function, leaves)
    assert gradgradcheck(function, leaves)


@pytest.mark.parametrize("d", [D, 17])
def test_matern_half_passes_gradcheck_at_distinct_rows(d):
    function, leaves = pure(Matern(0.5, math.sqrt(d)), points(4, d), points(3, d, seed=1))
    assert gradcheck(function, leaves)
    assert gradgradcheck(function, leaves)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_matern_half_takes_no_gradient_from_equal_rows(dtype):
    kernel = Matern(0.5)
    X = points(1, D, dtype=dtype).repeat(4, 1).requires_grad_()
    (first,) = torch.autograd.grad(kernel(X).sum(), X, create_graph=True)
    assert_close(first, torch.zeros_like(X), rtol=0, atol=0)
    (second,) = torch.autograd.grad(first.square().sum() + first.sum(), X)
    assert bool(second.isfinite().all())
    Y = with_duplicates().to(dtype).requires_grad_()
    (first,) = torch.autograd.grad(kernel(Y).sum(), Y)
    Y_alone = Y.detach()[:-1].clone().requires_grad_()
    weight = torch.ones(4, 4, dtype=dtype)
    weight[0] *= 2  # row 0 stands for itself and its duplicate
    weight[:, 0] *= 2
    (expected,) = torch.autograd.grad((weight * kernel(Y_alone)).sum(), Y_alone)
    assert_close(first[0] + first[-1], expected[0])
    assert_close(first[1:-1], expected[1:])


@pytest.mark.parametrize(
    ("kernel", "matrices"), [(RBF(), 1), (Matern(0.5), 2), (Matern(2.5), 2), (Boolean(), 2)]
)
def test_graph_keeps_few_matrices(kernel, matrices):
    n, kept = 100, {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.numel() >= n * n:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kernel(points(n, D).requires_grad_())
    assert len(kept) <= matrices


@pytest.mark.parametrize("kernel", STATIONARY, ids=str)
def test_func_transforms_agree_with_batches_and_autograd(kernel):
    X = points(4, 6, D)
    Z = points(4, 5, D, seed=1)
    assert_close(vmap(kernel)(X), kernel(X))
    assert_close(vmap(kernel)(X, Z), kernel(X, Z))
    assert_close(vmap(lambda x: kernel(x, Z[0]))(X), kernel(X, Z[0]))
    assert_close(vmap(lambda z: kernel(X[0], z), in_dims=1)(Z.movedim(0, 1)), kernel(X[0], Z))
    assert_close(vmap(vmap(kernel))(X.unsqueeze(1)), kernel(X).unsqueeze(1))

    def loss(x: Tensor) -> Tensor:
        return kernel(x, Z[0]).square().sum()

    x = X.clone().requires_grad_()
    (expected,) = torch.autograd.grad(kernel(x, Z[0]).square().sum(), x)
    assert_close(vmap(grad(loss))(X), expected)
    hessian = torch.autograd.functional.hessian(loss, X[0])
    assert_close(jacrev(grad(loss))(X[0]), hessian)
    parameters = {
        "log_lengthscale": torch.stack([kernel.log_lengthscale.detach(), kernel.log_lengthscale + 1])
    }
    received = vmap(lambda p: functional_call(kernel, p, (X[0],)))(parameters)
    assert_close(
        received[1], functional_call(kernel, {"log_lengthscale": kernel.log_lengthscale + 1}, (X[0],))
    )


class Net(nn.Module):
    def __init__(self, p: int) -> None:
        super().__init__()
        self.linear = nn.Linear(D, p, dtype=torch.float64)

    def forward(self, X: Tensor) -> Tensor:
        return self.linear(X).tanh()


@pytest.mark.parametrize("kernel", [Linear, RBF, Matern, Polynomial, Boolean])
def test_features_come_first_and_train(kernel):
    X = points(5, D)
    Z = points(2, 4, D, seed=1)
    net = Net(2)
    deep = kernel(features=net)
    assert_close(deep(X, Z), kernel()(net(X), net(Z)))
    assert_close(deep(X), kernel()(net(X)))
    deep(X).square().sum().backward()
    assert net.linear.weight.grad is not None
    assert bool(net.linear.weight.grad.ne(0).any())


def test_composed_kernels_apply_their_own_features():
    X = points(5, D)
    Z = points(4, D, seed=1)
    one = Net(2)
    two = Net(4)
    both = Net(D)
    for kind, combine in ((Sum, torch.add), (Product, torch.mul)):
        kernel = kind(RBF(features=one), Linear(features=two), features=both)
        rbf = RBF()(one(both(X)), one(both(Z)))
        linear = two(both(X)) @ two(both(Z)).mT
        expected = combine(rbf, linear)
        assert_close(kernel(X, Z), expected)
    assert len(list((RBF(features=one) + Linear(features=one)).parameters())) == 3


@pytest.mark.parametrize(
    "kernel",
    [
        Linear(),
        Linear(features=Net(2)),
        2.0 * Linear(),
        torch.tensor([2.0, 3.0]) * Linear(),
        Linear() + Linear() * torch.tensor([2.0, 3.0]) + Linear(features=Net(2)),
        Sum(0.5 * Linear(), Linear(features=nn.Identity()), features=Net(D)),
        3.0 * (Linear() + Linear()),
    ],
)
@pytest.mark.parametrize("batch", [(), (2,)])
def test_feature_map_factors_the_kernel(kernel, batch):
    X = points(*batch, 5, D)
    assert kernel.is_linear
    F = kernel.feature_map(X)
    assert F is not None
    assert_close(F @ F.mT, kernel(X))


@pytest.mark.parametrize(
    "kernel",
    [
        RBF(),
        Matern(),
        Polynomial(),
        Boolean(),
        Precomputed(),
        2.0 * RBF(),
        Linear() + RBF(),
        Linear() * Linear(),
    ],
)
def test_other_kernels_have_no_feature_map(kernel):
    assert not kernel.is_linear
    with pytest.raises(NotImplementedError, match="not linear"):
        kernel.feature_map(points(5, 5))


def test_precomputed_returns_its_rows():
    K = RBF()(points(5, D))
    rows = points(3, 5)
    assert Precomputed()(K) is K
    assert Precomputed()(rows, K) is rows
    assert_close((2.0 * Precomputed())(rows, K), 2 * rows)


def test_composition_builds_trainable_positive_scales():
    kernel = 2.0 * RBF(3.0) + Linear() * 0.5
    values = {name: p.exp().item() for name, p in kernel.named_parameters()}
    expected = {
        "kernels.0.log_scale": 2.0,
        "kernels.0.kernel.log_lengthscale": 3.0,
        "kernels.1.log_scale": 0.5,
    }
    assert values == pytest.approx(expected)
    assert all(p.dtype == torch.float64 and p.requires_grad for p in kernel.parameters())
    assert_close((torch.tensor(2.0) * RBF()).scale.detach(), torch.tensor(2.0, dtype=torch.float64))


def test_given_tensors_are_copied():
    lengthscale = torch.ones(D, dtype=torch.float64, requires_grad=True)
    kernel = RBF(lengthscale)
    with torch.no_grad():
        lengthscale.fill_(5)
    assert_close(kernel.lengthscale.detach(), torch.ones(D, dtype=torch.float64))
    assert kernel.log_lengthscale.is_leaf


def test_zero_offset_is_fixed_and_positive_offset_trains():
    assert [name for name, _ in Polynomial(offset=0.2).named_parameters()] == ["log_offset"]
    for fixed in (Polynomial(offset=0.0), Polynomial(offset=[0.0, 2.0])):
        assert list(fixed.parameters()) == []
        assert "log_offset" in fixed.state_dict()
    received = Polynomial(offset=[0.0, 2.0]).offset
    expected = torch.tensor([0.0, 2.0], dtype=torch.float64)
    assert_close(received, expected)


@pytest.mark.parametrize(
    ("kernel", "text"),
    [
        (RBF(1.2), "RBF(lengthscale=1.2)"),
        (RBF([1.0, 0.25]), "RBF(lengthscale=[1, 0.25])"),
        (RBF(torch.ones(20)), "RBF(lengthscale=<shape (20,)>)"),
        (Matern(0.5, 1e-5), "Matern(nu=0.5, lengthscale=1e-05)"),
        (Polynomial(3, 0.0), "Polynomial(degree=3, offset=0)"),
        (Boolean(2.0), "Boolean(rate=2)"),
        (Linear(), "Linear()"),
        (RBF().to("meta"), "RBF(lengthscale=<shape ()>)"),
    ],
)
def test_repr_shows_current_values(kernel, text):
    assert repr(kernel) == text


@pytest.mark.parametrize("name", FORMULAS)
def test_copies_pickles_and_states_survive(name):
    kernel = FORMULAS[name][0]
    X = points(5, D)
    expected = kernel(X)
    assert torch.equal(copy.deepcopy(kernel)(X), expected)
    assert torch.equal(pickle.loads(pickle.dumps(kernel))(X), expected)
    other = copy.deepcopy(kernel)
    for value in other.state_dict().values():
        value.fill_(0.3)
    other.load_state_dict(kernel.state_dict())
    assert torch.equal(other(X), expected)
    assert_close(
        copy.deepcopy(kernel).float()(X), expected, rtol=1e-5, atol=1e-5
    )  # parameters rounded to float32
    with torch.inference_mode():
        assert torch.equal(kernel(X), expected)


@pytest.mark.parametrize("name", FORMULAS)
def test_autocast_leaves_the_kernel_in_full_precision(name):
    kernel = FORMULAS[name][0]
    X = points(5, D, dtype=torch.float32)
    expected = kernel(X, X + 1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(kernel(X, X + 1), expected)
        assert Linear(features=nn.Linear(D, 2))(X).dtype == torch.float32


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("d", [D, 17])
def test_meta_device_runs_forward_and_backward(name, d):
    kernel = copy.deepcopy(FORMULAS[name][0]).to("meta")
    if any(p.numel() > 1 for p in kernel.parameters()) and d != D:
        pytest.skip("ARD for other coordinates")
    X = torch.empty(2, 5, d, device="meta", dtype=torch.float32, requires_grad=True)
    K = kernel(X, torch.empty(4, d, device="meta"))
    assert (K.shape, K.dtype, K.device.type) == ((2, 5, 4), torch.float32, "meta")
    (kernel(X).sum() + K.sum()).backward()
    assert X.grad is not None
    assert X.grad.shape == X.shape
    assert all(p.grad is not None for p in kernel.parameters())


@pytest.mark.parametrize("d", [D, 17])
@pytest.mark.parametrize(
    "build",
    [
        RBF,
        RBF.from_rate,
        lambda v: RBF(v.expand(1, 1)),
        lambda v: Matern(0.5, v),
        lambda v: Matern(2.5, v),
        lambda v: Polynomial(2, v),
        Boolean,
        lambda v: v * RBF(v) + Linear() * Boolean(v),
        lambda v: Precomputed(),
    ],
)
def test_fake_cuda_meets_no_tensor_of_another_device(build, d):
    with FakeTensorMode(), torch.no_grad():
        kernel = build(torch.ones((), device="cuda"))
        X = torch.empty(2, 5, d, device="cuda")
        assert kernel(X).device.type == "cuda"
        Z = torch.empty(d, d, device="cuda")
        assert kernel(X, Z).shape == (2, 5, d)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", FORMULAS)
def test_cuda_agrees_with_cpu(name):
    kernel = FORMULAS[name][0]
    X = with_duplicates()
    received = copy.deepcopy(kernel).cuda()(X.cuda()).cpu()
    expected = kernel(X)
    assert_close(received, expected)


def test_empty_sets_of_points_give_empty_matrices():
    X, none = points(5, D), points(0, D)
    for kernel in (RBF(), Matern(0.5), Linear(), Polynomial(), Boolean()):
        assert kernel(none, X).shape == (0, 5)
        assert kernel(X, none).shape == (5, 0)
        Z = X.clone().requires_grad_()
        kernel(none, Z).sum().backward()
        assert_close(Z.grad, torch.zeros_like(X))


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 12),
    d=st.integers(1, 20),
    seed=st.integers(0, 10_000),
    scale=st.floats(0.05, 20.0),
    duplicates=st.integers(0, 5),
    nu=st.sampled_from([0.5, 1.5, 2.5]),
)
def test_kernel_matrices_are_positive_semidefinite(n, d, seed, scale, duplicates, nu):
    X = points(n, d, seed=seed)
    X = torch.cat([X, X[: min(n, duplicates)]])
    bits = (X > 0).double()
    kernels = [RBF(scale), Matern(nu, scale), Polynomial(2, scale), RBF(scale) * Linear() + 2.0 * Matern(nu)]
    for K in [kernel(X) for kernel in kernels] + [Boolean(min(scale, 2.0))(bits)]:
        eigenvalues = torch.linalg.eigvalsh(K)
        assert eigenvalues[0] >= -1e-13 * len(K) * eigenvalues[-1].clamp_min(1)


X3 = points(4, D)
INF, NAN = float("inf"), float("nan")
BAD_VALUES = [
    (lambda: RBF(0.0), r"RBF: lengthscale must be positive and finite, got 0\.0"),
    (lambda: RBF(NAN), "RBF: lengthscale must be positive and finite"),
    (lambda: RBF([1.0, -1.0]), "RBF: lengthscale must be positive and finite"),
    (lambda: Matern(1.5, INF), "Matern: lengthscale must be positive and finite"),
    (lambda: Matern(2.0), r"Matern: nu must be 0\.5, 1\.5 or 2\.5, got 2\.0"),
    (lambda: Matern(torch.tensor([1.0, 2.0])), "Matern: nu must be 0.5, 1.5 or 2.5, got tensor"),  # type: ignore[arg-type]
    (lambda: RBF.from_rate(-1.0), r"RBF\.from_rate: eta must be positive and finite, got -1\.0"),
    (lambda: Boolean(torch.tensor([1.0, 0.0])), "Boolean: rate must be positive and finite"),
    (lambda: Polynomial(2, -1.0), r"Polynomial: offset must be 0 or positive, got -1\.0"),
    (lambda: Polynomial(2, NAN), "Polynomial: offset must be 0 or positive, got nan"),
    (lambda: Polynomial(0), "Polynomial: degree must be a positive integer, got 0"),
    (lambda: Polynomial(1.5), r"Polynomial: degree must be a positive integer, got 1\.5"),  # type: ignore[arg-type]
    (lambda: -2.0 * RBF(), r"Scaled: scale must be positive and finite, got -2\.0"),
    (lambda: Precomputed(features=Net(2)), "Precomputed: features must be None, got Net"),
    (lambda: RBF()(X3[0]), r"RBF: X must have shape \(\.\.\., n, d\), got shape \(3,\)"),
    (lambda: RBF()(X3, X3[:, :2]), r"RBF: Z must have 3 columns to match X, got shape \(4, 2\)"),
    (lambda: RBF()(X3, X3[0]), r"RBF: Z must have shape \(\.\.\., n, d\)"),
    (
        lambda: Linear()(X3.expand(2, 4, D), X3.expand(3, 4, D)),
        r"Linear: batch shapes must broadcast, got X \(2,\), Z",
    ),
    (
        lambda: RBF([1.0, 2.0])(X3),
        r"RBF: lengthscale must be a scalar or end in 3 to match X, got shape \(2,\)",
    ),
    (
        lambda: RBF(torch.ones(2, 1))(X3.expand(3, 4, D)),
        r"RBF: batch shapes must broadcast, got lengthscale \(2,\)",
    ),
    (lambda: Boolean([1.0, 2.0])(X3.expand(3, 4, D)), "Boolean: batch shapes must broadcast"),
    (
        lambda: Precomputed()(X3, X3),
        r"Precomputed: X must have 4 columns, one for each row of Z, got shape \(4, 3\)",
    ),
    (
        lambda: RBF(features=nn.Flatten(0))(X3),
        r"RBF: features must return \(\.\.\., 4, p\), got shape \(12,\)",
    ),
    (
        lambda: RBF()(X3.to("meta")),
        "RBF: X must be on the device of the kernel, cpu, got meta; move the kernel",
    ),
    (lambda: Linear()(X3, X3.to("meta")), "Linear: Z must be on the device of X, cpu, got meta"),
]
BAD_TYPES = [
    (lambda: RBF()(X3.long()), "RBF: X must be float32 or float64, got torch.int64"),
    (lambda: RBF()(X3, X3.half()), "RBF: Z must have the dtype of X, torch.float64, got torch.float16"),
    (lambda: RBF()(X3.tolist()), "RBF: X must be a torch tensor, got list"),
    (lambda: RBF()(X3, X3.float()), "RBF: Z must have the dtype of X, torch.float64, got torch.float32"),
    (lambda: Linear().feature_map(X3.long()), "Linear: X must be float32 or float64"),
    (lambda: (Linear() + Linear()).feature_map(X3.tolist()), "Sum: X must be a torch tensor"),  # type: ignore[arg-type]
    (lambda: RBF(features=torch.tanh), "RBF: features must be a Module, got builtin_function_or_method"),  # type: ignore[arg-type]
    (lambda: RBF("a"), "RBF: lengthscale must be a positive number or a tensor of them, got 'a'"),  # type: ignore[arg-type]
    (lambda: RBF() + 1.0, "unsupported operand"),
    (lambda: RBF() * "2", "unsupported operand|can't multiply"),
]


@pytest.mark.parametrize(("call", "message"), BAD_VALUES)
def test_bad_values_and_shapes_raise_value_error(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(("call", "message"), BAD_TYPES)
def test_bad_types_raise_type_error(call, message):
    with pytest.raises(TypeError, match=message):
        call()
