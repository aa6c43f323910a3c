"""What kernels, criteria and options declare of themselves is complete, and all that the others go by."""

import pytest
import torch
from torch.testing import assert_close

import torchloo as tl
from torchloo.catalogue import KERNELS, MACHINES
from torchloo.kernels import Choice, Kernel, Positive
from torchloo.search.parameters import Space

DOUBLE = torch.float64
KINDS = [kind for name in tl.kernels.__all__ if issubclass(kind := getattr(tl.kernels, name), Kernel)]
COMBINED = {Kernel, tl.kernels.Scaled, tl.kernels.Sum, tl.kernels.Product}
NOT_BY_NAME = COMBINED | {tl.kernels.Precomputed}  # for which X is not a table


def total_distance(Z, each):
    """A start from data: the mean sum of absolute differences, which no kernel of the library takes."""
    return (Z.unsqueeze(0) - Z.unsqueeze(1)).abs().sum(-1).mean()


class Laplace(Kernel):
    """exp(-width^-1 sum_j |x_j - z_j|): a kernel of one's own, with all that a kernel declares."""

    choices = (Choice("laplace", "a Laplace kernel", lambda d: Laplace(width=float(d))),)
    width = Positive("how fast rows cease to inform one another", total_distance, unit="inputs")

    def __init__(self, width=1.0):
        super().__init__(width=width)

    def _evaluate(self, X, Z):
        Z = X if Z is None else Z
        away = (X.unsqueeze(-2) - Z.unsqueeze(-3)).abs().sum(-1)
        return torch.exp(-away / self._lift("width", X))


class NotLifted(Laplace):
    """The same, though its author has forgotten that a width may be a batch."""

    def _evaluate(self, X, Z):
        Z = X if Z is None else Z
        return torch.exp(-(X.unsqueeze(-2) - Z.unsqueeze(-3)).abs().sum(-1) / self.width)


class OneByOne(NotLifted):
    """The same, which says so."""

    width = Positive("how fast rows cease to inform one another", total_distance, batched=False)


def table(n=24, d=2):
    generator = torch.Generator().manual_seed(5)
    X = torch.randn(n, d, dtype=DOUBLE, generator=generator)
    return X, X.sin().sum(-1) + 0.1 * torch.randn(n, dtype=DOUBLE, generator=generator)


def declared(module):
    return {name: Positive.of(part, name) for part in module.modules() for name in part._parameters}


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("machine", MACHINES)
def test_every_parameter_of_every_kernel_and_machine_is_declared(name, machine):
    kernel = 2.0 * KERNELS[name](3) + tl.kernels.Linear()
    options = {"basis": 2} if machine == "sparse" else {}
    found = declared(MACHINES[machine](kernel, **options))
    assert "log_scale" in found
    for leaf, own in found.items():
        assert own is not None, leaf
        assert own.name == leaf.removeprefix("log_")
        assert own.meaning


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_kernel_of_a_table_has_a_name(kind):
    assert bool(kind.choices) == (kind not in NOT_BY_NAME)
    for choice in kind.choices:
        assert KERNELS[choice.name] is choice
        assert type(choice(3)) is kind
        assert choice.label.split()[0] in ("a", "an")


@pytest.mark.parametrize("name", KERNELS)
def test_parameters_that_are_declared_to_batch_do(name):
    X, _ = table(6, 3)
    kernel = KERNELS[name](3)
    space = Space("test", tl.RLS(kernel))
    assert space.batched
    theta = space.vector() + torch.tensor([[0.0], [0.3], [-0.4]], dtype=DOUBLE)
    together = space.call(theta, "solve", X, X[:, 0]).outputs
    assert_close(together, torch.stack([space.call(own, "solve", X, X[:, 0]).outputs for own in theta]))


def search(kernel, **options):
    X, y = table()
    return tl.select(tl.LSSVM(kernel), X, y, progress=False, **options)


@pytest.mark.parametrize("method", ["gradient", "nelder-mead", "grid"])
def test_a_kernel_of_ones_own_is_searched_from_its_own_start(method):
    X, _ = table()
    found = search(Laplace(), search=method)
    first = search(Laplace(), max_evaluations=1)
    start = first.history[0].parameters["kernel.width"]
    assert start == pytest.approx(float(total_distance(X, False)))
    assert found.value < first.value
    assert found.machine.kernel.width.item() != pytest.approx(start)


def test_starts_of_a_kernel_of_ones_own_are_one_batch():
    def several(kind):
        return search(kind(), starts=3, generator=torch.Generator().manual_seed(0))

    together, alone = several(Laplace), several(OneByOne)
    assert Space("test", tl.LSSVM(Laplace())).batched
    assert not Space("test", tl.LSSVM(OneByOne())).batched
    assert together.value == pytest.approx(alone.value, rel=1e-6)
    assert together.machine.kernel.width.item() == pytest.approx(alone.machine.kernel.width.item(), rel=1e-3)


@pytest.mark.parametrize("widths", [[1.0, 2.0, 3.0], [1.0]])
def test_a_batch_that_a_kernel_does_not_heed_is_refused(widths):
    X, _ = table(3)  # as many rows as there are widths, so that shapes broadcast
    message = r"NotLifted: _evaluate must return shape \(., 3, 3\), got .* self._lift"
    with pytest.raises(TypeError, match=message):
        NotLifted(widths)(X)
    assert Laplace(widths)(X).shape == (len(widths), 3, 3)
    assert NotLifted(2.0)(X.expand(4, 3, 2)).shape == (4, 3, 3)
    with pytest.raises(TypeError, match="NotLifted: _evaluate must return"):
        search(NotLifted(), starts=24)  # as many as rows


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (lambda Z, each: Z.sum() * 0, "select: start of kernel.width must be"),
        (lambda Z, each: Z[0].abs(), r"select: start of kernel.width must have shape \(\), got \(2,\)"),
    ],
)
def test_a_start_that_is_none_is_refused(start, message):
    class Wrong(Laplace):
        width = Positive("a width", start)

    with pytest.raises(ValueError, match=message):
        search(Wrong())


def test_relevant_inputs_are_known_by_the_declaration_alone():
    class Each(tl.kernels.RBF):
        """A kernel that inherits all declarations."""

    X, y = table()
    wild = X * torch.tensor([1.0, 1e4], dtype=DOUBLE)
    tl.select(tl.RLS(Each(torch.ones(2))), wild, y, max_evaluations=1, progress=False)
    with pytest.warns(UserWarning, match="standard deviations"):
        tl.select(tl.RLS(Each()), wild, y, max_evaluations=1, progress=False)
