"""Leave-one-out (and leave-cluster-out) of SVMs by seeded SMO, Algorithms 1 and 3 of BOUND."""

import torch
from torch import Tensor

from torchloo.guards import whole_number
from torchloo.svm import result as code
from torchloo.svm.fit import SVMFit
from torchloo.svm.proof.certify import Held, gap_ball_sign, value_bound
from torchloo.svm.proof.checks import only_of_its_class, sufficiency_checks
from torchloo.svm.records import RowOutcome
from torchloo.svm.smo.bound import BOUND, DualBound, SMOOptions
from torchloo.svm.smo.rounds import SMOState, seed_without, smo
from torchloo.svm.solve.low_rank import in_double
from torchloo.svm.tolerances import strictly_inside

__all__ = ["SMOOptions", "check_options", "leave_clusters_out_by_smo", "leave_one_out_by_smo"]

_LEAST = {"working": 2, "trials": 0, "newton": 0, "most_rounds": 1, "patience": 1}


def check_options(function: str, options: SMOOptions | None, method: str) -> SMOOptions:
    """The options, or the usual ones; an error names what is wrong."""
    if options is None:
        return SMOOptions()
    if not isinstance(options, SMOOptions):
        raise TypeError(f"{function}: smo must be an SMOOptions, got {type(options).__name__}")
    if method != "smo":
        raise ValueError(f'{function}: smo is for method "smo", got method {method!r}; leave it out')
    for name, least in _LEAST.items():
        whole_number(function, f"smo.{name}", getattr(options, name), least)
    for name in ("seed", "bound", "gap_ball"):
        if not isinstance(getattr(options, name), bool):
            raise TypeError(f"{function}: smo.{name} must be True or False, got {getattr(options, name)!r}")
    if not 0 <= options.useful <= 1:
        raise ValueError(f"{function}: smo.useful must be a share from 0 to 1, got {options.useful!r}")
    return options


def leave_one_out_by_smo(
    K: Tensor,
    y: Tensor,
    box: Tensor,
    fit: SVMFit,
    values: bool,
    epsilon: float,
    options: SMOOptions = SMOOptions(),  # noqa: B008, immutable
    only: Tensor | None = None,
) -> RowOutcome:
    """Algorithm 1 for T machines: checks, then a seeded SMO for the open rows, with proofs if they pay.

    K (T, n, n) is as it came in, y, box and `fit` are (T, n) in float64, as is what comes back. With `values`
    only check 1 is used and no problem stops before epsilon-KKT. `only` (n,) is true for the rows that are
    asked for.
    """
    K, rounding, _ = in_double(K)
    alpha = (fit.coef * y).clamp_min(0)
    outputs = fit.outputs.clone()
    doubt = value_bound(K, alpha, y * outputs - 1, box, rounding)
    by = sufficiency_checks(K, y, alpha, outputs, box, doubt)
    if values:
        # Without a free variable b has an interval, which an unused row may bound.
        unbounded = ~strictly_inside(alpha, box).any(-1, keepdim=True)
        by = by.masked_fill((by > code.UNUSED) | unbounded, -1)
    alone = only_of_its_class(y)
    by = by.masked_fill(alone, code.ONE_CLASS)
    outputs = torch.where(alone, -y, outputs)
    certified = by >= 0
    steps, columns, newton = (torch.zeros_like(by) for _ in range(3))
    opened = (by < 0 if only is None else (by < 0) & only).nonzero(as_tuple=True)
    if len(opened[0]):
        table, rows = opened
        labels, before = y[table], alpha[table]
        boxes = box[table].scatter(1, rows[:, None], 0.0)
        start = seed_without(before, labels, boxes, K[opened]) if options.seed else torch.zeros_like(boxes)
        rule = None
        if (options.bound or options.gap_ball) and not values:
            rule = DualBound(K, table, rows, rounding, options)
        end = _solve(K, labels, boxes, start, epsilon, options, table, rule)
        outputs[opened], certified[opened], by[opened] = _outcome(K, end, rows, rounding, epsilon)
        seeding = (
            (start != before).sum(1) if options.seed else 0
        )  # columns, that of the row itself among them
        steps[opened], columns[opened], newton[opened] = end.steps, end.columns + seeding, end.newton
    if not values:
        outputs = torch.where(outputs >= 0, 1.0, -1.0).to(outputs)
    return RowOutcome(outputs, certified, by, steps, columns, newton, None)


def _solve(
    K: Tensor,
    y: Tensor,
    boxes: Tensor,
    start: Tensor,
    epsilon: float,
    options: SMOOptions,
    table: Tensor,
    rule: DualBound | None = None,
) -> SMOState:
    """The SMO on problems (B, n) of kernel matrices (T, n, n)."""
    n = y.shape[1]
    rounds = -(-options.patience * n // min(options.working, n))
    return smo(
        K, y, boxes, start, epsilon, table, rule,
        options.working, options.most_rounds, rounds, options.newton,
    )  # fmt: skip


def _outcome(
    K: Tensor, end: SMOState, rows: Tensor, rounding: Tensor, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Decision values, which signs are proved, and by what, for problems that have ended."""
    u = end.F + end.y
    f = u.gather(1, rows[:, None])[:, 0] + end.bias
    held = Held(end.alpha, u, end.box, rows, rounding[end.table], table=end.table)
    ball = gap_ball_sign(K, end.y, held, end.bias).sign
    sign = torch.where(end.sign != 0, end.sign, ball)
    # A rule proves the sign of the machine with its own bias, not with the midpoint: believe the proof.
    f = torch.where((sign != 0) & (sign * f <= 0), sign * torch.finfo(f.dtype).tiny, f)
    solved = torch.where(end.violation > epsilon, code.CUT, code.KKT)
    by = torch.where(end.stopped_by == BOUND, code.BOUND, torch.where(end.stopped_by > 0, code.BALL, solved))
    return f, sign != 0, by


def leave_clusters_out_by_smo(
    K: Tensor, y: Tensor, box: Tensor, fit: SVMFit, clusters: Tensor, epsilon: float
) -> RowOutcome:
    """Box all rows of a cluster to zero, seed, and solve: one batch with a problem for each cluster.

    Of one machine: K (n, n), the rest (n,).
    """
    matrix, rounding, _ = in_double(K[None])
    labels, member = torch.unique(clusters, return_inverse=True)
    alpha = (fit.coef * y).clamp_min(0)
    inside = torch.arange(len(labels), device=member.device)[:, None] == member  # (G, n)
    inside = inside.to(y.device)
    boxes = torch.where(inside, 0.0, box)
    of_all, before = y.expand_as(boxes), alpha.expand_as(boxes)
    start = seed_without(before, of_all, boxes, inside.to(matrix) @ matrix[0])
    first = torch.zeros(len(labels), dtype=torch.long, device=y.device)
    end = _solve(matrix, of_all, boxes, start, epsilon, SMOOptions(), first)
    member = member.to(y.device)
    rows = torch.arange(len(y), device=y.device)
    u, bias = (end.F + y)[member], end.bias[member]
    outputs = u[rows, rows] + bias
    held = Held(end.alpha[member], u, boxes[member], rows, rounding[0])
    sign = gap_ball_sign(matrix[0], y, held, bias).sign
    by = torch.where(end.violation[member] <= epsilon, code.KKT, code.CUT)
    left = boxes > 0
    positive, negative = ((left & (y == label)).any(1)[member] for label in (1.0, -1.0))
    one_class = ~(positive & negative)
    outputs = torch.where(one_class, torch.where(positive, 1.0, -1.0).to(outputs), outputs)
    by = by.masked_fill(one_class, code.ONE_CLASS)
    certified, columns = (sign * outputs > 0) | one_class, end.columns + (start != before).sum(1)
    return RowOutcome(outputs, certified, by, end.steps[member], columns[member], end.newton[member], None)
