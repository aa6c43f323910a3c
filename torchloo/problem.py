"""Targets, weights and regularisation of a least-squares problem, checked and broadcast."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchloo.guards import Guard, broadcast_shapes, expanded, require_floating, values_visible

__all__ = ["Given", "Problem", "Regs", "check_dual", "check_features", "check_rows"]


class Given(NamedTuple):
    """A matrix of the caller that is too large to be copied, and must not change until later computations."""

    matrix: Tensor
    version: int | None
    """The number of changes in place before; None if torch does not count them."""

    @classmethod
    def of(cls, matrix: Tensor) -> "Given":
        """The matrix as it is now."""
        counted = values_visible(matrix) and not matrix.is_inference()
        return cls(matrix, matrix._version if counted else None)

    @property
    def has_changed(self) -> bool:
        """Whether the matrix was changed in place."""
        return self.version is not None and self.matrix._version != self.version

    def __reduce__(self) -> tuple[Any, ...]:
        """Changes of a copy, which is deep, are counted anew."""
        return (Given, (self.matrix, -1)) if self.has_changed else (Given.of, (self.matrix,))

    def require_unchanged(self, function: str) -> None:
        """Raise if the matrix was changed in place."""
        if self.has_changed:
            raise RuntimeError(
                f"{function}: the inputs were changed in place after solve; solve again, or give it a copy"
            )


class Regs(NamedTuple):
    """Several regularisations of one problem: those of a path, or one for each output of a machine."""

    values: Tensor
    """(R,) or (R, c) of a path, (..., c) with one for each output."""
    path: bool
    """Whether results have the axis R, in front of all others."""

    def checked(self, guard: Guard, outputs: int, like: Tensor, batch: int = 0) -> Tensor:
        """The values as (R, ..., c'), c' = 1 or c, with `batch` axes between; R = 1 without a path.

        In the dtype and on the device of the tensor `like`.
        """
        regs = torch.as_tensor(self.values, dtype=like.dtype, device=like.device)
        own = regs.shape[-1:] == (outputs,)
        if not self.path and not (own and 0 not in regs.shape):
            raise ValueError(
                f"{guard.function}: reg must hold one number for each of the {outputs} outputs, "
                f"(..., {outputs}), got shape {tuple(regs.shape)}"
            )
        is_path = regs.ndim in (1, 2) and 0 not in regs.shape and (own or _shared(regs))
        if self.path and not is_path:
            raise ValueError(
                f"{guard.function}: regs must have shape (R,), or (R, {outputs}) with one for each output, "
                f"got {tuple(regs.shape)}"
            )
        guard.positive(**{"regs" if self.path else "reg": regs})
        if not self.path:
            regs = regs.unsqueeze(0)
        elif regs.ndim == 1:
            regs = regs.unsqueeze(-1)
        between = [1] * (batch + 2 - regs.ndim)
        return regs.reshape(len(regs), *between, *regs.shape[1:])

    @property
    def unit(self) -> Tensor | float:
        """1 in the batch shape of the regularisations; those of a path have none."""
        if self.path or not self.values.ndim:
            return 1.0
        return torch.ones_like(self.values[..., 0])


def _shared(regs: Tensor) -> bool:
    """Whether regularisations (R,) or (R, 1) are shared by all outputs."""
    return regs.ndim == 1 or regs.shape[1] == 1


@dataclass(frozen=True)
class Problem:
    """The data of a least-squares problem besides its matrix, with one batch shape."""

    Y: Tensor
    """Targets, (..., n, c)."""
    weight: Tensor
    """Row weights, (..., n); ones if none were given."""
    reg: Tensor
    """Regularisation, (...)."""
    guard: Guard
    """Checks of the values, not yet made, and the name of the function for errors."""
    given: "Given"
    """The matrix that the problem was solved from."""
    weighted: bool = True
    """False if no weights were given."""

    @property
    def function(self) -> str:
        """Name of the function for errors."""
        return self.guard.function

    @property
    def ridge(self) -> Tensor:
        """reg / weight, (..., n), which is added to the diagonal of K."""
        reg = self.reg.unsqueeze(-1) if self.reg.ndim else self.reg
        return reg / self.weight if self.weighted else reg.expand_as(self.weight)

    def expand(self, matrix: Tensor) -> Tensor:
        """A matrix with the batch shape of the problem."""
        return expanded(matrix, self.reg.shape + matrix.shape[-2:])


def _check_shapes(guard: Guard, name: str, matrix: Tensor, Y: Tensor, weight: Tensor | None) -> None:
    """Check dtypes, and the number of rows of targets and weights."""
    function = guard.function
    tensors = {}
    if not (guard.wide and matrix.dtype == torch.float64):
        tensors[name] = matrix
    tensors["Y"] = Y
    if weight is not None:
        tensors["weight"] = weight
    require_floating(function, **tensors)
    shape = tuple(matrix.shape)
    if matrix.ndim < 2 or 0 in shape:
        raise ValueError(f"{function}: {name} must be a matrix with at least one row, got shape {shape}")
    n = shape[-2]
    if Y.ndim < 2 or Y.shape[-2] != n or 0 in Y.shape:
        raise ValueError(f"{function}: Y must have {n} rows to match {name}, got shape {tuple(Y.shape)}")
    if weight is not None and (weight.ndim < 1 or weight.shape[-1] != n):
        raise ValueError(
            f"{function}: weight must have {n} entries to match {name}, got shape {tuple(weight.shape)}"
        )


def _check(
    guard: Guard, name: str, matrix: Tensor, Y: Tensor, reg: Tensor | float | Regs, weight: Tensor | None
) -> Problem:
    """Check shapes and dtypes against a matrix (..., n, m) and add the checks of values to the guard."""
    function = guard.function
    _check_shapes(guard, name, matrix, Y, weight)
    shape = tuple(matrix.shape)
    n, weighted = shape[-2], weight is not None
    reg = reg.unit if isinstance(reg, Regs) else reg
    weight = Y.new_ones(n) if weight is None else weight.clone()
    if isinstance(reg, Tensor):
        reg = reg.to(Y, copy=True)
    else:
        guard.positive(reg=reg)
        reg = torch.full((), reg, dtype=Y.dtype, device=Y.device)
    guard.positive(reg=reg)  # a number as well, which may be too small for the dtype
    if weighted:
        guard.positive(weight=weight)
    Y = Y.clone()  # what a Fit holds does not change with the tensors of the caller
    guard.finite(Y=Y)
    try:
        batch = broadcast_shapes(shape[:-2], Y.shape[:-2], weight.shape[:-1], reg.shape)
    except RuntimeError:
        raise ValueError(
            f"{function}: batch dimensions must broadcast, got {name} {shape}, Y {tuple(Y.shape)}, "
            f"weight {tuple(weight.shape)}, reg {tuple(reg.shape)}"
        ) from None
    if batch:
        Y = expanded(Y, batch + Y.shape[-2:])
        weight = expanded(weight, (*batch, n))
        reg = expanded(reg, batch)
    problem = Problem(Y, weight, reg, guard, Given.of(matrix), weighted)
    if weighted:
        with torch.no_grad():
            guard.finite(**{"reg / weight": problem.ridge})  # may overflow for tiny weights
    return problem


def check_dual(
    guard: Guard, K: Tensor, Y: Tensor, reg: Tensor | float | Regs, weight: Tensor | None
) -> Problem:
    """The problem of a kernel matrix K, which must be square and symmetric."""
    problem = _check(guard, "K", K, Y, reg, weight)
    if K.shape[-1] != K.shape[-2]:
        raise ValueError(f"{guard.function}: K must be square, (..., n, n), got shape {tuple(K.shape)}")
    guard.kernel_matrix(K=K)
    return problem


def check_features(
    guard: Guard, Z: Tensor, Y: Tensor, reg: Tensor | float | Regs, weight: Tensor | None
) -> Problem:
    """The problem of explicit features Z, (..., n, p)."""
    problem = _check(guard, "Z", Z, Y, reg, weight)
    problem.guard.finite(Z=Z)
    return problem


def check_rows(
    guard: Guard, X: Tensor, Y: Tensor, reg: Tensor | float | Regs, weight: Tensor | None
) -> Problem:
    """The problem of rows X, (..., n, d), whose values are checked elsewhere."""
    return _check(guard, "X", X, Y, reg, weight)
