"""Linear systems of the interior point: K + diag(theta), dense or of low rank."""

import torch
from torch import Tensor

__all__ = ["Dense", "LowRank"]


class Dense:
    """Solves (K + diag(theta)) x = rhs by Cholesky, for one machine."""

    def __init__(self, K: Tensor) -> None:
        self.K = K

    def product(self, a: Tensor) -> Tensor:
        """K a."""
        return self.K @ a

    def factor(self, theta: Tensor) -> Tensor:
        """Whether it could be done, ()."""
        M = self.K.clone()
        M.diagonal().add_(theta)
        self.L, info = torch.linalg.cholesky_ex(M)
        return info == 0

    def solve(self, rhs: Tensor) -> Tensor:
        """Right-hand sides and solutions are the rows, (c, m)."""
        # Unlike cholesky_solve this copies no L.
        half = torch.linalg.solve_triangular(self.L, rhs.mT, upper=False)
        return torch.linalg.solve_triangular(self.L.mT, half, upper=True).mT

    def take(self, keep: Tensor) -> "Dense":
        """That of the variables in `keep`."""
        return Dense(self.K[keep][:, keep])


class LowRank:
    """The same for K = F F^T by the Woodbury identity, for any number of machines: O(m p^2) each."""

    def __init__(self, F: Tensor) -> None:
        self.F = F

    def product(self, a: Tensor) -> Tensor:
        """K a."""
        return (a @ self.F) @ self.F.T

    def factor(self, theta: Tensor) -> Tensor:
        """Whether it could be done, (...)."""
        self.theta = theta[..., None, :]
        m, p = self.F.shape
        # The machines side by side, (m, B p): one large product instead of many.
        scaled = self.F[:, None] / theta.reshape(-1, m).T.contiguous()[:, :, None]
        M = (self.F.T @ scaled.view(m, -1)).view(p, -1, p).transpose(0, 1).reshape(*theta.shape[:-1], p, p)
        M.diagonal(dim1=-2, dim2=-1).add_(1)
        self.L, info = torch.linalg.cholesky_ex(M)
        return info == 0

    def solve(self, rhs: Tensor) -> Tensor:
        """Right-hand sides and solutions are the rows, (..., c, m)."""
        near = rhs / self.theta
        inner = torch.cholesky_solve((near @ self.F).mT, self.L).mT
        return near - (inner @ self.F.T).div_(self.theta)

    def take(self, keep: Tensor) -> "LowRank":
        """That of the variables in `keep`."""
        return LowRank(self.F[keep])
