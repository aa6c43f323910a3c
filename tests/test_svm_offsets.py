"""Rows far from the origin: a certificate is of the machine on the rows as they are, whatever their dtype."""

from fractions import Fraction

import pytest
import torch
from reference_svm import held_out
from torch.testing import assert_close

from torchloo.kernels import RBF, Linear, Polynomial
from torchloo.svm import SVC, svm_loo

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


def loo_or_refusal(kernel, X, y):
    """The answer, or None where the kernel matrix is refused with a remedy."""
    try:
        return SVC(kernel).loo(X, y)
    except ValueError as failure:
        if "scale the inputs" not in str(failure):
            raise
        return None


@pytest.mark.filterwarnings("ignore:.*rounding leaves decision values")
@pytest.mark.parametrize("degree", [2, 3])
def test_no_certified_sign_of_a_polynomial_is_wrong_far_from_the_origin(degree):
    points = certified = 0
    for offset in OFFSETS:
        for seed in range(9):
            X, y = rows(seed, offset)
            held = loo_or_refusal(Polynomial(degree, 1.0), X, y)
            if held is None:
                print("refused", offset)
                continue
            truth = svm_loo(exact_centred(X, degree), y.double(), 1.0)
            assert wrong(held, truth) == 0
            points, certified = points + N, certified + int(held.certified.sum())
            print(offset, int(held.certified.sum()), int(truth.certified.sum()),  int((held.errors != truth.errors).sum()))
