"""validate: an unbiased estimate of performance, by repeating the whole selection in outer splits."""

import functools
import math
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from torchloo import criteria
from torchloo.classes import is_label
from torchloo.criteria.score import Score, usual_criterion
from torchloo.criteria.scored_rows import one_positive, two_valued
from torchloo.guards import host_labels
from torchloo.machine import KernelMachine
from torchloo.search.compared import Rival, compared, require_comparable
from torchloo.search.outer_loop import OuterLoop, columns_of
from torchloo.search.problem_batch import Weighting, check_clusters, check_rows, sizes
from torchloo.search.run import INTERRUPTED, Search, warn_stopped
from torchloo.search.starts import warn_of_scales
from torchloo.splits import Split, require_whole_clusters, resolve
from torchloo.text_table import rendered
from torchloo.thresholds import shift_score

__all__ = ["Validation", "summed_up", "validate"]


class Validation(NamedTuple):
    """Scores on the test rows of outer splits, which the selection does not use."""

    scores: Tensor
    """The metric on the test rows of every split, (S,)."""

    mean: float
    """Their mean, the estimate of performance."""

    stderr: float
    """Its standard error, s / sqrt(S), which treats the splits as independent; overlapping ones are not."""

    table: list[dict[str, Any]]
    """A row for each split: split, train, test (numbers of rows), score, criterion (the selected, optimistic
    one), with a threshold also shift and unshifted (the score without it), evaluations, and the chosen
    hyper-parameters by name."""

    metric: str
    """Name of the metric."""

    criterion: str
    """Name of the criterion of the selection."""

    def __str__(self) -> str:
        lines = [f"{self.metric} {self.mean:.4g} +- {self.stderr:.2g} ({len(self.scores)} splits)"]
        if self.table and "unshifted" in self.table[0]:
            plain = sum(row["unshifted"] for row in self.table) / len(self.table)
            lines.append(f"without the threshold {plain:.4g}")
        inner = sum(row["criterion"] for row in self.table) / max(1, len(self.table))
        lines.append(f"selected by {self.criterion}, {inner:.4g} on average")
        return "\n".join([*lines, "", *rendered(self.table)])


def validate(
    machine: KernelMachine | Sequence[KernelMachine],
    X: Tensor,
    y: Tensor,
    splits: int | str | Iterable[tuple[Any, Any]] = 100,
    criterion: Any = None,
    metric: Any = None,
    search: str | Search = "gradient",
    *,
    clusters: object | None = None,
    allow_cut_clusters: bool = False,
    weight: Weighting = None,
    criterion_weight: Any = "own",
    standardise: bool | Sequence[int] = True,
    threshold: Any = None,
    **options: Any,
) -> Validation:
    """Estimate how well a machine predicts new rows when its hyper-parameters are chosen by `select`.

    The whole selection is repeated on the training rows of every split: standardisation, weights, starts,
    search, threshold. Splits with the same number of training rows, and the same cluster sizes, are searched
    as one batch.

    Args:
        machine, X, y, criterion, search, clusters, weight, criterion_weight: as in `select`, with X (n, d);
            several machines are compared in every split. Functions of y, such as tl.balanced_weight, are
            called with the training rows of each split.
        splits: a number of random hold-outs of 10 % of the rows (or of the clusters, if given);
            "leave-cluster-out"; or pairs (train, test) of row numbers, as from tl.splits.hold_out, k_fold and
            leave_cluster_out. Training rows may be repeated, as in a bootstrap, if clusters are given, such
            as clusters=torch.arange(n): all copies of a row are then left out together.
        allow_cut_clusters: splits with rows of one cluster in both training and test are rejected, unless
            this is True: the score is then for new rows of known clusters.
        metric: unweighted, of the test rows: one of tl.criteria, its name, or a callable of a HeldOut.
            Default: multiclass_error if y are labels of several classes, or columns with one positive entry
            per row; error_rate for labels of two classes or y of -1 and +1, averaged over columns; else mse.
        standardise: centre and scale the columns of X (True: all; or their numbers) by mean and standard
            deviation of the training rows. Ignored for a Precomputed kernel.
        threshold: a metric for which the outputs are shifted, see `tl.threshold`; fitted in each split to the
            held-out predictions of its training rows, separately for every column of y.
        options: fields of `Search`, by name: starts, start, bounds, grid, prior, max_evaluations, tolerance,
            progress; generator, which also draws the splits; time_budget in seconds for all splits together.

    Returns:
        Validation: scores, mean, stderr, table; print it for a summary. Ctrl-C, or the end of the time
        budget, returns the splits whose search has begun, with the best so far in each.

    Cost: that of `select` in each split, and two more solutions. Memory: one copy of X per split of a batch,
    and that of one `loo`.

    Reference: Cawley 2006, I-B and IV; Cawley and Talbot 2010 on selection bias.

    Example:
        >>> import torchloo as tl
        >>> X, y = tl.datasets.motorcycle()
        >>> folds = tl.splits.k_fold(len(y), 5, generator=torch.Generator().manual_seed(0))
        >>> estimate = validate(tl.LSSVM(tl.kernels.RBF()), X, y, folds, progress=False)
        >>> len(estimate.scores)
        5
    """
    plan = Search.of("validate", search, options)
    if plan.callback is not None:
        raise TypeError("validate: callback must be None, since many splits are searched as one batch")
    deadline = plan.deadline()
    rivals = compared(plan, machine)
    targets, columns = _common_targets(rivals, X, y, standardise)
    if criterion is None:
        criterion = usual_criterion(plan.method, is_label(y), columns=targets.ndim > 1)
    score = Score("validate", "criterion", criterion)
    check_clusters("validate", score, clusters)
    score.require_weight(criterion_weight, "criterion_weight")
    require_comparable(score, rivals)
    outer = OuterLoop(
        rivals,
        score,
        _metric(metric, targets),
        _shift_metric(threshold),
        X,
        targets,
        given=y,
        clusters=clusters,
        weight=weight,
        criterion_weight=criterion_weight,
        columns=columns,
    )
    if columns is None:
        for rival in rivals:
            warn_of_scales(rival.space, X)
    pairs = resolve(splits, len(X), clusters, plan.generator)
    if clusters is not None and not allow_cut_clusters:
        require_whole_clusters(pairs, clusters, len(X))
    outer.check_metric(pairs)
    searched = _search_groups(outer, pairs, plan, deadline)
    warn_stopped("validate", searched.stopped, plan.time_budget, searched.described(len(pairs)))
    table = [searched.rows[k] for k in sorted(searched.rows)]
    return summed_up(table, outer.metric.name, score.name)


class _Searched(NamedTuple):
    """The splits that were searched."""

    rows: dict[int, dict[str, Any]]
    """The row of each in the table of a Validation."""
    stopped: list[str]
    """Reasons of early stops."""
    incomplete: int
    """How many of them were stopped before the end of their search."""

    def described(self, splits: int) -> str:
        """How many splits there are, for a warning."""
        described = f"these are {len(self.rows)} of {splits} splits"
        if self.incomplete:
            described += f", {self.incomplete} of them searched in part"
        return described


def _search_groups(outer: OuterLoop, pairs: list[Split], plan: Search, deadline: float) -> _Searched:
    """Search and score all splits, those of one shape together, up to an early stop."""
    generator = plan.generator
    state = None if generator is None else generator.get_state()
    groups = _groups(pairs, outer.clusters, len(outer.X))
    rows: dict[int, dict[str, Any]] = {}
    stopped: list[str] = []
    incomplete = 0
    quiet = not plan.progress or len(groups) < 2
    with tqdm(total=len(pairs), desc="splits", unit="split", disable=quiet) as bar:
        for group in groups:
            if generator is not None and state is not None:
                generator.set_state(state)  # every split starts from the same state, in any group
            before = len(rows)
            try:
                reasons = outer.run({k: pairs[k] for k in group}, rows, deadline)
            except KeyboardInterrupt:
                if not rows:
                    raise
                stopped.append(INTERRUPTED)
                break
            bar.update(len(group))
            if reasons:
                stopped += reasons
                incomplete += len(rows) - before
            if INTERRUPTED in reasons or time.monotonic() >= deadline:
                break
    return _Searched(rows, stopped, incomplete)


def summed_up(table: list[dict[str, Any]], metric: str, criterion: str) -> Validation:
    """A Validation from the rows of its table."""
    values = [row["score"] for row in table]
    scores = torch.tensor(values, dtype=torch.float64, device="cpu")
    stderr = math.nan
    if len(scores) > 1:
        stderr = scores.std().item() / math.sqrt(len(scores))
    return Validation(scores, scores.mean().item(), stderr, table, metric, criterion)


def _common_targets(
    rivals: list[Rival],
    X: Tensor,
    y: Tensor,
    standardise: bool | Sequence[int],
) -> tuple[Tensor, Tensor | None]:
    """The encoded targets, which must be the same for all machines, and the columns to standardise."""
    machines = [rival.space.machine for rival in rivals]
    # From all rows: a split may not have every class.
    by_machine = [machine.coded("validate", X, y) for machine in machines]
    first, columns = by_machine[0], None
    for machine, targets in zip(machines, by_machine, strict=True):
        check_rows("validate", machine.kernel, X, targets)
        columns = columns_of(standardise, machine, X)  # the same for all, or an error
        if targets.shape != first.shape or not torch.equal(targets, first):
            raise ValueError("validate: machines must have the same classes, in the same order")
    return first, columns


def _metric(metric: Any, y: Tensor) -> Score:
    score = Score("validate", "metric", _usual_metric(y) if metric is None else metric)
    if score.takes_fit:
        raise ValueError(f"validate: metric must be of outputs, got {score.name}, which takes a Fit")
    return score


def _usual_metric(y: Tensor) -> Any:
    """The default metric: an error rate for classes, the mean squared error for numbers."""
    if y.ndim == 2 and y.shape[1] > 1:
        one_vs_rest = two_valued(y.mT).all(0) & one_positive(y.mT)
        if bool(one_vs_rest.all()):
            return criteria.multiclass_error
    if not bool((y.abs() == 1).all()):
        return criteria.mse
    # A few test rows may look like one-vs-rest columns though all rows do not: average over columns.
    return functools.partial(criteria.error_rate, average="outputs")


def _shift_metric(metric: Any) -> Score | None:
    return None if metric is None else shift_score("validate", "threshold", metric)


def _groups(pairs: list[Split], clusters: object | None, rows: int) -> list[list[int]]:
    """Numbers of the splits that are searched together: same number of training rows, same cluster sizes."""
    labels = np.arange(rows) if clusters is None else host_labels("validate", clusters, rows)
    by_shape: dict[tuple[int, ...], list[int]] = {}
    for k, pair in enumerate(pairs):
        if clusters is None:
            shape: tuple[int, ...] = (len(pair.train),)
        else:
            shape = sizes(labels[pair.train.numpy()])
        by_shape.setdefault(shape, []).append(k)
    return list(by_shape.values())
