"""What a new user tries first, each in a few lines as they would write them."""

import torch

import torchloo as tl


def test_one_regularisation_for_each_output():
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(80, 4, generator=generator)
    noise = torch.tensor([0.05, 2.0])
    Y = X[:, :2] + noise * torch.randn(80, 2, generator=generator)
    machine = tl.LSSVM(tl.kernels.RBF(3.0), reg=torch.tensor([1.0, 1.0]), reg_per_output=True)
    found = tl.select(machine, X, Y, progress=False).machine
    assert found.reg[1] > 10 * found.reg[0]
    assert found(X).shape == found.loo(X, Y).outputs.shape == (80, 2)
    press = tl.criteria.press(found.loo(X, Y), per_output=True)
    assert (torch.autograd.grad(press.sum(), found.log_reg)[0].abs() < 0.1 * press).all()


def test_h_block_of_a_time_series():
    generator = torch.Generator().manual_seed(0)
    t = torch.arange(150.0)
    walk = torch.randn(150, generator=generator).cumsum(0)
    machine = tl.LSSVM(tl.kernels.RBF(4.0), reg=0.1)
    loo = tl.criteria.mse(machine.loo(t[:, None], walk))
    held_out = machine.lso(t[:, None], walk, tl.splits.h_block(t, buffer=5))
    assert held_out.outputs.shape == (150,)
    assert tl.criteria.mse(held_out) > 2 * loo
