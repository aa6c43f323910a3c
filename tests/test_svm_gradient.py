"""Gradients of held-out decision values where ties leave singular free sets, or nothing, behind."""

import pytest
import torch
from svm_problems import rbf, toy
from torch.testing import assert_close

import torchloo as tl
from torchloo.svm import svm, svm_lco, svm_loo


def _lattice(seed, n=18, d=2):
    X, y = toy(seed, n=n, d=d)
    return X.clamp(-1, 1).round(), y


@pytest.mark.parametrize("d", [1, 2, 3])
@pytest.mark.parametrize("seed", range(3))
def test_gradients_on_lattice_points_are_those_of_differences(seed, d):
    X, y = _lattice(seed, d=d)
    K, h = X @ X.T, 1e-6
    C = torch.tensor(0.3 + 0.7 * seed, dtype=torch.float64, requires_grad=True)
    held = svm_loo(K.requires_grad_(), y, C)
    K_bar, _ = torch.autograd.grad(held.outputs.square().sum(), (K, C), retain_graph=True)
    assert bool(K_bar.isfinite().all())
    slope = torch.stack([torch.autograd.grad(f, C, retain_graph=True)[0] for f in held.outputs])
    with torch.no_grad():
        low, here, high = (svm_loo(K, y, float(C) + step).outputs for step in (-h, 0.0, h))
    left, right = (here - low) / h, (high - here) / h
    smooth = (left - right).abs() < 1e-4 * (1 + right.abs())  # no event nearby
    assert int(smooth.sum()) >= len(y) // 2
    assert_close(slope[smooth], right[smooth], rtol=1e-3, atol=1e-3)


def test_points_at_zero_alone_may_be_free():
    X = torch.tensor([[0.0, 0.0], [0.0, 1.0], [1.0, -1.0], [1.0, 1.0], [0.0, 0.0]], dtype=torch.float64)
    y = torch.tensor([-1.0, -1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
    for K in (X @ X.T, torch.zeros(5, 5, dtype=torch.float64)):
        (K_bar,) = torch.autograd.grad(svm_loo(K.requires_grad_(), y, 1.0).outputs.sum(), K)
        assert bool(K_bar.isfinite().all())


def test_clusters_that_leave_one_class_have_no_gradient():
    X, _ = toy(4, n=6)
    y = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0], dtype=torch.float64)
    K = rbf(X).requires_grad_()
    held = svm_lco(K, y, 1.0, [0, 0, 0, 1, 1, 1])
    assert held.outputs.tolist() == [-1.0] * 3 + [1.0] * 3
    assert not bool(torch.autograd.grad(held.outputs.sum(), K)[0].any())


def test_a_copy_that_leaves_takes_the_only_free_variable_to_its_bound():
    """Three copies hold 2 C, as much as the other class: without one of them, no variable is free."""
    X = torch.tensor([[0.0], [0.0], [0.0], [1.0], [1.2]], dtype=torch.float64)
    y = torch.tensor([-1.0, -1.0, -1.0, 1.0, 1.0], dtype=torch.float64)
    K, h = rbf(X), 1e-6

    def refitted(K, C):
        """Decision values at the rows without themselves."""
        rows = []
        for r in range(5):
            others = torch.arange(5) != r
            fit = svm(K[others][:, others], y[others], C)
            rows.append(fit.from_kernel(K[r, others][None])[0])
        return torch.stack(rows)

    C = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    held = svm_loo(K.requires_grad_(), y, C)
    assert_close(held.outputs, refitted(K.detach(), 0.5))
    direction = torch.tensor([1.0, -0.5, 2.0, 0.7, -1.5], dtype=torch.float64)
    K_bar, C_bar = torch.autograd.grad(held.outputs @ direction, (K, C))
    with torch.no_grad():
        in_C = (refitted(K, 0.5 + h) - refitted(K, 0.5 - h)) @ direction / (2 * h)
        step = rbf(X * (1 + h)) - K  # copies stay copies
        in_K = (refitted(K + step, 0.5) - refitted(K - step, 0.5)) @ direction / 2
    assert_close(C_bar, in_C, rtol=1e-6, atol=1e-6)
    assert_close((K_bar * step).sum() / h, in_K / h, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["kernel.log_lengthscale", "log_C"])
def test_second_derivatives_are_refused(name):
    X, y = toy(2, n=20)
    machine = tl.SVC(tl.kernels.RBF(1.0))
    parameter = machine.get_parameter(name)
    for held in (machine.loo(X, y), machine.lco(X, y, torch.arange(20) % 5)):
        (first,) = torch.autograd.grad(held.outputs.square().sum(), parameter, create_graph=True)
        with pytest.raises(RuntimeError, match="derivatives of order one only"):
            torch.autograd.grad(first, parameter)
