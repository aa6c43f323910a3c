"""select: choose hyper-parameters by a leave-one-out criterion."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from torchloo.classes import is_label
from torchloo.criteria.score import Score, usual_criterion
from torchloo.guards import host_labels
from torchloo.machine import KernelMachine, LeastSquares
from torchloo.primal.block import RowSource
from torchloo.search.compared import Outcome, best_of, compared, require_comparable
from torchloo.search.joined import check_join, search_joined
from torchloo.search.objective import Evaluation
from torchloo.search.parameters import Space
from torchloo.search.problem_batch import (
    ProblemBatch,
    Weighting,
    check_clusters,
    check_rows,
    stack,
    streamed,
    weight_of,
)
from torchloo.search.run import Search, warn_stopped
from torchloo.search.starts import takes_kernel_matrix, warn_of_scales
from torchloo.splits import Split, resolve
from torchloo.text_table import rendered

__all__ = ["Selection", "select"]


class Selection(NamedTuple):
    """The result of `select`."""

    machine: Any
    """A new machine with the best hyper-parameters, fitted to all rows."""

    value: float
    """Its criterion, without the hyper-prior; with splits, the mean over them. An optimistic
    estimate, since it was optimised: see `validate`."""

    history: list[Evaluation]
    """Every evaluation in order: number, value, objective, parameters by name, machine."""

    evaluations: int
    """Number of leave-one-out evaluations, one per candidate, with or without gradient."""

    table: list[dict[str, Any]]
    """A row for each machine compared, in order: number, machine (in short), value, evaluations, parameters
    (of its best candidate, by name), stopped (why its search ended early, or ""), chosen. Machines that were
    not reached before an early stop have no row."""

    def __str__(self) -> str:
        value = f"criterion {self.value:.6g} after {self.evaluations} leave-one-out evaluations"
        best = f"{self.machine}\n{value}"
        if len(self.table) == 1:
            return best
        rows = [_shown(row) for row in self.table]
        return "\n".join([best, "", *rendered(rows, most=len(rows))])


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    """A row of the table with its parameters in one cell."""
    named = row["parameters"].items()
    numbers = [(name, value) for name, value in named if not isinstance(value, list)]
    parameters = ", ".join(f"{name} {value:.4g}" for name, value in numbers)
    return {**row, "parameters": parameters, "chosen": "*" if row["chosen"] else ""}


def select(
    machine: KernelMachine | Sequence[KernelMachine],
    X: Tensor | RowSource,
    y: Tensor | None = None,
    criterion: Any = None,
    search: str | Search = "gradient",
    *,
    clusters: object | None = None,
    weight: Weighting = None,
    criterion_weight: Any = "own",
    splits: Any = None,
    join: str = "mean",
    **options: Any,
) -> Selection:
    """Choose all trainable parameters of a machine by a leave-one-out criterion, and fit the machine.

    All parameters that require a gradient are searched: positive ones as logarithms, within bounds; weights
    of networks (`features=`) without. The machine that is passed in is not changed.

    Args:
        machine: any machine of torchloo, or a list of machines to be compared: each is searched separately,
            and the one with the best criterion is returned; `Selection.table` has the result of each.
        X: inputs, (n, d), or a `Stream`, which includes y and weight; then every evaluation is one or two
            passes over its rows, in memory that does not grow with their number.
        y: targets, (n,) or (n, c), or integer class labels (n,), which are stored in the machine.
        criterion: one of tl.criteria, its name, or a callable of a HeldOut that returns one number, lower
            being better unless it has an attribute lower_is_better = False. For several classes, "press",
            "cross_entropy" or "multiclass_error"; a criterion of two classes as a mean over the columns is
            functools.partial(tl.criteria.smooth_error, average="outputs"). None takes "press"; for integer
            labels and a search without gradient, "error_rate" or, of more than two, "multiclass_error".
        search: "gradient", "nelder-mead" or "grid", or a `Search` with all options.
        clusters: labels (n,) of rows that are left out together, for leave-cluster-out.
        weight: training weights (n,), or a function of y, such as tl.balanced_weight.
        criterion_weight: weights of the rows in the criterion: "own" for the training weights, None for equal
            weights; or as `weight`.
        splits: select one set of hyper-parameters for several training sets, given as in `validate`: pairs
            (train, test) of row numbers, or a number of random hold-outs. The criterion is leave-one-out
            within the training rows of each split; test rows are used only in the final fit to all rows.
        join: with splits, "mean": one search of the mean criterion; "median": a search in each split, then
            the median of each parameter (Note [several splits] in search/joined.py).
        options: fields of `Search`, by name: starts, start, bounds, grid, prior, max_evaluations, tolerance,
            time_budget, callback, generator, progress.

    Returns:
        Selection: machine (new, fitted), value, history, evaluations, table. Ctrl-C returns the best so far.
        A candidate whose factorisation fails is infeasible and has an infinite value in the history.

    Cost: one `loo` for each evaluation, or one in each split, small problems in batches, large ones one by
    one (Note [one batched evaluation] in search/objective.py); memory that of one `loo`. If reg is the only
    parameter, paths of 25, 8 and 1 regularisations, and more for a criterion that is not smooth, with up to
    2^24 outputs in memory at once.

    Reference: Cawley 2006, IV (Nelder and Mead on PRESS); Cawley and Talbot 2007 (hyper-prior).

    Example:
        >>> import torchloo as tl
        >>> X, y = tl.datasets.motorcycle()
        >>> chosen = select(tl.LSSVM(tl.kernels.RBF()), X, y, progress=False)
        >>> print(f"{chosen.value:.0f}, lengthscale {chosen.machine.kernel.lengthscale:.2f}")
        70551, lengthscale 7.57
    """
    plan = Search.of("select", search, options)
    deadline = plan.deadline()
    rivals = compared(plan, machine, batched=not isinstance(X, RowSource))
    check_join("select", join, splits is not None, rivals)
    pairs = _pairs(splits, X, clusters, plan)
    rows = [_rows(rival.space, X, y, clusters, weight, criterion_weight, pairs) for rival in rivals]
    if criterion is None:
        several_columns = rows[0].splits[0].y.ndim > 2
        criterion = usual_criterion(plan.method, rows[0].labelled, columns=several_columns)
    score = Score("select", "criterion", criterion)
    score.require_weight(criterion_weight, "criterion_weight")
    check_clusters("select", score, clusters)
    if isinstance(X, RowSource) and score.takes_fit:
        raise ValueError(f"select: criterion must read held-out rows for a stream, got {score.name}")
    require_comparable(score, rivals)
    problems = [each.splits for each in rows]
    outcomes = search_joined(join, rivals, problems, score, deadline)
    reasons = [outcome.stopped for outcome in outcomes]
    warn_stopped("select", reasons, plan.time_budget, "this is the best so far")
    found = best_of(outcomes, 0)
    assert found is not None
    winner, best = found
    assert best.theta is not None
    fitted: Any = winner.rival.space.machine_at(best.theta)
    fitted.fit(X, y, rows[outcomes.index(winner)].weight)
    table = [_table_row(number, outcome, outcome is winner) for number, outcome in enumerate(outcomes)]
    steps = (step for outcome in outcomes for step in outcome.history)
    history = sorted(steps, key=lambda step: step.number)
    return Selection(fitted, best.value, history, len(history), table)


def _table_row(number: int, outcome: Outcome, chosen: bool) -> dict[str, Any]:
    """The row of one machine in the table of a selection."""
    objective, stopped = outcome.objective, outcome.stopped
    best = objective.best[0]
    value, parameters = best.value, {}
    if best.theta is not None:
        parameters = outcome.rival.space.named(best.theta)
    else:
        value = objective.score.sign * math.inf
        failure = objective.failures.get(0, "the criterion is not finite")
        stopped = stopped or f"no candidate could be evaluated: {failure}"
    return {
        "number": number,
        "machine": outcome.rival.name,
        "value": value,
        "evaluations": objective.evaluations[0],
        "parameters": parameters,
        "stopped": stopped,
        "chosen": chosen,
    }


class _Rows(NamedTuple):
    """The data as one machine encodes them."""

    splits: list[ProblemBatch]
    """The training rows of each split, a single problem each; one of all rows where there are no splits."""
    labelled: bool
    """Whether y are class labels."""
    weight: Any
    """Training weights (n,) or None."""


def _pairs(splits: Any, X: Any, clusters: object | None, plan: Search) -> list[Split] | None:
    """The splits, checked; None if there are none."""
    if splits is None:
        return None
    if isinstance(X, RowSource):
        raise TypeError("select: splits must be None for a stream, whose rows come in blocks")
    return resolve(splits, len(X), clusters, plan.generator, "select")


def _rows(
    space: Space,
    X: Any,
    y: Any,
    clusters: object | None,
    weight: Weighting,
    criterion_weight: Any,
    pairs: list[Split] | None,
) -> _Rows:
    """Check the data and encode them for a machine."""
    machine = space.machine
    if isinstance(X, RowSource):
        _require_stream(machine, y, weight, criterion_weight)
        stream = X.with_classes(machine.classes) if machine.has_given_classes else X
        problems = streamed("select", stream, clusters)
        warn_of_scales(space, next(iter(problems.X)), stacklevel=4)
        problems = problems._replace(criterion_weight=criterion_weight)
        return _Rows([problems], stream.classes is not None, None)
    targets = machine.coded("select", X, y)
    check_rows("select", machine.kernel, X, targets)
    warn_of_scales(space, X, stacklevel=4)

    all_weights = weight_of("select", "weight", weight, y, targets)

    def problem(train: Tensor | None) -> ProblemBatch:
        """The problem of some rows, or of all."""
        scored = weight_of("select", "criterion_weight", criterion_weight, y, targets, train)
        if train is None:
            return stack("select", [X], [targets], [all_weights], [scored], [clusters])
        weights = weight_of("select", "weight", weight, y, targets, train)
        inputs = X[train][:, train] if takes_kernel_matrix(machine) else X[train]
        labels = None
        if clusters is not None:
            labels = host_labels("select", clusters, len(X))[train.cpu()]
        return stack("select", [inputs], [targets[train]], [weights], [scored], [labels])

    if pairs is None:
        problems_of_splits = [problem(None)]
    else:
        problems_of_splits = [problem(pair.train.to(X.device)) for pair in pairs]
    return _Rows(problems_of_splits, is_label(y), all_weights)


def _require_stream(machine: Any, y: object, weight: object, criterion_weight: object) -> None:
    """Raise if arguments are given that a stream includes, or if the machine cannot use a stream."""
    if y is not None or weight is not None:
        raise TypeError("select: a stream includes y and weight; leave them None")
    if not (criterion_weight is None or (isinstance(criterion_weight, str) and criterion_weight == "own")):
        raise TypeError("select: criterion_weight must be 'own' or None for a stream")
    if not isinstance(machine, LeastSquares):
        raise TypeError(
            "select: a stream needs a machine with few features: a linear kernel, or SparseLSSVM(kernel, "
            f"reg, basis=...); got {type(machine).__name__}"
        )
