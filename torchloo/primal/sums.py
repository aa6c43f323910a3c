"""Sets of rows left out by the sums over the other rows: large sets, and those that blocks would lose.

Note [large sets]
A set L of more rows than features takes the other side of its block P_LL (Note [primal form]), which is of
the size of the features. With C_L = R + the sum of zeta z z^T over all rows but those of L,

    P_LL^{-1} = Omega_L^{-1} + Z_L C_L^{-1} Z_L^T,    r_L = P_LL^{-1} a_L.

The same holds for the features Z S and the penalty S^T R S, whichever S is taken. With S = F^{-T}, where
F F^T = C is the factor of all rows, S^T C_L S has the eigenvalues 1 - h of the set: its condition is that of
the set, whatever that of C. No value and no gradient depends on S, so it is held constant. The sums over the
others of all sets, of whatever size, come from one cumulative sum; nothing is subtracted.

What is lost in a_L where 1 - h is tiny cannot be had back: those sets are refitted.

Note [leaving out by sums]
The normal equations without L are sums over the other rows. Those of the rows in no set are
added up once, those of the sets before and after L by cumulative sums; nothing is subtracted, so
nothing cancels. With C the normal matrix without L, P_LL^{-1} = Omega_L^{-1} + Z_L C^{-1} Z_L^T.

Such sets leave little to learn from, so C is badly conditioned: its factor F, C = F F^T, comes not from
the sums but from QR factorisations of the rows and of a root of the penalty, which square no condition.
That of the rows in no set serves all sets; each of these adds the rows of the others to its triangle. The
sums give F its derivatives, of every order. Cost n p^2 for each chunk of sets, p^3 + n p for each set.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from torchloo.clusters import Partition
from torchloo.factors import lower_factor, triangle
from torchloo.guards import Guard, values_visible

__all__ = [
    "is_lost",
    "leave_out_large",
    "leave_out_lost",
    "normal",
    "root_of",
    "sum_of_others",
    "whitened",
    "with_derivatives",
]

# How many numbers the sets that are refitted together may take at once.
_CHUNK = 1 << 23


def normal(Z: Tensor, R: Tensor, weight: Tensor) -> Tensor:
    """C = R + Z^T Omega Z, (..., p, p)."""
    return R + Z.mT @ (weight.unsqueeze(-1) * Z)


def whitened(L: Tensor, V: Tensor) -> Tensor:
    """L^{-1} V for the factor L of C = L L^T; a diagonal factor comes as a vector (..., p)."""
    if L.ndim < V.ndim:
        return V / L.unsqueeze(-1)
    return torch.linalg.solve_triangular(L, V, upper=False)


def is_lost(remainder: Tensor, least: Tensor) -> Tensor:
    """Whether sets, by their I - H_LL or the other side of it (..., g, k, k), have lost 1 - h, (..., g).

    1 - h is the smallest pivot, and must be above `least` (...). None is lost where values cannot be looked
    at: then nothing is refitted.
    """
    if not values_visible(remainder):
        return torch.zeros_like(remainder[..., 0, 0], dtype=torch.bool)
    L, info = torch.linalg.cholesky_ex(remainder.detach())
    return (info != 0) | ~(L.diagonal(dim1=-2, dim2=-1).square().amin(-1) > least.unsqueeze(-1))


def sum_of_others(parts: Tensor) -> Tensor:
    """For each of the parts (..., g, p, c), the sum of the others, without subtracting anything."""
    none = torch.zeros_like(parts[..., :1, :, :])
    before = torch.cat([none, parts[..., :-1, :, :]], -3).cumsum(-3)
    after = torch.cat([parts[..., 1:, :, :], none], -3).flip(-3).cumsum(-3).flip(-3)
    return before + after


def leave_out_large(
    Z: Tensor,
    R: Tensor,
    weight: Tensor,
    a: Tensor,
    factor: Tensor,
    least: Tensor,
    large: Partition,
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Sets of more rows than features, by Note [large sets].

    Args:
        Z: (..., n, p), R: (..., p, p), weight: (..., n).
        a: P Y, (..., n, c).
        factor: of C, (..., p, p), or (..., p) if diagonal; held constant.
        least: the 1 - h below which a set is lost to rounding, (...).
        large: the sets.

    Returns:
        held-out residuals (..., g, s, c), diag(P_LL^{-1}), (..., g, s, 1), and which sets (..., g) are lost
        to rounding, for each size; of these the values mean nothing.

    Differentiable to every order. Cost n p^2, and p^3 for each set. Memory 5 n p numbers, 7 n p with the
    backward; 8 n p and 11 n p where the sets are hardly larger than p.
    """
    scale = weight.sqrt().unsqueeze(-1)
    V = whitened(factor, (scale * Z).mT).mT  # (..., n, p), Omega^{1/2} Z S
    parts = large.gather(V)
    outside = whitened(factor, whitened(factor, R).mT)
    if large.index.numel() < V.shape[-2]:
        V_out = V.index_fill(-2, large.index, 0.0)  # the rows in no set
        outside = outside + V_out.mT @ V_out
    C = outside.unsqueeze(-3) + sum_of_others(torch.cat([V_L.mT @ V_L for V_L in parts], -3))
    lost = is_lost(C, least)
    # A harmless matrix in place of a lost one: what comes of it is thrown away, and so is its gradient.
    unit = torch.diag_embed(torch.ones_like(C[..., 0]))
    factors = torch.linalg.cholesky_ex(torch.where(lost[..., None, None], unit, C)).L
    counts = [len(rows) for rows in large.groups]
    residuals, variances = [], []
    for V_L, scale_L, a_L, L in zip(
        parts, large.gather(scale), large.gather(a), factors.split(counts, -3), strict=True
    ):
        root = torch.linalg.solve_triangular(L, V_L.mT, upper=False)  # (..., g, p, s)
        b = a_L / scale_L
        residuals.append((b + root.mT @ (root @ b)) / scale_L)
        variances.append((1 + root.square().sum(-2).unsqueeze(-1)) / scale_L.square())
    return residuals, variances, list(lost.split(counts, -1))


def leave_out_lost(
    Z: Tensor, R: Tensor, weight: Tensor, Y: Tensor, sets: list[Tensor], guard: Guard
) -> tuple[Tensor, Tensor, Tensor]:
    """Sets of rows (g, s), for each size, refitted by Note [leaving out by sums].

    Returns:
        all their rows (l,), with held-out residuals (l, c) and diag(P_LL^{-1}), (l, 1).
    """
    n, p, c = *Z.shape, Y.shape[-1]
    largest = max(part.shape[-1] for part in sets)
    together = min(_CHUNK // (p * p + n * c), math.isqrt(_CHUNK // (p * largest)))
    rows, residuals, variances = [], [], []
    for some in _chunks(sets, max(1, together)):
        for part, r, variance in zip(some, *_refit(Z, R, weight, Y, Partition(some), guard), strict=True):
            rows.append(part.flatten())
            residuals.append(r.flatten(0, 1))
            variances.append(variance.flatten(0, 1))
    return torch.cat(rows), torch.cat(residuals), torch.cat(variances)


def _chunks(sets: list[Tensor], size: int) -> Iterator[tuple[Tensor, ...]]:
    """The sets (g, s) of each size, so many at a time, whatever their sizes."""
    some: list[Tensor] = []
    room = size
    for rows in sets:
        while len(rows):
            some.append(rows[:room])
            rows, room = rows[room:], room - len(some[-1])
            if room == 0:
                yield tuple(some)
                some, room = [], size
    if some:
        yield tuple(some)


def _refit(
    Z: Tensor, R: Tensor, weight: Tensor, Y: Tensor, partition: Partition, guard: Guard
) -> tuple[list[Tensor], list[Tensor]]:
    """Held-out residuals (g, s, c) and diag(P_LL^{-1}), (g, s, 1), for each size; G sets in all."""
    counts, c = [len(rows) for rows in partition.groups], Y.shape[-1]
    weighted = weight.unsqueeze(-1) * torch.cat([Z, Y], -1)
    parts = zip(partition.gather(Z), partition.gather(weighted), strict=True)
    sums = sum_of_others(torch.cat([Z_L.mT @ V_L for Z_L, V_L in parts]))  # (G, p, p + c)
    sums = sums + Z.mT @ weighted.index_fill(0, partition.index, 0.0)  # of the rows in no set
    C, right = sums.split([len(R), c], -1)
    L = with_derivatives(_triangles(Z, R, weight, partition, guard), R + C)
    coef = torch.cholesky_solve(right, L)  # (G, p, c)
    # One step of refinement from the rows themselves, as for the coefficients of all rows.
    kept = torch.where(_members(partition, len(Z)), 0.0, weight.unsqueeze(-1))  # (n, G)
    e = Y.unsqueeze(-2) - (Z @ coef.transpose(0, 1).flatten(-2)).unflatten(-1, (-1, c))  # (n, G, c)
    gradient = (Z.mT @ (kept.unsqueeze(-1) * e).flatten(-2)).unflatten(-1, (-1, c)).transpose(0, 1)
    coef = coef + torch.cholesky_solve(gradient - R @ coef, L)
    residuals, variances = [], []
    for coef_L, L_L, Z_L, Y_L, zeta in zip(
        coef.split(counts),
        L.split(counts),
        *(partition.gather(values) for values in (Z, Y, weight.unsqueeze(-1))),
        strict=True,
    ):
        residuals.append(Y_L - Z_L @ coef_L)
        root = torch.linalg.solve_triangular(L_L, Z_L.mT, upper=False)  # (g, p, s)
        variances.append(1 / zeta + root.square().sum(-2).unsqueeze(-1))
    return residuals, variances


@torch.no_grad()
def _triangles(Z: Tensor, R: Tensor, weight: Tensor, partition: Partition, guard: Guard) -> Tensor:
    """Lower factors (G, p, p) of the normal matrices without each set; Note [leaving out by sums]."""
    V = weight.sqrt().unsqueeze(-1) * Z
    index, members = partition.index, _members(partition, len(Z))
    outside = triangle(torch.cat([V.index_fill(0, index, 0.0), root_of(R, guard)]))
    others = V[index] * ~members[index].mT.unsqueeze(-1)  # (G, l, p)
    return lower_factor(torch.cat([others, outside.expand(len(others), -1, -1)], -2), guard)


def root_of(R: Tensor, guard: Guard) -> Tensor:
    """B (..., p, p) with B^T B = R, a penalty."""
    w, Q = torch.linalg.eigh(R)
    least = -w.shape[-1] * torch.finfo(w.dtype).eps * w.abs().amax(-1, keepdim=True)
    guard.require(w >= least, "R must be positive semi-definite")
    return w.clamp(min=0).sqrt().unsqueeze(-1) * Q.mT


def with_derivatives(L: Tensor, C: Tensor) -> Tensor:
    """L (..., p, p) with the derivatives of the Cholesky factor of C, of which it is the better value."""
    if not C.requires_grad:
        return L
    whitened_C = whitened(L, whitened(L, C).mT)
    unit = torch.eye(L.shape[-1], dtype=L.dtype, device=L.device)
    return L @ torch.linalg.cholesky(unit + (whitened_C - whitened_C.detach()))


def _members(partition: Partition, n: int) -> Tensor:
    """Whether each of n rows is in each of the sets, boolean (n, G)."""
    index = partition.index
    sizes = [rows.shape[1] for rows in partition.groups for _ in rows]
    sets = torch.arange(len(sizes), device=index.device)
    of_rows = sets.repeat_interleave(torch.tensor(sizes, device=index.device))
    number = torch.full((n,), -1, device=index.device).index_copy(0, index, of_rows)
    return number.unsqueeze(-1) == sets
