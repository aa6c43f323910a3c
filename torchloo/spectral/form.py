"""The spectral form: blocks of P for many regularisations from one decomposition.

Note [spectral form]
Let A = Omega^{1/2} K Omega^{1/2}. With a bias, K is centred about the weighted mean of the rows, so that
u = sqrt(zeta) / |sqrt(zeta)| is a null vector of A. Then

    P(reg) = B diag(f) B^T,    B = Omega^{1/2} V,    f_k = 1 / (w_k + reg),

with w, V the eigenpairs of A other than u itself. A multiple of u u^T above every eigenvalue is added
before the decomposition, so that u is the last eigenvector and distinct even if K is rank deficient; its
f is set to 0. All diagonals of P are ONE product (B * B) f.

With a bias the columns of B sum to zero. So that weights of very different size cost no accuracy, K is
centred by differences to a central row, and the row of B of largest weight is minus the sum of the others.

Note [spectral accuracy]
The computed w and V are those of A + E with |E| about eps |A|, so r_L is exact for a nearby machine. Its
error is P_LL^{-1} (P E x)_L, with x = a - P_{:L} r_L the coefficients without L. The effect of E on a is
known: it is the residual rho = Y - M a. Let s a be the projection of x on a (in the inner product with
weights 1 / zeta): the error of r_L + s P_LL^{-1} (P rho)_L is the effect of E on the rest of x, which is no
larger than P_{:L} r_L. That is a relative change of r_L of at most |E| / (least w + reg), and usually of
sqrt(n) times the rounding error of an entry of A relative to least w + reg, as large as the effect of one
rounded entry of K. Regularisations for which this is too large (tiny ones, heavy weights) are factorised.
Where K = Z Z^T, the singular values of Omega^{1/2} Z, accurate to eps |Z|, are better than any K.

Note [spectral backward]
The eigenvectors are never differentiated: dP = -P dM P holds here too (Note [dual backward]). With
Pbar = D + (abar Y^T + Y abar^T) / 2 and X = B^T Pbar B, summed over the regularisations,

    Kbar = -B (sum of f f^T * X) B^T,    regbar = -sum_k f_k^2 X_kk,
    zetabar = diag(B (sum of reg f f^T * X) B^T) / zeta^2,    Ybar = sum of B (f * B^T abar).
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import Function

from torchloo.autograd import once_differentiable
from torchloo.blocks import Root, solve_blocks
from torchloo.clusters import Partition
from torchloo.dual import add_product, congruence
from torchloo.guards import Guard
from torchloo.leave_out_sets import Parts
from torchloo.precision import full_precision
from torchloo.primal.moments import shares

__all__ = ["Spectral", "Step", "spectral"]

# Rows of B that are squared, or scaled, at once: few enough to stay in the cache of a CPU.
_AT_ONCE, _SCALED = 512, 128


def _times(rows: Tensor, matrix: Tensor) -> Tensor:
    """The rows (R, ..., c, n) times a matrix (..., n, m), which is not repeated for each of the R."""
    together = rows.movedim(0, -3)
    product = together.flatten(-3, -2) @ matrix
    return product.unflatten(-2, together.shape[-3:-1]).movedim(-3, 0)


def _centred_kernel(K: Tensor, weight: Tensor) -> Tensor:
    """K (..., n, n) centred at the weighted mean of the rows, by differences to a row near that mean."""
    share = shares(weight).unsqueeze(-1)  # (..., n, 1)
    to_mean = (K @ share)[..., 0]
    distance = K.diagonal(dim1=-2, dim2=-1) - 2 * to_mean  # squared, up to a constant
    central = distance.argmin(-1)[..., None, None]
    row = K.take_along_dim(central, -2)  # (..., 1, n)
    corner = row.take_along_dim(central, -1)
    centred = (K - row).sub_(row.mT - corner)
    mean = centred @ share  # (..., n, 1)
    mean_of_means = share.mT @ mean
    return centred.sub_(mean.mT).sub_(mean - mean_of_means)


def _unit(root: Tensor) -> Tensor:
    """u (..., n, 1) of Note [spectral form] for the square roots of the weights."""
    return root / torch.linalg.vector_norm(root, dim=-2, keepdim=True)


def _above(size: Tensor) -> Tensor:
    """A number above every eigenvalue of a matrix of norm `size`; 1 if that is 0."""
    return 2 * size + (size == 0)


def _eigen(A: Tensor, u: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """w (..., n), V (..., n, n) and |A| (...) of Note [spectral form]; u is added to A, in place."""
    size = torch.linalg.vector_norm(A, dim=(-2, -1), keepdim=True)
    if u is not None:
        add_product(A, _above(size) * u, u)
    w, V = torch.linalg.eigh(A)
    # Eigenvalues of a positive semi-definite K that are negative by rounding are zero.
    rounding = w.shape[-1] * torch.finfo(w.dtype).eps * size[..., 0]
    is_zero = (w < 0) & (w > -rounding)
    w = torch.where(is_zero, torch.zeros_like(w), w)
    return w, V, size[..., 0, 0]


def _singular(Z: Tensor, u: Tensor | None) -> tuple[Tensor, Tensor]:
    """w and V of A = Z Z^T (..., n, n) with u added; Z and u together have at least n columns."""
    if u is not None:
        size = torch.linalg.vector_norm(Z, dim=(-2, -1), keepdim=True)
        Z = torch.cat([Z, _above(size) * u], -1)
    R = torch.linalg.qr(Z.mT, mode="r").R
    U, singular_values, _ = torch.linalg.svd(R.mT)
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

    c' is 1, or c if every output has its own regularisation; w and B are those of Note [spectral form], a
    is already computed, `gathered` are the rows of B by set. See Note [spectral backward].
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
            gathered_rows = iter(gathered)
            blocks = []
            for rows in groups:
                B_L = B if rows.shape[-1] == 1 else next(gathered_rows)
                blocks.append(_blocks(B_L, f, rows))
            return a.clone(), *blocks

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        K, weight, regs, Y, w, B, ctx.bias, _, _, *groups = inputs
        ctx.save_for_backward(K, weight, regs, Y, w, B, *groups)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, saved: tuple[Tensor, ...], abar: Tensor, *cotangents: Tensor
    ) -> tuple[Tensor | None, ...]:
        _, weight, regs, Y, w, B, *groups = saved
        partition = Partition(tuple(groups))
        D = [(block + block.mT) / 2 for block in cotangents]  # (R, ..., c', g, s, s)
        with full_precision(Y):
            f = _inverses(w, regs, ctx.bias)
            BY = Y.mT @ B  # (..., c, n)
            Ba = _times(abar.mT, B)  # (R, ..., c, n)
            Ybar = ((f * Ba).sum(0) @ B.mT).mT
            total = torch.zeros_like(B)
            scaled = torch.zeros_like(B)
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
                    trace = X.diagonal(dim1=-2, dim2=-1).sum(-1)
                    regbar[r][..., j] = -trace.sum_to_size(reg.shape)
            Kbar = -(B @ total @ B.mT)
            weightbar = ((B @ scaled) * B).sum(-1) / weight.square()
        return Kbar, weightbar, regbar, Ybar, *[None] * (5 + len(groups))


def _blocks(B: Tensor, f: Tensor, rows: Tensor) -> Tensor:
    """Blocks of P, (R, ..., c', g, s, s), for rows (g, s) of B, gathered (..., g, s, n) unless s is 1."""
    if rows.shape[-1] == 1:
        diagonals = [_times(f, part.square().mT) for part in B.split(_AT_ONCE, -2)]
        return torch.cat(diagonals, -1)[..., rows].unsqueeze(-1)
    f = f[..., None, None, :]
    sets_at_once = max(1, _SCALED // rows.shape[-1])
    parts = [B_L.unsqueeze(-4) for B_L in B.split(sets_at_once, -3)]  # beside the axis c'
    blocks = [(B_L * f) @ B_L.mT for B_L in parts]
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, -3)


class Step(NamedTuple):
    """The solution, and the correction of Note [spectral accuracy]."""

    a: Tensor
    """P Y, (R, ..., n, c)."""
    transformed: Tensor
    """B^T rho, (R, ..., c, n)."""
    solved: Tensor
    """P rho, (R, ..., n, c)."""
    along: Tensor
    """The inner product, of the Note, of P_{:L} with a, divided by that of a with itself, (R, ..., n, c)."""

    def of_outputs(self, some: slice) -> "Step":
        """The same for some outputs."""
        a, transformed, solved, along = self
        transformed = transformed[..., some, :]
        return Step(a[..., some], transformed, solved[..., some], along[..., some])


class Spectral(NamedTuple):
    """A decomposed dual problem, from which any number of regularisations can be solved."""

    K: Tensor
    weight: Tensor
    Y: Tensor
    """Targets (..., n, c); with a bias, minus the target of the row of largest weight."""
    matrix: Tensor
    """A with u added, (..., n, n), or the features Z of K = Z Z^T, (..., n, d)."""
    w: Tensor
    """Eigenvalues (..., n); with a bias the last belongs to u and is ignored."""
    B: Tensor
    """(..., n, n)."""
    size: Tensor
    """|A|, (...)."""
    heaviest: Tensor | None
    """With a bias, the row of largest weight, (..., 1, 1)."""
    by_features: bool

    @property
    def least(self) -> Tensor:
        """The smallest eigenvalue other than that of u, (...)."""
        w = self.w if self.heaviest is None else self.w[..., :-1]
        return w.amin(-1)

    def rounding(self, regs: Tensor) -> Tensor:
        """Rounding error of an entry of A relative to the least w + reg, (R,), the largest of a batch.

        For the row of smallest weight: changes of r are relative in the norm of Omega^{1/2} r, to which such
        a row contributes little.
        """
        least, largest = self.weight.aminmax(dim=-1)
        spread = (largest / least).sqrt()  # (...)
        eps = torch.finfo(self.w.dtype).eps
        n = self.w.shape[-1]
        entry = eps * self.size / n * spread
        relative = entry / (self.least + regs.amin(-1))
        return relative.reshape(len(regs), -1).amax(-1)

    @torch.no_grad()
    def by_singular_values(self) -> "Spectral":
        """The same decomposition from the features themselves."""
        root = self.weight.sqrt().unsqueeze(-1)
        u = None if self.heaviest is None else _unit(root)
        w, V = _singular(root * self.matrix, u)
        return self._replace(w=w, B=_basis(V, root, self.heaviest))

    def gathered(self, partition: Partition) -> list[Tensor]:
        """Rows of B by set, (..., g, s, n) for each size but 1, shared by all regularisations."""
        return [self.B[..., rows, :] for rows in partition.groups if rows.shape[-1] > 1]

    def held_out(
        self, regs: Tensor, partition: Partition, guard: Guard, gathered: list[Tensor], step: "Step"
    ) -> Parts:
        """Held-out parts for the regularisations (R, ..., 1), or (R, ..., c) with one for each output.

        Variances (R, ..., n, c) have the shape of the residuals.
        `gathered` and `step` are the results of these methods, the step for these regularisations.
        """
        groups, n = partition.groups, self.Y.shape[-2]
        shared = regs.shape[-1] == 1
        a, *blocks = self._path(regs, step.a, gathered, groups)
        root = None
        if gathered:
            with torch.no_grad():
                f = _inverses(self.w, regs, self.heaviest is not None)

            def make() -> tuple[Tensor, Tensor]:
                half = f.sqrt()
                T = (self.B.unsqueeze(-3) * half.unsqueeze(-2)).mT  # (R, ..., c', n, n)
                TY = (half * (self.Y.detach().mT @ self.B)).mT
                T_rho = (half * step.transformed).mT
                T = T.select(-3, 0) if shared else T
                return T, _beside((TY, T_rho), shared)

            root = Root(make, groups, spare_well=True)
        if shared:
            blocks = [block.select(-4, 0) for block in blocks]
        right = partition.gather(_beside((a, step.solved), shared))
        solved, variances = solve_blocks(right, blocks, guard, root)
        along = partition.gather(_beside((step.along,), shared))
        residuals = [_corrected(r_L, along_L) for r_L, along_L in zip(solved, along, strict=True)]
        r = partition.scatter(residuals, n)
        variance = partition.scatter(variances, n)
        if not shared:
            r, variance = r[..., 0].mT, variance[..., 0].mT
        return r, variance.expand_as(r), torch.zeros_like(r[..., 0], dtype=torch.bool)

    def solution(self, regs: Tensor, step: "Step") -> Tensor:
        """a = P Y, (R, ..., n, c), with the correction by the residual."""
        (solved,) = self._path(regs, step.a + step.solved, [], ())
        return solved

    def _path(
        self, regs: Tensor, a: Tensor, gathered: list[Tensor], groups: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """a and the blocks of the groups, with their derivatives."""
        bias = self.heaviest is not None
        decomposed = (self.w, self.B, bias)
        return _DualPath.apply(self.K, self.weight, regs, self.Y, *decomposed, a, gathered, *groups)

    def bias_of(self, a: Tensor, Y: Tensor) -> Tensor:
        """b (R, ..., c) of a solution (R, ..., n, c), the weighted mean of Y - K a; zeros without a bias."""
        if self.heaviest is None:
            return torch.zeros_like(a[..., 0, :])
        share = shares(self.weight).unsqueeze(-2)  # (..., 1, n)
        residual = Y.to(a.dtype) - self.K @ a
        return (share @ residual)[..., 0, :]

    @torch.no_grad()
    def step(self, regs: Tensor) -> "Step":
        """The correction by the residual, for all regularisations at once: products with n^2 matrices."""
        B = self.B
        zeta = self.weight.unsqueeze(-2)  # (..., 1, n)
        f = _inverses(self.w, regs, self.heaviest is not None)
        half = f * (self.Y.mT @ B)
        a = _times(half, B.mT)  # (R, ..., c, n)
        if self.by_features:
            Ka = _times(_times(a, self.matrix), self.matrix.mT)
        else:
            Ka = _times(a / zeta.sqrt(), self.matrix) / zeta.sqrt()
        rho = self.Y.mT - Ka - regs.unsqueeze(-1) / zeta * a
        if self.heaviest is not None:
            rho = rho - rho.take_along_dim(self.heaviest.unsqueeze(0), -1)
        rho_B = _times(rho, B)
        both = torch.cat([f * rho_B, f * half], -2)
        P_rho, along = _times(both, B.mT).chunk(2, -2)
        square = half.square().sum(-1, keepdim=True)
        square = square.clamp(min=torch.finfo(half.dtype).tiny)
        return Step(a.mT, rho_B, P_rho.mT, (along / square).mT)


def _beside(parts: tuple[Tensor, ...], shared: bool) -> Tensor:
    """Several (R, ..., n, c) as columns; where every output has its own P, as (R, ..., c, n, parts)."""
    columns = parts if shared else [part.mT.unsqueeze(-1) for part in parts]
    return torch.cat(columns, -1)


def _corrected(solved: Tensor, along: Tensor) -> Tensor:
    """r_L of Note [spectral accuracy], from P_LL^{-1} a_L and P_LL^{-1} (P rho)_L side by side."""
    r, step = solved.chunk(2, -1)  # (R, ..., g, s, c)
    share = 1 - (r * along).sum(-2, keepdim=True)
    return r + (share * step).detach()


def spectral(K: Tensor, weight: Tensor, Y: Tensor, bias: bool, Z: Tensor | None = None) -> Spectral:
    """Decompose K (..., n, n), with weights (..., n) and targets (..., n, c); Note [spectral form].

    Where K = Z Z^T, the features Z (..., n, d) are centred about their weighted mean if there is a bias.

    Differentiable once in K, weight, Y and the regularisations. Cost one eigendecomposition, and n^3 for
    each regularisation in the backward.
    """
    heaviest = weight.argmax(-1)[..., None, None] if bias else None
    with torch.no_grad():
        root = weight.sqrt().unsqueeze(-1)  # (..., n, 1)
        A = _centred_kernel(K, weight).mul_(root) if bias and Z is None else K * root
        A.mul_(root.mT)
        w, V, size = _eigen(A, _unit(root) if bias else None)
        B = _basis(V, root, heaviest)
    if heaviest is not None:
        Y = Y - Y.detach().take_along_dim(heaviest, -2)
    return Spectral(
        K=K,
        weight=weight,
        Y=Y,
        matrix=A if Z is None else Z.detach(),
        w=w,
        B=B,
        size=size,
        heaviest=heaviest,
        by_features=Z is not None,
    )
