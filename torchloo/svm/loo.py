"""svm_loo: leave-one-out of the SVM, exact and certified."""

import torch
from torch import Tensor

from torchloo.svm.fit import checked, solve_problem, svm
from torchloo.svm.gradient import outputs_with_gradient
from torchloo.svm.held_out import SVMHeldOut
from torchloo.svm.loo_path import RowOutcome, leave_one_out_by_path
from torchloo.svm.loo_smo import leave_one_out_by_smo

__all__ = ["svm_loo"]

_TOGETHER = 2**20  # entries of kernel matrices


def svm_loo(
    K: Tensor,
    y: Tensor,
    C: float | Tensor,
    weight: Tensor | None = None,
    method: str = "auto",
    values: bool = True,
    epsilon: float = 1e-3,
) -> SVMHeldOut:
    """Leave-one-out decision values of the SVM of `svm`, or only their signs.

    method "auto" and "path" follow the optimum exactly from the full machine to the machine without
    each support vector, all at once (path.py), and prove every sign by a duality gap; what the path
    leaves open is refitted. With values=False checks 1 to 3 and E2 come first and a path ends as
    soon as the point is known to be an error ("path" goes without the checks but for check 1).
    method "smo" is Algorithm 1 of BOUND with a seeded SMO to `epsilon`, and with values=False its
    dual bound.

    Leaving out the only row of a class leaves one class: the output is then the remaining label.

    Args:
        K: kernel matrices, (..., n, n).
        y: labels -1 and +1, (..., n).
        C: box bound, a number or (...).
        weight: per-row factor of C, (..., n).
        method: "auto", "path" or "smo".
        values: decision values; else outputs are the labels +-1.
        epsilon: violation of optimality at which method "smo" stops.

    Returns:
        SVMHeldOut. Outputs of "auto" and "path" with values are differentiable in K, C and weight
        (Note [gradient]). Cost: one training, 2 n^2 s for s free support vectors, and about
        10 n k flops for each support vector. Memory about 6 n^2.
        Reference: Franc, Laskov and Mueller 2008; Cauwenberghs and Poggio 2000.

    >>> K = torch.eye(4, dtype=torch.float64)
    >>> y = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64)
    >>> svm_loo(K, y, C=10.0).errors
    tensor([True, True, True, True])
    """
    if method not in ("auto", "path", "smo"):
        raise ValueError(f'svm_loo: method must be "auto", "path" or "smo", got {method!r}')
    if not epsilon > 0:
        raise ValueError(f"svm_loo: epsilon must be positive, got {epsilon}")
    K, y, C, weight = checked("svm_loo", K, y, C, weight)
    box = C[..., None] * weight
    batch, n = y.shape[:-1], y.shape[-1]
    problems = list(zip(K.reshape(-1, n, n), y.reshape(-1, n), box.reshape(-1, n), strict=True))
    few = max(1, _TOGETHER // n**2)  # at a time: larger batches only leave the cache
    with torch.no_grad():
        parts = (problems[i : i + few] for i in range(0, len(problems), few))
        outcomes = [outcome for part in parts for outcome in _outcomes(part, method, values, epsilon)]
    outputs = [
        _with_gradient(*problem[::2], outcome) for problem, outcome in zip(problems, outcomes, strict=True)
    ]
    rows = ((f, *outcome[1:5]) for f, outcome in zip(outputs, outcomes, strict=True))
    f, certified, resolved_by, iterations, columns = (
        torch.stack(field).reshape(*batch, n) for field in zip(*rows, strict=True)
    )
    return SVMHeldOut.build(y, weight, f, certified, resolved_by, iterations, columns, values=values)


def _outcomes(
    problems: list[tuple[Tensor, Tensor, Tensor]], method: str, values: bool, epsilon: float
) -> list[RowOutcome]:
    """Leave-one-out of problems K (n, n), y (n,), box (n,); the paths of all are followed together."""
    doubles = [tuple(x.double() for x in problem) for problem in problems]
    if method == "smo":
        return [
            leave_one_out_by_smo(K, y, box, svm(K, y, 1.0, box), values, epsilon) for K, y, box in doubles
        ]
    machines = [solve_problem("svm_loo", *problem) for problem in doubles]
    trace = values and any(K.requires_grad or box.requires_grad for K, _, box in problems)
    return leave_one_out_by_path(machines, values, trace, checks=method == "auto")


def _with_gradient(K: Tensor, box: Tensor, outcome: RowOutcome) -> Tensor:
    outputs = outcome.outputs.to(K.dtype)
    if outcome.machines is None or not torch.is_grad_enabled():
        return outputs
    return outputs_with_gradient(K, box, outputs, outcome.machines)
