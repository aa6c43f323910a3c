"""Held-out outputs for many regularisations: which form serves each of them, and what comes back."""

import contextlib
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
from torchloo.spectral.form import Parts, Spectral, Step, spectral

__all__ = ["path_dual", "path_features"]

# So many factorisations are still cheaper than one eigendecomposition: it costs 4 to 7 of them from
# n = 1000 on and in batches of small problems (scripts/bench/least_squares.py measures it).
_FEW = 5

# Where the rounding of Note [spectral accuracy] is more than this, another form serves (float32: the second).
_LOST = {torch.float64: 3e-10, torch.float32: 3e-8}

# So many numbers at least are computed at once, however small a problem.
_TOGETHER = 2**20


def _decomposed(
    problem: Problem, K: Tensor, Z: Tensor | None, regs: Tensor, partition: Partition, bias: bool
) -> Parts:
    """Held-out parts by Note [spectral form], but for regularisations that it would serve badly."""
    K, regs, guard = K.double(), regs.double(), problem.guard
    form = spectral(K, problem.weight.double(), problem.Y.double(), bias, Z)
    lost = [False] * len(regs)
    if values_visible(form.size):
        lost = (form.rounding(regs.detach()) > _LOST[problem.Y.dtype]).tolist()
    if Z is not None and any(lost):
        form, lost = form.by_singular_values(), [False] * len(regs)
    guard.require(form.least + regs.min() > 0, NOT_DEFINITE)
    if not any(lost):
        return _joined(_in_chunks(form, regs, partition, guard))
    order = sorted(range(len(regs)), key=lost.__getitem__)  # those that are served come first
    served, others = regs[order].tensor_split([lost.count(False)])
    parts = _in_chunks(form, served, partition, guard) if len(served) else []
    parts.append(_factorised(problem, K, others, partition, bias))
    back = torch.tensor(order, device=regs.device).argsort()
    r, variance, refitted = _joined(parts)
    return r[back], variance[back], refitted[back]


def _joined(parts: list[Parts]) -> Parts:
    r, variance, refitted = (torch.cat(part) for part in zip(*parts, strict=True))
    return r, variance, refitted


def _in_chunks(form: Spectral, regs: Tensor, partition: Partition, guard: Guard) -> list[Parts]:
    """Held-out parts of a few regularisations at a time; the graph keeps no blocks if there are many."""
    together = max(form.B.numel(), _TOGETHER)
    columns = form.w.numel() * regs.shape[1]  # of P, for one regularisation
    largest = partition.groups[-1].shape[-1]
    width = max(1, together // (columns * form.w.shape[-1] if largest > 1 else columns))
    held_out: Callable[..., Parts] = form.held_out
    if columns * largest * len(regs) > together and torch.is_grad_enabled():
        held_out = functools.partial(checkpoint, held_out, use_reentrant=False, preserve_rng_state=False)
    with torch.no_grad():
        gathered, step = form.gathered(partition), form.step(regs.detach())
    chunks = zip(regs.split(width), *(part.split(width) for part in step), strict=True)
    return [held_out(chunk, partition, guard, gathered, Step(*parts)) for chunk, *parts in chunks]


class _IllConditionedError(Exception):
    """Z Z^T is too badly conditioned to be factorised."""


def _refuse() -> Dual:
    raise _IllConditionedError


def _factorised(
    problem: Problem, K: Tensor, regs: Tensor, partition: Partition, bias: bool, by_features: bool = False
) -> Parts:
    """Held-out parts by one Cholesky factorisation for each regularisation.

    A K from features squares their condition: _IllConditionedError where that costs too many digits.
    """
    dtype = K.dtype
    inverse = 1 / problem.weight.to(dtype)
    otherwise = _refuse if by_features else None

    def form_of(reg: Tensor, Y: Tensor) -> Dual:
        ridge = reg.to(dtype).unsqueeze(-1) * inverse
        return dual(K, ridge, Y.to(dtype), bias, problem.guard, otherwise)

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
    for the accuracy of eigenvalues are factorised: some 1e-7 of the scale of K, more where weights
    differ by many orders; see Note [spectral accuracy].
    """
    problem = check_dual(guard, K, Y, 1.0, weight)
    regs, partition = _checked(problem, regs, clusters)
    return _dual(problem, problem.expand(K), None, regs, partition, bias, flat)


def _checked(problem: Problem, regs: Tensor, clusters: object | None) -> tuple[Tensor, Partition]:
    """The regularisations (R, 1) or (R, c), and the sets; values are looked at."""
    guard, Y = problem.guard, problem.Y
    regs = check_regs(guard, regs, Y.shape[-1], like=Y)
    partition = Partition.of(guard.function, clusters, Y.shape[-2], Y.device)
    guard.check()  # before a decomposition that would fail in words of its own
    return regs, partition


def _dual(
    problem: Problem,
    K: Tensor,
    Z: Tensor | None,
    regs: Tensor,
    partition: Partition,
    bias: bool,
    flat: bool,
) -> HeldOut:
    """A path from K (..., n, n): a few regularisations in its own dtype, many in float64."""
    with full_precision(K):
        parts = None
        if regs.numel() <= _FEW:
            with contextlib.suppress(_IllConditionedError):
                parts = _factorised(problem, K, regs, partition, bias, Z is not None)
        if parts is None:
            parts = _decomposed(problem, K, Z, regs, partition, bias)
        return _finish(problem, partition, parts, flat)


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
    constant: no output and no gradient depends on it. With no fewer, this is `path_dual` with singular
    values in place of eigenvalues where regularisations are too small for the latter.

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
            if bias:  # once more, as the first mean was rounded: a row that outweighs all others is the mean
                share = (zeta / zeta.sum(-1, keepdim=True)).detach().unsqueeze(-2)  # (..., 1, n)
                shifted = shifted - share @ shifted.detach()
            return _dual(problem, shifted @ shifted.mT, shifted, regs, partition, bias, flat)
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
