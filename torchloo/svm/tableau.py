"""One tableau for all leave-one-out problems: the principal pivot transform on the free set.

Note [tableau]
With Q = y y^T * K the optimality conditions of the SVM are linear between two events,

    [0 y^T; y Q] [b; alpha] = [0; 1 + g],   g_i = y_i f_i - 1.

Exchange, for the free set S, the roles of (b, alpha_S) and (0, g_S): with B = {b} u S, N the rest,
R = [0 y_S^T; y_S Q_SS]^-1, Z = R [y_N^T; Q_SN] and T = Q_NN - [y_N^T; Q_SN]^T Z,

    change of (b, alpha_S) =  R  change of (0, g_S)  -  Z  change of alpha_N
    change of g_N          = Z^T change of (0, g_S)  +  T  change of alpha_N

so that, with the symmetric A = [-R Z; Z^T T] and D = -1 on B, +1 on N, *output = D * (A input)*:
the inputs are what the active set holds still (g of the free, alpha of the others), the outputs
what follows. The row of b is never read and is left out. Two more indices are dummies with
zero rows and columns: m pads the change sets, m + 1 is what problems without an event change.
"""

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Tableau", "bordered_inverse", "pivot_transform"]


class Tableau(NamedTuple):
    """A and D of Note [tableau] for T problems of one size."""

    A: Tensor
    """(T, m + 2, m + 2)."""

    sign: Tensor
    """D, (T, m + 2)."""

    equality: Tensor
    """What the outputs do when y^T alpha is moved off 0, (T, m + 2)."""


def bordered_inverse(K_free: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The blocks of [0 1^T; 1 K]^-1 for the free rows: corner (), edge (s,), inner (s, s).

    Inverts the positive definite K + c 1 1^T, c the mean diagonal, which leaves inner and edge
    as they are and lowers the corner by c: one Cholesky.
    """
    c = K_free.diagonal().mean().clamp_min(torch.finfo(K_free.dtype).tiny)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(K_free + c))
    row = inverse.sum(-1)
    total = row.sum()
    return c - 1 / total, row / total, inverse - row[:, None] * (row / total)


def pivot_transform(K: Tensor, y: Tensor, free: Tensor, border: Tensor | None = None) -> Tableau:
    """The tableau of Note [tableau] for the free set given as a mask; K_SS + const must be regular.

    `border` replaces the ones beside K (times y: the coefficients of the equality), for a last
    column that is not a training point. Cost 2 m^2 s for s free variables. Memory: three times that of K.
    """
    m = K.shape[-1]
    order = free.argsort(descending=True, stable=True)  # S, then N
    s = int(free.sum())
    ordered = K.index_select(0, order).index_select(1, order)
    edge_N = K.new_ones(m - s) if border is None else border[order[s:]]
    corner, edge, inner = bordered_inverse(ordered[:s, :s])
    K_SN = ordered[:s, s:]
    Z = torch.addmm(edge[:, None] * edge_N, inner, K_SN)
    Z_b = corner * edge_N + edge @ K_SN  # the row of b
    T = ordered[s:, s:].addr_(edge_N, Z_b, alpha=-1)
    T.addmm_(K_SN.T, Z, alpha=-1)
    ordered[:s, :s] = -inner
    ordered[:s, s:], ordered[s:, :s] = Z, Z.T
    y_ordered = y[order]
    ordered.mul_(y_ordered).mul_(y_ordered[:, None])
    back = order.argsort()
    A = K.new_zeros(m + 2, m + 2)
    A[:m, :m] = ordered.index_select(0, back).index_select(1, back)
    sign = K.new_ones(m + 2)
    sign[:m].masked_fill_(free, -1)
    equality = K.new_zeros(m + 2)
    equality[order] = y_ordered * torch.cat([edge, Z_b])
    return Tableau(A[None], sign[None], equality[None])
