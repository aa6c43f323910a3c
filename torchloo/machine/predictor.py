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
    """What coefficients were solved with, and new inputs must be evaluated with."""

    support: Given
    parameters: tuple[Given, ...]
    """Of the kernel."""

    @classmethod
    def now(cls, kernel: Kernel, support: Tensor) -> Self | None:
        """The kernel and the support as they are; None where tensors are traced and do not change."""
        parameters = tuple(kernel.parameters())
        if not values_visible(support, *parameters):
            return None
        return cls(Given.of(support), tuple(map(Given.of, parameters)))

    def require_unchanged(self, function: str, kernel: Kernel) -> None:
        """Raise if the support was changed in place, or a parameter of the kernel in any way."""
        self.support.require_unchanged(function)
        pairs = itertools.zip_longest(kernel.parameters(), self.parameters)
        if not all(p is given.matrix and Given.of(p).version == given.version for p, given in pairs):
            raise RuntimeError(
                f"{function}: parameters of the kernel were changed after solve, which its coefficients do "
                "not know of; solve again"
            )


def _same(now: Given | None, before: Given | None) -> bool:
    """Whether a tensor is known to be what it was."""
    if now is None or before is None or now.version is None:
        return False
    return now.matrix is before.matrix and now.version == before.version


class Remembered:
    """Something costly, kept while the tensors that it came from stay as they are; copies lack it."""

    def __init__(self) -> None:
        self._givens: tuple[Given, ...] = ()
        self._made: Any = None

    def get(self, tensors: Sequence[Tensor], make: Callable[[], Any]) -> Any:
        """What `make` gave for these tensors."""
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
    """Name that errors carry."""
    kernel: Kernel
    support: Tensor
    """The points z_j, (..., m, *event); where `linear` is set, the centre (..., 1, p) of the features."""
    coef: Tensor
    """(..., m, c), or (..., p, c)."""
    bias: Tensor
    """(..., c)."""
    flat: bool
    """Whether the targets came without an output axis."""
    linear: bool = False
    """Whether features are weighed."""
    solved_with: SolvedWith | None = None
    """What must not have changed; None where all was stored by `fit`."""

    def __call__(self, X: Tensor) -> Tensor:
        """Outputs (..., q) or (..., q, c) at new inputs X (..., q, d)."""
        rows = self.rows(X)
        with full_precision(X):
            outputs = rows @ self.coef + self.bias.unsqueeze(-2)
        return (outputs[..., 0] if self.flat else outputs).to(full_dtype(X.dtype))

    def rows(self, X: Tensor) -> Tensor:
        """Features about their centre, or kernel rows: what the coefficients multiply, (..., q, m)."""
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
                f"{self.function}: a variance needs k(x, x), which the rows of Precomputed do not tell; use "
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
        return received - self.support if self.linear else self.kernel(X, self.support, self.coef.dtype)


def features_or_inputs(
    function: str, kernel: Kernel, X: Tensor, coef: Tensor, linear: bool, inputs: Sequence[int]
) -> Tensor:
    """The features of X (..., q, *event) where they are weighed, else X, if these go with the coefficients.

    Args:
        function: name that errors carry.
        coef: (..., m, c), of features or of support points.
        linear: whether features are weighed.
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
