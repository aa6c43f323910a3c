"""The SMO, its inner solver, the bound and the checks, against plain refits by enumeration."""

import sys
from collections import Counter

import pytest
import torch
from counting import Counting
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_svm import loo_by_enumeration, svm_by_enumeration
from svm_problems import loo_by_smo, problems, rbf, toy
from torch import Tensor
from torch.testing import assert_close

import torchloo as tl
from torchloo import guards
from torchloo.svm import svm, svm_lco, svm_loo
from torchloo.svm.arguments import Caller
from torchloo.svm.fit import trained
from torchloo.svm.proof.certify import value_bound
from torchloo.svm.proof.checks import sufficiency_checks
from torchloo.svm.result import BALL, BOUND, CUT, KKT, UNUSED
from torchloo.svm.smo import loo_smo
from torchloo.svm.smo.bound import DualBound
from torchloo.svm.smo.free_newton import FreeSets
from torchloo.svm.smo.loo_smo import leave_one_out_by_smo, seed_without
from torchloo.svm.smo.options import SMOOptions
from torchloo.svm.smo.rounds import SMOState, smo
from torchloo.svm.smo.working_sets import solve_within
from torchloo.svm.solve.low_rank import in_double
from torchloo.svm.stacked import Tables


@settings(max_examples=30, deadline=None)
@given(problems(most=7))
def test_svm_equals_enumeration(problem):
    K, y, C = problem
    alpha, bias = svm_by_enumeration(K.numpy(), y.numpy(), C)
    expected = K @ (torch.from_numpy(alpha) * y) + bias
    # Coefficients of size C carry rounding of size 1e-16 C times the condition of the free set.
    assert_close(svm(K, y, C).outputs, expected, atol=1e-6 * max(1.0, C / 1e3), rtol=1e-6)


@settings(max_examples=25, deadline=None)
@given(problems(most=7))
def test_loo_and_every_check_agree_with_enumeration(problem):
    K, y, C = problem
    expected = torch.from_numpy(loo_by_enumeration(K.numpy(), y.numpy(), C))
    tolerance = 1e-6 * max(1.0, C / 1e3)
    assert_close(svm_loo(K, y, C).outputs, expected, atol=tolerance, rtol=1e-6)
    wrong = (expected >= 0) != (y > 0)
    sure = expected.abs() > 10 * tolerance
    fit = svm(K, y, C)
    alpha, box = (fit.coef * y).clamp_min(0), torch.full_like(y, C)
    doubt = value_bound(K.diagonal(), alpha, y * fit.outputs - 1, box, in_double(K).rounding)
    by = sufficiency_checks(K, y, alpha, fit.outputs, box, doubt)
    assert not bool(((by > 1) & wrong & sure).any())
    assert not bool(((by == 1) & ~wrong & sure).any())
    for method in ("auto", "smo"):
        labels = svm_loo(K, y, C, method=method, values=False, epsilon=1e-6)
        assert not bool((labels.certified & (labels.errors != wrong) & sure).any())


@settings(max_examples=40, deadline=None)
@given(problems())
def test_smo_reaches_its_optimality_conditions(problem):
    K, y, C = problem
    box = torch.full_like(y, C)[None]
    epsilon = 1e-6 * max(1.0, C / 1e3)
    end = smo(K[None], y[None], box, torch.zeros_like(box), epsilon, options=SMOOptions(most_rounds=200))
    assert float(end.violation) <= epsilon
    assert bool(((end.alpha >= 0) & (end.alpha <= C)).all())
    assert abs(float(end.alpha[0] @ y)) <= 1e-9 * C
    assert_close(end.F[0] + y, K @ (end.alpha[0] * y), atol=1e-9 * max(1.0, C), rtol=1e-9)


@settings(max_examples=40, deadline=None)
@given(problems(), st.integers(0, 4))
def test_a_seed_is_feasible(problem, r):
    K, y, C = problem
    box = torch.full_like(y, C)[None]
    full = smo(K[None], y[None], box, torch.zeros_like(box), 1e-3, options=SMOOptions(most_rounds=200)).alpha
    box[0, r] = 0
    seed = seed_without(full, y[None], box, K[r : r + 1])
    assert bool(((seed >= 0) & (seed <= box)).all())
    assert abs(float(seed[0] @ y)) <= 1e-9 * C


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 12), st.integers(1, 12))
def test_the_inner_solver_satisfies_its_optimality_conditions(seed, q, rank):
    g = torch.Generator().manual_seed(seed)
    factor = torch.randn(3, q, rank, generator=g, dtype=torch.float64)
    Q = factor @ factor.mT
    c = torch.randn(3, q, generator=g, dtype=torch.float64)
    u = 10 ** torch.empty(3, q, dtype=torch.float64).uniform_(-0.3, 0.3, generator=g)
    u[:, 0] = 0
    a = torch.randn(3, q, generator=g, dtype=torch.float64).sign()
    start = u * torch.rand(3, q, generator=g, dtype=torch.float64)
    K, F = Q * a[:, :, None] * a[:, None], a * ((Q @ start[:, :, None])[:, :, 0] + c)
    x = solve_within(K, a, u, start, F)
    assert bool(((x >= 0) & (x <= u)).all())
    gradient = (Q @ x[:, :, None])[:, :, 0] + c
    scale = 1e-6 * (1 + c.abs().max())
    for k in range(3):
        slope = gradient[k] * a[k]
        rises = (u[k] > 0) & torch.where(a[k] > 0, x[k] < u[k], x[k] > 0)
        falls = (u[k] > 0) & torch.where(a[k] > 0, x[k] > 0, x[k] < u[k])
        least = float(slope[rises].min()) if bool(rises.any()) else torch.inf
        most = float(slope[falls].max()) if bool(falls.any()) else -torch.inf
        assert most - least <= scale, (most - least, scale)
        assert_close((a[k] * x[k]).sum(), (a[k, 1:] * start[k, 1:]).sum())


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 12), st.integers(1, 12), st.floats(-4, 8))
def test_the_inner_solver_keeps_to_the_boxes_and_the_equality(seed, q, rank, C):
    """Also where rounding lets no interior point come near: boxes of 1e8, starts far from the optimum."""
    g = torch.Generator().manual_seed(seed)
    factor = torch.randn(3, q, rank, generator=g, dtype=torch.float64)
    box = 10 ** (C + torch.randn(3, q, generator=g, dtype=torch.float64))
    box[:, 0] = 0
    y = torch.randn(3, q, generator=g, dtype=torch.float64).sign()
    start = box * torch.rand(3, q, generator=g, dtype=torch.float64)
    alpha = solve_within(factor @ factor.mT, y, box, start, torch.randn(3, q, generator=g).double())
    assert bool(((alpha >= 0) & (alpha <= box)).all())
    assert bool((((alpha - start) * y).sum(1).abs() <= 1e-9 * box.amax(1)).all())


@pytest.mark.parametrize(("kernel", "C"), [("rbf", 100.0), ("linear", 10.0)])
@pytest.mark.parametrize("seed", [True, False])
def test_the_bound_reads_no_more_columns_and_proves_what_it_says(kernel, C, seed):
    X, y = toy(20, n=60, d=3)
    K = rbf(X) if kernel == "rbf" else X @ X.T
    exact = svm_loo(K, y, C)
    plain, bound = (
        loo_by_smo(K, y, C, False, 1e-3, options)
        for options in (
            SMOOptions(working=24, bound=b, gap_ball=b, seed=seed, newton=0) for b in (False, True)
        )
    )
    assert int(bound.columns.sum()) <= 1.05 * int(plain.columns.sum()) + len(y) * (not seed)
    stopped = (bound.resolved_by == BOUND) | (bound.resolved_by == BALL)
    assert bool(stopped.any())
    assert bool(bound.certified[stopped].all())
    sure = bound.certified & exact.certified
    assert bool(((bound.outputs > 0) == (exact.outputs >= 0))[sure].all())


def test_pairs_alone_agree_and_are_cut_openly():
    X, y = toy(21, n=40)
    K = rbf(X)
    full = loo_by_smo(K, y, 5.0, True, 1e-6, SMOOptions(working=2))
    assert_close(full.outputs, svm_loo(K, y, 5.0).outputs, atol=1e-5, rtol=1e-5)
    cut = loo_by_smo(K, y, 5.0, True, 1e-6, SMOOptions(working=2, most_rounds=3))
    assert set(cut.resolved_by.unique().tolist()) <= {UNUSED, KKT, CUT}
    assert bool((cut.resolved_by == CUT).any())


@pytest.mark.parametrize(("kernel", "C"), [("rbf", 1.0), ("rbf", 100.0), ("linear", 1.0), ("linear", 100.0)])
def test_values_equal_smo_at_a_gap_of_rounding(kernel, C):
    X, y = toy(22, n=50, d=4)
    K = rbf(X) if kernel == "rbf" else X @ X.T
    held = svm_loo(K, y, C, method="smo", epsilon=1e-9)
    assert_close(svm_loo(K, y, C).outputs, held.outputs, atol=1e-7, rtol=1e-7)


def test_a_problem_that_gets_no_nearer_is_given_up():
    X, y = toy(3, n=20)
    K, box = rbf(X)[None], torch.full((1, 20), 1e6, dtype=torch.float64)
    end = smo(K, y[None], box, torch.zeros_like(box), epsilon=0.0, options=SMOOptions(patience=3))
    assert int(end.waited) <= 3
    assert float(end.violation) < 1e-3


def poured(amount: float, room: Tensor, near: Tensor) -> Tensor:
    """What each row takes of the amount, the nearest first."""
    taken = torch.zeros_like(room)
    for i in near.argsort(descending=True).tolist():
        taken[i] = min(amount, float(room[i]))
        amount -= float(taken[i])
    return taken


def moved_by_seeding(K: Tensor, y: Tensor, C: float, alpha: Tensor, r: int) -> int:
    """Coefficients that change when what row r held goes to its class, then comes off the other one."""
    start, own = alpha.clone(), y == y[r]
    start[r] = 0
    given = poured(float(alpha[r]), torch.where(own, C - start, 0.0).index_fill(0, torch.tensor(r), 0), K[r])
    start += given
    start -= poured(float(alpha[r] - given.sum()), torch.where(own, 0.0, start), K[r])
    box = torch.full_like(y, C).index_fill(0, torch.tensor(r), 0)
    seed = seed_without(alpha[None], y[None], box[None], K[r : r + 1])[0]
    assert_close(seed, start, rtol=0, atol=1e-12)
    return int((seed != alpha).sum())  # to the last digit, which seeding may leave somewhere too


def counted(monkeypatch) -> tuple[dict[int, int], dict[int, int]]:
    """Rounds that change something, and the coefficients that they and Newton steps change, by problem."""
    module = sys.modules["torchloo.svm.smo.rounds"]
    rounds, changes = Counter(), Counter()

    def watched(step, counts_rounds):
        def changed(first, state, *others):
            before = state.alpha.clone()
            moved = step(first, state, *others)
            for name, count in zip(
                state.number.tolist(), (state.alpha != before).sum(1).tolist(), strict=True
            ):
                rounds[name] += counts_rounds and count > 0
                changes[name] += count
            return moved

        return changed

    for owner, name in ((module, "improved"), (module, "pair_step"), (FreeSets, "_step")):
        monkeypatch.setattr(owner, name, watched(getattr(owner, name), owner is module))
    return rounds, changes


@pytest.mark.parametrize("seed", [True, False])
@pytest.mark.parametrize("working", [2, 8])
def test_iterations_and_columns_are_those_of_a_loop_that_counts(seed, working, monkeypatch):
    X, y = toy(5, n=20, d=3)
    K, alpha = rbf(X), (svm(rbf(X), y, 2.0).coef * y).clamp_min(0)
    rounds, changes = counted(monkeypatch)
    held = loo_by_smo(K, y, 2.0, True, 1e-3, SMOOptions(seed=seed, working=working))
    rows = (alpha > 0).nonzero()[:, 0].tolist()
    assert len(rows) >= 10
    for r in range(20):
        if r not in rows:
            assert held.iterations[r] == held.columns[r] == 0
            continue
        begun = moved_by_seeding(K, y, 2.0, alpha, r) if seed else 0
        assert begun >= 2 * seed  # the row and one that takes what it held
        name = rows.index(r)
        assert int(held.columns[r]) == changes[name] + begun
        if working == 2:
            assert int(held.iterations[r]) == rounds[name] == changes[name] / 2
        else:
            assert int(held.iterations[r]) >= rounds[name]
    assert sum(rounds.values()) > len(rows)


@pytest.mark.parametrize("bound", [True, False])
def test_the_bound_without_a_seed_reads_the_column_of_its_row(bound, monkeypatch):
    X, y = toy(5, n=20, d=3)
    _, changes = counted(monkeypatch)
    options = SMOOptions(seed=False, bound=bound, gap_ball=bound, trials=20)
    held = loo_by_smo(rbf(X), y, 2.0, False, 1e-3, options)
    opened = torch.isin(held.resolved_by, torch.tensor([KKT, BOUND, BALL])).nonzero()[:, 0].tolist()
    assert len(opened) >= 5
    assert held.columns[opened].tolist() == [changes[name] + bound for name in range(len(opened))]


def test_columns_of_clusters_count_what_seeding_moves(monkeypatch):
    X, y = toy(24, n=30)
    K, alpha = rbf(X), (svm(rbf(X), y, 3.0).coef * y).clamp_min(0)
    _, changes = counted(monkeypatch)
    held = svm_lco(K, y, 3.0, range(30), method="smo")
    for r in range(30):
        begun = moved_by_seeding(K, y, 3.0, alpha, r)
        assert int(held.kernel_columns[r]) == changes[r] + begun
        assert bool(held.iterations[r] > 0) == bool(changes[r] > 0)
    assert sum(changes.values()) > 30


def test_columns_of_a_round_are_the_coefficients_that_it_changes():
    X, y = toy(25, n=50)
    box = torch.full((1, 50), 3.0, dtype=torch.float64)
    options = SMOOptions(working=16, most_rounds=2, newton=0)
    end = smo(rbf(X)[None], y[None], box, torch.zeros_like(box), 1e-6, options=options)
    assert int(end.columns) == int((end.alpha != 0).sum()) > 2


@pytest.mark.parametrize("working", [16, 64])
def test_problems_on_several_kernel_matrices_are_solved_as_each_alone(working, monkeypatch):
    """Different kernels, boxes, labels and starts in one batch."""
    X, y = toy(23, n=24, d=3)
    K = torch.stack([rbf(X, 0.7), rbf(X, 2.0), X @ X.T])
    table = torch.tensor([2, 0, 1, 1, 0, 2])
    labels = torch.stack([y, y, y, -y, y.flip(0), y])
    box = torch.tensor([1.0, 3.0, 0.3, 10.0, 1.0, 0.1], dtype=torch.float64)[:, None].repeat(1, 24)
    box[[1, 3], [5, 7]] = 0  # rows left out
    start = torch.zeros_like(box)
    start[0] = smo(K[2:], labels[:1], box[:1], start[:1], 0.5).alpha[0]
    _, changes = counted(monkeypatch)
    together = smo(K, labels, box, start, 1e-8, table, SMOOptions(working=working, most_rounds=1000))
    assert torch.equal(together.table, table)
    assert bool((together.violation <= 1e-8).all())
    assert together.columns.tolist() == [changes[b] for b in range(6)]
    for b, t in enumerate(table.tolist()):
        one = slice(b, b + 1)
        alone = smo(
            K[t : t + 1], labels[one], box[one], start[one], 1e-8, options=SMOOptions(working=working)
        )
        assert_close(together.F[one], alone.F, rtol=1e-6, atol=1e-6)
        assert_close(together.F[b], K[t] @ (together.alpha[b] * labels[b]) - labels[b])
        assert_close(together.bias[one], alone.bias, rtol=1e-6, atol=1e-6)
        assert int(together.steps[b]) > 0


@pytest.mark.parametrize(("n", "rounds"), [(11, 100), (80, 125)])
@pytest.mark.parametrize("function", [svm_loo, svm_lco])
def test_rows_without_progress_are_given_up_after_a_hundred_sweeps(function, n, rounds, monkeypatch):
    """Coefficients that go to and fro within rounding, as they may in boxes of 1e8."""
    asked = []

    def to_and_fro(K, state, W, *others):
        asked.append(len(W))
        assert len(asked) <= rounds
        return torch.ones(len(W), dtype=torch.bool)

    module = sys.modules["torchloo.svm.smo.rounds"]
    monkeypatch.setattr(module, "improved", to_and_fro)
    monkeypatch.setattr(FreeSets, "steps", lambda sets, state, *others: state.number < 0)
    X, y = toy(21, n=n)
    held = function(rbf(X), y, 5.0, *([range(n)] if function is svm_lco else []), method="smo")
    assert len(asked) == rounds
    assert int((held.resolved_by == CUT).sum()) == asked[0] > 3
    assert "not solved: out of rounds" in str(held)


def crowded(n: int = 160) -> tuple[Tensor, Tensor, float]:
    """A problem with more free variables than a working set."""
    X, y = toy(26, n=n, d=6)
    return rbf(X, 2.0), y, 1e4


def test_newton_steps_finish_what_working_sets_cannot_hold(monkeypatch):
    K, y, C = crowded()
    fit = svm(K, y, C)
    alpha = (fit.coef * y).clamp_min(0)
    assert int(((alpha > 1e-6 * C) & (alpha < C * (1 - 1e-6))).sum()) > 64
    calls = Counter()
    module = sys.modules["torchloo.svm.smo.rounds"]
    improve = module.improved
    monkeypatch.setattr(module, "improved", lambda *x: calls.update(rounds=1) or improve(*x))
    held = svm_loo(K, y, C, method="smo", epsilon=1e-6)
    assert calls["rounds"] <= 60
    assert bool((held.resolved_by != CUT).all())
    assert int(held.newton_steps.sum()) > 0
    assert_close(held.outputs, svm_loo(K, y, C).outputs, atol=1e-4, rtol=1e-4)


def test_no_newton_steps_where_none_are_asked_for():
    X, y = toy(5, n=20, d=3)
    for options in (SMOOptions(newton=0), SMOOptions(working=2)):
        assert int(loo_by_smo(rbf(X), y, 2.0, True, 1e-3, options).newton.sum()) == 0
    assert int(loo_by_smo(rbf(X), y, 2.0, True, 1e-3).newton.sum()) > 0


def directions(K: Tensor, free: Tensor, F: Tensor, table: Tensor) -> Tensor:
    """Newton directions on kernel matrices (T, n, n) by an ascending table."""
    sets, tables = FreeSets(K), Tables(table, len(K))
    stale, size = sets.look(free, tables)
    assert int(stale) == len(K)
    sets.renew(int(size))
    return sets.directions(free, F, tables)


@pytest.mark.parametrize("rank", [2, 40])
def test_a_direction_leads_to_the_maximum_on_its_free_set(rank):
    """Also for free sets unlike the common one, and with more variables than the rank of K."""
    g = torch.Generator().manual_seed(4)
    X = torch.randn(30, rank, generator=g, dtype=torch.float64)
    K, F = X @ X.T, torch.randn(5, 30, generator=g, dtype=torch.float64)
    free = torch.rand(5, 30, generator=g) < torch.linspace(0.1, 0.9, 30)
    d = directions(K[None], free, F, torch.zeros(5, dtype=torch.long))
    assert not bool(d[~free].any())
    assert_close(d.sum(1), torch.zeros(5, dtype=torch.float64), atol=1e-8 * float(d.abs().sum()), rtol=0)
    assert bool((-(F * d).sum(1) > 0).all())  # uphill
    after = (F + d @ K).masked_fill(~free, torch.nan)
    if rank == 40:
        spread = after - after.nanmean(1, keepdim=True)
        assert_close(spread[free], torch.zeros_like(spread[free]), atol=1e-5, rtol=0)
    else:  # no maximum: the direction has no curvature to speak of
        assert bool(((d @ K * d).sum(1) < 1e-3 * -(F * d).sum(1)).all())


def test_an_smo_from_zero_takes_newton_steps_too():
    K, y, C = crowded(120)
    box = torch.full((1, 120), C, dtype=torch.float64)
    end = smo(K[None], y[None], box, torch.zeros_like(box), 1e-8, options=SMOOptions(most_rounds=200))
    assert float(end.violation) <= 1e-8
    assert int(end.newton) > 0
    assert_close(end.F[0] + y, K @ (end.alpha[0] * y), atol=1e-9 * C, rtol=1e-9)
    assert abs(float(end.alpha[0] @ y)) <= 1e-9 * C


@pytest.mark.parametrize(("bound", "gap_ball"), [(True, False), (False, True), (True, True), (False, False)])
def test_the_two_proofs_are_switched_separately(bound, gap_ball):
    X, y = toy(20, n=60, d=3)
    options = SMOOptions(working=2, bound=bound, gap_ball=gap_ball, trials=60)
    held = svm_loo(rbf(X), y, 1.0, method="smo", values=False, smo=options)
    by = held.resolved_by
    assert bool((by == BOUND).any()) == bound
    assert bool((by == BALL).any()) == gap_ball
    proved, solved = (by == BOUND) | (by == BALL), (by == BOUND) | (by == BALL) | (by == KKT)
    assert_close(held.proved_early, proved.sum() / solved.sum())
    assert bool((held.errors == svm_loo(rbf(X), y, 1.0).errors)[held.certified].all())


def test_a_problem_that_meets_its_conditions_first_is_not_called_proved():
    """A start that is optimal to epsilon: the rule would prove every sign, but is not asked."""
    X, y = toy(20, n=60, d=3)
    options = SMOOptions(bound=True, gap_ball=True, trials=60)
    held = svm_loo(rbf(X), y, 1.0, method="smo", values=False, epsilon=1e3, smo=options)
    assert bool((held.resolved_by == KKT).any())
    assert float(held.proved_early) == 0


def test_proofs_that_settle_too_few_of_the_trials_are_given_up():
    X, y = toy(20, n=60, d=3)
    asked = {
        useful: svm_loo(
            rbf(X), y, 1.0, method="smo", values=False, smo=SMOOptions(working=2, bound=True, useful=useful)
        )
        for useful in (0.0, 1.0)
    }
    proved = {useful: int((held.resolved_by == BOUND).sum()) for useful, held in asked.items()}
    assert proved[0.0] > 10 >= proved[1.0]


def test_a_round_of_pairs_is_one_step(monkeypatch):
    module = sys.modules["torchloo.svm.smo.rounds"]
    step, taken = module.pair_step, Counter()
    monkeypatch.setattr(module, "improved", None)  # nor any step within working sets
    monkeypatch.setattr(
        module, "pair_step", lambda K, s, *x: taken.update(s.number.tolist()) or step(K, s, *x)
    )
    X, y = toy(21, n=40)
    held = svm_loo(rbf(X), y, 5.0, method="smo", smo=SMOOptions(working=2))
    opened = (held.resolved_by == KKT).nonzero()[:, 0]
    assert held.iterations[opened].tolist() == [taken[name] for name in range(len(opened))]


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"working": 2}, TypeError, "smo must be an SMOOptions, got dict"),
        (SMOOptions(working=1), ValueError, "smo.working must be a whole number, 2 or more, got 1"),
        (SMOOptions(newton=-1), ValueError, "smo.newton must be a whole number, 0 or more, got -1"),
        (SMOOptions(bound=1), TypeError, "smo.bound must be True or False, got 1"),
        (SMOOptions(useful="a"), ValueError, "smo.useful must be a share from 0 to 1, got 'a'"),
        (SMOOptions(useful=2.0), ValueError, "smo.useful must be a share from 0 to 1, got 2.0"),
    ],
)
def test_options_that_mean_nothing_are_refused(options, error, match):
    X, y = toy(21, n=10)
    with pytest.raises(error, match=f"svm_loo: {match}"):
        svm_loo(rbf(X), y, 1.0, method="smo", smo=options)


def test_options_of_the_smo_are_for_the_smo():
    X, y = toy(21, n=10)
    with pytest.raises(ValueError, match='smo is for method "smo", got method'):
        tl.SVC(tl.kernels.RBF()).loo(X, y, smo=tl.svm.SMOOptions())
    held = tl.SVC(tl.kernels.RBF()).loo(X, y, method="smo", smo=tl.svm.SMOOptions(working=2))
    assert int(held.newton_steps.sum()) == 0


@pytest.mark.parametrize(
    "options",
    [
        SMOOptions(working=2, bound=True, gap_ball=True),
        SMOOptions(working=12, bound=True, gap_ball=True, newton=0),
        SMOOptions(working=8, bound=True, gap_ball=True, useful=0.0),
        SMOOptions(working=16),
    ],
    ids=["pairs", "sets", "newton", "plain"],
)
def test_where_the_host_must_wait_it_does_so_once_a_round(options, monkeypatch):
    """As on an accelerator: what is looked at on a CPU at no cost is computed for all problems instead."""
    X, y = toy(27, n=24, d=3)
    K = torch.stack([rbf(X, 0.8), rbf(X, 2.0), X @ X.T])
    table, rows = torch.arange(3).repeat_interleave(24), torch.arange(24).repeat(3)
    labels = y.expand(72, -1).contiguous()
    box = torch.tensor([20.0, 3.0, 1.0], dtype=torch.float64)[table][:, None].repeat(1, 24)
    box = box.scatter(1, rows[:, None], 0.0)
    module, rounds = sys.modules["torchloo.svm.smo.rounds"], Counter()
    look = module._look
    monkeypatch.setattr(module, "_look", lambda *x: rounds.update(looks=1) or look(*x))

    def solve() -> SMOState:
        rounding = torch.full((3, 24), 1e-9, dtype=torch.float64)
        highest = torch.full((72,), torch.inf, dtype=torch.float64)
        rule = DualBound(K, table, rows, rounding, highest, 0 * box, options) if options.bound else None
        rounds.clear()
        return smo(K, labels, box, torch.zeros_like(box), 1e-3, table, options, rule)

    usual = solve()
    monkeypatch.setattr(guards, "_READ_AT_NO_COST", set())
    with Counting() as count:
        end = solve()
    assert count.synchronisations == rounds["looks"] > 3
    assert bool(((end.violation <= 1e-3) | (end.stopped_by > 0)).all())
    assert bool((end.newton > 0).any()) == bool((usual.newton > 0).any())
    assert_close(
        end.F + labels, torch.einsum("bn,bnm->bm", end.alpha * labels, K[table]), atol=1e-8, rtol=1e-8
    )
    assert bool((usual.sign != 0).any()) == options.bound
    assert abs(int((end.sign != 0).sum()) - int((usual.sign != 0).sum())) <= 12
    both = (usual.sign != 0) & (end.sign != 0)
    assert torch.equal(usual.sign[both], end.sign[both])
    exact = torch.cat([svm_loo(k, y, C).outputs for k, C in zip(K, (20.0, 3.0, 1.0), strict=True)])
    assert bool((end.sign * exact >= 0).all())


@pytest.mark.parametrize("options", [SMOOptions(), SMOOptions(working=2, bound=True, gap_ball=True)])
def test_a_grid_of_kernels_and_C_is_one_call_of_one_loop(options, monkeypatch):
    X, y = toy(29, n=30, d=3)
    K, C = torch.stack([rbf(X, 0.7), rbf(X, 2.0)])[:, None], torch.tensor([0.3, 3.0, 30.0]).double()
    calls = Counter()
    monkeypatch.setattr(loo_smo, "smo", lambda *x: calls.update(loops=1) or smo(*x))
    grid = svm_loo(K, y, C, method="smo", values=False, smo=options)
    assert calls["loops"] == 1
    assert grid.errors.shape == (2, 3, 30)
    for k in range(2):
        for c in range(3):
            alone = svm_loo(K[k, 0], y, C[c], method="smo", values=False, smo=options)
            assert torch.equal(grid.errors[k, c], alone.errors)
            # Ties of pairs fall by rounding, and with them the round of a proof.
            assert int((grid.resolved_by[k, c] != alone.resolved_by).sum()) <= 1


@pytest.mark.parametrize("values", [True, False])
def test_a_batch_takes_few_operations_more_than_its_costliest_problem(values):
    """Training and leave-one-out of 64 problems: kernels, values of C and labels."""
    X, y = toy(28, n=60, d=3)
    scales, C = torch.tensor([0.5, 1.0, 2.0, 6.0]), torch.logspace(-1, 3, 8).double()
    K = torch.stack([rbf(X, scale) for scale in scales]).repeat_interleave(16, 0)
    labels = torch.stack([y, y.roll(7)]).repeat(32, 1)
    box = C.repeat_interleave(2).repeat(4)[:, None].repeat(1, 60)

    def counted_loo(some: slice) -> Counting:
        with Counting() as count:
            part = K[some], labels[some], box[some]
            leave_one_out_by_smo(*part, trained(Caller("test"), *part), values, 1e-3)
        return count

    together, alone = counted_loo(slice(64)), [counted_loo(slice(t, t + 1)) for t in range(64)]
    assert together.operations <= 3 * max(count.operations for count in alone)
    assert together.synchronisations <= 2 * max(count.synchronisations for count in alone)
