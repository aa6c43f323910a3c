"""Proof that the active set of a solution is optimal, and how far its decision values can be off.

Note [active sets]
The gap of Note [gap ball] counts what rounding does to the margins of free variables C times: for a
large C the ball is wide though the solution is not off. But where its active set is optimal, with
free set S, the coefficients a = alpha * y and the bias solve

    M z = [ -1^T a_U ; y_S - K_SU a_U ],   z = [ b ; a_S ],   M = [ 0 1^T ; 1 K_SS ]

and only rounding can be in the way. Let rho be the residual, e what rounding may have done to it, and
R nearly the inverse of M, with row sums of |I - R M| of at most q < 1. Then the exact z is off by

    |dz| <= t + q / (1 - q) max t,    t = |R| (|rho| + e)

at most, and the decision value of point i by |K_iS| |da| + |db| + e_i. If no such change takes a free
coefficient to its bound, nor the margin of another variable to its wrong side, then the active set
is the optimal one, and these bounds hold for the optimum.

Rounding of K, by at most d_i d_j here, Note [rounding of K], adds d_i (d . alpha) to e_i,
|R_iS| d_S (d . 1_S) to the row sums of |I - R M|, and d_i d_S to |K_iS|.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchloo.svm.proof.certify import Held, gap_ball_sign, held_out_bias
from torchloo.svm.solve.systems import Bordered, bordered_matrix, in_parts
from torchloo.svm.stacked import Tables, at_once, columns_of, rows_of, set_of, times_vector
from torchloo.svm.tolerances import IS_INVERSE, is_free

__all__ = ["judged", "proved_sign", "sign_by_active_set", "value_error"]

_TOGETHER = 2**21  # entries of the rows of K of the free sets that are looked at at once


def proved_sign(K: Tensor, held: Held, bias: Tensor, is_midpoint: Tensor | None = None) -> Tensor:
    """The sign of f*(x_r) by the gap ball or else by the active set, +1, -1 or 0 where it is open, (B,)."""
    sign = gap_ball_sign(K, held, bias, is_midpoint).sign
    rows = (sign == 0).nonzero()[:, 0]
    if rows.numel():
        sign[rows], _ = sign_by_active_set(K, held.take(rows), bias[rows])
    return sign


def judged(K: Tensor, held: Held) -> tuple[Tensor, Tensor]:
    """f(x_r) of each solution with the bias that it asks for, and whether its sign is proved, (B,) both."""
    bias, is_midpoint = held_out_bias(held)
    f = held.of_target(held.u) + bias
    return f, proved_sign(K, held, bias, is_midpoint) * f > 0


def sign_by_active_set(K: Tensor, held: Held, bias: Tensor) -> tuple[Tensor, Tensor]:
    """The sign of f*(x_r), 0 where it is open, and how far f(x_r) may be off, (B,) both."""
    f, error = held.of_target(held.u) + bias, held.of_target(value_error(K, held, bias))
    return f.sign() * (f.abs() > error), error


def value_error(K: Tensor, held: Held, bias: Tensor) -> Tensor:
    """How far each u + b may be from its value at the optimum, (B, m); infinite if nothing is proved.

    K is as in `gap_ball_sign`. K a is summed in two parts: leading bits, so few that every sum of
    their products is exact, and the rest, whose rounding does not matter. Only the support vectors of the
    solutions have a part in it.

    Cost 6 m l + s^3 for each solution with s free variables; l of the m variables are support vectors of any
    solution. Memory 3 m l + B m.
    """
    K, tables = _kernels(K, held)
    support = (held.alpha != 0).any(0).nonzero()[:, 0]
    if not len(support):
        return torch.full_like(held.u, torch.inf)
    unit = torch.finfo(K.dtype).eps / 2
    of_sum = (len(support) + 8) * unit  # of the sum of the sizes, in any order
    K_l = K.index_select(1, support)  # (T, l, m)
    part, of_a = in_parts(K_l.mT), in_parts((held.alpha * held.y).index_select(1, support))
    lead = tables.product(of_a.lead, part.lead.mT)
    size, size_rest = (x.abs().sum(1, keepdim=True) for x in (of_a.lead, of_a.rest))
    rest = tables.product(of_a.lead, part.rest.mT) + tables.product(of_a.rest, K_l)
    most, largest = tables.each(part.most[..., 0]), tables.each(part.largest[..., 0])
    miss = held.y - bias[:, None] - lead - rest
    rounding = of_sum * (size * most + size_rest * largest)
    rounding += 8 * unit * (1 + bias.abs()[:, None] + lead.abs())
    rounding += (held.alpha * held.rounding).sum(1, keepdim=True) * held.rounding
    imbalance = (of_a.lead.sum(1) + of_a.rest.sum(1)).abs() * (1 + unit)
    imbalance += of_sum * size_rest[:, 0]
    box, d, y = (x.expand_as(miss) for x in (held.weight(), held.rounding, held.y))
    free = is_free(held.alpha, box)
    most_free = max(1, int(free.sum(1).max()))
    each = max(1, at_once(K, _TOGETHER) // (held.u.shape[1] * most_free))
    fields = (free, y, d, held.alpha, box, miss, rounding, imbalance)
    parts = zip(tables.table.split(each), *(x.split(each) for x in fields), strict=True)
    return torch.cat([_of_sets(K, *part) for part in parts]) + (held.u - lead - rest).abs()


def _kernels(K: Tensor, held: Held) -> tuple[Tensor, Tables]:
    """The kernel matrices that some solution has, (T, m, m), and which of them each has."""
    if len(K) == 1:
        return K, Tables(held.table, 1)
    used, table = held.table.unique(return_inverse=True)
    return K[used], Tables(table, len(used))


def _of_sets(
    K: Tensor,
    table: Tensor,
    free: Tensor,
    y: Tensor,
    d: Tensor,
    alpha: Tensor,
    box: Tensor,
    miss: Tensor,
    rounding: Tensor,
    imbalance: Tensor,
) -> Tensor:
    """`value_error` of B solutions from their y - f, d of K, e, and what y^T alpha may be, (B, m)."""
    S, real = set_of(free)  # (B, s)
    if not S.shape[1]:
        return torch.full_like(miss, torch.inf)
    K_S = rows_of(K, S, table)  # (B, s, m)
    K_SS = columns_of(K_S, S)
    residual = ((miss.abs() + rounding).gather(1, S)) * real
    d_S = d.gather(1, S) * real
    change, proved = _change(K_SS, real, d_S, torch.cat([imbalance[:, None], residual], 1))
    of_S = change[:, 1:] * real
    of_u = times_vector(K_S.abs().mT, of_S) + d * (d_S * of_S).sum(1, keepdim=True)
    error = of_u + change[:, :1] + rounding
    to_bound = torch.minimum(alpha, box - alpha).gather(1, S)
    on_side = torch.where(alpha > 0, y * miss, -y * miss)
    on_side = on_side.masked_fill(free | (box <= 0), torch.inf)  # no side is the wrong one
    stays_free = ((to_bound > of_S) | ~real).all(1)
    proved &= stays_free & (on_side > error).all(1) & free.any(1)
    return torch.where(proved[:, None], error, torch.inf)


def _change(K_free: Tensor, real: Tensor, d: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """The bound of |dz| of Note [active sets] for |rho| + e (B, s + 1), and where R is an inverse, (B,)."""
    system = Bordered(K_free, real).with_factors()
    corner, edge, inner = system.inverse()
    s = edge.shape[1]
    R, M = pad(inner, (1, 0, 1, 0)), bordered_matrix(K_free, real)
    R[:, 0, 0], R[:, 0, 1:], R[:, 1:, 0] = corner, edge, edge
    R.diagonal(dim1=1, dim2=2)[:, 1:].add_((~real).to(R))
    wrong = R @ M
    wrong.diagonal(dim1=1, dim2=2).copy_((R * M.mT).sum(2) - 1)
    size = R.abs()
    rounding = (s + 8) * torch.finfo(R.dtype).eps / 2 * (size @ M.abs())
    of_rounded_K = times_vector(size[:, :, 1:], d) * d.sum(1, keepdim=True)
    row_sums = (wrong.abs() + rounding).sum(2) + of_rounded_K
    q = row_sums.amax(1, keepdim=True)
    t = times_vector(size, residual)
    is_inverse = (q[:, 0] < IS_INVERSE) & (system.info == 0)
    return t + q / (1 - q) * t.amax(1, keepdim=True), is_inverse
