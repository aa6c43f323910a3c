"""Newton steps on the free sets of many SVMs that share kernel matrices.

Note [free sets]
With a = alpha * y the dual of the variables of a set S, the others held, has its maximum where F = u - y is
one number -b on S. The change d of a that leads there solves

    [0 1^T; 1 K_SS] [b; d_S] = [0; -F_S],   d = 0 elsewhere.

Problems on one kernel matrix have nearly the same free set. So they share a tableau W, Note [tableau] with
all labels +1, for one set S_0, the variables that are free in most of them; a problem only solves for the k
indices P that are in one of S and S_0 but not in the other. With x = -F on S, else 0, and v = x W for the
part of x in S_0,

    W_PP c = (x - v)_P,    d = -(v + c W) on S and S_0,   c on the rest of S.

A linear kernel has more free variables than its rank on the way, and no single maximum then. A small ridge on
the diagonal of K, for W only, turns d where the objective has no curvature; how far to go the true K says.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torchloo.guards import may_look
from torchloo.svm.stacked import Tables, block_of, columns_of, rows_of, subset
from torchloo.svm.tolerances import BALANCED, ROUGH_RIDGE, SHORT, is_free

if TYPE_CHECKING:
    from torchloo.svm.smo.rounds import SMOState

__all__ = ["FreeSets"]

_FAR = 96  # indices in which a free set may differ from the common one
_NEARER = 16  # by so many more, and twice as many as need be, they may differ until there is a new common one


class FreeSets:
    """Directions for problems on kernel matrices K (T, n, n), Note [free sets].

    Cost 2 n^2 s for each common set of s variables, then B (n s + k^3) for B directions.
    Memory 4 n^2 for each kernel matrix.
    """

    def __init__(self, K: Tensor) -> None:
        self.K = self.W = K
        self.common = torch.zeros_like(K[:, 0], dtype=torch.bool)  # (T, n)
        self.usable = self.common[:, :1]  # (T, 1)
        self.stale, self.better = self.common[:, 0], self.common
        self._index(1)

    def _index(self, size: int) -> None:
        """Indices S (T, s) of the common sets, padded with others, and the rows of W there, (T, s, n)."""
        self.S = self.common.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :size]
        self.inside = self.common.gather(1, self.S)
        self.W_S = rows_of(self.W, self.S)

    def look(self, free: Tensor, tables: Tables) -> list[Tensor]:
        """How many kernel matrices need another common set for the free sets (B, n), and its size then.

        What is free in most problems differs from their free sets the least.
        """
        total = self.K.new_zeros(self.common.shape).index_add_(0, tables.table, free.to(self.K))
        share = total / tables.sizes[:, None].clamp_min(1)
        least = torch.minimum(share, 1 - share).sum(1)
        now = torch.where(self.common, 1 - share, share).sum(1)
        majority = share > 0.5
        self.stale = majority.any(1) & (~self.common.any(1) | (now > 2 * least + _NEARER))
        self.better = torch.where(self.stale[:, None], majority, self.common)
        return [self.stale.sum(), self.better.sum(1).amax()]

    def renew(self, size: int) -> None:
        """Take the common sets that the last look has found, of at most so many variables."""
        rows = subset(self.stale)
        W, usable = _tableaux(self.K[rows], self.better[rows], size)
        if len(rows) == len(self.K):
            self.W, self.usable = W, usable
        else:
            self.W = self.W.index_copy(0, rows, W)
            self.usable = self.usable.index_copy(0, rows, usable)
        self.common = self.better
        self._index(size)

    def steps(self, s: "SMOState", tables: Tables, most: int) -> Tensor:
        """So many Newton steps of each problem, until no bound blocks; which problems moved, (B,)."""
        moved = torch.zeros_like(s.number, dtype=torch.bool)
        rows, going = torch.arange(len(moved), device=moved.device), ~moved
        for step in range(most):
            changed, blocked = self._step(s, rows, going, tables)
            if step == 0:
                moved = changed
            going = changed & blocked
            kept = subset(going)
            if not len(kept) or step == most - 1:
                break
            rows, going, tables = rows[kept], going[kept], tables.take(kept)
        return moved

    def _step(self, s: "SMOState", rows: Tensor, going: Tensor, tables: Tables) -> tuple[Tensor, Tensor]:
        """Along the direction to the maximum or the first bound; which moved, and which met a bound, (R,).

        Of the problems at `rows` (R,), those that are `going`.
        """
        alpha, box, y, F = (x.index_select(0, rows) for x in (s.alpha, s.box, s.y, s.F))
        d = self.directions(is_free(alpha, box), F, tables)
        K_d = tables.product(d, self.K)
        slope, bend = -(F * d).sum(1, keepdim=True), (K_d * d).sum(1, keepdim=True)  # (R, 1)
        change = d * y  # of alpha
        room = torch.where(change > 0, box - alpha, -alpha).div_(change).masked_fill_(change == 0, torch.inf)
        nearest, j = room.min(1, keepdim=True)
        best = slope / bend.clamp_min(torch.finfo(bend.dtype).tiny)
        blocked = nearest <= best
        moves = going[:, None] & (slope > 0) & (blocked | (bend > 0))
        t = torch.minimum(nearest, best).masked_fill_(~moves, 0)
        blocked &= moves
        new = torch.addcmul(alpha, change, t)
        bound = torch.where(change.gather(1, j) > 0, box.gather(1, j), 0.0)
        new.scatter_(1, j, torch.where(blocked, bound, new.gather(1, j)))
        new = new.clamp_min_(0).minimum(box)
        s.alpha = s.alpha.index_copy(0, rows, new)
        s.F = s.F.index_copy(0, rows, torch.addcmul(F, K_d, t))
        s.newton = s.newton.index_add(0, rows, moves[:, 0].long())
        s.columns = s.columns.index_add(0, rows, (new != alpha).sum(1))
        return moves[:, 0], blocked[:, 0]

    def directions(self, free: Tensor, F: Tensor, tables: Tables) -> Tensor:
        """d (B, n) for the masks S and F (B, n).

        0 for problems that are too far from the common set or too singular.
        """
        table = tables.table
        common, S, inside = self.common[table], self.S[table], self.inside[table]
        apart = free ^ common
        near = (apart.sum(1, keepdim=True) <= _FAR) & self.usable[table]
        free = free & near
        x = -F.masked_fill(~free, 0)
        v = tables.product(x.gather(1, S).masked_fill_(~inside, 0), self.W_S)  # (B, n)
        c = self._changed(x - v, apart & near, table)
        on_common = (v.gather(1, S) + tables.product(c, self.W_S.mT)).masked_fill_(~inside, 0)
        d = c.masked_fill_(common, 0).scatter_add_(1, S, -on_common).masked_fill_(~free, 0)
        excess, size = d.sum(1, keepdim=True), d.abs().sum(1, keepdim=True)
        d = torch.where(free, d - excess / free.sum(1, keepdim=True), 0.0)
        balanced = (excess.abs() <= BALANCED * size) & size.isfinite()
        return d.masked_fill_(~balanced, 0)

    def _changed(self, lack: Tensor, apart: Tensor, table: Tensor) -> Tensor:
        """c of Note [free sets] at the indices P given as a mask, 0 elsewhere, (B, n)."""
        k = int(apart.sum(1).max()) if may_look(apart) else min(_FAR, lack.shape[1])
        used, P = apart.to(lack).topk(k, 1)  # (B, k)
        W_PP = block_of(self.W, P, which=table)
        W_PP = W_PP * used[:, :, None] * used[:, None, :]
        W_PP.diagonal(dim1=1, dim2=2).add_(1 - used)
        c, _ = torch.linalg.solve_ex(W_PP, (lack.gather(1, P) * used)[:, :, None])
        return torch.zeros_like(lack).scatter_(1, P, c[:, :, 0])


def _tableaux(K: Tensor, common: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """W of Note [free sets] for common sets (T, n) of at most so many variables; which are regular, (T, 1).

    Inverts the positive definite K_SS + c 1 1^T, c the mean diagonal, which leaves the blocks of the inverse
    of [0 1^T; 1 K_SS] as they are but for the corner, which it lowers by c.
    """
    k = K.diagonal(dim1=1, dim2=2)
    ridge = ROUGH_RIDGE * torch.maximum(k, SHORT * k.mean(1, keepdim=True))
    lifted = K + torch.diag_embed(ridge)
    S = common.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :size]
    inside = common.gather(1, S).to(K)  # (T, s)
    K_S = rows_of(lifted, S) * inside[:, :, None]
    both = inside[:, :, None] * inside[:, None, :]
    c = (k.gather(1, S) * inside).sum(1) / inside.sum(1).clamp_min(1)
    c = c.clamp_min(torch.finfo(K.dtype).tiny)[:, None, None]
    K_SS = columns_of(K_S, S)
    factor, info = torch.linalg.cholesky_ex((K_SS + c) * both + torch.diag_embed(1 - inside))
    inverse = torch.cholesky_inverse(factor) * both
    row = inverse.sum(2, keepdim=True)  # (T, s, 1)
    total = row.sum(1, keepdim=True)
    edge = row / total
    inner = inverse - edge * row.mT
    of_bias = c - 1 / total + edge.mT @ K_S  # (T, 1, n)
    Z = edge + inner @ K_S  # (T, s, n)
    rest = torch.baddbmm(lifted - of_bias, K_S.mT, Z, alpha=-1)
    on_S = torch.zeros_like(Z).scatter_(2, S[:, None, :].expand_as(inner), -inner)
    Z = torch.where(common[:, None, :], on_S, Z)
    within = torch.zeros_like(K).scatter_(1, S[:, :, None].expand_as(Z), Z)
    W = torch.where(common[:, :, None], within, torch.where(common[:, None, :], within.mT, rest))
    usable = (info == 0) & common.any(1) & W.diagonal(dim1=1, dim2=2).isfinite().all(1)
    return W, usable[:, None]
