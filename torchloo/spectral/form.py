"""The spectral form: blocks of P for many regularisations from one decomposition.

Note [spectral form]
Let u = sqrt(zeta) / |sqrt(zeta)| and A = Omega^{1/2} K Omega^{1/2}. With a bias, project u out of
A; then P vanishes on the weighted constants and inverts M on what is left, so

    P(reg) = B diag(f) B^T,    B = Omega^{1/2} V,    f_k = 1 / (w_k + reg),

with w, V the eigenpairs of A, or of the projected A other than u itself. A multiple of u u^T above
every eigenvalue is added before the decomposition, so that u comes out last and apart even where K
is rank deficient; its f is set to 0. All diagonals of P are ONE product (B * B) f.

Note [spectral backward]
The eigenvectors are never differentiated: dP = -P dM P holds here too (Note [dual backward]). With
Pbar = D + (abar Y^T + Y abar^T) / 2 and X = B^T Pbar B, summed over the regularisations,

    Kbar = -B (sum of f f^T * X) B^T,    regbar = -sum_k f_k^2 X_kk,
    zetabar = diag(B (sum of reg f f^T * X) B^T) / zeta^2,    Ybar = sum of B (f * B^T abar).
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from torchloo.blocks import solve_blocks
from torchloo.clusters import Partition
from torchloo.dual import add_product, congruence
from torchloo.guards import Guard
from torchloo.precision import full_precision

__all__ = ["Parts", "Spectral", "spectral"]

Parts = tuple[Tensor, Tensor, Tensor]
"""Held-out residuals (R, ..., n, c), variances of that shape, and refitted rows (R, ..., n)."""


def _eigen(K: Tensor, weight: Tensor, bias: bool) -> tuple[Tensor, Tensor, Tensor]:
    """w (..., n), B (..., n, n) and |A| (...) of Note [spectral form]; with a bias u comes last."""
    root = weight.sqrt().unsqueeze(-1)  # (..., n, 1)
    A = (root * K).mul_(root.mT)
    size = torch.linalg.vector_norm(A, dim=(-2, -1), keepdim=True)
    if bias:
        u = root / torch.linalg.vector_norm(root, dim=-2, keepdim=True)
        Au = A @ u
        top = u.mT @ Au + 2 * size + (size == 0)
        add_product(A, torch.cat([u, Au], -1), torch.cat([top * u - Au, -u], -1))
    w, V = torch.linalg.eigh(A)
    # Eigenvalues of a positive semi-definite K that rounding made negative are zero.
    tiny = w.shape[-1] * torch.finfo(w.dtype).eps * w.abs().amax(-1, keepdim=True)
    return torch.where((w < 0) & (w > -tiny), torch.zeros_like(w), w), V.mul_(root), size[..., 0, 0]


def _inverses(w: Tensor, regs: Tensor, bias: bool) -> Tensor:
    """f of Note [spectral form], (R, ..., c', n), for w (..., n) and regs (R, c')."""
    along = regs.reshape(regs.shape[0], *[1] * (w.ndim - 1), regs.shape[1], 1)
    f = 1 / (w.unsqueeze(-2) + along)
    if bias:
        f[..., -1] = 0
    return f


class _DualPath(Function):
    """(K, weight, regs, Y) -> a (R, ..., n, c) and blocks of P (R, ..., c', g, s, s) for each size.

    c' is 1, or c where every output has its own regularisation; w and B are those of `_eigen`. See
    Note [spectral backward].
    """

    @staticmethod
    def forward(
        K: Tensor,
        weight: Tensor,
        regs: Tensor,
        Y: Tensor,
        w: Tensor,
        B: Tensor,
        bias: bool,
        *groups: Tensor,
    ) -> tuple[Tensor, ...]:
        with full_precision(B):
            f = _inverses(w, regs, bias)
            a = ((f * (Y.mT @ B)) @ B.mT).mT
            return a, *[_blocks(B, f, rows) for rows in groups]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        _, weight, regs, Y, w, B, ctx.bias, *groups = inputs
        ctx.save_for_backward(weight, regs, Y, w, B, *groups)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, abar: Tensor, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        weight, regs, Y, w, B, *groups = ctx.saved_tensors
        partition = Partition(tuple(groups))
        D = [(block + block.mT) / 2 for block in cotangents]  # (R, ..., c', g, s, s)
        with full_precision(Y):
            f = _inverses(w, regs, ctx.bias)
            BY = Y.mT @ B  # (..., c, n)
            Ba = abar.mT @ B  # (R, ..., c, n)
            Ybar = ((f * Ba).sum(0) @ B.mT).mT
            total, scaled = torch.zeros_like(B), torch.zeros_like(B)
            regbar = torch.zeros_like(regs)
            shared = regs.shape[1] == 1
            for r in range(regs.shape[0]):
                for j in range(regs.shape[1]):
                    outputs = slice(None) if shared else slice(j, j + 1)
                    X = congruence(B, [block[r].select(-4, j) for block in D], partition)
                    outer = Ba[r][..., outputs, :].mT @ BY[..., outputs, :]
                    f_rj = f[r][..., j, :]  # (..., n)
                    X = (X + (outer + outer.mT) / 2).mul_(f_rj.unsqueeze(-1)).mul_(f_rj.unsqueeze(-2))
                    total += X
                    scaled += regs[r, j] * X
                    regbar[r, j] = -X.diagonal(dim1=-2, dim2=-1).sum()
            Kbar = -(B @ total @ B.mT)
            weightbar = ((B @ scaled) * B).sum(-1) / weight.square()
        return Kbar, weightbar, regbar, Ybar, *[None] * (3 + len(groups))


def _blocks(B: Tensor, f: Tensor, rows: Tensor) -> Tensor:
    """Blocks of B diag(f) B^T, (R, ..., c', g, s, s), for the rows (g, s) of one size."""
    if rows.shape[-1] == 1:
        return (f @ B.square().mT)[..., rows].unsqueeze(-1)
    B_L = B[..., rows, :]  # (..., g, s, n); one product at a time, so never more than n^2 beside it
    return torch.stack(
        [
            torch.stack([(B_L * f_rj[..., None, None, :]) @ B_L.mT for f_rj in f_r.unbind(-2)], dim=-4)
            for f_r in f
        ]
    )


class Spectral(NamedTuple):
    """A decomposed dual problem: held-out parts for as many regularisations as are asked for."""

    K: Tensor
    weight: Tensor
    Y: Tensor
    w: Tensor
    """Eigenvalues (..., n); with a bias the last belongs to u and does not count."""
    B: Tensor
    """(..., n, n)."""
    size: Tensor
    """|A|, (...)."""
    has_bias: bool

    @property
    def least(self) -> Tensor:
        """The smallest eigenvalue that counts, (...)."""
        return (self.w[..., :-1] if self.has_bias else self.w).amin(-1)

    def held_out(self, regs: Tensor, partition: Partition, guard: Guard) -> Parts:
        """Held-out parts for the regularisations (R, 1), or (R, c) with one for each output."""
        K, weight, Y, w, B, _, bias = self
        a, *blocks = _DualPath.apply(K, weight, regs, Y, w, B, bias, *partition.groups)
        n = Y.shape[-2]
        if regs.shape[1] == 1:
            blocks = [block.select(-4, 0) for block in blocks]
            solved = solve_blocks(partition.gather(a), blocks, guard)
            r, variance = (partition.scatter(part, n) for part in solved)
        else:  # the outputs, each with a P of its own, are one more batch dimension
            solved = solve_blocks(partition.gather(a.mT.unsqueeze(-1)), blocks, guard)
            r, variance = (partition.scatter(part, n)[..., 0].mT for part in solved)
        return r, variance.expand_as(r), torch.zeros_like(r[..., 0], dtype=torch.bool)


def spectral(K: Tensor, weight: Tensor, Y: Tensor, bias: bool) -> Spectral:
    """Decompose K (..., n, n), with weights (..., n) and targets (..., n, c); Note [spectral form].

    Differentiable once in K, weight, Y and the regularisations asked for. Cost one eigendecomposition,
    and n^3 for each regularisation in the backward.
    """
    with torch.no_grad():
        w, B, size = _eigen(K, weight, bias)
    return Spectral(K, weight, Y, w, B, size, bias)
