"""svm_lco: leave-cluster-out of the SVM."""

from functools import partial

import torch
from torch import Tensor

from torchloo.guards import Guard, host_labels
from torchloo.svm import result as code
from torchloo.svm.arguments import Caller, checked
from torchloo.svm.fit import solve_problems
from torchloo.svm.gradient import Deferred, HeldOutMachines, in_parts_of_rows
from torchloo.svm.outcomes import Stack, assembled, by_groups, in_stacks
from torchloo.svm.proof.active import proved_sign
from torchloo.svm.proof.certify import Held, held_out_bias
from torchloo.svm.records import Exact, RowOutcome, SVMProblem
from torchloo.svm.result import SVMHeldOut
from torchloo.svm.smo.loo_smo import seed_without
from torchloo.svm.smo.options import SMOOptions
from torchloo.svm.smo.rounds import SMOState, smo
from torchloo.svm.solve.exact import ATTEMPTS, solve_from
from torchloo.svm.solve.newton import Sets
from torchloo.svm.solve.smaller import left_of, solve_smaller
from torchloo.svm.stacked import at_once
from torchloo.svm.tolerances import CLOSE, ROUNDING, is_free

__all__ = ["leave_clusters_out", "svm_lco"]

_TOGETHER = 2**22  # entries of the solutions that are judged at once, one for each row
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
        differentiable once in K, C and weight (Note [gradient]). Cost: one training, and a warm one for
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
    K, y, box, weight = checked(caller, K, y, C, weight)
    labels = torch.from_numpy(host_labels(function, clusters, y.shape[-1]))
    if len(labels.unique()) < 2:
        raise ValueError(
            f"{function}: clusters must leave some rows in, got one cluster that holds every row"
        )
    trace = torch.is_grad_enabled() and (K.requires_grad or box.requires_grad)

    epsilon_of_smo = epsilon if method == "smo" else None
    names, member = torch.unique(labels.to(y.device), return_inverse=True)

    def without_each(problem: SVMProblem, full: Exact) -> RowOutcome:
        return _without_clusters(problem, full, member, len(names), epsilon_of_smo, trace)

    def work(stack: Stack) -> RowOutcome:
        return by_groups(solve_problems(caller, *stack), without_each)

    return assembled(K, y, box, weight, in_stacks(work, K, y, box, trace), labels)


def _without_clusters(
    problem: SVMProblem, full: Exact, member: Tensor, count: int, epsilon: float | None, trace: bool
) -> RowOutcome:
    """Every row of T machines by the one without its cluster, exact or from an SMO that stops at `epsilon`.

    Clusters have numbers `member` (n,) below `count`. The N = T `count` machines are in the order of the T.
    """
    size, m = problem.y.shape
    place = m * member + problem.variable
    gone = problem.y.new_zeros(size, count * m).scatter_add_(1, place, problem.row_box).view(-1, m)
    every = torch.arange(size, device=gone.device)
    table = every.repeat_interleave(count)  # (N,)
    boxes = left_of(problem.box[table], gone)
    left, positive = boxes > 0, problem.y[table] > 0
    both = (left & positive).any(1) & (left & ~positive).any(1)
    alpha, by = torch.zeros_like(boxes), torch.full_like(table, code.ONE_CLASS)
    effort = table.new_zeros(3, len(table))
    rows = both.nonzero()[:, 0]
    if rows.numel():
        of, box = table[rows], boxes[rows]
        near = problem.kernels(of).product((gone[rows] > 0).to(box), problem.K)
        end = _nearly_without(problem, full, of, box, near, epsilon)
        alpha[rows] = end.alpha if epsilon is not None else _exactly_without(problem, full, of, end)
        effort[:, rows] = torch.stack([end.steps, end.columns, end.newton])
        ended = code.REFIT if epsilon is None else torch.where(end.violation <= epsilon, code.KKT, code.CUT)
        by[rows] = ended
    machine = (count * every[:, None] + member).flatten()  # of each row
    target = problem.variable.flatten()
    outputs, proved = _judged(problem, alpha, boxes, table, machine, target)
    proved |= ~both[machine]
    machines = None
    if trace:
        known = alpha.view(size, count, m), boxes.view(size, count, m), both.view(size, count), member
        machines = [_deferred(problem, *known, some) for some in in_parts_of_rows(problem)]
    found = [x.view_as(problem.variable) for x in (outputs, proved, by[machine], *effort[:, machine])]
    return RowOutcome.of(found, machines)


def _nearly_without(
    problem: SVMProblem, full: Exact, table: Tensor, boxes: Tensor, near: Tensor, epsilon: float | None
) -> SMOState:
    """Machines `table` (B,) of the T for smaller boxes (B, m) by one SMO; each has both classes left.

    All are seeded from the full machines: variables with the largest `near` (B, m) take over first what goes,
    and the columns of K count that this has taken. To `epsilon`, or as near as pays before exact equations.
    """
    y, before = problem.y[table], full.alpha.clamp_min(0)[table]
    start = seed_without(before, y, boxes, near)
    kernel = problem.kernels(table).table
    if epsilon is None:
        end = smo(problem.K, y, boxes, start, CLOSE, kernel, _NEARLY)
    else:
        end = smo(problem.K, y, boxes, start, epsilon, kernel)
    end.columns = end.columns + (start != before).sum(1)
    return end


def _exactly_without(problem: SVMProblem, full: Exact, table: Tensor, end: SMOState) -> Tensor:
    """Exact coefficients (B, m) of machines of the T, from the sets of an SMO, or anew where it failed.

    For 50 clusters of diabetis, RBF, C = 1 an SMO first takes a tenth of the time of solving each anew.
    """

    def from_sets(which: Tensor, attempts: int, smaller: SVMProblem, part: Tensor, V: Tensor) -> Exact:
        rows = which[part]
        alpha, box = end.alpha[rows].gather(1, V), smaller.box
        sets = Sets(alpha, end.bias[rows], is_free(alpha, box), alpha >= box)
        return solve_from(smaller, sets, attempts)

    # Where homotopies have failed the full machine they would fail these too, and take their time.
    optimal, close = full.optimal[table], end.violation <= CLOSE
    alpha, rough = end.alpha, close & (end.violation > ROUNDING)
    for which, attempts in ((rough & optimal, ATTEMPTS), (rough & ~optimal, 1), (~close, 0)):
        rows = which.nonzero()[:, 0]
        if rows.numel():
            solve = partial(from_sets, rows, attempts) if attempts else None
            known = table[rows], end.box[rows], alpha[rows], end.violation[rows]
            alpha = alpha.index_copy(0, rows, solve_smaller(problem, *known, solve))
    return alpha


def _judged(
    problem: SVMProblem, alpha: Tensor, boxes: Tensor, table: Tensor, machine: Tensor, target: Tensor
) -> tuple[Tensor, Tensor]:
    """Decision values of rows, and which signs are proved, (R,) both.

    By solutions (N, m) of the problems `table` (N,): row i by solution machine[i], at variable target[i].
    """
    held = Held.of(problem, table, alpha, boxes, torch.zeros_like(table))
    bias, _ = held_out_bias(held)
    outputs, proved = [], []
    each = max(1, at_once(alpha, _TOGETHER) // alpha.shape[1])
    for own, variables in zip(machine.split(each), target.split(each), strict=True):
        its = held.take(own)._replace(target=variables)
        f = its.of_target(its.u) + bias[own]
        outputs.append(f)
        proved.append(proved_sign(problem.K, its, bias[own]) * f > 0)
    return torch.cat(outputs), torch.cat(proved)


def _deferred(
    problem: SVMProblem, alpha: Tensor, boxes: Tensor, both: Tensor, member: Tensor, some: slice
) -> Deferred:
    """The machines (T, G, m) of some problems for a backward; those of one class only depend on nothing."""
    every = torch.arange(len(problem.y), device=member.device)[some]

    def enter(machines: HeldOutMachines) -> None:
        count = both.shape[1]
        rows = both[some][:, member].flatten().nonzero()[:, 0]
        which = count * (rows // len(member)) + member[rows % len(member)]
        table = (every - some.start).repeat_interleave(count)
        parts = alpha[some].flatten(0, 1), boxes[some].flatten(0, 1)
        machines.enter(rows, which, table, *parts, member)

    return Deferred(problem.take(some), every, enter)
