"""Data sets: the motorcycle data, generators of synthetic problems, and readers of a benchmark folder.

All functions return tensors, X (n, d) and y (n,), labels in {-1, +1}. Options are keyword arguments:
``dtype`` and ``device`` of the result, by default the CPU, and for synthetic data a ``generator``. Random
numbers are always drawn in float64, on the device of the generator, so that a seed gives the same points in
every dtype; the result stays on that device unless another one is given.
"""

import math
import os
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchloo.guards import is_whole, whole_number

__all__ = [
    "Benchmark",
    "annulus",
    "benchmark",
    "clustered",
    "ida",
    "motorcycle",
    "ringnorm",
    "twonorm",
    "waveform",
]

Device = torch.device | str | None


def motorcycle(*, dtype: torch.dtype = torch.float64, device: Device = None) -> tuple[Tensor, Tensor]:
    """Head acceleration [g] against time [ms] in a simulated motorcycle accident: X (133, 1), y (133,).

    The noise grows with time, and 94 of the times are distinct. Reference: Silverman 1985.

    >>> X, y = motorcycle()
    >>> X.shape, y.shape
    (torch.Size([133, 1]), torch.Size([133]))
    """
    text = (resources.files("torchloo") / "data" / "motorcycle.csv").read_text(encoding="utf-8")
    readings = np.loadtxt(text.splitlines(), delimiter=",", skiprows=1)
    table = torch.as_tensor(readings, dtype=dtype, device=device or "cpu")  # (133, 2)
    return table[:, :1], table[:, 1]


class _Draw:
    """Random numbers in float64 on the device of the generator."""

    def __init__(self, generator: torch.Generator | None, device: Device) -> None:
        where = device or "cpu"
        if generator is not None:
            where = generator.device
        self.options: dict[str, Any] = {
            "generator": generator,
            "dtype": torch.float64,
            "device": where,
        }

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, **self.options)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(*shape, **self.options)

    def order(self, n: int) -> Tensor:
        return self.uniform(n).argsort()


def _signs(positive: Tensor) -> Tensor:
    """True, False -> +1, -1 in float64."""
    return 2.0 * positive.double() - 1.0


def twonorm(
    n: int,
    *,
    generator: torch.Generator | None = None,
    dtype: torch.dtype = torch.float64,
    device: Device = None,
) -> tuple[Tensor, Tensor]:
    """Two unit normal distributions in 20 dimensions: X (n, 20), y (n,).

    Class +1 has mean (a, ..., a), class -1 mean (-a, ..., -a), a = 2 / sqrt(20), each with probability
    1/2. The Bayes error is 2.3 %. Reference: Breiman 1996, "Bias, variance, and arcing classifiers".
    """
    n = whole_number("twonorm", "n", n)
    draw = _Draw(generator, device)
    y = _signs(draw.uniform(n) < 0.5)
    X = draw.normal(n, 20) + y[:, None] * (2 / math.sqrt(20))
    return X.to(device, dtype), y.to(device, dtype)


def ringnorm(
    n: int,
    *,
    generator: torch.Generator | None = None,
    dtype: torch.dtype = torch.float64,
    device: Device = None,
) -> tuple[Tensor, Tensor]:
    """One normal distribution within another, in 20 dimensions: X (n, 20), y (n,).

    Class +1 is N(0, 4 I), class -1 is N((a, ..., a), I), a = 2 / sqrt(20), each with probability 1/2, as
    in the IDA benchmark; a = 1 / sqrt(20) is also found in the literature. The Bayes error is 1.2 %.
    Reference: Breiman 1996, "Bias, variance, and arcing classifiers".
    """
    n = whole_number("ringnorm", "n", n)
    draw = _Draw(generator, device)
    y = _signs(draw.uniform(n) < 0.5)
    Z = draw.normal(n, 20)
    a = 2 / math.sqrt(20)
    X = torch.where(y[:, None] > 0, 2 * Z, Z + a)
    return X.to(device, dtype), y.to(device, dtype)


_WAVES = ((7, 15), (7, 11), (15, 11))
"""Peaks of the two waves that are mixed in classes 1, 2 and 3."""


def waveform(
    n: int,
    *,
    positive: int = 2,
    generator: torch.Generator | None = None,
    dtype: torch.dtype = torch.float64,
    device: Device = None,
) -> tuple[Tensor, Tensor]:
    """Random mixtures of two triangular waves with noise, one class against two: X (n, 21), y (n,).

    x_m = u h_p(m) + (1 - u) h_q(m) + e_m, m = 1 .. 21, u uniform in (0, 1), e unit normal, with
    h_p(m) = max(6 - |m - p|, 0). Peaks (p, q) are (7, 15) in class 1, (7, 11) in class 2 and (15, 11) in
    class 3, each with probability 1/3.

    Args: positive, the class labelled +1; the other two are -1. Class 2 is the +1 of the IDA benchmark
    (which standardised the features). Reference: Breiman, Friedman, Olshen, Stone 1984, page 49.
    """
    if not is_whole(positive) or positive not in (1, 2, 3):
        raise ValueError(f"waveform: positive must be class 1, 2 or 3, got {positive!r}")
    n = whole_number("waveform", "n", n)
    draw = _Draw(generator, device)
    u = draw.uniform(n, 1)
    noise = draw.normal(n, 21)
    kind = (3 * draw.uniform(n)).long()  # (n,), 0 to 2
    peaks = torch.tensor(_WAVES, dtype=u.dtype, device=u.device)[kind]  # (n, 2)
    m = torch.arange(1, 22, dtype=u.dtype, device=u.device)
    waves = (6 - (m - peaks[:, :, None]).abs()).clamp(min=0)  # (n, 2, 21)
    X = u * waves[:, 0] + (1 - u) * waves[:, 1] + noise
    return X.to(device, dtype), _signs(kind == positive - 1).to(device, dtype)


def annulus(
    n: int,
    *,
    generator: torch.Generator | None = None,
    dtype: torch.dtype = torch.float64,
    device: Device = None,
) -> tuple[Tensor, Tensor]:
    """A disc in a ring: X (n, 2), y (n,), n >= 2.

    A quarter of the points (rounded, at least one) is class +1, unit normal in the plane; the others, class
    -1, have radii from N(5, 1) and uniform angles. Reference: Cawley, Talbot 2003, section 5.1.
    """
    n = whole_number("annulus", "n", n, 2)
    draw = _Draw(generator, device)
    inner = max(1, round(n / 4))
    radius = 5 + draw.normal(n - inner)
    angle = 2 * math.pi * draw.uniform(n - inner)
    ring = radius[:, None] * torch.stack([angle.cos(), angle.sin()], -1)  # (n - inner, 2)
    order = draw.order(n)
    X = torch.cat([draw.normal(inner, 2), ring])[order]
    return X.to(device, dtype), _signs(order < inner).to(device, dtype)


def clustered(
    clusters: int = 20,
    size: int | Sequence[int] = 10,
    *,
    features: int = 3,
    spread: float = 0.1,
    effect: float = 1.0,
    noise: float = 0.2,
    generator: torch.Generator | None = None,
    dtype: torch.dtype = torch.float64,
    device: Device = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Points in clusters that share a random effect: X (n, d), y (n,), labels (n,) int64 on the host.

    Cluster k has a centre from N(0, I) and an effect b_k from N(0, effect^2); its points are
    x = centre + N(0, spread^2 I), and y = sin(2 x_1) + b_k + N(0, noise^2). A flexible machine can infer
    b_k from the other points of the cluster, so leave-one-out is several times too optimistic for points
    of a new cluster; leave-cluster-out is not.

    Args:
        clusters: number of clusters.
        size: number of points in each; or a sequence with one number for each cluster.
        features: d. spread, effect, noise: standard deviations, not negative.
    """
    k = whole_number("clustered", "clusters", clusters)
    d = whole_number("clustered", "features", features)
    sizes = list(size) if isinstance(size, Iterable) else [size] * k
    if len(sizes) != k:
        raise ValueError(
            f"clustered: size must be a number or {k} numbers, one per cluster, got {len(sizes)}"
        )
    sizes = [whole_number("clustered", "size", entry) for entry in sizes]
    for name, scale in (("spread", spread), ("effect", effect), ("noise", noise)):
        if not 0 <= scale < math.inf:
            raise ValueError(f"clustered: {name} must be finite and not negative, got {scale}")
    numbers = torch.arange(k, device="cpu")
    counts = torch.tensor(sizes, device="cpu")
    labels = torch.repeat_interleave(numbers, counts)  # (n,)
    n = len(labels)
    draw = _Draw(generator, device)
    centre = draw.normal(k, d)
    shared = effect * draw.normal(k)
    member = labels.to(centre.device)
    X = centre[member] + spread * draw.normal(n, d)
    y = torch.sin(2 * X[:, 0]) + shared[member] + noise * draw.normal(n)
    return X.to(device, dtype), y.to(device, dtype), labels


class Benchmark(NamedTuple):
    """A data set of the benchmark folder."""

    X: Tensor
    """(n, d)."""

    y: Tensor
    """(n,), or (n, c) with several targets."""

    clusters: Tensor | None
    """Groups or queries, int64 (n,) on the host; None where there are none."""

    extra: dict[str, np.ndarray]
    """All other arrays of the file, unchanged: splits, parts, names."""


def benchmark(
    name: str,
    data: str | os.PathLike[str],
    *,
    dtype: torch.dtype = torch.float64,
    device: Device = None,
) -> Benchmark:
    """A data set by name from a benchmark folder, which holds <kind>/<name>.npz with arrays X and y.

    Args: data, the folder, as in the option --data of the scripts.
    """
    files = {path.stem: path for path in sorted(Path(data).glob("*/*.npz"))}
    if name not in files:
        known = ", ".join(files) or "none"
        raise ValueError(f"benchmark: name must be a data set in {os.fspath(data)} ({known}), got {name!r}")
    with np.load(files[name], allow_pickle=False) as file:
        arrays = {key: file[key] for key in file.files}
    X, y = (torch.as_tensor(arrays.pop(key), dtype=dtype, device=device or "cpu") for key in ("X", "y"))
    clusters = None
    for key in ("group", "query"):
        if clusters is None and key in arrays:
            clusters = torch.as_tensor(arrays.pop(key), dtype=torch.int64, device="cpu")
    return Benchmark(X, y, clusters, arrays)


def ida(
    name: str,
    data: str | os.PathLike[str],
    split: int = 0,
    *,
    own: bool = False,
    dtype: torch.dtype = torch.float64,
    device: Device = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One split of an IDA benchmark set: X_train, y_train, X_test, y_test.

    Args:
        name: banana, breast_cancer, diabetis, flare_solar, german, heart, image, ringnorm, splice, thyroid,
            titanic, twonorm or waveform.
        data: the benchmark folder.
        split: number of the split, from 0.
        own: False for the predefined splits that the folder holds, 1 to 20 per set, none for splice; True
            for the random splits of the same size that the folder adds, at least 20 per set.
    """
    X, y, _, arrays = benchmark(name, data, dtype=dtype, device=device)
    if "train_own" not in arrays:
        raise ValueError(f"ida: name must be an IDA set, got {name!r}, which has no splits")
    splits = arrays["train_own" if own else "train"]
    if whole_number("ida", "split", split, 0) >= len(splits):
        remedy = "" if own else "; own=True has more"
        raise ValueError(f"ida: split must be below {len(splits)} for {name}, got {split}{remedy}")
    train_rows = splits[split].astype(np.int64)
    if own:
        test_rows = np.setdiff1d(np.arange(len(y)), train_rows)
    else:
        test_rows = arrays["test"][split].astype(np.int64)
    train = torch.as_tensor(train_rows, device=y.device)
    test = torch.as_tensor(test_rows, device=y.device)
    return X[train], y[train], X[test], y[test]
