"""diagnose: influential rows, outliers and suspect labels.

Note [diagnosis]
With H the smoother matrix, h its diagonal, e the training residuals and r, v the held-out residuals and
variances, the noise is estimated by s^2 = sum weight e^2 / (n - sum h), and

    studentised residual   r_i / (s (v_i / reg)^{1/2}),   which is e_i weight_i^{1/2} / (s (1 - h_i)^{1/2})
                           where rows are left out alone;
    Cook's distance        sum_j weight_j (f_j - f_{-L,j})^2 / (s^2 sum h),   f - f_{-L} = H_{:L} r_L,

the textbook's where the machine is ordinary least squares. Dropping L for good leaves a machine with
P' = P - P_{:L} P_LL^{-1} P_{L:} and a' = a - P_{:L} r_L, so that its own held-out residuals, those of the
rows that are left, are P'_KK^{-1} a'_K: the exact change of any criterion costs O(n^2) for all single rows.

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
from torchloo.held_out import HeldOut
from torchloo.machine import LeastSquares
from torchloo.smoothers import Fit, assemble

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Diagnosis", "diagnose"]

_ENTRIES = 1 << 22  # held-out outputs of machines without a row that are computed at once
_SHOWN = 10
_NUMBERS = 8


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
        if self.suspicion is not None:
            score, limit = self.suspicion, 0.8 if above is None else above
        else:
            size = self.studentised.abs()
            score, limit = size if size.ndim == 1 else size.amax(-1), 3.0 if above is None else above
        order = score.argsort(descending=True, stable=True)
        return order[: int((score > limit).sum())]

    def change(self, criterion: Any) -> Tensor:
        """How a held-out criterion changes when a row or cluster is dropped for good, (g,), exactly.

        Negative values are improvements where lower is better. The criterion is that of the remaining rows,
        each left out of a machine trained without the dropped ones.

        Args:
            criterion: one of tl.criteria or its name, or a callable of a HeldOut.

        Cost n^2 c for single rows, n^2 times the size for each cluster; memory n^2 numbers.
        """
        score = Score("Diagnosis.change", "criterion", criterion)
        if score.takes_fit:
            raise ValueError(f"Diagnosis.change: criterion must be of held-out outputs, got {score.name}")
        with torch.no_grad():
            after = self._without_rows(score) if self.held_out.clusters is None else self._without_sets(score)
            return after - score(self.held_out)

    def _without_rows(self, score: Score) -> Tensor:
        P, a, n = self.fit.annihilator(), self.fit.dual, len(self.leverage)
        P_ii = P.diagonal()
        r = a / P_ii.unsqueeze(-1)  # (n, c)
        values = []
        for rows in torch.arange(n, device=P.device).split(max(1, _ENTRIES // a.numel())):
            others = torch.arange(n - 1, device=P.device) + (
                torch.arange(n - 1, device=P.device) >= rows[:, None]
            )
            beside = P[rows].take_along_dim(others, -1)  # (b, n - 1)
            remaining = P_ii[others] - beside.square() / P_ii[rows].unsqueeze(-1)  # the diagonal of P'
            dual = a[others] - beside.unsqueeze(-1) * r[rows].unsqueeze(-2)  # (b, n - 1, c)
            variance = remaining.reciprocal().unsqueeze(-1)
            values.append(score(self._held_out(others, dual * variance, variance, None)))
        return torch.cat(values)

    def _without_sets(self, score: Score) -> Tensor:
        P, a, clusters = self.fit.annihilator(), self.fit.dual, self.held_out.clusters
        assert clusters is not None
        if len(self.dropped) < 3:
            raise ValueError(
                "Diagnosis.change: there must be at least 3 clusters, one dropped and 2 to compare"
            )
        values = []
        for label in self.dropped:
            L, K = (torch.nonzero(side)[:, 0].to(P.device) for side in (clusters == label, clusters != label))
            P_KL = P[K][:, L]
            solved = torch.linalg.solve(P[L][:, L], torch.cat([P_KL.mT, a[L]], -1))
            inner = P[K][:, K] - P_KL @ solved[:, : len(K)]
            dual = a[K] - P_KL @ solved[:, len(K) :]
            labels, guard = clusters[clusters != label], Guard("Diagnosis.change")
            partition = Partition.of("Diagnosis.change", labels, len(K), P.device)
            blocks = [inner[rows.unsqueeze(-1), rows.unsqueeze(-2)] for rows in partition.groups]
            parts = solve_blocks(partition.gather(dual), blocks, guard)
            guard.check()
            residuals, variance = (partition.scatter(part, len(K)) for part in parts)
            values.append(score(self._held_out(K, residuals, variance, labels)))
        return torch.stack(values)

    def _held_out(self, rows: Tensor, residuals: Tensor, variance: Tensor, labels: Tensor | None) -> HeldOut:
        """The HeldOut of some rows (..., k)."""
        refitted = torch.zeros_like(rows, dtype=torch.bool)
        parts = (residuals, variance, refitted)
        return assemble(self.fit.targets[rows], self.fit.weight[rows], labels, parts, self.fit.flat)

    def _order(self) -> Tensor:
        """Rows by suspicion, or by the size of the studentised residual."""
        if self.suspicion is not None:
            return self.suspicion.argsort(descending=True, stable=True)
        size = self.studentised.abs()
        return (size if size.ndim == 1 else size.amax(-1)).argsort(descending=True, stable=True)

    def _cook_of_rows(self) -> Tensor:
        """Cook's distance of every row's set, (n,)."""
        if self.held_out.clusters is None:
            return self.cook
        return self.cook[torch.searchsorted(self.dropped, self.held_out.clusters).to(self.cook.device)]

    def __str__(self) -> str:
        """A table of the most suspicious rows."""
        what = "rows" if self.held_out.clusters is None else f"rows in {len(self.dropped)} clusters"
        lines = [f"{len(self.leverage)} {what}, {len(self.suspects())} to look at", ""]
        lines.append(
            f"{'row':>6}{'target':>11}{'held out':>11}{'studentised':>13}{'leverage':>10}{'Cook':>10}"
        )
        if self.suspicion is not None:
            lines[-1] += f"{'suspicion':>11}"
        cook, wide = self._cook_of_rows(), self.studentised.ndim > 1
        for i in self._order()[:_SHOWN].tolist():
            j = self.studentised[i].abs().argmax() if wide else None
            at = i if j is None else (i, j)
            numbers = (self.held_out.targets[at], self.held_out.outputs[at], self.studentised[at])
            line = "{:>6}{:>11.4g}{:>11.4g}{:>13.2f}".format(i, *(number.item() for number in numbers))
            line += f"{self.leverage[i].item():>10.3f}{cook[i].item():>10.2g}"
            lines.append(line + ("" if self.suspicion is None else f"{self.suspicion[i].item():>11.3f}"))
        return "\n".join(lines)

    def plot(self, path: str | Path | None = None) -> "Figure":
        """A picture: studentised residuals over leverage, areas by Cook's distance, suspects by number.

        Args:
            path: where to write it, e.g. diagnosis.png; None only returns the figure. Needs matplotlib
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
            worst = worst.take_along_dim(worst.abs().argmax(-1, keepdim=True), -1)[:, 0]
        h, t, cook = (values.cpu().numpy() for values in (self.leverage, worst, self._cook_of_rows()))
        area = 6 + 250 * cook / max(cook.max(), 1e-300)
        marked = self.suspects().cpu().numpy()
        axes.axhline(0, color="0.8", lw=0.8, zorder=0)
        axes.scatter(h, t, s=area, color="#4477aa", alpha=0.45, lw=0)
        axes.scatter(h[marked], t[marked], s=area[marked], color="#cc3311", alpha=0.75, lw=0)
        axes.plot([], [], "o", color="#4477aa", alpha=0.6, label="rows, area by Cook's distance")
        axes.plot([], [], "o", color="#cc3311", alpha=0.75, label=f"{len(marked)} to look at, some by number")
        for i in _apart(marked, h / np.ptp(h).clip(1e-300), t / np.ptp(t).clip(1e-300)):
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

    Values without a graph. Cost that of leave-one-out and n^2 c; memory n^2 numbers.

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
    held_out, h = fit.held_out(clusters), fit.leverage
    wide = fit.held_out(clusters, flat=False)
    e = fit.targets - fit.outputs.reshape(fit.targets.shape)  # (n, c)
    zeta = fit.weight.unsqueeze(-1)
    s2 = (zeta * e.square()).sum(0) / (1 - h).sum()  # (c,)
    P, noise = fit.annihilator(), fit.problem.ridge
    studentised = wide.residuals / (s2 * wide.variance / fit.problem.reg).sqrt()
    labels = torch.arange(len(h), device="cpu") if held_out.clusters is None else held_out.clusters
    dropped, members = labels.unique(return_inverse=True)
    cook = _cook(P, noise, wide.residuals, members.to(h.device), len(dropped), zeta) / (s2 * h.sum())
    return Diagnosis(
        h, fit.shaped(studentised), cook.mean(-1), _suspicion(held_out, wide), held_out, dropped, fit
    )


def _apart(rows: np.ndarray, x: np.ndarray, y: np.ndarray) -> list[int]:
    """The first eight rows whose labels do not overlap in a plot with coordinates between 0 and 1."""
    chosen: list[int] = []
    for i in rows.tolist():
        if len(chosen) < _NUMBERS and all(abs(x[i] - x[j]) > 0.07 or abs(y[i] - y[j]) > 0.07 for j in chosen):
            chosen.append(i)
    return chosen


def _cook(P: Tensor, noise: Tensor, r: Tensor, members: Tensor, count: int, zeta: Tensor) -> Tensor:
    """sum_j weight_j (H_{:L} r_L)_j^2 for every set, (g, c), one output at a time."""
    H = torch.diag_embed(torch.ones_like(noise)) - noise.unsqueeze(-1) * P
    found = []
    for column in r.unbind(-1):
        moved = H.new_zeros(len(H), count).index_add_(1, members, H * column)  # (n, g)
        found.append((zeta * moved.square()).sum(0))
    return torch.stack(found, -1)


def _suspicion(held_out: HeldOut, wide: HeldOut) -> Tensor | None:
    """1 - probability of the own label, (n,), where targets are classes."""
    targets = wide.targets.mT  # (c, n)
    if len(targets) == 1:
        classes = two_valued(targets).all() & (targets > 0).any() & (targets < 0).any()
    else:
        classes = one_positive(targets).all() & (targets.abs() == 1).all()
    if not bool(classes):
        return None
    p = calibrate(held_out)(held_out.outputs)
    if len(targets) == 1:
        p, positive = p.reshape(-1), targets[0] > 0
        return torch.where(positive, 1 - p, p)
    return 1 - (p * (wide.targets > 0)).sum(-1)
