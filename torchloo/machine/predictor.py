"""Predictions of a solved machine at new inputs."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from torch import Tensor

from torchloo import csr
from torchloo.guards import Guard, full_dtype, require_inputs, values_visible
from torchloo.kernels import Kernel, Precomputed
from torchloo.precision import full_precision
from torchloo.problem import Given

__all__ = ["Predictor", "Remembered", "SolvedWith", "features_or_inputs"]


class SolvedWith(NamedTuple):
    """The support and kernel parameters that coefficients were solved with, to detect later changes."""

    support: Given
    parameters: tuple[Given, ...]
    """Of the kernel."""

    @classmethod
    def now(cls, kernel: Kernel, support: Tensor) -> Self | None:
        """The current kernel and support; None if tensors are traced, which cannot change."""
        parameters = tuple(kernel.parameters())
        if not values_visible(support, *parameters):
            return None
        return cls(Given.of(support), tuple(map(Given.of, parameters)))

    def require_unchanged(self, function: str, kernel: Kernel) -> None:
        """Raise if the support was changed in place, or a parameter of the kernel in any way."""
        self.support.require_unchanged(function)
        pairs = itertools.zip_longest(kernel.parameters(), self.parameters)
        unchanged = (p is given.matrix and Given.of(p).version == given.version for p, given in pairs)
        if not all(unchanged):
            raise RuntimeError(
                f"{function}: parameters of the kernel were changed after solve, so that the coefficients do "
                "not match them; solve again"
            )


def _same(now: Given | None, before: Given | None) -> bool:
    """Whether a tensor is known to be unchanged."""
    if now is None or before is None or now.version is None:
        return False
    return now.matrix is before.matrix and now.version == before.version


class Remembered:
    """A cached result, valid while the tensors it was computed from are unchanged; not copied."""

    def __init__(self) -> None:
        self._givens: tuple[Given, ...] = ()
        self._made: Any = None

    def get(self, tensors: Sequence[Tensor], make: Callable[[], Any]) -> Any:
        """The result of `make` for these tensors, cached."""
        now = tuple(map(Given.of, tensors))
        pairs = itertools.zip_longest(now, self._givens)
        if self._made is None or not all(_same(a, b) for a, b in pairs):
            self._givens, self._made = now, make()
        return self._made

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return Remembered, ()


@dataclass(frozen=True)
class Predictor:
    """f(x) = sum_j coef_j k(x, z_j) + bias, or f(x) = (features of x - centre) coef + bias."""

    function: str
    """Name of the function for errors."""
    kernel: Kernel
    support: Tensor
    """The points z_j, (..., m, *event); if `linear`, the centre (..., 1, p) of the features."""
    coef: Tensor
    """(..., m, c), or (..., p, c)."""
    bias: Tensor
    """(..., c)."""
    flat: bool
    """Whether the targets had no output axis."""
    linear: bool = False
    """Whether `coef` is of features."""
    solved_with: SolvedWith | None = None
    """Tensors that must be unchanged; None if all was copied by `fit`."""

    def __call__(self, X: Tensor) -> Tensor:
        """Outputs (..., q) or (..., q, c) at new inputs X (..., q, d)."""
        rows = self.rows(X)
        with full_precision(X):
            outputs = rows @ self.coef + self.bias.unsqueeze(-2)
        return (outputs[..., 0] if self.flat else outputs).to(full_dtype(X.dtype))

    def rows(self, X: Tensor) -> Tensor:
        """Centred features, or kernel rows, which are multiplied by the coefficients, (..., q, m)."""
        require_inputs(self.function, X=X, support=self.support)
        csr.require_layout(self.function, "X", X)
        guard = Guard(self.function)
        guard.finite(X=X)
        guard.check()
        if self.solved_with is not None:
            self.solved_with.require_unchanged(self.function, self.kernel)
        return self._design(X)

    def own(self, X: Tensor) -> Tensor | None:
        """k(x, x), (..., q), for kernel rows."""
        if self.linear:
            return None
        if isinstance(self.kernel, Precomputed):
            raise TypeError(
                f"{self.function}: a variance needs k(x, x), which rows of Precomputed do not contain; use "
                "the kernel itself"
            )
        return self.kernel.diagonal(X, dtype=self.coef.dtype)

    def _design(self, X: Tensor) -> Tensor:
        received = features_or_inputs(
            self.function,
            self.kernel,
            X,
            self.coef,
            self.linear,
            self.support.shape[-self.kernel.event_dim :],
        )
        if self.linear:
            return received - self.support
        return self.kernel(X, self.support, self.coef.dtype)


def features_or_inputs(
    function: str, kernel: Kernel, X: Tensor, coef: Tensor, linear: bool, inputs: Sequence[int]
) -> Tensor:
    """The features of X (..., q, *event) if `linear`, else X; checked to match the coefficients.

    Args:
        function: name of the function for errors.
        coef: (..., m, c), of features or of support points.
        linear: whether `coef` is of features.
        inputs: shape of an input of `fit`.
    """
    own = linear or isinstance(kernel, Precomputed)
    expected = tuple(coef.shape[-2:-1] if own else inputs)
    received = kernel.feature_map(X, coef.dtype) if linear else X
    if X.ndim <= kernel.event_dim or tuple(received.shape[-len(expected) :]) != expected:
        what = "give features of" if linear and kernel.features is not None else "have"
        columns = f"{expected[0]} columns" if len(expected) == 1 else f"inputs of shape {expected}"
        raise ValueError(f"{function}: X must {what} {columns}, as in fit, got shape {tuple(X.shape)}")
    return received
