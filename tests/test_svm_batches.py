"""Batches of SVMs: one tensor program, whose outcome is that of each problem alone."""

import pytest
import torch
from counting import Counting
from svm_problems import rbf, toy
from torch.testing import assert_close

from torchloo.svm import svm_loo


def _grid(n, lengthscales=8, bounds=8):
    """K (L, 1, n, n), y and C (B,) from a smooth to a rough kernel, from few to many support vectors."""
    X, y = toy(40, n=n, noise=1.0)
    scales = torch.logspace(-0.5, 1.0, lengthscales, dtype=torch.float64).tolist()
    return (
        torch.stack([rbf(X, scale) for scale in scales])[:, None],
        y,
        torch.logspace(-1, 2.5, bounds).double(),
    )


@pytest.mark.parametrize("values", [True, False])
@pytest.mark.parametrize("method", ["auto", "path"])
def test_a_batch_dispatches_and_waits_little_more_than_its_costliest_problem(method, values):
    K, y, C = _grid(60)
    options = {"method": method, "values": values}
    alone = []
    with torch.no_grad():
        for k in K[:, 0]:
            for bound in C:
                with Counting() as counting:
                    svm_loo(k, y, bound, **options)
                alone.append((counting.operations, counting.synchronisations))
        with Counting() as counting:
            svm_loo(K, y, C, **options)
    operations, synchronisations = (max(column) for column in zip(*alone, strict=True))
    assert counting.operations <= 3 * operations
    assert counting.synchronisations <= 2 * synchronisations


@pytest.mark.parametrize("values", [True, False])
def test_problems_of_several_sizes_and_ranks_are_solved_as_each_alone(values):
    """Copies leave fewer variables; a linear kernel of rank 2 has dependent free points."""
    X, y = toy(41, n=40, noise=0.6)
    copies = X.clone()
    copies[20:30] = X[:10]
    K = torch.stack([rbf(X, 1.0), X @ X.T, rbf(copies, 0.7), copies @ copies.T, X.round() @ X.round().T])
    C = torch.tensor([0.01, 1.0, 300.0]).double()
    held = svm_loo(K[:, None], y, C, values=values)
    for i, k in enumerate(K):
        for j, bound in enumerate(C):
            alone = svm_loo(k, y, bound, values=values)
            assert_close(held.outputs[i, j], alone.outputs, rtol=1e-6, atol=1e-6)
            both = held.certified[i, j] & alone.certified
            assert bool((held.errors[i, j] == alone.errors)[both].all())
            assert int((held.certified[i, j] != alone.certified).sum()) <= 1


def test_gradients_of_a_batch_are_those_of_each_problem():
    K, y, C = _grid(24, 2, 3)
    K.requires_grad_()
    C.requires_grad_()
    held = svm_loo(K, y, C)
    (held.outputs * torch.arange(24)).sum().backward()
    expected_K, expected_C = torch.zeros_like(K), torch.zeros_like(C)
    for i in range(2):
        for j in range(3):
            k, bound = K[i, 0].detach().requires_grad_(), C[j].detach().requires_grad_()
            (svm_loo(k, y, bound).outputs * torch.arange(24)).sum().backward()
            expected_K[i, 0] += k.grad
            expected_C[j] += bound.grad
    assert_close(K.grad, expected_K, rtol=1e-6, atol=1e-6)
    assert_close(C.grad, expected_C, rtol=1e-6, atol=1e-6)
