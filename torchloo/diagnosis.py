"""diagnose: influential rows, outliers and suspect labels.

Note [diagnosis]
With H the smoother matrix, h its diagonal, e the training residuals and r, v the held-out residuals and
variances, the noise is estimated by s^2 = sum weight e^2 / (n - sum h), and

    studentised residual   r_i / (s (v_i / reg)^{1/2}),   which is e_i weight_i^{1/2} / (s (1 - h_i)^{1/2})
                           where rows are left out alone;
    Cook's distance        sum_j weight_j (f_j - f_{-L,j})^2 / (s^2 sum h),   f - f_{-L} = H_{:L} r_L,

which are the usual ones for ordinary least squares. Dropping L altogether gives a machine with
P' = P - P_{:L} P_LL^{-1} P_{L:} and a' = a - P_{:L} r_L, so that the held-out residuals of the remaining
rows are P'_KK^{-1} a'_K: the exact change of any criterion costs O(n^2) for all single rows.

Reference: Cook (1977), "Detection of influential observation in linear regression".
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from torchloo.blocks import solve_blocks
from torchloo.calibration import calibrate
from torchloo.clusters import Partition
from torchloo.criteria.score import Score
from torchloo.criteria.scored_rows import one_positive, two_valued
from torchloo.guards import Guard
from torchloo.held_out import HeldOut, assemble
from torchloo.machine import LeastSquares
from torchloo.smoothers import Fit

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Diagnosis", "diagnose"]

_ENTRIES = 1 << 22  # held-out outputs of machines without a row that are computed at once
_SHOWN = 10  # rows in the printed table
_NUMBERS = 8  # rows labelled in the plot


@dataclass(frozen=True)
class Diagnosis:
    """The result of `diagnose`; print it for a table of the most suspicious rows."""

    leverage: Tensor
    """h_i, (n,): how much a row determines its own fitted output."""
    studentised: Tensor
    """Held-out residuals in units of their standard deviation, of the shape of y."""
    cook: Tensor
    """Cook's distance of every row or cluster, in the order of `dropped`, (g,), the mean over outputs."""
    suspicion: Tensor | None
    """1 - probability of the row's label given its held-out output, (n,); None for regression."""
    held_out: HeldOut
    """Of leave-one-out, or of leave-cluster-out."""
    dropped: Tensor
    """Row numbers, or the labels of the clusters, (g,), on the host."""
    fit: Fit
    """The machine of all rows."""

    def suspects(self, above: float | None = None) -> Tensor:
        """Suspicious rows, the worst first.

        For classes, rows whose held-out output gives another label a probability above 0.8 (or `above`); for
        numbers, rows with an absolute studentised residual above 3 in some output.
        """
        limit = 3.0 if self.suspicion is None else 0.8
        if above is not None:
            limit = above
        count = int((self._score() > limit).sum())
        return self._order()[:count]

    def _score(self) -> Tensor:
        """Suspicion, or the largest absolute studentised residual, of each row, (n,)."""
        if self.suspicion is not None:
            return self.suspicion
        size = self.studentised.abs()
        return size if size.ndim == 1 else size.amax(-1)

    def _order(self) -> Tensor:
        """Rows by score, the largest first."""
        return self._score().argsort(descending=True, stable=True)

    def change(self, criterion: Any) -> Tensor:
        """Exact change of a held-out criterion when each row or cluster is dropped altogether, (g,).

        Negative values are improvements if lower is better. The criterion is computed from the remaining
        rows, each held out from a machine trained without the dropped ones.

        Args:
            criterion: one of tl.criteria or its name, or a callable of a HeldOut.

        Cost n^2 c for single rows, n^2 times the size for each cluster; memory n^2 numbers.
        """
        score = Score("Diagnosis.change", "criterion", criterion)
        if score.takes_fit:
            raise ValueError(f"Diagnosis.change: criterion must be of held-out outputs, got {score.name}")
        with torch.no_grad():
            if self.held_out.clusters is None:
                after = self._without_rows(score)
            else:
                after = self._without_sets(score)
            return after - score(self.held_out)

    def _without_rows(self, score: Score) -> Tensor:
        P = self.fit.annihilator()
        a = self.fit.dual
        n = len(self.leverage)
        P_ii = P.diagonal()
        r = a / P_ii.unsqueeze(-1)  # (n, c)
        rows_at_once = max(1, _ENTRIES // a.numel())
        before_gap = torch.arange(n - 1, device=P.device)
        values = []
        for rows in torch.arange(n, device=P.device).split(rows_at_once):
            others = before_gap + (before_gap >= rows[:, None])  # (b, n - 1)
            P_ij = P[rows].take_along_dim(others, -1)  # (b, n - 1)
            P_after = P_ii[others] - P_ij.square() / P_ii[rows].unsqueeze(-1)  # the diagonal of P'
            a_after = a[others] - P_ij.unsqueeze(-1) * r[rows].unsqueeze(-2)  # (b, n - 1, c)
            variance = P_after.reciprocal().unsqueeze(-1)
            values.append(score(self._held_out(others, a_after * variance, variance, None)))
        return torch.cat(values)

    def _without_sets(self, score: Score) -> Tensor:
        P = self.fit.annihilator()
        a = self.fit.dual
        clusters = self.held_out.clusters
        assert clusters is not None
        if len(self.dropped) < 3:
            raise ValueError(
                "Diagnosis.change: there must be at least 3 clusters, one dropped and 2 to compare"
            )
        values = []
        for label in self.dropped:
            L = torch.nonzero(clusters == label)[:, 0].to(P.device)
            K = torch.nonzero(clusters != label)[:, 0].to(P.device)
            P_KL = P[K][:, L]
            P_LL = P[L][:, L]
            right = torch.cat([P_KL.mT, a[L]], -1)
            solved = torch.linalg.solve(P_LL, right)
            by_P, by_a = solved.tensor_split([len(K)], -1)
            P_after = P[K][:, K] - P_KL @ by_P
            a_after = a[K] - P_KL @ by_a
            labels = clusters[clusters != label]
            guard = Guard("Diagnosis.change")
            partition = Partition.of("Diagnosis.change", labels, len(K), P.device)
            blocks = [P_after[rows.unsqueeze(-1), rows.unsqueeze(-2)] for rows in partition.groups]
            parts = solve_blocks(partition.gather(a_after), blocks, guard)
            guard.check()
            residuals, variance = (partition.scatter(part, len(K)) for part in parts)
            values.append(score(self._held_out(K, residuals, variance, labels)))
        return torch.stack(values)

    def _held_out(self, rows: Tensor, residuals: Tensor, variance: Tensor, labels: Tensor | None) -> HeldOut:
        """The HeldOut of some rows (..., k)."""
        refitted = torch.zeros_like(rows, dtype=torch.bool)
        parts = (residuals, variance, refitted)
        return assemble(self.fit.targets[rows], self.fit.weight[rows], labels, parts, self.fit.flat)

    def _cook_of_rows(self) -> Tensor:
        """Cook's distance of the row, or of its cluster, (n,)."""
        if self.held_out.clusters is None:
            return self.cook
        number = torch.searchsorted(self.dropped, self.held_out.clusters)
        return self.cook[number.to(self.cook.device)]

    def __str__(self) -> str:
        """A table of the most suspicious rows."""
        what = "rows" if self.held_out.clusters is None else f"rows in {len(self.dropped)} clusters"
        lines = [f"{len(self.leverage)} {what}, {len(self.suspects())} suspicious", ""]
        head = f"{'row':>6}{'target':>11}{'held out':>11}{'studentised':>13}{'leverage':>10}{'Cook':>10}"
        if self.suspicion is not None:
            head += f"{'suspicion':>11}"
        lines.append(head)
        cook = self._cook_of_rows()
        for i in self._order()[:_SHOWN].tolist():
            at: Any = i
            if self.studentised.ndim > 1:  # the output with the largest residual
                at = (i, self.studentised[i].abs().argmax())
            target = self.held_out.targets[at].item()
            output = self.held_out.outputs[at].item()
            line = f"{i:>6}{target:>11.4g}{output:>11.4g}{self.studentised[at].item():>13.2f}"
            line += f"{self.leverage[i].item():>10.3f}{cook[i].item():>10.2g}"
            if self.suspicion is not None:
                line += f"{self.suspicion[i].item():>11.3f}"
            lines.append(line)
        return "\n".join(lines)

    def plot(self, path: str | Path | None = None) -> "Figure":
        """Plot studentised residuals over leverage, areas by Cook's distance; suspects have their numbers.

        Args:
            path: file to write, e.g. diagnosis.png; None only returns the figure. Needs matplotlib
                (extra cli).
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError("Diagnosis.plot: needs matplotlib: pip install torchloo[cli]") from error
        figure = Figure(figsize=(7.0, 4.2), layout="constrained")
        axes = figure.add_subplot()
        worst = self.studentised
        if worst.ndim > 1:
            largest = worst.abs().argmax(-1, keepdim=True)
            worst = worst.take_along_dim(largest, -1)[:, 0]
        tensors = (self.leverage, worst, self._cook_of_rows())
        h, t, cook = (values.cpu().numpy() for values in tensors)
        area = 6 + 250 * cook / max(cook.max(), 1e-300)
        marked = self.suspects().cpu().numpy()
        axes.axhline(0, color="0.8", lw=0.8, zorder=0)
        axes.scatter(h, t, s=area, color="#4477aa", alpha=0.45, lw=0)
        axes.scatter(h[marked], t[marked], s=area[marked], color="#cc3311", alpha=0.75, lw=0)
        axes.plot([], [], "o", color="#4477aa", alpha=0.6, label="rows, area by Cook's distance")
        axes.plot(
            [], [], "o", color="#cc3311", alpha=0.75, label=f"{len(marked)} suspicious rows, some numbered"
        )
        scaled_h = h / np.ptp(h).clip(1e-300)
        scaled_t = t / np.ptp(t).clip(1e-300)
        for i in _apart(marked, scaled_h, scaled_t):
            above = (0, area[i] ** 0.5 / 2 + 1)
            axes.annotate(str(i), (h[i], t[i]), above, textcoords="offset points", fontsize=8, ha="center")
        axes.margins(0.04, 0.1)
        axes.set_xlabel("leverage")
        axes.set_ylabel("studentised held-out residual")
        axes.spines[["top", "right"]].set_visible(False)
        figure.legend(frameon=False, fontsize=8, loc="outside upper right", ncols=2)
        if path is not None:
            figure.savefig(path, dpi=150)
        return figure


@torch.no_grad()
def diagnose(
    machine: Any, X: Tensor, y: Tensor, clusters: object | None = None, *, weight: Tensor | None = None
) -> Diagnosis:
    """Leverage, studentised held-out residuals, Cook's distance and suspect labels; Note [diagnosis].

    Args:
        machine: a least-squares machine; its hyper-parameters are kept fixed.
        X: rows (n, d), y: targets (n,) or (n, c), or class labels.
        clusters: integer labels (n,) of rows that are left out and dropped together; None for single rows.
        weight: row weights (n,).

    Returns:
        Diagnosis, with `suspects()`, `change(criterion)` and `plot(path)`; `print` shows a table.

    Not differentiable. Cost that of leave-one-out and n^2 c; memory n^2 numbers.

    >>> import torchloo as tl
    >>> x = torch.linspace(0, 1, 30, dtype=torch.float64)
    >>> y = torch.where(x > 0.5, 1.0, -1.0).double()
    >>> y[4] = 1.0  # a wrong label
    >>> diagnose(tl.LSSVM(tl.kernels.RBF(0.2)), x[:, None], y).suspects()[0]
    tensor(4)
    """
    if not isinstance(machine, LeastSquares):
        raise TypeError(f"diagnose: machine must be a least-squares machine, got {type(machine).__name__}")
    if not isinstance(X, Tensor):
        raise TypeError(
            f"diagnose: X must be a tensor, as all rows are needed at once, got {type(X).__name__}"
        )
    fit = machine.solve(X, y, weight)
    if fit.targets.ndim > 2 or fit.leverage.ndim > 1:
        raise ValueError("diagnose: takes one problem with one regularisation, got several; call it for each")
    held_out = fit.held_out(clusters)
    h = fit.leverage
    wide = fit.held_out(clusters, flat=False)
    e = fit.targets - fit.outputs.reshape(fit.targets.shape)  # (n, c)
    zeta = fit.weight.unsqueeze(-1)
    s2 = (zeta * e.square()).sum(0) / (1 - h).sum()  # (c,)
    studentised = wide.residuals / (s2 * wide.variance / fit.problem.reg).sqrt()
    labels = held_out.clusters
    if labels is None:
        labels = torch.arange(len(h), device="cpu")
    dropped, members = labels.unique(return_inverse=True)
    change = _squared_change(fit, wide.residuals, members.to(h.device), len(dropped))
    cook = change / (s2 * h.sum())
    return Diagnosis(
        leverage=h,
        studentised=fit.shaped(studentised),
        cook=cook.mean(-1),
        suspicion=_suspicion(held_out, wide),
        held_out=held_out,
        dropped=dropped,
        fit=fit,
    )


def _apart(rows: np.ndarray, x: np.ndarray, y: np.ndarray) -> list[int]:
    """The first eight rows whose labels do not overlap in a plot with coordinates between 0 and 1."""
    chosen: list[int] = []
    for i in rows.tolist():
        across = abs(x[chosen] - x[i])
        up = abs(y[chosen] - y[i])
        distances = np.maximum(across, up)
        if len(chosen) < _NUMBERS and (distances > 0.07).all():
            chosen.append(i)
    return chosen


def _squared_change(fit: Fit, r: Tensor, members: Tensor, count: int) -> Tensor:
    """sum_j weight_j (H_{:L} r_L)_j^2 for every set L, (g, c), one output at a time."""
    ridge = fit.problem.ridge
    identity = torch.diag_embed(torch.ones_like(ridge))
    H = identity - ridge.unsqueeze(-1) * fit.annihilator()
    zeta = fit.weight.unsqueeze(-1)
    by_output = []
    for column in r.unbind(-1):
        change = H.new_zeros(len(H), count).index_add_(1, members, H * column)  # (n, g)
        by_output.append((zeta * change.square()).sum(0))
    return torch.stack(by_output, -1)


def _suspicion(held_out: HeldOut, wide: HeldOut) -> Tensor | None:
    """1 - probability of the given label, (n,), if targets are classes."""
    targets = wide.targets.mT  # (c, n)
    if len(targets) == 1:
        both_signs = (targets > 0).any() & (targets < 0).any()
        classes = two_valued(targets).all() & both_signs
    else:
        classes = one_positive(targets).all() & (targets.abs() == 1).all()
    if not bool(classes):
        return None
    p = calibrate(held_out)(held_out.outputs)
    if len(targets) == 1:
        p = p.reshape(-1)
        positive = targets[0] > 0
        return torch.where(positive, 1 - p, p)
    return 1 - (p * (wide.targets > 0)).sum(-1)
