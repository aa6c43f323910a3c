"""Squared distances and functions of them; their backward passes save as few (n, m) matrices as possible."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from torchloo.autograd import apply

__all__ = ["matern_of_square", "squared_distance"]


def _tile_rows(shape: torch.Size, device: torch.device) -> int:
    """How many rows of a (..., n, m) matrix to compute at once: a tile fits the cache of a CPU."""
    numbers_in_row = max(1, shape[:-2].numel() * shape[-1])
    numbers_in_tile = 1 << 18 if device.type == "cpu" else 1 << 24
    return max(32, numbers_in_tile // numbers_in_row)


def _symmetrise(D: Tensor) -> None:
    """Make squared distances of one set of points symmetric, 0 on the diagonal, despite rounding."""
    D.add_(D.mT.clone()).mul_(0.5)
    D.diagonal(dim1=-2, dim2=-1).zero_()


def _extended(X: Tensor, Z: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """Rows (..., n, d + 2) and (..., m, d + 2) whose inner products are factor |x_i - z_j|^2."""
    x_square = X.square().sum(-1, keepdim=True)
    z_square = Z.square().sum(-1, keepdim=True)
    left = torch.cat([-2 * X, x_square, torch.ones_like(x_square)], -1)
    right = torch.cat([Z, torch.ones_like(z_square), z_square], -1)
    return left.mul_(factor), right


def _by_differences(X: Tensor, Z: Tensor) -> Tensor:
    """|x_i - z_j|^2, (..., n, m), coordinate by coordinate, so that small distances are accurate."""
    if torch.compiler.is_compiling():  # exporters do not support cdist, and compilers fuse this loop
        coordinates = range(X.shape[-1])
        return sum((X[..., :, k, None] - Z[..., None, :, k]).square() for k in coordinates)  # type: ignore[return-value]
    return torch.cdist(X, Z, compute_mode="donot_use_mm_for_euclid_dist").square_()


class _SquaredDistance(Function):
    """factor |x_i - z_j|^2 for float64 points X (..., n, d) and Z (..., m, d), as (..., n, m) of a dtype.

    Up to 16 coordinates, or if `direct`, by differences: small relative error, exactly 0 for equal rows.
    Otherwise by |x|^2 + |z|^2 - 2 x.z, one matmul, with an absolute error of about 1e-16 (|x|^2 + |z|^2). If
    Z is None, it is X, and only the lower triangle is computed. The backward saves X and Z only and is itself
    differentiable: Xbar = 2 factor (diag(G 1) X - G Z) for a cotangent G, and Zbar likewise with G^T.
    """

    @staticmethod
    def forward(X: Tensor, Z: Tensor | None, direct: bool, factor: float, dtype: Any) -> Tensor:
        same = Z is None
        Z = X if Z is None else Z
        direct = direct or X.shape[-1] <= 16
        left, right = (X, Z) if direct else _extended(X, Z, factor)
        n, m = X.shape[-2], Z.shape[-2]
        shape = torch.Size((*X.shape[:-1], m))
        step = _tile_rows(shape, X.device)

        def compute_tile(x: Tensor, z: Tensor, out: Tensor | None = None) -> Tensor:
            if direct:
                return _by_differences(x, z).mul_(factor)
            tile = torch.matmul(x, z.mT, out=out)
            # Rounding may have changed the sign of a small distance.
            tile = tile.clamp_(max=0) if factor < 0 else tile.clamp_(min=0)
            if same:  # the last rows of z are those of x
                rows = x.shape[-2]
                _symmetrise(tile.narrow(-1, z.shape[-2] - rows, rows))
            return tile

        if torch.compiler.is_compiling() or n <= step:  # an exported graph serves any number of rows
            return compute_tile(left, right).to(dtype)
        D = X.new_empty(shape, dtype=dtype)
        for start in range(0, n, step):
            rows = min(step, n - start)
            columns = start + rows if same else m
            x = left.narrow(-2, start, rows)
            block = D.narrow(-2, start, rows)
            if not (same or direct) and dtype == X.dtype:
                compute_tile(x, right, out=block)
                continue
            tile = compute_tile(x, right.narrow(-2, 0, columns))
            if same:
                above_diagonal = D.narrow(-2, 0, start).narrow(-1, start, rows)
                above_diagonal.copy_(tile.narrow(-1, 0, start).mT)
            block.narrow(-1, 0, columns).copy_(tile)
        return D

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        X, Z, _, ctx.factor, _ = inputs
        ctx.save_for_backward(X, Z)

    @staticmethod
    def backward(ctx: Any, G: Tensor) -> tuple[Tensor | None, ...]:
        def bar(X: Tensor, Z: Tensor, G: Tensor, both: bool = False) -> Tensor:
            tiles = []
            step = _tile_rows(G.shape, X.device)
            for index, x in enumerate(X.split(step, dim=-2)):
                start = index * step
                rows = x.shape[-2]
                g = G.narrow(-2, start, rows)
                if both:
                    g = g + G.narrow(-1, start, rows).mT
                g = g.to(Z.dtype)  # one tile at a time: no float64 copy of all of a float32 G
                tiles.append(g.sum(-1, keepdim=True) * x - g @ Z)
            all_rows = tiles[0] if len(tiles) == 1 else torch.cat(tiles, dim=-2)
            return 2 * ctx.factor * all_rows

        X, Z = ctx.saved_tensors
        if Z is None:
            return bar(X, X, G, both=True), None, None, None, None
        X_bar = bar(X, Z, G) if ctx.needs_input_grad[0] else None
        Z_bar = bar(Z, X, G.mT) if ctx.needs_input_grad[1] else None
        return X_bar, Z_bar, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Tensor, int]:
        def batched(points: Tensor, axis: int | None) -> Tensor:
            if axis is None:
                return points.expand(info.batch_size, *points.shape)
            return points.movedim(axis, 0)

        X, Z, *others = inputs
        right = None if Z is None else batched(Z, in_dims[1])
        return apply(_SquaredDistance, batched(X, in_dims[0]), right, *others), 0


class _MaternOfSquare(Function):
    """k_0 = e^-a, k_1 = (1 + a) e^-a or k_2 = (1 + a + a^2/3) e^-a as a function of A = a^2.

    k_2' = -k_1 / 6, k_1' = -k_0 / 2 and k_0' = -k_0 / (2 a), taken as 0 at a = 0: no derivative divides by a
    distance of zero, and where a derivative exists for equal rows, it is correct.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(A: Tensor, order: int) -> Tensor:
        a = A.sqrt()
        if order == 0:
            return a.neg_().exp_()
        decay = a.neg().exp_()
        if order == 2:
            a.add_(A, alpha=1 / 3)
        return a.add_(1).mul_(decay)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        A, ctx.order = inputs
        ctx.save_for_backward(A)

    @staticmethod
    def backward(ctx: Any, G: Tensor) -> tuple[Tensor, None]:
        (A,) = ctx.saved_tensors
        order = ctx.order
        lower_order = apply(_MaternOfSquare, A, max(0, order - 1))
        if order == 0:
            lower_order = lower_order * torch.where(A > 0, A, torch.inf).rsqrt()
        factor = -1 / 6 if order == 2 else -1 / 2
        return G * lower_order * factor, None


def squared_distance(
    X: Tensor,
    Z: Tensor | None,
    *,
    direct: bool,
    factor: float,
    dtype: torch.dtype,
) -> Tensor:
    """factor |x_i - z_j|^2, (..., n, m) of a dtype, for float64 points; see `_SquaredDistance`."""
    return apply(_SquaredDistance, X, Z, direct, factor, dtype)


def matern_of_square(A: Tensor, order: int) -> Tensor:
    """The Matern function of order 0, 1 or 2 of the scaled squared distance A; see `_MaternOfSquare`."""
    return apply(_MaternOfSquare, A, order)
