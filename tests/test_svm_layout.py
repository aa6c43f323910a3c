"""Proofs from moved variables alone: they say what those from all variables say, and never more."""

from functools import partial

import pytest
import torch
from svm_problems import rbf, toy
from torch.testing import assert_close

from torchloo.svm import result as code
from torchloo.svm import svm_loo
from torchloo.svm.path import unlearn
from torchloo.svm.proof.certify import bias_of_free


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

    def with_a_smaller_box(problem, full, *others):
        alpha = full.alpha * full.free
        large[:] = [int(alpha[0].argmax())]
        box = problem.box.index_fill(1, alpha[0].argmax(), float(alpha.max()) / 2)
        return certified(problem._replace(box=box), full, *others)

    monkeypatch.setattr(unlearn, "_certified", with_a_smaller_box)
    received = svm_loo(K, y, 3.0)
    followed = (expected.resolved_by == code.PATH).index_fill(0, torch.tensor(large), False)
    assert int(followed.sum()) > 10
    # All but a path that ends with less than half of that coefficient.
    assert int((received.resolved_by == code.REFIT)[followed].sum()) >= int(followed.sum()) - 1
    assert_close(received.outputs, expected.outputs, rtol=1e-8, atol=1e-8)
