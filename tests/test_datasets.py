import inspect
import math

import numpy as np
import pytest
import torch
from benchmark_folder import DATA, needs_data
from torch.testing import assert_close

from torchloo import datasets

GENERATORS = [datasets.twonorm, datasets.ringnorm, datasets.waveform, datasets.annulus]
FEATURES = [20, 20, 21, 2]
A = 2 / math.sqrt(20)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def test_motorcycle_holds_the_133_readings():
    X, y = datasets.motorcycle()
    assert X.shape == (133, 1)
    assert y.shape == (133,)
    assert X.dtype == y.dtype == torch.float64
    assert len(X.unique()) == 94
    assert (X.min(), X.max()) == (2.4, 57.6)
    assert (X[:, 0].diff() >= 0).all()
    assert (y.min(), y.max()) == (-134.0, 75.0)
    assert datasets.motorcycle(dtype=torch.float32)[1].dtype == torch.float32


@needs_data
def test_motorcycle_equals_the_benchmark_copy():
    for received, expected in zip(
        datasets.motorcycle(), datasets.benchmark("motorcycle", DATA)[:2], strict=True
    ):
        assert_close(received, expected, rtol=0, atol=0)


@pytest.mark.parametrize(("make", "d"), list(zip(GENERATORS, FEATURES, strict=True)))
def test_generators_return_points_and_signs(make, d):
    X, y = make(200, generator=seeded())
    assert X.shape == (200, d)
    assert y.shape == (200,)
    assert set(y.tolist()) == {-1.0, 1.0}
    assert X.dtype == y.dtype == torch.float64
    assert X.isfinite().all()


@pytest.mark.parametrize("make", [*GENERATORS, datasets.clustered])
def test_a_seed_gives_the_same_points_in_every_dtype(make):
    first = make(30, generator=seeded(1))
    again = make(30, generator=seeded(1))
    other = make(30, generator=seeded(2))
    low = make(30, generator=seeded(1), dtype=torch.float32)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[0], other[0])
    assert low[0].dtype == low[1].dtype == torch.float32
    assert_close(low[0], first[0].float())


@pytest.mark.parametrize("make", GENERATORS)
@pytest.mark.parametrize("n", [0, -3, 2.0, True, "5"])
def test_a_bad_size_raises(make, n):
    with pytest.raises(ValueError, match=f"{make.__name__}: n must be a whole number"):
        make(n)


@pytest.mark.parametrize("make", [*GENERATORS, datasets.clustered])
def test_a_size_may_be_an_integer_of_numpy(make):
    expected = make(30, generator=seeded())
    received = make(np.int32(30), generator=seeded())
    assert all(torch.equal(a, b) for a, b in zip(received, expected, strict=True))


def test_a_class_of_waveform_is_a_number():
    with pytest.raises(ValueError, match="waveform: positive must be class 1, 2 or 3, got True"):
        datasets.waveform(5, positive=True)
    received = datasets.waveform(5, positive=np.int64(3), generator=seeded())[1]
    assert torch.equal(received, datasets.waveform(5, positive=3, generator=seeded())[1])


@pytest.mark.parametrize("make", [*GENERATORS, datasets.clustered])
def test_points_are_made_on_the_cpu_unless_told_otherwise(make):
    expected = make(30, generator=seeded())
    torch.manual_seed(4)
    without = make(30)
    torch.manual_seed(4)
    with torch.device("meta"):  # what torch.set_default_device sets
        received = make(30, generator=seeded())
        again = make(30)
        elsewhere = make(30, generator=seeded(), device="meta")
    for a, b in zip((*received, *again), (*expected, *without), strict=True):
        assert a.device.type == "cpu"
        assert torch.equal(a, b)
    assert elsewhere[0].is_meta
    assert elsewhere[1].is_meta


def test_data_are_read_to_the_cpu_unless_told_otherwise(tmp_path):
    (tmp_path / "toy").mkdir()
    rows = {"X": np.eye(3), "y": np.arange(3), "group": np.array([4, 4, 5])}
    np.savez(tmp_path / "toy" / "line.npz", **rows, train_own=np.array([[0, 2]]))
    with torch.device("meta"):
        line = datasets.benchmark("line", tmp_path)
        split = datasets.ida("line", tmp_path, np.int64(0), own=True)
        head = datasets.motorcycle()
        far = datasets.motorcycle(device="meta")
    assert line.X.sum() == 3
    assert line.clusters.tolist() == [4, 4, 5]
    assert split[3].tolist() == [1.0]
    assert torch.equal(head[1], datasets.motorcycle()[1])
    assert far[0].is_meta
    with pytest.raises(ValueError, match="ida: split must be a whole number, 0 or more, got True"):
        datasets.ida("line", tmp_path, True, own=True)


def test_options_are_keywords_and_alike():
    for make in [*GENERATORS, datasets.clustered]:
        parameters = inspect.signature(make).parameters
        for name in ("generator", "dtype", "device"):
            assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY


def bayes_error(X, y, score):
    return ((score(X) > 0) != (y > 0)).double().mean().item()


def test_twonorm_is_breimans():
    X, y = datasets.twonorm(40_000, generator=seeded())
    for sign in (1, -1):
        part = X[y == sign]
        received = part.mean(0)
        expected = torch.full((20,), sign * A).double()
        assert_close(received, expected, atol=0.03, rtol=0)
        received = part.T.cov()
        expected = torch.eye(20).double()
        assert_close(received, expected, atol=0.05, rtol=0)
    assert bayes_error(X, y, lambda X: X.sum(-1)) == pytest.approx(0.0228, abs=0.003)


def test_ringnorm_is_breimans():
    X, y = datasets.ringnorm(40_000, generator=seeded())
    wide = X[y == 1]
    narrow = X[y == -1]
    received = wide.mean(0)
    expected = torch.zeros(20).double()
    assert_close(received, expected, atol=0.06, rtol=0)
    received = wide.T.cov()
    expected = 4 * torch.eye(20).double()
    assert_close(received, expected, atol=0.2, rtol=0)
    received = narrow.mean(0)
    expected = torch.full((20,), A).double()
    assert_close(received, expected, atol=0.03, rtol=0)
    received = narrow.T.cov()
    expected = torch.eye(20).double()
    assert_close(received, expected, atol=0.05, rtol=0)

    def log_ratio(X):
        narrow = ((X - A) ** 2).sum(-1) / 2
        wide = (X**2).sum(-1) / 8
        return narrow - wide - 20 * math.log(2)

    assert bayes_error(X, y, log_ratio) == pytest.approx(0.0124, abs=0.002)


def triangle(peak):
    return torch.tensor([max(6 - abs(m - peak), 0) for m in range(1, 22)], dtype=torch.float64)


@pytest.mark.parametrize(("positive", "peaks"), [(1, (7, 15)), (2, (7, 11)), (3, (15, 11))])
def test_waveform_mixes_two_triangles_in_each_class(positive, peaks):
    X, y = datasets.waveform(60_000, positive=positive, generator=seeded())
    part = X[y == 1]
    assert len(part) / len(X) == pytest.approx(1 / 3, abs=0.01)
    p, q = triangle(peaks[0]), triangle(peaks[1])
    received = part.mean(0)
    expected = (p + q) / 2
    assert_close(received, expected, atol=0.06, rtol=0)
    received = part.T.cov()
    expected = torch.outer(p - q, p - q) / 12 + torch.eye(21)
    assert_close(received, expected, atol=0.12, rtol=0)
    with pytest.raises(ValueError, match="waveform: positive must be class 1, 2 or 3"):
        datasets.waveform(5, positive=0)


@needs_data
@pytest.mark.parametrize("make", [datasets.twonorm, datasets.ringnorm, datasets.waveform])
def test_generators_agree_with_the_benchmark_of_that_name(make):
    ours = make(20_000, generator=seeded())
    theirs = datasets.benchmark(make.__name__, DATA)
    X = (ours[0] - ours[0].mean(0)) / ours[0].std(0)  # as the benchmark was standardised
    for sign in (1, -1):
        received = X[ours[1] == sign]
        expected = theirs.X[theirs.y == sign]
        assert_close(received.mean(0), expected.mean(0), atol=0.08, rtol=0)
        assert_close(received.std(0), expected.std(0), atol=0.08, rtol=0)


def test_annulus_is_a_quarter_disc_and_a_ring():
    X, y = datasets.annulus(40_000, generator=seeded())
    assert (y > 0).sum() == 10_000
    assert (y[:1000] > 0).double().mean().item() == pytest.approx(0.25, abs=0.06)  # in random order
    disc = X[y > 0]
    ring = X[y < 0]
    received = disc.T.cov()
    expected = torch.eye(2).double()
    assert_close(received, expected, atol=0.05, rtol=0)
    radius = ring.norm(dim=-1)
    assert (radius.mean().item(), radius.std().item()) == pytest.approx((5, 1), abs=0.03)
    received = ring.mean(0)
    expected = torch.zeros(2).double()
    assert_close(received, expected, atol=0.1, rtol=0)
    assert (datasets.annulus(2)[1] > 0).sum() == 1
    with pytest.raises(ValueError, match="annulus: n must be a whole number, 2 or more, got 1"):
        datasets.annulus(1)


def squared_error(X, y, train, test):
    """RBF ridge, solved on the rows of train, at those of test: the sum of squares."""
    K = torch.exp(-2 * torch.cdist(X, X[train]) ** 2)
    coef = torch.linalg.solve(K[train] + 0.1 * torch.eye(len(train)), y[train])
    return ((y[test] - K[test] @ coef) ** 2).sum().item()


@pytest.mark.parametrize("size", [6, [2, 10, 4, 8] * 6])
def test_leaving_one_out_of_clustered_is_too_optimistic_for_new_clusters(size):
    seen, new = list(range(72)), list(range(72, 144))  # 12 clusters each
    one = cluster = truth = 0.0
    for seed in range(8):  # one draw has 12 random effects only: its mean squares vary by a half
        X, y, labels = datasets.clustered(24, size, generator=seeded(seed))
        truth += squared_error(X, y, seen, new)
        one += sum(squared_error(X, y, [j for j in seen if j != i], [i]) for i in seen)
        for k in range(12):
            inside, others = ([i for i in seen if (labels[i] == k) == own] for own in (True, False))
            cluster += squared_error(X, y, others, inside)
    assert one < truth / 4
    assert truth / 2 < cluster < truth * 2


def test_clustered_is_ragged_where_asked():
    X, y, labels = datasets.clustered(3, [1, 4, 2], features=5, generator=seeded())
    assert X.shape == (7, 5)
    assert y.shape == (7,)
    assert labels.tolist() == [0, 1, 1, 1, 1, 2, 2]
    assert labels.dtype == torch.int64
    for sizes in (np.array([2, 2]), np.int64(2), (np.int16(2), 2)):
        assert datasets.clustered(2, sizes)[2].tolist() == [0, 0, 1, 1]
    assert datasets.clustered()[0].shape == (200, 3)
    still = datasets.clustered(2, 3, spread=0, effect=0, noise=0, generator=seeded())
    assert_close(still[1], torch.sin(2 * still[0][:, 0]))


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"clusters": 0}, "clusters must be a whole number"),
        ({"size": 0}, "size must be a whole number"),
        ({"size": True}, "size must be a whole number"),
        ({"clusters": 2, "size": [3, True]}, "size must be a whole number"),
        ({"clusters": True}, "clusters must be a whole number"),
        ({"clusters": 3, "size": [1, 2]}, "size must be a number or 3 numbers"),
        ({"features": 0}, "features must be a whole number"),
        ({"noise": -1.0}, "noise must be finite and not negative"),
        ({"spread": math.nan}, "spread must be finite and not negative"),
    ],
)
def test_bad_clusters_raise(arguments, match):
    with pytest.raises(ValueError, match=f"clustered: {match}"):
        datasets.clustered(**arguments)


@needs_data
def test_ida_gives_predefined_and_own_splits():
    X, y, X_test, y_test = datasets.ida("banana", DATA, split=3)
    assert (X.shape, X_test.shape) == ((400, 2), (4900, 2))
    assert set(y.tolist()) == set(y_test.tolist()) == {-1.0, 1.0}
    whole = datasets.benchmark("banana", DATA)
    received = torch.cat([X, X_test]).sum(0)
    expected = whole.X.sum(0)
    assert_close(received, expected)
    X, y, X_test, y_test = datasets.ida("splice", DATA, split=19, own=True, dtype=torch.float32)
    assert (X.shape, len(y_test)) == ((1000, 60), 2175)
    assert X.dtype == torch.float32
    with pytest.raises(ValueError, match="ida: split must be below 0 for splice"):
        datasets.ida("splice", DATA)
    with pytest.raises(ValueError, match="ida: name must be an IDA set"):
        datasets.ida("boston", DATA)


@needs_data
@pytest.mark.parametrize(
    ("name", "shape", "groups"),
    [
        ("boston", (506, 13), None),
        ("ada", (4147, 48), None),
        ("vowel", (990, 10), 15),
        ("mq2008", (15211, 46), 784),
    ],
)
def test_benchmark_reads_every_kind(name, shape, groups):
    X, y, clusters, extra = datasets.benchmark(name, DATA)
    assert X.shape == shape
    assert len(y) == len(X)
    assert (clusters if clusters is None else len(clusters.unique())) == groups
    assert all(isinstance(array, np.ndarray) for array in extra.values())


def test_benchmark_says_what_there_is(tmp_path):
    with pytest.raises(ValueError, match=r"benchmark: name must be a data set in .* \(none\), got 'nothing'"):
        datasets.benchmark("nothing", tmp_path)
    (tmp_path / "toy").mkdir()
    np.savez(tmp_path / "toy" / "line.npz", X=np.eye(3), y=np.arange(3), group=np.array([4, 4, 5]))
    line = datasets.benchmark("line", tmp_path)
    assert line.clusters.tolist() == [4, 4, 5]
    with pytest.raises(ValueError, match=r"\(line\)"):
        datasets.benchmark("nothing", tmp_path)
