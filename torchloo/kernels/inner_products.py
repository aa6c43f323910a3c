"""Kernels of the inner product x . z."""

import torch
from torch import Tensor, nn

from torchloo import csr
from torchloo.guards import Guard, full_dtype, is_whole, values_visible
from torchloo.kernels.kernel import Choice, Features, Kernel
from torchloo.positive import Positive, Values

__all__ = ["Boolean", "Linear", "Polynomial"]


def _inner(X: Tensor, Z: Tensor | None) -> Tensor:
    """x_i . z_j, (..., n, m); exactly symmetric if Z is None, which a plain matmul does not guarantee."""
    if csr.is_csr(X) or csr.is_csr(Z):
        return csr.inner(X, Z)
    if Z is not None:
        return X @ Z.mT
    half = (0.5 * X) @ X.mT
    return half + half.mT


class _OfInner(Kernel):
    """A function of the inner product x . z, given by `_of_inner`, elementwise."""

    _symmetric = True

    def _of_inner(self, inner: Tensor) -> Tensor:
        raise NotImplementedError

    def _evaluate(self, X: Tensor, Z: Tensor | None) -> Tensor:
        return self._of_inner(_inner(X, Z))

    def _diagonal(self, X: Tensor) -> Tensor:
        return self._of_inner(csr.square_length(X).unsqueeze(-1))[..., 0]


class Linear(_OfInner):
    """k(x, z) = x . z (Cawley 2006, eq. 2)."""

    choices = (Choice("linear", "a linear kernel", lambda d: Linear()),)

    def __init__(self, *, features: Features = None, event_dim: int = 1) -> None:
        super().__init__(features=features, event_dim=event_dim)

    def _of_inner(self, inner: Tensor) -> Tensor:
        return inner

    @property
    def is_linear(self) -> bool:
        """True."""
        return True

    def feature_map(self, X: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """X itself, or its features; sparse rows made dense."""
        features = csr.dense(self._embed("X", X))
        return features.to(dtype or full_dtype(X.dtype))


class Polynomial(_OfInner):
    """k(x, z) = (x . z + offset)^degree (Cawley 2006, eq. 3), offset >= 0 of shape (...).

    An offset of 0 has no finite logarithm and cannot be trained: if any offset is 0, all of them are fixed,
    and `log_offset` is a buffer (-inf where the offset is 0) instead of a parameter.
    """

    settings = ("degree",)
    choices = (
        Choice("poly2", "a quadratic kernel", lambda d: Polynomial(degree=2)),
        Choice("poly3", "a cubic kernel", lambda d: Polynomial(degree=3)),
    )
    offset = Positive("the weight of the lower powers of the inputs")

    def __init__(
        self, degree: int = 2, offset: Values = 1.0, *, features: Features = None, event_dim: int = 1
    ) -> None:
        super().__init__(features=features, event_dim=event_dim)
        if not is_whole(degree) or degree < 1:
            raise ValueError(f"Polynomial: degree must be a positive integer, got {degree}")
        self.degree = int(degree)
        values = torch.as_tensor(offset, dtype=torch.float64).detach()
        guard = Guard("Polynomial")
        guard.require((values >= 0) & (values < torch.inf), f"offset must be 0 or positive, got {offset}")
        guard.check()
        if isinstance(offset, float | int):
            has_zero = offset == 0
        else:
            has_zero = values_visible(values) and bool((values == 0).any())
        store = nn.Buffer if has_zero else nn.Parameter
        self.log_offset = store(values.log())

    def _of_inner(self, inner: Tensor) -> Tensor:
        return (inner + self._lift("offset", inner)) ** self.degree


class Boolean(_OfInner):
    """k(x, z) = (1 + rate)^(x . z) (Cawley 2006, below eq. 3), rate > 0 of shape (...).

    For x in {0, 1}^d: every conjunction of s of the d variables is a feature, of squared weight rate^s.
    """

    choices = (Choice("boolean", "a Boolean kernel", lambda d: Boolean(rate=1.0 / d), binary=True),)
    rate = Positive("the weight of combinations of several inputs")

    def __init__(self, rate: Values = 1.0, *, features: Features = None, event_dim: int = 1) -> None:
        super().__init__(features=features, event_dim=event_dim, rate=rate)

    def _of_inner(self, inner: Tensor) -> Tensor:
        log_base = self._lift("rate", inner).log1p()
        return (log_base * inner).exp_()
