"""Solved machines of one stream: features rotated so that every normal matrix is diagonal.

Note [rotated features]
With the moments of Note [moments] and A such that A^T (S + reg I) A is diagonal, diag(1/f), a row of
centred features z becomes u = A^T z, the coefficients q = A^{-1} p = f * A^T T, and

    z^T p = u^T q,    z^T (S + reg I)^{-1} z = sum_k f_k u_k^2.

For one regularisation A is the inverse transposed Cholesky factor and f = 1; for many of them, A holds
the eigenvectors of S and f_k = 1 / (w_k + reg). All leverages and outputs of a block are then two thin
products with u, and u is the only large one.

Note [folding]
The features of a sparse machine are z = L^{-1} k for a kernel column k, so u = (A^T L^{-1}) k - A^T mean:
one product in place of two. With F = A^T L^{-1}, rounding changes u_j by eps |F_j| |k|: much, where the
basis is nearly dependent. A block goes the long way if that could change a leverage, or an output
measured by the spread of the targets, by more than `_FOLD`; rows with a large leverage, whose residual is
divided by a small 1 - h, always do.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from torchloo.blocks import NOT_DEFINITE
from torchloo.guards import Guard
from torchloo.streaming.moments import LowerInverse, Moments, times_lower
from torchloo.streaming.stream import Block

__all__ = ["Expansion", "Machines", "one_machine", "path_machines"]

_FOLD = 1e-11


class Expansion:
    """How features come from inputs: Z = L^{-1} k(x), or k(x) itself.

    Args:
        columns: float64 columns k (p, b) of inputs (b, d), which the caller may overwrite.
        factor: L (p, p), lower triangular, or None.
        support: what k is evaluated at, (p, d), or None.
        kept: boolean (p,), which entries of k are in use, or None for all.
    """

    def __init__(
        self,
        columns: Callable[[Tensor], Tensor],
        factor: Tensor | None = None,
        support: Tensor | None = None,
        kept: Tensor | None = None,
    ) -> None:
        self.columns, self.factor, self.support, self.kept = columns, factor, support, kept
        self._inverse = None if factor is None else LowerInverse(factor)

    @property
    def size(self) -> int:
        """Rows in a block, unless the stream says otherwise: 16 MB of features, or a few thousand rows."""
        return 2048 if self.factor is None else 256 * max(1, (1 << 13) // len(self.factor))

    def features(self, columns: Tensor) -> Tensor:
        """Z (p, b) of columns (p, b), which the caller may overwrite."""
        return columns if self._inverse is None else self._inverse(columns)


@dataclass
class Machines:
    """R machines that differ in their regularisation; see Note [rotated features]."""

    expansion: Expansion
    mean: Tensor
    """Centre of the features, (p, 1)."""
    rotation: Tensor
    """A^T, (p, p)."""
    triangular: bool
    """Whether A^T is lower triangular."""
    f: Tensor
    """(R, c', p) with c' = 1, or c where every output has a regularisation of its own."""
    regs: Tensor
    """(R, c')."""
    q: Tensor
    """Coefficients, (R, c, p)."""
    offset: Tensor
    """What is added to every output, (R, c)."""
    spread: Tensor
    """Root mean square of the targets about the offset, (c,)."""
    refined: bool = False
    """Whether a step of refinement has been made."""

    def __post_init__(self) -> None:
        factor = self.expansion.factor
        if factor is not None:
            self._folded = torch.linalg.solve_triangular(factor, self.rotation, upper=False, left=False)
            self._shift = self.rotation @ self.mean
            rows = torch.linalg.vector_norm(self._folded, dim=1)  # (p,), |F_j|
            leverage = (rows * self.f.amax((0, 1)).sqrt()).max()
            outputs = ((rows * self.q).square().sum(-1).sqrt() / self.spread).max()
            self._rounding = torch.finfo(rows.dtype).eps * torch.maximum(leverage, outputs)

    def rotated(self, X: Tensor, fold: bool = True) -> Tensor:
        """u (p, b) of inputs (b, d), the long way unless `fold`."""
        columns = self.expansion.columns(X)
        if fold and self.expansion.factor is not None:
            size = torch.linalg.vector_norm(columns, dim=0).max()
            if self._rounding * size <= _FOLD:  # Note [folding]
                return self._times(self._folded, columns).sub_(self._shift)
        return self._times(self.rotation, self.expansion.features(columns).sub_(self.mean))

    def _times(self, matrix: Tensor, V: Tensor) -> Tensor:
        return times_lower(matrix, V) if self.triangular else matrix @ V

    def outputs(self, u: Tensor, q: Tensor) -> Tensor:
        """q u, (R, c, b), for coefficients q (R, c, p)."""
        return (q.flatten(0, 1) @ u).unflatten(0, q.shape[:2])

    def residuals(self, u: Tensor, part: Block) -> Tensor:
        """Training residuals of a block, (R, c, b)."""
        return part.Y.double().mT - self.offset.unsqueeze(-1) - self.outputs(u, self.q)

    def norms(self, u: Tensor) -> Tensor:
        """sum_k f_k u_k^2, (R, c', b)."""
        return (self.f.flatten(0, 1) @ u.square()).unflatten(0, self.f.shape[:2])

    def step(self, gradient: Tensor) -> Tensor:
        """What a step of refinement adds to q, from sum zeta e u^T of the residuals e, (R, c, p)."""
        penalty = self.q @ self.rotation @ self.rotation.mT if self.triangular else self.q
        return self.f * (gradient - self.regs.unsqueeze(-1) * penalty)

    def move(self, step: Tensor, shift: Tensor) -> None:
        """Add to the coefficients, (R, c, p), and to the offset, (R, c)."""
        self.q, self.offset, self.refined = self.q + step, self.offset + shift, True

    def coefficients(self) -> Tensor:
        """p = A q, (R, p, c)."""
        return self.rotation.mT @ self.q.mT


def one_machine(guard: Guard, expansion: Expansion, moments: Moments, reg: Tensor) -> Machines:
    """The machine of one regularisation, a 0-dimensional tensor."""
    S = moments.symmetric()
    unit = torch.eye(len(S), dtype=S.dtype, device=S.device)
    L, info = torch.linalg.cholesky_ex(S + reg * unit)
    guard.require(info == 0, NOT_DEFINITE)
    guard.check()
    rotation = torch.linalg.solve_triangular(L, unit, upper=False)
    q = torch.linalg.solve_triangular(L, moments.T, upper=False).mT.unsqueeze(0)
    f = torch.ones_like(S[None, :1])
    return Machines(
        expansion, moments.mean_z, rotation, True, f, reg.reshape(1, 1), q, moments.mean_y, moments.spread
    )


def path_machines(expansion: Expansion, moments: Moments, regs: Tensor) -> Machines:
    """The machines of regularisations (R, 1), or (R, c) with one for each output."""
    w, Q = torch.linalg.eigh(moments.symmetric())
    w = w.clamp(min=0)  # a Gram matrix has no negative eigenvalues but by rounding
    f = 1 / (w + regs.unsqueeze(-1))  # (R, c', p)
    q = f * (moments.T.mT @ Q)
    offset = moments.mean_y.expand(len(regs), -1)
    return Machines(expansion, moments.mean_z, Q.mT.contiguous(), False, f, regs, q, offset, moments.spread)
