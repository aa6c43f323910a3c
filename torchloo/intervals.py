"""Prediction intervals in closed form: jackknife+, jackknife-minmax and CV+.

Note [intervals]
Let f_{-i} be the machine trained without row i, or without its cluster, and R_i = |y_i - f_{-i}(x_i)| its
held-out error there. With k = ceil(level (n + 1)), the ends are

    jackknife+, CV+      (n+1-k)-th smallest of f_{-i}(x) - R_i,   k-th smallest of f_{-i}(x) + R_i
    jackknife-minmax     min_i f_{-i}(x) - k-th smallest R_i,      max_i f_{-i}(x) + k-th smallest R_i

and infinite if k > n: there are too few rows for the level. For exchangeable rows, jackknife+ and CV+ cover
a new target with probability at least 2 level - 1, and usually `level`; jackknife-minmax with at least
`level`. That is an average over training sets and new rows: within a group of rows it may be less, unless the
order statistics are taken among the training rows of that group (Mondrian). All f_{-i}(x) come from one
factorisation, by Note [weights at a new point].

Reference: Barber, Candes, Ramdas and Tibshirani (2021), "Predictive inference with the jackknife+", Annals of
Statistics 49, sections 1 and 2; Vovk, Gammerman and Shafer (2005), section 4.5, for groups.
"""

import math
import numbers
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchloo import csr
from torchloo.classes import is_label
from torchloo.clusters import folds
from torchloo.guards import host_labels
from torchloo.machine import LeastSquares
from torchloo.smoothers import Fit

__all__ = ["cv_plus", "jackknife_minmax", "jackknife_plus"]

_ENTRIES = 1 << 22  # outputs of held-out machines that are computed at once
_FOLDS = 10

Intervals = tuple[Tensor, Tensor]
"""Lower and upper ends."""

_Ends = Callable[[Tensor, Tensor, int], Intervals]
"""Ends (..., q, c) from f_{-i}(x) (..., q, c, n), R (..., 1, c, n) and k."""


def jackknife_plus(
    machine: Any,
    X: Tensor,
    y: Tensor,
    X_new: Tensor,
    level: float = 0.9,
    clusters: object | None = None,
    *,
    weight: Tensor | None = None,
    groups: object | None = None,
    groups_new: object | None = None,
) -> tuple[Tensor, Tensor]:
    """Jackknife+ prediction intervals at new inputs: Note [intervals], without a refit.

    Args:
        machine: a least-squares machine; its hyper-parameters are kept fixed.
        X: rows (..., n, d), y: targets (..., n) or (..., n, c), X_new: new inputs (..., q, d).
        level: target coverage, above 0 and below 1.
        clusters: integer labels (n,) of rows that are left out together; None for single rows. With clusters,
            new rows are assumed to belong to new clusters.
        weight: training weights of the rows, (..., n).
        groups, groups_new: integer labels (n,) and (q,), on the host, for Mondrian intervals: the interval of
            a new row uses the errors of its own group only, so that each group is covered at the level.

    Returns:
        lower and upper ends, (..., q) or (..., q, c); infinite where there are too few rows for the level.

    Not differentiable. Cost: a solution and its leave-one-out, n^2 q in the dual form (n p q in the primal
    one), and n q c for the order statistics; memory that of `solve`, and blocks of some 2^22 numbers.

    >>> x = torch.linspace(0, 6, 40, dtype=torch.float64).unsqueeze(-1)
    >>> import torchloo as tl
    >>> lower, upper = jackknife_plus(tl.LSSVM(tl.kernels.RBF(), 0.1), x, x[:, 0].sin(), x[:3] + 0.05)
    >>> bool((lower < upper).all())
    True
    """
    held_out = _HeldOutMachines("jackknife_plus", machine, X, y, X_new, level, clusters, weight)
    return held_out.intervals(_plus, groups, groups_new)


def jackknife_minmax(
    machine: Any,
    X: Tensor,
    y: Tensor,
    X_new: Tensor,
    level: float = 0.9,
    clusters: object | None = None,
    *,
    weight: Tensor | None = None,
    groups: object | None = None,
    groups_new: object | None = None,
) -> tuple[Tensor, Tensor]:
    """Jackknife-minmax prediction intervals: wider than `jackknife_plus`, with the stronger guarantee.

    Note [intervals]; arguments and results as in `jackknife_plus`.
    """
    held_out = _HeldOutMachines("jackknife_minmax", machine, X, y, X_new, level, clusters, weight)
    return held_out.intervals(_minmax, groups, groups_new)


def cv_plus(
    machine: Any,
    X: Tensor,
    y: Tensor,
    X_new: Tensor,
    level: float = 0.9,
    clusters: object | None = None,
    *,
    weight: Tensor | None = None,
    groups: object | None = None,
    groups_new: object | None = None,
) -> tuple[Tensor, Tensor]:
    """CV+ intervals, from the machines trained without a fold: Note [intervals].

    Arguments and results as in `jackknife_plus`, which is as fast and uses machines trained on more rows;
    clusters=None uses 10 random folds (from torch's global generator); for other folds use
    ``clusters=tl.folds(n, k, generator)``.
    """
    if clusters is None:
        _check("cv_plus", machine, X, y, level)
        event = machine.kernel.event_dim
        n = X.shape[-1 - event] if X.ndim > event else 2
        clusters = folds(n, min(_FOLDS, n)) if n > 1 else None  # solve raises the error
    held_out = _HeldOutMachines("cv_plus", machine, X, y, X_new, level, clusters, weight)
    return held_out.intervals(_plus, groups, groups_new)


def _plus(outputs: Tensor, R: Tensor, k: int) -> Intervals:
    n = outputs.shape[-1]
    lower = (outputs - R).kthvalue(n + 1 - k).values
    upper = (outputs + R).kthvalue(k).values
    return lower, upper


def _minmax(outputs: Tensor, R: Tensor, k: int) -> Intervals:
    error = R.kthvalue(k).values  # (..., 1, c)
    return outputs.amin(-1) - error, outputs.amax(-1) + error


class _HeldOutMachines:
    """The machines trained without each row, or its cluster: outputs at new inputs, and held-out errors."""

    @torch.no_grad()
    def __init__(
        self,
        function: str,
        machine: Any,
        X: Tensor,
        y: Tensor,
        X_new: Tensor,
        level: float,
        clusters: object | None,
        weight: Tensor | None,
    ) -> None:
        _check(function, machine, X, y, level)
        self.row_axis = -1 - machine.kernel.event_dim
        if X_new.ndim < -self.row_axis:
            raise ValueError(
                f"{function}: X_new must be rows (..., q, d) as X is, got shape {tuple(X_new.shape)}"
            )
        self.function = function
        self.X_new = X_new
        self.level = level
        self.fit: Fit = machine.solve(X, y, weight)
        held_out = self.fit.held_out(clusters, flat=False)
        self.Y = held_out.targets  # (..., n, c)
        self.r = held_out.residuals.mT  # (..., c, n)
        self.n = self.r.shape[-1]
        self.members = None
        if held_out.clusters is not None:
            _, members = held_out.clusters.unique(return_inverse=True)
            self.members = members.to(self.r.device)  # (n,)

    @torch.no_grad()
    def intervals(self, ends: _Ends, groups: object | None, groups_new: object | None) -> Intervals:
        """Prediction intervals at all new inputs, in blocks."""
        q = self.X_new.shape[self.row_axis]
        device = self.r.device
        rows_at_once = max(1, _ENTRIES // self.r.numel())
        lowers, uppers, order = [], [], []
        for train, new in _groups(self.function, groups, groups_new, self.n, q):
            for rows in new.to(device).split(rows_at_once):
                outputs, errors = self._outputs(self._new_rows(rows), train.to(device))
                lower, upper = self._ends(ends, outputs, errors)
                lowers.append(lower)
                uppers.append(upper)
                order.append(rows)
        original = torch.cat(order).argsort()
        lower = torch.cat(lowers, -2).index_select(-2, original)
        upper = torch.cat(uppers, -2).index_select(-2, original)
        return self.fit.shaped(lower), self.fit.shaped(upper)

    def _new_rows(self, rows: Tensor) -> Tensor:
        if csr.is_csr(self.X_new):
            return csr.select(self.X_new, rows)
        return self.X_new.index_select(self.row_axis, rows)

    def _outputs(self, X_new: Tensor, train: Tensor) -> tuple[Tensor, Tensor]:
        """f_{-i}(x), (..., b, c, n'), and R, (..., 1, c, n'), for the training rows i in `train` (n',)."""
        w = self.fit.weights_at(X_new)  # (..., b, n)
        change = w.unsqueeze(-2) * self.r.unsqueeze(-3)  # (..., b, c, n)
        if self.members is not None:
            clusters = int(self.members.max()) + 1
            sums = change.new_zeros((*change.shape[:-1], clusters))
            sums.index_add_(-1, self.members, change)
            change = sums.index_select(-1, self.members)
        outputs = (w @ self.Y).unsqueeze(-1) - change
        errors = self.r.abs().unsqueeze(-3)
        if len(train) == self.n:
            return outputs, errors
        return outputs.index_select(-1, train), errors.index_select(-1, train)

    def _ends(self, ends: _Ends, outputs: Tensor, errors: Tensor) -> Intervals:
        """Ends (..., b, c), infinite if there are too few training rows for the level."""
        n = outputs.shape[-1]
        k = _rank(self.level, n)
        if k <= n:
            return ends(outputs, errors, k)
        infinite = outputs.new_full(outputs.shape[:-1], torch.inf)
        return -infinite, infinite


def _check(function: str, machine: Any, X: object, y: object, level: object) -> None:
    if not isinstance(machine, LeastSquares):
        raise TypeError(f"{function}: machine must be a least-squares machine, got {type(machine).__name__}")
    if not isinstance(X, Tensor):
        raise TypeError(
            f"{function}: X must be a tensor, as all rows are needed at once, got {type(X).__name__}"
        )
    if is_label(y):
        raise TypeError(
            f"{function}: y must be numbers, got class labels; for integer targets use y.double() (or "
            ".float(), like X)"
        )
    if not isinstance(level, numbers.Real) or not 0 < float(level) < 1:
        raise ValueError(f"{function}: level must be above 0 and below 1, e.g. 0.9, got {level!r}")


def _rank(level: float, n: int) -> int:
    """k of Note [intervals]."""
    return math.ceil(round(level * (n + 1), 9))  # 0.7 * 10 is 7 despite the rounding of 0.7


def _groups(
    function: str,
    groups: object | None,
    groups_new: object | None,
    n: int,
    q: int,
) -> Iterator[tuple[Tensor, Tensor]]:
    """The training rows and the new rows of every group of new rows; without groups, all of them."""
    if (groups is None) != (groups_new is None):
        raise ValueError(f"{function}: groups and groups_new must be given together, got only one of them")
    if groups is None:
        yield torch.arange(n, device="cpu"), torch.arange(q, device="cpu")
        return
    labels = host_labels(function, groups, n, "groups")
    labels_new = host_labels(function, groups_new, q, "groups_new")
    for group in np.unique(labels_new):
        train = np.flatnonzero(labels == group)
        new = np.flatnonzero(labels_new == group)
        yield torch.from_numpy(train), torch.from_numpy(new)
