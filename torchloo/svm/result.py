"""SVMHeldOut: held-out predictions of an SVM, and which of them are proved."""

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["RESOLVED_BY", "SVMHeldOut", "rounded"]

RESOLVED_BY = (
    "check 1: not a support vector",
    "check 2: the full machine errs",
    "check 3: Joachims",
    "E2: norm of the change",
    "exact path",
    "refit",
    "dual bound",
    "gap ball",
    "epsilon-KKT",
    "one class left",
    "not solved: out of rounds",
    "not asked for",
)
UNUSED, ERRS, JOACHIMS, NORM, PATH, REFIT, BOUND, BALL, KKT, ONE_CLASS, CUT, UNASKED = range(len(RESOLVED_BY))


def rounded(outputs: Tensor, dtype: torch.dtype) -> Tensor:
    """Decision values in a dtype; what is too small for it keeps its sign, as 0 predicts +1."""
    if outputs.dtype == dtype:
        return outputs
    inside = outputs.to(dtype)
    return torch.where((inside == 0) & (outputs < 0), -torch.finfo(dtype).tiny, inside)


class SVMHeldOut(NamedTuple):
    """Held-out outputs of an SVM at its own training points; the first seven fields are HeldOut's.

    Labels with an output axis, (..., n, c), give it to every field but weight, clusters and refitted.
    """

    outputs: Tensor
    """Decision value at row i of the machine that never saw it; labels where values=False, (..., n).

    NaN for rows that were not asked for; `errors`, `certified` and `unstable` are then all false.
    """

    residuals: Tensor
    """targets - outputs, (..., n)."""

    targets: Tensor
    """Labels, (..., n)."""

    weight: Tensor
    """Weights of the rows, (..., n): row i has the box [0, C weight_i]."""

    clusters: Tensor | None
    """Labels (n,) on the host of what was left out together; None: every row alone."""

    variance: Tensor
    """NaN: an SVM has no predictive variance, (..., n)."""

    refitted: Tensor
    """Rows (or clusters) for which a machine was solved anew, (..., n) bool."""

    errors: Tensor
    """Wrong held-out predictions, (..., n) bool; f = 0 predicts +1."""

    certified: Tensor
    """The prediction is proved right, by a check, the bound, the gap ball or the active set, (..., n) bool.

    For every kernel matrix within rounding of K, Note [rounding of K] in certify.py.
    """

    resolved_by: Tensor
    """Index into RESOLVED_BY, (..., n). Check 1 also settles a row whose copies can hold its coefficient."""

    unstable: Tensor
    """Not certified: rounding (method smo: epsilon) may have changed the sign, (..., n) bool."""

    iterations: Tensor
    """Events of the path, and pairs of the SMO where there was one, (..., n)."""

    kernel_columns: Tensor
    """Kernel columns read by the SMO; 0 for the path and its refits, (..., n)."""

    newton_steps: Tensor
    """Newton steps on the free set that the SMO took beside its pairs, (..., n)."""

    values: bool
    """True where outputs are decision values, False where they are only labels."""

    @property
    def proved_early(self) -> Tensor:
        """Prec of BOUND: of the points that method "smo" solves, the share proved before epsilon-KKT, (...).

        NaN where the checks have settled all points.
        """
        proved = (self.resolved_by == BOUND) | (self.resolved_by == BALL)
        solved = proved | (self.resolved_by == KKT) | (self.resolved_by == CUT)
        return proved.sum(-1) / solved.sum(-1)

    @classmethod
    def build(
        cls,
        y: Tensor,
        weight: Tensor,
        outputs: Tensor,
        certified: Tensor,
        resolved_by: Tensor,
        iterations: Tensor,
        columns: Tensor,
        newton: Tensor,
        clusters: Tensor | None = None,
        values: bool = True,
    ) -> "SVMHeldOut":
        """The fields that follow from the others filled in; all (..., n), or but for weight (..., n, c)."""
        anew, asked = resolved_by == REFIT, resolved_by != UNASKED
        return cls(
            outputs=outputs,
            residuals=y - outputs,
            targets=y.clone(),  # the caller may change the labels and weights later
            weight=weight.clone(),
            clusters=clusters,
            variance=torch.full_like(outputs, torch.nan),
            refitted=anew.any(-1) if y.ndim > weight.ndim else anew,
            errors=((outputs >= 0) != (y > 0)) & asked,
            certified=certified,
            resolved_by=resolved_by,
            unstable=~certified & asked,
            iterations=iterations,
            kernel_columns=columns,
            newton_steps=newton,
            values=values,
        )

    def with_outputs(self, flat: bool, dtype: torch.dtype) -> "SVMHeldOut":
        """The last batch axis c as the output axis, which goes away where `flat` is set; in a dtype."""
        found = (self.outputs, self.certified, self.resolved_by, self.iterations, self.kernel_columns)
        y, outputs, certified, resolved_by, iterations, columns, newton = (
            field[..., 0, :] if flat else field.mT  # (..., c, n) -> (..., n, c)
            for field in (self.targets, *found, self.newton_steps)
        )
        return SVMHeldOut.build(
            y.to(dtype),
            self.weight[..., 0, :].to(dtype),
            rounded(outputs, dtype),
            certified,
            resolved_by,
            iterations,
            columns,
            newton,
            self.clusters,
            self.values,
        )

    def __str__(self) -> str:
        n = self.errors.numel()
        each = (
            f" by each of {self.outputs.shape[-1]} machines" if self.outputs.ndim > self.weight.ndim else ""
        )
        lines = [
            f"SVM held out: {self.weight.numel()} points{each}, {int(self.errors.sum())} errors, "
            f"{int(self.certified.sum())} certified, {int(self.unstable.sum())} unstable"
        ]
        for code, name in enumerate(RESOLVED_BY):
            count = int((self.resolved_by == code).sum())
            if count:
                lines.append(f"  {name:<30} {count:>6}  ({100 * count / n:.1f} %)")
        return "\n".join(lines)
