"""Rows in torch's sparse CSR layout: inner products, lengths and selections; not differentiable in them."""

import torch
from torch import Tensor

__all__ = ["dense", "inner", "is_csr", "require_layout", "select", "square_length", "take"]

_TILE = 256  # rows made dense at once
# Above this fraction of stored entries, products of dense matrices are faster than those of sparse rows.
_DENSE = 1 / 8


def is_csr(X: Tensor | None) -> bool:
    """Whether X is given and holds sparse rows."""
    return X is not None and X.layout == torch.sparse_csr


def require_layout(function: str, name: str, X: Tensor) -> None:
    """Raise unless X is dense, or CSR rows (n, d) that require no gradient."""
    if X.layout == torch.strided:
        return
    if X.layout != torch.sparse_csr:
        raise TypeError(
            f"{function}: {name} must be dense or of layout torch.sparse_csr, got {X.layout}; "
            f"convert it, e.g. {name}.to_sparse_csr()"
        )
    if X.ndim != 2:
        raise ValueError(f"{function}: {name} of sparse rows must be (n, d), got shape {tuple(X.shape)}")
    if X.requires_grad:
        raise ValueError(
            f"{function}: {name} of sparse rows must not require a gradient, got one that does; "
            f"detach it, or make it dense by {name}.to_dense()"
        )


def dense(X: Tensor) -> Tensor:
    """X, its sparse rows made dense."""
    return X.to_dense() if is_csr(X) else X


def _entries(X: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Places of the entries of some rows, row after row, and how many each row has."""
    crow = X.crow_indices()
    start = crow[rows]
    counts = crow.diff()[rows]
    ends = counts.cumsum(0)
    shift = torch.repeat_interleave(start - (ends - counts), counts)
    return torch.arange(len(shift), device=X.device) + shift, counts


def _lines(counts: Tensor) -> Tensor:
    """The row number of every entry, given the number of entries of each row (n,)."""
    numbers = torch.arange(len(counts), device=counts.device)
    return torch.repeat_interleave(numbers, counts)


def take(X: Tensor, rows: Tensor, event_dim: int = 1) -> Tensor:
    """The given rows (..., m) of dense X (..., n, *event), or of sparse rows (n, d); the result is dense."""
    if event_dim > 1:
        return take(X.flatten(-event_dim), rows).unflatten(-1, X.shape[-event_dim:])
    if not is_csr(X):
        batched = X.expand(*rows.shape[:-1], *X.shape[-2:])
        return batched.take_along_dim(rows.unsqueeze(-1), -2)
    places, counts = _entries(X, rows.flatten())
    D = X.values().new_zeros(rows.numel(), X.shape[-1])
    columns = X.col_indices()[places]
    D[_lines(counts), columns] = X.values()[places]
    return D.unflatten(0, rows.shape)


def select(X: Tensor, rows: Tensor) -> Tensor:
    """The given rows (m,) of sparse rows X (n, d), sparse (m, d)."""
    places, counts = _entries(X, rows)
    crow = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    return _matrix(X, crow, X.col_indices()[places], X.values()[places])


def _matrix(X: Tensor, crow: Tensor, columns: Tensor, values: Tensor) -> Tensor:
    size = (len(crow) - 1, X.shape[-1])
    crow = crow.to(columns.dtype)
    device = values.device
    return torch.sparse_csr_tensor(crow, columns, values, size, device=device, check_invariants=False)


def square_length(X: Tensor) -> Tensor:
    """|x_i|^2, (..., n), for dense or sparse rows."""
    if not is_csr(X):
        return X.square().sum(-1)
    squares = X.values().square()
    line = _lines(X.crow_indices().diff())
    return squares.new_zeros(len(X)).index_add_(0, line, squares)


def inner(X: Tensor, Z: Tensor | None) -> Tensor:
    """x_i . z_j, dense (..., n, m), where X or Z or both are sparse rows; exactly symmetric if Z is None.

    Tiles of Z are made dense and multiplied by the sparse rows of X; if more than an eighth of the entries
    is stored, all rows are made dense, which is then faster. Memory: the result and a tile.
    """
    if Z is not None and not is_csr(X):
        return inner(Z, X).mT
    if Z is not None and Z.ndim > 2:  # a batch of dense points
        products = inner(X, Z.flatten(0, -2))
        by_batch = products.unflatten(-1, Z.shape[:-1])  # (n, ..., m)
        return by_batch.movedim(0, -2)
    nearly_dense = X.values().numel() > _DENSE * X.shape[0] * X.shape[1]
    if Z is None:
        return _gram(X.to_dense() if nearly_dense else X)
    with_graph = Z.requires_grad and torch.is_grad_enabled()
    if nearly_dense or with_graph:
        return X.to_dense() @ dense(Z).mT
    return _tiled(X, Z)


def _tiled(X: Tensor, Z: Tensor) -> Tensor:
    K = X.values().new_empty(X.shape[0], Z.shape[0])
    for start in range(0, Z.shape[0], _TILE):
        K[:, start : start + _TILE] = X @ _rows(Z, start).mT.contiguous()
    return K


def _rows(X: Tensor, start: int) -> Tensor:
    """A tile of rows from the start on, dense."""
    stop = min(start + _TILE, X.shape[0])
    if not is_csr(X):
        return X[start:stop]
    return take(X, torch.arange(start, stop, device=X.device))


def _gram(X: Tensor) -> Tensor:
    """X X^T by its lower triangle, tile after tile."""
    n = X.shape[0]
    K = (X.values() if is_csr(X) else X).new_empty(n, n)
    for start in range(0, n, _TILE):
        tile = _rows(X, start)
        below = _below(X, start) @ tile.mT.contiguous()  # (n - start, t)
        corner = below[: len(tile)]
        corner.copy_(0.5 * (corner + corner.mT))
        K[start:, start : start + len(tile)] = below
        K[start : start + len(tile), start:] = below.mT
    return K


def _below(X: Tensor, start: int) -> Tensor:
    if not is_csr(X):
        return X[start:]
    crow = X.crow_indices()[start:]
    first = int(crow[0])
    return _matrix(X, crow - first, X.col_indices()[first:], X.values()[first:])
