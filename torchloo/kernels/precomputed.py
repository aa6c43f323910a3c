"""A kernel matrix given by the user in place of inputs."""

import torch
from torch import Tensor

from torchloo import csr
from torchloo.guards import require_inputs
from torchloo.kernels.kernel import Features, Kernel

__all__ = ["Precomputed"]


class Precomputed(Kernel):
    """X itself: its rows already hold kernel values, (..., n, n) in training.

    To predict, X_new (..., m, n) holds kernel values of new points with the n training points.
    """

    keeps_digits = True  # a given matrix cannot be evaluated more accurately

    def __init__(self, *, features: Features = None) -> None:
        super().__init__()
        if features is not None:
            raise ValueError(f"Precomputed: features must be None, got {type(features).__name__}")

    def forward(self, X: Tensor, Z: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """X itself, which must have one column for each row of Z; the columns of Z do not matter."""
        X = self._embed("X", X)
        if Z is not None:
            require_inputs(self._get_name(), X=X, Z=Z)
            n = Z.shape[-2]
            self._require(X.shape[-1] == n, f"X must have {n} columns, one for each row of Z", X.shape)
        return X.to(dtype or X.dtype)

    def _embed(self, name: str, X: Tensor) -> Tensor:
        return csr.dense(super()._embed(name, X))

    def _diagonal(self, X: Tensor) -> Tensor:
        return X.diagonal(dim1=-2, dim2=-1)
