"""Bad input: a clear error that names function, argument and what came."""

import pytest
import torch

import torchloo as tl
from torchloo.guards import Guard

N = 6


def good():
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(N, 2, dtype=torch.float64, generator=generator)
    return {
        "X": X,
        "K": X @ X.T + torch.eye(N, dtype=torch.float64),
        "Y": torch.randn(N, 1, dtype=torch.float64, generator=generator),
        "y": torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, -1.0], dtype=torch.float64),
        "weight": torch.ones(N, dtype=torch.float64),
    }


def poked(tensor, value):
    tensor = tensor.clone()
    tensor.view(-1)[1] = value
    return tensor


F = tl.functional
RBF = tl.kernels.RBF
BAD = [
    # what, call, exception, message
    ("NaN in K", lambda g: F.rls(poked(g["K"], torch.nan), g["Y"], 1.0), ValueError, "rls: K must be finite"),
    (
        "inf in K",
        lambda g: F.lssvm(poked(g["K"], torch.inf), g["Y"], 1.0),
        ValueError,
        "lssvm: K must be finite",
    ),
    ("NaN in Y", lambda g: F.rls(g["K"], poked(g["Y"], torch.nan), 1.0), ValueError, "rls: Y must be finite"),
    ("K not symmetric", lambda g: F.rls(poked(g["K"], 9.0), g["Y"], 1.0), ValueError, "K must be symmetric"),
    ("K not square", lambda g: F.rls(g["K"][:, :4], g["Y"], 1.0), ValueError, r"K must be square.*\(6, 4\)"),
    ("K a vector", lambda g: F.rls(g["y"], g["Y"], 1.0), ValueError, r"K must be a matrix.*\(6,\)"),
    (
        "rows differ",
        lambda g: F.rls(g["K"], g["Y"][:5], 1.0),
        ValueError,
        r"rls: Y must have 6 rows.*\(5, 1\)",
    ),
    ("Y a vector", lambda g: F.lssvm(g["K"], g["y"], 1.0), ValueError, "lssvm: Y must have 6 rows"),
    ("reg zero", lambda g: F.rls(g["K"], g["Y"], 0.0), ValueError, "rls: reg must be positive.*got 0.0"),
    (
        "reg negative tensor",
        lambda g: F.rls(g["K"], g["Y"], torch.tensor(-1.0)),
        ValueError,
        "reg must be positive",
    ),
    ("reg NaN", lambda g: F.rls(g["K"], g["Y"], float("nan")), ValueError, "reg must be positive"),
    (
        "weight zero",
        lambda g: F.rls(g["K"], g["Y"], 1.0, poked(g["weight"], 0.0)),
        ValueError,
        "weight must be pos",
    ),
    (
        "weight short",
        lambda g: F.rls(g["K"], g["Y"], 1.0, g["weight"][:3]),
        ValueError,
        "weight must have 6 entries",
    ),
    (
        "weight int",
        lambda g: F.rls(g["K"], g["Y"], 1.0, g["weight"].long()),
        TypeError,
        "weight must be float32 or",
    ),
    (
        "integer K",
        lambda g: F.rls(g["K"].long(), g["Y"], 1.0),
        TypeError,
        "K must be float32 or float64, got torch.int",
    ),
    (
        "half K",
        lambda g: F.rls(g["K"].half(), g["Y"], 1.0),
        TypeError,
        "float32 or float64, got torch.float16",
    ),
    (
        "bfloat X",
        lambda g: tl.RLS(RBF()).loo(g["X"].bfloat16(), g["y"]),
        TypeError,
        "y must have the dtype of X, torch.float32, got torch.float64",
    ),
    ("mixed dtypes", lambda g: F.rls(g["K"], g["Y"].float(), 1.0), TypeError, "Y must have the dtype of K"),
    (
        "array K",
        lambda g: F.rls(g["K"].numpy(), g["Y"], 1.0),
        TypeError,
        "K must be a torch tensor, got ndarray",
    ),
    ("empty", lambda g: F.rls(g["K"][:0, :0], g["Y"][:0], 1.0), ValueError, "at least one row"),
    ("no outputs", lambda g: F.rls(g["K"], g["Y"][:, :0], 1.0), ValueError, "Y must have 6 rows"),
    (
        "batches clash",
        lambda g: F.rls(g["K"].expand(2, N, N), g["Y"].expand(3, N, 1), 1.0),
        ValueError,
        "broadcast",
    ),
    (
        "indefinite K",
        lambda g: F.rls(-10 * g["K"], g["Y"], 1.0),
        ValueError,
        "not positive definite.*larger reg",
    ),
    ("indefinite path", lambda g: path(g, K=-10 * g["K"]), ValueError, "not positive definite"),
    (
        "LOO of one row",
        lambda g: F.rls(g["K"][:1, :1], g["Y"][:1], 1.0).held_out(),
        ValueError,
        "at least 2 rows",
    ),
    ("one cluster", lambda g: lco(g, [3] * N), ValueError, "a cluster holds all 6 rows"),
    (
        "clusters short",
        lambda g: lco(g, [0, 1]),
        ValueError,
        r"one label for each of the 6 rows, got shape \(2,\)",
    ),
    (
        "float clusters",
        lambda g: lco(g, torch.rand(N)),
        TypeError,
        "clusters must be integer labels, got float32",
    ),
    ("no clusters", lambda g: lco(g, None), TypeError, "clusters must be integer labels"),
    (
        "clusters of text",
        lambda g: lco(g, list("ababab")),
        TypeError,
        r"clusters must be integer labels, got <U1; number them, e.g. np.unique\(clusters, ",
    ),
    ("classes of text", lambda g: tl.one_vs_rest(["a", "b"]), TypeError, "labels must be integer"),
    (
        "known classes of text",
        lambda g: tl.LSSVM(RBF(), classes=["a", "b"]),
        TypeError,
        "LSSVM: classes must be integer labels, got <U1; number them",
    ),
    (
        "probe of text",
        lambda g: tl.probe(g["X"], list("ababab"), progress=False),
        TypeError,
        "probe: labels must be integer labels, got <U1; number them",
    ),
    (
        "probe by groups of text",
        lambda g: tl.probe(g["X"], g["y"], groups=list("ababab"), progress=False),
        TypeError,
        "probe: groups must be integer labels, got <U1; number them",
    ),
    (
        "labels 0 and 1",
        lambda g: F.kfd(g["K"], (g["y"][:, None] + 1) / 2, 1.0),
        ValueError,
        r"y must hold labels -1 and \+1",
    ),
    (
        "one class",
        lambda g: F.kfd(g["K"], g["y"][:, None].abs(), 1.0),
        ValueError,
        "y must hold both classes",
    ),
    (
        "KFD rows differ",
        lambda g: F.kfd(g["K"], g["y"][:4, None], 1.0),
        ValueError,
        r"kfd: Y must have 6 rows",
    ),
    (
        "KFD weight short",
        lambda g: F.kfd(g["K"], g["y"][:, None], 1.0, g["weight"][:2]),
        ValueError,
        "weight must have 6",
    ),
    (
        "Kxz columns",
        lambda g: F.sparse_lssvm(g["K"][:3, :3], g["K"][:, :4], g["Y"], 1.0),
        ValueError,
        "3 columns",
    ),
    (
        "Kzz not square",
        lambda g: F.sparse_lssvm(g["K"][:3], g["K"], g["Y"], 1.0),
        ValueError,
        "Kzz must be square",
    ),
    ("NaN in Kxz", lambda g: sparse(g, poked(g["K"][:, :3], torch.nan)), ValueError, "Kxz must be finite"),
    ("R shape", lambda g: F.ridge(g["X"], g["Y"], torch.eye(3).double()), ValueError, r"R must be \(2, 2\)"),
    (
        "R indefinite",
        lambda g: F.ridge(g["X"], g["Y"], -100 * torch.eye(2).double()),
        ValueError,
        "R must be positive semi-definite",
    ),
    (
        "NaN in Z",
        lambda g: F.ridge(poked(g["X"], torch.nan), g["Y"], torch.eye(2).double()),
        ValueError,
        "Z must be",
    ),
    ("X a vector", lambda g: tl.LSSVM(RBF()).fit(g["y"], g["y"]), ValueError, r"X must be \(..., n, d\)"),
    ("y rows", lambda g: tl.LSSVM(RBF()).fit(g["X"], g["y"][:3]), ValueError, "lssvm: y must have 6 rows"),
    (
        "y too deep",
        lambda g: tl.LSSVM(RBF()).fit(g["X"], g["K"].expand(2, N, N)),
        ValueError,
        "y must have 6 rows",
    ),
    (
        "inf in X",
        lambda g: tl.LSSVM(RBF()).loo(poked(g["X"], torch.inf), g["y"]),
        ValueError,
        "X must be finite",
    ),
    (
        "kernel missing",
        lambda g: tl.LSSVM(torch.nn.Linear(1, 1)),
        TypeError,
        "kernel must be a torchloo kernel",
    ),
    ("module reg", lambda g: tl.LSSVM(RBF(), reg=-1.0), ValueError, "LSSVM: reg must be positive.*got -1.0"),
    (
        "regs shape",
        lambda g: path(g, regs=torch.ones(2, 3)),
        ValueError,
        r"regs must have shape \(R,\), or \(R, 1\)",
    ),
    ("regs negative", lambda g: path(g, regs=torch.tensor([1.0, -1.0])), ValueError, "regs must be positive"),
    ("no regs", lambda g: path(g, regs=torch.ones(0)), ValueError, "regs must have shape"),
    (
        "basis zero",
        lambda g: tl.SparseLSSVM(RBF(), basis=0),
        ValueError,
        "basis must be a tensor or a positive",
    ),
    (
        "basis too large",
        lambda g: tl.SparseLSSVM(RBF(), basis=9).fit(g["X"], g["y"]),
        ValueError,
        "at most the number",
    ),
    (
        "basis on Precomputed",
        lambda g: tl.SparseLSSVM(tl.kernels.Precomputed(), basis=2),
        TypeError,
        "functional",
    ),
    ("new columns", lambda g: F.rls(g["K"], g["Y"], 1.0).from_kernel(g["K"][:, :4]), ValueError, "6 columns"),
    ("NaN on a path", lambda g: path(g, K=poked(g["K"], torch.nan)), ValueError, "X must be finite"),
    (
        "NaN on a linear path",
        lambda g: tl.LSSVM(tl.kernels.Linear()).path(poked(g["X"], torch.nan), g["y"], torch.ones(8)),
        ValueError,
        "X must be finite",
    ),
    (
        "NaN on a sparse path",
        lambda g: tl.SparseLSSVM(RBF(), basis=3).path(poked(g["X"], torch.nan), g["y"], torch.ones(8)),
        ValueError,
        "X must be finite",
    ),
    (
        "nothing left to refit with",
        lambda g: F.ridge(torch.eye(6, 2).double(), g["Y"], torch.zeros(2, 2).double()).held_out(),
        ValueError,
        "not positive definite",
    ),
    (
        "indefinite Kzz",
        lambda g: F.sparse_lssvm(torch.diag(g["y"][:3]), g["K"][:, :3], g["Y"], 1.0),
        ValueError,
        "Kzz must be positive semi-definite",
    ),
    ("KFD not symmetric", lambda g: F.kfd(poked(g["K"], 9.0), g["y"][:, None], 1.0), ValueError, "symmetric"),
    ("KFD not square", lambda g: F.kfd(g["K"][:, :4], g["y"][:, None], 1.0), ValueError, "K must be square"),
    (
        "reg too small for float32",
        lambda g: F.rls(g["K"].float(), g["Y"].float(), 1e-60),
        ValueError,
        "reg must be positive",
    ),
    ("ragged clusters", lambda g: lco(g, [[0], [1, 2]]), TypeError, "clusters must be integer labels"),
    ("NaN to predict", lambda g: fitted(g)(poked(g["X"], torch.nan)), ValueError, "X must be finite"),
    ("dtype to predict", lambda g: fitted(g)(g["X"].float()), TypeError, "support must have the dtype of X"),
    (
        "a HeldOut for a Fit",
        lambda g: tl.criteria.leave_pair_out_auc(tl.LSSVM(RBF()).loo(g["X"], g["y"])),
        TypeError,
        "fit must be a Fit",
    ),
    (
        "labels beside a vector of inputs",
        lambda g: tl.LSSVM(RBF()).loo(g["y"], g["y"].long()),
        ValueError,
        r"lssvm: X must be \(\.\.\., n, d\) with at least one row, got shape \(6,\)",
    ),
    (
        "batch of an SVM",
        lambda g: tl.SVC(RBF(torch.ones(2, 1)), C=torch.ones(3)).loo(g["X"], g["y"].sign()),
        ValueError,
        r"svc: batch dimensions must broadcast, got kernel\(X\) \(2, 6, 6\), y \(6,\), C \(3,\)",
    ),
    (
        "weight of an SVM",
        lambda g: tl.SVC(RBF()).loo(g["X"], g["y"].sign(), poked(g["weight"], -1.0)),
        ValueError,
        r"svc: weight must be positive and finite, got -1 at \(1,\)",
    ),
    ("text for C", lambda g: tl.SVC(RBF(), C="a"), TypeError, "SVC: C must be a positive number or a tensor"),
    ("nothing for reg", lambda g: tl.RLS(RBF(), None), TypeError, "RLS: reg must be a positive number or"),
    ("folds", lambda g: tl.folds(5, 9), ValueError, "k must be an integer from 2 to n = 5, got 9"),
]


def lco(g, clusters):
    return tl.LSSVM(RBF()).lco(g["X"], g["y"], clusters)


def path(g, K=None, regs=None):
    machine = tl.LSSVM(tl.kernels.Precomputed())
    regs = torch.ones(12) if regs is None else regs
    return machine.path(g["K"] if K is None else K, g["Y"], regs)


def fitted(g):
    return tl.LSSVM(tl.kernels.Linear()).fit(g["X"], g["y"])


def sparse(g, Kxz):
    return F.sparse_lssvm(g["K"][:3, :3], Kxz, g["Y"], 1.0)


@pytest.mark.parametrize(("what", "call", "exception", "message"), BAD, ids=[row[0] for row in BAD])
def test_bad_input_raises(what, call, exception, message):
    with pytest.raises(exception, match=message):
        call(good())


KERNELS = [
    tl.kernels.RBF(),
    tl.kernels.Matern(0.5),
    tl.kernels.Linear(),
    tl.kernels.Polynomial(3),
    2.0 * RBF() + tl.kernels.Linear(),
    tl.kernels.RBF(features=torch.nn.ReLU()),  # through which -inf would pass unseen
]


@pytest.mark.parametrize("kernel", KERNELS, ids=repr)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("machine", [tl.RLS, tl.LSSVM])
def test_no_value_that_is_not_finite_passes_unseen(kernel, value, machine):
    g, machine = good(), machine(kernel)
    for wide in (g["X"], g["X"].repeat(1, 4)):  # fewer features than rows, and more
        for call in (machine.loo, machine.solve, machine.fit):
            with pytest.raises(ValueError, match="X must be finite, got NaN or infinity"):
                call(poked(wide, value), g["y"])
            with pytest.raises(ValueError, match="Y must be finite, got NaN or infinity"):
                call(wide, poked(g["y"], value))


@pytest.mark.parametrize("value", [0.0, -1e-3, torch.nan, torch.inf])
@pytest.mark.parametrize("function", [F.rls, F.lssvm])
def test_values_that_leave_the_matrix_positive_definite_are_refused_all_the_same(function, value):
    g = good()
    K = 100 * torch.eye(N, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"reg must be positive and finite, got"):
        function(K, g["Y"], torch.tensor(value, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"reg must be positive and finite, got .* at \(1,\)"):
        function(K, g["Y"], torch.tensor([1.0, value], dtype=torch.float64))
    with pytest.raises(ValueError, match=r"weight must be positive and finite, got .* at \(1,\)"):
        function(K, g["Y"], 1.0, poked(g["weight"], value))


@pytest.mark.parametrize("value", [1e160, 1e300])
@pytest.mark.parametrize("machine", [tl.RLS, tl.LSSVM])
def test_a_path_refuses_rows_whose_squares_overflow(machine, value):
    g = good()
    X, regs = poked(g["X"], value), torch.tensor([0.1, 2.0])
    for call in (machine(tl.kernels.Linear()).path, machine(tl.kernels.Linear()).solve_path):
        with pytest.raises(ValueError, match="the regularised matrix is not positive definite"):
            call(X, g["y"], regs)


class Skewed(tl.kernels.RBF):
    """A kernel of one's own that is not symmetric, made from one that is."""

    def _evaluate(self, X, Z):
        K = super()._evaluate(X, Z)
        return K + torch.ones_like(K).triu(1)


@pytest.mark.parametrize(
    "kernel",
    [Skewed(), 2.0 * Skewed(), RBF() + Skewed(), RBF() * Skewed()],
    ids=["own", "scaled", "sum", "product"],
)
def test_kernels_of_ones_own_are_checked_for_symmetry(kernel):
    g = good()
    for machine in (tl.RLS, tl.LSSVM, tl.KFD):
        for call in (machine(kernel).loo, machine(kernel).fit):
            with pytest.raises(ValueError, match="K must be symmetric, but differs from its transpose"):
                call(g["X"], g["y"])


def test_a_given_matrix_is_checked_for_symmetry():
    g = good()
    for machine in (tl.RLS, tl.LSSVM, tl.KFD):
        with pytest.raises(ValueError, match="K must be symmetric"):
            machine(tl.kernels.Precomputed()).loo(poked(g["K"], 9.0), g["y"])


def test_a_kernel_matrix_that_overflows_is_named():
    g = good()
    for machine in (tl.RLS, tl.LSSVM, tl.KFD):
        with pytest.raises(ValueError, match="K must be finite, got NaN or infinity"):
            machine(tl.kernels.Polynomial(3)).loo(1e150 * g["X"], g["y"])


@pytest.mark.parametrize("machine", [tl.RLS, tl.LSSVM, tl.KFD], ids=["rls", "lssvm", "kfd"])
def test_weights_too_small_to_divide_by_are_refused(machine):
    g = good()
    weight = poked(g["weight"], 1e-320)
    for kernel in (tl.kernels.RBF(), tl.kernels.Linear()):
        with pytest.raises(ValueError, match=r"reg / weight must be finite, got"):
            machine(kernel).loo(g["X"], g["y"], weight)


@pytest.mark.parametrize("result", [torch.nan, torch.inf])
def test_a_result_that_is_not_finite_is_blamed_on_inputs_only_where_they_are_not(result):
    Y = good()["Y"]
    guard = Guard("f")
    guard.finite(Y=Y)
    guard.implied(poked(Y, result), Y)
    guard.check()
    bad = poked(Y, result)
    guard.finite(Y=bad)
    guard.implied(bad, bad)
    with pytest.raises(ValueError, match="f: Y must be finite"):
        guard.check()


def test_a_basis_that_is_empty_or_of_other_columns_is_refused():
    g = good()
    for shape in ((0, 2), (3, 0), (2,)):
        with pytest.raises(ValueError, match=r"basis must be .* with at least one row, got shape"):
            tl.SparseLSSVM(tl.kernels.RBF(), basis=torch.empty(shape, dtype=torch.float64))
    machine = tl.SparseLSSVM(tl.kernels.RBF(), basis=g["X"][:2, :1])
    for call in (machine.loo, machine.fit):
        with pytest.raises(ValueError, match=r"basis must have inputs like X, of shape \(2,\), got \(1,\)"):
            call(g["X"], g["y"])
