"""Kernels: small modules, kernel(X, Z=None) -> (..., n, m), composed by + and *.

Leading dimensions of X (..., n, d) and Z (..., m, d) are batch and broadcast. Z=None means Z = X: the matrix
is then exactly symmetric. Positive parameters are copied and kept as logarithms, `log_lengthscale` and so on,
in float64, so any optimiser moves them safely. Values of X are not looked at: machines do that, once.

X and Z may also be sparse rows, (n, d) of layout torch.sparse_csr, for Linear, Polynomial and Boolean, for
RBF and Matern with one lengthscale, and for what is composed of them. The matrix is dense, and differentiable
in the parameters of the kernel and in dense points, not in sparse rows.

>>> kernel = 2.0 * RBF(lengthscale=0.5) + Linear()
>>> kernel(torch.zeros(3, 2)).shape
torch.Size([3, 3])
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from torchloo import csr
from torchloo.distances import matern_of_square, squared_distance
from torchloo.guards import Guard, require_floating, values_visible
from torchloo.precision import full_precision

__all__ = [
    "RBF", "Boolean", "Kernel", "Linear", "Matern", "Polynomial", "Precomputed", "Product", "Scaled", "Sum",
]  # fmt: skip

Values = float | Sequence[float] | Tensor
Features = nn.Module | None


def _log(function: str, name: str, values: Values) -> Tensor:
    """Logarithms in float64 of values checked to be positive and finite."""
    tensor = torch.as_tensor(values, dtype=torch.float64).detach()
    guard = Guard(function)
    guard.positive(**{name: values if isinstance(values, float | int) else tensor})
    guard.check()
    return tensor.log()


def _exp_of(name: str) -> property:
    return property(lambda kernel: getattr(kernel, name).exp(), doc=f"exp({name}).")


def _show(value: Any) -> str:
    if not isinstance(value, Tensor):
        return str(value)
    if value.ndim > 1 or value.numel() > 8 or not values_visible(value):
        return f"<shape {tuple(value.shape)}>"
    shown = [f"{v:.4g}" for v in value.flatten().tolist()]
    return f"[{', '.join(shown)}]" if value.ndim else shown[0]


class Kernel(nn.Module):
    """A positive semidefinite function of two points, for all pairs of rows of X and Z.

    A kernel of your own overrides `_evaluate`, for inputs that are checked and have gone through `features`.

    Args:
        features: module applied to X and Z first, (..., n, d) -> (..., n, p), and trained with the kernel. It
            may run under autocast; the kernel itself is always evaluated in the precision of X.
        positive: values of positive parameters by name, each kept as the parameter `log_<name>`.
    """

    _fixed: tuple[str, ...] = ()  # what repr tells beside the parameters

    def __init__(self, *, features: Features = None, **positive: Values) -> None:
        super().__init__()
        if not isinstance(features, Features):
            raise TypeError(f"{self._get_name()}: features must be a Module, got {type(features).__name__}")
        self.features = features
        for name, values in positive.items():
            self.register_parameter(f"log_{name}", nn.Parameter(_log(self._get_name(), name, values)))

    def forward(self, X: Tensor, Z: Tensor | None = None) -> Tensor:
        """Kernel matrix (..., n, m) between X (..., n, d) and Z (..., m, d), of their dtype."""
        left, right = self._embed("X", X), None
        if Z is not None:
            require_floating(self._get_name(), X=X, Z=Z)
            right = self._embed("Z", Z)
            d = left.shape[-1]
            self._require(right.shape[-1] == d, f"Z must have {d} columns to match X", right.shape)
            self._batch(X=left.shape[:-2], Z=right.shape[:-2])
        with full_precision(X):
            return self._evaluate(left, right)

    def diagonal(self, X: Tensor) -> Tensor:
        """k(x_i, x_i), (..., n), without the matrix."""
        X = self._embed("X", X)
        with full_precision(X):
            return self._diagonal(X)

    def _evaluate(self, X: Tensor, Z: Tensor | None) -> Tensor:
        raise NotImplementedError

    def _diagonal(self, X: Tensor) -> Tensor:
        blocks = (self._evaluate(rows, None) for rows in X.split(64, dim=-2))
        return torch.cat([block.diagonal(dim1=-2, dim2=-1) for block in blocks], -1)

    @property
    def is_linear(self) -> bool:
        """Whether the kernel is linear in finitely many features, which `feature_map` lists."""
        return False

    def feature_map(self, X: Tensor) -> Tensor:
        """F (..., n, p) with K = F F^T, for a kernel that `is_linear`."""
        raise NotImplementedError(f"{self._get_name()} is not linear in finitely many features")

    def extra_repr(self) -> str:
        """Current values."""
        logs = (name.removeprefix("log_") for name in (*self._parameters, *self._buffers))
        return ", ".join(f"{name}={_show(getattr(self, name))}" for name in (*self._fixed, *logs))

    def __add__(self, other: object) -> "Sum":
        return Sum(self, other) if isinstance(other, Kernel) else NotImplemented

    def __radd__(self, other: object) -> "Kernel":
        return self if other == 0 else NotImplemented  # what sum(kernels) starts from

    def __mul__(self, other: object) -> "Kernel":
        if isinstance(other, Kernel):
            return Product(self, other)
        return Scaled(self, other) if isinstance(other, float | int | Tensor) else NotImplemented

    __rmul__ = __mul__

    def _require(self, holds: bool, expected: str, shape: torch.Size) -> None:
        if not holds:
            raise ValueError(f"{self._get_name()}: {expected}, got shape {tuple(shape)}")

    def _batch(self, **shapes: torch.Size) -> torch.Size:
        try:
            return torch.broadcast_shapes(*shapes.values())
        except RuntimeError:
            received = ", ".join(f"{name} {tuple(shape)}" for name, shape in shapes.items())
            raise ValueError(f"{self._get_name()}: batch shapes must broadcast, got {received}") from None

    def _lift(self, name: str, X: Tensor) -> Tensor:
        """A parameter of batch shape (...) as (..., 1, 1), in the dtype of X."""
        value = getattr(self, name)
        self._batch(**{"X": X.shape[:-2], name: value.shape})
        return value.to(X.dtype).unsqueeze(-1).unsqueeze(-1)

    def _embed(self, name: str, X: Tensor) -> Tensor:
        require_floating(self._get_name(), **{name: X})
        csr.require_layout(self._get_name(), name, X)
        self._require(X.ndim >= 2, f"{name} must have shape (..., n, d)", X.shape)
        for own in (*self.parameters(recurse=False), *self.buffers(recurse=False)):
            if own.device != X.device:
                where = f"{self._get_name()}: {name} must be on the device of the kernel, {own.device}"
                raise ValueError(f"{where}, got {X.device}; move the kernel, e.g. kernel.to({name}.device)")
        if self.features is None:
            return X
        F, n = self.features(X), X.shape[-2]
        self._require(F.ndim >= 2 and F.shape[-2] == n, f"features must return (..., {n}, p)", F.shape)
        return F.to(X.dtype)


def _inner(X: Tensor, Z: Tensor | None) -> Tensor:
    """x_i . z_j, (..., n, m); exactly symmetric if Z is None, as a matmul need not be."""
    if csr.is_csr(X) or csr.is_csr(Z):
        return csr.inner(X, Z)
    if Z is not None:
        return X @ Z.mT
    half = (0.5 * X) @ X.mT
    return half + half.mT


class _OfInner(Kernel):
    """A function of the inner product x . z, given by `_of_inner`, entry by entry."""

    def _of_inner(self, inner: Tensor) -> Tensor:
        raise NotImplementedError

    def _evaluate(self, X: Tensor, Z: Tensor | None) -> Tensor:
        return self._of_inner(_inner(X, Z))

    def _diagonal(self, X: Tensor) -> Tensor:
        return self._of_inner(csr.square_length(X).unsqueeze(-1))[..., 0]


class Linear(_OfInner):
    """k(x, z) = x . z (CRITERIA eq. 2)."""

    def _of_inner(self, inner: Tensor) -> Tensor:
        return inner

    @property
    def is_linear(self) -> bool:
        """True."""
        return True

    def feature_map(self, X: Tensor) -> Tensor:
        """X itself, or its features; sparse rows made dense."""
        return csr.dense(self._embed("X", X))


class Polynomial(_OfInner):
    """k(x, z) = (x . z + offset)^degree (CRITERIA eq. 3), offset >= 0 of shape (...).

    Zero has no logarithm to train: if any offset is 0 then all are fixed, and `log_offset` is a buffer (-inf
    where the offset is 0) instead of a parameter.
    """

    _fixed = ("degree",)
    offset = _exp_of("log_offset")

    def __init__(self, degree: int = 2, offset: Values = 1.0, *, features: Features = None) -> None:
        super().__init__(features=features)
        if not isinstance(degree, int) or degree < 1:
            raise ValueError(f"Polynomial: degree must be a positive integer, got {degree}")
        self.degree = degree
        values = torch.as_tensor(offset, dtype=torch.float64).detach()
        guard = Guard("Polynomial")
        guard.require((values >= 0) & (values < torch.inf), f"offset must be 0 or positive, got {offset}")
        guard.check()
        number = isinstance(offset, float | int)
        zero = offset == 0 if number else values_visible(values) and bool((values == 0).any())
        self.log_offset = (nn.Buffer if zero else nn.Parameter)(values.log())

    def _of_inner(self, inner: Tensor) -> Tensor:
        return (inner + self._lift("offset", inner)) ** self.degree


class Boolean(_OfInner):
    """k(x, z) = (1 + rate)^(x . z) (CRITERIA, below eq. 3), rate > 0 of shape (...).

    For x in {0, 1}^d: every conjunction of s of the d variables is a feature, of squared weight rate^s.
    """

    rate = _exp_of("log_rate")

    def __init__(self, rate: Values = 1.0, *, features: Features = None) -> None:
        super().__init__(features=features, rate=rate)

    def _of_inner(self, inner: Tensor) -> Tensor:
        return (self._lift("rate", inner).log1p() * inner).exp_()


class _Stationary(Kernel):
    lengthscale = _exp_of("log_lengthscale")
    log_lengthscale: Tensor

    def _diagonal(self, X: Tensor) -> Tensor:
        batch = self._batch(lengthscale=self.log_lengthscale.shape[:-1], X=X.shape[:-2])
        return torch.ones((*batch, X.shape[-2]), dtype=X.dtype, device=X.device)

    def _distance(self, X: Tensor, Z: Tensor | None, factor: float, direct: bool = False) -> Tensor:
        """factor |x - z|^2 / lengthscale^2, (..., n, m); only the result is rounded to the dtype of X."""
        scale, d = self.log_lengthscale.double().exp(), X.shape[-1]
        shapes = {"lengthscale": scale.shape[:-1], "X": X.shape[:-2], "Z": (X if Z is None else Z).shape[:-2]}
        if scale.ndim > 0:
            expected = f"lengthscale must be a scalar or end in {d} to match X"
            self._require(scale.shape[-1] in (1, d), expected, scale.shape)
            scale = scale.unsqueeze(-2)  # (..., 1, d)
        batch = self._batch(**shapes)
        if csr.is_csr(X) or csr.is_csr(Z):
            return self._sparse_distance(X, Z, scale, factor, direct)
        # Centred in float64: far from the origin, a division in float32 would round distances away.
        centre = X.detach().sum(-2, keepdim=True, dtype=torch.float64) / max(1, X.shape[-2])  # (..., 1, d)
        left = ((X.double() - centre) / scale).expand(*batch, *X.shape[-2:])
        right = left if Z is None else ((Z.double() - centre) / scale).expand(*batch, *Z.shape[-2:])
        return squared_distance(left, right, same=Z is None, direct=direct, factor=factor, dtype=X.dtype)

    def _sparse_distance(
        self, X: Tensor, Z: Tensor | None, scale: Tensor, factor: float, direct: bool
    ) -> Tensor:
        """The same from |x|^2 + |z|^2 - 2 x . z; zeros must stay zeros, so nothing can be centred."""
        single = scale.numel() == 1 and scale.ndim < 3
        if direct or not single:
            raise ValueError(
                f"{self._get_name()}: X of sparse rows needs one lengthscale and nu > 1/2, "
                f"got {self.extra_repr()}; make it dense by X.to_dense()"
            )
        X64, Z64 = X.double(), None if Z is None else Z.double()
        left = csr.square_length(X64)
        right = left if Z64 is None else csr.square_length(Z64)
        square = (left.unsqueeze(-1) + right.unsqueeze(-2) - 2 * csr.inner(X64, Z64)).clamp_(min=0)
        if Z is None:
            square.fill_diagonal_(0)
        return (square * (factor / scale.reshape(()).square())).to(X.dtype)


class RBF(_Stationary):
    """k(x, z) = exp(-|x - z|^2 / (2 lengthscale^2)); k(x, x) is exactly 1.

    Cost: one matmul or 16 passes at most, and an exp. Memory: one (n, m) matrix, kept for the backward.

    Args:
        lengthscale: positive. A number or shape () is shared by all coordinates; shape (d,) has one for each
            (ARD). A batch has at least two dimensions: (..., 1) shared or (..., d) ARD, and its leading
            dimensions broadcast with those of X.

    >>> RBF.from_rate(torch.tensor([0.5, 2.0]))
    RBF(lengthscale=[1, 0.5])
    """

    def __init__(self, lengthscale: Values = 1.0, *, features: Features = None) -> None:
        super().__init__(features=features, lengthscale=lengthscale)

    @classmethod
    def from_rate(cls, eta: Values, *, features: Features = None) -> Self:
        """exp(-eta |x - z|^2) (CRITERIA eq. 1): lengthscale (2 eta)^(-1/2), in any of its shapes."""
        return cls((2 * _log("RBF.from_rate", "eta", eta).exp()).rsqrt(), features=features)

    def _evaluate(self, X: Tensor, Z: Tensor | None) -> Tensor:
        return self._distance(X, Z, factor=-0.5).exp_()


class Matern(_Stationary):
    """With a = sqrt(2 nu) |x - z| / lengthscale: e^-a, (1 + a) e^-a or (1 + a + a^2/3) e^-a; k(x, x) = 1.

    For nu = 1/2, 3/2 or 5/2. At equal rows nu = 1/2 has no gradient and 0 is taken; as its square root needs
    small distances to be accurate, it takes differences for every d, at d passes. Memory: two (n, m)
    matrices kept for the backward. Lengthscale: as in RBF.
    """

    _fixed = ("nu",)

    def __init__(self, nu: float = 1.5, lengthscale: Values = 1.0, *, features: Features = None) -> None:
        super().__init__(features=features, lengthscale=lengthscale)
        if nu not in (0.5, 1.5, 2.5):
            raise ValueError(f"Matern: nu must be 0.5, 1.5 or 2.5, got {nu}")
        self.nu = nu

    def _evaluate(self, X: Tensor, Z: Tensor | None) -> Tensor:
        A = self._distance(X, Z, factor=2 * self.nu, direct=self.nu == 0.5)
        return matern_of_square(A, int(self.nu))


class Precomputed(Kernel):
    """X itself: its rows already hold kernel values, (..., n, n) in training.

    To predict, X_new (..., m, n) holds kernel values of new points with the n training points.
    """

    def __init__(self, *, features: Features = None) -> None:
        super().__init__()
        if features is not None:
            raise ValueError(f"Precomputed: features must be None, got {type(features).__name__}")

    def forward(self, X: Tensor, Z: Tensor | None = None) -> Tensor:
        """X itself, which must have one column for each row of Z; the columns of Z do not matter."""
        X = self._embed("X", X)
        if Z is not None:
            require_floating(self._get_name(), X=X, Z=Z)
            n = Z.shape[-2]
            self._require(X.shape[-1] == n, f"X must have {n} columns, one for each row of Z", X.shape)
        return X

    def _embed(self, name: str, X: Tensor) -> Tensor:
        return csr.dense(super()._embed(name, X))

    def _diagonal(self, X: Tensor) -> Tensor:
        return X.diagonal(dim1=-2, dim2=-1)


class Scaled(Kernel):
    """scale * kernel, scale > 0 of shape (...)."""

    scale = _exp_of("log_scale")

    def __init__(self, kernel: Kernel, scale: Values, *, features: Features = None) -> None:
        super().__init__(features=features, scale=scale)
        self.kernel = kernel

    def _evaluate(self, X: Tensor, Z: Tensor | None) -> Tensor:
        K = self.kernel(X, Z)
        return self._lift("scale", K) * K

    def _diagonal(self, X: Tensor) -> Tensor:
        k = self.kernel.diagonal(X).unsqueeze(-1)
        return (self._lift("scale", k) * k)[..., 0]

    @property
    def is_linear(self) -> bool:
        """Whether the kernel is."""
        return self.kernel.is_linear

    def feature_map(self, X: Tensor) -> Tensor:
        """sqrt(scale) times the features of the kernel."""
        F = self.kernel.feature_map(self._embed("X", X))
        return self._lift("scale", F).sqrt() * F


class _Composite(Kernel):
    """Several kernels, their matrices combined entry by entry; each applies features of its own last."""

    _combine: Callable[[Any, Any], Any]

    def __init__(self, *kernels: Kernel, features: Features = None) -> None:
        super().__init__(features=features)
        self.kernels: Any = nn.ModuleList(kernels)

    def _evaluate(self, X: Tensor, Z: Tensor | None) -> Tensor:
        return functools.reduce(self._combine, (kernel(X, Z) for kernel in self.kernels))

    def _diagonal(self, X: Tensor) -> Tensor:
        return functools.reduce(self._combine, (kernel.diagonal(X) for kernel in self.kernels))


class Sum(_Composite):
    """k1 + k2 + ...; the kernels apply features of their own, after those of the sum."""

    _combine = staticmethod(operator.add)

    @property
    def is_linear(self) -> bool:
        """Whether all of the kernels are."""
        return all(kernel.is_linear for kernel in self.kernels)

    def feature_map(self, X: Tensor) -> Tensor:
        """The features of the kernels side by side."""
        X = self._embed("X", X)
        maps = [kernel.feature_map(X) for kernel in self.kernels]
        batch = torch.broadcast_shapes(*(F.shape[:-2] for F in maps))
        return torch.cat([F.expand(*batch, *F.shape[-2:]) for F in maps], dim=-1)


class Product(_Composite):
    """k1 * k2 * ..., entry by entry; features as in Sum."""

    _combine = staticmethod(operator.mul)
