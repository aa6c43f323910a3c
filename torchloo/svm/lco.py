"""svm_lco: leave-cluster-out of the SVM."""

from functools import partial

import torch
from torch import Tensor

from torchloo.guards import Guard, host_labels
from torchloo.svm import result as code
from torchloo.svm.arguments import Caller, checked
from torchloo.svm.fit import solve_problems, trained
from torchloo.svm.gradient import Deferred, HeldOutMachines
from torchloo.svm.outcomes import Stack, assembled, in_stacks
from torchloo.svm.proof.active import proved_sign
from torchloo.svm.proof.certify import Held, held_out_bias
from torchloo.svm.records import Exact, RowOutcome, SVMProblem
from torchloo.svm.result import SVMHeldOut
from torchloo.svm.smo.loo_smo import leave_clusters_out_by_smo, seed_without
from torchloo.svm.smo.options import SMOOptions
from torchloo.svm.smo.rounds import smo
from torchloo.svm.solve.exact import ATTEMPTS, Sets, solve_from
from torchloo.svm.solve.smaller import left_of, solve_smaller
from torchloo.svm.tolerances import CLOSE, between_bounds

__all__ = ["leave_clusters_out", "svm_lco"]

_EXACT = 1e-12  # violation of an SMO that counts as none: rounding
_NEARLY = SMOOptions(most_rounds=200, patience=4)  # what needs more is left to the interior point


def svm_lco(
    K: Tensor,
    y: Tensor,
    C: float | Tensor,
    clusters: object,
    weight: Tensor | None = None,
    method: str = "auto",
    epsilon: float = 1e-3,
) -> SVMHeldOut:
    """Decision values at each cluster of the SVM that never saw it.

    method "auto" boxes all rows of a cluster to zero, seeds from the full machine, solves all clusters
    as one batch by SMO, and then exactly from the sets it found; "smo" stops at `epsilon`. If one
    class only is left, outputs are its label.

    Args:
        K, y, C, weight: as in `svm_loo`.
        clusters: integer labels of what is left out together, (n,), on the host.
        method: "auto" or "smo".
        epsilon: violation of optimality at which method "smo" stops.

    Returns:
        SVMHeldOut, certified where the duality gap or the active set proves the sign. Outputs of "auto" are
        differentiable in K, C and weight (Note [gradient]). Cost: one training, and a warm one for
        each cluster. Memory about 6 n^2.
    """
    return leave_clusters_out(Caller("svm_lco"), K, y, C, weight, clusters, method, epsilon)


def leave_clusters_out(
    caller: Caller,
    K: Tensor,
    y: Tensor,
    C: float | Tensor,
    weight: Tensor | None,
    clusters: object,
    method: str,
    epsilon: float,
) -> SVMHeldOut:
    """`svm_lco`, with errors in the words of the caller."""
    function = caller.function
    if method not in ("auto", "smo"):
        raise ValueError(f'{function}: method must be "auto" or "smo", got {method!r}')
    guard = Guard(function)
    guard.positive(epsilon=epsilon)
    guard.check()
    K, y, C, weight = checked(caller, K, y, C, weight)
    labels = torch.from_numpy(host_labels(function, clusters, y.shape[-1]))
    if len(labels.unique()) < 2:
        raise ValueError(
            f"{function}: clusters must leave some rows in, got one cluster that holds every row"
        )
    box = C[..., None] * weight
    trace = torch.is_grad_enabled() and (K.requires_grad or box.requires_grad)

    def work(stack: Stack) -> RowOutcome:
        return _outcome(caller, stack, labels, method, epsilon, trace)

    outcomes = in_stacks(work, K, y, box, trace, most=1)
    return assembled(K, y, box, weight, outcomes, labels)


def _outcome(
    caller: Caller, stack: Stack, labels: Tensor, method: str, epsilon: float, trace: bool
) -> RowOutcome:
    """Leave-cluster-out of one problem."""
    K, y, box = stack[0], stack[1].double(), stack[2].double()
    if method == "smo":
        full = trained(caller, K, y, box).machine(0)
        found = leave_clusters_out_by_smo(K[0], y[0], box[0], full, labels, epsilon)
        return RowOutcome.of([x[None] for x in found[:6]], None)
    return _leave_clusters_out_exactly(caller, K, y, box, labels, trace)


def _leave_clusters_out_exactly(
    caller: Caller, K: Tensor, y: Tensor, box: Tensor, clusters: Tensor, trace: bool
) -> RowOutcome:
    """Every row by the exact machine without its cluster."""
    ((_, stacked, full),) = solve_problems(caller, K, y, box)
    problem = stacked.one(0)
    v = problem.variable
    names, member = torch.unique(clusters.to(y.device), return_inverse=True)
    gone = y.new_zeros(len(names), len(problem.y))
    gone.index_put_((member, v), problem.row_box, accumulate=True)  # (G, m)
    boxes = left_of(problem.box, gone)
    alpha, counts = torch.zeros_like(boxes), torch.zeros(3, len(names), dtype=torch.long, device=y.device)
    both = _both_classes(problem.y, boxes)
    if bool(both.any()):
        near = (gone[both] > 0).to(y) @ problem.K
        alpha[both], *effort = _solve_without(stacked, full, boxes[both], near)
        counts[:, both] = torch.stack(effort)
    outputs, certified = _outputs(problem, alpha, boxes, member)
    by = torch.full_like(member, code.REFIT).masked_fill(~both[member], code.ONE_CLASS)
    machines = Deferred(problem) if trace else None
    if machines is not None:
        machines.add(lambda machines: _enter(machines, problem, alpha, boxes, member, both))
    iterations, columns, newton = counts[:, member]
    found = [x[None] for x in (outputs, certified, by, iterations, columns, newton)]
    return RowOutcome.of(found, None if machines is None else [machines])


def _solve_without(
    problem: SVMProblem, full: Exact, boxes: Tensor, near: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The machines of one problem for smaller boxes (B, m), exactly; each has both classes left.

    Their coefficients (B, m), and what the SMO has taken for each: pairs, kernel columns, those of its seeds
    among them, and Newton steps, (B,).

    All are seeded from the full machine (variables with the largest `near` (B, m) take over first what goes),
    solved nearly by one batched SMO, and then exactly from its sets, or anew where it has not come close. For
    50 clusters of diabetis, RBF, C = 1 this takes a tenth of the time of solving each anew.
    """
    y, before = (x.expand_as(boxes) for x in (problem.y, full.alpha.clamp_min(0)))
    start = seed_without(before, y, boxes, near)
    end = smo(problem.K, y, boxes, start, CLOSE, options=_NEARLY)
    # Where homotopies have failed the full machine they would fail these too, and take their time.
    attempts = ATTEMPTS if bool(full.optimal) else 1

    def from_sets(rows: Tensor, smaller: SVMProblem, part: Tensor, V: Tensor) -> Exact:
        alpha, box = end.alpha[rows[part]].gather(1, V), smaller.box
        sets = Sets(alpha, end.bias[rows[part]], between_bounds(alpha, box), alpha >= box)
        return solve_from(smaller, sets, attempts)

    alpha, close = end.alpha, end.violation <= CLOSE
    for which, solve in ((close & (end.violation > _EXACT), from_sets), (~close, None)):
        rows = which.nonzero()[:, 0]
        if rows.numel():
            known = end.table[rows], boxes[rows], alpha[rows], end.violation[rows]
            exact = solve_smaller(problem, *known, solve and partial(solve, rows))
            alpha = alpha.index_copy(0, rows, exact)
    return alpha, end.steps, end.columns + (start != before).sum(1), end.newton


def _both_classes(y: Tensor, boxes: Tensor) -> Tensor:
    """Whether each of the boxes (G, m) leaves something of both classes, (G,)."""
    left = boxes > 0
    return (left & (y > 0)).any(1) & (left & (y < 0)).any(1)


def _outputs(problem: SVMProblem, alpha: Tensor, boxes: Tensor, member: Tensor) -> tuple[Tensor, Tensor]:
    """Decision values of the rows by machines (G, m), and whether their signs are proved, (n,) both."""
    y, v = problem.y, problem.variable
    u = (alpha * y) @ problem.K
    first = torch.zeros(len(alpha), dtype=torch.long, device=y.device)
    bias, _ = held_out_bias(y, Held(alpha, u, boxes, first, problem.rounding))
    f = u[member, v] + bias[member]
    held = Held(alpha[member], u[member], boxes[member], v, problem.rounding)
    sign = proved_sign(problem.K, y, held, bias[member])
    one_class = ~_both_classes(y, boxes)
    positive_left = ((boxes > 0) & (y > 0)).any(1)
    remaining = torch.where(positive_left, 1.0, -1.0).to(f)
    f = torch.where(one_class[member], remaining[member], f)
    return f, (sign * f > 0) | one_class[member]


def _enter(
    machines: HeldOutMachines, problem: SVMProblem, alpha: Tensor, boxes: Tensor, member: Tensor, both: Tensor
) -> None:
    """Machines for the backward; those of one class only depend on nothing."""
    rows = both[member].nonzero()[:, 0]
    machines.enter(problem, rows, member[rows], alpha, boxes, member)
