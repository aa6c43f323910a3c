"""Newton steps on the free sets of many SVMs that share a kernel matrix.

Note [free sets]
With a = alpha * y the dual of the variables of a set S, the others held, has its maximum where F = u - y is
one number -b on S. The change d of a that leads there solves

    [0 1^T; 1 K_SS] [b; d_S] = [0; -F_S],   d = 0 elsewhere.

Leave-one-out problems have nearly the same free set. So they share a tableau W, Note [tableau] with all
labels +1, for one set S_0, the variables that are free in most of them; a problem only solves for the k
indices P that are in one of S and S_0 but not in the other. With x = -F on S, else 0, and v = x W for the
part of x in S_0,

    W_PP c = (x - v)_P,    d = -(v + c W) on S and S_0,   c on the rest of S.

A linear kernel has more free variables than its rank on the way, and no single maximum then. A small ridge on
the diagonal of K, for W only, turns d where the objective has no curvature; how far to go the true K says.
"""

import torch
from torch import Tensor

from torchloo.svm.path.tableau import pivot_transform

__all__ = ["FreeSets"]

_RIDGE = 1e-8  # of k_ii, for directions only
_SHORT = 1e-3  # of the mean of k_ii: the least that counts for the ridge
_ROUNDING = 1e-6  # of the sum of |d|: how far rounding may take the sum of d from 0
_FAR = 96  # indices in which a free set may differ from the common one
_NEARER = 16  # by so many more, and twice as many as before, most may differ until there is a new common one


class FreeSets:
    """Directions for problems on one kernel matrix K (n, n), Note [free sets].

    Cost 2 n^2 s for each common set of s variables, then B (n s + k^3) for B directions. Memory 4 n^2.
    """

    def __init__(self, K: Tensor) -> None:
        self.K = K
        self.size = 0  # of the common set
        self.limit = -1.0  # of the differences that most problems may have
        self.order = self.back = self.W = K  # set by `_choose`

    def directions(self, free: Tensor, F: Tensor) -> Tensor:
        """d (B, n) for the masks S and F (B, n).

        0 for problems that are too far from the common set or too singular.
        """
        apart = self._apart(free)
        if float(apart.sum(1).double().median()) > self.limit:
            self._choose(free)
            apart = self._apart(free)
            self.limit = 2 * float(apart.sum(1).double().median()) + _NEARER
        if not self.size:
            return torch.zeros_like(F)
        s, count = self.size, apart.sum(1, keepdim=True)
        near = count <= _FAR
        free = free.index_select(1, self.order)
        x = -F.index_select(1, self.order).masked_fill_(~(free & near), 0)
        v = x[:, :s] @ self.W[:s]  # (B, n)
        d = self._changed(x - v, apart & near)
        d[:, :s] = -(v[:, :s].addmm(d, self.W[:, :s]))
        d = d.masked_fill_(~(free & near), 0)
        excess, size = d.sum(1, keepdim=True), d.abs().sum(1, keepdim=True)
        d = torch.where(free & near, d - excess / free.sum(1, keepdim=True), 0.0)
        balanced = (excess.abs() <= _ROUNDING * size) & size.isfinite()
        return d.masked_fill_(~balanced, 0).index_select(1, self.back)

    def _apart(self, free: Tensor) -> Tensor:
        """Which variables, in the order of the tableau, are in one of the two sets only, (B, n) bool."""
        if not self.size:
            return free
        apart = free.index_select(1, self.order)
        apart[:, : self.size] ^= True
        return apart

    def _choose(self, free: Tensor) -> None:
        """Take the variables that are free in most problems (B, n) as the common set."""
        common = 2 * free.sum(0) > len(free)
        self.size = int(common.sum())
        if not self.size:
            return
        k = self.K.diagonal()
        lifted = self.K + torch.diag_embed(_RIDGE * k.clamp_min(_SHORT * k.mean()))
        try:
            tableau = pivot_transform(lifted[None], torch.ones_like(k)[None], common[None])
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            self.size = 0
            return
        self.order = tableau.order[0]
        self.back = self.order.argsort()
        self.W = tableau.A[0, : len(k), : len(k)]

    def _changed(self, lack: Tensor, apart: Tensor) -> Tensor:
        """c of Note [free sets] at the indices P given as a mask, 0 elsewhere, (B, n)."""
        k = int(apart.sum(1).max())
        used, P = apart.to(lack).topk(k, 1)  # (B, k)
        W_PP = self.W[P[:, :, None], P[:, None, :]] * used[:, :, None] * used[:, None, :]
        W_PP.diagonal(dim1=1, dim2=2).add_(1 - used)
        c, _ = torch.linalg.solve_ex(W_PP, (lack.gather(1, P) * used)[:, :, None])
        return torch.zeros_like(lack).scatter_(1, P, c[:, :, 0])
