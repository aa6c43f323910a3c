"""Linear systems: K + diag(theta) of the interior point, dense or of low rank; those of a free set.

Note [long and short points]
Where inputs are not scaled some points are longer than others by orders of magnitude, and what a short
one adds to K is lost beside a mean diagonal or a constant. But Cholesky is as accurate as if every row
had been divided by the length of its point: rounding of k_ij is relative to the lengths of i and j. So
nothing of a common size may be added to K, and a pivot is compared to the diagonal entry of its own row.
"""

import torch
from torch import Tensor

__all__ = ["Bordered", "Dense", "LowRank"]

_RIDGES = (0.0, 1e-15, 1e-13)  # of each diagonal entry: a K that rounding has made indefinite is lifted


class Dense:
    """Solves (K + diag(theta)) x = rhs by Cholesky, for one machine."""

    def __init__(self, K: Tensor) -> None:
        self.K = K

    def product(self, a: Tensor) -> Tensor:
        """K a."""
        return self.K @ a

    def factor(self, theta: Tensor) -> bool:
        """Whether it could be done."""
        for ridge in _RIDGES:
            M = self.K.clone()
            M.diagonal().add_(theta if not ridge else theta + ridge * self.K.diagonal())
            self.L, info = torch.linalg.cholesky_ex(M)
            if not bool(info):
                return True
        return False

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

    def factor(self, theta: Tensor) -> Tensor | bool:
        """Whether it could be done, for several machines (B,)."""
        self.theta = theta[..., None, :]
        m, p = self.F.shape
        # The machines side by side, (m, B p): one large product instead of many.
        scaled = self.F[:, None] / theta.reshape(-1, m).T.contiguous()[:, :, None]
        M = (self.F.T @ scaled.view(m, -1)).view(p, -1, p).transpose(0, 1).reshape(*theta.shape[:-1], p, p)
        M.diagonal(dim1=-2, dim2=-1).add_(1)
        self.L, info = torch.linalg.cholesky_ex(M)
        return info == 0 if info.ndim else not bool(info)

    def solve(self, rhs: Tensor) -> Tensor:
        """Right-hand sides and solutions are the rows, (..., c, m)."""
        near = rhs / self.theta
        inner = torch.cholesky_solve((near @ self.F).mT, self.L).mT
        return near - (inner @ self.F.T).div_(self.theta)

    def take(self, keep: Tensor) -> "LowRank":
        """That of the variables in `keep`."""
        return LowRank(self.F[keep])


class Bordered:
    """Solves [0 1^T; 1 K] [b; a] = [top; rhs] for the points of a free set.

    K is centred at the shortest point j, g_ik = k_ik - k_ij - k_jk + k_jj, which leaves a as it is and is
    positive definite for the others if the system is regular: nothing of a short point is lost, Note
    [long and short points].
    """

    def __init__(self, K: Tensor) -> None:
        k = K.diagonal()
        self.j = j = int(k.argmin())
        self.K_j = K[j]
        self.size = (k + k[j]).clamp_min(torch.finfo(K.dtype).tiny)  # copies of the origin have none
        self.G = K - self.K_j - self.K_j[:, None] + k[j]
        self.G[:, j] = 0  # nor has j any part in it; its row is 0 already
        self.G[j, j] = self.size[j]
        self.L, info = torch.linalg.cholesky_ex(self.G)
        self.definite = not bool(info)

    def regular(self, tolerance: float) -> bool:
        """Whether every pivot is more than `tolerance` of its diagonal entry."""
        return self.definite and bool((self.L.diagonal().square() > tolerance * self.size).all())

    def independent(self, tolerance: float) -> Tensor:
        """Mask of points, j among them, that pivoted Cholesky keeps, (s,)."""
        length = self.size.sqrt()
        G, kept = self.G / length / length[:, None], torch.zeros_like(length, dtype=torch.bool)
        for _ in range(len(G)):
            pivot, i = G.diagonal().masked_fill(kept, -1).max(0)
            if not pivot > tolerance:
                break
            kept[i] = True
            G.addr_(G[:, i].clone(), G[i] / -pivot)
        return kept

    def solve(self, top: Tensor, rhs: Tensor) -> tuple[Tensor, Tensor]:
        """b (c,) and a (c, s) for top (c,) and rhs (c, s)."""
        j = self.j
        rest = rhs - rhs[:, j, None] - (self.K_j - self.K_j[j]) * top[:, None]  # 0 at j
        a = torch.cholesky_solve(rest.T, self.L).T
        a[:, j] = top - a.sum(1)
        return rhs[:, j] - a @ self.K_j, a
