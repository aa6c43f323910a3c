"""The searches on functions whose minima are known, and the batch of machines against its loop."""

import math

import pytest
import torch
from torch import nn

import torchloo as tl
from torchloo.criteria.score import Score
from torchloo.search.lbfgs import minimise as lbfgs
from torchloo.search.nelder_mead import minimise as nelder_mead
from torchloo.search.objective import Objective, RunSetup
from torchloo.search.parameters import Space
from torchloo.search.prior import HyperPrior
from torchloo.search.problem_batch import stack

DOUBLE = torch.float64


class Known:
    """An objective by formula; keeps the best value and point of every problem."""

    def __init__(self, function, problems=1):
        self.function = function
        self.best = [(math.inf, None)] * problems
        self.asked = 0

    def __call__(self, theta, problem, gradient=False):
        with torch.enable_grad():
            theta = theta.clone().requires_grad_()
            values = torch.stack([self.function(t, int(k)) for t, k in zip(theta, problem, strict=True)])
            (slopes,) = torch.autograd.grad(values.sum(), theta)
        for value, t, k in zip(values.tolist(), theta.detach(), problem.tolist(), strict=True):
            self.asked += 1
            if value < self.best[k][0]:
                self.best[k] = (value, t)
        return values.detach(), slopes


def search(method, function, starts, limit=5, evaluations=2000, tolerance=1e-12):
    starts = torch.tensor(starts, dtype=DOUBLE)
    objective = Known(function, len(starts))
    box = torch.stack([torch.full_like(starts, -limit), torch.full_like(starts, limit)])
    unit = torch.ones(starts.shape[1], dtype=DOUBLE)
    method(objective, RunSetup(starts, torch.arange(len(starts)), box, unit, evaluations, tolerance))
    return objective


def rosenbrock(t, _):
    return (1 - t[0]) ** 2 + 100 * (t[1] - t[0] ** 2) ** 2


def bowl(t, k):
    return 3 + ((t - 0.3 * (k + 1)) ** 2 * torch.tensor([1.0, 4.0, 25.0], dtype=DOUBLE)).sum()


def cliff(t, _):
    """Infeasible to the right of 1; the minimum is at 0.9."""
    return torch.where(t[0] > 1, torch.inf, 1.0) * (1 + (t[0] - 0.9) ** 2 + t[1] ** 2)


@pytest.mark.parametrize("method", [lbfgs, nelder_mead])
def test_search_finds_the_bottom_of_a_curved_valley(method):
    objective = search(method, rosenbrock, [[-1.2, 1.0]])
    expected = torch.ones(2, dtype=DOUBLE)
    torch.testing.assert_close(objective.best[0][1], expected, atol=1e-3, rtol=0)
    assert objective.asked < (150 if method is lbfgs else 400)


@pytest.mark.parametrize("method", [lbfgs, nelder_mead])
def test_runs_of_one_batch_do_not_touch_each_other(method):
    starts = [[2.0, -1.0, 0.5], [-3.0, 0.0, 1.0], [0.1, 0.2, 0.3]]
    together = search(method, bowl, starts)
    for k, start in enumerate(starts):
        alone = search(method, lambda t, _, k=k: bowl(t, k), [start])
        assert alone.best[0][0] == together.best[k][0]
        assert torch.equal(alone.best[0][1], together.best[k][1])
        bottom = torch.full((3,), 0.3 * (k + 1), dtype=DOUBLE)
        torch.testing.assert_close(together.best[k][1], bottom, atol=1e-2, rtol=0)


@pytest.mark.parametrize("method", [lbfgs, nelder_mead])
def test_search_stays_in_its_box_and_finds_the_minimum_on_its_face(method):
    def outside(t, _):
        assert t.abs().max() <= 2
        return 1 + (t[0] - 10) ** 2 + (t[1] + 1) ** 2

    objective = search(method, outside, [[0.0, 0.0]], limit=2)
    torch.testing.assert_close(
        objective.best[0][1], torch.tensor([2.0, -1.0], dtype=DOUBLE), atol=1e-3, rtol=0
    )


@pytest.mark.parametrize("method", [lbfgs, nelder_mead])
def test_search_steps_back_from_where_nothing_is_feasible(method):
    objective = search(method, cliff, [[-2.0, 2.0]])
    torch.testing.assert_close(
        objective.best[0][1], torch.tensor([0.9, 0.0], dtype=DOUBLE), atol=1e-2, rtol=0
    )


@pytest.mark.parametrize("method", [lbfgs, nelder_mead])
def test_search_stops_by_itself_and_keeps_to_its_limit(method):
    assert search(method, bowl, [[2.0, -1.0, 0.5]], evaluations=10_000).asked < 1000
    assert search(method, rosenbrock, [[-1.2, 1.0]], evaluations=12).asked <= 12 + 3


class Silent:
    """No progress bar."""

    def update(self, count):
        pass

    def set_postfix_str(self, text, refresh):
        pass


class Shifted(tl.kernels.Kernel):
    """A kernel of one's own, which knows no batch of parameters."""

    def __init__(self, shift):
        super().__init__(shift=shift)

    def _evaluate(self, X, Z):
        Z = X if Z is None else Z
        scale = self.log_shift.exp().to(X)
        assert scale.ndim == 0
        return torch.exp(-scale * torch.cdist(X, Z).square())


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)).double()


K = tl.kernels
MACHINES = {
    "lssvm-rbf": lambda: tl.LSSVM(K.RBF()),
    "rls-ard": lambda: tl.RLS(K.RBF(torch.ones(2))),
    "lssvm-matern-ard": lambda: tl.LSSVM(K.Matern(1.5, torch.ones(2))),
    "lssvm-composite": lambda: tl.LSSVM(2.0 * K.RBF() * K.Polynomial(2) + K.Boolean(0.5)),
    "lssvm-linear": lambda: tl.LSSVM(K.Linear()),
    "lssvm-scaled-linear": lambda: tl.LSSVM(3.0 * K.Linear()),
    "kfd": lambda: tl.KFD(K.RBF()),
    "sparse": lambda: tl.SparseLSSVM(K.RBF(), basis=5),
    "sparse-basis": lambda: tl.SparseLSSVM(
        K.RBF(), basis=nn.Parameter(torch.tensor([[0.0, 0.0], [1.0, 0.5], [-1.0, 1.0]], dtype=DOUBLE))
    ),
    "sparse-drawn": lambda: tl.SparseLSSVM(
        K.RBF(), basis=tl.basis.random(5, generator=torch.Generator().manual_seed(3))
    ),
    "sparse-pruned": lambda: tl.SparseLSSVM(K.RBF(), basis=tl.basis.pruned(5)),
    "network": lambda: tl.LSSVM(K.RBF(features=network())),
    "network-within": lambda: tl.LSSVM(K.RBF(torch.ones(2), features=network()) + K.Linear()),
    "svc": lambda: tl.SVC(K.RBF()),
    "own-kernel": lambda: tl.LSSVM(Shifted(1.0)),
    "stateful-network": lambda: tl.LSSVM(K.RBF(features=nn.BatchNorm1d(2).double())),
}


def problems(n=14, count=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(count, n, 2, dtype=DOUBLE, generator=generator)
    y = torch.where(X[..., 0] + 0.5 * torch.randn(count, n, dtype=DOUBLE, generator=generator) > 0, 1.0, -1.0)
    return list(X), list(y.double())


def several(y):
    """Labels (n,) and others beside them, as columns."""
    return torch.stack([y, y.roll(3), y * y.roll(1)], -1)


def objective_of(
    machine,
    criterion=tl.criteria.squared_hinge,
    clusters=None,
    weights=False,
    prior=None,
    columns=False,
):
    X, y = problems()
    y = [several(labels) for labels in y] if columns else y
    weight = [0.5 + torch.rand(14, dtype=DOUBLE) if weights else None for _ in X]
    space = Space("select", machine)
    score = Score("select", "criterion", criterion)
    prior = HyperPrior(prior, space, 14)
    rows = stack("select", X, y, weight, ["own"], clusters or [None, None])
    return Objective(space, rows, score, prior, Silent())


def candidates(space, count=6, seed=1):
    generator = torch.Generator().manual_seed(seed)
    away = torch.randn(count, space.size, dtype=DOUBLE, generator=generator)
    return space.vector() + 0.3 * away, torch.arange(count) % 2


@pytest.mark.parametrize(
    ("name", "columns"),
    [(name, False) for name in MACHINES]
    + [(name, True) for name in ("lssvm-rbf", "kfd", "sparse", "svc", "own-kernel")],
)
def test_a_batch_of_machines_equals_its_loop(name, columns):
    objective = objective_of(MACHINES[name](), columns=columns)
    theta, problem = candidates(objective.space)
    values, slopes = objective(theta, problem, gradient=True)
    for i, k in enumerate(problem.tolist()):
        machine = objective.space.machine_at(theta[i])
        X = objective.problems.X[k]
        y = objective.problems.y[k]
        value = tl.criteria.squared_hinge(machine.loo(X, y))
        wanted = [p for p in machine.parameters() if p.requires_grad]
        expected = torch.cat([g.double().flatten() for g in torch.autograd.grad(value, wanted)])
        torch.testing.assert_close(values[i], value.detach(), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(slopes[i], expected, rtol=1e-7, atol=1e-8)
    assert objective.space.batched == (name not in ("own-kernel", "stateful-network"))


# The same in both problems; of the same sizes; and ragged, which only the sizes have in common.
CLUSTERS = {
    "alike": [torch.arange(14) // 2, torch.arange(14) // 2],
    "mixed": [torch.arange(14) // 2, 7 - torch.arange(14) % 7],
    "ragged": [torch.tensor([3, 9, 3, 5, 9, 1, 9, 5, 2, 3, 9, 5, 2, 2]),
               torch.tensor([0, 4, 4, 4, 7, 4, 0, 7, 7, 8, 0, 6, 6, 6])],
}  # fmt: skip


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("labels", CLUSTERS)
@pytest.mark.parametrize(
    "name", ["lssvm-rbf", "rls-ard", "kfd", "sparse", "sparse-drawn", "sparse-basis", "svc", "own-kernel"]
)
def test_clusters_and_weights_reach_the_batch(name, labels, columns):
    clusters = CLUSTERS[labels]
    objective = objective_of(MACHINES[name](), clusters=clusters, weights=True, columns=columns)
    theta, problem = candidates(objective.space)
    values, slopes = objective(theta, problem, gradient=True)
    one_problem = objective(theta[::2], problem[::2])[0]
    torch.testing.assert_close(one_problem, values[::2], rtol=1e-9, atol=0)
    for i, k in enumerate(problem.tolist()):
        rows = [part[k] for part in objective.problems[:3]]
        machine = objective.space.machine_at(theta[i])
        value = tl.criteria.squared_hinge(machine.lco(rows[0], rows[1], clusters[k], rows[2]))
        wanted = [p for p in machine.parameters() if p.requires_grad]
        expected = torch.cat([g.double().flatten() for g in torch.autograd.grad(value, wanted)])
        torch.testing.assert_close(values[i], value.detach(), rtol=1e-9, atol=0)
        torch.testing.assert_close(slopes[i], expected, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("name", ["lssvm-rbf", "sparse", "sparse-drawn", "sparse-pruned", "lssvm-linear"])
def test_clusters_reach_the_path_of_a_batch(name):
    clusters = CLUSTERS["ragged"]
    objective = objective_of(MACHINES[name](), tl.criteria.kendall_tau, clusters, weights=True)
    theta, problem = candidates(objective.space)
    regs = torch.logspace(-2, 1, 8, dtype=DOUBLE)
    values = objective.along_reg(theta, problem, regs)
    for i, k in enumerate(problem.tolist()):
        X, y, weight = (part[k] for part in objective.problems[:3])
        path = objective.space.machine_at(theta[i]).path(X, y, regs, clusters[k], weight)
        expected = tl.criteria.kendall_tau(path)
        torch.testing.assert_close(-values[i], expected, rtol=1e-9, atol=1e-12)


def test_a_criterion_of_the_users_sees_rows_and_labels_as_they_came():
    seen = []

    def criterion(held_out):
        seen.append(held_out)
        return held_out.residuals.square().sum()

    clusters = CLUSTERS["ragged"]
    objective = objective_of(tl.LSSVM(K.RBF()), criterion, clusters, weights=True)
    theta, problem = candidates(objective.space)
    regs = torch.tensor([0.5, 2.0], dtype=DOUBLE)
    objective(theta, problem)
    objective(theta[:1], problem[:1])
    objective.along_reg(theta, problem, regs)
    machines = [objective.space.machine_at(t) for t in theta]
    calls = [(i, None) for i in (*range(6), 0)] + [(i, reg) for reg in regs for i in range(6)]
    for (i, reg), received in zip(calls, seen, strict=True):
        k = int(problem[i])
        if reg is not None:
            machines[i].log_reg.data = reg.log()
        X, y, weight = (part[k] for part in objective.problems[:3])
        expected = machines[i].lco(X, y, clusters[k], weight)
        for name in expected._fields:
            torch.testing.assert_close(getattr(received, name), getattr(expected, name).detach())


@pytest.mark.parametrize("name", ["lssvm-rbf", "rls-ard", "kfd", "sparse", "lssvm-linear", "own-kernel"])
def test_the_path_of_a_batch_equals_its_loop(name):
    objective = objective_of(MACHINES[name](), tl.criteria.mse)
    theta, problem = candidates(objective.space)
    regs = torch.logspace(-2, 1, 8, dtype=DOUBLE)
    values = objective.along_reg(theta, problem, regs)
    assert values.shape == (6, 8)
    for r, reg in enumerate(regs):
        at_reg = theta.clone()
        at_reg[:, objective.space.find("reg", "grid").part] = reg.log()
        received = objective(at_reg, problem)[0]
        expected = values[:, r]
        torch.testing.assert_close(received, expected, rtol=1e-8, atol=0)


def test_chunks_change_nothing(monkeypatch):
    objective = objective_of(MACHINES["lssvm-rbf"]())
    theta, problem = candidates(objective.space, 9)
    whole = objective(theta, problem, gradient=True)
    monkeypatch.setattr("torchloo.search.objective.ENTRIES", {"cpu": 2 * 14**2, "cuda": 1})
    for received, expected in zip(objective(theta, problem, gradient=True), whole, strict=True):
        torch.testing.assert_close(received, expected, rtol=1e-12, atol=1e-12)


def test_a_failed_factorisation_makes_its_candidate_infinite_and_no_other():
    objective = objective_of(tl.LSSVM(K.RBF()), tl.criteria.mse)
    theta, problem = candidates(objective.space, 7)
    reg, scale = (objective.space.find(name, "").part for name in ("reg", "lengthscale"))
    broken = theta.clone()
    broken[3, reg], broken[3, scale] = -60.0, 12.0  # K is all ones to rounding, and reg far below that
    values, _ = objective(broken, problem, gradient=True)
    expected, _ = objective(theta, problem, gradient=True)
    assert values[3] == torch.inf
    others = torch.arange(7) != 3
    torch.testing.assert_close(values[others], expected[others], rtol=1e-9, atol=0)
    assert list(objective.failures) == [1]
    assert "use a larger reg" in str(objective.failures[1])


def test_a_path_with_a_failed_regularisation_keeps_the_others():
    objective = objective_of(tl.LSSVM(K.RBF(lengthscale=1e6)), tl.criteria.mse)
    theta, problem = candidates(objective.space, 2)
    regs = torch.tensor([1e-30, 1e-1, 1.0], dtype=DOUBLE)
    values = objective.along_reg(theta, problem, regs)
    assert bool(values[:, 0].isinf().all())
    assert bool(values[:, 1:].isfinite().all())


def test_prior_has_its_gradient():
    objective = objective_of(MACHINES["rls-ard"](), tl.criteria.mse, prior=2.0)
    theta, problem = candidates(objective.space, 1)
    objective.prior.anchor(theta.repeat(2, 1) + 0.7, torch.tensor([3.0, 3.0], dtype=DOUBLE))
    plain = objective_of(MACHINES["rls-ard"](), tl.criteria.mse)
    value, slope = objective(theta, problem, gradient=True)
    bare, bare_slope = plain(theta, problem, gradient=True)
    torch.testing.assert_close(value - bare, torch.tensor([2 * 3 / 14 * 2 * 0.49], dtype=DOUBLE))
    expected = torch.tensor([[0.0, 1.0, 1.0]], dtype=DOUBLE) * (-2 * 3 / 14 * 2 * 0.7)  # reg has no prior
    torch.testing.assert_close(slope - bare_slope, expected)
