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
more have zeros: column l, the dummy, pads the change sets, and l + 1 is what problems without
an event change. The rows are in the same order, and those of the variables without a column come last.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchloo.svm.solve.systems import Bordered
from torchloo.svm.stacked import block_of

__all__ = ["Tableau", "pivot_transform"]


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

    def find(self, table: Tensor, variable: Tensor) -> tuple[Tensor, Tensor]:
        """Row and column of variables of the problems `table`, (N,) all; column l + 1 where there is none."""
        columns = self.sign.shape[1] - 2
        place = self.order.argsort(1)[table, variable]
        return place + 2 * (place >= columns), place.masked_fill(place >= columns, columns + 1)


def _exchange(
    K: Tensor, least: int, s: int, is_free: Tensor, border: Tensor, system: Bordered | None
) -> Tensor:
    """Make of the first l rows of K (T, l, m), free sets first, those of A but for the labels, in place.

    `is_free` (T, m) is the mask of sets of `least` to s variables, `border` (T, m) are the ones beside K, 0
    for the free. Returns the rows of b, [R_bS Z_b], (T, m).
    """
    free, ragged = is_free[:, :s], least < s
    system = system or Bordered(K[:, :s, :s], free if ragged else None)
    if bool(system.info.any()):
        raise torch.linalg.LinAlgError("the equations of a free set are singular")  # type: ignore[attr-defined]
    corner, edge, inner = system.inverse()  # R = [corner edge^T; edge inner]
    near, border = K.shape[1] - least, border[:, least:]
    K_SN = K[:, :s, least:]
    if ragged:
        K_SN = K_SN * (free[:, :, None] & ~is_free[:, None, least:])
    Z = torch.baddbmm(edge[:, :, None] * border[:, None], inner, K_SN)
    Z_b = torch.addcmul((edge[:, None] @ K_SN)[:, 0], corner[:, None], border)
    T = K[:, least:, least:].addcmul_(border[:, :near, None], Z_b[:, None], value=-1)
    T.baddbmm_(K_SN[:, :, :near].mT, Z, alpha=-1)
    of_b = pad(Z_b, (least, 0))
    of_b[:, :s] += edge
    if not ragged:
        K[:, s:, :s] = Z[:, :, :near].mT
        K[:, :s, s:] = Z
        K[:, :s, :s] = -inner
        return of_b
    rows = pad(Z, (least, 0))  # (T, s, m), those of A for the free, else 0
    rows[:, :, :s] -= inner
    bounded = (~free).to(K)
    K[:, :s].mul_(bounded[:, :, None]).add_(rows)
    K[:, :, :s].mul_(bounded[:, None]).add_(rows[:, :, : K.shape[1]].mT)
    return of_b


def pivot_transform(
    K: Tensor,
    y: Tensor,
    free: Tensor,
    border: Tensor | None = None,
    order: Tensor | None = None,
    columns: int | None = None,
    kernel: Tensor | None = None,
    system: Bordered | None = None,
) -> Tableau:
    """The tableaux of Note [tableau] for the free sets given as masks; their equations must be regular.

    Args:
        K, y: kernel matrices (T, m, m) and labels (T, m).
        free: masks of the free sets S, (T, m).
        border: replaces the ones beside K (times y: the coefficients of the equality), for a last
            column that is not a training point, (T, m).
        order: the variables, those of S first, (T, m); default S, then the others.
        columns: how many of them have a column; default all.
        kernel: which of several K each problem has, (T,); default its own.
        system: the equations of the free sets, if known.

    Cost 2 m s l for s free variables and l columns. Memory: twice that of the tableau.
    """
    m, (least, most) = K.shape[-1], torch.stack(torch.aminmax(free.sum(1))).tolist()
    order = free.to(torch.uint8).argsort(dim=1, descending=True, stable=True) if order is None else order
    columns = m if columns is None else columns
    rows = block_of(K, order[:, :columns], order, kernel)  # (T, l, m)
    is_free = free.gather(1, order)
    border = torch.ones_like(y) if border is None else border.gather(1, order)
    of_b = _exchange(rows, least, most, is_free, border.masked_fill(is_free, 0), system)
    y = y.gather(1, order)
    rows.mul_(y[:, :columns, None])
    A = K.new_empty(len(y), m + 2, columns + 2)
    A[:, columns : columns + 2] = 0
    A[:, :, columns:] = 0
    torch.mul(rows[:, :, :columns], y[:, None, :columns], out=A[:, :columns, :columns])  # it is symmetric
    torch.mul(rows[:, :, columns:].mT, y[:, columns:, None], out=A[:, columns + 2 :, :columns])
    is_free, of_b = is_free[:, :columns], (y * of_b)[:, :columns]
    sign = pad(torch.where(is_free, -1.0, 1.0).to(K), (0, 2), value=1.0)
    return Tableau(A, sign, pad(of_b, (0, 2)), order)
