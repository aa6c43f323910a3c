"""svm_loo: leave-one-out of the SVM, exact and certified."""

import torch
from torch import Tensor

from torchloo.guards import Guard
from torchloo.svm.arguments import Caller, checked
from torchloo.svm.fit import solve_problems, trained
from torchloo.svm.outcomes import Stack, assembled, by_groups, in_stacks
from torchloo.svm.path.loo_path import leave_one_out_by_path
from torchloo.svm.records import Exact, RowOutcome, SVMProblem
from torchloo.svm.result import SVMHeldOut
from torchloo.svm.smo.loo_smo import leave_one_out_by_smo
from torchloo.svm.smo.options import SMOOptions, check_options

__all__ = ["leave_one_out", "svm_loo"]


def svm_loo(
    K: Tensor,
    y: Tensor,
    C: float | Tensor,
    weight: Tensor | None = None,
    method: str = "auto",
    values: bool = True,
    epsilon: float = 1e-3,
    rows: Tensor | None = None,
    smo: SMOOptions | None = None,
) -> SVMHeldOut:
    """Leave-one-out decision values of the SVM of `svm`, or only their signs.

    method "auto" and "path" follow the optimum exactly from the full machine to the machine without
    each support vector, all at once (path/), and prove every sign by a duality gap or by the active
    set; what the path leaves open is refitted. With values=False checks 1 to 3 and E2 come first and a
    path ends as soon as the point is known to be an error ("path" goes without the checks but for check 1).
    method "smo" is Algorithm 1 of BOUND with a seeded SMO to `epsilon`; with values=False it may stop before,
    by the gap ball or the dual bound of the paper; `smo` has its variants.

    Leaving out the only row of a class leaves one class: the output is then the remaining label.

    Args:
        K: kernel matrices, (..., n, n).
        y: labels -1 and +1, (..., n).
        C: box bound, a number or (...).
        weight: per-row factor of C, (..., n).
        method: "auto", "path" or "smo".
        values: decision values; else outputs are the labels +-1.
        epsilon: violation of optimality at which method "smo" stops.
        rows: boolean (n,), the rows that are asked for; outputs of the others are NaN.
        smo: variants of method "smo"; None: SMOOptions().

    Returns:
        SVMHeldOut. Outputs of "auto" and "path" with values are differentiable once in K, C, weight
        (Note [gradient]). Cost: one training, 2 n^2 s for s free support vectors, and about
        10 n k flops for each support vector; the backward adds a factorisation of the free set for each.
        Memory about 6 n^2, and 7 n^2 for the backward.
        Reference: Franc, Laskov and Mueller 2008; Cauwenberghs and Poggio 2000.

    >>> K = torch.eye(4, dtype=torch.float64)
    >>> y = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64)
    >>> svm_loo(K, y, C=10.0).errors
    tensor([True, True, True, True])
    """
    return leave_one_out(Caller("svm_loo"), K, y, C, weight, method, values, epsilon, rows, smo)


def leave_one_out(
    caller: Caller,
    K: Tensor,
    y: Tensor,
    C: float | Tensor,
    weight: Tensor | None,
    method: str,
    values: bool,
    epsilon: float,
    rows: Tensor | None,
    smo: SMOOptions | None,
) -> SVMHeldOut:
    """`svm_loo`, with errors in the words of the caller."""
    function = caller.function
    if method not in ("auto", "path", "smo"):
        raise ValueError(f'{function}: method must be "auto", "path" or "smo", got {method!r}')
    if not isinstance(values, bool):
        raise TypeError(f"{function}: values must be True or False, got {values!r}")
    guard = Guard(function)
    guard.positive(epsilon=epsilon)
    guard.check()
    variant = check_options(function, smo, method)
    K, y, box, weight = checked(caller, K, y, C, weight)
    if rows is not None:
        _check_rows(function, rows, y.shape[-1])
    trace = values and torch.is_grad_enabled() and (K.requires_grad or box.requires_grad)

    def without_each_row(problem: SVMProblem, full: Exact) -> RowOutcome:
        return leave_one_out_by_path(problem, full, values, trace, checks=method == "auto", only=rows)

    def by_path(stack: Stack) -> RowOutcome:
        return by_groups(solve_problems(caller, *stack), without_each_row)

    def by_smo(stack: Stack) -> RowOutcome:
        K, y, box, kernel = stack
        fit = trained(caller, *stack)
        K = K if kernel is None else K[kernel]
        return leave_one_out_by_smo(K, y, box, fit, values, epsilon, variant, rows)

    outcomes = in_stacks(by_smo if method == "smo" else by_path, K, y, box, trace)
    return assembled(K, y, box, weight, outcomes, values=values, asked=rows)


def _check_rows(function: str, rows: Tensor, n: int) -> None:
    """An error unless they are a mask of n rows."""
    if not isinstance(rows, Tensor):
        raise TypeError(f"{function}: rows must be a boolean tensor ({n},), got {type(rows).__name__}")
    if rows.dtype != torch.bool or rows.shape != (n,):
        raise ValueError(f"{function}: rows must be boolean ({n},), got {rows.dtype} {tuple(rows.shape)}")
