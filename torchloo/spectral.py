"""The spectral form: held-out residuals for many regularisations from one decomposition.

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

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable
from torch.utils.checkpoint import checkpoint

from torchloo.blocks import NOT_DEFINITE, solve_blocks
from torchloo.clusters import Partition
from torchloo.dual import Dual, add_product, congruence, dual
from torchloo.guards import Guard, values_visible
from torchloo.held_out import HeldOut
from torchloo.precision import full_precision
from torchloo.primal import Primal, primal
from torchloo.problem import Problem, check_dual, check_features
from torchloo.smoothers import assemble, centred, with_ones

__all__ = ["path_dual", "path_features"]

# So many factorisations are still cheaper than one eigendecomposition: it costs 4 to 7 of them from
# n = 1000 on and in batches of small problems (scripts/bench/least_squares.py measures it).
_FEW = 5

# Eigenvalues are known to eps |A|. Where that is more than this part of a regularisation (float32:
# the second), its machine is factorised instead, which the scale of weights and of constants in K
# does not disturb.
_LOST = {torch.float64: 1e-9, torch.float32: 1e-5}

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


def _spectral(problem: Problem, K: Tensor, regs: Tensor, partition: Partition, bias: bool) -> Parts:
    """Held-out parts by Note [spectral form], but for regularisations that it would serve badly."""
    K, weight, Y = K.double(), problem.weight.double(), problem.Y.double()
    with torch.no_grad():
        w, B, size = _eigen(K, weight, bias)
        least = (w[..., :-1] if bias else w).amin(-1)  # (...)
        problem.guard.require(least + regs.min() > 0, NOT_DEFINITE)
    exact = list(range(len(regs)))
    if values_visible(size):
        lost = torch.finfo(w.dtype).eps * size.max() > _LOST[problem.Y.dtype] * regs.amin(-1)  # (R,)
        exact = (~lost).nonzero()[:, 0].tolist()
    others = [r for r in range(len(regs)) if r not in exact]
    parts = []
    # Blocks of a few regularisations at once; the graph keeps none of them if there are many.
    entries = sum(rows.numel() * rows.shape[-1] for rows in partition.groups) * regs.shape[1]
    width = max(1, K.shape[-1] ** 2 // entries)
    for chunk in torch.tensor(exact).split(width) if exact else ():
        arguments = (K, weight, regs[chunk.to(regs.device)].double(), Y, w, B, bias, partition, problem.guard)
        if width < len(exact) and torch.is_grad_enabled():
            parts.append(checkpoint(_chunk, *arguments, use_reentrant=False, preserve_rng_state=False))
        else:
            parts.append(_chunk(*arguments))
    if others:
        index = torch.tensor(others, device=regs.device)
        parts.append(_factorised(problem, K, regs[index].double(), partition, bias))
    order = torch.tensor(exact + others, device=regs.device).argsort()
    r, variance, refitted = (torch.cat(part)[order] for part in zip(*parts, strict=True))
    return r, variance, refitted


def _chunk(
    K: Tensor,
    weight: Tensor,
    regs: Tensor,
    Y: Tensor,
    w: Tensor,
    B: Tensor,
    bias: bool,
    partition: Partition,
    guard: Guard,
) -> Parts:
    """Held-out parts for a few regularisations."""
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


def _factorised(problem: Problem, K: Tensor, regs: Tensor, partition: Partition, bias: bool) -> Parts:
    """Held-out parts by one Cholesky factorisation for each regularisation."""
    dtype = K.dtype
    inverse = 1 / problem.weight.to(dtype)

    def form_of(reg: Tensor, Y: Tensor) -> Dual:
        return dual(K, reg.to(dtype).unsqueeze(-1) * inverse, Y.to(dtype), bias)

    return _each(problem, regs, partition, form_of)


def _check_regs(problem: Problem, regs: Tensor) -> Tensor:
    """Regularisations as (R, 1), or (R, c) with one for each output."""
    c = problem.Y.shape[-1]
    regs = torch.as_tensor(regs, dtype=problem.Y.dtype, device=problem.Y.device)
    if regs.ndim not in (1, 2) or 0 in regs.shape or (regs.ndim == 2 and regs.shape[1] not in (1, c)):
        raise ValueError(
            f"{problem.function}: regs must have shape (R,), or (R, {c}) with one for each output, "
            f"got {tuple(regs.shape)}"
        )
    problem.guard.positive(regs=regs)
    return regs if regs.ndim == 2 else regs.unsqueeze(-1)


def _each(
    problem: Problem,
    regs: Tensor,
    partition: Partition,
    form_of: Callable[[Tensor, Tensor], Dual | Primal],
) -> Parts:
    """Held-out parts of a form for every regularisation, one after another, stacked in front."""
    along_regs = []
    for row in regs:
        targets = [problem.Y] if regs.shape[1] == 1 else problem.Y.split(1, -1)
        parts = []
        for reg, Y in zip(row, targets, strict=True):
            form = form_of(reg.expand(problem.reg.shape), Y)
            problem.guard.require(form.info == 0, NOT_DEFINITE)
            r, variance, refitted = form.held_out(partition, problem.guard)
            parts.append((r, variance.expand_as(r), refitted.unsqueeze(-1)))
        r, variance, refitted = (torch.cat(part, -1) for part in zip(*parts, strict=True))
        along_regs.append((r, variance, refitted.any(-1)))
    r, variance, refitted = (torch.stack(part) for part in zip(*along_regs, strict=True))
    return r, variance, refitted


def _finish(problem: Problem, partition: Partition, parts: Parts, flat: bool) -> HeldOut:
    problem.guard.check()
    weight = problem.weight.expand(parts[2].shape)
    return assemble(problem.Y, weight, partition.labels, parts, flat)


def path_dual(
    guard: Guard,
    K: Tensor,
    Y: Tensor,
    regs: Tensor,
    weight: Tensor | None,
    bias: bool,
    clusters: object | None,
    flat: bool = False,
) -> HeldOut:
    """Held-out outputs of a kernel machine for every regularisation; Note [spectral form].

    Args:
        K: (..., n, n), Y: (..., n, c), weight: (..., n) or None.
        regs: (R,), or (R, c) with one for each output.
        clusters: integer labels (n,) on the host; None leaves every row out alone.

    Returns:
        HeldOut with an axis R before all others.

    Differentiable once in K, Y, regs and weight (a few regularisations are factorised one by one,
    and then to every order), but neither in forward mode nor under vmap. Cost one eigendecomposition
    in float64; the backward n^3 for each regularisation. Memory 5 n^2 numbers, 10 n^2 with the
    backward, more with few large clusters, and R n c for what comes back. Regularisations too small
    for the accuracy of eigenvalues, beside the scale of K and of the weights, are factorised.
    """
    problem = check_dual(guard, K, Y, 1.0, weight)
    regs = _check_regs(problem, regs)
    partition = Partition.of(guard.function, clusters, Y.shape[-2], Y.device)
    guard.check()  # before a decomposition that would fail in words of its own
    K = problem.expand(K)
    with full_precision(K):
        route = _factorised if regs.numel() <= _FEW else _spectral
        return _finish(problem, partition, route(problem, K, regs, partition, bias), flat)


def path_features(
    guard: Guard,
    Z: Tensor,
    Y: Tensor,
    regs: Tensor,
    weight: Tensor | None,
    bias: bool,
    clusters: object | None,
    flat: bool = False,
) -> HeldOut:
    """`path_dual` for the kernel K = Z Z^T, from the features Z (..., n, d), by the cheaper form.

    With fewer features than rows, they are rotated to the eigenvectors of their (weighted, centred)
    Gram matrix, where the normal matrix is diagonal for every regularisation. The rotation is held
    constant: no output and no gradient depends on it.

    Differentiable to every order. Cost n d^2 + d^3, and n d for each regularisation (n d^2 with its
    backward); memory n d + d^2 numbers for each regularisation.
    """
    n, d = Z.shape[-2:]
    problem = check_features(guard, Z, Y, 1.0, weight)
    if d + bias >= n:
        with full_precision(Z):
            shifted, _ = centred(problem.expand(Z), problem.weight, bias)
            return path_dual(guard, shifted @ shifted.mT, Y, regs, weight, bias, clusters, flat)
    regs = _check_regs(problem, regs)
    partition = Partition.of(guard.function, clusters, n, Y.device)
    guard.check()
    zeta = problem.weight.double()
    with full_precision(Z):
        shifted, _ = centred(problem.expand(Z).double(), zeta, bias)
        with torch.no_grad():
            w, Q = torch.linalg.eigh(shifted.mT @ (zeta.unsqueeze(-1) * shifted))
            w = w.clamp(min=0)  # a Gram matrix has no negative eigenvalues but by rounding
        rotated = shifted @ Q

        def form_of(reg: Tensor, Y: Tensor) -> Primal:
            reg = reg.double()
            design, R = with_ones(rotated, reg, bias)
            squared = w + reg.detach().unsqueeze(-1)
            if bias:
                squared = torch.cat([squared, zeta.detach().sum(-1, keepdim=True)], -1)
            return primal(design, R, zeta, Y, reg, squared.sqrt())

        parts = _each(problem, regs, partition, form_of)
    return _finish(problem, partition, parts, flat)
