"""The sparse least-squares support vector machine: an expansion over few basis vectors."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from torchloo import csr
from torchloo.basis import Selector
from torchloo.dual import Dual
from torchloo.guards import Guard, is_whole, require_floating, require_inputs, values_visible
from torchloo.kernels import Kernel, Precomputed
from torchloo.kernels.kernel import pure
from torchloo.machine import LeastSquares, Predictor
from torchloo.panels import LowerInverse
from torchloo.precision import full_precision
from torchloo.primal.machines import Expansion, transposed
from torchloo.primal.solved import StreamFit
from torchloo.primal.whole import Primal
from torchloo.problem import Regs
from torchloo.representation import CentredFeatures, FeaturesOfKernelRows
from torchloo.smoothers import Fit
from torchloo.spectral import from_features

__all__ = ["SparseLSSVM", "sparse_lssvm"]


# The least residual of a basis vector, given those chosen before it, relative to the largest diagonal entry:
# below this, the function that it adds is mostly rounding error.
_NEGLIGIBLE = 1e-10


def _negligible(Kzz: Tensor) -> Tensor:
    """The least residual of a basis vector, (..., 1); see `_NEGLIGIBLE`."""
    relative = max(_NEGLIGIBLE, Kzz.shape[-1] * torch.finfo(Kzz.dtype).eps)
    return relative * Kzz.diagonal(dim1=-2, dim2=-1).amax(-1, keepdim=True)


def _enough(Kzz: Tensor, L: Tensor) -> Tensor:
    """Whether the residual of every vector is large enough, (..., m), by the Cholesky factor of K_zz."""
    return L.diagonal(dim1=-2, dim2=-1).square() > _negligible(Kzz)


def _independent(guard: Guard, Kzz: Tensor) -> Tensor:
    """Which basis vectors (..., m) a pivoted Cholesky factorisation keeps.

    A vector is dropped if its residual, given the chosen ones, is negligible; see `_NEGLIGIBLE`.
    """
    m = Kzz.shape[-1]
    residual = Kzz.diagonal(dim1=-2, dim2=-1).clone()  # (..., m)
    limit = _negligible(Kzz)
    L, info = torch.linalg.cholesky_ex(Kzz)
    factorised = (info == 0).unsqueeze(-1)
    if bool((factorised & _enough(Kzz, L)).all()):
        return torch.ones_like(residual, dtype=torch.bool)
    kept = torch.zeros_like(residual, dtype=torch.bool)
    rows = torch.zeros_like(Kzz)
    for k in range(m):
        pivot, j = residual.masked_fill(kept, -torch.inf).max(-1, keepdim=True)  # (..., 1)
        enough = pivot > limit
        if not bool(enough.any()):
            break
        row_j = rows.take_along_dim(j.unsqueeze(-1), -2)  # (..., 1, m), of the factor so far
        column = Kzz.take_along_dim(j.unsqueeze(-1), -2) - row_j @ rows.mT  # (..., 1, m)
        scaled = column[..., 0, :] / pivot.clamp(min=limit).sqrt()
        column = torch.where(enough, scaled, 0.0)
        rows[..., k] = column
        residual = residual - column.square()
        kept.scatter_(-1, j, enough | kept.gather(-1, j))
    guard.require(residual >= -2 * limit, "Kzz must be positive semi-definite")
    return kept


def _factor(guard: Guard, Kzz: Tensor) -> tuple[Tensor, Tensor]:
    """The factor L (..., m, m) of Note [sparse features], in float64, and the vectors kept (..., m)."""
    if values_visible(Kzz):
        kept = _independent(guard, Kzz.detach())
    else:
        kept = torch.ones_like(Kzz[..., 0], dtype=torch.bool)
    mask = kept.double()
    pairs = mask.unsqueeze(-1) * mask.unsqueeze(-2)
    identity_elsewhere = torch.diag_embed(1 - mask)
    L, info = torch.linalg.cholesky_ex(Kzz.double() * pairs + identity_elsewhere)
    guard.require(info == 0, "Kzz must be positive semi-definite")
    return L, kept


def _inverted(guard: Guard, Kzz: Tensor) -> tuple[Tensor, Tensor, LowerInverse | None]:
    """`_factor`, with the inverse if all vectors are independent; the values are read once."""
    K = Kzz.double()
    L, info = torch.linalg.cholesky_ex(K)
    inverse = LowerInverse(L)
    fine = (info == 0) & _enough(Kzz, L).all()
    independent, *good = torch.cat([fine.reshape(1), inverse.good]).tolist()
    if not independent:
        return *_factor(guard, Kzz), None
    inverse.decide(good)
    return L, torch.ones_like(K[0], dtype=torch.bool), inverse


def _features(guard: Guard, Kzz: Tensor, Kxz: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Features Z (..., n, m) with Z Z^T = K_xz K_zz^{-1} K_zx, the factor of K_zz, and the vectors kept.

    Note [sparse features]
    The penalty of an expansion over the basis is beta^T K_zz beta, and K_zz is usually singular to
    working precision. With K_zz = L L^T over the independent vectors, p = L^T beta has the penalty
    |p|^2 and the features Z = K_xz L^{-T}: well conditioned. A dropped vector becomes a feature that
    is zero and a row of the identity in L, so shapes do not depend on the data.
    """
    require_floating(guard.function, Kzz=Kzz, Kxz=Kxz)
    m = Kzz.shape[-1]
    if Kzz.ndim < 2 or 0 in Kzz.shape or Kzz.shape[-2] != m:
        raise ValueError(f"{guard.function}: Kzz must be square, (..., m, m), got shape {tuple(Kzz.shape)}")
    if Kxz.ndim < 2 or 0 in Kxz.shape or Kxz.shape[-1] != m:
        raise ValueError(
            f"{guard.function}: Kxz must have {m} columns to match Kzz, got shape {tuple(Kxz.shape)}"
        )
    guard.symmetric(Kzz=Kzz)
    guard.finite(Kxz=Kxz)
    with full_precision(Kzz):
        L, kept = _factor(guard, Kzz)
        Z = _of_kernel_rows(L, kept, Kxz)
    return Z.to(Kxz.dtype), L, kept


def _of_kernel_rows(L: Tensor, kept: Tensor, Kxz: Tensor) -> Tensor:
    """Z = K_xz L^{-T}, (..., n, m), over the vectors kept (..., m), in float64."""
    mask = kept.double().unsqueeze(-2)
    return torch.linalg.solve_triangular(L, (Kxz.double() * mask).mT, upper=False).mT


def _solve(
    guard: Guard, Kzz: Tensor, Kxz: Tensor, Y: Tensor, reg: Tensor | float | Regs, weight: Tensor | None
) -> Fit:
    Z, L, kept = _features(guard, Kzz, Kxz)
    fit = from_features(guard, Z, Y, reg, weight, bias=True)
    assert isinstance(fit.representation, CentredFeatures)
    return replace(fit, representation=_Basis(fit.representation, L, kept), kept=kept)


@dataclass(frozen=True)
class _Basis(FeaturesOfKernelRows):
    """The features are those of Note [sparse features]."""

    L: Tensor
    kept: Tensor

    def spread(self, form: Any) -> Tensor:
        """S (..., p, m + 1) with the variance |S (k, 1)|^2 at kernel rows k."""
        return _folded(self.features.spread(form), self.L, self.kept, self.features.centre)

    def _from_rows(self, rows: Tensor) -> Tensor:
        return _of_kernel_rows(self.L, self.kept, rows)

    def _of_rows(self, coef: Tensor) -> Tensor:
        """beta = L^{-T} p."""
        with full_precision(self.L):
            beta = torch.linalg.solve_triangular(self.L.mT, coef.double(), upper=True)
        return beta.to(coef.dtype) * self.kept.unsqueeze(-1)


def _folded(spread: Tensor, L: Tensor, kept: Tensor, centre: Tensor) -> Tensor:
    """S' with S' (k, 1) = S (z - centre, 1), for z = L^{-1} k over the vectors kept and S (..., p, m + 1)."""
    S, last = spread[..., :-1], spread[..., -1:]
    inner = torch.linalg.solve_triangular(L, S, upper=False, left=False)
    return torch.cat([inner * kept.unsqueeze(-2), last - S @ centre.mT], -1)


def sparse_lssvm(
    Kzz: Tensor, Kxz: Tensor, Y: Tensor, reg: Tensor | float, weight: Tensor | None = None
) -> Fit:
    """Sparse least-squares support vector machine, f(x) = sum_j beta_j k(x, z_j) + b.

    Solves min over beta, b of sum_i weight_i |y_i - k_i^T beta - b|^2 + reg beta^T K_zz beta, in the
    primal form on the features of Note [sparse features]. Basis vectors that depend on the others to
    10 digits (float32: to rounding) are dropped, and the machine is that of the remaining ones, marked in
    `Fit.kept`. On meta and fake tensors and inside torch.func transforms, where values cannot be read,
    all are kept.

    Args:
        Kzz: kernel matrix of the basis, symmetric, (..., m, m).
        Kxz: kernel matrix of training points and basis, (..., n, m).
        Y: targets, (..., n, c).
        reg: regularisation, a number or a tensor of batch shape; 1/(2 gamma) of the paper.
        weight: row weights, (..., n); None for equal weights.

    Returns:
        Fit with coef (..., m, c) and bias (..., c). The basis is kept when a row is left out.

    Differentiable in all five. Cost n m^2. Memory besides Kxz: 6 n m numbers,
    8 n m with the backward, in float64.

    Reference: Cawley and Talbot (2004), "Fast exact leave-one-out cross-validation of sparse
    least-squares support vector machines", section 2.
    """
    return _solve(Guard("sparse_lssvm"), Kzz, Kxz, Y, reg, weight).checked()


class SparseLSSVM(LeastSquares):
    """The sparse least-squares support vector machine as a module; see `sparse_lssvm`.

    Args:
        kernel: a kernel of torchloo.kernels, not Precomputed (for which call `sparse_lssvm`).
        basis: the basis vectors (..., m, d), or (..., m, *event) like the inputs, trainable if they are an
            nn.Parameter; or a selector of torchloo.basis, which chooses among the training rows at every
            call of `fit`, `solve`, `loo`, `lco` or `path`; or a number m, to use the first m training rows.
        reg, reg_per_output, classes: as in `RLS`.

    Held-out outputs are for a fixed basis. A selector uses the inputs of all rows (and `pruned` all targets);
    the selection is not repeated without each row. To train by a held-out criterion, choose the basis once:
    ``basis=X[selector(kernel, X).indices]``.
    """

    name = "sparse"
    label = "sparse least-squares support vector machine"
    _function = "sparse_lssvm"
    has_bias = True
    fitted_buffers = (*LeastSquares.fitted_buffers, "kept")

    kept: Tensor | None

    def __init__(
        self,
        kernel: Kernel,
        reg: Tensor | float = 1.0,
        *,
        basis: int | Tensor | Selector,
        classes: Any = None,
        reg_per_output: bool = False,
    ) -> None:
        super().__init__(kernel, reg, classes=classes, reg_per_output=reg_per_output)
        self.register_buffer("kept", None)
        if isinstance(kernel, Precomputed):
            raise TypeError(
                "SparseLSSVM: kernel must be evaluated at the basis; "
                "with precomputed matrices call torchloo.functional.sparse_lssvm"
            )
        self.rows: int | Selector | None = None
        if isinstance(basis, Tensor) and (basis.ndim <= kernel.event_dim or 0 in basis.shape):
            raise ValueError(
                f"SparseLSSVM: basis must be {kernel.input_shape} with at least one row, got shape "
                f"{tuple(basis.shape)}"
            )
        if isinstance(basis, nn.Parameter):
            self.basis: Tensor | None = basis
        elif isinstance(basis, Tensor):
            self.register_buffer("basis", basis.clone())
        elif isinstance(basis, Selector) or (is_whole(basis) and basis > 0):
            self.rows = basis if isinstance(basis, Selector) else int(basis)
            self.basis = None
        else:
            raise ValueError(
                "SparseLSSVM: basis must be a tensor or a positive number of rows, or a selector of "
                f"torchloo.basis, got {basis!r}"
            )

    @property
    def dropped(self) -> Tensor:
        """Number of basis vectors that the fitted machine does not use, of batch shape."""
        if self.kept is None:
            raise RuntimeError("SparseLSSVM: not fitted; call fit(X, y) first")
        return (~self.kept).sum(-1)

    def _store_uncertainty(self, fit: Fit) -> None:
        """Store what `predictive` needs besides the coefficients, and which basis vectors are in use."""
        assert isinstance(fit.representation, _Basis)
        one = isinstance(fit.form, Dual | Primal)
        spread = fit.representation.spread(fit.form) if one else None
        self._keep_uncertainty(None, None, spread)
        self.kept = fit.kept

    def _keep(self, solved: StreamFit) -> None:
        """Store the basis and its coefficients, solved by passes over the rows."""
        expansion = solved.expansion
        p = solved.checked_for(self).coef
        assert expansion.factor is not None
        assert expansion.kept is not None
        assert expansion.support is not None
        beta = torch.linalg.solve_triangular(expansion.factor.mT, p, upper=True)
        bias = solved.offset - (solved.centre @ p)[0]
        dtype = self._matrix_dtype(expansion.support)
        coef = beta.to(dtype) * expansion.kept.unsqueeze(-1)
        parts = (expansion.support, coef, bias.to(dtype))
        spread = solved.spread
        if spread is not None:
            spread = _folded(spread, expansion.factor, expansion.kept, solved.centre)
        self._store(Predictor(self._function, self.kernel, *parts, solved.stream.flat))
        self._keep_uncertainty(None, None, spread)
        self.kept = expansion.kept

    def features_of_rows(self, first: Callable[[int], Tensor]) -> Expansion:
        """Features of Note [sparse features], for a basis that is given or the first rows."""
        if isinstance(self.rows, Selector):
            raise ValueError(
                f"{self._function}: a selector needs all rows at once; for a stream, choose the basis among "
                "some of them first, e.g. basis=X[:20000][selector(kernel, X[:20000]).indices]"
            )
        basis = self.basis
        if basis is None:
            assert self.rows is not None
            basis = first(self.rows)
        evaluate, tensors = pure(self.kernel, "forward")
        guard = Guard(self._function)
        with torch.no_grad():
            Kzz = self._matrix(basis)
        if Kzz.ndim > 2:
            raise ValueError(
                f"{self._function}: basis must be (m, d) for a stream, got shape {tuple(basis.shape)}"
            )
        guard.symmetric(Kzz=Kzz)
        expansion = self._expanded(guard, Kzz, evaluate, [basis, *tensors], basis)
        guard.check()
        return expansion

    def _expanded(
        self,
        guard: Guard,
        Kzz: Tensor,
        evaluate: Callable[..., Tensor],
        tensors: list[Tensor],
        basis: Tensor,
    ) -> Expansion:
        """Features from kernel columns evaluate(parameters, z, X), for tensors (z, *parameters).

        z is the basis, or its features.
        """
        with torch.no_grad():
            L, kept, inverse = _inverted(guard, Kzz)
        dtype = Kzz.dtype

        def columns(X: Tensor, given: Sequence[Tensor]) -> Tensor:
            basis, *others = given
            require_inputs(self._function, basis=basis, X=X)
            return evaluate(others, basis, X, dtype)  # (m, b)

        def gram(given: Sequence[Tensor]) -> Tensor:
            basis, *others = given
            return evaluate(others, basis, None, dtype)

        single = self.kernel.keeps_digits
        return Expansion(columns, len(L), tensors, gram, L, basis.detach(), kept, inverse, single)

    def _features(self, X: Tensor) -> Tensor | None:
        """None: whatever the kernel, the features are those of the basis."""
        return None

    def features_of(
        self, guard: Guard, X: Tensor, Y: Tensor, weight: Tensor | None
    ) -> tuple[Tensor, Expansion] | None:
        """Rows from which the kernel columns are computed, X or its features; or the columns themselves."""
        basis = self._support_of(X, Y, weight)
        if basis.ndim > -self.row_axis:
            return None
        if csr.is_csr(X) or self.kernel.is_embedding_inside:
            Kzz, Kxz = self._matrix(basis), self._matrix(X, basis)
            if Kxz.ndim > 2:
                return None
            with torch.no_grad():
                guard.symmetric(Kzz=Kzz)
                L, kept = _factor(guard, Kzz.detach())
            single = self.kernel.keeps_digits
            return Kxz, Expansion(
                transposed, len(L), [Kzz], lambda given: given[0], L, basis, kept, single=single
            )
        require_inputs(self._function, basis=basis, X=X)
        inputs = self.kernel.embed(X)
        centres = self.kernel.embed(basis)
        evaluate, tensors = pure(self.kernel, "between")
        with torch.no_grad():
            Kzz = self.kernel.between(centres, None, self._matrix_dtype(X))
        if Kzz.ndim > 2 or inputs.ndim > 2:
            return None
        return inputs, self._expanded(guard, Kzz, evaluate, [centres, *tensors], basis)

    def _support_of(self, X: Tensor, Y: Tensor, weight: Tensor | None) -> Tensor:
        """The basis vectors (..., m, d): given, or chosen among the rows."""
        axis = self.row_axis
        if self.basis is not None:
            given = self.basis.shape[axis + 1 :]
            expected = X.shape[axis + 1 :]
            if self.kernel.features is None and given != expected:
                raise ValueError(
                    f"{self._function}: basis must have inputs like X, of shape {tuple(expected)}, "
                    f"got {tuple(given)}"
                )
            return self.basis
        if isinstance(self.rows, Selector):
            Y = Y.expand(*X.shape[:axis], *Y.shape[-2:])
            chosen = self.rows(self.kernel, X, Y, weight)
            return csr.take(X, chosen.indices, self.kernel.event_dim)
        assert self.rows is not None
        n = X.shape[axis]
        if self.rows > n:
            raise ValueError(
                f"{self._function}: basis must be at most the number of rows, {n}, got {self.rows}"
            )
        if csr.is_csr(X):
            return csr.take(X, torch.arange(self.rows, device=X.device))
        return X.narrow(axis, 0, self.rows)

    def with_basis_among(self, X: Tensor, y: Tensor, weight: Tensor | None = None) -> Self:
        """The machine with its basis chosen among these rows and then fixed; it shares all parameters."""
        if self.basis is not None:
            return self
        Y = self.checked_targets(X, y)[1]
        with_basis = copy.copy(self)
        with_basis.basis = self._support_of(X, Y, weight)
        return with_basis

    def _solve(self, guard: Guard, X: Tensor, Y: Tensor, weight: Tensor | None, reg: Tensor | Regs) -> Fit:
        return self._solve_with_support(guard, X, Y, weight, reg)[0]

    def _solve_with_support(
        self, guard: Guard, X: Tensor, Y: Tensor, weight: Tensor | None, reg: Tensor | Regs
    ) -> tuple[Fit, Tensor]:
        basis = self._support_of(X, Y, weight)
        Kzz, Kxz = self._matrix(basis), self._matrix(X, basis)
        return _solve(guard, Kzz, Kxz, Y, reg, weight), basis
