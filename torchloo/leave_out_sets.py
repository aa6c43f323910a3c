"""Sets of rows that may overlap, left out one at a time, such as the neighbourhoods of all rows.

Note [overlapping sets]
Note [held-out residual] in smoothers.py needs of a set L only a_L and the block P_LL, so sets may share rows,
and only some rows of a set may be predicted. In the dual form all blocks are read from P itself, which is
computed once: n sets of s rows contain every row s times.

Sets are gathered by size and computed a few at a time, so that memory stays that of the problem itself; with
a graph, what is not kept is computed again in the backward.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from torchloo.blocks import Root, solve_blocks
from torchloo.clusters import by_size
from torchloo.guards import Guard, on_host, values_visible

__all__ = ["LeaveOutSets", "Parts", "leave_out_by_annihilator"]

Parts = tuple[Tensor, Tensor, Tensor]
"""Held-out residuals (..., m, c), variances (..., m, 1), and which rows (..., m) were refitted."""

# At least this many numbers are computed at once, however small a problem.
_TOGETHER = 1 << 22


class LeaveOutSets:
    """Pairs (rows to predict, rows to leave out), gathered by the number of rows left out.

    Attributes:
        groups: one index tensor (g, s) for each size s: the rows that g sets leave out.
        rows: the rows to predict, (m,), set after set.
        labels: host labels (m,), the number of the set; None where each predicts one row.
    """

    def __init__(self, function: str, pairs: Iterable[Any], n: int, device: torch.device) -> None:
        predicted, left = _flat(function, pairs)
        for rows in (predicted, left):
            _require_rows(function, rows, n)
        sizes = left.sizes
        if (sizes >= n).any():
            number = int((sizes >= n).argmax())
            raise ValueError(f"{function}: set {number} leaves out all {n} rows, so no training rows remain")
        # A row of a set is one number; sorted, those to predict are found among those to leave out.
        keys = left.number * n + left.rows
        order = keys.argsort()
        keys = keys[order]
        wanted = predicted.number * n + predicted.rows
        found = keys.searchsorted(wanted).clip(max=len(keys) - 1)
        missing = keys[found] != wanted
        if missing.any():
            k = missing.argmax()
            raise ValueError(
                f"{function}: a set must leave out the rows that it predicts, but set {predicted.number[k]} "
                f"predicts row {predicted.rows[k]} and does not leave it out"
            )
        groups, place = left.by_size()
        place = place[order[found]]
        self.groups = tuple(torch.from_numpy(rows).to(device) for rows in groups)
        self.rows = torch.from_numpy(predicted.rows).to(device)
        self.labels = None if len(self.rows) == len(sizes) else torch.from_numpy(predicted.number)
        self._place = np.sort(place)  # (m,), where the rows to predict are among all rows of all groups
        self._back = torch.from_numpy(place.argsort(kind="stable").argsort()).to(device)

    def leave_out(
        self, matrix: Tensor, width: int, one: Callable[..., Parts], *given: Tensor | None
    ) -> Parts:
        """The rows to predict, from the results of a function for sets (g, s) of one size, a few at a time.

        Args:
            matrix: (..., n, k); sets computed at once have no more numbers than it, or `_TOGETHER`.
            width: numbers needed for a row of a set, if the set has no more rows than that.
            one: one(rows, *given) -> held-out residuals (..., g, s, c), variances (..., g, s, 1) and which
                sets (..., g) were refitted. With a graph and many numbers, called again in the backward.
            given: tensors of the graph.
        """

        def predicted(rows: Tensor, wanted: Tensor, *given: Tensor | None) -> Parts:
            r, variance, refitted = one(rows, *given)
            marks = refitted[..., None, None].expand_as(variance)

            def of_wanted(values: Tensor) -> Tensor:
                return values.flatten(-3, -2).index_select(-2, wanted)

            return of_wanted(r), of_wanted(variance), of_wanted(marks)

        n, k = matrix.shape[-2:]
        problems = max(1, matrix.numel() // (n * k))
        limit = max(n * k, _TOGETHER // problems)
        sizes = [rows.numel() * max(width, rows.shape[1]) for rows in self.groups]
        chunks = self._chunks(limit, width)
        call: Callable[..., Parts] = predicted
        if sum(sizes) > limit and torch.is_grad_enabled() and values_visible(matrix):
            call = partial(checkpoint, predicted, use_reentrant=False, preserve_rng_state=False)
        parts = zip(*(call(*chunk, *given) for chunk in chunks), strict=True)
        r, variance, marks = (torch.cat(part, -2).index_select(-2, self._back) for part in parts)
        return r, variance, marks[..., 0]

    def _chunks(self, limit: int, width: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Sets (g, s) of up to `limit` numbers, and the positions of the rows to predict among theirs."""
        start = 0
        for group in self.groups:
            size = group.shape[1]
            sets_at_once = max(1, limit // (size * max(width, size)))
            for rows in group.split(sets_at_once):
                first, last = self._place.searchsorted([start, start + rows.numel()])
                wanted = torch.from_numpy(self._place[first:last] - start)
                yield rows, wanted.to(rows.device)
                start += rows.numel()


class _Rows:
    """Rows (l,), one set after another, and the number (l,) of the set of each."""

    def __init__(self, sets: list[np.ndarray]) -> None:
        self.sizes = np.array([len(rows) for rows in sets])
        self.rows = np.concatenate(sets).astype(np.int64)
        self.number = np.repeat(np.arange(len(sets)), self.sizes)

    def by_size(self) -> tuple[list[np.ndarray], np.ndarray]:
        """Rows (g, s) of the sets of each size, ascending, and the position of each row (l,) among them."""
        groups = []
        place = np.empty_like(self.rows)
        total = 0
        for index in by_size(self.sizes):
            groups.append(self.rows[index])
            place[index] = total + np.arange(index.size).reshape(index.shape)
            total += index.size
        return groups, place


def _flat(function: str, pairs: Iterable[Any]) -> tuple[_Rows, _Rows]:
    """The rows to predict and those to leave out, as integers, of all sets."""
    expected = "sets must be pairs (rows to predict, rows to leave out) of row numbers"
    try:
        sets = [[_integers(rows) for rows in (predicted, left)] for predicted, left in pairs]
    except (TypeError, ValueError) as fault:
        raise TypeError(f"{function}: {expected}: {fault}") from None
    if not sets:
        raise ValueError(f"{function}: {expected}, got none")
    predicted_rows, rows_left = zip(*sets, strict=True)
    return _Rows(list(predicted_rows)), _Rows(list(rows_left))


def _integers(rows: Any) -> np.ndarray:
    array = on_host(rows)
    if (array.size and array.dtype.kind not in "iu") or array.ndim > 1:
        raise TypeError(f"expected integers (s,), got {array.dtype} of shape {array.shape}")
    return array.reshape(-1)


def _require_rows(function: str, sets: _Rows, n: int) -> None:
    """Raise unless every set has rows, from 0 to n - 1, each once."""
    if not sets.sizes.all():
        empty = int((sets.sizes == 0).argmax())
        raise ValueError(f"{function}: set {empty} must name a row, got none")
    outside = (sets.rows < 0) | (sets.rows >= n)
    if outside.any():
        k = outside.argmax()
        raise ValueError(
            f"{function}: rows must be from 0 to {n - 1}, got {sets.rows[k]} in set {sets.number[k]}"
        )
    keys = np.sort(sets.number * n + sets.rows)
    twice = keys[1:] == keys[:-1]
    if twice.any():
        number, row = divmod(int(keys[1:][twice][0]), n)
        raise ValueError(f"{function}: a set must name each row once, but set {number} repeats row {row}")


def leave_out_by_annihilator(
    sets: LeaveOutSets,
    P: Tensor,
    a: Tensor,
    root: Callable[[], tuple[Tensor, Tensor]],
    guard: Guard,
) -> Parts:
    """Held-out rows from P = T^T T (..., n, n), a = P Y (..., n, c) and (T, T Y); Note [overlapping sets].

    Differentiable in P and a, to every order. Cost s^3 + n s for a set of s rows; memory 10 n^2 numbers.
    """

    def one(rows: Tensor, P: Tensor, a: Tensor) -> Parts:
        blocks = P[..., rows.unsqueeze(-1), rows.unsqueeze(-2)]  # (..., g, s, s)
        a_L = a[..., rows, :]
        root_of_rows = Root(root, (rows,))
        (r,), (variance,) = solve_blocks([a_L], [blocks], guard, root_of_rows)
        return r, variance, torch.zeros_like(variance[..., 0, 0], dtype=torch.bool)

    return sets.leave_out(P, 1, one, P, a)
