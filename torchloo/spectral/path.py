"""Held-out outputs for many regularisations: which form serves each of them, and what comes back."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from torchloo.blocks import NOT_DEFINITE
from torchloo.clusters import Partition
from torchloo.dual import Dual, dual
from torchloo.guards import Guard, values_visible
from torchloo.held_out import HeldOut
from torchloo.precision import full_precision
from torchloo.primal import Primal, primal
from torchloo.problem import Problem, check_dual, check_features, check_regs
from torchloo.smoothers import assemble, centred, with_ones
from torchloo.spectral.form import Parts, Spectral, spectral

__all__ = ["path_dual", "path_features"]

# So many factorisations are still cheaper than one eigendecomposition: it costs 4 to 7 of them from
# n = 1000 on and in batches of small problems (scripts/bench/least_squares.py measures it).
_FEW = 5

# Eigenvalues are known to eps |A|. Where that is more than this part of a regularisation (float32:
# the second), its machine is factorised instead, which the scale of weights and of constants in K
# does not disturb.
_LOST = {torch.float64: 1e-9, torch.float32: 1e-5}


def _decomposed(problem: Problem, K: Tensor, regs: Tensor, partition: Partition, bias: bool) -> Parts:
    """Held-out parts by Note [spectral form], but for regularisations that it would serve badly."""
    K = K.double()
    form = spectral(K, problem.weight.double(), problem.Y.double(), bias)
    problem.guard.require(form.least + regs.min() > 0, NOT_DEFINITE)
    served = list(range(len(regs)))
    if values_visible(form.size):
        lost = torch.finfo(K.dtype).eps * form.size.max() > _LOST[problem.Y.dtype] * regs.amin(-1)  # (R,)
        served = (~lost).nonzero()[:, 0].tolist()
    others = [r for r in range(len(regs)) if r not in served]
    parts = []
    if served:
        index = torch.tensor(served, device=regs.device)
        parts += _in_chunks(form, regs[index].double(), partition, problem.guard)
    if others:
        index = torch.tensor(others, device=regs.device)
        parts.append(_factorised(problem, K, regs[index].double(), partition, bias))
    order = torch.tensor(served + others, device=regs.device).argsort()
    r, variance, refitted = (torch.cat(part)[order] for part in zip(*parts, strict=True))
    return r, variance, refitted


def _in_chunks(form: Spectral, regs: Tensor, partition: Partition, guard: Guard) -> list[Parts]:
    """Held-out parts of a few regularisations at a time; the graph keeps no blocks if there are many."""
    entries = sum(rows.numel() * rows.shape[-1] for rows in partition.groups) * regs.shape[1]
    width = max(1, form.K.shape[-1] ** 2 // entries)
    held_out: Callable[..., Parts] = form.held_out
    if width < len(regs) and torch.is_grad_enabled():
        held_out = functools.partial(checkpoint, held_out, use_reentrant=False, preserve_rng_state=False)
    return [held_out(chunk, partition, guard) for chunk in regs.split(width)]


def _factorised(problem: Problem, K: Tensor, regs: Tensor, partition: Partition, bias: bool) -> Parts:
    """Held-out parts by one Cholesky factorisation for each regularisation."""
    dtype = K.dtype
    inverse = 1 / problem.weight.to(dtype)

    def form_of(reg: Tensor, Y: Tensor) -> Dual:
        return dual(K, reg.to(dtype).unsqueeze(-1) * inverse, Y.to(dtype), bias, problem.guard)

    return _each(problem, regs, partition, form_of)


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
    regs, partition = _checked(problem, regs, clusters)
    return _dual(problem, problem.expand(K), regs, partition, bias, flat)


def _checked(problem: Problem, regs: Tensor, clusters: object | None) -> tuple[Tensor, Partition]:
    """The regularisations (R, 1) or (R, c), and the sets; values are looked at."""
    guard, Y = problem.guard, problem.Y
    regs = check_regs(guard, regs, Y.shape[-1], like=Y)
    partition = Partition.of(guard.function, clusters, Y.shape[-2], Y.device)
    guard.check()  # before a decomposition that would fail in words of its own
    return regs, partition


def _dual(problem: Problem, K: Tensor, regs: Tensor, partition: Partition, bias: bool, flat: bool) -> HeldOut:
    """A path from K (..., n, n): a few regularisations in its own dtype, many in float64."""
    with full_precision(K):
        route = _factorised if regs.numel() <= _FEW else _decomposed
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
    regs, partition = _checked(problem, regs, clusters)
    zeta = problem.weight.double()
    with full_precision(Z):
        shifted, _ = centred(problem.expand(Z).double(), zeta, bias)
        if d + bias >= n:
            return _dual(problem, shifted @ shifted.mT, regs, partition, bias, flat)
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
            return primal(design, R, zeta, Y, reg, guard, squared.sqrt())

        parts = _each(problem, regs, partition, form_of)
    return _finish(problem, partition, parts, flat)
