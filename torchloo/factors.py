"""Cholesky factors of A = B^T B from B itself, as forming A would square the condition number of B."""

from typing import NamedTuple

import torch
from torch import Tensor

from torchloo.blocks import NOT_DEFINITE
from torchloo.guards import Guard, values_visible
from torchloo.memory import cholesky_in_place
from torchloo.panels import triangular_inverse

__all__ = [
    "ILL_CONDITIONED",
    "ILL_CONDITIONED_PATH",
    "SINGLE",
    "Eigen",
    "condition",
    "inverse_factor",
    "inverse_factor_of",
    "least_squares",
    "lower_factor",
    "root_of",
    "triangle",
    "trusted",
    "with_derivatives",
]

# Products of float32 rows are computed in float32 up to this condition number: eps times it is 1e-4.
SINGLE = 1e-4 / torch.finfo(torch.float32).eps

# Above this condition number of A, its Cholesky factorisation is not accurate enough for leave-one-out.
ILL_CONDITIONED = 1e6

# Above this condition number, times the square root of the number of rows, eigenvalues of S are not accurate
# enough for the smallest regularisation of a path.
ILL_CONDITIONED_PATH = 1e6

# Below this 1 - h the closed form has lost too many of the 16 digits, however well conditioned the matrix.
_REFIT_BELOW = 1e-4

# 1 - h is trusted if it is at least this multiple of the error that the condition number may cause: quotients
# by it then have 8 digits, and one to spare.
_DIGITS = 1e9

# Added to the condition number where a factorisation failed.
_FAILED = 1e30

# Steps of the power iteration that estimates the condition number.
_STEPS = 3


def condition(L: Tensor, inverse: Tensor | None = None, diagonal: Tensor | None = None) -> Tensor:
    """An estimate of the condition number of A = L L^T (..., p, p), with its diagonal scaled to 1, (...).

    The norm of the inverse by a few steps of the power method, faster if the inverse of L and the diagonal of
    A, (..., p), are given.
    """
    diagonal = torch.linalg.vector_norm(L, dim=-1).square() if diagonal is None else diagonal
    diagonal = diagonal.unsqueeze(-1)
    root = diagonal.sqrt()
    v = torch.arange(L.shape[-1], dtype=L.dtype, device=L.device).cos().unsqueeze(-1) / root
    for _ in range(_STEPS):  # no vector of these grows beyond the range of numbers, unless the estimate does
        before = diagonal * v
        if inverse is None:
            half = torch.linalg.solve_triangular(L, before, upper=False)
            v = torch.linalg.solve_triangular(L.mT, half, upper=True)
        else:
            v = inverse.mT @ (inverse @ before)
    lengths = [torch.linalg.vector_norm(vector, dim=(-2, -1)) for vector in (root * v, before / root)]
    return lengths[0] / lengths[1]


def trusted(condition: Tensor) -> Tensor:
    """The smallest 1 - h that is accurate, for leverages from a matrix of this condition number.

    Below it, rows and sets are refitted. A factor computed from B itself has the condition number of B.
    """
    lost = _DIGITS * torch.finfo(condition.dtype).eps * condition
    return lost.clamp(min=_REFIT_BELOW, max=max(_REFIT_BELOW, 0.5))


def inverse_factor(C: Tensor) -> tuple[Tensor, Tensor]:
    """T = L^{-1} for C = L L^T (..., p, p), and the condition number (...) of C, huge if there is no L.

    Where there is no graph, L may be in the memory of C, whose lower triangle is read.
    """
    diagonal = C.detach().diagonal(dim1=-2, dim2=-1).clone()
    in_place = values_visible(C) and not (torch.is_grad_enabled() and C.requires_grad)
    L, info = cholesky_in_place(C) if in_place else torch.linalg.cholesky_ex(C)
    T = triangular_inverse(L)
    with torch.no_grad():
        return T, torch.add(condition(L, T, diagonal), info, alpha=_FAILED)


def inverse_factor_of(R: Tensor, d: Tensor, B: Tensor, guard: Guard) -> tuple[Tensor, Tensor, Tensor]:
    """T for C = R^T R + B^T B, all of them (..., p, p), the smallest accurate 1 - h, and p.

    p (..., p, c) minimises |d - R p|^2 + |B p|^2 for d (..., p, c). It is not computed from R^T d, in which
    rows that are shorter by many orders of magnitude are lost to rounding.
    """
    p = R.shape[-1]
    penalty = torch.nn.functional.pad(B.expand_as(R), (0, d.shape[-1]))
    F, coefficients = least_squares(torch.cat([torch.cat([R, d], -1), penalty], -2), p, guard)
    L = (F.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-1) * F).mT
    unit = torch.eye(p, dtype=L.dtype, device=L.device)
    T = torch.linalg.solve_triangular(L, unit.expand_as(L), upper=False)
    return T, trusted(condition(L, T).sqrt()), coefficients


class Eigen(NamedTuple):
    """Eigenvalues, ascending, and eigenvectors of S = B^T B: S + reg I is diagonal there for every reg."""

    w: Tensor
    """(..., 1, 1, p), beside regularisations (..., R, c')."""
    Q: Tensor
    """(..., p, p)."""
    by_rows: bool
    """Whether they are computed from B itself, so that their errors are those of a root of S."""

    @classmethod
    def of(cls, S: Tensor) -> "Eigen":
        """The eigenvalues of S (..., p, p), whose lower triangle is read."""
        w, Q = torch.linalg.eigh(S)
        return cls(w.clamp(min=0)[..., None, None, :], Q, False)  # negative eigenvalues are rounding errors

    @classmethod
    def of_rows(cls, R: Tensor) -> "Eigen":
        """The same by singular values, from R (..., p, p) with R^T R = S, where S is badly conditioned."""
        _, values, Qt = torch.linalg.svd(R)
        return cls(values.square().flip(-1)[..., None, None, :], Qt.mT.flip(-1), True)

    def condition(self, reg: Tensor) -> Tensor:
        """The condition number of S + reg I, for regularisations (..., R, c')."""
        return self.w[..., -1] / reg + 1

    def least(self, reg: Tensor) -> Tensor:
        """The smallest 1 - h that is accurate, for regularisations (..., R, c')."""
        estimate = self.condition(reg)
        return trusted(estimate.sqrt() if self.by_rows else estimate)


def lower_factor(rows: Tensor) -> Tensor:
    """L (..., p, p), lower triangular with a positive diagonal: L L^T = B^T B for B (..., m, p), m >= p."""
    R = triangle(rows)
    signs = R.diagonal(dim1=-2, dim2=-1).sign()
    return (signs.unsqueeze(-1) * R).mT


def triangle(rows: Tensor) -> Tensor:
    """R (..., p, p), upper triangular, with R^T R = B^T B for B (..., m, p), m >= p.

    By QR of the rows sorted by their length, the longest first: they may differ by many orders of magnitude.
    """
    length = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    longest_first = length.argsort(-2, descending=True)
    return torch.linalg.qr(rows.take_along_dim(longest_first, -2), mode="r").R


def least_squares(rows: Tensor, p: int, guard: Guard) -> tuple[Tensor, Tensor]:
    """F (..., p, p) with F^T F = B^T B, and the x (..., p, c) of least |D - B x|, for rows [B D]."""
    R = triangle(rows)
    F, d = R[..., :p, :p], R[..., :p, p:]
    limit = p * torch.finfo(F.dtype).eps * torch.linalg.vector_norm(F, dim=-2)
    guard.require(F.diagonal(dim1=-2, dim2=-1).abs() > limit, NOT_DEFINITE)
    return F, torch.linalg.solve_triangular(F, d, upper=True)


def root_of(R: Tensor, guard: Guard, dtype: torch.dtype) -> Tensor:
    """B (..., p, p) with B^T B = R, a penalty in float64 that came in a dtype."""
    w, Q = torch.linalg.eigh(R)
    largest = w.abs().amax(-1, keepdim=True)
    rounding = w.shape[-1] * torch.finfo(dtype).eps * largest
    guard.require(w >= -rounding, "R must be positive semi-definite")
    return w.clamp(min=0).sqrt().unsqueeze(-1) * Q.mT


def with_derivatives(T: Tensor, C: Tensor) -> Tensor:
    """T (..., p, p) with the derivatives of the inverse of the Cholesky factor of C.

    T is a more accurate value of that inverse; the value of C itself is not used.
    """
    if not C.requires_grad:
        return T
    change = T @ C @ T.mT
    unit = torch.eye(C.shape[-1], dtype=C.dtype, device=C.device)
    step = torch.linalg.cholesky(unit + (change - change.detach()))
    return torch.linalg.solve_triangular(step, T.expand_as(step), upper=False)
