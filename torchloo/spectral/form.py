"""The spectral form: blocks of P for many regularisations from one decomposition.

Note [spectral form]
Let A = Omega^{1/2} K Omega^{1/2}. With a bias, K is centred about the weighted mean of the rows, so that
u = sqrt(zeta) / |sqrt(zeta)| is a null vector of A. Then

    P(reg) = B diag(f) B^T,    B = Omega^{1/2} V,    f_k = 1 / (w_k + reg),

with w, V the eigenpairs of A other than u itself. A multiple of u u^T above every eigenvalue is added
before the decomposition, so that u comes out last and apart even where K is rank deficient; its f is
set to 0. All diagonals of P are ONE product (B * B) f.

With a bias the columns of B sum to zero. So that weights of very different size cost no digits, K is
centred by differences to a central row, and the row of B that weighs most is minus the sum of the others.

Note [spectral accuracy]
The computed w and V are those of A + E with |E| about eps |A|, so r_L is exact for a machine close by. For
the one that is meant it changes by P_LL^{-1} (P E x)_L, with x = a - P_{:L} r_L the coefficients without L.
What E makes of a is known, it is the residual rho = Y - M a. Let s a be the part of x along a (by the inner
product with weights 1 / zeta): r_L + s P_LL^{-1} (P rho)_L is left with what E makes of the rest of x, which
is no larger than P_{:L} r_L. That is a relative change of r_L by |E| / (least w + reg) at most, and usually
by sqrt(n) times the rounding of an entry of A beside least w + reg, as one entry of K in its last digit
changes it too. Regularisations for which this is too much (tiny ones, heavy weights) are factorised. Where
K = Z Z^T, the singular values of Omega^{1/2} Z, known to eps |Z|, serve them better than any K.

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

from torchloo.blocks import Root, solve_blocks
from torchloo.clusters import Partition
from torchloo.dual import add_product, congruence
from torchloo.guards import Guard
from torchloo.precision import full_precision

__all__ = ["Parts", "Spectral", "spectral"]

Parts = tuple[Tensor, Tensor, Tensor]
"""Held-out residuals (R, ..., n, c), variances of that shape, and refitted rows (R, ..., n)."""


def _times(rows: Tensor, matrix: Tensor) -> Tensor:
    """The rows (R, ..., c, n) times a matrix (..., n, m), which is not repeated for each of the R."""
    together = rows.movedim(0, -3)
    product = together.flatten(-3, -2) @ matrix
    return product.unflatten(-2, together.shape[-3:-1]).movedim(-3, 0)


def _centred_kernel(K: Tensor, weight: Tensor) -> Tensor:
    """K (..., n, n) about the weighted mean of the rows, by differences to a row near that mean."""
    share = (weight / weight.sum(-1, keepdim=True)).unsqueeze(-1)  # (..., n, 1)
    distance = K.diagonal(dim1=-2, dim2=-1) - 2 * (K @ share)[..., 0]
    central = distance.argmin(-1)[..., None, None]
    row = K.take_along_dim(central, -2)  # (..., 1, n)
    centred = (K - row).sub_(row.mT - row.take_along_dim(central, -1))
    mean = centred @ share  # (..., n, 1)
    return centred.sub_(mean.mT).sub_(mean - share.mT @ mean)


def _unit(root: Tensor) -> Tensor:
    """u (..., n, 1) of Note [spectral form] for the square roots of the weights."""
    return root / torch.linalg.vector_norm(root, dim=-2, keepdim=True)


def _eigen(A: Tensor, u: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """w (..., n), V (..., n, n) and |A| (...) of Note [spectral form]; u is added to A, in place."""
    size = torch.linalg.vector_norm(A, dim=(-2, -1), keepdim=True)
    if u is not None:
        add_product(A, (2 * size + (size == 0)) * u, u)
    w, V = torch.linalg.eigh(A)
    # Eigenvalues of a positive semi-definite K that rounding made negative are zero.
    tiny = w.shape[-1] * torch.finfo(w.dtype).eps * size[..., 0]
    return torch.where((w < 0) & (w > -tiny), torch.zeros_like(w), w), V, size[..., 0, 0]


def _singular(Z: Tensor, u: Tensor | None) -> tuple[Tensor, Tensor]:
    """w and V of A = Z Z^T (..., n, n), u added, from Z with no fewer columns than rows, u counted."""
    if u is not None:
        size = torch.linalg.vector_norm(Z, dim=(-2, -1), keepdim=True)
        Z = torch.cat([Z, (2 * size + (size == 0)) * u], -1)
    U, singular_values, _ = torch.linalg.svd(torch.linalg.qr(Z.mT, mode="r").R.mT)
    return singular_values.square().flip(-1), U.flip(-1)


def _basis(V: Tensor, root: Tensor, heaviest: Tensor | None) -> Tensor:
    """B of Note [spectral form], in the memory of V."""
    B = V.mul_(root)
    if heaviest is None:
        return B
    index = heaviest.expand(*B.shape[:-2], 1, B.shape[-1])
    B.scatter_(-2, index, 0.0)
    return B.scatter_(-2, index, -B.sum(-2, keepdim=True))


def _inverses(w: Tensor, regs: Tensor, bias: bool) -> Tensor:
    """f of Note [spectral form], (R, ..., c', n), for w (..., n) and regs (R, ..., c')."""
    f = 1 / (w.unsqueeze(-2) + regs.unsqueeze(-1))
    if bias:
        f[..., -1] = 0
    return f


class _DualPath(Function):
    """(K, weight, regs, Y) -> a (R, ..., n, c) and blocks of P (R, ..., c', g, s, s) for each size.

    c' is 1, or c where every output has its own regularisation; w and B are those of Note [spectral
    form], a is known already, `gathered` the rows of B by set. See Note [spectral backward].
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
        a: Tensor,
        gathered: list[Tensor],
        *groups: Tensor,
    ) -> tuple[Tensor, ...]:
        with full_precision(B):
            f = _inverses(w, regs, bias)
            several = iter(gathered)
            of_sets = (B if rows.shape[-1] == 1 else next(several) for rows in groups)
            return a.clone(), *[_blocks(part, f, rows) for part, rows in zip(of_sets, groups, strict=True)]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        _, weight, regs, Y, w, B, ctx.bias, _, _, *groups = inputs
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
            Ba = _times(abar.mT, B)  # (R, ..., c, n)
            Ybar = ((f * Ba).sum(0) @ B.mT).mT
            total, scaled = torch.zeros_like(B), torch.zeros_like(B)
            regbar = torch.zeros_like(regs)
            shared = regs.shape[-1] == 1
            for r in range(regs.shape[0]):
                for j in range(regs.shape[-1]):
                    outputs = slice(None) if shared else slice(j, j + 1)
                    outer = Ba[r][..., outputs, :].mT @ BY[..., outputs, :]
                    X = (outer + outer.mT) / 2
                    if D:
                        X += congruence(B, [block[r].select(-4, j) for block in D], partition)
                    f_rj = f[r][..., j, :]  # (..., n)
                    X.mul_(f_rj.unsqueeze(-1)).mul_(f_rj.unsqueeze(-2))
                    total += X
                    reg = regs[r][..., j]  # (...)
                    scaled += reg[..., None, None] * X
                    regbar[r][..., j] = -X.diagonal(dim1=-2, dim2=-1).sum(-1).sum_to_size(reg.shape)
            Kbar = -(B @ total @ B.mT)
            weightbar = ((B @ scaled) * B).sum(-1) / weight.square()
        return Kbar, weightbar, regbar, Ybar, *[None] * (5 + len(groups))


def _blocks(B: Tensor, f: Tensor, rows: Tensor) -> Tensor:
    """Blocks of P, (R, ..., c', g, s, s), for rows (g, s) of B, gathered (..., g, s, n) unless s is 1."""
    if rows.shape[-1] == 1:
        return _times(f, B.square().mT)[..., rows].unsqueeze(-1)
    B_L = B.unsqueeze(-4)  # beside the axis c'
    return (B_L * f[..., None, None, :]) @ B_L.mT


class Step(NamedTuple):
    """The solution, and what Note [spectral accuracy] adds to it."""

    a: Tensor
    """P Y, (R, ..., n, c)."""
    transformed: Tensor
    """B^T rho, (R, ..., c, n)."""
    solved: Tensor
    """P rho, (R, ..., n, c)."""
    along: Tensor
    """P_{:L}^T a by the inner product of the Note, over that of a with itself, (R, ..., n, c)."""

    def of_outputs(self, some: slice) -> "Step":
        """Those of some outputs."""
        a, transformed, solved, along = self
        return Step(a[..., some], transformed[..., some, :], solved[..., some], along[..., some])


class Spectral(NamedTuple):
    """A decomposed dual problem: held-out parts for as many regularisations as are asked for."""

    K: Tensor
    weight: Tensor
    Y: Tensor
    """Targets (..., n, c); with a bias less those of the heaviest row."""
    matrix: Tensor
    """A with u added, (..., n, n), or the features Z of K = Z Z^T, (..., n, d)."""
    w: Tensor
    """Eigenvalues (..., n); with a bias the last belongs to u and does not count."""
    B: Tensor
    """(..., n, n)."""
    size: Tensor
    """|A|, (...)."""
    heaviest: Tensor | None
    """With a bias the row that weighs most, (..., 1, 1)."""
    by_features: bool

    @property
    def least(self) -> Tensor:
        """The smallest eigenvalue that counts, (...)."""
        return (self.w if self.heaviest is None else self.w[..., :-1]).amin(-1)

    def rounding(self, regs: Tensor) -> Tensor:
        """That of an entry of A beside the least w + reg, for the lightest row, (R,), the worst of a batch.

        Changes of r are relative in the norm of Omega^{1/2} r, in which such a row counts for little.
        """
        least, largest = self.weight.aminmax(dim=-1)
        spread = (largest / least).sqrt()  # (...)
        entry = torch.finfo(self.w.dtype).eps * self.size / self.w.shape[-1] * spread
        return (entry / (self.least + regs.amin(-1))).reshape(len(regs), -1).amax(-1)

    @torch.no_grad()
    def by_singular_values(self) -> "Spectral":
        """The same decomposition from the features themselves."""
        root = self.weight.sqrt().unsqueeze(-1)
        w, V = _singular(root * self.matrix, None if self.heaviest is None else _unit(root))
        return self._replace(w=w, B=_basis(V, root, self.heaviest))

    def gathered(self, partition: Partition) -> list[Tensor]:
        """Rows of B by set, (..., g, s, n) for each size but 1: what blocks of all regularisations need."""
        return [self.B[..., rows, :] for rows in partition.groups if rows.shape[-1] > 1]

    def held_out(
        self, regs: Tensor, partition: Partition, guard: Guard, gathered: list[Tensor], step: "Step"
    ) -> Parts:
        """Held-out parts for the regularisations (R, ..., 1), or (R, ..., c) with one for each output.

        `gathered` and `step` are what the methods of these names give, the step for these regularisations.
        """
        bias, groups, n = self.heaviest is not None, partition.groups, self.Y.shape[-2]
        shared = regs.shape[-1] == 1
        with torch.no_grad():
            f = _inverses(self.w, regs, bias)
        given = (self.K, self.weight, regs, self.Y, self.w, self.B, bias, step.a, gathered)
        a, *blocks = _DualPath.apply(*given, *groups)
        root = None
        if gathered:

            def make() -> tuple[Tensor, Tensor]:
                half = f.sqrt()
                T = (self.B.unsqueeze(-3) * half.unsqueeze(-2)).mT  # (R, ..., c', n, n)
                parts = ((half * (self.Y.detach().mT @ self.B)).mT, (half * step.transformed).mT)
                return T.select(-3, 0) if shared else T, _beside(parts, shared)

            root = Root(make, groups, spare_well=True)
        if shared:
            blocks = [block.select(-4, 0) for block in blocks]
        right = partition.gather(_beside((a, step.solved), shared))
        solved, variances = solve_blocks(right, blocks, guard, root)
        along = partition.gather(_beside((step.along,), shared))
        residuals = [_corrected(r_L, along_L) for r_L, along_L in zip(solved, along, strict=True)]
        r, variance = partition.scatter(residuals, n), partition.scatter(variances, n)
        if not shared:
            r, variance = r[..., 0].mT, variance[..., 0].mT
        return r, variance.expand_as(r), torch.zeros_like(r[..., 0], dtype=torch.bool)

    def solution(self, regs: Tensor, step: "Step") -> Tensor:
        """a = P Y, (R, ..., n, c), with the correction by the residual."""
        a = step.a + step.solved
        (solved,) = _DualPath.apply(
            self.K, self.weight, regs, self.Y, self.w, self.B, self.heaviest is not None, a, []
        )
        return solved

    def bias_of(self, a: Tensor, Y: Tensor) -> Tensor:
        """b (R, ..., c) of a solution (R, ..., n, c), the weighted mean of Y - K a; zeros without a bias."""
        if self.heaviest is None:
            return torch.zeros_like(a[..., 0, :])
        share = (self.weight / self.weight.sum(-1, keepdim=True)).unsqueeze(-2)  # (..., 1, n)
        return (share @ (Y.to(a.dtype) - self.K @ a))[..., 0, :]

    @torch.no_grad()
    def step(self, regs: Tensor) -> "Step":
        """The correction by the residual, for all regularisations at once: products with n^2 matrices."""
        B, zeta = self.B, self.weight.unsqueeze(-2)  # (..., 1, n)
        f = _inverses(self.w, regs, self.heaviest is not None)
        rows = _times(f * (self.Y.mT @ B), B.mT)  # a, (R, ..., c, n)
        if self.by_features:
            Ka = _times(_times(rows, self.matrix), self.matrix.mT)
        else:
            Ka = _times(rows / zeta.sqrt(), self.matrix) / zeta.sqrt()
        rho = self.Y.mT - Ka - regs.unsqueeze(-1) / zeta * rows
        if self.heaviest is not None:
            rho = rho - rho.take_along_dim(self.heaviest.unsqueeze(0), -1)
        rho_B, half = _times(rho, B), f * (self.Y.mT @ B)
        P_rho, along = _times(torch.cat([f * rho_B, f * half], -2), B.mT).chunk(2, -2)
        square = half.square().sum(-1, keepdim=True).clamp(min=torch.finfo(half.dtype).tiny)
        return Step(rows.mT, rho_B, P_rho.mT, (along / square).mT)


def _beside(parts: tuple[Tensor, ...], shared: bool) -> Tensor:
    """Several (R, ..., n, c) as columns; where every output has its own P, as (R, ..., c, n, parts)."""
    return torch.cat(parts if shared else [part.mT.unsqueeze(-1) for part in parts], -1)


def _corrected(solved: Tensor, along: Tensor) -> Tensor:
    """r_L of Note [spectral accuracy], from P_LL^{-1} of a_L and of (P rho)_L beside it."""
    r, step = solved.chunk(2, -1)  # (R, ..., g, s, c)
    share = 1 - (r * along).sum(-2, keepdim=True)
    return r + (share * step).detach()


def spectral(K: Tensor, weight: Tensor, Y: Tensor, bias: bool, Z: Tensor | None = None) -> Spectral:
    """Decompose K (..., n, n), with weights (..., n) and targets (..., n, c); Note [spectral form].

    Where K = Z Z^T, the features Z (..., n, d) are centred about their weighted mean if there is a bias.

    Differentiable once in K, weight, Y and the regularisations asked for. Cost one eigendecomposition,
    and n^3 for each regularisation in the backward.
    """
    heaviest = weight.argmax(-1)[..., None, None] if bias else None
    with torch.no_grad():
        root = weight.sqrt().unsqueeze(-1)  # (..., n, 1)
        A = (root * (_centred_kernel(K, weight) if bias and Z is None else K)).mul_(root.mT)
        w, V, size = _eigen(A, _unit(root) if bias else None)
        B = _basis(V, root, heaviest)
    if heaviest is not None:
        Y = Y - Y.detach().take_along_dim(heaviest, -2)
    matrix = A if Z is None else Z.detach()
    return Spectral(K, weight, Y, matrix, w, B, size, heaviest, Z is not None)
