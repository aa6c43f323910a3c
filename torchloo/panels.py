"""Products and inverses of symmetric and triangular matrices, in panels that skip the half not needed."""

import itertools
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from torchloo.autograd import apply
from torchloo.guards import values_visible
from torchloo.precision import full_precision

__all__ = [
    "WIDE",
    "LowerInverse",
    "add_matmul",
    "add_symmetric",
    "inner_products",
    "matmul_into",
    "mirrored",
    "panels",
    "room_like",
    "times_lower",
    "times_upper",
    "triangular_inverse",
]

# Widths of a panel: wide enough for full speed, narrow enough to leave out most of the triangle that is not
# needed (scripts/bench/scale.py measures what is saved), and a multiple of what the registers of a CPU hold,
# as a product with two columns more than that takes half as long again. Features of many rows have the first,
# those of fewer rows the second, kernel matrices the third.
_NARROW, _MEDIUM, WIDE, _MANY_ROWS = 48, 96, 192, 1024

# Rows of a triangle from which on its inverse has the second height of a panel, else the first; and the
# width of the parts of a panel.
_LARGE, _HEIGHTS, _PART = 512, (64, 160), 128

# Up to this condition number (of the Frobenius norm) the inverse of a panel is good enough.
_CONDITION = 1e3


def panels(n: int, width: int) -> list[tuple[int, int]]:
    """First and last row (excluded) of panels of that width; the last one has what is left."""
    return list(itertools.pairwise([*range(0, n, width), n]))


def _panels_of(V: Tensor) -> list[tuple[int, int]]:
    """Those of features V (..., p, b)."""
    return panels(V.shape[-2], _NARROW if V.shape[-1] >= _MANY_ROWS else _MEDIUM)


def mirrored(S: Tensor, width: int = _NARROW) -> Tensor:
    """A symmetric matrix (..., p, p), computed by panels of that width or wider, with both triangles."""
    for start, stop in panels(S.shape[-1], width):
        S[..., :start, start:stop] = S[..., start:stop, :start].mT
    return S


def _solved_triangle(L: Tensor) -> Tensor:
    """L^{-1} by forward substitution."""
    unit = torch.eye(L.shape[-1], dtype=L.dtype, device=L.device)
    return torch.linalg.solve_triangular(L, unit, upper=False)


def triangular_inverse(L: Tensor) -> Tensor:
    """S = L^{-1} (..., n, n) for a lower triangular L: n^3/3 operations.

    Panel J of its rows is -S_JJ L_J S of the rows above it. Differentiable, then by forward substitution.
    """
    n, graph = L.shape[-1], torch.is_grad_enabled() and L.requires_grad
    if n <= _MEDIUM or graph or not values_visible(L):  # no graph and no transform knows slices written to
        return _solved_triangle(L)
    S = torch.zeros_like(L, memory_format=torch.contiguous_format).mT  # column-major, which is faster
    for start, stop in panels(n, _HEIGHTS[n > _LARGE]):
        S_JJ = _solved_triangle(L[..., start:stop, start:stop])
        S[..., start:stop, start:stop] = S_JJ
        if start == 0:
            continue
        X = -S_JJ @ L[..., start:stop, :start]  # (..., panel, start)
        for left, right in panels(start, _PART):  # each skips the rows of S that are zero
            panel = S[..., start:stop, left:right]
            torch.matmul(X[..., left:], S[..., left:start, left:right], out=panel)
    return S


def add_matmul(M: Tensor, left: Tensor, right: Tensor, factor: float = 1.0) -> Tensor:
    """M + factor left right, in place, for matrices with at most one axis in front; M may be wider."""
    if M.dtype != left.dtype:
        return M.add_(left @ right, alpha=factor)
    if M.ndim == 2:
        return M.addmm_(left, right, alpha=factor)
    if M.is_contiguous():
        return M.baddbmm_(left, right, alpha=factor)
    M.mT.baddbmm_(right.mT, left.mT, alpha=factor)  # or one matrix of the batch after another
    return M


def matmul_into(out: Tensor, A: Tensor, V: Tensor) -> Tensor:
    """A V for A (..., p, q) and V (..., q, b), in the memory of `out` (..., p, b), laid out by `room_like`.

    Into strides that are not contiguous, torch would multiply one matrix of a batch after another.
    """
    if out.ndim == 2:
        return torch.matmul(A, V, out=out)
    if out.mT.is_contiguous():
        torch.matmul(V.mT, A.mT, out=out.mT)
        return out
    return out.copy_((V.mT @ A.mT).mT)


def add_symmetric(S: Tensor, V: Tensor, weight: Tensor | None = None) -> None:
    """Add V V^T or V diag(weight) V^T to the lower triangle of S (..., p, p), which may have a wider dtype.

    V is (..., p, b) and weights (..., b) have any sign. At 0.6 of the work of a general product. What is
    above the diagonal of S afterwards has no meaning.
    """
    left = V if weight is None else V * weight.unsqueeze(-2).to(V.dtype)
    for start, stop in _panels_of(V):
        corner = S[..., start:stop, :stop]
        add_matmul(corner, left[..., start:stop, :], V[..., :stop, :].mT)


def room_like(V: Tensor, p: int) -> Tensor:
    """Room for (..., p, b), laid out as V (..., p', b): features are contiguous, or those of each row are."""
    *batch, _, b = V.shape
    if V.stride(-2) == 1:
        aligned = p if batch else -(-p // 8) * 8  # a multiple of a cache line of float64
        return V.new_empty(*batch, b, aligned)[..., :p].mT
    return V.new_empty(*batch, p, b)


def times_lower(T: Tensor, V: Tensor, out: Tensor) -> Tensor:
    """T V for a lower triangular T (..., p, p) and V (..., p, b), at 0.6 of the work of a general product."""
    for start, stop in _panels_of(V):
        matmul_into(out[..., start:stop, :], T[..., start:stop, :stop], V[..., :stop, :])
    return out


def times_upper(T: Tensor, V: Tensor) -> Tensor:
    """T^T V for a lower triangular T (..., p, p) and V (..., p, b), likewise."""
    out = room_like(V, V.shape[-2])
    for start, stop in _panels_of(V):
        matmul_into(out[..., start:stop, :], T[..., start:, start:stop].mT, V[..., start:, :])
    return out


class LowerInverse:
    """L^{-1} V for a lower triangular L (p, p), panel by panel.

    Panels on the diagonal that are well conditioned are inverted once: a product is faster than a
    solution, and then as accurate. Which ones are is to be decided, once the values of `good` are known.
    """

    def __init__(self, L: Tensor) -> None:
        self.L, self._panels = L.contiguous(), panels(len(L), _MEDIUM)
        self._inverses: list[Tensor | None] = []
        good = []
        for start, stop in self._panels:
            panel = self.L[start:stop, start:stop]
            inverse = _solved_triangle(panel)
            good.append(torch.linalg.vector_norm(panel) * torch.linalg.vector_norm(inverse) < _CONDITION)
            self._inverses.append(inverse)
        self.good = torch.stack(good)  # one flag for each panel

    def decide(self, good: list[bool]) -> None:
        """Solve with the panels that are not good, as the values of the flags say."""
        pairs = zip(self._inverses, good, strict=True)
        self._inverses = [inverse if fine else None for inverse, fine in pairs]

    def __call__(self, V: Tensor) -> Tensor:
        """L^{-1} V for V (p, b)."""
        out, L = torch.empty_like(V), self.L.to(V.dtype)
        for (start, stop), inverse in zip(self._panels, self._inverses, strict=True):
            rest = V[start:stop]
            if start:
                rest = torch.addmm(rest, L[start:stop, :start], out[:start], alpha=-1)
            if inverse is None:
                panel = L[start:stop, start:stop]
                out[start:stop] = torch.linalg.solve_triangular(panel, rest, upper=False)
            else:
                torch.mm(inverse.to(V.dtype), rest, out=out[start:stop])
        return out


class _InnerProducts(Function):
    """Z -> Z Z^T for Z (..., n, d), computing half of it; its backward is one product of that size."""

    generate_vmap_rule = True

    @staticmethod
    def forward(Z: Tensor) -> Tensor:
        n = Z.shape[-2]
        if n <= WIDE or not values_visible(Z):
            return Z @ Z.mT
        product = Z.new_empty(*Z.shape[:-1], n)
        for start, stop in panels(n, WIDE):
            rows, rows_above = Z[..., start:stop, :], Z[..., :stop, :]
            torch.matmul(rows, rows_above.mT, out=product[..., start:stop, :stop])
        return mirrored(product, WIDE)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, Kbar: Tensor) -> Tensor:
        (Z,) = ctx.saved_tensors
        with full_precision(Z):
            return (Kbar + Kbar.mT) @ Z


def inner_products(Z: Tensor) -> Tensor:
    """Z Z^T, (..., n, n), for features Z (..., n, d)."""
    return apply(_InnerProducts, Z)
