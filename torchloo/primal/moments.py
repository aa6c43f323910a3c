"""Normal equations gathered block by block, in float64.

Note [moments]
What a ridge regression needs to know of its rows is their total weight w, the weighted means of
features and targets, and S = sum zeta (z - mean)(z - mean)^T, T = sum zeta (z - mean)(y - mean)^T. With an
unpenalised bias, these centred sums give the coefficients alone, and the bias is the mean of the
targets. Two sets of rows, the means d apart, join by adding their sums and w1 w2 / (w1 + w2) d d^T: no
large numbers are subtracted, wherever the origin is. Without a bias the means stay zero.

Features are columns (p, b), so that panels of features are contiguous. A batch of problems is an axis in
front of all others.
"""

from functools import cached_property, partial

import torch
from torch import Tensor

from torchloo.panels import add_matmul, add_symmetric
from torchloo.primal.collective import Peers
from torchloo.primal.seen import Seen

__all__ = ["Moments", "shares"]


def shares(weight: Tensor) -> Tensor:
    """Weights (..., n) divided by their sum, so that products with them are weighted means."""
    return weight / weight.sum(-1, keepdim=True)


class Moments:
    """Total weight, means and centred sums of squares of rows; see Note [moments].

    Args:
        like: weights (..., b) of rows, for the device and the batch of problems.
        p: number of features.
        c: number of outputs.
        dtype: of the rows as they came.
        centre: False keeps the means at zero, for a machine without a bias.

    Attributes:
        rows: features (..., p, n) about the mean of all rows, if they have come in one block; else None.
    """

    rows: Tensor | None
    weight: Tensor
    mean_z: Tensor
    mean_y: Tensor
    squares: Tensor

    def __init__(self, like: Tensor, p: int, c: int, dtype: torch.dtype, centre: bool) -> None:
        self.centre, self.dtype = centre, dtype
        self.count, self.seen = 0, Seen()
        batch, zeros = like.shape[:-1], partial(like.new_zeros, dtype=torch.float64)
        self.longest = zeros(batch)
        self.S, self.T = zeros((*batch, p, p)), zeros((*batch, p, c))  # of S, the lower triangle

    def add(self, Z: Tensor, Y: Tensor, zeta: Tensor, all_rows: bool = False) -> None:
        """Join rows with features Z (..., p, b), overwritten, targets (..., b, c) and weights (..., b).

        If these are all rows, their features are kept.
        """
        first, zeta = self.count == 0, zeta.unsqueeze(-1)  # (..., b, 1)
        self.count += Y.shape[-2]
        weight, root = zeta.sum(-2, keepdim=True), zeta.sqrt()
        if self.centre:
            mean_z, mean_y = (Z @ zeta.to(Z.dtype)).double() / weight, zeta.mT @ Y / weight
            Z, Y = Z.sub_(mean_z.to(Z.dtype)), Y - mean_y
        elif first:
            mean_z, mean_y = torch.zeros_like(self.T[..., :1]), torch.zeros_like(self.T[..., :1, :])
        self.rows = Z if all_rows else None
        Y, Z = Y * root, torch.mul(Z, root.mT.to(Z.dtype), out=None if all_rows else Z)
        add_symmetric(self.S, Z)
        add_matmul(self.T, Z, Y.to(Z.dtype))
        squares = Y.square().sum(-2)
        if first:
            self.weight, self.mean_z, self.mean_y, self.squares = weight, mean_z, mean_y, squares
            return
        self.squares += squares
        total = self.weight + weight
        if self.centre:
            apart_z, apart_y = mean_z - self.mean_z, mean_y - self.mean_y
            self._shift(apart_z, apart_y, self.weight * weight / total)
            self.mean_z = self.mean_z + weight / total * apart_z
            self.mean_y = self.mean_y + weight / total * apart_y
        self.weight = total

    def _shift(self, z: Tensor, y: Tensor, weight: Tensor) -> None:
        """Add weight d d^T for a difference of means d, z (..., p, 1) and y (..., 1, c)."""
        add_matmul(self.S, z, weight * z.mT)
        add_matmul(self.T, z, weight * y)
        self.squares += (weight * y.square())[..., 0, :]

    def about(self, mean_z: Tensor, mean_y: Tensor) -> None:
        """Take all sums about other means (..., p, 1) and (..., 1, c)."""
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

    @cached_property
    def per_weight(self) -> Tensor:
        """What the bias adds to z^T C^{-1} z, (..., 1, 1): 1 / w, or 0 without one."""
        return self.weight.reciprocal() if self.centre else torch.zeros_like(self.weight)

    @cached_property
    def spread(self) -> Tensor:
        """Root mean square of the targets about their mean, (..., 1, c)."""
        return (self.squares / self.weight[..., 0]).sqrt().unsqueeze(-2)

    @property
    def distance(self) -> Tensor:
        """The squared distance of the mean from the origin, in units of the variance, at most, (...)."""
        squares = self.S.diagonal(dim1=-2, dim2=-1)
        apart = self.mean_z[..., 0].square() * self.weight[..., 0] / squares
        return apart.masked_fill_(squares <= 0, 0.0).amax(-1)
