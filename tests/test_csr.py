"""Sparse CSR rows: the same matrices and the same machines as dense rows."""

import copy
import io
import pickle

import pytest
import torch
from benchmark_folder import DATA, needs_data
from cases import relative
from torch.testing import assert_close

import torchloo as tl
from torchloo import csr
from torchloo.kernels import RBF, Boolean, Linear, Matern, Polynomial, Precomputed

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")


def rows(n=40, d=60, part=0.1, seed=0, dtype=torch.float64):
    """Rows of few small integers, one of them empty and two of them equal."""
    generator = torch.Generator().manual_seed(seed)
    X = torch.randint(1, 4, (n, d), generator=generator) * (torch.rand(n, d, generator=generator) < part)
    X[3], X[n - 1] = 0, X[0]
    return X.to(dtype)


KERNELS = {
    "linear": Linear(),
    "polynomial": Polynomial(degree=3, offset=0.5),
    "boolean": Boolean(rate=0.3),
    "rbf": RBF(2.0),
    "matern": Matern(2.5, lengthscale=2.0),
    "composed": 2.0 * Linear() + RBF(1.0) * Boolean(0.1),
    "batched": Polynomial(offset=torch.tensor([0.5, 2.0], dtype=torch.float64)),
}
every_kernel = pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)


@every_kernel
@pytest.mark.parametrize("part", [0.03, 0.1, 0.5])  # the last one is multiplied as dense rows
def test_kernel_matrix_equals_that_of_dense_rows(kernel, part):
    X = rows(300, 50, part)
    Z = rows(270, 50, part, seed=1)
    S, T = X.to_sparse_csr(), Z.to_sparse_csr()
    K = kernel(S)
    assert K.layout == torch.strided
    assert_close(K, K.mT, rtol=0, atol=0)
    assert_close(K, kernel(X), rtol=1e-12, atol=1e-12)
    for left, right in ((S, T), (S, Z), (X, T)):
        assert_close(kernel(left, right), kernel(X, Z), rtol=1e-12, atol=1e-12)
    assert_close(kernel.diagonal(S), kernel.diagonal(X), rtol=1e-13, atol=0)


@every_kernel
def test_dense_points_may_be_a_batch(kernel):
    X = rows(12)
    Z = torch.stack([rows(5, seed=1), rows(5, seed=2)])
    assert_close(kernel(X.to_sparse_csr(), Z), kernel(X, Z))
    assert_close(kernel(Z, X.to_sparse_csr()), kernel(Z, X))


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_any_index_type_and_dtype(index, dtype):
    X = rows(dtype=dtype)
    S = X.to_sparse_csr()
    parts = S.crow_indices().to(index), S.col_indices().to(index), S.values()
    S = torch.sparse_csr_tensor(*parts, X.shape, check_invariants=True)
    for kernel in (Linear(), RBF(2.0)):
        assert kernel(S).dtype == dtype
        assert_close(kernel(S), kernel(X))
    chosen = torch.tensor([3, 0, 7, 7])
    assert_close(csr.take(S, chosen), X[chosen])
    assert_close(csr.select(S, chosen).to_dense(), X[chosen])


def test_selected_rows_stay_on_the_device_of_all_rows():
    X = rows()
    chosen = torch.tensor([3, 0, 7])
    S = X.to_sparse_csr()
    with torch.device("meta"):  # what torch.set_default_device sets
        received = csr.select(S, chosen)
    assert_close(received.to_dense(), X[chosen])


def test_equal_rows_have_distance_zero_on_the_diagonal():
    assert (RBF(0.01)(rows().to_sparse_csr()).diagonal() == 1).all()


def test_gradients_reach_the_parameters_and_dense_points():
    X = rows()
    Z = rows(5, seed=1)
    S = X.to_sparse_csr()
    for make in (lambda: Polynomial(), lambda: Boolean(0.3), lambda: RBF(2.0), lambda: Matern(1.5, 2.0)):
        gradients = []
        for left in (X, S):
            kernel = make()
            right = Z.clone().requires_grad_()
            loss = (
                kernel(left).sin().sum() + kernel(left, right).cos().sum() + kernel(right, left).sin().sum()
            )
            gradients.append(torch.autograd.grad(loss, (*kernel.parameters(), right)))
        assert_close(gradients[1], gradients[0])


MACHINES = {
    "rls": lambda kernel: tl.RLS(kernel, 0.3),
    "lssvm": lambda kernel: tl.LSSVM(kernel, 0.3),
    "kfd": lambda kernel: tl.KFD(kernel, 0.3),
    "sparse": lambda kernel: tl.SparseLSSVM(kernel, 0.3, basis=9),
    "selected": lambda kernel: tl.SparseLSSVM(kernel, 0.3, basis=tl.basis.greedy(9)),
    "svc": lambda kernel: tl.SVC(kernel, 2.0),
}
every_machine = pytest.mark.parametrize("make", MACHINES.values(), ids=MACHINES)


@every_machine
@pytest.mark.parametrize("kernel", [Linear(), Polynomial(), Boolean(0.3), RBF(2.0)])
@pytest.mark.parametrize("d", [20, 90])  # fewer and more than rows
def test_machines_are_the_same_from_end_to_end(make, kernel, d):
    X = rows(d=d)
    y = torch.randn(40, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).sign()
    S = X.to_sparse_csr()
    machine = make(kernel)
    clusters = torch.arange(40) // 3
    assert relative(machine.loo(S, y).outputs, machine.loo(X, y).outputs) < 1e-10
    assert relative(machine.lco(S, y, clusters).outputs, machine.lco(X, y, clusters).outputs) < 1e-10
    if not isinstance(machine, tl.SVC):
        regs = torch.tensor([0.1, 1.0], dtype=torch.float64)
        assert relative(machine.path(S, y, regs).outputs, machine.path(X, y, regs).outputs) < 1e-10
    expected = machine.fit(X, y)(X)
    machine.fit(S, y)
    for new in (X, S):
        assert relative(machine(new), expected) < 1e-10


@every_machine
@pytest.mark.parametrize("d", [20, 90])
def test_fitted_machines_survive_copies_pickle_and_state(make, d):
    X = rows(d=d)
    y = torch.arange(40, dtype=torch.float64).cos().sign()
    S = X.to_sparse_csr()
    machine = make(Polynomial()).fit(S, y)
    expected = machine(S)
    file = io.BytesIO()
    torch.save(machine.state_dict(), file)
    file.seek(0)
    fresh = make(Polynomial())
    fresh.load_state_dict(torch.load(file))
    whole = copy.deepcopy(torch.nn.ModuleList([machine]))[0]
    for twin in (copy.deepcopy(machine), pickle.loads(pickle.dumps(machine)), fresh, whole):
        assert_close(twin(S), expected, rtol=0, atol=0)
    assert machine.double()(S).dtype == torch.float64


def test_wide_sparse_rows_are_never_made_dense_at_once(monkeypatch):
    n, d = 600, 3000
    largest = []
    original = csr.take
    monkeypatch.setattr(csr, "take", lambda X, some: largest.append(len(some)) or original(X, some))
    monkeypatch.setattr(torch.Tensor, "to_dense", lambda self: pytest.fail("made dense"))
    X = rows(n, d, 0.01)
    y = torch.arange(n, dtype=torch.float64).sin()
    machine = tl.LSSVM(Linear()).fit(X.to_sparse_csr(), y)
    assert csr.is_csr(machine.support)
    assert max(largest) <= 256


@pytest.mark.parametrize("make", [tl.basis.greedy, tl.basis.pivoted, tl.basis.rpcholesky, tl.basis.random])
def test_selectors_choose_the_same_rows(make):
    X, selector = rows(), make(8)
    for kernel in (Polynomial(), Boolean(0.3)):
        chosen, expected = (selector(kernel, points) for points in (X.to_sparse_csr(), X))
        assert_close(chosen.indices, expected.indices)
        assert_close(chosen.errors, expected.errors)


def test_a_selector_takes_a_batch_of_kernels():
    X, kernel = rows(), KERNELS["batched"]
    for selector in (tl.basis.pivoted(5), tl.basis.random(5)):
        assert_close(selector(kernel, X.to_sparse_csr()).indices, selector(kernel, X).indices)


def test_a_machine_of_selected_rows_takes_a_batch_of_kernels():
    X = rows()
    Y = rows(seed=1)[:, :2]
    kernel = Polynomial(offset=torch.tensor([0.5, 2.0], dtype=torch.float64))
    machine = tl.SparseLSSVM(kernel, 0.3, basis=tl.basis.pivoted(5))
    for y in (Y[:, 0], Y):
        received = machine.loo(X.to_sparse_csr(), y).outputs
        expected = machine.loo(X, y).outputs
        assert_close(received, expected)
        received = machine.fit(X.to_sparse_csr(), y)(X)
        expected = machine.fit(X, y)(X)
        assert_close(received, expected)


def test_precomputed_matrices_are_made_dense():
    X = rows()
    K = X @ X.T
    y = X[:, 0]
    for machine in (tl.LSSVM(Precomputed()), tl.SVC(Precomputed())):
        labels = y if isinstance(machine, tl.LSSVM) else (y > 0) * 2.0 - 1
        expected = machine.loo(K, labels.double()).outputs
        assert_close(machine.loo(K.to_sparse_csr(), labels.double()).outputs, expected)
        assert_close(machine.fit(K.to_sparse_csr(), labels.double())(K.to_sparse_csr()), machine(K))


def nan_rows():
    X = rows()
    X[5, 5] = torch.nan
    return X.to_sparse_csr()


ERRORS = [
    (
        "layout",
        lambda X: Linear()(X.to_sparse()),
        TypeError,
        "Linear: X must be dense or of layout torch.sparse_csr",
    ),
    (
        "machine",
        lambda X: tl.RLS(Linear()).fit(X.to_sparse_csc(), X[:, 0]),
        TypeError,
        "rls: X must be dense or",
    ),
    (
        "gradient",
        lambda X: Linear()(X.to_sparse_csr().requires_grad_()),
        ValueError,
        "must not require a grad",
    ),
    (
        "ARD",
        lambda X: RBF(torch.ones(60))(X.to_sparse_csr()),
        ValueError,
        "RBF: X of sparse rows needs one length",
    ),
    (
        "nu",
        lambda X: Matern(0.5)(X.to_sparse_csr()),
        ValueError,
        "Matern: X of sparse rows needs .* nu > 1/2",
    ),
    ("columns", lambda X: Linear()(X.to_sparse_csr(), X[:, :4]), ValueError, "Z must have 60 columns"),
    ("batch", lambda X: Linear()(torch.stack([X, X]).to_sparse_csr()), ValueError, r"must be \(n, d\)"),
    ("NaN", lambda X: tl.LSSVM(Linear()).fit(nan_rows(), X[:, 0]), ValueError, "lssvm: X must be finite"),
]


@pytest.mark.parametrize(("call", "kind", "message"), [e[1:] for e in ERRORS], ids=[e[0] for e in ERRORS])
def test_bad_input_is_told(call, kind, message):
    X = rows()
    X[:, 0] = torch.arange(1, 41)  # as many entries in each of a batch
    with pytest.raises(kind, match=message):
        call(X)


@needs_data
def test_hiva_is_the_same():
    X, y, _, _ = tl.datasets.benchmark("hiva", DATA)
    X, y = X[:600], y[:600]
    S = X.to_sparse_csr()
    for kernel in (Linear(), Polynomial(), Boolean(0.01)):
        assert relative(kernel(S), kernel(X)) < 1e-12
        machine = tl.LSSVM(kernel, 10.0)
        received = machine.loo(S, y).outputs
        expected = machine.loo(X, y).outputs
        assert relative(received, expected) < 1e-10
