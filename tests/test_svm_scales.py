"""Machines on inputs of very different sizes, and on free sets at the edge of dependence."""

from fractions import Fraction
from functools import partial
from itertools import pairwise

import pytest
import torch
from svm_problems import rbf, toy
from torch.testing import assert_close

from torchloo.kernels import Linear
from torchloo.svm import SVC, svm, svm_lco, svm_loo
from torchloo.svm.arguments import Caller
from torchloo.svm.fit import solve_problems
from torchloo.svm.records import duality_gap
from torchloo.svm.solve import exact
from torchloo.svm.solve.interior import solve_to_rounding
from torchloo.svm.solve.systems import Bordered, Dense, accurate_product


def unscaled(seed, size, n=40):
    """One feature of the given size, 0 in most rows, beside four of 0 and 1; their kernel and labels."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.rand(n, generator=generator) < 0.2
    large = size * torch.randint(3, 9, (n,), generator=generator) * rows
    Z = torch.randint(0, 2, (n, 4), generator=generator).double()
    noise = 0.4 * torch.randn(n, generator=generator).double()
    y = torch.where(Z[:, 0] + 0.7 * Z[:, 1] + noise > 0.8, 1.0, -1.0).double()
    X = torch.cat([large.double()[:, None], Z], 1)
    return X @ X.T, y


def exact_gap(K, y, box, fit):
    """The relative duality gap of what `svm` returns, in fractions: no rounding at all."""
    a, b = ([Fraction(float(x)) for x in part] for part in (fit.coef, fit.bias[None]))
    K, y, box = [[Fraction(x) for x in row] for row in K.tolist()], y.tolist(), Fraction(box)
    gap = abs(sum(a) * b[0])
    for row, label, own in zip(K, y, a, strict=True):
        margin = int(label) * (sum(k * x for k, x in zip(row, a, strict=True)) + b[0]) - 1
        alpha = min(max(int(label) * own, Fraction(0)), box)
        gap += alpha * max(margin, 0) + (box - alpha) * max(-margin, 0)
    return float(gap / sum(abs(x) for x in a))


@pytest.mark.parametrize("size", [1e2, 1e3, 1e4])
@pytest.mark.parametrize("seed", [0, 1, 2, 4])
def test_unscaled_inputs_are_solved(seed, size):
    K, y = unscaled(seed, size)
    assert exact_gap(K, y, 1.0, svm(K, y, 1.0)) <= 1e-6


def test_signs_certified_on_unscaled_inputs_are_those_of_a_refit():
    K, y = unscaled(2, 1e3)
    held = svm_loo(K, y, 1.0)
    assert bool(held.certified.any())
    for r in held.certified.nonzero()[:, 0].tolist():
        kept = torch.arange(len(y)) != r
        f = float(svm(K[kept][:, kept], y[kept], 1.0).from_kernel(K[r : r + 1, kept])[0])
        assert float(held.outputs[r]) * f > 0


def test_a_smooth_kernel_whose_small_directions_count_is_solved():
    """A class weight of 61: what directions of size 1e-9 add up to is no longer small."""
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(42, 2, generator=generator).double()
    y = torch.where(torch.arange(42) % 2 == 0, 1.0, -1.0).double()
    K = torch.exp(-torch.cdist(X, X).square() / 1400)
    weight = torch.where(y > 0, 61.0, 1.0).double()
    ((_, problem, full),) = solve_problems(Caller("test"), K[None], y[None], (14.0 * weight)[None])
    assert exact.relative_gap(problem, full) <= 1e-8


def test_what_rounding_leaves_open_is_a_warning_that_names_the_gap():
    K, y = unscaled(8, 1e5)
    with pytest.warns(RuntimeWarning, match="svm: rounding .* relative duality gap is .*; scale the inputs"):
        fit = svm(K, y, 100.0)
    assert exact_gap(K, y, 100.0, fit) <= 1e-2


def test_relative_gap_counts_what_passes_a_bound():
    K, y = unscaled(0, 1.0)
    ((_, problem, full),) = solve_problems(Caller("test"), K[None], y[None], torch.ones_like(y)[None])
    assert exact.relative_gap(problem, full) <= 1e-12
    past = full.alpha + 0.5 * problem.box * full.upper * (problem.y > 0)
    beyond = full._replace(alpha=past, slip=full.slip + 0.5)
    assert exact.relative_gap(problem, beyond) > 1e-3


def test_bordered_solves_for_points_whose_lengths_span_eight_orders():
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(6, 8, generator=generator).double() * 10.0 ** torch.arange(-4.0, 2.0)[:, None]
    K = X @ X.T
    a = torch.randn(2, 6, generator=generator).double() / K.diagonal().sqrt()
    b = torch.tensor([0.3, -2.0]).double()
    found_b, found_a = Bordered(K[None]).solve(a.sum(1)[None], (a @ K + b[:, None])[None])
    assert_close(found_b[0], b, rtol=1e-9, atol=1e-9)
    assert_close(found_a[0], a, rtol=1e-8, atol=0)


def test_bordered_systems_of_several_sizes_are_solved_as_each_alone():
    generator = torch.Generator().manual_seed(1)
    X = torch.randn(3, 7, 9, generator=generator).double()
    K, real = X @ X.mT, torch.arange(7) < torch.tensor([[7], [4], [1]])
    top, rhs = (
        torch.randn(3, 2, generator=generator).double(),
        torch.randn(3, 2, 7, generator=generator).double(),
    )
    system = Bordered(K, real)
    b, a = system.solve(top, rhs)
    corner, edge, inner = system.inverse()
    for i, s in enumerate([7, 4, 1]):
        M = torch.nn.functional.pad(K[i, :s, :s], (1, 0, 1, 0), value=1.0)
        M[0, 0] = 0
        inverse = torch.linalg.inv(M)
        expected = inverse @ torch.cat([top[i, None], rhs[i, :, :s].T])
        assert_close(torch.cat([b[i, None], a[i, :, :s].T]), expected, rtol=1e-8, atol=1e-8)
        assert_close(corner[i], inverse[0, 0], rtol=1e-8, atol=1e-8)
        assert_close(edge[i, :s], inverse[0, 1:], rtol=1e-8, atol=1e-8)
        assert_close(inner[i, :s, :s], inverse[1:, 1:], rtol=1e-8, atol=1e-8)
        assert not bool(inner[i, s:].any() | inner[i, :, s:].any() | edge[i, s:].any() | a[i, :, s:].any())


def test_a_short_point_is_independent_of_a_long_one_and_a_combination_is_not():
    X = torch.tensor([[1e4, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [0.0, 0.5, 0.5], [0.0, 0.0, 0.0]])
    system = Bordered((X @ X.T).double()[None])
    assert not system.regular(1e-8)
    kept = system.independent(1e-8)[0]
    assert int(kept.sum()) == 4
    assert bool(kept[0])
    assert Bordered((X @ X.T).double()[None, :3, :3]).regular(1e-8)


def test_copies_of_the_origin_depend_on_each_other():
    X = torch.tensor([[0.0], [0.0], [1e3], [1.0]]).double()
    assert int(Bordered((X @ X.T)[None]).independent(1e-8).sum()) == 2


def test_an_accurate_product_keeps_what_cancels():
    a = torch.tensor([1e16, 1.0, -1e16]).double()
    K = torch.tensor([[1.0, 1.0, 1.0], [3.0, 1 / 3, 3.0]]).double()
    assert_close(accurate_product(K, a), K[:, 1], rtol=1e-12, atol=0)


def test_an_indefinite_matrix_within_rounding_is_factored():
    K = torch.ones(3, 3, dtype=torch.float64)
    K.diagonal().sub_(torch.tensor([0.0, 1e-15, 1e-15]))
    assert bool(Dense(K).factor(torch.zeros(3, dtype=torch.float64)))
    assert not bool(Dense(-K).factor(torch.zeros(3, dtype=torch.float64)))
    several = Dense(torch.stack([K, -K, torch.eye(3).double()]))
    assert several.factor(torch.zeros(3, 3, dtype=torch.float64)).tolist() == [True, False, True]


def test_the_last_digit_is_nearer_than_the_first_steps():
    K, y = unscaled(3, 10.0)
    K, box = K / K.diagonal().mean(), 100 * K.diagonal().mean() * torch.ones_like(y)
    gaps = []
    for steps in (5, 12, 100):
        alpha, _, _, bias = (x[0] for x in solve_to_rounding(K[None], y[None], box[None], steps=steps))
        margin = y * (K @ (alpha * y) + bias) - 1
        gaps.append(float(duality_gap(alpha, margin, box) / alpha.sum()))
    assert all(later <= earlier for earlier, later in pairwise(gaps))
    assert gaps[-1] <= 1e-9


@pytest.mark.parametrize("C", [1e-7, 1e-9, 1e-12, 1e-30, 1e-300])
@pytest.mark.parametrize("kernel", ["linear", "rbf"])
def test_boxes_of_any_size_leave_the_larger_class(kernel, C):
    """K adds next to nothing: what is left of the larger class decides, the same for every small C."""
    X, y = toy(0, n=12)
    K = rbf(X) if kernel == "rbf" else X @ X.T
    clusters = torch.arange(12) % 4
    calls = (
        lambda K, C, weight: svm_loo(K, y, C, weight),
        lambda K, C, weight: svm_loo(K, y, C, weight, method="smo"),
        lambda K, C, weight: svm_lco(K, y, C, clusters, weight),
        lambda K, C, weight: svm_lco(K, y, C, clusters, weight, method="smo"),
    )
    for call in calls:
        expected = call(K, 1e-6, None)
        for held in (call(K, C, None), call(K, 1.0, torch.full_like(y, C)), call(C * K, 1.0, None)):
            assert_close(held.outputs, expected.outputs, rtol=1e-4, atol=1e-4)
            assert bool(held.certified[expected.certified].all())
    assert bool(svm_loo(K, y, C).certified.all())


@pytest.mark.parametrize("tiny", [1e-310, 1e-320])
def test_numbers_with_too_few_digits_are_refused_or_solved(tiny):
    X, y = toy(0, n=12)
    K, weight = rbf(X), torch.full_like(y, tiny)
    for function in (svm, svm_loo, partial(svm_lco, clusters=[0, 1] * 6)):
        with pytest.raises(ValueError, match=r"C must be at least 2.2e-308 in some row; use a larger C"):
            function(K, y, tiny)
        with pytest.raises(ValueError, match=r"C \* weight must be at least 2.2e-308 in some row"):
            function(K, y, 1.0, weight=weight)
        assert bool(function(tiny * K, y, 1.0).outputs.isfinite().all())
    with pytest.raises(ValueError, match=r"svc: C \* weight must be at least"):
        SVC(Linear()).loo(X, y, weight)
    one = torch.ones_like(y).index_fill(0, torch.tensor([3]), tiny)
    near = one.index_fill(0, torch.tensor([3]), 1e-12)
    assert_close(svm_loo(K, y, 1.0, one).outputs, svm_loo(K, y, 1.0, near).outputs, rtol=1e-6, atol=1e-6)
    assert bool((SVC(tiny * Linear()).loo(X, y).outputs.abs() <= 1).all())
