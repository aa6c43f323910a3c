"""Every selector against plain loops, its ways to stop, and the machine that uses it."""

import copy
import io
import pickle

import numpy as np
import pytest
import reference
import torch
from cases import problem, relative
from fake_cuda import fake_cuda
from torch.testing import assert_close

import torchloo as tl
from torchloo import basis

RBF = tl.kernels.RBF


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def points(n=30, d=2, seed=0, batch=()):
    return torch.randn(*batch, n, d, dtype=torch.float64, generator=seeded(seed))


def error(K, chosen):
    """1 - mean_i K_Si^T K_SS^{-1} K_Si / k_ii by an explicit solve; 0 / 0 is perfect."""
    S = [int(j) for j in chosen]
    total = 0.0
    for i in range(len(K)):
        if K[i, i] > 0:
            length = K[S, i] @ torch.linalg.solve(K[S][:, S], K[S, i])  # squared, of the best approximation
            total += 1 - (length / K[i, i]).item()
    return total / len(K)


def left_of(K, chosen):
    """The diagonal of K - K_:S K_SS^{-1} K_S:."""
    S = [int(j) for j in chosen]
    if not S:
        return K.diagonal().clone()
    explained = K[:, S] @ torch.linalg.solve(K[S][:, S], K[S])
    return (K - explained).diagonal()


MAKERS = {
    "greedy": lambda m=None, **o: basis.greedy(m, **o),
    "stochastic": lambda m=None, **o: basis.stochastic(m, generator=seeded(), **o),
    "few": lambda m=None, **o: basis.stochastic(m, generator=seeded(), candidates=3, rows=5, **o),
    "pivoted": lambda m=None, **o: basis.pivoted(m, **o),
    "rpcholesky": lambda m=None, **o: basis.rpcholesky(m, generator=seeded(), **o),
    "pruned": lambda m=None, **o: basis.pruned(m, **o),
    "random": lambda m=None, **o: basis.random(m, generator=seeded(), **o),
    "all": lambda m=None, **o: basis.all(**o),
}
every_selector = pytest.mark.parametrize("name", MAKERS)
bounded = pytest.mark.parametrize("name", [name for name in MAKERS if name != "all"])
KERNELS = {
    "rbf": RBF(0.7),
    "linear": tl.kernels.Linear(),
    "polynomial": tl.kernels.Polynomial(degree=2, offset=0.5),
    "sum": 2.0 * RBF(0.7) + tl.kernels.Linear(),
}
every_kernel = pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)


@every_selector
@every_kernel
def test_errors_are_the_mean_relative_reconstruction_errors(name, kernel):
    X = points(d=6)
    chosen = MAKERS[name](6)(kernel, X, X[:, 0])
    K = kernel(X).detach()
    expected = [error(K, chosen.indices[: k + 1]) for k in range(min(6, len(chosen.indices)))]
    assert_close(chosen.errors[:6], torch.tensor(expected, dtype=K.dtype), rtol=0, atol=1e-12)
    assert len(set(chosen.indices.tolist())) == len(chosen.indices) == chosen.size


@every_kernel
def test_greedy_takes_what_lowers_the_error_most(kernel):
    X = points(d=6)
    K = kernel(X).detach()
    expected = []
    for _ in range(6):
        rest = [j for j in range(len(X)) if j not in expected]
        expected.append(min(rest, key=lambda j: error(K, [*expected, j])))
    assert basis.greedy(6)(kernel, X).indices.tolist() == expected


def test_stochastic_with_all_candidates_and_rows_is_greedy():
    X = points()
    chosen = basis.stochastic(8, candidates=30, rows=30)(RBF(0.7), X)
    assert chosen.indices.tolist() == basis.greedy(8)(RBF(0.7), X).indices.tolist()


def test_stochastic_is_nearly_as_good_as_greedy():
    X = points(400)
    best = basis.greedy(40)(RBF(0.5), X).errors[-1]
    found = basis.stochastic(40, rows=100, generator=seeded())(RBF(0.5), X).errors[-1]
    assert best < found < 1.4 * best
    assert found < 0.8 * basis.random(40, generator=seeded())(RBF(0.5), X).errors[-1]


@every_kernel
def test_pivoted_takes_the_row_reconstructed_worst(kernel):
    X = points(d=6)
    K = kernel(X).detach()
    expected = []
    for _ in range(6):
        ratio = left_of(K, expected) / K.diagonal()
        ratio[expected] = 0
        # The first pivot of a normalised matrix is a tie between all rows, which rounding must not break.
        expected.append(int(ratio.argmax()) if expected else 0)
    assert basis.pivoted(6)(kernel, X).indices.tolist() == expected


@pytest.mark.parametrize("kernel", [RBF(0.7), tl.kernels.Linear()])
def test_rpcholesky_draws_each_pair_as_often_as_drawing_one_by_one(kernel, monkeypatch):
    # Some second vectors are in the first block, some are not.
    monkeypatch.setattr(basis.adaptive, "BLOCK", 4)
    X = points(5, 4)
    K = kernel(X).detach()
    expected = torch.zeros(5, 5, dtype=K.dtype)  # probability of the first and second vector
    for i in range(5):
        ratio = left_of(K, [i]) / K.diagonal()
        ratio[i] = 0
        expected[i] = ratio / ratio.sum() / 5
    counts = torch.zeros_like(expected)
    draws, generator = 1000, seeded()
    for _ in range(draws):
        i, j = basis.rpcholesky(2, generator=generator)(kernel, X).indices.tolist()
        counts[i, j] += 1
    off = ~torch.eye(5, dtype=torch.bool)
    chi = ((counts - draws * expected)[off].square() / (draws * expected[off])).sum()
    assert counts[~off].sum() == 0
    assert chi < 45  # chi-squared with 19 degrees of freedom: 1 in 1000 above 43.8


def test_pruned_keeps_the_largest_coefficients_round_after_round():
    X, Y, weight = problem(25)
    K = RBF(0.9)(X).detach()
    left = list(range(25))
    order = []
    while len(left) > 1:
        outputs = reference.solve_lssvm(K[left][:, left], Y[left], 0.3, weight[left])
        unit = torch.eye(len(left), dtype=K.dtype)
        coef = outputs(unit) - outputs(0 * unit)
        ranked = sorted(range(len(left)), key=lambda i: -coef[i].norm().item())
        stay = len(left) - max(1, int(0.2 * len(left)))
        order = [left[i] for i in ranked[stay:]] + order
        left = [left[i] for i in ranked[:stay]]
    expected = (left + order)[:9]
    chosen = basis.pruned(9, reg=0.3, drop=0.2)(RBF(0.9), X, Y, weight)
    received = chosen.indices.tolist()
    assert received[2:] == expected[2:]
    assert sorted(received[:2]) == sorted(expected[:2])  # beside a bias, two rows have opposite coefficients


def test_all_takes_every_row_in_order():
    X = points(70)
    chosen = basis.all()(RBF(0.05), X)
    assert chosen.indices.tolist() == list(range(70))
    assert chosen.errors[-1] == 0
    assert chosen.stopped == "size"


def test_random_draws_distinct_rows_in_an_order_of_its_own():
    X = points(100)
    orders = {tuple(basis.random(100, generator=seeded(s))(RBF(0.01), X).indices.tolist()) for s in range(5)}
    assert len(orders) == 5
    assert all(sorted(order) == list(range(100)) for order in orders)


@bounded
def test_a_tolerance_stops_at_the_first_error_below_it(name):
    X = points(60)
    whole = MAKERS[name](60)(RBF(1.5), X, X[:, 0])
    tolerance = whole.errors[9].item() * (1 + 1e-9)
    chosen = MAKERS[name](60, tolerance=tolerance)(RBF(1.5), X, X[:, 0])
    assert chosen.stopped == "tolerance"
    assert chosen.indices.tolist() == whole.indices[:10].tolist()
    assert chosen.errors[-1] <= tolerance < chosen.errors[-2]
    assert whole.errors.diff().le(0).all()


@every_selector
def test_a_shorter_basis_is_the_beginning_of_a_longer_one(name):
    X = points(150)
    short, long = (MAKERS[name](m)(RBF(0.5), X, X[:, 0]) for m in (70, 100))
    assert_close(short.indices[:70], long.indices[:70])
    if name != "all":
        assert len(short.indices) == 70
        assert short.stopped == "size"


@bounded
def test_copies_are_not_chosen_and_end_the_choice(name):
    X = points(8).repeat(5, 1)[torch.randperm(40, generator=seeded())]
    chosen = MAKERS[name](40)(RBF(0.3), X, X[:, 0].sin())
    assert chosen.stopped == "singular"
    assert len(chosen.indices) == chosen.size == 8
    assert len(X[chosen.indices].unique(dim=0)) == 8
    assert chosen.errors[-1] < 1e-13


def test_all_counts_copies_and_rows_without_length_but_gains_nothing_by_them():
    A = points(64)
    B = points(6, seed=1)
    X = torch.cat([A[:1] * 0, A, A, A, B])  # a whole block of copies among them
    kernel = tl.kernels.Linear(features=torch.nn.Linear(2, 80, bias=False).double())
    chosen = basis.all()(kernel, X)
    assert chosen.indices.tolist() == list(range(199))
    assert chosen.errors[0] == 198 / 199
    assert chosen.errors[-1] < 1e-14
    chosen = basis.all()(RBF(0.05), X[1:])
    assert (chosen.errors[64:192] == chosen.errors[63]).all()
    assert chosen.errors[191] > 5 * chosen.errors[-1]
    first = basis.all(tolerance=chosen.errors[40].item())(RBF(0.05), X[1:])
    assert first.indices.tolist() == list(range(41))
    assert first.stopped == "tolerance"


@every_selector
@pytest.mark.parametrize("lengthscale", [0.6, 13.1, 100.0])
def test_neighbours_in_a_bad_order_spoil_no_error(name, lengthscale):
    X, y = tl.datasets.motorcycle()  # sorted times: the first rows tell next to nothing of the last
    kernel = RBF(lengthscale)
    chosen = MAKERS[name]()(kernel, X, y)
    assert chosen.errors.diff().le(0).all()
    assert chosen.errors[-1] < 1e-5
    if name in ("greedy", "pivoted"):
        assert chosen.stopped == "singular"
        assert chosen.errors[-1] < 1e-10
    K = kernel(X).detach()
    for k in (1, 2, len(chosen.indices) // 2, len(chosen.indices)):
        S = chosen.indices[:k]
        w, V = torch.linalg.eigh(K[S][:, S])
        kept = w > 1e-13 * w[-1]
        features = (K[:, S] @ V[:, kept]) / w[kept].sqrt()
        truth = 1 - features.square().sum(1).mean()
        assert chosen.errors[k - 1] > truth - 1e-5
        assert name == "all" or chosen.errors[k - 1] < truth + 1e-5  # all: of rows that can be told apart


def test_one_vector_is_chosen_even_if_most_rows_have_no_length():
    X = torch.zeros(10, 2, dtype=torch.float64)
    X[4:6] = torch.eye(2)
    chosen = basis.pivoted(tolerance=0.3)(tl.kernels.Linear(), X)
    assert chosen.indices.tolist() == [4]
    assert chosen.errors.tolist() == [0.1]


@bounded
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_kernel_of_low_rank_is_exhausted_by_as_many_vectors(name, dtype):
    X = points(90, 7).to(dtype)
    chosen = MAKERS[name](90)(tl.kernels.Linear(), X, X[:, 0])
    assert chosen.stopped == "singular"
    assert len(chosen.indices) == 7
    assert chosen.errors.dtype == dtype


@bounded
def test_rows_without_length_are_never_chosen_and_count_as_reconstructed(name):
    X = points(20, 3)
    X[[0, 7]] = 0
    chosen = MAKERS[name](2)(tl.kernels.Linear(), X, X[:, 0])
    assert not {0, 7} & set(chosen.indices.tolist())
    K = X @ X.T
    received = chosen.errors[1].item()
    expected = error(K, chosen.indices[:2])
    assert_close(received, expected, rtol=0, atol=1e-13)


def test_lengths_do_not_matter():
    X = points(20, 3)
    length = torch.logspace(-6, 6, 20, dtype=X.dtype).unsqueeze(-1)
    for name in MAKERS.keys() - {"pruned"}:
        plain, scaled = (MAKERS[name](2)(tl.kernels.Linear(), Z).indices for Z in (X, X * length))
        assert_close(plain, scaled)


@every_selector
def test_a_batch_equals_its_loop(name):
    X = points(40, 2, batch=(2, 2))
    X[0, 1, 10:] = X[0, 1, :10].repeat(3, 1)  # stops before the others
    y = points(2, 40, seed=1, batch=(2,))
    for m, tolerance in ((20, 0.0), (40, 0.1)):
        selector = MAKERS[name](m, tolerance=tolerance)
        chosen = selector(RBF(0.6), X, y)
        for i in range(2):
            for j in range(2):
                alone = selector(RBF(0.6), X[i, j], y[i, j])
                size = len(alone.indices)
                assert chosen.size[i, j] == size
                assert_close(chosen.indices[i, j, :size], alone.indices)
                received = chosen.errors[i, j, :size]
                assert_close(received, alone.errors, rtol=0, atol=1e-13)
                assert (chosen.indices[i, j, size:] == alone.indices[-1]).all()
                assert (chosen.errors[i, j, size:] == chosen.errors[i, j, size - 1]).all()


@every_selector
def test_a_batch_of_kernels_on_one_set_of_points(name):
    X = points(25)
    lengths = torch.tensor([[0.3], [1.0]], dtype=torch.float64)
    chosen = MAKERS[name](5)(RBF(lengths), X, X[:, 0])
    for k, length in enumerate(lengths):
        alone = MAKERS[name](5)(RBF(length), X, X[:, 0])
        assert_close(chosen.indices[k], alone.indices)


@pytest.mark.parametrize("make", [basis.stochastic, basis.rpcholesky, basis.random])
def test_the_generator_decides(make):
    X, kernel = points(80), RBF(0.1)
    first, again, other = (make(10, generator=seeded(s)) for s in (3, 3, 4))
    assert first == again != other
    chosen = first(kernel, X).indices
    assert_close(first(kernel, X).indices, chosen)  # the same selector always says the same
    assert_close(again(kernel, X).indices, chosen)
    assert other(kernel, X).indices.tolist() != chosen.tolist()
    generator = seeded(3)
    assert make(10, generator=generator) == first
    assert make(10, generator=generator) != first  # which has moved on
    torch.manual_seed(5)
    default = make(10)
    torch.manual_seed(5)
    assert make(10) == default


@every_selector
def test_a_selector_survives_copies_and_pickle(name):
    X = points()
    selector = MAKERS[name](5)
    expected = selector(RBF(), X, X[:, 0]).indices
    for twin in (copy.deepcopy(selector), pickle.loads(pickle.dumps(selector))):
        assert twin == selector
        assert_close(twin(RBF(), X, X[:, 0]).indices, expected)


class Recording(tl.kernels.RBF):
    """Remembers the largest matrix asked of it."""

    largest = 0

    def _evaluate(self, X, Z):
        K = super()._evaluate(X, Z)
        self.largest = max(self.largest, K.numel())
        return K


@pytest.mark.parametrize("name", ["stochastic", "pivoted", "rpcholesky", "random"])
def test_large_problems_never_see_the_matrix(name):
    kernel, X = Recording(0.5), points(5000)
    MAKERS[name](20)(kernel, X)
    assert 0 < kernel.largest <= 64 * 5000


@pytest.mark.parametrize("kernel", [RBF(0.5), tl.kernels.Polynomial(), 0.5 * RBF(0.5) + tl.kernels.Linear()])
def test_features_are_computed_once_and_change_nothing_else(kernel):
    calls = []
    net = torch.nn.Linear(2, 3).double()
    net.register_forward_hook(lambda *_: calls.append(1))
    X = points()
    F = net(X).detach()
    calls.clear()
    deep = copy.deepcopy(kernel)
    deep.features = net
    received = basis.pivoted(10)(deep, X).indices
    expected = basis.pivoted(10)(kernel, F).indices
    assert_close(received, expected)
    assert len(calls) == 1


@every_selector
def test_a_given_matrix_is_chosen_from_and_left_as_it_was(name):
    X = points()
    K = RBF(0.7)(X).detach()
    before = K.clone()
    for kernel in (tl.kernels.Precomputed(),):
        chosen = MAKERS[name](7)(kernel, K, X[:, 0])
        expected = MAKERS[name](7)(RBF(0.7), X, X[:, 0]).indices
        assert_close(chosen.indices, expected)
    assert_close(K, before, rtol=0, atol=0)


@every_selector
def test_no_graph_is_kept(name):
    X = points().requires_grad_()
    chosen = MAKERS[name](5)(RBF(), X, X[:, 0])
    assert not chosen.errors.requires_grad


@every_selector
@pytest.mark.parametrize("batch", [(), (2,)])
def test_meta_device_gives_m_vectors(name, batch):
    X = torch.empty(*batch, 12, 3, device="meta")
    chosen = MAKERS[name](5)(RBF().to("meta"), X, X[..., 0])
    k = 12 if name == "all" else 5
    assert chosen.indices.shape == chosen.errors.shape == (*batch, k)
    assert chosen.indices.device.type == "meta"
    machine = tl.SparseLSSVM(RBF(), basis=MAKERS[name](5)).to("meta")
    assert machine.loo(X, X[..., 0]).outputs.shape == (*batch, 12)


@every_selector
def test_fake_cuda_meets_no_tensor_of_another_device(name):
    with fake_cuda():
        X = torch.empty(2, 12, 3, device="cuda", dtype=torch.float64)
        kernel = RBF(torch.ones((), device="cuda", dtype=torch.float64))
        assert MAKERS[name](5)(kernel, X, X[..., 0]).indices.device.type == "cuda"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@every_selector
def test_cuda_chooses_what_the_cpu_does(name):
    X = points()
    here = MAKERS[name](5)(RBF(0.3), X, X[:, 0])
    there = MAKERS[name](5)(RBF(0.3).cuda(), X.cuda(), X[:, 0].cuda())
    assert_close(there.indices.cpu(), here.indices)


@every_selector
def test_a_machine_takes_a_selector(name):
    X, Y, weight = problem(30)
    selector = MAKERS[name](6)
    machine = tl.SparseLSSVM(RBF(0.8), 0.1, basis=selector)
    Z = X[selector(machine.kernel, X, Y, weight).indices]
    fixed = tl.SparseLSSVM(RBF(0.8), 0.1, basis=Z)
    received = machine.loo(X, Y, weight).outputs
    expected = fixed.loo(X, Y, weight).outputs
    assert_close(received, expected)
    received = machine.solve(X, Y, weight).coef
    expected = fixed.solve(X, Y, weight).coef
    assert_close(received, expected)
    regs = torch.tensor([0.1, 1.0], dtype=X.dtype)
    received = machine.path(X, Y, regs, None, weight)[0]
    expected = fixed.path(X, Y, regs, None, weight)[0]
    assert_close(received, expected)
    received = machine.fit(X, Y, weight)(X)
    expected = fixed.fit(X, Y, weight)(X)
    assert_close(received, expected)
    assert_close(machine.support, Z)


def test_loo_with_a_selector_is_exact_for_the_basis_it_chose():
    X, Y, weight = problem(25)
    selector = basis.rpcholesky(7, generator=seeded())
    machine = tl.SparseLSSVM(RBF(1.3), 0.1, basis=selector)
    Z = X[selector(machine.kernel, X).indices]
    Kzz = machine.kernel(Z).detach()
    Kxz = machine.kernel(X, Z).detach()
    expected = reference.sparse_lssvm(Kzz, Kxz, Y, 0.1, weight, None)
    assert relative(machine.loo(X, Y, weight).outputs.detach(), expected) < 1e-8


def test_machine_of_a_batch_whose_problems_stop_at_different_sizes():
    X, Y, _ = problem(20, batch=(2,))
    X[1, 10:] = X[1, :10]
    machine = tl.SparseLSSVM(RBF(0.4), 0.1, basis=basis.pivoted(15))
    outputs = machine.loo(X, Y).outputs
    for i in range(2):
        expected = machine.loo(X[i], Y[i]).outputs
        assert_close(outputs[i], expected, rtol=1e-8, atol=1e-9)
    assert machine.fit(X, Y).dropped.tolist() == [0, 5]


def test_gradients_reach_inputs_through_the_rows_chosen():
    X, Y, _ = problem(12)
    selector = basis.greedy(4)
    machine = tl.SparseLSSVM(RBF(0.8), 0.1, basis=selector)
    indices = selector(machine.kernel, X).indices

    def with_rows(X):
        kernel, Z = machine.kernel, X[indices]
        return tl.functional.sparse_lssvm(kernel(Z), kernel(X, Z), Y, machine.reg).held_out().outputs

    X.requires_grad_()
    received = machine.loo(X, Y).outputs.square().sum()
    expected = with_rows(X).square().sum()
    assert_close(*(torch.autograd.grad(value, X)[0] for value in (received, expected)))
    assert torch.autograd.gradcheck(lambda X: machine.loo(X, Y).outputs, X)


def test_gradients_in_a_trainable_basis_are_exact():
    X, Y, _ = problem(10)
    machine = tl.SparseLSSVM(RBF(0.8), 0.1, basis=torch.nn.Parameter(X[:3] + 0.1))

    def loo(Z):
        return torch.func.functional_call(machine, {"basis": Z}, (X, Y), strict=False)

    machine.forward = lambda X, Y: machine.loo(X, Y).outputs
    assert torch.autograd.gradcheck(loo, machine.basis.detach().clone().requires_grad_())


def test_descent_of_press_in_the_basis_beats_the_rows_it_began_with():
    X, y = tl.datasets.motorcycle()
    X = (X - X.mean()) / X.std()
    y = (y - y.mean()) / y.std()
    kernel = RBF(0.4)
    rows = X[::12][:5]  # early times only
    machine = tl.SparseLSSVM(kernel, 1e-3, basis=torch.nn.Parameter(rows.clone()))
    optimiser = torch.optim.Adam([machine.basis], lr=0.1)
    history = []
    for _ in range(100):
        optimiser.zero_grad()
        press = tl.criteria.press(machine.loo(X, y))
        press.backward()
        optimiser.step()
        history.append(press.item())
    assert history[-1] < 0.8 * history[0]
    assert (machine.basis != rows).any()


def test_a_machine_of_all_rows_is_the_dense_one():
    X, Y, weight = problem(30)
    sparse = tl.SparseLSSVM(RBF(0.8), 0.1, basis=basis.all())
    full = tl.LSSVM(RBF(0.8), 0.1)
    received = sparse.loo(X, Y, weight).outputs
    expected = full.loo(X, Y, weight).outputs
    assert_close(received, expected, rtol=1e-7, atol=1e-8)


def test_a_fitted_machine_with_a_selector_survives_its_state():
    X, Y, _ = problem(20)
    machine, twin = (tl.SparseLSSVM(RBF(0.8), basis=basis.rpcholesky(5)) for _ in range(2))
    file = io.BytesIO()
    torch.save(machine.fit(X, Y).state_dict(), file)
    file.seek(0)
    twin.load_state_dict(torch.load(file))
    assert_close(twin(X), machine(X))


@every_selector
@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse rows"])
def test_choices_do_not_depend_on_the_default_device(name, sparse):
    X = points(40)
    kernel = RBF(0.8)
    rows = X.to_sparse_csr() if sparse else X
    machine = tl.SparseLSSVM(kernel, basis=MAKERS[name](6))
    expected = MAKERS[name](6)(kernel, rows, X[:, 0])
    held_out = machine.loo(rows, X[:, 0])
    with torch.device("meta"):  # what torch.set_default_device sets
        received = MAKERS[name](6)(kernel, rows, X[:, 0])
        again = machine.loo(rows, X[:, 0])
    assert torch.equal(received.indices, expected.indices)
    assert_close(received.errors, expected.errors)
    assert_close(again.outputs, held_out.outputs)


def test_seeds_are_drawn_whatever_the_default_device():
    with torch.device("meta"):
        assert len({basis.random(3).seed for _ in range(3)}) == 3


def test_sizes_may_be_integers_of_numpy():
    received = basis.stochastic(np.int64(4), candidates=np.int32(5), rows=np.uint8(10), generator=seeded())
    assert received == basis.stochastic(4, candidates=5, rows=10, generator=seeded())
    assert all(type(size) is int for size in (received.m, received.candidates, received.rows))


def wrong(K):
    return basis.pivoted(3)(tl.kernels.Precomputed(), K)


X = points(6)
K = RBF()(X).detach()
ERRORS = [
    ("m zero", lambda: basis.greedy(0), ValueError, "greedy: m must be a whole number, 1 or more, got 0"),
    ("m a float", lambda: basis.random(2.0), ValueError, "m must be a whole number, 1 or more, got 2.0"),
    ("m true", lambda: basis.pivoted(True), ValueError, "pivoted: m must be a whole number"),
    ("tolerance", lambda: basis.pivoted(3, tolerance=1.0), ValueError, "tolerance must be from 0 to below 1"),
    ("candidates", lambda: basis.stochastic(3, candidates=0), ValueError, "stochastic: candidates must be"),
    ("candidates true", lambda: basis.stochastic(3, candidates=True), ValueError, "candidates must be a wh"),
    ("rows", lambda: basis.stochastic(3, rows=-1), ValueError, "stochastic: rows must be"),
    ("drop", lambda: basis.pruned(3, drop=1.0), ValueError, "pruned: drop must be between 0 and 1"),
    ("too many", lambda: basis.greedy(7)(RBF(), X), ValueError, "at most the number of rows, 6, got 7"),
    ("no kernel", lambda: basis.greedy(2)(torch.nn.Tanh(), X), TypeError, "must be a torchloo kernel"),
    ("integers", lambda: basis.greedy(2)(RBF(), X.long()), TypeError, "X must be float32 or float64"),
    ("vector", lambda: basis.greedy(2)(RBF(), X[:, 0]), ValueError, r"X must be \(..., n, d\)"),
    ("NaN", lambda: basis.greedy(2)(RBF(), X * torch.nan), ValueError, "greedy: X must be finite"),
    ("no y", lambda: basis.pruned(2)(RBF(), X), ValueError, "pruned: y must be given"),
    ("y rows", lambda: basis.pruned(2)(RBF(), X, X[:5, 0]), ValueError, "y must have 6 rows"),
    (
        "weight rows",
        lambda: basis.pruned(2)(RBF(), X, X[:, 0], torch.ones(5).double()),
        ValueError,
        "pruned: weight must have 6 entries",
    ),
    ("pruned reg", lambda: basis.pruned(2, reg=-1.0)(RBF(), X, X[:, 0]), ValueError, "reg must be positive"),
    ("not square", lambda: wrong(K[:5]), ValueError, "X must be a square kernel matrix"),
    ("negative diagonal", lambda: wrong(-K), ValueError, "got a negative k"),
    ("indefinite", lambda: wrong(1.5 - 0.5 * torch.eye(6)), ValueError, "semi-definite"),
    (
        "no length",
        lambda: basis.pivoted(2)(tl.kernels.Linear(), torch.zeros(4, 2)),
        ValueError,
        "kernel must not vanish on all rows",
    ),
    (
        "overflow",
        lambda: basis.pivoted(2)(tl.kernels.Boolean(), 1e3 * X.square()),
        ValueError,
        "kernel must be finite",
    ),
    ("basis true", lambda: tl.SparseLSSVM(RBF(), basis=True), ValueError, "number of rows.* got True"),
    (
        "machine",
        lambda: tl.SparseLSSVM(RBF(), basis=basis.greedy),
        ValueError,
        "or a selector of torchloo.basis, got",
    ),
]


@pytest.mark.parametrize(("call", "kind", "message"), [e[1:] for e in ERRORS], ids=[e[0] for e in ERRORS])
def test_bad_input_is_told(call, kind, message):
    with pytest.raises(kind, match=message):
        call()


def test_an_error_leaves_a_machine_as_it_was():
    machine = tl.SparseLSSVM(RBF(), basis=basis.greedy(4)).fit(X, X[:, 0])
    before = {name: value.clone() for name, value in machine.named_buffers()}
    with pytest.raises(ValueError, match="finite"):
        machine.fit(X * torch.nan, X[:, 0])
    assert_close(dict(machine.named_buffers()), before)
