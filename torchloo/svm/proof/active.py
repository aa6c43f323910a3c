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

from torchloo.svm.proof.certify import Held, gap_ball_sign, held_out_bias
from torchloo.svm.solve.accurate import in_parts
from torchloo.svm.solve.systems import Bordered

__all__ = ["judged", "proved_sign", "sign_by_active_set", "value_error"]

_USEFUL = 0.5  # q above which R is no inverse


def proved_sign(K: Tensor, y: Tensor, held: Held, bias: Tensor) -> Tensor:
    """The sign of f*(x_r) by the gap ball or else by the active set, +1, -1 or 0 where it is open, (B,)."""
    sign = gap_ball_sign(K, y, held, bias).sign
    rows = (sign == 0).nonzero()[:, 0]
    if len(rows):
        sign[rows], _ = sign_by_active_set(K, y, held.take(rows), bias[rows])
    return sign


def judged(K: Tensor, y: Tensor, held: Held) -> tuple[Tensor, Tensor]:
    """f(x_r) of each solution with the bias that it asks for, and whether its sign is proved, (B,) both."""
    bias = held_out_bias(y, held)
    f = held.of_target(held.u) + bias
    return f, proved_sign(K, y, held, bias) * f > 0


def sign_by_active_set(K: Tensor, y: Tensor, held: Held, bias: Tensor) -> tuple[Tensor, Tensor]:
    """The sign of f*(x_r), 0 where it is open, and how far f(x_r) may be off, (B,) both."""
    f, error = held.of_target(held.u) + bias, held.of_target(value_error(K, y, held, bias))
    return f.sign() * (f.abs() > error), error


def value_error(K: Tensor, y: Tensor, held: Held, bias: Tensor) -> Tensor:
    """How far each u + b may be from its value at the optimum, (B, m); infinite if nothing is proved.

    K a is summed in two parts: leading bits, so few that every sum of their products is exact, and the
    rest, whose rounding does not matter. Only the support vectors of the solutions have a part in it.

    Cost 6 m l + s^3 for each solution with s free variables; l of the m variables are support vectors of any
    solution. Memory 3 m l + B m.
    """
    support = (held.alpha != 0).any(0).nonzero()[:, 0]
    if not len(support):
        return torch.full_like(held.u, torch.inf)
    unit = torch.finfo(K.dtype).eps / 2
    of_sum = (len(support) + 8) * unit  # of the sum of the sizes, in any order
    K_l = K.index_select(0, support).T  # (m, l)
    part, of_a = in_parts(K_l), in_parts((held.alpha * y).index_select(1, support))
    lead, size, size_rest = of_a.lead @ part.lead.T, of_a.lead.abs().sum(1), of_a.rest.abs().sum(1)
    rest = of_a.lead @ part.rest.T + of_a.rest @ K_l.T
    box, miss = held.weight(), y - bias[:, None] - lead - rest
    rounding = of_sum * (size[:, None] * part.most.T + size_rest[:, None] * part.largest.T)
    rounding += 8 * unit * (1 + bias.abs()[:, None] + lead.abs())
    rounding += (held.alpha @ held.rounding)[:, None] * held.rounding
    imbalance = (of_a.lead.sum(1) + of_a.rest.sum(1)).abs() * (1 + unit) + of_sum * size_rest
    rows = zip(held.alpha, box, miss, rounding, imbalance, strict=True)
    each = [_of_one(K, y, held.rounding, *row) for row in rows]
    return torch.stack(each) + (held.u - lead - rest).abs()


def _of_one(
    K: Tensor,
    y: Tensor,
    d: Tensor,
    alpha: Tensor,
    box: Tensor,
    miss: Tensor,
    rounding: Tensor,
    imbalance: Tensor,
) -> Tensor:
    """`value_error` of one solution from its y - f, d of K, e, and what y^T alpha may be, (m,)."""
    nothing = torch.full_like(miss, torch.inf)
    S = ((alpha > 0) & (alpha < box)).nonzero()[:, 0]
    if not len(S):
        return nothing
    change = _change(K[S][:, S], d[S], torch.cat([imbalance[None], miss[S].abs() + rounding[S]]))
    if change is None:
        return nothing
    error = K[S].abs().T @ change[1:] + d * (d[S] @ change[1:]) + change[0] + rounding
    to_bound = torch.minimum(alpha, box - alpha)[S]
    on_side = torch.where(alpha > 0, y * miss, -y * miss).index_fill(0, S, torch.inf)
    on_side = on_side.masked_fill(box <= 0, torch.inf)  # no side is the wrong one
    proved = bool((to_bound > change[1:]).all()) and bool((on_side > error).all())
    return error if proved else nothing


def _change(K_free: Tensor, d: Tensor, residual: Tensor) -> Tensor | None:
    """The bound of |dz| of Note [active sets] for |rho| + e (s + 1,); None where R is no inverse."""
    try:
        corner, edge, inner = (x[0] for x in Bordered(K_free[None]).inverse())
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        return None
    s = len(edge)
    R, M = K_free.new_empty(s + 1, s + 1), K_free.new_ones(s + 1, s + 1)
    R[0, 0], R[0, 1:], R[1:, 0], R[1:, 1:] = corner, edge, edge, inner
    M[0, 0], M[1:, 1:] = 0, K_free
    wrong = (R @ M).diagonal_scatter((R * M.T).sum(1) - 1).abs()
    rounding = (s + 8) * torch.finfo(R.dtype).eps / 2 * (R.abs() @ M.abs())
    q = float(((wrong + rounding).sum(1) + (R[:, 1:].abs() @ d) * d.sum()).max())
    if not q < _USEFUL:
        return None
    t = R.abs() @ residual
    return t + q / (1 - q) * t.max()
