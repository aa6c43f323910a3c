"""Probabilities from held-out outputs."""

import copy
import io

import numpy as np
import pytest
import torch
from cases import problem
from torch.testing import assert_close

import torchloo as tl


def held_out(f, y):
    weight = torch.ones(f.shape[: f.ndim - (f.ndim > 1 and f.shape[-1] < 10)], dtype=f.dtype)
    return tl.HeldOut(f, y - f, y, weight, None, torch.ones_like(f), weight > 2)


def noisy(n, c=None, seed=0):
    """Outputs that tell the classes, more or less, and targets -1 and +1."""
    generator = torch.Generator().manual_seed(seed)
    label = torch.randint(c or 2, (n,), generator=generator)
    targets = 2 * torch.eye(c or 2, dtype=torch.float64)[label] - 1
    f = 0.7 * targets + torch.randn(n, c or 2, dtype=torch.float64, generator=generator)
    return (f, targets) if c else (f[:, 1], targets[:, 1])


def smoothed(members):
    """Targets of Platt, class by class, (n, c)."""
    n, c = members.shape
    targets = torch.empty(n, c, dtype=torch.float64)
    for i in range(n):
        own = int(members[i].argmax())
        rows = sum(1 for j in range(n) if int(members[j].argmax()) == own)
        for k in range(c):
            targets[i, k] = (rows + 1 if k == own else 1) / (rows + c)
    return targets


def test_platt_has_the_least_cross_entropy():
    f, y = noisy(60)
    platt = tl.calibrate(held_out(f, y))
    targets = smoothed(torch.stack([y < 0, y > 0], -1).double())[:, 1]
    theta = torch.stack([platt.scale, platt.shift]).requires_grad_()
    loss = torch.nn.functional.binary_cross_entropy_with_logits(theta[0] * f + theta[1], targets)
    (gradient,) = torch.autograd.grad(loss, theta)
    assert gradient.abs().max() <= 1e-10
    received = platt(f)
    expected = (theta[0] * f + theta[1]).sigmoid().detach()
    assert_close(received, expected)


def test_temperature_has_the_least_cross_entropy():
    f, Y = noisy(60, 3)
    module = tl.calibrate(held_out(f, Y))
    scale = module.scale.clone().requires_grad_()
    loss = torch.nn.functional.cross_entropy(scale * f, smoothed((Y > 0).double()))
    assert torch.autograd.grad(loss, scale)[0].abs() <= 1e-10
    received = module(f).sum(-1)
    expected = torch.ones(60, dtype=torch.float64)
    assert_close(received, expected)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_probabilities_do_not_depend_on_the_units_of_the_outputs(scale):
    f, y = noisy(40)
    received = tl.calibrate(held_out(scale * f, y))(scale * f)
    expected = tl.calibrate(held_out(f, y))(f)
    assert_close(received, expected)


@pytest.mark.parametrize("shift", [0.0, 3.0])
def test_separable_and_constant_outputs_have_finite_answers(shift):
    y = torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0]).double()
    apart = tl.calibrate(held_out(y + shift, y))(y + shift)
    expected = torch.tensor([3 / 4, 3 / 4, 1 / 5, 1 / 5, 1 / 5]).double()
    assert_close(apart, expected)  # Platt's targets
    same = torch.full_like(y, shift)
    received = tl.calibrate(held_out(same, y))(same)
    expected = torch.full_like(y, (2 * 3 / 4 + 3 / 5) / 5)
    assert_close(received, expected)


def test_probabilities_of_a_machine_are_calibrated_on_new_rows():
    generator = torch.Generator().manual_seed(0)
    X, y = tl.datasets.twonorm(300, generator=generator)
    X_new, y_new = tl.datasets.twonorm(4000, generator=generator)
    X, X_new = X[:, :3], X_new[:, :3]  # of which three columns leave much in doubt
    machine = tl.LSSVM(tl.kernels.RBF(2.0), 3.0).fit(X, y)
    p = tl.calibrate(machine.loo(X, y))(machine(X_new)).detach()
    for low in np.arange(0.1, 0.9, 0.2):
        some = (p >= low) & (p < low + 0.2)
        assert abs((y_new[some] > 0).double().mean().item() - p[some].mean().item()) < 0.08


def test_a_batch_has_numbers_of_its_own_and_states_load():
    parts = [noisy(50, seed=seed) for seed in range(3)]
    f, y = (torch.stack(part) for part in zip(*parts, strict=True))
    together = tl.calibrate(held_out(f, y))
    for i, part in enumerate(parts):
        received = together(f)[i]
        expected = tl.calibrate(held_out(*part))(part[0])
        assert_close(received, expected, rtol=1e-8, atol=1e-10)
    file = io.BytesIO()
    torch.save(together.state_dict(), file)
    file.seek(0)
    fresh = tl.Platt()
    fresh.load_state_dict(torch.load(file, weights_only=True))
    for other in (fresh, copy.deepcopy(together)):
        assert_close(other(f), together(f), rtol=0, atol=0)
    assert together(f.float()).dtype == torch.float32


@pytest.mark.parametrize("machine", [tl.LSSVM, tl.KFD, tl.SVC])
def test_two_and_several_classes_of_machines(machine):
    X, _, _ = problem(40, seed=2)
    labels = torch.arange(40) % 3
    X = X + labels[:, None]
    several = machine(tl.kernels.RBF(2.0)).fit(X, labels)
    p = tl.calibrate(several.loo(X, labels))(several(X))
    assert p.shape == (40, 3)
    assert (p.argmax(-1) == labels).double().mean() > 0.6
    two = machine(tl.kernels.RBF(2.0)).fit(X, labels == 2)
    p = tl.calibrate(two.loo(X, labels == 2))(two(X))
    assert p.shape == (40,)
    assert p[labels == 2].mean() > p[labels != 2].mean()


def test_weights_count_only_where_they_are_asked_for():
    f, y = noisy(30)
    once = held_out(f, y)
    weight = torch.where(y > 0, 3.0, 1.0).double()
    heavy = once._replace(weight=weight)
    assert_close(tl.calibrate(heavy)(f), tl.calibrate(once)(f))
    three = torch.cat([f, f[y > 0], f[y > 0]]), torch.cat([y, y[y > 0], y[y > 0]])
    for own in (tl.calibrate(heavy, weight="own"), tl.calibrate(once, weight=weight)):
        assert_close(own(f), tl.calibrate(held_out(*three))(f))


def test_bad_input_raises():
    f, y = noisy(30)
    with pytest.raises(TypeError, match="must be a HeldOut"):
        tl.calibrate(f)
    with pytest.raises(ValueError, match="both classes"):
        tl.calibrate(held_out(f, y.abs()))
    with pytest.raises(ValueError, match="outputs must be finite"):
        tl.calibrate(held_out(f * torch.nan, y))
    with pytest.raises(ValueError, match="one positive and one negative"):
        tl.calibrate(held_out(f, torch.arange(30.0).double() - 5.5))
    with pytest.raises(ValueError, match="a column for each class"):
        tl.Temperature()(f)


def test_outputs_that_hardly_differ_converge():
    """Class weights of many orders make held-out outputs such as these."""
    y = torch.tensor([-1.0, 1.0, -1.0, 1.0, 1.0, -1.0], dtype=torch.float64)
    f = -1 + 1e-7 * torch.tensor([0.0, 3.0, 1.0, 2.0, 4.0, 2.5], dtype=torch.float64)
    received = tl.calibrate(held_out(f, y))(f)
    expected = tl.calibrate(held_out(1e7 * (f + 1), y))(1e7 * (f + 1))
    torch.testing.assert_close(received, expected, rtol=1e-6, atol=1e-6)


def test_rounding_of_the_loss_near_its_minimum_stops_no_search():
    for seed, c, n in (
        (13, 3, 43),
        (247, 3, 31),
        (335, 4, 37),
        (454, 3, 33),
        (483, None, 62),
        (591, None, 47),
    ):
        tl.calibrate(held_out(*noisy(n, c, seed)))  # each took more than 100 steps, of rounding alone
