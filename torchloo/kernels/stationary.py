"""Stationary kernels: functions of the distance |x - z| in units of a lengthscale."""

from typing import Self

import torch
from torch import Tensor

from torchloo import csr
from torchloo.guards import expanded
from torchloo.kernels.distances import matern_of_square, squared_distance
from torchloo.kernels.kernel import Choice, Features, Kernel
from torchloo.positive import Positive, Values, log_of

__all__ = ["RBF", "Matern"]


def median_distance(Z: Tensor, each: bool) -> Tensor:
    """Median distance between the rows of Z (m, d), shape (); or one for each column, (d,).

    The latter is the median distance of the standardised rows times the standard deviation of the column.
    """
    spread = torch.ones_like(Z[0])
    if each and len(Z) > 1:
        spread = Z.std(0)
        spread = torch.where(spread > 0, spread, 1.0)
    distance = torch.nn.functional.pdist(Z / spread)
    distance = distance[distance > 0]
    median = distance.median() if len(distance) else Z.new_ones(())
    return median * spread if each else median


class _Stationary(Kernel):
    """A function of |x - z| / lengthscale that is 1 at zero."""

    lengthscale = Positive(
        "the distance beyond which rows hardly influence one another",
        median_distance,
        unit="inputs",
        per_input=True,
    )
    log_lengthscale: Tensor
    keeps_digits = True

    def _diagonal(self, X: Tensor) -> Tensor:
        batch = self._batch(lengthscale=self.lengthscale.shape[:-1], X=X.shape[:-2])
        shape = (*batch, X.shape[-2])
        return torch.ones(shape, dtype=X.dtype, device=X.device)

    def _distance(self, X: Tensor, Z: Tensor | None, factor: float, direct: bool = False) -> Tensor:
        """factor |x - z|^2 / lengthscale^2, (..., n, m); only the result is rounded to the dtype of X."""
        scale = self.lengthscale.double()
        d = X.shape[-1]
        columns = X if Z is None else Z
        batch_shapes = {
            "lengthscale": scale.shape[:-1],
            "X": X.shape[:-2],
            "Z": columns.shape[:-2],
        }
        if scale.ndim > 0:
            expected = f"lengthscale must be a scalar or end in {d} to match X"
            self._require(scale.shape[-1] in (1, d), expected, scale.shape)
            scale = scale.unsqueeze(-2)  # (..., 1, d)
        batch = self._batch(**batch_shapes)
        if csr.is_csr(X) or csr.is_csr(Z):
            return self._sparse_distance(X, Z, scale, factor, direct)
        # Centred in float64: far from the origin, a division in float32 would lose small distances.
        centre = columns.detach().mean(-2, keepdim=True, dtype=torch.float64)  # (..., 1, d)
        left = expanded((X - centre) / scale, batch + X.shape[-2:])
        right = None
        if Z is not None:
            right = expanded((Z - centre) / scale, batch + Z.shape[-2:])
        return squared_distance(left, right, direct=direct, factor=factor, dtype=X.dtype)

    def _sparse_distance(
        self, X: Tensor, Z: Tensor | None, scale: Tensor, factor: float, direct: bool
    ) -> Tensor:
        """The same from |x|^2 + |z|^2 - 2 x . z; sparse rows cannot be centred, as zeros must stay zeros."""
        one_lengthscale = scale.numel() == 1 and scale.ndim < 3
        if direct or not one_lengthscale:
            raise ValueError(
                f"{self._get_name()}: X of sparse rows needs one lengthscale and nu > 1/2, "
                f"got {self.extra_repr()}; make it dense by X.to_dense()"
            )
        X64 = X.double()
        Z64 = None if Z is None else Z.double()
        left = csr.square_length(X64)
        right = left if Z64 is None else csr.square_length(Z64)
        squares = left.unsqueeze(-1) + right.unsqueeze(-2)
        square = squares - 2 * csr.inner(X64, Z64)
        square = square.clamp_(min=0)
        if Z is None:
            square.fill_diagonal_(0)
        scaled = square * (factor / scale.reshape(()).square())
        return scaled.to(X.dtype)


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

    choices = (
        Choice("rbf", "an RBF kernel", lambda d: RBF(d**0.5)),
        Choice(
            "ard",
            "an RBF kernel that has a lengthscale for every input (ARD)",
            lambda d: RBF(torch.full((d,), d**0.5, dtype=torch.float64)),
        ),
    )
    _symmetric = True

    def __init__(self, lengthscale: Values = 1.0, *, features: Features = None, event_dim: int = 1) -> None:
        super().__init__(features=features, event_dim=event_dim, lengthscale=lengthscale)

    @classmethod
    def from_rate(cls, eta: Values, *, features: Features = None, event_dim: int = 1) -> Self:
        """exp(-eta |x - z|^2) (Cawley 2006, eq. 1): lengthscale (2 eta)^(-1/2), in any of its shapes."""
        lengthscale = (2 * log_of("RBF.from_rate", "eta", eta).exp()).rsqrt()
        return cls(lengthscale, features=features, event_dim=event_dim)

    def _evaluate(self, X: Tensor, Z: Tensor | None) -> Tensor:
        exponent = self._distance(X, Z, factor=-0.5)
        # A compiler fuses the exp by itself, and may have made a view of the exponent.
        return exponent.exp() if torch.compiler.is_compiling() else exponent.exp_()


class Matern(_Stationary):
    """With a = sqrt(2 nu) |x - z| / lengthscale: e^-a, (1 + a) e^-a or (1 + a + a^2/3) e^-a; k(x, x) = 1.

    For nu = 1/2, 3/2 or 5/2. For nu = 1/2 the gradient does not exist at equal rows and is taken as 0; as its
    square root needs small distances to be accurate, it uses differences for every d, at d passes. Memory:
    two (n, m) matrices kept for the backward. Lengthscale: as in RBF.
    """

    settings = ("nu",)
    _symmetric = True
    choices = (Choice("matern", "a Matérn kernel", lambda d: Matern(lengthscale=d**0.5)),)

    def __init__(
        self,
        nu: float = 1.5,
        lengthscale: Values = 1.0,
        *,
        features: Features = None,
        event_dim: int = 1,
    ) -> None:
        super().__init__(features=features, event_dim=event_dim, lengthscale=lengthscale)
        if getattr(nu, "ndim", 0) or nu not in (0.5, 1.5, 2.5):
            raise ValueError(f"Matern: nu must be 0.5, 1.5 or 2.5, got {nu}")
        self.nu = float(nu)

    def _evaluate(self, X: Tensor, Z: Tensor | None) -> Tensor:
        A = self._distance(X, Z, factor=2 * self.nu, direct=self.nu == 0.5)
        return matern_of_square(A, int(self.nu))
