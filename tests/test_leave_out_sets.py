"""Sets that overlap: `lso` equals delete-and-refit for any sets; and what `h_block` leaves out."""

import functools

import numpy as np
import pytest
import torch
from cases import CASES, IDS, problem, relative
from torch.testing import assert_close

import torchloo as tl
from torchloo import leave_out_sets

every_smoother = pytest.mark.parametrize("case", CASES, ids=IDS)
N = 12
# Of sizes 1, 3, 3, 4, 8 and 11, more than the features of linear and sparse machines; rows 4 and 7 twice.
SETS = [
    ([4], [3, 4, 5]),
    ([0, 2], [2, 1, 0]),
    ([7], [7]),
    ([11, 4, 7], [11, 7, 4, 10]),
    ([9, 3], [0, 1, 3, 5, 7, 9, 10, 11]),
    ([6], [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11]),
]
ROWS = [4, 0, 2, 7, 11, 4, 7, 9, 3, 6]
BLOCKS = [(left, left) for left in ([0, 1, 2, 3, 4, 5, 6, 7], [4, 5, 6, 7, 8, 9, 10, 11])]
sets = pytest.mark.parametrize(
    "sets", [SETS, BLOCKS, tl.splits.h_block(torch.arange(N), 2)], ids=["ragged", "halves", "h-block"]
)


def in_chunks(monkeypatch):
    monkeypatch.setattr(leave_out_sets, "_TOGETHER", 1)


@every_smoother
@sets
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("c", [None, 3])
@pytest.mark.parametrize("batch", [(), (2,)], ids=["one", "batch"])
@pytest.mark.parametrize("chunked", [False, True])
def test_lso_equals_delete_and_refit(case, sets, weighted, c, batch, chunked, monkeypatch):
    if chunked:
        in_chunks(monkeypatch)
    X, Y, weight = problem(N, c=c or 1, batch=batch)
    Y = case.targets(Y)
    y = Y[..., 0] if c is None else Y
    result = case.make(0.1).lso(X, y, sets, weight if weighted else None)
    expected = case.expected(X, Y, 0.1, weight if weighted else torch.ones_like(weight), sets)
    rows = torch.cat([torch.as_tensor(predicted) for predicted, _ in sets])
    outputs = result.outputs.unsqueeze(-1) if c is None else result.outputs
    assert outputs.shape == expected.shape
    assert relative(outputs, expected) <= 1e-8
    targets = case.make(0.1).solve(X, y, weight if weighted else None).targets[..., rows, :]
    assert_close(result.targets, targets[..., 0] if c is None else targets)
    assert_close(result.residuals, result.targets - result.outputs)
    assert_close(result.weight, (weight if weighted else torch.ones_like(weight))[..., rows])
    assert result.refitted.shape == result.weight.shape


@every_smoother
def test_lso_has_gradients_under_transforms_of_torch_func(case):
    X, Y, weight = problem(N, c=1)
    y = case.targets(Y)[..., 0]
    pairs = tl.splits.h_block(torch.arange(N), 2)  # of tensors

    def loss(weight):
        return case.make(0.1).lso(X, y, pairs, weight).residuals.square().sum()

    received = torch.func.grad(loss)(weight)
    assert_close(received, torch.autograd.grad(loss(weight.requires_grad_()), weight)[0])


@every_smoother
@pytest.mark.parametrize("reg", [1e-5, 1e3])
def test_duplicate_rows_and_bad_conditioning(case, reg):
    X, Y, weight = problem(N, seed=3)
    X[7], X[8] = X[2], X[2]
    Y = case.targets(Y)
    weight = weight * 10 ** torch.linspace(-2, 2, N).double()
    result = case.make(reg).lso(X, Y, SETS, weight)
    expected = case.expected(X, Y, reg, weight, SETS)
    for k in range(len(ROWS)):
        assert relative(result.outputs[k], expected[k]) <= 1e-6, k


@every_smoother
def test_disjoint_sets_are_clusters_and_single_rows_leave_one_out(case):
    X, Y, weight = problem(N)
    Y = case.targets(Y)
    machine = case.make(0.1)
    clusters = [0, 0, 1, 2, 2, 2, 3, 3, 3, 3, 3, 3]
    groups = [[i for i in range(N) if clusters[i] == label] for label in range(4)]
    result, expected = (
        machine.lso(X, Y, [(g, g) for g in groups], weight),
        machine.lco(X, Y, clusters, weight),
    )
    assert_close(result.outputs, expected.outputs)
    assert_close(result.variance, expected.variance.expand_as(result.variance))
    assert result.clusters.tolist() == clusters
    alone = machine.lso(X, Y, tl.splits.h_block(torch.arange(N), 0), weight)
    assert_close(alone.outputs, machine.loo(X, Y, weight).outputs)
    assert alone.clusters is None


@every_smoother
@pytest.mark.parametrize("chunked", [False, True])
def test_gradcheck_of_overlapping_sets(case, chunked, monkeypatch):
    if chunked:
        in_chunks(monkeypatch)
    X, Y, weight = problem(8, d=2, c=2, seed=1)
    Y = case.targets(Y)
    few = [([0, 1], [1, 0, 2]), ([1], [1, 4]), ([5], [2, 3, 4, 5, 6, 7]), ([6, 3], [3, 6]), ([7], [7])]

    def call(X, y, weight, log_reg):
        machine = case.make(1.0)
        machine._parameters["log_reg"] = None
        machine.__dict__["log_reg"] = log_reg
        result = machine.lso(X, Y if case.labels else y, few, weight)
        return result.outputs, result.variance

    log_reg = torch.tensor(-1.0, dtype=torch.float64)
    inputs = [t.requires_grad_() for t in (X, Y.clone(), weight, log_reg)]
    assert torch.autograd.gradcheck(call, inputs, atol=1e-6, fast_mode=True)
    if not chunked:
        assert torch.autograd.gradgradcheck(lambda *a: call(*a)[0], inputs, atol=1e-5, fast_mode=True)


@every_smoother
def test_gradients_equal_differences_of_the_refit(case):
    X, Y, weight = problem(N, c=1)
    Y = case.targets(Y)
    direction, of_weight = torch.randn_like(X), torch.rand_like(weight)
    step = torch.zeros((), dtype=torch.float64, requires_grad=True)
    held_out = case.make(0.1).lso(X + step * direction, Y, SETS, weight + step * of_weight)
    loss = held_out.outputs.square().sum()
    (received,) = torch.autograd.grad(loss, step)

    def refit(h):
        return case.expected(X + h * direction, Y, 0.1, weight + h * of_weight, SETS).square().sum()

    h = 1e-5
    expected = (refit(h) - refit(-h)) / (2 * h)
    assert_close(received, expected, rtol=1e-6, atol=1e-8)


@every_smoother
@pytest.mark.parametrize("c", [2, 7], ids=["few", "many"])
def test_lso_with_one_regularisation_for_each_output(case, c):
    X, Y, weight = problem(N, c=c)
    Y = case.targets(Y)
    regs = torch.logspace(-2, 1, c, dtype=torch.float64)
    one = case.make(1.0)
    options = {"basis": one.rows} if case.name == "sparse" else {}
    machine = type(one)(one.kernel, regs, reg_per_output=True, **options)
    result = machine.lso(X, Y, SETS, weight)
    path = case.make().solve_path(X, Y, regs, weight).held_out(sets=SETS)
    for j in range(c):
        expected = case.expected(X, Y[:, j : j + 1], regs[j], weight, SETS)[:, 0]
        assert relative(result.outputs[:, j], expected) <= 1e-8
        assert relative(path.outputs[j, :, j], expected) <= 1e-8


def test_lost_sets_are_refitted_and_marked():
    X = torch.linspace(0, 10, 80, dtype=torch.float64).unsqueeze(-1)
    y = (2 * X[:, 0]).sin()
    machine = tl.SparseLSSVM(tl.kernels.RBF(0.4), 1e-9, basis=X[::5].clone())
    sets = tl.splits.h_block(X[:, 0], 1.0)
    result = machine.lso(X, y, sets)
    assert result.refitted.any()
    K = machine.kernel(X, machine.basis)
    Kzz = machine.kernel(machine.basis)
    for row, left in sets[::9]:
        kept = torch.ones(80, dtype=torch.bool)
        kept[left] = False
        alone = tl.functional.sparse_lssvm(Kzz, K[kept], y[kept, None], 1e-9)
        expected = alone.from_kernel(K[row])[:, 0]
        assert_close(result.outputs[row], expected, rtol=1e-5, atol=1e-5)
    tl.criteria.press(result).backward()
    assert machine.log_reg.grad.isfinite()


def test_memory_does_not_grow_with_the_sets(monkeypatch):
    """Blocks of all sets at once would be 300 x 101 x 101 numbers, or 300 x 101 x 300 columns of T."""
    largest = []
    original = leave_out_sets.solve_blocks

    def watched(a, blocks, guard, root=None):
        largest.append(max(block.numel() for block in blocks))
        return original(a, blocks, guard, root)

    monkeypatch.setattr(leave_out_sets, "solve_blocks", watched)
    monkeypatch.setattr(leave_out_sets, "_TOGETHER", 1)
    X, Y, _ = problem(300, d=2, c=1)
    tl.criteria.press(
        tl.LSSVM(tl.kernels.RBF()).lso(X, Y, tl.splits.h_block(torch.arange(300), 50))
    ).sum().backward()
    assert max(largest) <= 300 * 300


def test_float32_stays_close():
    X, Y, weight = problem(40)
    sets = tl.splits.h_block(X[:, :2], 0.5)
    for kernel in (tl.kernels.RBF(1.3), tl.kernels.Linear()):
        machine = tl.LSSVM(kernel, 0.3)
        single = machine.lso(X.float(), Y.float(), sets, weight.float())
        assert single.outputs.dtype == single.variance.dtype == torch.float32
        received = single.outputs.double()
        expected = machine.lso(X, Y, sets, weight).outputs
        assert relative(received, expected) <= 1e-4


def test_a_fit_leaves_sets_out_too():
    X, Y, _ = problem(N)
    fit = tl.LSSVM(tl.kernels.RBF(), 0.1).solve(X, Y)
    received = fit.held_out(sets=SETS).outputs
    expected = tl.LSSVM(tl.kernels.RBF(), 0.1).lso(X, Y, SETS).outputs
    assert_close(received, expected)
    with pytest.raises(TypeError, match="clusters or sets, not both"):
        fit.held_out([0, 1] * 6, sets=SETS)


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        ([([0], [1, 2])], "set 0 predicts row 0 and does not leave it out"),
        ([([0], [0, 1]), ([3, 2], [3, 4])], "set 1 predicts row 2 and does not leave it out"),
        ([([0], [0, 12])], "rows must be from 0 to 11, got 12 in set 0"),
        ([([0], [0, -1])], "rows must be from 0 to 11, got -1 in set 0"),
        ([([0], [0, 1, 1])], "set 0 repeats row 1"),
        ([([0, 0], [0, 1])], "set 0 repeats row 0"),
        ([([0], list(range(12)))], "set 0 leaves out all 12 rows"),
        ([([0], [0]), ([], [1])], "set 1 must name a row"),
        ([], "got none"),
        ([([0.5], [0.5])], "expected integers"),
        ([([0], [[0, 1]])], "expected integers"),
        ([3], "sets must be pairs"),
        (5, "sets must be pairs"),
    ],
)
def test_sets_that_make_no_sense_are_refused(sets, message):
    X, Y, _ = problem(N)
    with pytest.raises((ValueError, TypeError), match=message):
        tl.LSSVM(tl.kernels.RBF()).lso(X, Y, sets)


def test_a_stream_is_refused():
    X, Y, _ = problem(N)
    with pytest.raises(TypeError, match="lso needs rows in memory"):
        tl.LSSVM(tl.kernels.Linear()).lso(tl.Stream(X, Y), None, SETS)


def near(places, buffer):
    """Rows within the buffer of each, by loops."""
    return [
        [j for j in range(len(places)) if np.linalg.norm(places[j] - places[i]) <= buffer + 1e-9]
        for i in range(len(places))
    ]


@pytest.mark.parametrize("buffer", [0, 0.3, 1.7])
@pytest.mark.parametrize("columns", [None, 1, 2])
def test_h_block_leaves_out_what_is_near(buffer, columns):
    generator = torch.Generator().manual_seed(1)
    places = torch.randint(0, 50, (40, columns or 1), generator=generator) / 10.0  # with ties, not sorted
    sets = tl.splits.h_block(places if columns else places[:, 0], buffer)
    assert [left.tolist() for _, left in sets] == near(places.double().numpy(), buffer)
    assert [row.tolist() for row, _ in sets] == [[i] for i in range(40)]


def test_h_block_at_the_edge_of_a_buffer_does_not_depend_on_rounding():
    times = 0.1 * np.arange(50)
    sizes = [len(left) for _, left in tl.splits.h_block(times, 0.3)]
    assert sizes[3:-3] == [7] * 44
    assert sizes[:3] == [4, 5, 6]
    assert [len(left) for _, left in tl.splits.h_block(times + 1e4, 0.3)] == sizes


@pytest.mark.parametrize(
    ("times", "buffer", "message"),
    [
        ([0.0, 1.0], 5.0, "all 2 are within 5.0 of row 0"),
        ([0.0, float("nan")], 1.0, "NaN or infinity"),
        (torch.zeros(2, 2, 2), 1.0, r"\(n,\) or \(n, d\)"),
        ([], 1.0, r"\(n,\) or \(n, d\)"),
        ([0.0, 1.0], -1.0, "0 or more"),
        ([0.0, 1.0], "1", "0 or more"),
    ],
)
def test_h_block_refuses(times, buffer, message):
    with pytest.raises(ValueError, match=message):
        tl.splits.h_block(times, buffer)


def test_lso_of_an_autocorrelated_series_is_worse_than_loo():
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(200, dtype=torch.float64, generator=generator)
    series = functools.reduce(lambda values, e: [*values, 0.95 * values[-1] + e], noise[1:], [noise[0]])
    X = torch.arange(200, dtype=torch.float64).unsqueeze(-1)
    y = torch.stack(series)
    machine = tl.LSSVM(tl.kernels.RBF(3.0), 0.1)
    buffers = [tl.splits.h_block(X[:, 0], h) for h in (0, 5, 20)]
    errors = [tl.criteria.mse(machine.lso(X, y, sets)).item() for sets in buffers]
    assert errors == sorted(errors)
    assert errors[2] > 3 * errors[0]
