"""Class labels: integers and bools, how they are coded, and machines that are given them."""

import copy
import pickle

import pytest
import torch
from counting import Counting
from torch.testing import assert_close

import torchloo as tl


def columns_by_loops(labels: list, classes: list) -> torch.Tensor:
    """-1 and +1, row by row and class by class; one column for the second of two classes."""
    kept = classes if len(classes) > 2 else classes[1:]
    return torch.tensor([[1.0 if label == c else -1.0 for c in kept] for label in labels])


@pytest.mark.parametrize(
    ("labels", "classes", "order"),
    [
        ([3, -1, 7, 3], None, [-1, 3, 7]),
        ([3, -1, 7, 3], [7, 3, -1], [7, 3, -1]),
        ([0, 1, 1], [2, 1, 0], [2, 1, 0]),  # one is missing
        ([5, 2, 2], None, [2, 5]),
        ([5, 2, 2], [5, 2], [5, 2]),
        ([True, False, False], None, [False, True]),
        ([1, 1, 1], [0, 1], [0, 1]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_vs_rest_equals_loops(labels, classes, order, dtype):
    expected = columns_by_loops(labels, order).to(dtype)
    for given in (torch.tensor(labels), labels, torch.tensor(labels).numpy()):
        assert_close(tl.one_vs_rest(given, classes, dtype=dtype), expected, rtol=0, atol=0)
    batch = torch.tensor([labels, labels[::-1]])
    received = tl.one_vs_rest(batch, classes, dtype=dtype)
    assert torch.equal(received, torch.stack([expected, expected.flip(0)]))


@pytest.mark.parametrize(
    ("labels", "classes", "match"),
    [
        (torch.tensor([1.0, 2.0]), None, "labels must be integers or bools, got torch.float32; convert"),
        (torch.tensor(3), None, r"labels must be \(..., n\) and not empty, got shape \(\)"),
        (torch.zeros(0, dtype=torch.long), None, r"not empty, got shape \(0,\)"),
        ([4, 4], None, r"labels must hold at least two classes, got \[4\] only"),
        ([0, 1, 5, 9], [0, 1], r"labels must hold labels of classes only, \[0, 1\], got \[5, 9\]"),
        ([0, 1], [0], r"classes must be two or more different labels, got \[0\]"),
        ([0, 1], [0, 1, 1], "classes must be two or more different labels"),
        ([0, 1], [[0, 1]], "classes must be two or more different labels"),
        ([0, 1], [0.0, 1.0], "classes must be integers or bools, got torch.float32"),
    ],
)
def test_one_vs_rest_refuses(labels, classes, match):
    with pytest.raises((TypeError, ValueError), match="one_vs_rest: .*" + match):
        tl.one_vs_rest(labels, classes)


def test_one_vs_rest_without_values_needs_classes():
    labels = torch.zeros(2, 5, dtype=torch.long, device="meta")
    assert tl.one_vs_rest(labels, [0, 1, 2]).shape == (2, 5, 3)
    with pytest.raises(ValueError, match="classes must be given"):
        tl.one_vs_rest(labels)
    batch = torch.tensor([[0, 2], [1, 1]])
    each = torch.func.vmap(lambda y: tl.one_vs_rest(y, [0, 1, 2]))(batch)
    assert torch.equal(each, tl.one_vs_rest(batch))


DOUBLE = torch.float64

MACHINES = {
    "rls": lambda **options: tl.RLS(tl.kernels.RBF(1.5), 0.3, **options),
    "lssvm": lambda **options: tl.LSSVM(tl.kernels.RBF(1.5), 0.3, **options),
    "linear": lambda **options: tl.LSSVM(tl.kernels.Linear(), 0.3, **options),
    "sparse": lambda **options: tl.SparseLSSVM(tl.kernels.RBF(1.5), 0.3, basis=6, **options),
    "kfd": lambda **options: tl.KFD(tl.kernels.RBF(1.5), 0.3, **options),
    "svc": lambda **options: tl.SVC(tl.kernels.RBF(1.5), 2.0, **options),
}


def problem(classes: int, n: int = 24, batch: tuple = (), seed: int = 0):
    """Rows about the centres of their classes, and labels 10, 20, ... in no order; all in every problem."""
    generator = torch.Generator().manual_seed(seed)
    member = torch.stack(
        [torch.randperm(n, generator=generator) % classes for _ in range(max(1, torch.Size(batch).numel()))]
    ).reshape(*batch, n)
    centres = 2 * torch.randn(classes, 3, generator=generator, dtype=DOUBLE)
    X = centres[member] + torch.randn(*batch, n, 3, generator=generator, dtype=DOUBLE)
    return X, 10 * (member + 1)


def as_columns(labels: torch.Tensor, classes: list) -> torch.Tensor:
    """Targets that a machine makes of labels (n,): columns by loops, of two classes a vector."""
    columns = columns_by_loops(labels.tolist(), classes).to(DOUBLE)
    return columns if len(classes) > 2 else columns[:, 0]


def assert_same(received, expected):
    """The same HeldOut, field by field."""
    for name in tl.HeldOut._fields:
        one, other = getattr(received, name), getattr(expected, name)
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one.nan_to_num(), other.nan_to_num())


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("count", [2, 3])
def test_labels_are_the_columns_of_their_classes(name, count):
    X, labels = problem(count)
    machine = MACHINES[name]()
    Y = as_columns(labels, [10, 20, 30][:count])
    clusters = torch.arange(len(X)) % 8
    assert_same(machine.loo(X, labels), machine.loo(X, Y))
    assert_same(machine.lco(X, labels, clusters), machine.lco(X, Y, clusters))
    assert torch.equal(machine.solve(X, labels).outputs, machine.solve(X, Y).outputs)
    assert machine.classes is None
    if name != "svc":
        regs = torch.tensor([0.1, 1.0], dtype=DOUBLE)
        assert_same(machine.path(X, labels, regs), machine.path(X, Y, regs))
    outputs = machine.fit(X, labels)(X)
    assert torch.equal(outputs, MACHINES[name]().fit(X, Y)(X))
    assert machine.classes.tolist() == [10, 20, 30][:count]
    said = [[10, 20, 30][row.argmax()] if count > 2 else (20 if row >= 0 else 10) for row in outputs]
    assert machine.predict_class(X).tolist() == said
    assert torch.equal(machine.fit(X, Y)(X), outputs)
    assert machine.classes is None


@pytest.mark.parametrize("name", MACHINES)
def test_batches_of_labels_equal_their_loop(name):
    X, labels = problem(3, batch=(2,))
    machine = MACHINES[name]()
    together = machine.loo(X, labels).outputs
    predicted = machine.fit(X, labels).predict_class(X)
    for b in range(2):
        expected = machine.loo(X[b], labels[b]).outputs
        assert_close(together[b], expected, rtol=1e-8, atol=1e-8)
        assert torch.equal(predicted[b], MACHINES[name]().fit(X[b], labels[b]).predict_class(X[b]))
    shared = machine.loo(X, labels[0]).outputs  # the same labels for both
    expected = machine.loo(X[1], labels[0]).outputs
    assert_close(shared[1], expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", ["rls", "lssvm", "linear", "sparse"])
def test_given_classes_fix_set_and_order(name):
    X, labels = problem(2)
    machine = MACHINES[name](classes=[30, 20, 10])
    Y = as_columns(labels, [30, 20, 10])
    assert_same(machine.loo(X, labels), machine.loo(X, Y))
    assert machine.classes.tolist() == [30, 20, 10]
    machine.fit(X, labels)
    assert machine.predict_class(X).unique().tolist() == [10, 20]
    by_columns = MACHINES[name](classes=[30, 20, 10]).fit(X, Y)
    assert torch.equal(by_columns.predict_class(X), machine.predict_class(X))


@pytest.mark.parametrize("name", MACHINES)
def test_labels_come_in_every_integer_dtype_and_codes_in_that_of_X(name):
    X, labels = problem(2)
    expected = MACHINES[name]().fit(X, labels)
    for dtype in (torch.uint8, torch.int16, torch.int32):
        machine = MACHINES[name]().fit(X, labels.to(dtype))
        assert machine.predict_class(X).dtype == dtype
        assert torch.equal(machine.predict_class(X).long(), expected.predict_class(X))
    machine = MACHINES[name]().fit(X, labels == 20)
    assert torch.equal(machine.predict_class(X), expected.predict_class(X) == 20)
    single = MACHINES[name]().loo(X.float(), labels)
    assert single.targets.dtype == single.outputs.dtype == torch.float32


@pytest.mark.parametrize("name", MACHINES)
def test_state_of_classes_round_trips(name):
    X, labels = problem(3)
    machine = MACHINES[name]().fit(X, labels)
    expected = machine.predict_class(X)
    loaded = MACHINES[name](classes=[1, 2, 3])
    for twin in (loaded, MACHINES[name]().fit(X, labels == 10)):
        twin.load_state_dict(machine.state_dict())
        assert torch.equal(twin.predict_class(X), expected)
    for twin in (copy.deepcopy(machine), pickle.loads(pickle.dumps(machine))):
        assert torch.equal(twin.predict_class(X), expected)
    numbers = MACHINES[name]().fit(X, as_columns(labels, [10, 20, 30]))
    assert "classes" not in numbers.state_dict()  # as before there were classes
    machine.load_state_dict(numbers.state_dict())
    assert machine.classes is None
    loaded.load_state_dict(numbers.state_dict())
    assert loaded.classes.tolist() == [10, 20, 30]


@pytest.mark.parametrize("name", MACHINES)
def test_bad_labels_are_refused_and_change_nothing(name):
    X, labels = problem(3)
    machine = MACHINES[name]().fit(X, labels)
    before = machine(X)
    counts = torch.arange(len(X))
    cases = [
        (
            counts,
            r"at most 20 distinct ones for 24 rows, got 24; for regression .*\.double\(\).*tl.one_vs_rest",
        ),
        (labels[:5], r"integer y are class labels, .* got shape \(5,\)"),
        (labels[:, None], r"integer y are class labels, .* got shape \(24, 1\); columns of numbers"),
        (torch.full_like(labels, 7), r"y must hold at least two classes, got \[7\] only"),
        (torch.tensor(3), r"integer y are class labels, .* got shape \(\)"),
    ]
    for bad, match in cases:
        for method in (machine.fit, machine.solve, machine.loo):
            with pytest.raises(ValueError, match=match):
                method(X, bad)
    assert torch.equal(machine(X), before)
    assert machine.classes.tolist() == [10, 20, 30]
    given = MACHINES[name](classes=[10, 20])
    for method in (given.fit, given.solve, given.loo):
        with pytest.raises(ValueError, match=r"y must hold labels of classes only, \[10, 20\], got \[30\]"):
            method(X, labels)
    with pytest.raises(RuntimeError, match="not fitted"):
        given.predict_class(X)
    with pytest.raises(RuntimeError, match="fitted to numbers, so it has no classes"):
        MACHINES[name]().fit(X, as_columns(labels, [10, 20, 30])).predict_class(X)
    with pytest.raises(RuntimeError, match=r"2 classes need .* fitted to 3 columns"):
        given.fit(X, as_columns(labels, [10, 20, 30])).predict_class(X)
    with pytest.raises(ValueError, match="classes must be two or more different labels"):
        MACHINES[name](classes=[1])


def test_counts_are_allowed_as_classes_where_they_are_meant():
    X, _ = problem(2, n=60)
    counts = torch.arange(60) // 2
    meant = tl.LSSVM(tl.kernels.RBF(1.5), classes=range(30)).loo(X, counts)
    assert_same(meant, tl.LSSVM(tl.kernels.RBF(1.5)).loo(X, tl.one_vs_rest(counts, dtype=DOUBLE)))
    X, _ = problem(2, n=900)
    assert tl.LSSVM(tl.kernels.Linear()).loo(X, torch.arange(900) % 30).outputs.shape == (900, 30)
    with pytest.raises(ValueError, match="at most 30 distinct ones for 900 rows, got 31"):
        tl.LSSVM(tl.kernels.Linear()).loo(X, torch.arange(900) % 31)


def test_transforms_need_given_classes():
    X, labels = problem(3, batch=(2,))
    machine = tl.LSSVM(tl.kernels.RBF(1.5), classes=[10, 20, 30])
    each = torch.func.vmap(lambda X, y: machine.loo(X, y).outputs)(X, labels)
    assert_close(each, machine.loo(X, labels).outputs)
    meta = tl.LSSVM(tl.kernels.RBF(1.5), classes=[10, 20, 30]).to("meta")
    assert meta.loo(X.to("meta"), labels.to("meta")).outputs.shape == (2, 24, 3)
    without = tl.LSSVM(tl.kernels.RBF(1.5))
    with pytest.raises(ValueError, match="lssvm: classes must be given"):
        torch.func.vmap(lambda X, y: without.loo(X, y).outputs)(X, labels)


def looks(call) -> int:
    with Counting() as counting:
        call()
    return counting.synchronisations


@pytest.mark.parametrize("count", [2, 3])
def test_given_classes_take_no_look_at_values_of_their_own(count):
    X, labels = problem(count)
    machine = MACHINES["lssvm"](classes=[10, 20, 30][:count])
    Y = as_columns(labels, [10, 20, 30][:count])
    assert looks(lambda: machine.loo(X, labels)) == looks(lambda: machine.loo(X, Y)) == 1
    assert looks(lambda: MACHINES["lssvm"]().loo(X, labels)) == 2  # which labels there are


STREAMED = {
    "linear": MACHINES["linear"],
    "sparse": lambda **options: tl.SparseLSSVM(
        tl.kernels.RBF(1.5), 0.3, basis=problem(3)[0][:5] + 0.1, **options
    ),
}


def sources(X, labels):
    """The same rows as tensors, as arrays, and as batches that come in order."""
    yield tl.Stream(X, labels, block=7, progress=False)
    array = labels.numpy() if labels.is_floating_point() else labels.numpy().astype("uint8")
    yield tl.Stream(X.numpy(), array, block=5, progress=False)
    yield tl.Stream([(X[k : k + 6], labels[k : k + 6]) for k in range(0, len(X), 6)], progress=False)


@pytest.mark.parametrize("name", STREAMED)
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("given", [False, True])
def test_streams_of_labels_equal_rows_in_memory(name, count, given):
    X, labels = problem(count)
    options = {"classes": [20, 30, 10] if count == 3 else [20, 10]} if given else {}
    clusters = torch.arange(len(X)) % 8
    regs = torch.tensor([0.1, 1.0], dtype=DOUBLE)
    expected = STREAMED[name](**options).fit(X, labels)
    for k in range(3):

        def stream(k=k):
            return list(sources(X, labels))[k]

        machine = STREAMED[name](**options)
        assert_close(machine.loo(stream()).outputs, expected.loo(X, labels).outputs)
        by_cluster = machine.lco(stream(), clusters=clusters)
        assert_close(by_cluster.outputs, expected.lco(X, labels, clusters).outputs)
        assert torch.equal(by_cluster.targets, expected.loo(X, labels).targets)
        assert_close(machine.path(stream(), regs=regs).outputs, expected.path(X, labels, regs).outputs)
        machine.fit(stream())
        assert machine.classes.tolist() == expected.classes.tolist()
        assert torch.equal(machine.predict_class(X).long(), expected.predict_class(X))


@pytest.mark.parametrize("count", [2, 3])
def test_batches_that_were_spooled_keep_their_labels_for_other_orders_of_classes(count):
    X, labels = problem(count)
    clusters = torch.arange(len(X)) % 8
    *_, stream = sources(X, labels)
    for order in ({}, {"classes": [30, 20, 10][3 - count :]}, {"classes": [20, 10, 30, 40]}):
        for _ in range(2):
            machine = STREAMED["linear"](**order)
            expected = machine.lco(X, labels, clusters)
            received = machine.lco(stream, clusters=clusters)
            assert torch.equal(received.targets, expected.targets)
            assert_close(received.outputs, expected.outputs)


def test_a_stream_of_numbers_has_no_classes_whatever_the_machine_was_given():
    X, labels = problem(3)
    machine = STREAMED["linear"](classes=[10, 20, 30])
    for stream in sources(X, as_columns(labels, [10, 20, 30])):
        machine.fit(stream)
        assert stream.classes is None
        assert machine.classes.tolist() == [10, 20, 30]
        assert machine.predict_class(X).shape == (24,)
    options = {"search": "grid", "grid": {"reg": [0.1, 1.0]}, "progress": False}
    stream = tl.Stream(X, as_columns(labels, [10, 20, 30]), progress=False)
    assert tl.select(machine, stream, **options).value > 1  # press, not a rate


def test_streams_of_bad_labels_are_refused():
    X, labels = problem(3)
    machine = tl.LSSVM(tl.kernels.Linear())
    counts = torch.arange(len(X))
    for stream in sources(X, counts):
        with pytest.raises(ValueError, match="at most 20 distinct ones for 24 rows, got 24"):
            machine.fit(stream)
    for stream in sources(X, torch.full_like(labels, 7)):
        with pytest.raises(ValueError, match="y must hold at least two classes"):
            machine.loo(stream)
    with pytest.raises(ValueError, match=r"integer y are class labels, \(n,\), got shape \("):
        machine.loo(tl.Stream(X, labels[:, None].expand(-1, 2), progress=False))
    given = tl.LSSVM(tl.kernels.Linear(), classes=[10, 20])
    for stream in sources(X, labels):
        with pytest.raises(ValueError, match=r"y must hold labels of classes only, \[10, 20\], got \[30\]"):
            given.loo(stream)
    assert machine.classes is None


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("search", ["gradient", "grid", "nelder-mead"])
def test_select_takes_labels(count, search):
    X, labels = problem(count, n=30)
    Y = as_columns(labels, [10, 20, 30][:count])
    usual = "press" if search == "gradient" else "error_rate" if count == 2 else "multiclass_error"
    options = {"search": search, "max_evaluations": 12, "progress": False}
    by_labels = tl.select(MACHINES["lssvm"](), X, labels, weight=tl.balanced_weight, **options)
    weight = tl.balanced_weight(labels).double()
    by_columns = tl.select(MACHINES["lssvm"](), X, Y, usual, weight=weight, **options)
    assert by_labels.history == by_columns.history
    assert by_labels.machine.classes.tolist() == [10, 20, 30][:count]
    assert by_columns.machine.classes is None
    assert torch.equal(by_labels.machine(X), by_columns.machine(X))


def test_select_gives_functions_of_y_the_labels():
    X, labels = problem(3, n=30)
    seen = []

    def weight(y):
        seen.append(y)
        return torch.ones(len(y))

    tl.select(MACHINES["lssvm"](), X, labels, weight=weight, max_evaluations=2, progress=False)
    tl.validate(MACHINES["lssvm"](), X, labels, 1, weight=weight, max_evaluations=2, progress=False)
    assert torch.equal(seen[0], labels)
    assert seen[1].dtype == labels.dtype
    assert len(seen[1]) == 27


@pytest.mark.parametrize("given", [False, True])
def test_select_takes_streams_of_labels(given):
    X, labels = problem(3, n=40)
    options = {"search": "grid", "grid": {"reg": [0.1, 1.0, 10.0]}, "progress": False}
    order = {"classes": [30, 10, 20]} if given else {}
    expected = tl.select(MACHINES["linear"](**order), X, labels, **options)
    for stream in sources(X, labels):
        chosen = tl.select(MACHINES["linear"](**order), stream, **options)
        assert chosen.value == pytest.approx(expected.value)
        assert chosen.machine.classes.tolist() == expected.machine.classes.tolist()


@pytest.mark.parametrize("count", [2, 3])
def test_validate_takes_labels(count):
    X, labels = problem(count, n=30)
    Y = as_columns(labels, [10, 20, 30][:count])
    splits = tl.splits.k_fold(30, 3, generator=torch.Generator().manual_seed(0))
    options = {"splits": splits, "max_evaluations": 5, "progress": False}
    received = tl.validate(MACHINES["lssvm"](), X, labels, **options)
    assert received.metric == ("error_rate" if count == 2 else "multiclass_error")
    assert torch.equal(received.scores, tl.validate(MACHINES["lssvm"](), X, Y, **options).scores)
    with pytest.raises(ValueError, match="validate: integer y are class labels, at most 20"):
        tl.validate(MACHINES["lssvm"](), X, torch.arange(30), **options)


def test_threshold_counts_errors_by_default():
    X, labels = problem(2, n=30)
    held_out = MACHINES["lssvm"]().loo(X, labels)
    assert torch.equal(tl.threshold(held_out), tl.threshold(held_out, "error_rate"))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
def test_other_ways_to_solve_take_labels():
    X, labels = problem(3)
    Y = as_columns(labels, [10, 20, 30])
    machine = MACHINES["lssvm"]()
    regs = torch.tensor([0.1, 1.0], dtype=DOUBLE)
    assert torch.equal(machine.solve_path(X, labels, regs).coef, machine.solve_path(X, Y, regs).coef)
    sets = tl.splits.h_block(torch.arange(24.0), buffer=2)
    assert_same(machine.lso(X, labels, sets), machine.lso(X, Y, sets))
    each = tl.LSSVM(tl.kernels.RBF(1.5), torch.tensor([0.1, 0.5, 2.0], dtype=DOUBLE), reg_per_output=True)
    assert_same(each.loo(X, labels), each.loo(X, Y))
    words = (X > 0).to(DOUBLE)
    sparse = words.to_sparse_csr()
    polynomial = tl.LSSVM(tl.kernels.Polynomial(2))
    assert_close(polynomial.loo(sparse, labels).outputs, polynomial.loo(words, labels).outputs)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by torch.compile
def test_compiled_losses_need_given_classes():
    X, labels = problem(3)
    machine = tl.LSSVM(tl.kernels.RBF(1.5), classes=[10, 20, 30])

    def loss(X, y):
        return tl.criteria.cross_entropy(machine.loo(X, y))

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    assert_close(compiled(X, labels), loss(X, labels))
    without = tl.LSSVM(tl.kernels.RBF(1.5))
    with pytest.raises(Exception, match="classes must be given"):
        torch.compile(lambda y: without.loo(X, y).outputs, fullgraph=True, backend="aot_eager")(labels)
