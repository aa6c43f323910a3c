"""A Fit of explicit features, whose values come from passes over the rows, in every mode of torch."""

import copy
import pickle

import pytest
import torch
from torch.testing import assert_close

import torchloo as tl

N = 9
CLUSTERS = torch.arange(N) % 3


def randn(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


X, Y = randn(N, 3), randn(N, 2, seed=1)
MACHINES = {
    "rls": lambda: tl.RLS(tl.kernels.Linear(), 0.1),
    "lssvm": lambda: tl.LSSVM(tl.kernels.Linear(), 0.1),
    "sparse": lambda: tl.SparseLSSVM(tl.kernels.RBF(1.0), 0.1, basis=X[:2].clone()),
    "per output": lambda: tl.LSSVM(tl.kernels.Linear(), torch.tensor([0.1, 0.2]), reg_per_output=True),
}
every_machine = pytest.mark.parametrize("name", MACHINES)


@every_machine
@pytest.mark.parametrize("clusters", [None, CLUSTERS], ids=["rows", "clusters"])
def test_a_batch_of_cotangents_gives_a_gradient_for_each(name, clusters):
    x = X.clone().requires_grad_()
    residuals = MACHINES[name]().solve(x, Y).held_out(clusters).residuals
    cotangents = randn(3, N, 2, seed=2)
    (received,) = torch.autograd.grad(residuals, x, cotangents, is_grads_batched=True, retain_graph=True)
    expected = [torch.autograd.grad(residuals, x, one, retain_graph=True)[0] for one in cotangents]
    assert_close(received, torch.stack(expected), rtol=1e-9, atol=1e-11)


@every_machine
def test_rows_made_in_inference_mode_can_be_held_out_with_a_graph(name):
    with torch.inference_mode():
        rows = X.clone()
    machine = MACHINES[name]()
    received = machine.solve(rows, Y).held_out().residuals
    assert received.requires_grad
    assert_close(received, machine.solve(X, Y).held_out().residuals)


@every_machine
def test_a_solution_without_a_graph_has_held_out_rows_without_one(name):
    """Not with a gradient in the rows alone, which would be a part of it."""
    x = X.clone().requires_grad_()
    with torch.no_grad():
        solved = MACHINES[name]().solve(x, Y)
    assert not solved.held_out().residuals.requires_grad
    assert not solved.held_out(CLUSTERS).variance.requires_grad


@every_machine
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t))], ids=["copy", "pickle"]
)
def test_a_fit_survives_copies_and_pickle(name, copied):
    machine = MACHINES[name]().requires_grad_(False)
    solved = machine.solve(X * 1.0, Y)
    x = torch.empty(0).new_empty(X.shape, dtype=X.dtype).copy_(X)  # a tensor that was written to
    written = machine.solve(x, Y)
    for one in (solved, written):
        twin = copied(one)
        assert_close(twin.held_out(CLUSTERS).residuals, one.held_out(CLUSTERS).residuals)
        assert_close(twin.leverage, one.leverage)


def test_a_copy_of_a_fit_of_changed_rows_is_refused_too():
    machine, x = MACHINES["lssvm"]().requires_grad_(False), X.clone()
    solved = machine.solve(x, Y)
    x.mul_(2)
    with pytest.raises(RuntimeError, match="changed in place"):
        copy.deepcopy(solved).held_out()


@every_machine
def test_clusters_may_be_a_tensor_within_transforms(name):
    machine = MACHINES[name]()

    def loss(x):
        solved = machine.solve(x, Y)
        return solved.held_out(CLUSTERS).residuals.square().sum()

    x = X.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(x), x)
    assert_close(torch.func.grad(loss)(X), expected, rtol=1e-9, atol=1e-11)
