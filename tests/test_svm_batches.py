"""Batches of SVMs: one tensor program, whose outcome is that of each problem alone."""

import threading

import pytest
import torch
from counting import Counting
from svm_problems import rbf, toy
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from torchloo import guards
from torchloo.svm import RESOLVED_BY, outcomes, svm_lco, svm_loo
from torchloo.svm.outcomes import in_stacks, stacks
from torchloo.svm.path import follow, loo_path, unlearn
from torchloo.svm.path.state import Ends
from torchloo.svm.records import Targets
from torchloo.svm.solve import interior
from torchloo.svm.solve.exact import solve_exactly
from torchloo.svm.solve.low_rank import in_double
from torchloo.svm.solve.merge import merge_duplicates
from torchloo.svm.solve.systems import Dense, Rough
from torchloo.svm.stacked import Tables


def _grid(n, lengthscales=8, bounds=8):
    """K (L, 1, n, n), y and C (B,) from a smooth to a rough kernel, from few to many support vectors."""
    X, y = toy(40, n=n, noise=1.0)
    scales = torch.logspace(-0.5, 1.0, lengthscales, dtype=torch.float64).tolist()
    return (
        torch.stack([rbf(X, scale) for scale in scales])[:, None],
        y,
        torch.logspace(-1, 2.5, bounds).double(),
    )


@pytest.mark.parametrize("values", [True, False])
@pytest.mark.parametrize("method", ["auto", "path"])
def test_a_batch_dispatches_and_waits_little_more_than_its_costliest_problem(method, values):
    K, y, C = _grid(60)
    options = {"method": method, "values": values}
    alone = []
    with torch.no_grad():
        for k in K[:, 0]:
            for bound in C:
                with Counting() as counting:
                    svm_loo(k, y, bound, **options)
                alone.append((counting.operations, counting.synchronisations))
        with Counting() as counting:
            svm_loo(K, y, C, **options)
    operations, synchronisations = (max(column) for column in zip(*alone, strict=True))
    assert counting.operations <= 3 * operations
    assert counting.synchronisations <= 2 * synchronisations


@pytest.mark.parametrize("method", ["auto", "smo"])
def test_clusters_of_a_batch_dispatch_and_wait_little_more_than_those_of_its_costliest_problem(method):
    K, y, C = _grid(60)
    clusters, alone = torch.arange(60) % 7, []
    with torch.no_grad():
        for k in K[:, 0]:
            for bound in C:
                with Counting() as counting:
                    svm_lco(k, y, bound, clusters, method=method)
                alone.append((counting.operations, counting.synchronisations))
        with Counting() as counting:
            svm_lco(K, y, C, clusters, method=method)
    operations, synchronisations = (max(column) for column in zip(*alone, strict=True))
    assert counting.operations <= 3 * operations
    assert counting.synchronisations <= 2 * synchronisations


@pytest.mark.parametrize("method", ["auto", "smo"])
def test_a_batch_in_float32_waits_little_more_than_its_costliest_problem(method):
    """Half of the kernel matrices have low rank, 2 or 5, and are cleaned of what rounding has added."""
    rows = [toy(seed, n=60, d=5 if seed % 3 else 2, noise=1.0) for seed in range(32)]
    K = torch.stack([X @ X.T if seed % 2 else rbf(X) for seed, (X, _) in enumerate(rows)]).float()
    y, alone, outputs = torch.stack([y for _, y in rows]).float(), [], []
    with torch.no_grad():
        for k, labels in zip(K, y, strict=True):
            with Counting() as counting:
                outputs.append(svm_loo(k, labels, 1.0, method=method, epsilon=1e-9).outputs)
            alone.append((counting.operations, counting.synchronisations))
        with Counting() as counting:
            held = svm_loo(K, y, 1.0, method=method, epsilon=1e-9)
    operations, synchronisations = (max(column) for column in zip(*alone, strict=True))
    assert counting.operations <= 3 * operations
    assert counting.synchronisations <= 2 * synchronisations
    assert_close(held.outputs, torch.stack(outputs), rtol=1e-5, atol=1e-5)


def test_clusters_of_problems_of_several_sizes_are_left_out_as_of_each_alone():
    """Copies leave fewer variables; two clusters leave one class where labels are by cluster."""
    X, y = toy(41, n=40, noise=0.6)
    copies = X.clone()
    copies[20:30] = X[:10]
    K = torch.stack([rbf(X, 1.0), X @ X.T, rbf(copies, 0.7), copies @ copies.T])
    clusters = torch.arange(40) // 4
    labels = torch.stack([y, torch.where(clusters == 3, 1.0, -1.0).to(y)])[:, None, None]
    C, K = torch.tensor([0.01, 1.0, 300.0]).double(), K[:, None].requires_grad_()
    weight = torch.arange(1, 41) / 20.0
    held = svm_lco(K, labels, C, clusters, weight.double())
    direction = torch.arange(40) / 40.0
    (held.outputs * direction).sum().backward()
    expected = torch.zeros_like(K)
    for i in range(4):
        for sign in range(2):
            for j, bound in enumerate(C):
                k = K[i, 0].detach().requires_grad_()
                alone = svm_lco(k, labels[sign, 0, 0], bound, clusters, weight.double())
                assert_close(held.outputs[sign, i, j], alone.outputs, rtol=1e-6, atol=1e-6)
                assert torch.equal(held.resolved_by[sign, i, j], alone.resolved_by)
                assert int((held.certified[sign, i, j] != alone.certified).sum()) <= 1
                (alone.outputs * direction).sum().backward()
                expected[i, 0] += k.grad
    assert_close(K.grad, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("values", [True, False])
def test_problems_of_several_sizes_and_ranks_are_solved_as_each_alone(values):
    """Copies leave fewer variables; a linear kernel of rank 2 has dependent free points."""
    X, y = toy(41, n=40, noise=0.6)
    copies = X.clone()
    copies[20:30] = X[:10]
    K = torch.stack([rbf(X, 1.0), X @ X.T, rbf(copies, 0.7), copies @ copies.T, X.round() @ X.round().T])
    C = torch.tensor([0.01, 1.0, 300.0]).double()
    held = svm_loo(K[:, None], y, C, values=values)
    for i, k in enumerate(K):
        for j, bound in enumerate(C):
            alone = svm_loo(k, y, bound, values=values)
            assert_close(held.outputs[i, j], alone.outputs, rtol=1e-6, atol=1e-6)
            both = held.certified[i, j] & alone.certified
            assert bool((held.errors[i, j] == alone.errors)[both].all())
            assert int((held.certified[i, j] != alone.certified).sum()) <= 1


@pytest.mark.parametrize("clusters", [None, torch.arange(60) % 7])
def test_the_backward_of_a_batch_waits_little_more_than_that_of_its_costliest_problem(monkeypatch, clusters):
    """As on an accelerator: on a CPU equations are solved in parts that fit its cache."""
    monkeypatch.setattr(guards, "_READ_AT_NO_COST", set())
    K, y, C = _grid(60, 4, 4)

    def counted(k, bound):
        k = k.clone().requires_grad_()
        held = svm_loo(k, y, bound) if clusters is None else svm_lco(k, y, bound, clusters)
        total = held.outputs.sum()
        with Counting() as counting:
            total.backward()
        return counting.operations, counting.synchronisations

    alone = [counted(k, bound) for k in K[:, 0] for bound in C]
    operations, synchronisations = counted(K, C)
    most, longest = (max(column) for column in zip(*alone, strict=True))
    assert operations <= 3 * most
    assert synchronisations <= 2 * longest


def test_gradients_of_a_batch_are_those_of_each_problem():
    K, y, C = _grid(24, 2, 3)
    K.requires_grad_()
    C.requires_grad_()
    held = svm_loo(K, y, C)
    (held.outputs * torch.arange(24)).sum().backward()
    expected_K, expected_C = torch.zeros_like(K), torch.zeros_like(C)
    for i in range(2):
        for j in range(3):
            k, bound = K[i, 0].detach().requires_grad_(), C[j].detach().requires_grad_()
            (svm_loo(k, y, bound).outputs * torch.arange(24)).sum().backward()
            expected_K[i, 0] += k.grad
            expected_C[j] += bound.grad
    assert_close(K.grad, expected_K, rtol=1e-6, atol=1e-6)
    assert_close(C.grad, expected_C, rtol=1e-6, atol=1e-6)


def _followed(K, y, C, stop_at_error):
    """Ends of all paths of a machine, the rounds that they took, and what was dispatched on the way."""
    double = in_double(K[None])
    box = torch.full_like(y, C)[None]
    ((_, problem),) = merge_duplicates(double.K, y[None], box, double.rounding)
    full = solve_exactly(problem)
    variable = (full.alpha[0] > 0).nonzero()[:, 0]
    targets = Targets(torch.zeros_like(variable), variable, full.alpha.new_zeros(len(variable)))
    tableau = unlearn._tableaux(problem, full, targets, not stop_at_error, whole=True)
    base = unlearn.perturbed_base(problem, full, tableau)
    rounds = []
    one_round = follow._round
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            follow, "_round", lambda *args, **options: rounds.append(1) or one_round(*args, **options)
        )
        with Counting() as counting:
            ends = follow.follow(base, targets.table, variable, targets.room(full), stop_at_error)
    return Ends.cat(ends), len(rounds), counting.synchronisations


@pytest.mark.parametrize("stop_at_error", [False, True])
@pytest.mark.parametrize("C", [1.0, 300.0])
def test_on_an_accelerator_paths_wait_once_in_eight_rounds_and_end_where_they_would(
    monkeypatch, C, stop_at_error
):
    X, y = toy(44, n=80, noise=1.0)
    K = rbf(X, 0.8)
    expected, rounds, _ = _followed(K, y, C, stop_at_error)
    monkeypatch.setattr(guards, "_READ_AT_NO_COST", set())
    ends, more, waits = _followed(K, y, C, stop_at_error)
    assert rounds <= more < rounds + 8  # rounds past the end change nothing
    assert waits <= more / 8 + 2  # one at the start, one at the end
    assert_close(ends.room, expected.room)
    assert torch.equal(ends.events, expected.events)
    assert torch.equal(ends.upper, expected.upper)


def test_paths_that_wait_for_a_singular_pivot_end_where_they_would(monkeypatch):
    """A linear kernel of rank 2: free points depend on each other, and roles are swapped."""
    X, y = toy(43, n=30, noise=0.6)
    X = X.round()
    swaps = []
    begin = follow.begin_swap
    monkeypatch.setattr(follow, "begin_swap", lambda *args: swaps.append(1) or begin(*args))
    expected = svm_loo(X @ X.T, y, 1.0)
    assert swaps
    monkeypatch.setattr(guards, "_READ_AT_NO_COST", set())
    swaps.clear()
    held = svm_loo(X @ X.T, y, 1.0)
    assert swaps
    assert_close(held.outputs, expected.outputs, rtol=1e-6, atol=1e-6)
    assert torch.equal(held.certified, expected.certified)


@pytest.mark.parametrize("values", [True, False])
def test_on_an_accelerator_large_problems_are_solved_together(monkeypatch, values):
    """As on an accelerator: on a CPU each kernel matrix of 1,150 rows is a stack of its own."""
    X, y = toy(40, n=1150, noise=1.0)
    K = torch.stack([rbf(X, scale) for scale in (0.5, 1.0, 2.0)])
    C, alone = torch.tensor([1.0, 3.0, 10.0]).double(), []
    expected = svm_loo(K, y, C, values=values)
    monkeypatch.setattr(guards, "_READ_AT_NO_COST", set())
    assert len(list(stacks(K, y.expand(3, -1), y.expand(3, -1) + 2, most=3))) == 1
    with torch.no_grad():
        for k, bound in zip(K, C, strict=True):
            with Counting() as counting:
                svm_loo(k, y, bound, values=values)
            alone.append((counting.operations, counting.synchronisations))
        with Counting() as counting:
            held = svm_loo(K, y, C, values=values)
    operations, synchronisations = (max(column) for column in zip(*alone, strict=True))
    assert counting.operations <= 3 * operations
    assert counting.synchronisations <= 2 * synchronisations
    assert_close(held.outputs, expected.outputs, rtol=1e-6, atol=1e-6)
    assert torch.equal(held.certified, expected.certified)


def test_products_of_few_solutions_are_not_padded_to_those_of_all():
    generator = torch.Generator().manual_seed(3)
    table = torch.repeat_interleave(torch.arange(4), torch.tensor([50, 1, 0, 7]))
    x, M = torch.randn(58, 5, generator=generator), torch.randn(4, 5, 6, generator=generator)
    rows = torch.tensor([3, 50, 52, 53])
    with FlopCounterMode(display=False) as few:
        products = Tables(table, 4).take(rows).product(x[rows], M)
    assert_close(products, torch.stack([x[i] @ M[table[i]] for i in rows]))
    assert few.get_total_flops() == 2 * 4 * 2 * 5 * 6  # two rows a problem at most, of four problems


def test_a_grid_of_C_factorises_its_kernel_matrix_once(monkeypatch):
    X, y = toy(41, n=260, noise=1.0)
    K = torch.stack([rbf(X, 3.0), rbf(X, 6.0)])[:, None]
    seen = []
    factors = interior.low_rank_factors
    monkeypatch.setattr(interior, "low_rank_factors", lambda k: seen.append(len(k)) or factors(k))
    C = torch.tensor([0.5, 1.0, 2.0]).double()
    held = svm_loo(K, y, C)
    assert seen == [2]
    alone = torch.stack([svm_loo(k, y, bound).outputs for k in K[:, 0] for bound in C])
    assert_close(held.outputs.reshape(6, -1), alone)


def test_stacks_share_kernel_matrices_in_the_order_of_the_batch():
    """Numbers of matrices that fall begin a new stack; each problem keeps its own K, y and box."""
    generator = torch.Generator().manual_seed(5)
    K, y = torch.randn(3, 4, 4, generator=generator), torch.randn(2, 3, 2, 4, generator=generator)
    shared, falling = K[:, None].expand(3, 2, 4, 4), K[:, None]
    parts = list(stacks(falling, y, y + 1, most=6))
    assert [len(part[0]) for part in parts] == [3, 3]
    matrices = torch.cat([k[which] for k, _, _, which in parts]).view(2, 3, 2, 4, 4)
    assert torch.equal(matrices, shared.expand(2, 3, 2, 4, 4))
    assert torch.equal(torch.cat([part[1] for part in parts]).view_as(y), y)
    assert torch.equal(torch.cat([part[2] for part in parts]).view_as(y), y + 1)


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def _many(n=30, problems=300):
    """K, y of problems that are worth two threads; data of their own for each."""
    rows = [toy(seed, n=n, noise=1.0) for seed in range(problems)]
    return torch.stack([rbf(X) for X, _ in rows]), torch.stack([y for _, y in rows])


@pytest.mark.parametrize("method", ["auto", "path", "smo"])
def test_threads_find_what_one_thread_finds(two_threads, method):
    K, y = _many()
    together = svm_loo(K, y, 2.0, method=method)
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)
    alone = svm_loo(K, y, 2.0, method=method)
    assert_close(together.outputs, alone.outputs, rtol=1e-9, atol=1e-9)
    assert torch.equal(together.certified, alone.certified)


def test_clusters_are_left_out_in_threads_as_in_one(two_threads):
    K, y = _many()
    clusters = torch.arange(30) // 3
    together = svm_lco(K, y, 2.0, clusters)
    torch.set_num_threads(1)
    alone = svm_lco(K, y, 2.0, clusters)
    assert_close(together.outputs, alone.outputs, rtol=1e-9, atol=1e-9)
    assert torch.equal(together.certified, alone.certified)


def test_threads_keep_the_machines_for_a_backward(two_threads):
    K, y = _many()
    K.requires_grad_()
    svm_loo(K, y, 2.0).outputs.square().sum().backward()
    received, K.grad = K.grad, None
    torch.set_num_threads(1)
    svm_loo(K, y, 2.0).outputs.square().sum().backward()
    assert_close(received, K.grad, rtol=1e-7, atol=1e-9)


def test_an_error_in_a_thread_is_raised_and_leaves_the_number_of_threads(two_threads):
    K, y = _many()
    K[200] = -K[200].abs() + 2 * torch.diag_embed(K[200].diagonal())  # symmetric, its diagonal unchanged
    with pytest.raises(ValueError, match="svm_loo: K must be positive semi-definite"):
        svm_loo(K, y, 2.0)
    assert torch.get_num_threads() == 2


def test_problems_are_divided_among_threads_unless_a_mode_observes_them(two_threads):
    K, y = _many()
    both = threading.Barrier(2, timeout=30)  # is passed only by two at once

    def meets(stack):
        both.wait()
        return threading.get_ident()

    here = threading.get_ident()
    workers = in_stacks(meets, K, y, y + 2)
    assert len(set(workers)) == 2
    assert here not in workers
    with Counting():
        assert set(in_stacks(lambda stack: threading.get_ident(), K, y, y + 2)) == {here}
    few = in_stacks(lambda stack: threading.get_ident(), K[:9], y[:9], y[:9] + 2)
    assert set(few) == {here}


def test_machines_of_one_kernel_matrix_with_tiny_boxes_are_those_of_each_alone():
    """Boxes so small that they decide the scale of K, which is then no longer shared."""
    X, y = toy(45, n=30, noise=1.0)
    K, C = rbf(X, 0.9), torch.tensor([1e-9, 1.0, 50.0]).double()
    held = svm_loo(K, y, C)
    alone = torch.stack([svm_loo(K, y, bound).outputs for bound in C])
    assert_close(held.outputs, alone, rtol=1e-9, atol=1e-9)


def test_systems_that_float32_cannot_factorise_are_solved_in_float64():
    K = torch.ones(2, 30, 30, dtype=torch.float64)
    K[0] += torch.eye(30)
    theta, rhs = torch.full((2, 30), 1e-6, dtype=torch.float64), torch.arange(30.0).double().expand(2, 1, 30)
    rough = Rough(Dense(K))
    assert not rough.rough.factor(theta.float() * 1e-2).all()  # of the two only the first is definite
    assert rough.factor(theta * 1e-2).all()
    assert rough.system is rough.exact
    expected = torch.linalg.solve(K + torch.diag_embed(theta * 1e-2), rhs.mT).mT
    torch.testing.assert_close(rough.solve(rhs), expected, rtol=1e-5, atol=0)
    assert rough.factor(theta + 1).all()
    assert rough.system is rough.rough
    expected = torch.linalg.solve(K + torch.diag_embed(theta + 1), rhs.mT).mT
    torch.testing.assert_close(rough.solve(rhs), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", ["auto", "path"])
@pytest.mark.parametrize("values", [True, False])
def test_problems_may_lie_in_memory_in_any_order(method, values):
    X, y = (torch.stack(parts) for parts in zip(*(toy(seed, n=20, d=3) for seed in range(3)), strict=True))
    K = torch.stack([rbf(rows) for rows in X])
    expected = svm_loo(K, y, 2.0, method=method, values=values)
    by_columns = y.mT.contiguous().mT
    for matrices in (K, K.mT.contiguous().mT, K.transpose(0, 1).contiguous().transpose(0, 1)):
        received = svm_loo(matrices, by_columns, 2.0, method=method, values=values)
        assert_close(received.outputs, expected.outputs, rtol=1e-9, atol=1e-9)
        assert torch.equal(received.certified, expected.certified)


@pytest.mark.parametrize("values", [True, False])
def test_problems_without_paths_leave_the_batch_and_are_refitted(monkeypatch, values):
    """Of smooth kernels, whose free sets may be singular to rounding; here it is said of all of them."""
    unlearn, seen = loo_path.unlearn, []

    def singular_where_smooth(problem, *rest):
        seen.append(len(problem.y))
        if bool((problem.matrices().mean((1, 2)) > 0.5).any()):
            raise torch.linalg.LinAlgError("the equations of a free set are singular")
        return unlearn(problem, *rest)

    X, y = toy(42, n=30, noise=1.0)
    K = torch.stack([rbf(X, 6.0), rbf(X, 1.0), rbf(X, 5.0)])[:, None].requires_grad_(values)
    C = torch.tensor([0.5, 20.0]).double()
    expected = svm_loo(K, y, C, values=values)
    monkeypatch.setattr(loo_path, "unlearn", singular_where_smooth)
    monkeypatch.setattr(outcomes, "_THREADS", 1)
    held = svm_loo(K, y, C, values=values)
    assert max(seen) == 6
    assert len(seen) <= 11
    path, refit = RESOLVED_BY.index("exact path"), RESOLVED_BY.index("refit")
    was_path, is_refit = expected.resolved_by == path, held.resolved_by == refit
    assert bool(is_refit[::2][was_path[::2]].all())
    assert torch.equal(held.resolved_by[1], expected.resolved_by[1])
    assert not bool(held.unstable.any())
    assert torch.equal(held.errors, expected.errors)
    assert_close(held.outputs, expected.outputs, rtol=1e-6, atol=1e-6)
    if values:
        given, received = (torch.autograd.grad(x.outputs.sum(), K)[0] for x in (expected, held))
        assert_close(received, given, rtol=1e-5, atol=1e-5)
