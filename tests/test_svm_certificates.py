"""What settles a row without solving to the end: the checks of Table 1, E2 and the dual bound."""

import pytest
import torch
from hypothesis import given, settings
from svm_problems import loo_by_smo, problems, rbf, solved, toy
from torch import Tensor
from torch.testing import assert_close

from torchloo.svm import RESOLVED_BY, svm, svm_loo
from torchloo.svm.path.unlearn import unlearn
from torchloo.svm.proof.certify import Held, gap_ball_sign, value_bound
from torchloo.svm.proof.checks import only_of_its_class, sufficiency_checks
from torchloo.svm.records import RowOutcome, Targets
from torchloo.svm.result import BALL, BOUND
from torchloo.svm.smo import bound, loo_smo
from torchloo.svm.smo.options import SMOOptions
from torchloo.svm.smo.rounds import smo

CHECKS = ("check 1: not a support vector", "check 2: the full machine errs", "check 3: Joachims")
E2 = "E2: norm of the change"


def refit(K: Tensor, y: Tensor, C: float, r: int) -> float:
    """Decision value at row r of the machine trained on the others."""
    keep = torch.arange(len(y)) != r
    return svm(K[keep][:, keep], y[keep], C).from_kernel(K[r : r + 1, keep]).item()


def first_that_applies(K: Tensor, y: Tensor, alpha: Tensor, f: Tensor, r: int) -> str | None:
    """Table 1 and E2 for one row, as the formulas stand; the machine has a free support vector."""
    n = len(y)
    if alpha[r] == 0:
        return CHECKS[0]
    e = (y[r] * f[r]).item()
    if e < 0:
        return CHECKS[1]
    values = []
    for i in range(n):
        if i != r:
            c = (y[r] * (y[i] - f[i] + f[r])).item()
            A = (alpha[r] * (K[i, i] + K[r, r] - 2 * K[i, r])).clamp_min(0).sqrt().item()
            v = max(e**0.5, A / 2)
            values.append(c + v**2 - A * v - e)
    same_class = sum(1 for i in range(n) if i != r and y[i] == y[r])
    if sorted(values)[same_class - 1] <= 0:
        return None
    R2 = max((K[i, i] - K[i, j]).item() for i in range(n) for j in range(n))
    return CHECKS[2] if 2 * alpha[r].item() * R2 + max(0.0, 1 - e) < 1 else E2


@pytest.mark.parametrize("method", ["auto", "smo"])
@pytest.mark.parametrize(("seed", "C"), [(0, 0.5), (1, 0.5)])
def test_every_check_settles_the_rows_that_its_formula_says_and_the_refit_confirms(method, seed, C):
    X, y = toy(seed, n=40)
    K = rbf(X)
    fit = svm(K, y, C)
    expected = [first_that_applies(K, y, fit.coef * y, fit.outputs, r) for r in range(40)]
    assert all(expected.count(name) >= 5 for name in (*CHECKS, E2))
    held = svm_loo(K, y, C, method=method, values=False)
    for r, name in enumerate(expected):
        received = RESOLVED_BY[held.resolved_by[r]]
        if name is None:
            assert received not in (*CHECKS, E2)
            continue
        assert received == name
        assert held.certified[r]
        assert held.iterations[r] == held.kernel_columns[r] == 0
        assert held.errors[r] == (name == CHECKS[1]) == (y[r] * refit(K, y, C, r) < 0)


def test_checks_that_need_labels_only_give_no_values():
    X, y = toy(0, n=40)
    for method in ("auto", "smo"):
        held = svm_loo(rbf(X), y, 0.5, method=method)
        names = {RESOLVED_BY[by] for by in held.resolved_by.unique()}
        assert CHECKS[0] in names
        assert names.isdisjoint({*CHECKS[1:], E2})


@pytest.mark.parametrize("method", ["auto", "path", "smo"])
@pytest.mark.parametrize("values", [True, False])
@pytest.mark.parametrize("label", [1.0, -1.0])
def test_the_only_row_of_a_class_is_settled_by_what_is_left(method, values, label):
    X, y = toy(15)
    y = torch.full_like(y, -label)
    y[4] = label
    held = svm_loo(rbf(X), y, 1.0, method=method, values=values)
    assert RESOLVED_BY[held.resolved_by[4]] == "one class left"
    assert held.outputs[4] == -label
    assert held.errors[4]
    assert held.certified[4]
    assert held.iterations[4] == held.kernel_columns[4] == 0
    assert int((held.resolved_by == held.resolved_by[4]).sum()) == 1


class Telling(bound.DualBound):
    """Proves the first so many of the rows that it is for, when it is asked about them, and nothing else."""

    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        type(self).rows, type(self).going, type(self).asked = self.target.tolist(), [], []

    def advance(self, state, going: Tensor) -> Tensor:
        type(self).going.append(self.target[going].tolist())
        type(self).asked.append([])
        return super().advance(state, going)

    def _proofs(self, s, rows: Tensor) -> tuple[Tensor, Tensor]:
        self.asked[-1] += self.target[rows].tolist()
        done = torch.isin(self.target[rows], torch.tensor(self.rows[: self.proves]))
        return done.to(s.y), done.long() * BOUND


@pytest.mark.parametrize("proves", [0, 4, 5, 10])
def test_the_bound_goes_on_if_it_settles_half_of_the_first_ten_open_rows(proves, monkeypatch):
    X, y = toy(8, n=60)
    rule = type("Rule", (Telling,), {"proves": proves})
    monkeypatch.setattr(loo_smo, "DualBound", rule)
    end = loo_by_smo(rbf(X), y, 5.0, False, 1e-3, SMOOptions(bound=True, working=4, newton=0))
    rows, trials = rule.rows, rule.rows[:10]
    assert len(rows) > 20
    proved: list[int] = []
    for going, asked in zip(rule.going, rule.asked, strict=True):
        failed = len([r for r in trials if r not in going and r not in proved])
        useful = [r for r in going if r in trials or len(proved) >= 5]
        assert asked == (useful if failed <= 5 else [])
        proved += [r for r in asked if r in rows[:proves]]
    others = {r for asked in rule.asked for r in asked} - set(trials)
    assert len(others) > 10 if proves >= 5 else not others
    assert (end.resolved_by == BOUND).nonzero()[:, 0].tolist() == rows[:proves]


def by_sets_of_eight(K: Tensor, y: Tensor, C: float) -> RowOutcome:
    return loo_by_smo(
        K, y, C, False, 1e-3, SMOOptions(working=8, bound=True, gap_ball=True, newton=0, trials=30)
    )


def H_of(K: Tensor, y: Tensor, r: int, beta: Tensor) -> float:
    """sum beta - 1/2 sum beta_i beta_j y_i y_j k'_ij for f(x_r) = 0."""
    centred = K - K[r][:, None] - K[r][None] + K[r, r]
    a = beta * y
    return (beta.sum() - a @ centred @ a / 2).item()


def climbed(K: Tensor, y: Tensor, box: Tensor, r: int, beta: Tensor, movable: list[int]) -> Tensor:
    """Steps along the coordinate that raises H most, each to its maximum there."""
    centred = K - K[r][:, None] - K[r][None] + K[r, r]
    beta = beta.clone()
    for _ in range(bound._CLIMB):
        reached = []
        for i in movable:
            new = beta.clone()
            h = 1 - y[i] * (centred[i] @ (beta * y))
            new[i] = (beta[i] + h / centred[i, i]).clamp(0, box[i])
            reached.append((H_of(K, y, r, new), new))
        beta = max(reached, key=lambda pair: pair[0])[1]
    return beta


def highest_H(K: Tensor, y: Tensor, box: Tensor, r: int, beta: Tensor, movable: list[int]) -> float:
    """The maximum of H over some coordinates, one after the other until nothing moves."""
    centred = K - K[r][:, None] - K[r][None] + K[r, r]
    beta = beta.clone()
    for _ in range(10_000):
        before = beta.clone()
        for i in movable:
            h = 1 - y[i] * (centred[i] @ (beta * y))
            beta[i] = (beta[i] + h / centred[i, i]).clamp(0, box[i])
        if (beta - before).abs().max() < 1e-9 * box.max():
            return H_of(K, y, r, beta)
    raise AssertionError("coordinate ascent has not ended")


def test_the_bound_is_raised_along_the_columns_read_that_gain_most(monkeypatch):
    X, y = toy(0, n=12, d=3)
    K, box = rbf(X), torch.full((12,), 3.0, dtype=torch.float64)
    others = {r: [i for i in range(12) if i != r] for r in range(12)}
    best = {r: highest_H(K, y, box, r, torch.zeros_like(y), others[r]) for r in range(12)}
    rises = []

    class Watched(bound.DualBound):
        def _raised(self, s, at_r, read, beta, v):
            new, new_v = super()._raised(s, at_r, read, beta, v)
            assert bool(((new >= 0) & (new <= s.box)).all())
            assert_close(new_v, (new * y) @ K)
            for b, r in enumerate(at_r.r[:, 0].tolist()):
                columns = read[b].nonzero()[:, 0].tolist()
                low, high = H_of(K, y, r, beta[b]), H_of(K, y, r, new[b])
                assert_close(new[b], climbed(K, y, box, r, beta[b], columns), atol=1e-6, rtol=1e-6)
                assert high == pytest.approx(H_of(K, y, r, climbed(K, y, box, r, beta[b], columns)), abs=1e-9)
                assert low - 1e-9 <= high <= best[r] + 1e-6
                rises.append((high - low) / (best[r] - low))
            return new, new_v

    monkeypatch.setattr(loo_smo, "DualBound", Watched)
    loo_by_smo(K, y, 3.0, False, 1e-3, SMOOptions(working=4, bound=True, gap_ball=True, newton=0))
    assert len(rises) >= 20
    assert max(rises) > 0.5  # of what was left to gain


def test_the_maximised_bound_settles_rows_sooner_than_the_gap_ball(monkeypatch):
    X, y = toy(3, n=30, d=3)
    K = rbf(X)
    raised = by_sets_of_eight(K, y, 3.0)
    monkeypatch.setattr(bound.DualBound, "_raised", lambda self, s, at_r, read, beta, v: (beta, v))
    idle = by_sets_of_eight(K, y, 3.0)
    settled = raised.resolved_by == BOUND
    assert int(settled.sum()) >= 15
    assert int((idle.resolved_by == BALL).sum()) >= 15
    assert int(raised.columns.sum()) < 0.8 * int(idle.columns.sum())
    for r in settled.nonzero()[:, 0].tolist():
        assert raised.outputs[r] * refit(K, y, 3.0, r) > 0


@settings(max_examples=30, deadline=None)
@given(problems())
def test_the_margin_of_a_row_never_rises_on_its_way_out(problem):
    """The optimal value is concave in alpha_r, so y_r f(x_r) falls with it: the path's early stop."""
    K, y, C = problem
    merged, full = solved(K, y, torch.full_like(y, C))
    held = full.alpha[0]
    target = (held > 1e-6 * held.max()).nonzero()[:, 0]
    margin, y_r = 1 + full.margin[0, target], merged.y[0, target]
    # Coefficients of size C carry rounding of size 1e-16 C times the condition of the free set.
    rounding = 1e-7 * max(1.0, C / 1e3)
    for share in (0.2, 0.4, 0.6, 0.8, 1.0):
        end = unlearn(merged, full, Targets(torch.zeros_like(target), target, (1 - share) * held[target]))
        later = torch.where(end.proved, y_r * end.output, margin)
        assert bool((later <= margin + rounding * (1 + margin.abs())).all())
        margin = later


@pytest.mark.parametrize("proofs", [True, False])
def test_a_proof_is_believed_where_the_output_is_exactly_zero(proofs):
    """The bias at which the SMO stops for row 2 is 0, and so is f there; its sign is proved to be -1."""
    x = torch.tensor([2.0, 0.0, 0.0, -2.0, 0.0, 0.0], dtype=torch.float64)
    y = torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0, -1.0], dtype=torch.float64)
    K = x[:, None] * x
    options = SMOOptions(bound=proofs, gap_ball=proofs)
    held = svm_loo(K, y, 1.0, method="smo", values=False, smo=options)
    exact = svm_loo(K, y, 1.0)
    assert bool(held.certified.all())
    assert held.errors.tolist() == exact.errors.tolist()


def test_machines_on_several_kernel_matrices_are_checked_as_each_alone():
    X, y = toy(14, n=24, d=3)
    K = torch.stack([rbf(X, 0.7), rbf(X, 2.0), X @ X.T])
    y = torch.stack([y, -y, torch.where(torch.arange(24) == 5, 1.0, -1.0).double()])
    box = torch.tensor([[5.0], [0.3], [20.0]], dtype=torch.float64).repeat(1, 24)
    rounding = torch.rand(3, 24, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 1e-6
    fit = svm(K, y, torch.tensor([5.0, 0.3, 20.0], dtype=torch.float64))
    alpha, f = fit.coef * y, fit.outputs
    doubt = value_bound(K.diagonal(dim1=1, dim2=2), alpha, y * f - 1, box, rounding)
    by = sufficiency_checks(K, y, alpha, f, box, doubt)
    for t in range(3):
        assert_close(doubt[t], value_bound(K[t].diagonal(), alpha[t], y[t] * f[t] - 1, box[t], rounding[t]))
        assert torch.equal(by[t], sufficiency_checks(K[t], y[t], alpha[t], f[t], box[t], doubt[t]))
        assert torch.equal(only_of_its_class(y)[t], only_of_its_class(y[t]))
    assert len(by.unique()) >= 4
    table, target = torch.arange(3).repeat_interleave(24), torch.arange(24).repeat(3)
    boxes = box[table].scatter(1, target[:, None], 0.0)
    end = smo(K, y[table], boxes, torch.zeros_like(boxes), 1.0, table, SMOOptions(newton=0))
    u, labels = end.F + y[table], y[table]
    held = Held(end.alpha, u, labels, boxes, target, rounding[table], table)
    proof = gap_ball_sign(K, held, end.bias)
    assert 0 < int((proof.sign == 0).sum()) < 60
    for t in range(3):
        of = slice(24 * t, 24 * t + 24)
        first = torch.zeros_like(target[of])
        one = Held(end.alpha[of], u[of], y[t], boxes[of], target[of], rounding[t], first)
        alone = gap_ball_sign(K[t : t + 1], one, end.bias[of])
        assert torch.equal(proof.sign[of], alone.sign)
        assert_close(proof.gap[of], alone.gap)
