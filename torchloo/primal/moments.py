"""Normal equations gathered block by block, in float64, and the products they are made of.

Note [moments]
What a ridge regression needs to know of its rows is their total weight w, the weighted means of
features and targets, and S = sum zeta (z - mean)(z - mean)^T, T = sum zeta (z - mean)(y - mean)^T. With an
unpenalised bias, these centred sums give the coefficients alone, and the bias is the mean of the
targets. Two sets of rows, the means d apart, join by adding their sums and w1 w2 / (w1 + w2) d d^T: no
large numbers are subtracted, wherever the origin is. Without a bias the means stay zero.

Features stand in columns (p, b), so that panels of features are contiguous.
"""

import itertools

import torch
from torch import Tensor

from torchloo.primal.collective import Peers
from torchloo.primal.seen import Seen

__all__ = [
    "LowerInverse",
    "Moments",
    "add_symmetric",
    "mirrored",
    "room_like",
    "times_lower",
    "times_upper",
]

# Features in one panel: wide enough for full speed, narrow enough to leave out most of the triangle
# that is not needed (scripts/bench/scale.py measures what is saved); a multiple of what registers hold.
_PANEL, _ALIGNED = 104, 8

# Up to this condition number (of the Frobenius norm) the inverse of a panel is good enough.
_CONDITION = 1e5


def _panels(p: int) -> list[tuple[int, int]]:
    count = max(1, round(p / _PANEL))
    edges = [*(_ALIGNED * round(k * p / count / _ALIGNED) for k in range(count)), p]
    return list(itertools.pairwise(edges))


def add_symmetric(S: Tensor, V: Tensor, weight: Tensor | None = None) -> None:
    """Add V V^T or V diag(weight) V^T, for V (p, b) and weights (b,) of any sign, to the lower triangle of S.

    At 0.6 of the work of a general product; S (p, p) may have a wider dtype. What is above its diagonal
    afterwards has no meaning.
    """
    left = V if weight is None else V * weight.to(V.dtype)
    for start, stop in _panels(len(V)):
        corner = S[start:stop, :stop]
        if V.dtype == S.dtype:
            corner.addmm_(left[start:stop], V[:stop].mT)
        else:
            corner += left[start:stop] @ V[:stop].mT


def mirrored(S: Tensor) -> Tensor:
    """What `add_symmetric` has added up, (..., p, p), with what stands above the diagonal filled in."""
    for start, stop in _panels(S.shape[-1]):
        S[..., :start, start:stop] = S[..., start:stop, :start].mT
    return S


def room_like(V: Tensor, p: int) -> Tensor:
    """Room for (p, b), laid out as V (p', b): features stand together, or those of each row do."""
    b = V.shape[1]
    if V.stride(0) == 1:
        return V.new_empty(b, -(-p // _ALIGNED) * _ALIGNED)[:, :p].mT
    return V.new_empty(p, b)


def times_lower(T: Tensor, V: Tensor, out: Tensor) -> Tensor:
    """T V for a lower triangular T (p, p) and V (p, b), at 0.6 of the work of a general product."""
    for start, stop in _panels(len(T)):
        torch.mm(T[start:stop, :stop], V[:stop], out=out[start:stop])
    return out


def times_upper(T: Tensor, V: Tensor) -> Tensor:
    """T^T V for a lower triangular T (p, p) and V (p, b), likewise."""
    out = room_like(V, len(V))
    for start, stop in _panels(len(T)):
        torch.mm(T[start:, start:stop].mT, V[start:], out=out[start:stop])
    return out


class LowerInverse:
    """L^{-1} V for a lower triangular L (p, p), panel by panel.

    Panels on the diagonal that are well conditioned are inverted once: a product is faster than a
    solution, and then as accurate. Which ones are is to be decided, once the values of `good` are known.
    """

    def __init__(self, L: Tensor) -> None:
        self.L = L.contiguous()
        self._inverses: list[Tensor | None] = []
        good = []
        for start, stop in _panels(len(L)):
            panel = self.L[start:stop, start:stop]
            unit = torch.eye(stop - start, dtype=L.dtype, device=L.device)
            inverse = torch.linalg.solve_triangular(panel, unit, upper=False)
            good.append(torch.linalg.vector_norm(panel) * torch.linalg.vector_norm(inverse) < _CONDITION)
            self._inverses.append(inverse)
        self.good = torch.stack(good)  # one flag for each panel

    def decide(self, good: list[bool]) -> None:
        """Solve with the panels that are not good, as the values of the flags say."""
        pairs = zip(self._inverses, good, strict=True)
        self._inverses = [inverse if fine else None for inverse, fine in pairs]

    def __call__(self, V: Tensor) -> Tensor:
        """L^{-1} V for V (p, b)."""
        out, L = torch.empty_like(V), self.L.to(V.dtype)
        for (start, stop), inverse in zip(_panels(len(V)), self._inverses, strict=True):
            rest = V[start:stop]
            if start:
                rest = torch.addmm(rest, L[start:stop, :start], out[:start], alpha=-1)
            if inverse is None:
                panel = L[start:stop, start:stop]
                out[start:stop] = torch.linalg.solve_triangular(panel, rest, upper=False)
            else:
                torch.mm(inverse.to(V.dtype), rest, out=out[start:stop])
        return out


class Moments:
    """Total weight, means and centred sums of squares of rows; see Note [moments].

    Args:
        like: a tensor of the device.
        p: number of features.
        c: number of outputs.
        dtype: of the rows as they came.
        centre: False keeps the means at zero, for a machine without a bias.
    """

    def __init__(self, like: Tensor, p: int, c: int, dtype: torch.dtype, centre: bool) -> None:
        self.centre, self.dtype = centre, dtype
        like = like.double()
        self.weight = like.new_zeros(())
        self.mean_z, self.mean_y = like.new_zeros(p, 1), like.new_zeros(1, c)
        self.S, self.T = like.new_zeros(p, p), like.new_zeros(p, c)  # of S, the lower triangle
        self.squares = like.new_zeros(c)
        self.longest = like.new_zeros(())
        self.count = 0
        self.seen = Seen()

    def add(self, Z: Tensor, Y: Tensor, zeta: Tensor) -> None:
        """Join rows with features Z (p, b), overwritten, targets Y (b, c) and weights zeta (b,)."""
        first, weight = self.count == 0, zeta.sum()
        self.count += len(zeta)
        total, root = self.weight + weight, zeta.sqrt()
        if self.centre:
            mean_z = (Z @ zeta.unsqueeze(-1).to(Z.dtype)).double() / weight
            mean_y = (zeta @ Y).unsqueeze(0) / weight
            if first:
                self.mean_z, self.mean_y = mean_z, mean_y
            else:
                apart_z, apart_y = mean_z - self.mean_z, mean_y - self.mean_y
                self._shift(apart_z, apart_y, self.weight * weight / total)
                self.mean_z = self.mean_z + weight / total * apart_z
                self.mean_y = self.mean_y + weight / total * apart_y
            Z, Y = Z.sub_(mean_z.to(Z.dtype)), Y - mean_y
        self.weight, Z, Y = total, Z.mul_(root.to(Z.dtype)), Y * root.unsqueeze(-1)
        add_symmetric(self.S, Z)
        if Z.dtype == self.T.dtype:
            self.T.addmm_(Z, Y)
        else:
            self.T += Z @ Y.to(Z.dtype)
        self.squares += Y.square().sum(0)

    def _shift(self, z: Tensor, y: Tensor, weight: Tensor) -> None:
        """Add weight d d^T for a difference of means d, z (p, 1) and y (1, c)."""
        self.S.addmm_(z, weight * z.mT)
        self.T.addmm_(z, weight * y)
        self.squares += weight * y[0].square()

    def about(self, mean_z: Tensor, mean_y: Tensor) -> None:
        """Take all sums about other means (p, 1) and (1, c)."""
        self._shift(self.mean_z - mean_z, self.mean_y - mean_y, self.weight)
        self.mean_z, self.mean_y = mean_z, mean_y

    def join(self, others: Peers) -> None:
        """Add the rows of the other processes: one all-reduce, after a small one for the means."""
        if others.count == 1:
            return
        parts = (self.weight, self.weight * self.mean_z, self.weight * self.mean_y)
        weight, mean_z, mean_y = others.sums(*parts)
        if self.centre:
            self.about(mean_z / weight, mean_y / weight)
        self.weight, self.S, self.T, self.squares = others.sums(self.weight, self.S, self.T, self.squares)
        self.longest = torch.stack([found.to(weight) for found in others.gather(self.longest.cpu())]).max()

    @property
    def spread(self) -> Tensor:
        """Root mean square of the targets about their mean, (c,)."""
        return (self.squares / self.weight).sqrt()

    @property
    def shift(self) -> Tensor:
        """How many times their spread, at most, features may be away from the origin; at least 1."""
        spread = (self.S.diagonal() / self.weight).sqrt()
        apart = self.mean_z[:, 0].abs() / spread
        return torch.where(spread > 0, apart, 0.0).max() + 1
