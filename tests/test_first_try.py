"""What a PyTorch user does first, each in a few lines."""

import torch
from torch import nn
from torch.testing import assert_close

import torchloo as tl


def conv_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 8))


def striped_images(n, seed=0):
    """Images (n, 1, 8, 8) with a bright row, whose number is the class (n,)."""
    generator = torch.Generator().manual_seed(seed)
    digits = torch.randint(4, (n,), generator=generator)
    X = 0.3 * torch.randn(n, 1, 8, 8, generator=generator)
    X[torch.arange(n), 0, 2 * digits] += 1
    return X, digits


def test_images_with_class_indices():
    X, digits = striped_images(60)
    machine = tl.LSSVM(tl.kernels.RBF(lengthscale=2.0, features=conv_net(), event_dim=3), reg=0.1)
    optimiser = torch.optim.Adam(machine.parameters(), lr=0.01)
    for _ in range(20):
        optimiser.zero_grad()
        held_out = machine.loo(X, digits)
        tl.criteria.cross_entropy(held_out, scale=3.0).backward()
        optimiser.step()
    assert held_out.outputs.shape == (60, 4)
    new, classes = striped_images(100, seed=1)
    assert (machine.fit(X, digits).predict_class(new) == classes).float().mean() > 0.95


def test_minibatch_training_and_checkpoint(tmp_path):
    X, digits = striped_images(120)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, digits), batch_size=40)

    def make():
        kernel = tl.kernels.Linear(features=conv_net(), event_dim=3)
        machine = tl.LSSVM(kernel, reg=1.0, classes=range(4))
        return machine, torch.optim.Adam(machine.parameters(), lr=0.01)

    def epoch(machine, optimiser):
        losses = []
        for batch, labels in loader:
            optimiser.zero_grad()
            loss = tl.criteria.press(machine.loo(batch, labels))
            loss.backward()
            optimiser.step()
            losses.append(loss.item())
        return sum(losses)

    machine, optimiser = make()
    first = epoch(machine, optimiser)
    torch.save({"machine": machine.state_dict(), "optimiser": optimiser.state_dict()}, tmp_path / "step.pt")
    second = epoch(machine, optimiser)
    assert second < first

    again, other = make()
    state = torch.load(tmp_path / "step.pt")
    again.load_state_dict(state["machine"])
    other.load_state_dict(state["optimiser"])
    assert epoch(again, other) == second
    assert_close(again.fit(X, digits)(X), machine.fit(X, digits)(X))


def test_autocast():
    X, digits = striped_images(60)
    machine = tl.LSSVM(tl.kernels.RBF(lengthscale=2.0, features=conv_net(), event_dim=3), reg=0.1)
    expected = machine.loo(X, digits).outputs
    with torch.autocast("cpu", dtype=torch.bfloat16):
        held_out = machine.loo(X, digits)
        tl.criteria.press(held_out).backward()
    assert held_out.outputs.dtype == torch.float32
    assert_close(held_out.outputs, expected, rtol=0.1, atol=0.1)  # features have 8 bits
    assert all(p.grad.isfinite().all() for p in machine.parameters())


def test_episodes_with_a_query_loss_and_its_gradient():
    torch.manual_seed(0)
    support, query = torch.randn(8, 10, 3), torch.randn(8, 5, 3)
    network = nn.Sequential(nn.Linear(3, 16), nn.Tanh())
    head = tl.RLS(tl.kernels.Linear(features=network), reg=0.1)

    def loss():
        solved = head.solve(support, support[..., 0].sin())
        return (solved(query) - query[..., 0].sin()).square().mean()

    optimiser = torch.optim.Adam(head.parameters(), lr=0.01)
    before = loss()
    for _ in range(20):
        optimiser.zero_grad()
        loss().backward()
        optimiser.step()
    assert loss() < 0.8 * before

    value = loss()  # the same by hand, for every episode
    by_hand = 0.0
    for S, Q in zip(support, query, strict=True):
        Z, Z_new = network(S), network(Q)
        a = torch.linalg.solve(Z @ Z.T + head.reg.float() * torch.eye(10), S[:, 0].sin())
        by_hand = by_hand + (Z_new @ (Z.T @ a) - Q[:, 0].sin()).square().mean() / 8
    assert_close(value, by_hand, rtol=1e-4, atol=1e-6)
    parameters = list(head.parameters())
    for ours, theirs in zip(
        torch.autograd.grad(value, parameters), torch.autograd.grad(by_hand, parameters), strict=True
    ):
        assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
