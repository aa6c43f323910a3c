"""Leave-one-out of SVMs by seeded SMO, Algorithms 1 and 3 of BOUND."""

import torch
from torch import Tensor

from torchloo.svm import result as code
from torchloo.svm.fit import SVMFit
from torchloo.svm.proof.certify import Held, gap_ball_sign, value_bound
from torchloo.svm.proof.checks import only_of_its_class, sufficiency_checks
from torchloo.svm.records import RowOutcome
from torchloo.svm.smo.bound import DualBound, ceiling
from torchloo.svm.smo.options import SMOOptions
from torchloo.svm.smo.rounds import SMOState, smo
from torchloo.svm.smo.working_sets import snapped
from torchloo.svm.solve.low_rank import in_double
from torchloo.svm.tolerances import at_bound, is_free

__all__ = ["leave_one_out_by_smo", "seed_without"]


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
    by = _checks(K, y, box, alpha, fit.outputs, rounding, values)
    outputs = torch.where(by == code.ONE_CLASS, -y, fit.outputs)
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
            w_squared = (fit.coef * (fit.outputs - fit.bias[:, None])).sum(1)
            highest = ceiling(w_squared[table], fit.outputs[table], labels, boxes, rows)
            seen = before if options.seed else start
            rule = DualBound(K, table, rows, rounding, highest, seen, options)
        end = smo(K, labels, boxes, start, epsilon, table, options, rule)
        outputs[opened], certified[opened], by[opened] = _outcome(K, end, rows, rounding, epsilon)
        steps[opened], columns[opened], newton[opened] = end.steps, end.columns, end.newton
        if options.seed:
            columns[opened] += (start != before).sum(1)  # that of the row itself among them
    if not values:
        outputs = torch.where(outputs >= 0, 1.0, -1.0).to(outputs)
    return RowOutcome(outputs, certified, by, steps, columns, newton, None)


def _checks(
    K: Tensor, y: Tensor, box: Tensor, alpha: Tensor, outputs: Tensor, rounding: Tensor, values: bool
) -> Tensor:
    """By what each row (T, n) of full machines is settled, -1 where it is open."""
    doubt = value_bound(K.diagonal(dim1=1, dim2=2), alpha, y * outputs - 1, box, rounding)
    by = sufficiency_checks(K, y, alpha, outputs, box, doubt)
    if values:
        # Without a free variable b has an interval, which an unused row may bound.
        unbounded = ~is_free(alpha, box, at_bound(alpha, box)).any(-1, keepdim=True)
        by = by.masked_fill((by > code.UNUSED) | unbounded, -1)
    return by.masked_fill(only_of_its_class(y), code.ONE_CLASS)


def _outcome(
    K: Tensor, end: SMOState, rows: Tensor, rounding: Tensor, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Decision values, which signs are proved, and by what, for problems that have ended."""
    u = end.F + end.y
    f = u.gather(1, rows[:, None])[:, 0] + end.bias
    held = Held(end.alpha, u, end.y, end.box, rows, rounding[end.table], end.table)
    ball = gap_ball_sign(K, held, end.bias).sign
    sign = torch.where(end.sign != 0, end.sign, ball)
    # A rule proves the sign of the machine with its own bias, not with the midpoint: believe the proof.
    f = torch.where((sign != 0) & (sign * f <= 0), sign * torch.finfo(f.dtype).tiny, f)
    solved = torch.where(end.violation > epsilon, code.CUT, code.KKT)
    return f, sign != 0, torch.where(end.stopped_by > 0, end.stopped_by, solved)


def seed_without(alpha: Tensor, y: Tensor, box: Tensor, near: Tensor) -> Tensor:
    """A feasible start without some rows, from the full solution; all (B, n), `box` 0 at those rows.

    What the rows held goes to rows whose a = alpha * y can take it, nearest in kernel (`near`)
    first: by growing same-class ones, then by shrinking the others. That always completes while
    both classes remain; with one class the only feasible point, zero, comes out.
    Reference: DeCoste and Wagstaff 2000.
    """
    left = alpha.minimum(box)
    surplus = ((alpha - left) * y).sum(1)  # (B,) to be put back
    same = y * surplus[:, None].sign() > 0
    grow = torch.where(same, box - left, 0.0)
    left = left + _pour(surplus.abs(), grow, near)
    rest = surplus.abs() - (left - alpha.minimum(box)).sum(1)
    shrink = torch.where(same, 0.0, left)
    left = left - _pour(rest.clamp_min(0), shrink, near)
    return snapped(left, torch.zeros_like(box), box)


def _pour(amount: Tensor, room: Tensor, near: Tensor) -> Tensor:
    """Fill rooms (B, n) in the order of nearness until the amount (B,) is spent."""
    order = near.masked_fill(room <= 0, -torch.inf).argsort(1, descending=True)
    sorted_room = room.gather(1, order)
    before = sorted_room.cumsum(1) - sorted_room
    given = (amount[:, None] - before).clamp_min(0).minimum(sorted_room)
    return torch.zeros_like(room).scatter(1, order, given)
