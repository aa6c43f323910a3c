"""Leave-one-out (and leave-cluster-out) of one SVM by seeded SMO, Algorithms 1 and 3 of BOUND."""

from typing import NamedTuple

import torch
from torch import Tensor

from torchloo.guards import whole_number
from torchloo.svm import held_out as code
from torchloo.svm.bound import BOUND, DualBound
from torchloo.svm.certify import Held, gap_ball_sign, value_bound
from torchloo.svm.checks import only_of_its_class, strictly_inside, sufficiency_checks
from torchloo.svm.fit import SVMFit
from torchloo.svm.low_rank import in_double
from torchloo.svm.rows import RowOutcome
from torchloo.svm.smo import SMOState, seed_without, smo

__all__ = ["SMOOptions", "check_options", "leave_clusters_out_by_smo", "leave_one_out_by_smo"]

_LEAST = {"working": 2, "trials": 0, "newton": 0, "most_rounds": 1, "rule_every": 1, "patience": 1}


class SMOOptions(NamedTuple):
    """Variants of Algorithms 1 to 3 of BOUND for method "smo" of `svm_loo`.

    `SMOOptions(working=2, bound=True)` is the proposed algorithm of the paper, `SMOOptions(working=2)` the
    standard one that it is compared with. Beside Newton steps neither proof pays for its time (banana, RBF,
    C = 100: 80 ms without, 117 with the gap ball, 158 with the bound), so they have to be asked for.
    """

    working: int = 64
    """Size of the working sets; 2 is the SMO of the paper: each round is one step on the worst pair."""

    seed: bool = True
    """Start from the full machine, else from zero."""

    bound: bool = False
    """Stop when the dual bound proves the sign (only where no values are asked for), Note [dual bound]."""

    gap_ball: bool = False
    """Stop when the gap ball proves it (likewise), Note [gap ball]."""

    trials: int = 10
    """M of the paper: the first so many open points decide whether the proofs are worth their time."""

    useful: float = 0.5
    """The share of them that must be proved before they meet epsilon-KKT."""

    newton: int = 4
    """Newton steps on the free set in each round, at most, Note [free sets]; none with working=2."""

    most_rounds: int = 100_000
    """Problems that need more are left unsolved: "not solved: out of rounds"."""

    rule_every: int = 1
    """Rounds from one test of the proofs to the next."""

    patience: int = 100
    """Sweeps, rounds whose working sets have n variables together, that may fail to halve the violation of
    a problem; then it is left unsolved too."""


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
    """Algorithm 1: checks, then a seeded SMO for each open row, stopped by the bound where it helps.

    With `values` only check 1 is used and no problem stops before epsilon-KKT. `only` (n,) is true for the
    rows that are asked for. K is as it came in, the rest in float64.
    """
    K, rounding, _ = in_double(K)
    alpha = (fit.coef * y).clamp_min(0)
    outputs = fit.outputs.clone()
    doubt = value_bound(K, alpha, y * outputs - 1, box, rounding)
    by = sufficiency_checks(K, y, alpha, outputs, box, doubt)
    if values:
        by[by > code.UNUSED] = -1
        if not bool(strictly_inside(alpha, box).any()):  # b has an interval, which an unused row may bound
            by.fill_(-1)
    alone = only_of_its_class(y)
    by[alone] = code.ONE_CLASS
    outputs = torch.where(alone, -y, outputs)
    certified = by >= 0
    steps, columns, newton = (torch.zeros_like(by) for _ in range(3))
    rows = (by < 0 if only is None else (by < 0) & only).nonzero()[:, 0]
    with_rule = (options.bound or options.gap_ball) and not values
    trials = options.trials if with_rule else len(rows)
    for part in (rows[:trials], rows[trials:]):
        if not len(part):
            continue
        boxes = box.expand(len(part), -1).scatter(1, part[:, None], 0.0)
        start = _start(alpha, y, boxes, K[part]) if options.seed else torch.zeros_like(boxes)
        proofs = options.bound, options.gap_ball
        rule = DualBound(K, start, y, part, rounding, *proofs) if with_rule else None
        end = _solve(K, y, boxes, start, epsilon, options, rule)
        outputs[part], certified[part], by[part] = _outcome(K, y, end, part, rounding)
        by[part[(end.violation > epsilon) & (end.stopped_by == 0)]] = code.CUT
        # The column of the row itself is read to take it out, or else for the bound.
        begun = _moved(start, alpha) if options.seed else int(with_rule)
        steps[part], columns[part], newton[part] = end.steps, end.columns + begun, end.newton
        with_rule = with_rule and bool((end.stopped_by > 0).double().mean() >= options.useful)
    if not values:
        outputs = torch.where(outputs >= 0, 1.0, -1.0).to(outputs)
    return RowOutcome(outputs, certified, by, steps, columns, newton, None)


def _moved(start: Tensor, alpha: Tensor) -> Tensor:
    """Kernel columns that bring u from the full machine's to that of each start (B, n), (B,)."""
    return (start != alpha).sum(1)


def _start(alpha: Tensor, y: Tensor, boxes: Tensor, near: Tensor) -> Tensor:
    """Seeds for problems with `boxes` (B, n) from the full machine's alpha (n,)."""
    return seed_without(alpha.expand_as(boxes), y.expand_as(boxes), boxes, near)


def _solve(
    K: Tensor,
    y: Tensor,
    boxes: Tensor,
    start: Tensor,
    epsilon: float,
    options: SMOOptions,
    rule: DualBound | None = None,
) -> SMOState:
    """The SMO on problems (B, n) of one kernel matrix."""
    labels = y.expand_as(start).contiguous()
    rounds = -(-options.patience * len(y) // min(options.working, len(y)))
    return smo(
        K[None], labels, boxes, start, epsilon, None, rule,
        options.working, options.most_rounds, options.rule_every, rounds, options.newton,
    )  # fmt: skip


def _outcome(
    K: Tensor, y: Tensor, end: SMOState, rows: Tensor, rounding: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Decision values, which signs are proved, and by what, for problems that have ended."""
    u = end.F + y
    f = u.gather(1, rows[:, None])[:, 0] + end.bias
    ball = gap_ball_sign(K, y, Held(end.alpha, u, end.box, rows, rounding), end.bias).sign
    sign = torch.where(end.sign != 0, end.sign, ball)
    # A rule proves the sign of the machine with its own bias, not with the midpoint: believe the proof.
    f = torch.where((sign != 0) & (sign * f <= 0), sign * torch.finfo(f.dtype).tiny, f)
    by = torch.where(
        end.stopped_by == BOUND, code.BOUND, torch.where(end.stopped_by > 0, code.BALL, code.KKT)
    )
    return f, sign != 0, by


def leave_clusters_out_by_smo(
    K: Tensor, y: Tensor, box: Tensor, fit: SVMFit, clusters: Tensor, epsilon: float
) -> RowOutcome:
    """Box all rows of a cluster to zero, seed, and solve: one batch with a problem for each cluster."""
    K, rounding, _ = in_double(K)
    labels, member = torch.unique(clusters, return_inverse=True)
    alpha = (fit.coef * y).clamp_min(0)
    inside = torch.arange(len(labels), device=member.device)[:, None] == member  # (G, n)
    inside = inside.to(y.device)
    boxes = torch.where(inside, 0.0, box)
    start = _start(alpha, y, boxes, near=inside.to(K) @ K)
    end = _solve(K, y, boxes, start, epsilon, SMOOptions())
    member = member.to(y.device)
    rows = torch.arange(len(y), device=y.device)
    u, bias = (end.F + y)[member], end.bias[member]
    outputs = u[rows, rows] + bias
    held = Held(end.alpha[member], u, boxes[member], rows, rounding)
    sign = gap_ball_sign(K, y, held, bias).sign
    by = torch.where(end.violation[member] <= epsilon, code.KKT, code.CUT)
    left = boxes > 0
    positive, negative = ((left & (y == label)).any(1)[member] for label in (1.0, -1.0))
    one_class = ~(positive & negative)
    outputs = torch.where(one_class, torch.where(positive, 1.0, -1.0).to(outputs), outputs)
    by = by.masked_fill(one_class, code.ONE_CLASS)
    certified, columns = (sign * outputs > 0) | one_class, end.columns + _moved(start, alpha)
    return RowOutcome(outputs, certified, by, end.steps[member], columns[member], end.newton[member], None)
