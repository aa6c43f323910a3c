"""probe: performance of a linear head on given features, from held-out predictions."""

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchloo import criteria
from torchloo.classes import is_label, require_two
from torchloo.guards import full_dtype, host_labels, refuse_text
from torchloo.held_out import HeldOut
from torchloo.kernels import Linear
from torchloo.lssvm import LSSVM
from torchloo.primal.block import Block
from torchloo.probe_result import Probe, ProbeScores
from torchloo.sampling_error import standard_error
from torchloo.streaming.stream import Stream

__all__ = ["Probe", "ProbeScores", "probe"]

_REGS = 30

# Held-out outputs, of all regularisations together, that are in memory at once: 128 MB in float64.
_TOGETHER = 1 << 24

# Rows from which the scale of the features is estimated.
_SAMPLE = 2000


class _Rows(NamedTuple):
    """Features and targets, with the functions that `probe` needs."""

    path: Callable[[Tensor, object], HeldOut]
    """Held-out predictions for regularisations (R,), leaving out groups or, for None, single rows."""
    fit: Callable[[LSSVM], LSSVM]
    stream: Stream
    """The same rows, with one-vs-rest columns."""
    classes: Tensor | None


def probe(
    features: Any,
    labels: Any = None,
    groups: object | None = None,
    regs: Any = None,
    weight: Any = None,
    *,
    progress: bool = True,
) -> Probe:
    """Performance of a linear head on given features, such as embeddings of a network.

    Least squares with an unpenalised bias, `LSSVM(Linear())`, classes encoded one-vs-rest. All
    regularisations come from one decomposition, and the one with the least mean squared held-out residual is
    chosen. The scores are computed from held-out predictions, so no test set is needed; they are optimistic
    only by the choice among R regularisations.

    Args:
        features: (n, d), a tensor or an array, possibly memory-mapped; float16 and bfloat16 are converted to
            float32. Or a `Stream`, which includes labels and weight.
        labels: integers or bools (n,) are classes; floats (n,) or (n, c) are regression targets.
        groups: integer labels (n,) of rows that are not independent, such as images of one patient. These are
            then left out together, for the choice of reg and for the scores; leave-one-out is reported as
            well.
        regs: regularisations (R,) that are tried. Default: 30 of them, from 1e-6 to 1e3 times the mean
            eigenvalue of the features' Gram matrix.
        weight: training weights (n,), or a function of the labels, such as tl.balanced_weight.
        progress: show a bar for passes over the rows that take longer than a second.

    Returns:
        Probe: reg, accuracy (or r2), standard_error, class_accuracy, log_loss, held_out, head, and the
        criterion and accuracy of every regularisation. Print it, or `plot` it.

    Cost: three passes over the rows of n d^2 multiplications, and n d c for each regularisation; groups need
    one more pass. Memory: a few (d, d) matrices, and n c numbers for each regularisation, of which as many
    are computed at once as fit into 2^24 numbers. The features are not copied, unless d > n.

    Example:
        >>> X = torch.randn(200, 5, generator=torch.Generator().manual_seed(0))
        >>> found = probe(X, (X[:, 0] > 0.3).long())
        >>> print(f"{found.accuracy:.2f} +- {found.standard_error:.2f}")
        0.96 +- 0.01
    """
    if not isinstance(features, Stream):
        rows = _given(features, labels, weight, progress)
    elif labels is None and weight is None:
        rows = _of_stream(features)
    else:
        raise TypeError("probe: a stream includes labels and weight; leave them None")
    n = rows.stream.n
    first = rows.stream.sample("probe", _SAMPLE)
    assert n is not None
    if groups is not None:
        groups = host_labels("probe", groups, n, "groups")
    all_regs = _usual_regs(n, first) if regs is None else _given_regs(regs)
    regs_at_once = max(1, _TOGETHER // (n * first.Y.shape[1]))
    with torch.no_grad():
        reg, held_out, table = _best_reg(rows, groups, all_regs.split(regs_at_once))
        with first.X.device:  # whatever torch's default device is
            head = rows.fit(LSSVM(Linear(), reg, classes=rows.classes))
        chosen = _scores(held_out, rows.classes)
        loo, grouped = chosen, None
        if groups is not None:
            chosen_reg = torch.tensor([reg], dtype=torch.float64, device="cpu")
            single_rows = _entry(rows.path(chosen_reg, None), 0)
            loo = _scores(single_rows, rows.classes)
            grouped = chosen
    criterion, curve, curve_error = table.unbind(1)
    return Probe(
        head=head,
        reg=reg,
        regs=all_regs,
        criterion=criterion,
        curve=curve,
        curve_error=curve_error,
        held_out=held_out,
        loo=loo,
        grouped=grouped,
        columns=first.X.shape[1],
    )


def _best_reg(rows: _Rows, groups: object, regs: Iterable[Tensor]) -> tuple[float, HeldOut, Tensor]:
    """The best regularisation, its held-out predictions, and (R, 3) with the scores of all.

    These are the criterion, and accuracy or r2 with its standard error; `regs` are tried a few at a time.
    """
    table: list[tuple[float, float, float]] = []
    best = None
    best_reg = math.nan
    least = math.inf
    for some in regs:
        path = rows.path(some, groups)
        for r, reg in enumerate(some.tolist()):
            held_out = _entry(path, r)
            mse = criteria.mse(held_out).item()
            table.append((mse, *_headline(held_out, rows.classes)))
            if best is None or mse < least:
                best = _copied(held_out)
                best_reg = reg
                least = mse
    assert best is not None
    return best_reg, best, torch.tensor(table, dtype=torch.float64, device="cpu")


@torch.no_grad()
def _given(features: Any, labels: Any, weight: Any, progress: bool) -> _Rows:
    """Features and labels in memory, or memory-mapped."""
    X: Any = features if isinstance(features, Tensor | np.ndarray) else np.asarray(features)
    if labels is None:
        raise TypeError("probe: labels must be classes or numbers, one for each row of features, got None")
    if X.ndim != 2 or len(X) < 3 or not X.shape[1]:
        raise ValueError(f"probe: features must be (n, d) with at least 3 rows, got shape {tuple(X.shape)}")
    refuse_text("probe", labels=labels)
    sample = _as_tensor(X[:1]).detach()
    if not sample.is_floating_point():
        raise TypeError(f"probe: features must be floating-point numbers, got {sample.dtype}")
    targets = _as_tensor(labels).detach().to(sample.device)
    right_shape = targets.ndim == 1 or (targets.ndim == 2 and not is_label(targets))
    if not right_shape or len(targets) != len(X):
        raise ValueError(
            f"probe: labels must be classes (n,), or numbers (n,) or (n, c), for the {len(X)} rows of "
            f"features, got {targets.dtype} of shape {tuple(targets.shape)}"
        )
    like = sample[:0].to(full_dtype(sample.dtype))
    y = targets if is_label(targets) else targets.to(like)
    zeta = _weights(weight, targets, like)
    stream = Stream(X, y, zeta, progress=progress)
    if len(X) > X.shape[1] + 1:
        return _of_stream(stream)
    Z = _as_tensor(X).detach().to(like)
    classes = _classes_of(stream)

    def path(regs: Tensor, groups: object) -> HeldOut:
        machine = LSSVM(Linear(), classes=classes)
        return machine.path(Z, y, regs.to(Z), groups, zeta)

    return _Rows(path, lambda head: head.fit(Z, y, zeta), stream.with_classes(classes), classes)


def _of_stream(stream: Stream) -> _Rows:
    """Rows in blocks, whose moments are computed once."""
    classes = _classes_of(stream)
    stream = stream.with_classes(classes)
    with torch.no_grad():
        solved = LSSVM(Linear()).solve(stream)

    def path(regs: Tensor, groups: object) -> HeldOut:
        return solved.path(regs.to(solved.moments.S), groups)

    return _Rows(path, lambda head: head.fit(stream), stream, classes)


def _classes_of(stream: Stream) -> Tensor | None:
    """The classes of integer labels; ValueError if they have fewer than two rows on average."""
    classes = stream.labels("probe")
    if classes is None:
        return None
    require_two("probe", "labels", classes)
    assert stream.n is not None
    if 2 * len(classes) > stream.n:
        raise ValueError(
            f"probe: integer labels are classes, with at least two rows on average, got {len(classes)} "
            f"different ones in {stream.n} rows; for regression on numbers use labels.float()"
        )
    return classes


def _as_tensor(values: Any) -> Tensor:
    if isinstance(values, Tensor):
        return values
    return torch.from_numpy(np.array(values))


def _weights(weight: Any, labels: Tensor, like: Tensor) -> Tensor | None:
    if weight is None:
        return None
    given = _as_tensor(weight(labels) if callable(weight) else weight).detach()
    if given.shape != labels.shape[:1]:
        raise ValueError(f"probe: weight must have shape ({len(labels)},), got {tuple(given.shape)}")
    return given.to(like)


def _usual_regs(n: int, first: Block) -> Tensor:
    """Regularisations around the mean nonzero eigenvalue of the (weighted, centred) Gram matrix."""
    variance = first.X.double().var(0).mean().item()
    if not 0 < variance < math.inf:
        raise ValueError(
            f"probe: features must differ between rows, got a mean variance of {variance:g} in the first "
            f"{len(first.X)}"
        )
    mean_weight = first.weight.double().mean().item()
    size = max(n, first.X.shape[1]) * variance * mean_weight
    return size * torch.logspace(-6, 3, _REGS, dtype=torch.float64, device="cpu")


def _given_regs(regs: Any) -> Tensor:
    values = torch.as_tensor(regs, dtype=torch.float64, device="cpu").detach().flatten()
    positive_and_finite = (values > 0) & (values < math.inf)
    if not len(values) or not bool(positive_and_finite.all()):
        raise ValueError(f"probe: regs must be positive and finite, got {regs!r}")
    return values.sort().values


def _entry(path: HeldOut, r: int) -> HeldOut:
    """The held-out rows of one regularisation; clusters are shared by all."""
    fields = {name: value[r] for name, value in path._asdict().items() if name != "clusters"}
    return HeldOut(**fields, clusters=path.clusters)


def _copied(held_out: HeldOut) -> HeldOut:
    """A copy that does not keep the memory of the whole path."""
    fields = held_out._asdict().items()
    copies = {name: value.clone() for name, value in fields if isinstance(value, Tensor)}
    return held_out._replace(**copies)


def _headline(held_out: HeldOut, classes: Tensor | None) -> tuple[float, float]:
    """Accuracy or r2, and its standard error."""
    if classes is not None:
        error_rate = criteria.error_rate if len(classes) == 2 else criteria.multiclass_error
        stderr = standard_error(error_rate, held_out, weight=None).item()
        return 1 - error_rate(held_out, weight=None).item(), stderr
    variance = held_out.targets.double().var(0, correction=0)  # () or (c,)
    if held_out.targets.ndim == 1:
        mse = criteria.mse(held_out, weight=None)
        error = standard_error("mse", held_out, weight=None)
        return 1 - (mse / variance).item(), (error / variance).item()
    deviation = variance.sqrt()
    scaled = held_out._replace(  # so that all outputs have the same scale
        outputs=held_out.outputs / deviation,
        residuals=held_out.residuals / deviation,
        targets=held_out.targets / deviation,
    )
    mse = criteria.mse(scaled, weight=None)
    return 1 - mse.item(), standard_error("mse", scaled, weight=None).item()


def _scores(held_out: HeldOut, classes: Tensor | None) -> ProbeScores:
    score, error = _headline(held_out, classes)
    rmse = criteria.mse(held_out, weight=None).sqrt().item()
    if classes is None:
        return ProbeScores(math.nan, score, error, None, math.nan, rmse)
    log_loss = criteria.cross_entropy(held_out, weight=None, scale=_softmax_scale(held_out)).item()
    by_class = criteria.class_accuracy(held_out, weight=None)
    return ProbeScores(score, math.nan, error, by_class, log_loss, rmse)


def _softmax_scale(held_out: HeldOut) -> float:
    """The scale > 0 of least cross-entropy, by Newton's method: its slope grows with the scale."""
    f = held_out.outputs.double()
    t = held_out.targets
    if f.ndim == 1:
        of_true_class = f * t.sign()
        f = torch.stack([-f, f], -1)
    else:
        of_true_class = (f * (t > 0)).sum(-1)
    scale = 1.0
    for _ in range(100):
        p = torch.softmax(scale * f, -1)  # (n, k)
        mean = (p * f).sum(-1)
        slope = (mean - of_true_class).mean().item()
        variance = (p * f.square()).sum(-1) - mean.square()
        curvature = variance.mean().item()
        step = slope / curvature if curvature > 0 else 0.0
        before = scale
        scale = min(max(scale - step, scale / 4), 4 * scale)
        if abs(scale - before) <= 1e-8 * before or not 1e-6 < scale < 1e6:
            break
    return scale
