"""Rows far from the origin: a certificate is of the machine on the rows as they are, whatever their dtype."""

from fractions import Fraction

import pytest
import torch
from reference_svm import held_out
from torch.testing import assert_close

from torchloo.kernels import RBF, Linear, Polynomial, Precomputed
from torchloo.svm import SVC, svm, svm_loo
from torchloo.svm.result import rounded

N = 30
OFFSETS = (0.0, 100.0, 2000.0, 1e4, 1e5, 1e6)


def rows(seed, offset, n=N, d=3):
    """float32 rows around the offset, and labels that they do not quite tell."""
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(n, d, generator=generator, dtype=torch.float64)
    noise = torch.randn(n, generator=generator, dtype=torch.float64)
    y = torch.where(X[:, 0] - 0.5 * X[:, 1] + noise > 0, 1.0, -1.0)
    y[:2] = torch.tensor([1.0, -1.0])
    return (X + offset).float(), y.float()


def centred(X):
    """The same rows in float64, around 0: for linear and stationary kernels the same machine."""
    return X.double() - X.double().mean(-2, keepdim=True)


def exact_centred(X, degree):
    """The matrix of (x . z + 1)^degree without its mean, in rational arithmetic, rounded once."""
    points = [[Fraction(v) for v in row] for row in X.tolist()]
    K = [[(sum(a * b for a, b in zip(x, z, strict=True)) + 1) ** degree for z in points] for x in points]
    n = len(K)
    means = [sum(row) / n for row in K]
    mean = sum(means) / n
    entries = [[float(K[i][j] - means[i] - means[j] + mean) for j in range(n)] for i in range(n)]
    return torch.tensor(entries, dtype=torch.float64)


def wrong(held, truth):
    """Certified rows whose sign is not that of the truth, as far as this is known."""
    return int((held.certified & truth.certified & (held.errors != truth.errors)).sum())


@pytest.mark.parametrize("values", [True, False])
@pytest.mark.parametrize("method", ["auto", "smo"])
@pytest.mark.parametrize("kernel", [Linear(), RBF(1.5)], ids=["linear", "rbf"])
def test_no_certified_sign_is_wrong_and_as_many_are_certified_far_from_the_origin(kernel, method, values):
    points = certified = expected = 0
    for offset in OFFSETS:
        for seed in range(17 if method == "auto" and values else 3):
            X, y = rows(seed, offset)
            for C in (0.01, 1.0):
                machine = SVC(kernel, C)
                held = machine.loo(X, y, method=method, values=values)
                truth = machine.loo(centred(X), y.double(), method=method, values=values)
                assert wrong(held, truth) == 0
                points, certified = points + N, certified + int(held.certified.sum())
                expected += int(truth.certified.sum())
    assert points >= (3000 if method == "auto" and values else 1000)
    assert certified >= 0.99 * expected
    assert expected >= 0.95 * points


@pytest.mark.parametrize("kernel", ["linear", "rbf"])
def test_what_the_rows_around_the_origin_say_is_what_plain_refits_say(kernel):
    for seed, offset in ((0, 2000.0), (1, 1e6)):
        X, y = rows(seed, offset, n=16)
        Z = centred(X)
        K = Z @ Z.T if kernel == "linear" else torch.exp(-torch.cdist(Z, Z).square() / (2 * 1.5**2))
        expected = held_out(K.numpy(), y.double()[:, None].numpy(), torch.ones(16).double().numpy(), None)
        held = SVC(Linear() if kernel == "linear" else RBF(1.5)).loo(X, y)
        assert_close(held.outputs.double(), torch.from_numpy(expected[:, 0]), rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*rounding")
@pytest.mark.parametrize("degree", [2, 3])
def test_no_certified_sign_of_a_polynomial_is_wrong_far_from_the_origin(degree):
    """C for a matrix of size 1: without its mean, which no machine depends on."""
    points = certified = 0
    for offset in OFFSETS:
        for seed in range(9):
            X, y = rows(seed, offset)
            K = exact_centred(X, degree)
            C = (1.0, 30.0)[seed % 2] / float(K.diagonal().mean())
            held = SVC(Polynomial(degree, 1.0), C).loo(X, y)
            assert wrong(held, svm_loo(K, y.double(), C)) == 0
            points, certified = points + N, certified + int(held.certified.sum())
    assert points >= 1500
    assert certified >= points / 2


def wrong_and_certified(K, X, y, C, method="auto"):
    """Of the linear machine on a matrix K of the rows X; nothing where K is refused for want of digits."""
    Z = centred(X)
    try:
        held = SVC(Precomputed(), C).loo(K, y.to(K), method=method)
    except ValueError as failure:
        if "no solution found" not in str(failure):
            raise
        return 0, 0
    return wrong(held, svm_loo(Z @ Z.T, y.double(), C)), int(held.certified.sum())


@pytest.mark.filterwarnings("ignore:.*rounding")
@pytest.mark.parametrize("method", ["auto", "smo"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_certified_sign_of_a_given_matrix_is_wrong_far_from_the_origin(dtype, method):
    certified = {}
    for offset in OFFSETS[:4]:
        for seed in range(8):
            X, y = rows(seed, offset)
            K = (X.double() @ X.double().T).to(dtype)
            false, proved = wrong_and_certified(K, X, y, 0.1, method)
            assert false == 0
            certified[offset] = certified.get(offset, 0) + proved / (8 * N)
    assert certified[0.0] >= 0.95
    assert (certified[1e4] < 0.5) == (dtype == torch.float32)  # these digits are gone
    if dtype == torch.float64:
        assert min(certified.values()) >= 0.95


@pytest.mark.filterwarnings("ignore:.*rounding")
def test_a_matrix_of_float32_digits_proves_no_more_in_float64():
    for seed in range(8):
        X, y = rows(seed, 2000.0)
        K = (X.double() @ X.double().T).float()
        assert wrong_and_certified(K.double(), X, y, 1.0) == (0, 0)


LINEAR = {"linear": Linear(), "scaled": 2.0 * Linear(), "sum": Linear() + 0.5 * Linear()}
KERNELS = {**LINEAR, "rbf": RBF(1.5), "mixed": Linear() + RBF(1.5), "polynomial": Polynomial(2, 1.0)}


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("offset", [0.0, 2000.0, 1e6])
def test_predictions_far_from_the_origin_keep_their_digits(name, offset):
    if name in ("mixed", "polynomial") and offset > 2000:
        pytest.skip("float64 does not hold their kernels there")
    X, y = rows(0, offset)
    X_new, _ = rows(1, offset, n=9)
    C = 1.0
    if name == "polynomial":
        K = exact_centred(torch.cat([X, X_new]), 2)
        C = 1.0 / float(K.diagonal().mean())
    else:
        centre = X.double().mean(0)
        K = KERNELS[name](torch.cat([X, X_new]).double() - centre).detach()
    expected = svm(K[:N, :N], y.double(), C)
    machine = SVC(KERNELS[name], C).fit(X, y)
    received = machine(X_new)
    assert received.dtype == torch.float32
    assert_close(received.double(), expected.from_kernel(K[N:, :N]), rtol=1e-4, atol=1e-4)
    assert_close(machine(X).double(), expected.outputs, rtol=1e-4, atol=1e-4)
    assert_close(machine.solve(X, y).outputs.double(), expected.outputs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", KERNELS)
def test_a_solution_predicts_from_the_kernel_itself(name):
    X, y = (x.double() for x in rows(2, 3.0))
    X_new = rows(3, 3.0)[0].double()
    for kernel, given in ((KERNELS[name], X), (Precomputed(), KERNELS[name](X).detach() + 1e3)):
        fit = SVC(kernel, 0.5).solve(given, y)
        K_new = KERNELS[name](X_new, X).detach() + (1e3 if given is not X else 0.0)
        assert_close(fit.from_kernel(K_new), SVC(KERNELS[name], 0.5).fit(X, y)(X_new), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("method", ["auto", "smo"])
def test_clusters_far_from_the_origin_are_those_of_rows_around_it(method):
    for seed in range(6):
        X, y = rows(seed, 1e6)
        held = SVC(Linear()).lco(X, y, torch.arange(N) % 6, method=method)
        truth = SVC(Linear()).lco(centred(X), y.double(), torch.arange(N) % 6, method=method)
        assert wrong(held, truth) == 0
        assert int(held.certified.sum()) == int(truth.certified.sum())
        near = 1e-5 if method == "auto" else 1e-2  # epsilon is 1e-3
        assert_close(held.outputs.double(), truth.outputs, rtol=near, atol=near)


@pytest.mark.parametrize("name", ["linear", "scaled", "rbf", "mixed"])
def test_gradients_far_from_the_origin_are_those_of_rows_around_it(name):
    X, y = rows(4, 2000.0)
    machine = SVC(KERNELS[name])
    clusters = torch.arange(N) % 6
    for call in (lambda X, y: machine.loo(X, y), lambda X, y: machine.lco(X, y, clusters)):
        single, double = X.clone().requires_grad_(), centred(X).requires_grad_()
        (received,) = torch.autograd.grad(call(single, y).outputs.square().sum(), single)
        (expected,) = torch.autograd.grad(call(double, y.double()).outputs.square().sum(), double)
        assert received.dtype == torch.float32
        assert_close(received.double(), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


class Far(torch.nn.Linear):
    """A network in float32 whose features lie far from the origin."""

    def forward(self, X):
        assert X.dtype == torch.float32
        return 1e4 + super().forward(X)


@pytest.mark.parametrize("composed", [False, True])
def test_features_are_the_rows_whatever_is_far_about_them(composed):
    torch.manual_seed(0)
    network = Far(3, 3)
    X, y = rows(5, 0.0)
    kernel = 2.0 * Linear(features=network) if composed else RBF(1.5, features=network)
    plain = 2.0 * Linear() if composed else RBF(1.5)
    Z = centred(network(X).detach())
    machine = SVC(kernel)
    held, truth = machine.loo(X, y), SVC(plain).loo(Z, y.double())
    assert_close(held.outputs.double(), truth.outputs, rtol=1e-5, atol=1e-5)
    assert wrong(held, truth) == 0
    held.outputs.sum().backward()
    assert network.weight.grad.dtype == torch.float32
    assert bool(network.weight.grad.any())
    assert_close(machine.fit(X, y)(X).double(), SVC(plain).fit(Z, y.double())(Z), rtol=1e-4, atol=1e-4)


def test_an_output_too_small_for_its_dtype_keeps_its_sign():
    outputs = torch.tensor([-1e-60, 1e-60, -0.5, 0.0], dtype=torch.float64)
    received = rounded(outputs, torch.float32)
    assert received.dtype == torch.float32
    assert (received >= 0).tolist() == [False, True, False, True]
    assert_close(received.double(), outputs)
