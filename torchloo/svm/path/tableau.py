"""One tableau for all leave-one-out problems: the principal pivot transform on the free set.

Note [tableau]
With Q = y y^T * K the optimality conditions of the SVM are linear between two events,

    [0 y^T; y Q] [b; alpha] = [0; 1 + g],   g_i = y_i f_i - 1.

Exchange, for the free set S, the roles of (b, alpha_S) and (0, g_S): with N the bounded variables,
R = [0 y_S^T; y_S Q_SS]^-1, Z = R [y_N^T; Q_SN] and T = Q_NN - [y_N^T; Q_SN]^T Z,

    change of (b, alpha_S) =  R  change of (0, g_S)  -  Z  change of alpha_N
    change of g_N          = Z^T change of (0, g_S)  +  T  change of alpha_N

so that, with the symmetric A = [-R Z; Z^T T] and D = -1 on {b} u S, +1 on N, *output = D * (A input)*:
the inputs are what the active set holds still (g of the free, alpha of the others), the outputs
what follows. Row and column of b are left out of A; what the outputs do when the 0 above is moved, the
column R_Sb and Z_b^T, is kept apart as `equality`.

Only variables with a margin near 0 ever change their role, so only they, the free set among them,
need a column: the tableau holds those l columns of A, in an order that begins with the free set. Two
more have zeros: column l, the dummy, pads the change sets, and l + 1, nobody, is what problems without
an event change. The rows are in the same order, and those of the variables without a column come last.
"""

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Tableau", "bordered_inverse", "pivot_transform"]


class Tableau(NamedTuple):
    """Columns of A and D of Note [tableau] for T problems of one size, l of the m variables having one."""

    A: Tensor
    """(T, m + 2, l + 2)."""

    sign: Tensor
    """D of the columns, +1 of the last two, (T, l + 2)."""

    equality: Tensor
    """What the outputs do when y^T alpha is moved off 0, (T, l + 2)."""

    order: Tensor
    """The variables in the order of the columns, then those without one, (T, m)."""

    def find(self, variable: Tensor) -> tuple[Tensor, Tensor]:
        """Row and column of variables of the first problem; column l + 1 where there is none."""
        columns = self.sign.shape[1] - 2
        place = self.order[0].argsort()[variable]
        return place + 2 * (place >= columns), place.masked_fill(place >= columns, columns + 1)


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


def _exchange(K: Tensor, s: int, border: Tensor) -> Tensor:
    """Make of the first l rows of K (l, m), the free set first, those of A but for the labels, in place.

    `border` (m - s,) are the ones beside K_SN. Returns the row of b, [R_bS Z_b], (m,).
    """
    corner, edge, inner = bordered_inverse(K[:s, :s])  # R = [corner edge^T; edge inner]
    K_SN, near = K[:s, s:], len(K) - s
    Z = torch.addmm(edge[:, None] * border, inner, K_SN)
    Z_b = corner * border + edge @ K_SN
    T = K[s:, s:].addr_(border[:near], Z_b, alpha=-1)
    T.addmm_(K_SN[:, :near].T, Z, alpha=-1)
    K[s:, :s] = Z[:, :near].T
    K[:s, s:] = Z
    K[:s, :s] = -inner
    return torch.cat([edge, Z_b])


def pivot_transform(
    K: Tensor,
    y: Tensor,
    free: Tensor,
    border: Tensor | None = None,
    order: Tensor | None = None,
    columns: int | None = None,
    out: Tensor | None = None,
) -> Tableau:
    """The tableau of Note [tableau] for the free set given as a mask; K_SS + const must be regular.

    Args:
        K, y: kernel matrix (m, m) and labels (m,).
        free: mask of the free set S, (m,).
        border: replaces the ones beside K (times y: the coefficients of the equality), for a last
            column that is not a training point, (m,).
        order: the variables, those of S first, (m,); default S, then the others.
        columns: how many of them have a column; default all.
        out: zeros (m + 2, columns + 2) for the tableau; default new ones.

    Cost 2 m s l for s free variables and l columns. Memory: twice that of the tableau.
    """
    m, s = K.shape[-1], int(free.sum())
    order = free.argsort(descending=True, stable=True) if order is None else order
    columns = m if columns is None else columns
    rows = K.index_select(0, order[:columns]).index_select(1, order)  # (l, m)
    of_b = _exchange(rows, s, K.new_ones(m - s) if border is None else border[order[s:]])
    y = y[order]
    rows.mul_(y).mul_(y[:columns, None])
    A = K.new_zeros(m + 2, columns + 2) if out is None else out
    A[:columns, :columns] = rows[:, :columns].T
    A[columns + 2 :, :columns] = rows[:, columns:].T
    sign = K.new_ones(columns + 2)
    sign[:s] = -1
    equality = K.new_zeros(columns + 2)
    equality[:columns] = (y * of_b)[:columns]
    return Tableau(A[None], sign[None], equality[None], order[None])
