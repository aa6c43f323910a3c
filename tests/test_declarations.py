"""What kernels, criteria and options declare of themselves is complete, and all that the others go by."""

import argparse
import shlex
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

import torchloo as tl
from torchloo import cli
from torchloo.criteria import CRITERIA, criterion
from torchloo.kernels import Choice, Kernel, Positive
from torchloo.kernels.kernel import KERNELS
from torchloo.machine.kernel_machine import MACHINES
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
        distance = (X.unsqueeze(-2) - Z.unsqueeze(-3)).abs().sum(-1)
        return torch.exp(-distance / self.width)


class OneByOne(NotLifted):
    """The same, which says so."""

    width = Positive("how fast rows cease to inform one another", total_distance, batched=False)


@criterion(
    "mean absolute error",
    "the mean size of the residuals",
    lower_is_better=True,
    differentiable=True,
    mean_over_rows=True,
)
def own_error(held_out, weight="own"):
    """A criterion of one's own, which serves a batch at once."""
    BATCHES.append(held_out.weight.shape[:-1])
    own = torch.ones_like(held_out.weight) if weight is None else weight
    weight = held_out.weight if isinstance(weight, str) else own
    return (weight * held_out.residuals.abs()).sum(-1) / weight.sum(-1)


@criterion(
    "hits",
    "the share of rows that are predicted to within one half",
    lower_is_better=False,
    differentiable=False,
    smooth="own_error",
)
def hits(held_out, weight="own"):
    """Another, which has no gradient."""
    return (held_out.residuals.abs() < 0.5).to(held_out.outputs.dtype).mean(-1)


BATCHES = []
OWN = ("own_error", "hits")


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
    expected = torch.stack([space.call(own, "solve", X, X[:, 0]).outputs for own in theta])
    assert_close(together, expected)


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
def test_a_batch_that_a_kernel_ignores_is_refused(widths):
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


@pytest.mark.parametrize("name", [name for name in tl.criteria.__all__ if name in CRITERIA])
def test_every_criterion_declares_all_there_is(name):
    own = CRITERIA[name]
    assert own is getattr(tl.criteria, name)
    assert own.label
    assert own.meaning
    assert own.targets in ("numbers", "signs", "one-vs-rest", "classes")
    assert bool(own.smooth) != own.differentiable
    if own.smooth:
        assert CRITERIA[own.smooth.split()[0]].differentiable
    if own.counterpart:
        assert {own.targets, CRITERIA[own.counterpart].targets} == {"signs", "one-vs-rest"}
        assert CRITERIA[own.counterpart].counterpart == name


def test_every_function_of_a_held_out_is_a_criterion_or_known_to_be_none():
    functions = {name for name in tl.criteria.__all__ if callable(getattr(tl.criteria, name))}
    known_to_be_none = {"Criterion", "criterion", "balanced_weight", "class_accuracy", "confusion"}
    assert functions - known_to_be_none == {name for name in CRITERIA if name in tl.criteria.__all__}


def test_a_criterion_of_ones_own_scores_all_starts_at_once_and_by_its_name():
    options = {"starts": 4, "generator": torch.Generator().manual_seed(1)}
    BATCHES.clear()
    found = search(Laplace(), criterion="own_error", **options)
    assert torch.Size([4]) in BATCHES
    X, y = table()
    held_out = found.machine.loo(X, y)
    assert found.value == pytest.approx(held_out.residuals.abs().mean().item())
    alone = search(Laplace(), criterion=lambda h: h.residuals.abs().mean(), **options)
    assert found.value <= 1.01 * alone.value
    assert tl.standard_error("own_error", held_out) > 0
    validated = tl.validate(tl.LSSVM(Laplace()), X, y, 3, criterion="own_error", metric=hits, progress=False)
    assert 0 <= validated.mean <= 1


def test_a_criterion_of_ones_own_without_gradient_names_its_substitute_and_is_maximised():
    with pytest.raises(ValueError, match=r"got hits; use criterion=tl.criteria.own_error, or search="):
        search(Laplace(), criterion="hits")
    found = search(Laplace(), criterion=hits, search="grid")
    assert found.value == max(step.value for step in found.history)


def test_a_criterion_that_ignores_the_batch_is_refused():
    @criterion("mean", "one number for any batch", lower_is_better=True, differentiable=True)
    def careless(held_out, weight="own"):
        return held_out.residuals.square().mean()

    with pytest.raises(TypeError, match=r"criterion must return shape \(9,\), one number for each problem"):
        search(Laplace(), criterion=careless, starts=3, search="nelder-mead")
    del CRITERIA["careless"]


def test_a_name_of_the_library_cannot_be_taken():
    with pytest.raises(
        ValueError, match=r"must not be in use, got mse, which is defined in torchloo.criteria.regression"
    ):
        criterion("m", "m", lower_is_better=True, differentiable=True)(lambda_named("mse"))
    assert CRITERIA["mse"] is tl.criteria.mse


def test_a_name_of_a_kernel_of_the_library_cannot_be_taken():
    before = KERNELS["rbf"]
    with pytest.raises(
        ValueError,
        match=r"Mine: names of choices must not be in use, got rbf, which is defined in",
    ):

        class Mine(Laplace):
            choices = (Choice("rbf", "a kernel", lambda d: Mine()),)

    assert KERNELS["rbf"] is before


def lambda_named(name):
    def function(held_out):
        return held_out.residuals.square().mean(-1)

    function.__name__ = name
    return function


def report_of(*options):
    """The report of a selection with these options, whose model then predicts the rows of the table."""
    pd = pytest.importorskip("pandas")
    pytest.importorskip("matplotlib")
    X, y = table(40)
    pd.DataFrame({"a": X[:, 0], "b": X[:, 1], "y": y}).to_csv("data.csv", index=False)
    words = ["select", "data.csv", "--target", "y", *options, "--outer", "0", "--out", "out"]
    assert cli.main([*words, "--no-progress"]) == 0
    assert cli.main(["predict", "out/model.pt", "data.csv", "--out", "predictions.csv"]) == 0
    assert len(pd.read_csv("predictions.csv")) == 40
    return Path("out", "report.html").read_text(encoding="utf-8")


def test_the_command_and_its_report_serve_a_kernel_and_a_criterion_of_ones_own(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    page = report_of("--kernel", "laplace", "--criterion", "own_error")
    assert "own_error 0." in capsys.readouterr().out
    for sentence in (
        "A least-squares support vector machine with a Laplace kernel. ",
        "selected by mean absolute error: the mean size of the residuals, each row held out",
        "how fast rows cease to inform one another, in standard deviations",
        "best mean absolute error so far. Lower is better",
        "--kernel</span> laplace",
    ):
        assert sentence in page


class Unbiased(tl.RLS):
    """A machine of one's own, by a name of its own."""

    name = "unbiased"
    label = "machine without bias"


@pytest.mark.parametrize("kernel", ["rbf", "linear"])
def test_the_command_and_its_report_serve_a_machine_of_ones_own(tmp_path, monkeypatch, kernel):
    monkeypatch.chdir(tmp_path)
    assert "A machine without bias with " in report_of("--machine", "unbiased", "--kernel", kernel)


def test_scikit_learn_serves_a_machine_of_ones_own():
    estimators = pytest.importorskip("torchloo.sklearn")
    X, y = (t.numpy() for t in table())
    assert isinstance(estimators.LOORegressor("unbiased").fit(X, y).machine_, Unbiased)


def test_a_name_of_a_machine_of_the_library_cannot_be_taken():
    with pytest.raises(ValueError, match=r"Mine: name must be new, but torchloo.rls already has 'rls'"):

        class Mine(tl.RLS):
            name = "rls"

    assert MACHINES["rls"] is tl.RLS


def parsed(line):
    return vars(cli._parser().parse_args(line))


def test_the_command_of_the_report_is_that_of_all_options():
    """With every option of `select` given, also those to come, its command means the same."""
    parser = parsed(["select", "d.csv", "--target", "y"])["parser"]
    written = {"help", "out", "report", "progress"}
    options = [action for action in parser._actions if action.dest not in written]
    line = ["select", "some/where/d e.csv"]
    for action in options:
        if action.option_strings:
            texts = {"time_budget": "2.5", "prior": "0.5", "device": "cpu", "drop": "-x y"}
            given = texts.get(action.dest, [*(action.choices or "3")][-1])
            line += [f"{action.option_strings[-1]}={given}"]
    line += ["--drop", "b", "--out", "elsewhere", "--no-progress"]
    first = parsed(line)
    command = shlex.split(first["parser"].command(argparse.Namespace(**first)))
    assert command[:3] == ["torchloo", "select", "d e.csv"]
    again = parsed(command[1:])
    names = {action.dest for action in options} - {"data"}
    assert {"target", "machine", "time_budget", "seed", "device"} <= names
    for name in names:
        assert again[name] == first[name], name
        assert again[name] is not None
    assert again["drop"] == ["-x y", "b"]
    assert again["out"] is None
