"""From the final active sets of perturbed paths to the coefficients of the true data."""

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag, pad

from torchloo.svm.exact import Exact
from torchloo.svm.merge import Problem
from torchloo.svm.state import Paths
from torchloo.svm.tableau import Tableau

__all__ = ["final_coefficients", "refined"]

_ROUGH = 1e-10  # of the largest |u|: free variables that miss margin 0 by more are refined


def final_coefficients(problem: Problem, full: Exact, tableau: Tableau, ends: Paths, gone: Tensor) -> Tensor:
    """alpha of each final active set on the unperturbed data, (B, m).

    The inputs that differ from the full solution are those of P, unknown, and the coefficients of r,
    which went down by `gone` (B,), and of variables that went from bound to bound, known.
    """
    m = len(problem.y)
    sign, P = tableau.sign[0], ends.P
    alpha0, g0 = pad(full.alpha, (0, 2)), pad(torch.where(full.free, 0.0, full.margin), (0, 2))
    upper = ends.distance[:, 0].isinf() & ends.distance[:, 1].isfinite()
    bound = torch.where(upper, pad(problem.box, (0, 2)), 0.0)  # (B, m + 2)
    bound.scatter_(1, ends.target[:, None], (full.alpha[ends.target] - gone)[:, None])
    known = torch.where(_changed(ends) | (sign < 0), 0.0, bound - alpha0)
    index = ends.target[:, None]
    if int(known.count_nonzero()) > int(known.gather(1, index).count_nonzero()):
        index = known.abs().topk(int(known.count_nonzero(1).max()), 1).indices
    weights = known.gather(1, index)
    change = sign * embedding_bag(index, tableau.A[0], per_sample_weights=weights, mode="sum")
    wanted = torch.where(sign < 0, bound - alpha0, -g0).gather(1, P)
    change, c = _respond(tableau, ends, change, wanted)
    alpha = torch.where(sign < 0, alpha0 + change, bound)
    alpha.scatter_(1, P, torch.where(sign[P] < 0, bound.gather(1, P), alpha0[P] + c))
    return alpha[:, :m]


def refined(
    problem: Problem, full: Exact, tableau: Tableau, ends: Paths, alpha: Tensor
) -> tuple[Tensor, Tensor]:
    """alpha after a step of refinement where K itself says it is needed, and u = K (alpha * y); (B, m).

    The tableau of a nearly singular free set has lost digits. Residuals are taken from K: margins of
    free variables that are not 0, and y^T alpha; the tableau then only has to correct them.
    """
    y, K = problem.y, problem.K
    change = (alpha - full.alpha) * y
    moved = (change != 0).any(0).nonzero()[:, 0]
    u = K @ (full.alpha * y) + change[:, moved] @ K[moved]
    free = (_changed(ends) ^ (tableau.sign[0] < 0))[:, :-2]
    free.scatter_(1, ends.target[:, None], False)
    free = free.to(u)
    count = free.sum(1).clamp_min(1)
    for _ in range(2):
        miss = (y - u).mul_(free)
        bias = miss.sum(1) / count
        residual = miss.sub_(bias[:, None] * free).mul_(y)
        size, scale = (torch.linalg.vector_norm(x, torch.inf, 1) for x in (residual, u))
        rough = (size > _ROUGH * (1 + scale)) & ~ends.failed
        rows = rough.nonzero()[:, 0]
        if not len(rows):
            break
        step = _correction(problem, tableau, ends.take(rows), alpha[rows], residual[rows]) * free[rows]
        alpha[rows] += step
        u[rows] = (alpha[rows] * y) @ K
    return alpha, u


def _correction(problem: Problem, tableau: Tableau, ends: Paths, alpha: Tensor, residual: Tensor) -> Tensor:
    """Change of the free alpha that gives margins `residual` back and makes y^T alpha = 0, (B, m)."""
    sign, P = tableau.sign[0], ends.P
    residual = pad(residual, (0, 2))
    S = (sign < 0).nonzero()[:, 0]
    known = residual.masked_fill(_changed(ends), 0)[:, S]
    change = sign * (known @ tableau.A[0][S]) - (alpha @ problem.y)[:, None] * tableau.equality[0]
    wanted = torch.where(sign < 0, 0.0, residual).gather(1, P)
    change, c = _respond(tableau, ends, change, wanted)
    return change.scatter(1, P, c)[:, :-2]


def _changed(ends: Paths) -> Tensor:
    """Mask of the indices in P, (B, m + 2)."""
    return torch.zeros_like(ends.distance[:, 0], dtype=torch.bool).scatter_(1, ends.P, True)


def _respond(tableau: Tableau, ends: Paths, change: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs c (B, k) of P that bring its outputs from `change` to `wanted`, and all outputs after them."""
    A, sign, P = tableau.A[0], tableau.sign[0], ends.P
    padded = change.shape[1] - 2 <= P
    rhs = (sign[P] * (wanted - change.gather(1, P))).masked_fill(padded, 0)[:, :, None]
    A_PP = A[P[:, :, None], P[:, None, :]]
    c = ends.H @ rhs
    for _ in range(2):  # H has seen many updates: let A_PP itself have the last word
        c = c + ends.H @ (rhs - A_PP @ c)
    c = c[:, :, 0]
    return change + sign * embedding_bag(P, A, per_sample_weights=c, mode="sum"), c
