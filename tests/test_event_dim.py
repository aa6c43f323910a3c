"""Inputs of any shape, in half precision too: what a machine does with them is what it does with features."""

import copy

import pytest
import torch
from cases import relative
from torch import nn
from torch.testing import assert_close

import torchloo as tl
from torchloo import kernels

N, SHAPE = 14, (1, 5, 5)


def network(seed=0):
    """A small convolutional network, (rows, 1, 5, 5) -> (rows, 3)."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(18, 3)).double()


def images(*batch, seed=1):
    return torch.randn(*batch, *SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def labels(*batch):
    signs = torch.ones(*batch, dtype=torch.float64)
    signs[..., ::2] = -1
    return signs


CONV = network()
# A kernel of images, and the same of what the network makes of them.
KERNELS = {
    "linear": (kernels.Linear(features=CONV, event_dim=3), kernels.Linear()),
    "polynomial": (kernels.Polynomial(2, 0.5, features=CONV, event_dim=3), kernels.Polynomial(2, 0.5)),
    "boolean": (kernels.Boolean(0.3, features=CONV, event_dim=3), kernels.Boolean(0.3)),
    "rbf": (kernels.RBF([1.0, 2.0, 3.0], features=CONV, event_dim=3), kernels.RBF([1.0, 2.0, 3.0])),
    "rate": (kernels.RBF.from_rate(0.2, features=CONV, event_dim=3), kernels.RBF.from_rate(0.2)),
    "matern": (kernels.Matern(2.5, features=CONV, event_dim=3), kernels.Matern(2.5)),
    "scaled": (2.0 * kernels.RBF(features=CONV, event_dim=3), 2.0 * kernels.RBF()),
    "sum": (
        kernels.RBF(features=CONV, event_dim=3) + kernels.Linear(features=CONV, event_dim=3),
        kernels.RBF() + kernels.Linear(),
    ),
    "product": (
        kernels.RBF(features=CONV, event_dim=3) * kernels.Polynomial(features=CONV, event_dim=3),
        kernels.RBF() * kernels.Polynomial(),
    ),
    "features of a sum": (
        kernels.Sum(kernels.RBF(), kernels.Linear(), features=CONV, event_dim=3),
        kernels.RBF() + kernels.Linear(),
    ),
    "linear sum": (
        kernels.Linear(features=CONV, event_dim=3) + 0.5 * kernels.Linear(features=CONV, event_dim=3),
        kernels.Linear() + 0.5 * kernels.Linear(),
    ),
    "flattened": (kernels.RBF(3.0, event_dim=3), kernels.RBF(3.0)),
    "flattened sum": (
        kernels.Linear(event_dim=3) + kernels.RBF(3.0, event_dim=3),
        kernels.Linear() + kernels.RBF(3.0),
    ),
}
every_kernel = pytest.mark.parametrize("name", KERNELS)


def pair(name):
    """The kernel of images, that of rows (..., n, p), and how images become such rows."""

    def embed(X):
        return (
            X.flatten(-3)
            if "flattened" in name
            else CONV(X.flatten(0, -4)).detach().unflatten(0, X.shape[:-3])
        )

    image, rows = copy.deepcopy(KERNELS[name])
    return image, rows, embed


MACHINES = {
    "rls": lambda kernel: tl.RLS(kernel, 0.3),
    "lssvm": lambda kernel: tl.LSSVM(kernel, 0.3),
    "kfd": lambda kernel: tl.KFD(kernel, 0.3),
    "svc": lambda kernel: tl.SVC(kernel, 2.0),
    "sparse": lambda kernel: tl.SparseLSSVM(kernel, 0.3, basis=4),
    "greedy": lambda kernel: tl.SparseLSSVM(kernel, 0.3, basis=tl.basis.greedy(3)),
    "pruned": lambda kernel: tl.SparseLSSVM(kernel, 0.3, basis=tl.basis.pruned(3)),
}


@every_kernel
def test_matrices_and_diagonals(name):
    image, rows, embed = pair(name)
    X = images(2, N)
    Z = images(5, seed=2)
    assert_close(image(X), rows(embed(X)))
    assert_close(image(X, Z), rows(embed(X), embed(Z)))
    assert_close(image.diagonal(X), rows.diagonal(embed(X)))
    assert image.event_dim == 3
    if image.is_linear:
        assert_close(image.feature_map(X), rows.feature_map(embed(X)))


@every_kernel
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("batch", [(), (2,)], ids=["one", "episodes"])
def test_machines_take_inputs_of_any_shape(name, machine, batch):
    image, rows, embed = pair(name)
    X = images(*batch, N)
    y = labels(*batch, N)
    X_new = images(*batch, 3, seed=2)
    ours, theirs = MACHINES[machine](image), MACHINES[machine](rows)
    clusters = [0, 0, 0, 1, 1, 2, 3, 3, 4, 5, 5, 5, 6, 6]
    received = ours.loo(X, y).outputs
    expected = theirs.loo(embed(X), y).outputs
    assert_close(received, expected)
    received = ours.lco(X, y, clusters).outputs
    expected = theirs.lco(embed(X), y, clusters).outputs
    assert_close(received, expected)
    received = ours.solve(X, y)(X_new)
    expected = theirs.solve(embed(X), y)(embed(X_new))
    assert_close(received, expected)
    fitted = ours.fit(X, y)
    received = fitted(X_new)
    expected = theirs.fit(embed(X), y)(embed(X_new))
    assert_close(received, expected)
    again = MACHINES[machine](copy.deepcopy(image))
    again.load_state_dict(fitted.state_dict())
    assert_close(again(X_new), fitted(X_new))
    if machine != "svc":
        regs = torch.tensor([0.1, 1.0, 10.0])
        received = ours.path(X, y, regs).outputs
        expected = theirs.path(embed(X), y, regs).outputs
        assert_close(received, expected)


@pytest.mark.parametrize("name", ["rbf", "linear", "sum", "features of a sum", "flattened sum"])
@pytest.mark.parametrize("machine", ["rls", "lssvm", "kfd", "sparse"])
def test_variances_weights_paths_and_sets_of_inputs_of_any_shape(name, machine):
    image, rows, embed = pair(name)
    X = images(N)
    y = labels(N)
    X_new = images(3, seed=2)
    F, F_new = embed(X), embed(X_new)
    ours, theirs = MACHINES[machine](image), MACHINES[machine](rows)
    for received, expected in zip(
        ours.fit(X, y).predictive(X_new), theirs.fit(F, y).predictive(F_new), strict=True
    ):
        assert_close(received, expected)
    assert_close(ours.solve(X, y).weights_at(X_new), theirs.solve(F, y).weights_at(F_new))
    regs = torch.tensor([0.1, 1.0], dtype=torch.float64)
    assert_close(ours.solve_path(X, y, regs).coef, theirs.solve_path(F, y, regs).coef)
    sets = [([0], [0, 1, 2]), ([5, 6], [4, 5, 6])]
    assert_close(ours.lso(X, y, sets).outputs, theirs.lso(F, y, sets).outputs, equal_nan=True)


@pytest.mark.parametrize("name", ["rbf", "linear", "sum", "features of a sum"])
@pytest.mark.parametrize("machine", ["lssvm", "kfd", "svc", "sparse"])
def test_the_loss_trains_the_network(name, machine):
    image, rows, _ = pair(name)
    X, y = images(N), labels(N)
    ours, theirs = MACHINES[machine](image), MACHINES[machine](rows)
    ours.loo(X, y).outputs.square().sum().backward()
    first = next(m for m in ours.kernel.modules() if isinstance(m, nn.Conv2d))
    outside = network()
    theirs.loo(outside(X), y).outputs.square().sum().backward()
    assert relative(first.weight.grad, outside[0].weight.grad) <= 1e-8


def test_a_basis_of_images_is_trained():
    X, y = images(N), labels(N)
    basis = nn.Parameter(X[:4].clone())
    machine = tl.SparseLSSVM(kernels.RBF(features=network(), event_dim=3), 0.3, basis=basis)
    machine.loo(X, y).outputs.square().sum().backward()
    assert basis.grad.shape == (4, *SHAPE)
    assert basis.grad.abs().sum() > 0
    chosen = tl.basis.rpcholesky(3, generator=torch.Generator().manual_seed(0))(machine.kernel, images(2, N))
    assert chosen.indices.shape == (2, 3)


def streams(X, y, block=5):
    batches = [(X[k : k + 4], y[k : k + 4]) for k in range(0, len(X), 4)]
    return {
        "arrays": tl.Stream(X.numpy(), y, block=block, progress=False),
        "batches": tl.Stream(batches, block=block, progress=False),
    }


@pytest.mark.parametrize("kind", ["arrays", "batches"])
@pytest.mark.parametrize("machine", ["linear", "sparse"])
def test_streams_of_images(kind, machine):
    def make():
        if machine == "linear":
            return tl.LSSVM(kernels.Linear(features=network(), event_dim=3), 0.3)
        return tl.SparseLSSVM(kernels.RBF(features=network(), event_dim=3), 0.3, basis=4)

    X = images(30)
    y = labels(30)
    clusters = [k % 7 for k in range(30)]
    ours, theirs = make(), make()
    stream = streams(X, y)[kind]
    for streamed, whole in (
        (ours.loo(stream), theirs.loo(X, y)),
        (ours.lco(stream, clusters=clusters), theirs.lco(X, y, clusters)),
    ):
        assert_close(streamed.outputs, whole.outputs, rtol=1e-8, atol=1e-10)
        for result, model in ((streamed, ours), (whole, theirs)):
            model.zero_grad()
            result.outputs.square().sum().backward()
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert_close(a.grad, b.grad, rtol=1e-7, atol=1e-9)
    X_new = images(3, seed=2)
    received = ours.solve(stream)(X_new)
    expected = theirs.solve(X, y)(X_new).detach()
    assert_close(received, expected, rtol=1e-8, atol=1e-10)
    received = ours.fit(stream)(X_new)
    expected = theirs.fit(X, y)(X_new)
    assert_close(received, expected, rtol=1e-8, atol=1e-10)


def test_an_image_that_changes_between_passes_is_noticed():
    X, y = images(30), labels(30)
    solved = tl.LSSVM(kernels.Linear(features=CONV, event_dim=3)).solve(tl.Stream(X, y, progress=False))
    X[3, 0, 2, 2] += 1
    with pytest.raises(ValueError, match="X of rows 0 to 29 changed after the first"):
        solved.held_out()
    X[7, 0, 1, 1] = torch.nan
    with pytest.raises(ValueError, match="must be finite, got NaN or infinity at row 7"):
        tl.LSSVM(kernels.Linear(event_dim=3)).loo(tl.Stream(X, y, progress=False))


HALF = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", HALF, ids=["bfloat16", "float16"])
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("name", ["rbf", "linear", "sum", "features of a sum", "flattened", "flattened sum"])
def test_half_precision_is_taken_up_to_single(dtype, machine, name):
    image, rows, _ = pair(name)
    X = images(N).to(dtype)
    y = labels(N)
    X_new = images(3, seed=2).to(dtype)

    def embed(inputs):
        return (
            inputs.flatten(1).float() if "flattened" in name else network().to(dtype)(inputs).detach().float()
        )

    ours, theirs = MACHINES[machine](image), MACHINES[machine](rows)
    for part in ours.kernel.modules():
        if isinstance(part, nn.Sequential):
            part.to(dtype)
    F, F_new = embed(X), embed(X_new)
    for targets in (y.float(), y.to(dtype)):
        held_out = ours.loo(X, targets)
        assert held_out.outputs.dtype == torch.float32
        expected = theirs.loo(F, y.float()).outputs
        assert_close(held_out.outputs, expected, rtol=1e-3, atol=1e-4)
        received = ours.solve(X, targets)(X_new)
        expected = theirs.fit(F, y.float())(F_new)
        assert_close(received, expected, rtol=1e-3, atol=1e-4)
        received = ours.fit(X, targets)(X_new)
        expected = theirs(F_new)
        assert_close(received, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", HALF, ids=["bfloat16", "float16"])
def test_streams_of_half_precision(dtype):
    X = images(30).flatten(1).to(dtype)
    y = labels(30).float()
    machine = tl.LSSVM(kernels.Linear(), 1.0)
    clusters = [k % 7 for k in range(30)]
    expected = machine.loo(X.float(), y)
    together = machine.lco(X.float(), y, clusters)
    batches = [(X[k : k + 4], y[k : k + 4]) for k in range(0, len(X), 4)]
    for stream in (tl.Stream(X, y, block=7, progress=False), tl.Stream(batches, block=7, progress=False)):
        received = machine.loo(stream)
        assert received.outputs.dtype == torch.float32
        assert_close(received.outputs, expected.outputs, rtol=1e-4, atol=1e-4)
        spooled = machine.lco(stream, clusters=clusters)  # batches go to files first
        assert_close(spooled.outputs, together.outputs, rtol=1e-4, atol=1e-4)


def test_half_precision_is_refused_where_matrices_are_given():
    K = torch.eye(4, dtype=torch.bfloat16)
    Y = torch.ones(4, 1)
    with pytest.raises(TypeError, match=r"K must be float32 or float64, got torch\.bfloat16"):
        tl.functional.rls(K, Y, 1.0)
    with pytest.raises(TypeError, match="y must have the dtype of X"):
        tl.RLS(kernels.Linear()).loo(K, Y.double())


def test_shapes_that_do_not_go_together_are_refused():
    X, y = images(N), labels(N)
    kernel = kernels.RBF(features=CONV, event_dim=3)
    with pytest.raises(ValueError, match=r"\(..., n, \*event\), 3 axes an input, .* got shape \(14, 25\)"):
        tl.LSSVM(kernel).loo(X.flatten(1), y)
    with pytest.raises(ValueError, match=r"RBF: X must have shape \(..., n, \*event\), 3 axes"):
        kernel(X.flatten(1))
    with pytest.raises(
        ValueError, match=r"inputs of shape \(1, 5, 5\), as in fit, got shape \(14, 1, 5, 4\)"
    ):
        tl.LSSVM(kernel).fit(X, y)(X[..., :4])
    with pytest.raises(ValueError, match=r"Sum: kernels must take inputs of one shape.* got \[3, 1\]"):
        kernel + kernels.RBF()
    with pytest.raises(ValueError, match=r"Product: .* one shape after features, event_dim 1, got \[3\]"):
        kernels.Product(kernel, features=CONV, event_dim=3)
    with pytest.raises(ValueError, match="Scaled: event_dim must be that of the kernels, 3, got 2"):
        kernels.Scaled(kernel, 2.0, event_dim=2)
    with pytest.raises(ValueError, match="RBF: event_dim must be a whole number, 1 or more, got 0"):
        kernels.RBF(event_dim=0)
    with pytest.raises(ValueError, match=r"features must return \(14, p\), got shape \(14, 2, 3, 3\)"):
        tl.LSSVM(kernels.RBF(features=CONV[0], event_dim=3)).loo(X, y)
    with pytest.raises(ValueError, match=r"event_dim of the kernel.* got a block of shape \(14, 1, 5, 5\)"):
        tl.LSSVM(kernels.Linear()).loo(tl.Stream(X, y, progress=False))


def test_the_number_of_axes_is_shown():
    assert repr(kernels.RBF(event_dim=3)) == "RBF(lengthscale=1, event_dim=3)"


@pytest.mark.parametrize("machine", ["lssvm", "sparse", "svc"])
def test_select_and_validate_take_inputs_of_any_shape(machine):
    X, y = images(30), labels(30)
    ours = MACHINES[machine](kernels.RBF(2.0, event_dim=3))
    theirs = MACHINES[machine](kernels.RBF(2.0))
    options = {"criterion": tl.criteria.squared_hinge, "max_evaluations": 8, "progress": False}
    chosen = [tl.select(ours, X, y, **options), tl.select(theirs, X.flatten(1), y, **options)]
    assert chosen[0].value == pytest.approx(chosen[1].value)
    received = chosen[0].machine(X)
    expected = chosen[1].machine(X.flatten(1))
    assert_close(received, expected)
    folds = tl.splits.k_fold(30, 3, generator=torch.Generator().manual_seed(0))
    estimates = [tl.validate(m, x, y, folds, **options) for m, x in ((ours, X), (theirs, X.flatten(1)))]
    assert_close(*(torch.as_tensor(estimate.scores) for estimate in estimates))
    with pytest.raises(ValueError, match=r"select: X must be \(n, \*event\), 3 axes an input, with at least"):
        tl.select(ours, X.flatten(1), y, **options)


def test_select_trains_a_convolutional_network():
    X, y = images(30), labels(30)
    machine = tl.LSSVM(kernels.RBF(2.0, features=network(), event_dim=3), 0.3)
    before = tl.criteria.mse(machine.loo(X, y)).item()
    chosen = tl.select(machine, X, y, criterion=tl.criteria.mse, max_evaluations=10, progress=False)
    assert chosen.value < before
    stream = tl.Stream(X, y, progress=False)
    linear = tl.LSSVM(kernels.Linear(features=network(), event_dim=3), 0.3)
    found = [
        tl.select(linear, *data, criterion=tl.criteria.mse, max_evaluations=6, progress=False).value
        for data in ((stream,), (X, y))
    ]
    assert found[0] == pytest.approx(found[1], rel=1e-6)


@pytest.mark.parametrize("machine", [tl.LSSVM, tl.KFD, tl.SVC])
@pytest.mark.parametrize(
    "labels", [torch.arange(6) % 2, torch.tensor([-1.0, 1.0] * 3)], ids=["integer", "float"]
)
def test_inputs_of_several_axes_are_told_of_event_dim(machine, labels):
    with pytest.raises(ValueError, match=r"6 inputs of 3 axes each, give the kernel RBF\(event_dim=3\)"):
        machine(tl.kernels.RBF()).loo(torch.randn(6, 1, 8, 8), labels)
    with pytest.raises(ValueError, match=r"got shape \(5,\)$"):
        machine(tl.kernels.RBF()).loo(torch.randn(6, 2), torch.randn(5))
