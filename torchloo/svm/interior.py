"""A first solution of the SVM dual by an interior point, good enough to read the active sets off."""

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Interior", "first_solution", "interior_point", "low_rank_factor"]

_SAMPLE = 128
_SETTLED = 30.0  # a multiplier so many times the distance to its bound has won
_WORTH_SAMPLING = 1100  # variables: below, the plain interior point is as fast
_NEAR = 0.5  # margins above 0 that a better solution may well bring down
_WORTH_SHRINKING = 300  # live variables


class Interior(NamedTuple):
    """An interior point near the optimum; which multiplier wins tells the set of each variable."""

    alpha: Tensor
    """Coefficients strictly between 0 and the box, (m,)."""

    bias: Tensor
    """Offset, ()."""

    lower: Tensor
    """Multipliers of alpha >= 0, (m,)."""

    upper: Tensor
    """Multipliers of alpha <= box, (m,)."""


def low_rank_factor(K: Tensor) -> Tensor | None:
    """F (m, p) with K = F F^T to rounding if K has low rank (a linear kernel, say), else None.

    A principal block of 128 rows shows the rank; the diagonal of K - F F^T proves that nothing is
    missing, since that difference is positive semi-definite.
    """
    m = K.shape[-1]
    if m < 2 * _SAMPLE:
        return None
    rows = torch.linspace(0, m - 1, _SAMPLE, device=K.device).long()
    w, V = torch.linalg.eigh(K[rows][:, rows])
    keep = w > 1e-11 * w[-1]
    if keep.sum() > _SAMPLE // 2:
        return None
    F = K[:, rows] @ (V[:, keep] / w[keep].sqrt())  # (m, p)
    missing = K.diagonal() - F.square().sum(-1)
    return F if missing.abs().max() <= 1e-9 * K.diagonal().mean() else None


def first_solution(K: Tensor, y: Tensor, box: Tensor) -> Interior:
    """`interior_point`, for large dense K on the variables that a third of them finds interesting.

    The SVM of the third, its boxes three times as large, shows which margins are far above 0; the
    rest is solved, and whatever violates its margin then comes in.
    """
    factor = low_rank_factor(K)
    if len(y) <= _WORTH_SAMPLING or factor is not None:
        return interior_point(K, y, box, factor)
    sample = torch.arange(0, len(y), 3, device=y.device)
    if bool((y[sample] == y[sample[0]]).all()):
        return interior_point(K, y, box)
    rough = interior_point(K[sample][:, sample], y[sample], 3 * box[sample], gap=1e-3)
    margin = y * (K[:, sample] @ (rough.alpha * y[sample]) + rough.bias) - 1
    live = margin < _NEAR
    none = torch.zeros_like(box)
    while True:
        index = live.nonzero()[:, 0]
        part = interior_point(K[index][:, index], y[index], box[index])
        alpha = none.index_copy(0, index, part.alpha)
        margin = y * (K[:, index] @ (part.alpha * y[index]) + part.bias) - 1
        missed = ~live & (margin < 1e-6)
        if not bool(missed.any()):
            lower = (none + 1).index_copy(0, index, part.lower)
            return Interior(alpha, part.bias, lower, none.index_copy(0, index, part.upper))
        live |= margin < _NEAR / 3


class _Dense:
    """Solves (K + diag(theta)) x = rhs by Cholesky."""

    def __init__(self, K: Tensor) -> None:
        self.K = K

    def product(self, a: Tensor) -> Tensor:
        return self.K @ a

    def factor(self, theta: Tensor) -> bool:
        M = self.K.clone()
        M.diagonal().add_(theta)
        self.L, info = torch.linalg.cholesky_ex(M)
        return not info

    def solve(self, rhs: Tensor) -> Tensor:
        # Unlike cholesky_solve this copies no L.
        half = torch.linalg.solve_triangular(self.L, rhs, upper=False)
        return torch.linalg.solve_triangular(self.L.mT, half, upper=True)

    def take(self, keep: Tensor) -> "_Dense":
        return _Dense(self.K[keep][:, keep])


class _LowRank:
    """The same for K = F F^T by the Woodbury identity: O(m p^2) a factorisation."""

    def __init__(self, F: Tensor) -> None:
        self.F = F

    def product(self, a: Tensor) -> Tensor:
        return self.F @ (self.F.T @ a)

    def factor(self, theta: Tensor) -> bool:
        self.scaled = self.F / theta[:, None]  # (m, p)
        M = self.F.T @ self.scaled
        M.diagonal().add_(1)
        self.theta = theta
        self.L, info = torch.linalg.cholesky_ex(M)
        return not info

    def solve(self, rhs: Tensor) -> Tensor:
        inner = torch.cholesky_solve(self.scaled.T @ rhs, self.L)
        return rhs / self.theta[:, None] - self.scaled @ inner

    def take(self, keep: Tensor) -> "_LowRank":
        return _LowRank(self.F[keep])


def interior_point(
    K: Tensor, y: Tensor, box: Tensor, factor: Tensor | None = None, gap: float = 1e-8, steps: int = 60
) -> Interior:
    """Solve the SVM dual to a relative gap by Mehrotra's predictor and corrector.

        max sum alpha - 1/2 |sum alpha_i y_i phi_i|^2,  y^T alpha = 0,  0 <= alpha <= box

    Works on a = alpha * y, so that the Newton matrix is K + diag(theta) and K is never copied with
    signs. The number of steps (about 15) hardly depends on the box, unlike that of an SMO. Variables
    that are plainly on their way to a bound are put there, and the rest goes on without them; whoever
    asks for more than the sets must check the margins of all (exact.py does).

    Args:
        K: kernel matrix with mean diagonal 1, (m, m).
        y: labels, (m,).
        box: upper bounds, (m,).
        factor: F with K = F F^T if K has low rank, (m, p).
        gap: relative duality gap to stop at.
        steps: the most Newton steps.

    Cost m^3 / 3 a step, or m p^2 for K of rank p; less once variables have settled. Memory: one
    copy of K. Reference: Fine and Scheinberg 2001.
    """
    system = _Dense(K) if factor is None else _LowRank(factor)
    point = _Iterate.start(y, box)
    whole = Interior(*point.values[[0, 0, 2, 3]])._replace(bias=y.new_zeros(()))
    live = torch.arange(len(y), device=y.device)
    pull, total = torch.zeros_like(y), 0.0  # u and y^T alpha of settled variables
    for _ in range(steps):
        point.look(system.product(point.values[0] * point.y) + pull, total)
        if point.solved(gap) or not point.step(system):
            break  # a failed factorisation: the sets are as clear as rounding lets them be
        if len(live) <= _WORTH_SHRINKING:
            continue
        settled = point.settled()
        if len(live) // 3 < int(settled.sum()) < len(live):  # someone must be left to go on
            whole = _store(whole, live, point)
            _, _, lower, upper = point.values
            a = torch.where(lower > upper, 0.0, point.box) * point.y * settled
            keep = (~settled).nonzero()[:, 0]
            pull, total = (pull + system.product(a))[keep], total + float(a.sum())
            live, system, point = live[keep], system.take(keep), point.take(keep)
    return _store(whole, live, point)


def _store(whole: Interior, live: Tensor, point: "_Iterate") -> Interior:
    """Enter the live variables into the whole solution."""
    alpha, _, lower, upper = point.values
    parts = ((whole.alpha, alpha), (whole.lower, lower), (whole.upper, upper))
    alpha, lower, upper = (old.index_copy(0, live, new) for old, new in parts)
    return Interior(alpha, alpha.new_tensor(point.bias), lower, upper)


class _Iterate:
    """The point, its residuals, and the Newton step from it.

    Note [Newton step]
    X = (alpha, box - alpha) and their multipliers W = (lower, upper) are stacked as `values`, (4, m).
    A step that should change the products X W by E - X W solves, with theta = sum of W / X,

        (K + theta) x = (y - u - b) + y * ((E / X)_1 - (E / X)_2),    (K + theta) eta = 1,
        d_b = (1^T x - equality residual) / 1^T eta,   d_alpha = y * (x - d_b eta),
        dX = (d_alpha, -d_alpha),   dW = E / X - W - (W / X) dX.

    The predictor has E = 0, the corrector E = centre - dX dW of the predictor.
    """

    def __init__(self, y: Tensor, box: Tensor, values: Tensor, bias: float) -> None:
        self.y, self.box, self.values, self.bias = y, box, values, bias
        self.sides, self.ones = torch.stack([y, -y]), torch.ones_like(y)

    @classmethod
    def start(cls, y: Tensor, box: Tensor) -> "_Iterate":
        """A fifth of the way into the box; of ten starts tried this took the fewest steps."""
        one = torch.ones_like(box)
        return cls(y, box, torch.stack([0.2 * box, 0.8 * box, one, one]), 0.0)

    def take(self, keep: Tensor) -> "_Iterate":
        """The point without the variables that have settled."""
        return _Iterate(self.y[keep], self.box[keep], self.values[:, keep], self.bias)

    def look(self, u: Tensor, total: float) -> None:
        """Residuals for u = K (alpha * y) and the settled part of y^T alpha."""
        self.miss = self.y - u - self.bias
        self.equality_residual = -float(self.values[0] @ self.y) - total
        self.complementarity = float(self.values[:2].flatten() @ self.values[2:].flatten())

    def solved(self, gap: float) -> bool:
        """Rounding may hold residuals up for ever, but not the complementarity: then that decides."""
        alpha, _, lower, upper = self.values
        scale = float(alpha.sum())  # of the objective
        if self.complementarity > gap * scale:
            return False
        dual_residual = (self.y * self.miss).add_(lower).sub_(upper)
        residual = max(float(dual_residual.abs().max()), abs(self.equality_residual) / scale)
        return residual <= gap or self.complementarity <= 1e-2 * gap * scale

    def settled(self) -> Tensor:
        """Variables whose multiplier outweighs their distance to the bound by far."""
        return (self.values[2:] > _SETTLED * self.values[:2]).any(0)

    def step(self, system: "_Dense | _LowRank") -> bool:
        """Predict, centre, correct, and go 0.995 of the way to the nearest bound; False if it cannot."""
        X, W = self.values[:2], self.values[2:]
        slope = W / X
        if not system.factor(slope.sum(0)):
            return False
        x, eta = system.solve(torch.stack([self.miss, self.ones], 1)).unbind(1)
        d, _ = self._direction(x, eta, slope, -W)
        t = self._longest_step(d)
        product = d[:2] * d[2:]
        # X dW + W dX = -X W, so that the products after a step t need no new vectors.
        after = 1 - t + t * t * float(product.sum()) / self.complementarity
        centre = self.complementarity / (2 * X.shape[1]) * max(after, 0.0) ** 3
        push = (centre - product).div_(X)
        rhs = torch.addcmul(self.miss, self.y, push[0] - push[1])
        d, d_bias = self._direction(system.solve(rhs[:, None])[:, 0], eta, slope, push - W)
        t = 0.995 * self._longest_step(d)
        self.values = self.values.add(d, alpha=t)
        self.values[1] = self.box - self.values[0]
        self.bias += t * d_bias
        return True

    def _direction(self, x: Tensor, eta: Tensor, slope: Tensor, push: Tensor) -> tuple[Tensor, float]:
        """Change of `values` (4, m), and of the bias, Note [Newton step]."""
        d_bias = (float(x.sum()) - self.equality_residual) / float(eta.sum())
        dX = self.sides * torch.sub(x, eta, alpha=d_bias)
        return torch.cat([dX, torch.addcmul(push, slope, dX, value=-1)]), d_bias

    def _longest_step(self, d: Tensor) -> float:
        """The longest t <= 1 that keeps all values + t d nonnegative."""
        return min(1.0, -1 / min(float((d / self.values).min()), -1e-300))
