"""select: hyper-parameters by a leave-one-out criterion."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchloo.classes import is_label
from torchloo.machine import KernelMachine, LeastSquares
from torchloo.search.objective import Evaluation
from torchloo.search.parameters import Space
from torchloo.search.prior import Prior
from torchloo.search.problems import Weighting, check_clusters, check_rows, stack, streamed, weight_of
from torchloo.search.run import Plan, run, warn_interrupted
from torchloo.search.score import Score, usual_criterion
from torchloo.search.starts import warn_of_scales
from torchloo.streaming.stream import Stream

__all__ = ["Selection", "select"]


class Selection(NamedTuple):
    """What a search found."""

    machine: Any
    """A new machine with the best hyper-parameters, fitted to all rows."""

    value: float
    """Its criterion, without the hyper-prior; optimistic, since it was searched for: see `validate`."""

    history: list[Evaluation]
    """Every evaluation in the order it was made: number, value, objective, parameters by name."""

    evaluations: int
    """The number of leave-one-out evaluations, one for each candidate, with or without gradient."""

    def __str__(self) -> str:
        best = self.machine
        return f"{best}\ncriterion {self.value:.6g} after {self.evaluations} leave-one-out evaluations"


def select(
    machine: KernelMachine,
    X: Tensor | Stream,
    y: Tensor | None = None,
    criterion: Any = None,
    search: str = "gradient",
    *,
    clusters: object | None = None,
    weight: Weighting = None,
    criterion_weight: Any = "own",
    starts: int = 1,
    start: str = "auto",
    bounds: Mapping[str, tuple[float, float]] | None = None,
    grid: Mapping[str, Iterable[Any]] | None = None,
    prior: Prior = None,
    max_evaluations: int | None = None,
    tolerance: float = 1e-6,
    generator: torch.Generator | None = None,
    progress: bool = True,
) -> Selection:
    """Choose all trainable parameters of a machine by a leave-one-out criterion, and fit it.

    Searched are all parameters that require a gradient: positive ones on the scale of their logarithms,
    within a box; weights of networks given as `features=` as they are. The machine itself stays as it is.

    Args:
        machine: any machine of torchloo.
        X: inputs, (n, d), or a `Stream`, which brings y and weight; then every evaluation is a pass or two
            over its rows, in memory that does not grow with them.
        y: targets, (n,) or (n, c), or integer class labels (n,), whose classes the machine then keeps.
        criterion: one of tl.criteria, its name, or a callable of a HeldOut that returns one number, lower
            being better unless it has an attribute lower_is_better = False. For several classes, "press",
            "cross_entropy" or "multiclass_error"; a criterion of two classes as a mean over the columns is
            functools.partial(tl.criteria.smooth_error, average="outputs"). None takes "press"; for integer
            labels and a search without gradient, "error_rate" or, of more than two, "multiclass_error".
        search: "gradient": L-BFGS with a safe line search, from a differentiable criterion; the fewest
            evaluations by far. Where reg alone is to be chosen, it follows paths over the whole box instead,
            by any criterion (Note [search along a path] in search/along_reg.py). "nelder-mead": the simplex
            method, for any criterion and few parameters. "grid": every point of `grid`; the axis "reg" comes
            from one decomposition (`path`).
        clusters: labels (n,) of what is left out together: leave-cluster-out.
        weight: training weights (n,), or a function of y as it is given, such as tl.balanced_weight.
        criterion_weight: weights of the criterion: "own" takes the training weights, None counts every row
            once; or as `weight`.
        starts: number of runs of "gradient" and "nelder-mead", which advance as one batch. The first begins
            where Note [first start] in search/starts.py says, or, with start="machine", at the machine's own
            values; the others at random around it, drawn from `generator`. Along a path one is enough.
        bounds: {name: (low, high)}; by default six decades either way of the first start, so that no
            parameter runs away. Of grids only the default one is cut.
        grid: {name: values}, names such as "reg", "C", "kernel.lengthscale", or "lengthscale" where that is
            unique; a value of several numbers sets the entries of an ARD kernel. Default: 25 half decades of
            reg or C and 9 factors of two of every other parameter around the first start.
        prior: hyper-prior against over-fitting of the criterion Q. A strength s adds
            s |Q(t0)| / n * sum_j (t_j - t0_j)^2 over the logarithms t of the kernel's parameters, t0 being
            the first start: s is the precision of a Gaussian prior on each (Note [hyper-prior] in
            search/prior.py). Or a callable, which gets the logarithms by name, (B,) or (B, d), and returns
            penalties (B,) to be added (subtracted where higher is better).
        max_evaluations: of each run, by default 200 with gradient, else 200 for each parameter.
        tolerance: relative change of the criterion at which a run stops.

    Returns:
        Selection: machine (new, fitted), value, history, evaluations. Ctrl-C gives the best so far. A
        candidate whose factorisation fails is infeasible and stands in the history with an infinite value.

    Cost: one `loo` for each evaluation, small problems in batches, large ones one by one (Note [one batched
    evaluation] in search/objective.py); memory that of one `loo`. Where reg alone is to be chosen, paths of
    25, 8 and 1 regularisations, and more for a criterion that is not smooth, with up to 2^24 outputs in
    memory at once.

    Reference: Cawley 2006, IV (Nelder and Mead on PRESS); Cawley and Talbot 2007 (hyper-prior).

    Example:
        >>> import torchloo as tl
        >>> X, y = tl.datasets.motorcycle()
        >>> chosen = select(tl.LSSVM(tl.kernels.RBF()), X, y, progress=False)
        >>> print(f"{chosen.value:.0f}, lengthscale {chosen.machine.kernel.lengthscale:.2f}")
        70551, lengthscale 7.57
    """
    plan = Plan(
        "select", search, starts, start, bounds, grid, prior, max_evaluations, tolerance, generator, progress
    )
    space = Space("select", machine, batched=not isinstance(X, Stream))
    own = None
    if isinstance(X, Stream):
        _require_stream(machine, y, weight, criterion_weight)
        stream = X.with_classes(machine.classes) if machine.has_given_classes else X
        problems = streamed("select", stream, clusters)
        problems = problems._replace(criterion_weight=criterion_weight)
        labelled = stream.classes is not None
        warn_of_scales(space, next(iter(problems.X)))
    else:
        given: Any = y
        targets, labelled = machine.coded("select", X, given), is_label(given)
        check_rows("select", space.machine.kernel, X, targets)
        warn_of_scales(space, X)
        own = weight_of("select", "weight", weight, given, targets)
        of_criterion = weight_of("select", "criterion_weight", criterion_weight, given, targets)
        problems = stack("select", [X], [targets], [own], [of_criterion], [clusters])
    if criterion is None:
        criterion = usual_criterion(search, labelled, columns=problems.y.ndim > 2)
    score = Score("select", "criterion", criterion)
    score.require_weight(criterion_weight, "criterion_weight")
    check_clusters("select", score, clusters)
    if isinstance(X, Stream) and score.takes_fit:
        raise ValueError(f"select: criterion must read held-out rows for a stream, got {score.name}")
    objective, interrupted = run(plan, space, problems, score)
    if interrupted:
        warn_interrupted("select")
    best = objective.best[0]
    assert best.theta is not None
    fitted: Any = space.machine_at(best.theta)
    fitted.fit(X, y, own)
    return Selection(fitted, best.value, objective.history, objective.evaluations[0])


def _require_stream(machine: Any, y: object, weight: object, criterion_weight: object) -> None:
    """Raise where a stream is given what it brings itself, or what it cannot serve."""
    if y is not None or weight is not None:
        raise TypeError("select: a stream brings its own y and weight; leave them None")
    if not (criterion_weight is None or (isinstance(criterion_weight, str) and criterion_weight == "own")):
        raise TypeError("select: criterion_weight must be 'own' or None for a stream")
    if not isinstance(machine, LeastSquares):
        raise TypeError(
            "select: a stream needs a machine with few features: a linear kernel, or SparseLSSVM(kernel, "
            f"reg, basis=...); got {type(machine).__name__}"
        )
