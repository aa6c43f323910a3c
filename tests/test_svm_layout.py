"""Proofs from moved variables alone: they say what those from all variables say, and never more."""

from functools import partial

import pytest
import torch
from svm_problems import rbf, solved, toy
from torch.testing import assert_close

from torchloo.svm import held_out as code
from torchloo.svm import svm_loo
from torchloo.svm.path import unlearn
from torchloo.svm.path.layout import Layout
from torchloo.svm.proof.certify import (
    Held,
    bias_of_free,
    gap_ball_sign,
    held_out_bias,
    reach_of,
    sign_by_reach,
)
from torchloo.svm.proof.ended import Ended


def _machine(seed, n=60, C=3.0):
    X, y = toy(seed, n=n, noise=1.0)
    K = rbf(X, 1.2)
    generator = torch.Generator().manual_seed(seed)
    box = C * (0.5 + torch.rand(n, generator=generator, dtype=torch.float64))
    problem, full = solved(K, y, box)
    return problem, full, generator


def _moved(full, generator, others=0.2):
    """The free variables and some others."""
    more = torch.rand(len(full.free), generator=generator) < others
    return (full.free | more).nonzero()[:, 0]


@pytest.mark.parametrize("seed", range(4))
def test_what_is_told_of_standing_variables_is_what_all_variables_say(seed):
    problem, full, generator = _machine(seed)
    K, y, box = problem.K, problem.y, problem.box
    layout = Layout(problem, full, _moved(full, generator))
    moved = layout.moved
    stands = torch.ones_like(y, dtype=torch.bool).index_fill(0, moved, False)
    target = (full.alpha > 0).nonzero()[:, 0]  # free ones, moved ones, standing ones
    assert bool(stands[target].any())
    assert not bool(stands[target].all())
    B = len(target)
    random = torch.rand(3, B, generator=generator, dtype=torch.float64)
    gone, kept = random[0] * full.alpha[target], random[1] * box[target]
    stuck, bias = torch.zeros_like(gone), random[2] - 0.5
    alpha = torch.rand(B, len(moved) + 1, generator=generator, dtype=torch.float64) * layout.box
    alpha.scatter_(1, layout.place[target][:, None], (full.alpha[target] - gone)[:, None])
    alpha[:, -1] = 0

    whole = layout.whole(alpha, target, gone)
    expected = full.alpha.repeat(B, 1)
    expected[:, moved] = alpha[:, :-1]
    expected[torch.arange(B), target] = full.alpha[target] - gone
    assert_close(whole, expected, rtol=0, atol=0)

    u = (whole * y) @ K
    received = layout.pull(alpha, target, gone)
    assert_close(received[:, :-1], u[:, moved], rtol=1e-12, atol=1e-12)
    ended = Ended(layout, alpha, received, target, gone, kept, stuck)
    past = ended.beyond(bias)
    up = (full.upper ^ (y > 0)) & stands
    side = torch.where(up, -1.0, 1.0) * stands
    assert_close(past, side * (u - y + bias[:, None]), rtol=1e-12, atol=1e-12)
    u_r = u[torch.arange(B), target]
    assert_close(ended.of_target(past, bias), u_r, rtol=1e-12, atol=1e-12)

    held = ended.listed(past)
    boxes = box.repeat(B, 1)
    boxes[torch.arange(B), target] = kept
    count = (boxes * (y > 0)).sum(1) - (boxes * up).sum(1)
    assert_close(held.positive_count(layout.y), count, rtol=1e-12, atol=1e-12)
    pull = (whole * y * stands).sum(1)
    assert_close(held.standing.pull, pull, rtol=1e-12, atol=1e-12)
    assert_close(held.alpha @ layout.y + held.standing.pull, whole @ y, rtol=1e-12, atol=1e-12)
    assert_close(held.standing.violation, past[:, stands].amax(1))
    d = problem.rounding
    with_r = whole.scatter(1, target[:, None], full.alpha[target][:, None])
    least, most = (a @ d for a in (whole, with_r))
    assert bool(((held.doubt() >= least * (1 - 1e-12)) & (held.doubt() <= most * (1 + 1e-12))).all())
    assert_close(held.standing.box, box[stands].sum())
    assert_close(held.own, kept * ~stands[target], rtol=0, atol=0)


def _ends(problem, full, generator, noise):
    """Solutions without each of the support vectors, made worse by exchanges between moved variables."""
    K, y = problem.K, problem.y
    target = (full.alpha > 1e-9).nonzero()[:, 0]
    boxes = problem.box.repeat(len(target), 1)
    boxes[torch.arange(len(target)), target] = 0
    ends = torch.stack([solved(K, y, row.clamp_min(1e-12))[1].alpha for row in boxes])
    ends[torch.arange(len(target)), target] = 0
    differs = ((ends - full.alpha).abs() > 1e-9).scatter(1, target[:, None], False)
    layout = Layout(problem, full, (differs.any(0) | full.free).nonzero()[:, 0])
    stands = torch.ones_like(y, dtype=torch.bool).index_fill(0, layout.moved, False)
    ends = torch.where(stands, full.alpha, ends)
    ends[torch.arange(len(target)), target] = 0
    for row, r in zip(ends, target.tolist(), strict=True):
        for _ in range(4):
            i, j = layout.moved[torch.randint(layout.count, (2,), generator=generator)].tolist()
            if r in (i, j) or i == j:
                continue
            step = noise * float(torch.randn((), generator=generator))
            after_i, after_j = float(row[i] + y[i] * step), float(row[j] - y[j] * step)
            if 0 <= after_i <= problem.box[i] and 0 <= after_j <= problem.box[j]:
                row[i], row[j] = after_i, after_j
    return layout, target, ends


@pytest.mark.parametrize("noise", [0.0, 1e-8, 1e-4, 1e-2, 0.3])
@pytest.mark.parametrize("seed", range(3))
def test_a_proof_from_moved_variables_never_says_more_than_one_from_all(seed, noise):
    problem, full, generator = _machine(seed + 10, n=40)
    K, y = problem.K, problem.y
    layout, target, ends = _ends(problem, full, generator, noise)
    alpha = torch.cat([ends[:, layout.moved], torch.zeros(len(ends), 1, dtype=ends.dtype)], 1)
    gone, none = full.alpha[target], torch.zeros(len(target), dtype=ends.dtype)
    whole = Held(ends, (ends * y) @ K, problem.box, target, problem.rounding, none, none)
    bias = held_out_bias(y, whole)
    ended = Ended(layout, alpha, layout.pull(alpha, target, gone), target, gone, none, none)
    past = ended.beyond(bias)
    u_r = ended.of_target(past, bias)
    proof = sign_by_reach(layout.y, ended.listed(past), bias, u_r, reach_of(K, target))
    from_all = gap_ball_sign(K, y, whole, bias)
    assert bool((proof.gap >= from_all.gap * (1 - 1e-9) - 1e-12).all())
    truth = svm_loo(problem.K, y, 1.0, problem.box).outputs[target]
    for sign in (proof.sign, from_all.sign):
        assert not bool((sign * truth < -1e-9).any())
    assert bool((from_all.sign[proof.sign != 0] == proof.sign[proof.sign != 0]).all())
    if noise <= 1e-8:
        assert int((proof.sign != 0).sum()) >= len(target) - 2  # nearly every one is proved
        assert float(proof.slip.max()) <= 1e-6
    elif noise >= 1e-2:
        assert float(proof.slip.max()) > 1e-6


def test_without_a_free_variable_the_mean_has_no_value():
    miss = torch.tensor([[1.0, 3.0], [5.0, 7.0]])
    free = torch.tensor([[True, True], [False, False]])
    bias = bias_of_free(miss, free)
    assert bias[0] == 2
    assert bool(bias[1].isnan())


@pytest.mark.parametrize("seed", [0, 1])
def test_the_ends_of_ill_conditioned_paths_are_refined_and_need_no_refit(seed):
    X, y = toy(seed, n=80, noise=0.5)
    received = svm_loo(rbf(X, 3.0), y, 1e4)
    assert not bool((received.resolved_by == code.REFIT).any())
    assert bool(received.certified.all())


def test_a_value_is_never_that_of_a_path_that_was_given_up(monkeypatch):
    X, y = toy(5, n=40, noise=1.0)
    K = rbf(X, 1.0)
    expected = svm_loo(K, y, 3.0)
    assert int(expected.iterations.max()) > 3
    monkeypatch.setattr(unlearn, "follow", partial(unlearn.follow, most_events=2))
    received = svm_loo(K, y, 3.0)
    assert bool((received.resolved_by == code.REFIT).any())
    assert_close(received.outputs, expected.outputs, rtol=1e-8, atol=1e-8)


def test_an_end_with_a_coefficient_beyond_its_bound_proves_nothing_of_the_value(monkeypatch):
    X, y = toy(3, n=40, noise=1.0)
    K = rbf(X, 1.0)
    expected = svm_loo(K, y, 3.0)
    certified = unlearn._certified
    large = []

    def with_a_smaller_box(task, *others):
        alpha = task.full.alpha * task.full.free
        large[:] = [int(alpha.argmax())]
        box = task.problem.box.index_fill(0, alpha.argmax(), float(alpha.max()) / 2)
        return certified(task._replace(problem=task.problem._replace(box=box)), *others)

    monkeypatch.setattr(unlearn, "_certified", with_a_smaller_box)
    received = svm_loo(K, y, 3.0)
    followed = (expected.resolved_by == code.PATH).index_fill(0, torch.tensor(large), False)
    assert int(followed.sum()) > 10
    # All but a path that ends with less than half of that coefficient.
    assert int((received.resolved_by == code.REFIT)[followed].sum()) >= int(followed.sum()) - 1
    assert_close(received.outputs, expected.outputs, rtol=1e-8, atol=1e-8)
