"""Leave-one-out of few rows with explicit features, where the overhead of operations dominates the time.

Note [quick form]
The dual form (Note [dual form] in dual.py) with the first row as its pivot p, for features that are
differences to that row: row and column p of K = Z Z^T vanish, so with a bias A is K, ridge_p more in all
other rows and columns, and ridge on the diagonal. A is factorised in float64; all products, also P = T^T T
and a = P Y, are of the dtype of Z, be it float32. This is accurate unless A is badly conditioned: K is known
to |dK_ij| <= eps |z_i| |z_j| or so, which is |dS_ij| <= eps where S is A scaled to a unit diagonal. To first
order an eigenvalue s_k of S changes relatively by eps / s_k, and all of them together by

    eps trace(S^{-1}) = eps sum_i A_ii P_ii,

a sum of variance inflation factors (1 - h_p for i = p). Where this is small, so are the relative errors of a
and of P, however close h is to 1. Where it is large, for instance because the first row is far from all
others, dual.py is used, which chooses its pivot and computes products in float64.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from torchloo.autograd import apply
from torchloo.dual import add_product
from torchloo.factors import SINGLE
from torchloo.guards import values_visible
from torchloo.precision import full_precision
from torchloo.problem import Problem

__all__ = ["leave_one_out"]

# The largest number of rows: with more, the products dominate the time, and a failure would waste them.
_FEW = 192

# Added to the sum of inflation factors where the factorisation failed.
_FAILED = 1e30


def _inverse(Z: Tensor, ridge: Tensor, bias: bool) -> tuple[Tensor, Tensor]:
    """P (..., n, n), and sum_i A_ii P_ii (...), which exceeds any limit if the factorisation of A failed.

    By differentiable operations, from differences Z (..., n, d) to the first row if there is a bias.
    """
    A = (Z @ Z.mT).double()
    E = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    if bias:
        A[..., 1:, 1:].add_(ridge[..., :1, None])
        E[:, 0].sub_(1)
    A.diagonal(dim1=-2, dim2=-1).add_(ridge)
    L, info = torch.linalg.cholesky_ex(A)
    T = torch.linalg.solve_triangular(L, E, upper=False).to(Z.dtype)
    P = T.mT @ T
    A_ii = A.diagonal(dim1=-2, dim2=-1)
    P_ii = P.diagonal(dim1=-2, dim2=-1)
    inflation = (A_ii * P_ii).sum(-1)
    return P, inflation.add_(info, alpha=_FAILED)


def _differences(V: Tensor, bias: bool) -> Tensor:
    """V (..., n, c), with a bias minus its first row; else a view, as a Function must not return inputs."""
    if bias:
        return V - V[..., :1, :]
    return V.view_as(V)


class _Rows(Function):
    """(Z, ridge, Y) -> r_i = a_i / P_ii, v_i = 1 / P_ii, differences of Z, and the results of `_inverse`.

    The backward is that of Note [dual backward] in dual.py, and K = Z Z^T has Zbar = 2 Kbar Z; the rows of
    Kbar sum to zero if there is a bias, so Z may be replaced by the differences. Only r and v have a
    backward.
    """

    @staticmethod
    def forward(Z: Tensor, ridge: Tensor, Y: Tensor, bias: bool) -> tuple[Tensor, ...]:
        Z = _differences(Z, bias)
        P, inflation = _inverse(Z, ridge, bias)
        v = P.diagonal(dim1=-2, dim2=-1).reciprocal().unsqueeze(-1)  # (..., n, 1)
        a = (_differences(Y, bias).mT @ P).mT  # P is symmetric: this order takes half of the time
        return v * a, v, Z, P, inflation

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        Z, ridge, _, ctx.bias = inputs
        r, v, differences, P, inflation = output
        ctx.mark_non_differentiable(differences, P, inflation)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(Z, ridge, r, v, differences, P)

    @staticmethod
    def backward(ctx: Any, rbar: Tensor | None, vbar: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        given, ridge, r, v, Z, P = ctx.saved_tensors
        with full_precision(Z):
            if torch.is_grad_enabled():
                Z = _differences(given, ctx.bias)
                P = _inverse(Z, ridge, ctx.bias)[0]
            abar = torch.zeros_like(r) if rbar is None else v * rbar
            negative = (abar * r).sum(-1, keepdim=True)  # -diag(D), (..., n, 1)
            if vbar is not None:
                negative = negative + v.square() * vbar
            Ybar = P @ abar if ctx.needs_input_grad[2] else None
            half = P @ add_product(negative * P, abar, r / v, -1.0)  # Mbar is its symmetric part
            Zbar = (half + half.mT) @ Z if ctx.needs_input_grad[0] else None
            return Zbar, half.diagonal(dim1=-2, dim2=-1), Ybar, None


def leave_one_out(problem: Problem, Z: Tensor, bias: bool) -> tuple[Tensor, Tensor, Tensor] | None:
    """Residuals (..., n, c), variances (..., n, 1) and refitted rows (..., n), of which there are none.

    See Note [quick form].

    Args:
        problem: targets, weights and regularisation; its checks of values are made.
        Z: features (..., n, d).
        bias: whether there is an unpenalised bias.

    Returns:
        None if there are many rows, or one, or few features, if values cannot be read, or if the result
        would not be accurate.
    """
    n, d = Z.shape[-2:]
    if not 1 < n <= _FEW or n >= d or not values_visible(Z, problem.Y, problem.reg):
        return None
    r, variance, *_, inflation = apply(_Rows, problem.expand(Z), problem.ridge, problem.Y, bias)
    problem.guard.implied(r, Z, problem.Y)
    (largest,) = problem.guard.largest(inflation)
    if not largest < SINGLE:
        return None
    return r, variance, torch.zeros(r.shape[:-1], dtype=torch.bool, device=r.device)
