"""Several machines under one criterion, settings of a grid, time budgets and callbacks."""

import math
import time

import numpy as np
import pytest
import torch

import torchloo as tl

DOUBLE = torch.float64
K = tl.kernels


def curve(n=40, seed=0):
    """A cubic of one input with noise: degree 3 is enough, and needed."""
    generator = torch.Generator().manual_seed(seed)
    X = torch.rand(n, 1, dtype=DOUBLE, generator=generator) * 4 - 2
    return X, X[:, 0] ** 3 - 2 * X[:, 0] + 0.3 * torch.randn(n, dtype=DOUBLE, generator=generator)


def classes(n=40, seed=0):
    X, y = curve(n, seed)
    return X, torch.where(y > 0, 1.0, -1.0).to(DOUBLE)


def select(machine, X, y=None, *args, **options):
    return tl.select(machine, X, y, *args, progress=False, **options)


def machines():
    return [tl.LSSVM(K.Linear()), tl.LSSVM(K.RBF()), tl.RLS(K.Matern()), tl.SparseLSSVM(K.RBF(), basis=10)]


@pytest.mark.parametrize("options", [{}, {"search": "nelder-mead"}, {"search": "grid"}, {"starts": 3}])
def test_several_machines_are_the_best_of_single_searches(options):
    X, y = curve()

    def seeded():
        return torch.Generator().manual_seed(3)

    alone = [select(machine, X, y, generator=seeded(), **options) for machine in machines()]
    chosen = select(machines(), X, y, generator=seeded(), **options)
    best = min(alone, key=lambda each: each.value)
    assert chosen.value == best.value
    received = chosen.machine(X)
    expected = best.machine(X)
    torch.testing.assert_close(received, expected, rtol=0, atol=0)
    assert [row["value"] for row in chosen.table] == [each.value for each in alone]
    assert [row["evaluations"] for row in chosen.table] == [each.evaluations for each in alone]
    assert [row["parameters"] for row in chosen.table] == [each.table[0]["parameters"] for each in alone]
    assert [row["chosen"] for row in chosen.table] == [each is best for each in alone]
    assert chosen.evaluations == sum(each.evaluations for each in alone)
    steps = [(k, step.value) for k, each in enumerate(alone) for step in each.history]
    assert [(step.machine, step.value) for step in chosen.history] == steps
    assert [step.number for step in chosen.history] == list(range(1, len(steps) + 1))


def test_higher_is_better_where_the_criterion_says_so():
    X, y = classes()
    rivals = [tl.LSSVM(K.Linear()), tl.LSSVM(K.RBF()), tl.SVC(K.RBF())]
    chosen = select(rivals, X, y, "auc", "grid")
    assert chosen.value == max(row["value"] for row in chosen.table)


def test_what_each_machine_reached_is_shown():
    X, y = curve()
    text = str(select([tl.LSSVM(K.Linear()), tl.LSSVM(K.RBF())], X, y))
    assert "LSSVM(Linear)" in text
    assert "LSSVM(RBF)" in text
    assert text.splitlines()[-1].rstrip().endswith("*")
    assert "LSSVM(RBF)" not in str(select(tl.LSSVM(K.RBF()), X, y))  # one machine needs no table


@pytest.mark.parametrize("search", ["gradient", "nelder-mead", "grid"])
@pytest.mark.parametrize("degrees", [[1, 2, 3, 4], np.arange(1, 5), torch.arange(1, 5), range(1, 5)])
def test_a_grid_over_the_degree_is_a_loop_over_machines(search, degrees):
    X, y = curve()
    alone = [select(tl.LSSVM(K.Polynomial(degree=d)), X, y, search=search) for d in range(1, 5)]
    chosen = select(tl.LSSVM(K.Polynomial()), X, y, search=search, grid={"degree": degrees})
    assert chosen.value == min(each.value for each in alone)
    assert [row["value"] for row in chosen.table] == [each.value for each in alone]
    assert [row["parameters"]["kernel.degree"] for row in chosen.table] == [1, 2, 3, 4]
    assert chosen.machine.kernel.degree in (3, 4)
    assert {step.parameters["kernel.degree"] for step in chosen.history} == {1, 2, 3, 4}


def test_settings_and_parameters_share_a_grid():
    X, y = curve()
    regs = [0.01, 0.1, 1.0, 10.0]
    kernel = K.Polynomial() + K.Matern()
    grid = {"degree": [2, 3], "nu": [0.5, 2.5], "reg": iter(regs), "offset": [0.5, 1.0]}
    chosen = select(tl.RLS(kernel), X, y, search="grid", grid=grid, start="machine")
    expected = {}
    for degree in (2, 3):
        for nu in (0.5, 2.5):
            for reg in regs:
                for offset in (0.5, 1.0):
                    one = tl.RLS(K.Polynomial(degree, offset) + K.Matern(nu), reg)
                    expected[degree, nu, reg, offset] = tl.criteria.press(one.loo(X, y)).item()
    assert chosen.value == pytest.approx(min(expected.values()), rel=1e-8)
    best = min(expected, key=expected.get)
    first, second = chosen.machine.kernel.kernels
    assert (first.degree, second.nu, round(chosen.machine.reg.item(), 6)) == best[:3]
    assert len(chosen.table) == 4
    assert chosen.evaluations == len(expected)
    assert kernel.kernels[0].degree == 2  # as it was


def test_bounds_and_grids_hold_for_the_machines_that_have_the_parameter():
    X, y = curve()
    rivals = [tl.LSSVM(K.Linear()), tl.LSSVM(K.RBF())]
    chosen = select(rivals, X, y, bounds={"lengthscale": (3.0, 3.0)})
    assert chosen.table[1]["parameters"]["kernel.lengthscale"] == pytest.approx(3.0)
    chosen = select(rivals, X, y, search="grid", grid={"lengthscale": [2.0], "reg": [0.1, 1.0]})
    assert [row["evaluations"] for row in chosen.table] == [2, 2]


@pytest.mark.parametrize(
    ("machine", "options", "error", "message"),
    [
        ([], {}, ValueError, "machine must be a machine or a list of machines, got an empty list"),
        ([tl.LSSVM(K.RBF()), 3], {}, TypeError, "machine must be a torchloo machine, got int"),
        (
            machines(),
            {"bounds": {"rate": (1, 2)}},
            ValueError,
            "bounds must name parameters .*'rate' is unknow",
        ),
        (
            [tl.LSSVM(K.Linear()), tl.LSSVM(K.RBF())],
            {"search": "grid", "grid": {"lengthscale": [1.0]}},
            ValueError,
            r"grid must name a parameter of every machine, but it names none of LSSVM\(Linear\)",
        ),
        (
            tl.LSSVM(K.RBF()),
            {"search": "grid", "grid": {"reg": [1.0], "lengthscale": [1.0], "kernel.lengthscale": [2.0]}},
            ValueError,
            "grid must name each parameter once",
        ),
        (
            tl.LSSVM(K.RBF()),
            {"grid": {"reg": [1.0]}},
            ValueError,
            "grid must be None unless search='grid'",
        ),
        (tl.LSSVM(K.RBF()), {"grid": {"degree": [2]}}, ValueError, "grid must name .*'degree' is unknown"),
        (
            tl.LSSVM(K.Polynomial()),
            {"grid": {"degree": []}},
            ValueError,
            "grid of degree must be a list of val",
        ),
        (
            tl.LSSVM(K.Polynomial()),
            {"grid": {"degree": 2}},
            ValueError,
            "grid of degree must be a list of val",
        ),
        (
            tl.LSSVM(K.Polynomial()),
            {"grid": {"degree": [2, 2.5]}},
            ValueError,
            "grid of degree must hold valid values: Polynomial: degree must be a positive integer",
        ),
        (tl.LSSVM(K.Matern()), {"grid": {"nu": [1.0]}}, ValueError, "Matern: nu must be 0.5, 1.5 or 2.5"),
        (
            [tl.LSSVM(K.RBF()), tl.LSSVM(K.Precomputed())],
            {},
            ValueError,
            "Precomputed kernel can only be compared with one another",
        ),
        (
            tl.LSSVM(K.RBF()),
            {"time_budget": 0},
            ValueError,
            "time_budget must be a positive number of seconds",
        ),
        (tl.LSSVM(K.RBF()), {"time_budget": "1 s"}, ValueError, "time_budget must be a positive number"),
        (tl.LSSVM(K.RBF()), {"time_budget": True}, ValueError, "time_budget must be a positive number"),
        (tl.LSSVM(K.RBF()), {"callback": 3}, TypeError, "callback must be callable, got 3"),
    ],
)
def test_bad_input_is_named(machine, options, error, message):
    X, y = curve()
    with pytest.raises(error, match=f"select: .*{message}"):
        select(machine, X, y, **options)


def test_residuals_of_kfd_are_not_compared_with_others():
    X, y = classes()
    rivals = [tl.KFD(K.RBF()), tl.LSSVM(K.RBF())]
    with pytest.raises(ValueError, match=r"must be for classes to compare KFD with other .* got press"):
        select(rivals, X, y)
    with pytest.raises(ValueError, match="validate: criterion must be for classes to compare KFD"):
        tl.validate(rivals, X, y, 3, progress=False)
    chosen = select(rivals, X, y, "smooth_error")
    assert chosen.value == min(row["value"] for row in chosen.table)
    select([tl.KFD(K.RBF()), tl.KFD(K.Matern())], X, y)  # these agree


def test_a_machine_without_any_candidate_loses():
    class Broken(K.Kernel):
        def __init__(self):
            super().__init__(rate=1.0)

        def _evaluate(self, X, Z):
            return torch.full((len(X), len(X if Z is None else Z)), torch.nan, dtype=X.dtype)

    X, y = curve()
    chosen = select([tl.RLS(Broken()), tl.RLS(K.RBF())], X, y, start="machine", max_evaluations=5)
    assert type(chosen.machine.kernel) is K.RBF
    assert chosen.table[0]["value"] == math.inf
    assert chosen.table[0]["parameters"] == {}
    assert chosen.table[0]["stopped"].startswith("no candidate could be evaluated: ")
    with pytest.raises(ValueError, match="select: no candidate could be evaluated: "):
        select([tl.RLS(Broken())] * 2, X, y, start="machine")


class Clock:
    """A clock that moves on by a second at every look."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        self.now += 1.0
        return self.now


def test_a_time_budget_gives_the_best_so_far(monkeypatch):
    X, y = curve()
    whole = select(tl.LSSVM(K.RBF()), X, y)
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock.monotonic)
    with pytest.warns(
        RuntimeWarning, match="select: the time budget of 6.5 s is used up; this is the best so far"
    ):
        chosen = select(tl.LSSVM(K.RBF()), X, y, time_budget=6.5)
    # The first looks are at the beginning of the search and of its only machine; each evaluation has one.
    assert chosen.evaluations == 6
    assert chosen.history == whole.history[:6]
    assert chosen.value == min(step.value for step in whole.history[:6])
    assert chosen.table[0]["stopped"] == "time budget"


@pytest.mark.parametrize("search", ["gradient", "nelder-mead", "grid"])
def test_a_tiny_time_budget_makes_one_evaluation_of_every_machine(search):
    X, y = curve(600)  # too many rows for a batch of candidates
    rivals = [tl.LSSVM(K.RBF()), tl.LSSVM(K.Matern()), tl.RLS(K.RBF())]
    with pytest.warns(RuntimeWarning, match="time budget of 1e-09 s is used up"):
        chosen = select(rivals, X, y, search=search, time_budget=1e-9)
    assert [row["stopped"] for row in chosen.table] == ["time budget"] * 3
    one = 25 if search == "grid" else 1  # a path is one evaluation of many regularisations
    assert [row["evaluations"] for row in chosen.table] == [one] * 3


def test_what_one_machine_does_not_need_of_the_time_goes_to_the_next(monkeypatch):
    X, y = curve()
    second = tl.LSSVM(K.RBF())
    for first, counted in ((tl.LSSVM(K.Matern()), [6, 5]), (tl.LSSVM(K.Linear()), [34, 8])):
        monkeypatch.setattr(time, "monotonic", Clock().monotonic)
        with pytest.warns(RuntimeWarning, match="time budget of 12.5 s"):
            both = select([first, second], X, y, time_budget=12.5)
        # Time 1 and 2 are looks at the beginning; half of 11.5 s is up at 8. The linear machine needs three
        # paths, to 5, so that the other one has from 6 to 14.
        assert [row["evaluations"] for row in both.table] == counted


def test_enough_time_changes_nothing():
    X, y = curve()
    chosen = select(tl.LSSVM(K.RBF()), X, y, time_budget=1000.0)
    assert chosen.history == select(tl.LSSVM(K.RBF()), X, y).history
    assert chosen.table[0]["stopped"] == ""


def test_no_candidate_within_the_time_is_said_so():
    X, y = curve()
    one = torch.ones(len(y), 1, dtype=DOUBLE)
    with pytest.raises(ValueError, match="no candidate could be evaluated within the time budget: "):
        select(
            tl.RLS(K.RBF()), X, y, lambda held_out: held_out.residuals.sum() / 0 * one.sum(), time_budget=1e-9
        )


def test_a_callback_sees_every_evaluation_in_order():
    X, y = curve()
    steps = []
    chosen = select([tl.LSSVM(K.RBF()), tl.LSSVM(K.Matern())], X, y, callback=steps.append, starts=2)
    assert steps == chosen.history
    assert {step.machine for step in steps} == {0, 1}
    assert [step.number for step in steps] == list(range(1, len(steps) + 1))


@pytest.mark.parametrize("search", ["gradient", "nelder-mead", "grid"])
def test_a_callback_may_stop_the_search(search):
    X, y = curve(600)
    chosen = select(
        [tl.RLS(K.RBF()), tl.RLS(K.Matern())], X, y, search=search, callback=lambda step: step.number == 3
    )
    assert len(chosen.table) == 1  # the other was not reached
    assert chosen.table[0]["stopped"] == "callback"
    assert chosen.evaluations == (25 if search == "grid" else 3)
    assert chosen.value == min(step.value for step in chosen.history)


def test_an_error_of_a_callback_ends_the_call():
    def failing(step):
        raise ValueError("mine")

    X, y = curve()
    for search in ("gradient", "grid"):
        with pytest.raises(ValueError, match=r"^mine$"):
            select(tl.LSSVM(K.RBF()), X, y, search=search, callback=failing)


def test_an_interrupt_of_the_second_machine_keeps_the_first():
    X, y = curve()

    def interrupt(step):
        if step.machine == 1:
            raise KeyboardInterrupt

    with pytest.warns(RuntimeWarning, match="select: interrupted; this is the best so far"):
        chosen = select([tl.LSSVM(K.RBF())] * 3, X, y, callback=interrupt)
    assert [row["stopped"] for row in chosen.table] == ["", "interrupted"]


def test_machines_of_a_stream_are_compared():
    X, y = curve(200)
    stream = tl.Stream(X, y, progress=False)
    rivals = [tl.LSSVM(K.Linear()), tl.SparseLSSVM(K.RBF(), basis=X[:20])]
    chosen = select(rivals, stream)
    for row, rival in zip(chosen.table, rivals, strict=True):
        assert row["value"] == pytest.approx(select(rival, X, y).value, rel=1e-4)
    assert isinstance(chosen.machine, tl.SparseLSSVM)


def test_class_labels_reach_every_machine():
    X, y = classes(60)
    labels = (y > 0).long() + (X[:, 0] > 1).long()
    rivals = [tl.LSSVM(K.RBF()), tl.SVC(K.RBF()), tl.KFD(K.RBF())]
    grid = {"lengthscale": [0.5, 1.0, 2.0]}
    chosen = select(rivals, X, labels, "multiclass_error", "grid", grid=grid)
    assert torch.equal(chosen.machine.classes, torch.tensor([0, 1, 2]))
    assert chosen.value == min(row["value"] for row in chosen.table)


def test_validate_compares_machines_in_every_split():
    X, y = curve()
    folds = tl.splits.k_fold(len(y), 4, generator=torch.Generator().manual_seed(0))
    rivals = [tl.LSSVM(K.Linear()), tl.LSSVM(K.RBF()), tl.LSSVM(K.Matern(nu=0.5))]
    estimate = tl.validate(rivals, X, y, folds, progress=False)
    alone = [tl.validate(rival, X, y, folds, progress=False) for rival in rivals]
    for k, row in enumerate(estimate.table):
        best = min((each.table[k] for each in alone), key=lambda own: own["criterion"])
        assert row["criterion"] == pytest.approx(best["criterion"], rel=1e-12)
        assert row["score"] == pytest.approx(best["score"], rel=1e-12)
        assert row["evaluations"] == sum(each.table[k]["evaluations"] for each in alone)
    assert {row["machine"] for row in estimate.table} <= {"LSSVM(RBF)", "LSSVM(Matern)"}
    assert "LSSVM(" in str(estimate)


def test_validate_searches_settings():
    X, y = curve()
    folds = tl.splits.k_fold(len(y), 3, generator=torch.Generator().manual_seed(0))
    estimate = tl.validate(tl.LSSVM(K.Polynomial()), X, y, folds, grid={"degree": [1, 2, 3]}, progress=False)
    assert [row["kernel.degree"] for row in estimate.table] == [3, 3, 3]


def test_validate_ends_with_its_time():
    X, y = curve()
    splits = tl.splits.hold_out(len(y), repeats=30, fraction=0.2, generator=torch.Generator().manual_seed(0))
    with pytest.warns(
        RuntimeWarning, match=r"validate: the time budget of 1e-09 s is used up; these are \d+ of 30"
    ):
        estimate = tl.validate(tl.LSSVM(K.RBF()), X, y, splits, time_budget=1e-9, progress=False)
    assert 0 < len(estimate.scores) <= 30
    assert all(row["evaluations"] == 1 for row in estimate.table)


def test_machines_with_other_classes_are_not_validated_together():
    X, y = classes()
    rivals = [tl.LSSVM(K.RBF(), classes=[0, 1]), tl.LSSVM(K.RBF(), classes=[1, 0])]
    with pytest.raises(ValueError, match="validate: machines must have the same classes, in the same order"):
        tl.validate(rivals, X, (y > 0).long(), 3, progress=False)
