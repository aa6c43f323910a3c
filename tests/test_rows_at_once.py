"""Rows in memory that are solved at once: batches, paths of batches, and derivatives of every order."""

import pytest
import torch
from torch.testing import assert_close

import torchloo as tl

REGS = torch.tensor([0.05, 1.0, 20.0], dtype=torch.float64)
MACHINES = {"rls": tl.RLS, "lssvm": tl.LSSVM}


def randn(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def problem(*batch, offset=0.0):
    """Rows (..., 7, 3) with two outputs and weights."""
    return randn(*batch, 7, 3) + offset, randn(*batch, 7, 2, seed=1), 0.3 + randn(*batch, 7, seed=2).abs()


@pytest.mark.parametrize("name", MACHINES)
def test_coefficients_and_outputs_have_derivatives_of_order_two(name):
    machine = MACHINES[name](tl.kernels.Linear(), reg=0.4)
    inputs = [t.requires_grad_() for t in (*problem(), machine.log_reg)]

    def solved(X, y, weight, log_reg):
        def call(X, y, weight):
            fit = machine.solve(X, y, weight)
            return fit.outputs, fit(X[:2] + 1.0), fit.bias

        return torch.func.functional_call(_Call(machine, call), {"machine.log_reg": log_reg}, (X, y, weight))

    assert torch.autograd.gradcheck(solved, inputs)
    assert torch.autograd.gradgradcheck(solved, inputs)


class _Call(torch.nn.Module):
    """A function that uses a machine, as a module that has it."""

    def __init__(self, machine, function):
        super().__init__()
        self.machine, self.function = machine, function

    def forward(self, *inputs):
        return self.function(*inputs)


def test_a_penalty_has_derivatives_of_order_two():
    X, Y, weight = problem()
    root = torch.eye(3, dtype=torch.float64) + 0.2 * randn(3, 3, seed=3)

    def solved(X, Y, root, weight):
        fit = tl.functional.ridge(X, Y, root @ root.mT, weight)
        return fit.coef, fit.outputs, fit.held_out().residuals

    inputs = [t.requires_grad_() for t in (X, Y, root, weight)]
    assert torch.autograd.gradcheck(solved, inputs)
    assert torch.autograd.gradgradcheck(solved, inputs)


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("clusters", [None, torch.tensor([0, 0, 1, 2, 2, 2, 2])], ids=["rows", "clusters"])
@pytest.mark.parametrize("regs", [REGS, REGS.unsqueeze(-1) * torch.tensor([1.0, 3.0])], ids=["shared", "own"])
def test_paths_of_a_batch_are_those_of_its_problems_with_a_graph_and_without(name, clusters, regs):
    machine, (X, y, weight) = MACHINES[name](tl.kernels.Linear()), problem(2, offset=3.0)
    with torch.no_grad():
        received = machine.path(X, y, regs, clusters, weight)
    X.requires_grad_()
    with_graph = machine.path(X, y, regs, clusters, weight)
    for k in range(2):
        expected = machine.path(X[k], y[k], regs, clusters, weight[k])
        for field in ("outputs", "residuals", "variance"):
            for found in (received, with_graph):
                assert_close(getattr(found, field)[:, k], getattr(expected, field), rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("regs", [REGS, REGS.unsqueeze(-1) * torch.tensor([1.0, 3.0])], ids=["shared", "own"])
def test_coefficients_of_paths_of_a_batch_are_those_of_each_regularisation(regs):
    X, y, weight = problem(2)
    path = tl.LSSVM(tl.kernels.Linear()).solve_path(X, y, regs, weight)
    for r, reg in enumerate(regs.expand(3, 2) if regs.ndim > 1 else regs.unsqueeze(-1).expand(3, 2)):
        for j in range(2):
            one = tl.LSSVM(tl.kernels.Linear(), reg[j]).solve(X, y[..., j], weight)
            assert_close(path.coef[r, ..., j], one.coef)
            assert_close(path.bias[r, ..., j], one.bias)
            received = path.features.coef[r, ..., j]
            expected = one.features.coef[..., 0]
            assert_close(received, expected)


def test_overlapping_sets_that_are_lost_are_refitted_as_each_alone():
    X, y, _ = problem()
    X[:, 2] = 0.0
    X[:2, 2] = torch.tensor([1.0, 2.0])  # a feature that is hardly penalised, and that two rows have
    R = torch.diag(torch.tensor([0.3, 0.3, 1e-12], dtype=torch.float64))
    pairs = [([0], [0, 1]), ([1], [1, 0, 4]), ([0, 3], [0, 3]), ([1], [1, 2, 0])]
    received = tl.functional.ridge(X, y, R).held_out(sets=pairs)
    assert received.refitted.tolist() == [True, True, False, False, True]
    start = 0
    for predicted, left in pairs:
        kept = [row for row in range(7) if row not in left]
        coef = tl.functional.ridge(X[kept], y[kept], R).coef
        stop = start + len(predicted)
        assert_close(received.outputs[start:stop], X[predicted] @ coef, rtol=1e-7, atol=1e-8)
        start = stop
