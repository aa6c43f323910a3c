"""The records that a row goes through on its way from `svm_loo` to an `SVMHeldOut`, in this order.

Each holds a stack of machines of one size: the problems, merged and scaled; their exact full machines; the
ends of the paths of single rows; and the outcome for each row. `Targets` says what paths are to lower.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from torchloo.svm.stacked import Tables, block_of, rows_of, take_rows, times_vector
from torchloo.svm.tolerances import CLOSE, EXACT

if TYPE_CHECKING:
    from torchloo.svm.gradient import Deferred
    from torchloo.svm.solve.systems import Bordered

__all__ = ["Exact", "RowOutcome", "SVMProblem", "Solved", "Targets", "Unlearned", "duality_gap", "gap_terms"]


class SVMProblem(NamedTuple):
    """B SVMs of m variables each, whose rows are all different.

    Scaled to kernels with mean diagonal 1, or to boxes of 1 if less.

    Dividing K by a number and multiplying the boxes by it leaves every decision value as it is, and
    lets absolute tolerances mean something.
    """

    K: Tensor
    """Kernel matrices of the m variables, divided by `scale`, (B, m, m), or (G, m, m) if some share one."""

    y: Tensor
    """Labels, (B, m)."""

    box: Tensor
    """Upper bounds: the sum of C over the rows of a variable, times `scale`, (B, m)."""

    row_box: Tensor
    """C of each row times `scale`, (B, n)."""

    variable: Tensor
    """Which variable each row belongs to, (B, n)."""

    scale: Tensor
    """What the kernel matrices that came in were divided by, (B,)."""

    rounding: Tensor
    """e of Note [rounding of K], of K as it is here, (B, m)."""

    kernel: Tensor | None = None
    """Which of G kernel matrices each problem has, ascending, (B,); None: each its own."""

    def take(self, rows: Tensor | slice) -> "SVMProblem":
        """The problems at `rows`, which ascend if some share a kernel matrix."""
        others = [take_rows(x, rows) for x in self[1:-1]]
        if self.kernel is None:
            return SVMProblem._make([take_rows(self.K, rows), *others, None])
        return SVMProblem._make([self.K, *others, self.kernel[rows]])

    def matrices(self) -> Tensor:
        """The kernel matrix of each problem, (B, m, m)."""
        return self.K if self.kernel is None else self.K[self.kernel]

    def kernels(self, table: Tensor) -> Tables:
        """Which kernel matrix each solution of the problems `table` (N,), in ascending order, has."""
        return Tables(table if self.kernel is None else self.kernel[table], len(self.K))

    def diagonal(self) -> Tensor:
        """The diagonals of the kernel matrices, (B, m)."""
        k = self.K.diagonal(dim1=1, dim2=2)
        return k if self.kernel is None else k[self.kernel]

    def product(self, a: Tensor) -> Tensor:
        """K a of each problem, (B, m)."""
        if self.kernel is None:
            return times_vector(self.K, a)
        return Tables(self.kernel, len(self.K)).product(a, self.K)

    def rows(self, S: Tensor) -> Tensor:
        """Rows S (B, s) of each K, (B, s, m)."""
        return rows_of(self.K, S, self.kernel)

    def block(self, S: Tensor, T: Tensor | None = None) -> Tensor:
        """Rows S (B, s) and columns T (B, t), or S again, of each K, (B, s, t)."""
        return block_of(self.K, S, T, self.kernel)


class Exact(NamedTuple):
    """Optimal solutions of B machines and their active sets; free sets are never empty and always regular."""

    alpha: Tensor
    """Coefficients, (B, m)."""

    bias: Tensor
    """Offsets, (B,)."""

    margin: Tensor
    """y f - 1, (B, m)."""

    free: Tensor
    """Masks of the free sets S, (B, m)."""

    upper: Tensor
    """Masks of the variables at their upper bounds, (B, m)."""

    slip: Tensor
    """How far a coefficient or a margin lies past its bound at most, (B,)."""

    system: "Bordered | None" = None
    """The equations of the free sets, in the order of the variables, where they are at hand and regular."""

    @property
    def optimal(self) -> Tensor:
        """Whether every condition holds to rounding, (B,)."""
        return self.slip <= EXACT

    @property
    def close(self) -> Tensor:
        """Whether every condition nearly holds: all that can be had where margins hardly differ, (B,)."""
        return self.slip <= CLOSE

    def take(self, rows: Tensor | slice) -> "Exact":
        """The machines at `rows`."""
        return Exact._make([*(take_rows(x, rows) for x in self[:-1]), None])

    def replaced(self, rows: Tensor, by: "Exact") -> "Exact":
        """With other solutions of the machines at `rows`."""
        pairs = zip(self[:-1], by[:-1], strict=True)
        return Exact._make([*(old.index_copy(0, rows, new) for old, new in pairs), None])

    def where(self, mask: Tensor, other: "Exact") -> "Exact":
        """These where the mask (B,) is true, else the others."""
        masks = {1: mask, 2: mask[:, None]}
        pairs = zip(self[:-1], other[:-1], strict=True)
        return Exact._make([*(torch.where(masks[x.ndim], x, z) for x, z in pairs), None])


Solved = tuple[Tensor, SVMProblem, Exact]
"""Which problems of a batch are solved here, (B,), merged, and their solutions."""


def gap_terms(alpha: Tensor, margin: Tensor, box: Tensor) -> Tensor:
    """What each variable adds to the duality gap, for margins y f - 1 and 0 <= alpha <= box; (..., m).

    alpha max(margin, 0) + (box - alpha) max(-margin, 0): nothing is negative, so that nothing cancels.
    """
    return (alpha * margin.clamp_min(0)).addcmul_(alpha - box, margin.clamp_max(0))


def duality_gap(alpha: Tensor, margin: Tensor, box: Tensor) -> Tensor:
    """Primal minus dual objective, but for an imbalance of y^T alpha; (...)."""
    return gap_terms(alpha, margin, box).sum(-1)


class Targets(NamedTuple):
    """What is to go from T machines."""

    table: Tensor
    """Numbers of the machines, ascending, (N,)."""

    variable: Tensor
    """Variables, each to be lowered alone, (N,)."""

    kept: Tensor
    """What is left of their boxes: alpha is lowered to it, (N,)."""

    def take(self, rows: Tensor | slice) -> "Targets":
        """Those at `rows`."""
        return Targets(*(take_rows(x, rows) for x in self))

    def room(self, full: Exact) -> Tensor:
        """How far alpha of each has to go, (N,)."""
        return full.alpha[self.table, self.variable] - self.kept

    def boxes(self, problem: SVMProblem) -> Tensor:
        """The boxes of each machine without what goes, (N, m)."""
        return problem.box[self.table].scatter(1, self.variable[:, None], self.kept[:, None])


class Unlearned(NamedTuple):
    """Where the paths of N variables ended."""

    output: Tensor
    """f(x_r) at the end, (N,)."""

    proved: Tensor
    """Its sign is certified, and the value exact if the path came to its end, (N,) bool."""

    solved: Tensor
    """Proved, or at the end of its path and exact: a refit would find nothing else, (N,) bool."""

    events: Tensor
    """Number of events, (N,)."""

    alpha: Tensor
    """Coefficients at the end if they are asked for, (N, m), else (N, 0)."""

    @classmethod
    def unsolved(cls, like: Tensor, variables: int) -> "Unlearned":
        """Nothing is known of N variables; `like` is (N,)."""
        nothing, never = torch.zeros_like(like), torch.zeros_like(like, dtype=torch.bool)
        return cls(nothing, never, never, never.long(), like.new_zeros(len(like), variables))

    def replaced(self, rows: Tensor, by: "Unlearned") -> "Unlearned":
        """With other ends of the variables at `rows`."""
        return Unlearned(*(old.index_copy(0, rows, new) for old, new in zip(self, by, strict=True)))


class RowOutcome(NamedTuple):
    """Outcome for each of the n rows of B problems, (B, n)."""

    outputs: Tensor
    certified: Tensor
    resolved_by: Tensor
    iterations: Tensor
    columns: Tensor
    newton: Tensor
    machines: "list[Deferred] | None"
    """The held-out machines of each problem for the backward; None if not asked for."""

    @classmethod
    def of(cls, fields: list[Tensor], machines: "list[Deferred] | None") -> "RowOutcome":
        """From all but the machines, in order."""
        outputs, certified, by, iterations, columns, newton = fields
        return cls(outputs, certified, by, iterations, columns, newton, machines)
