"""The objective of a search: many parameter vectors, for many problems, in one batched leave-one-out.

Note [one batched evaluation]
A candidate is a vector theta (p,) and the number of its problem (a data set, such as one split of an outer
loop). B candidates are one machine whose parameters have a leading dimension B, called once with the inputs
of their problems; the gradient of the sum of the B criterion values holds the B gradients, since candidates
are independent. All search methods use only this, so starts and splits advance together.

Small matrices share the cost of a call; large batches would not fit into the cache, so a batch is split into
chunks of about `ENTRIES` kernel entries, at least one candidate each: large problems are evaluated one at a
time. A path is split too, into chunks of about `_PATH` held-out outputs.

A candidate that cannot be evaluated (a factorisation fails, a kernel overflows) is infeasible: its value is
infinite. Since one such candidate makes the call of its chunk fail, the chunk is halved until it is alone.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from torchloo.criteria.score import Score
from torchloo.primal.block import RowSource
from torchloo.search.parameters import Space
from torchloo.search.prior import HyperPrior
from torchloo.search.problem_batch import ProblemBatch, StreamRows, in_order
from torchloo.search.starts import takes_kernel_matrix

__all__ = ["Best", "Evaluation", "Objective", "RunSetup"]

ENTRIES = {"cpu": 1 << 18, "cuda": 1 << 26}

# Held-out outputs of a path that are in memory at once, 128 MB in float64.
_PATH = 1 << 24


class Evaluation(NamedTuple):
    """One leave-one-out evaluation of a search."""

    number: int
    """Its number, from 1."""
    value: float
    """The criterion; infinite (minus infinity if higher is better) for an infeasible candidate."""
    objective: float
    """What the search minimises: the criterion (negated if higher is better) plus the hyper-prior."""
    parameters: dict[str, Any]
    """Positive hyper-parameters, and settings of a grid, by name, such as reg or kernel.lengthscale."""
    machine: int = 0
    """Index of the machine in a comparison."""


@dataclass
class Best:
    """The best candidate of a problem so far."""

    theta: Tensor | None = None
    objective: float = float("inf")
    value: float = float("nan")


class RunSetup(NamedTuple):
    """Starts, bounds and limits of R runs."""

    start: Tensor
    """(R, p)."""
    problem: Tensor
    """The problem of each, (R,)."""
    box: Tensor
    """Bounds, (2, R, p)."""
    unit: Tensor
    """Unit of length of every number, (p,)."""
    evaluations: int
    """Limit for each run."""
    tolerance: float
    """Relative change of the value at which a run stops."""
    rounding: float = 2.0**-50
    """Relative rounding error of the value."""


class _Rows(NamedTuple):
    """Data of one problem, or of several with a leading dimension B."""

    X: Any
    y: Tensor
    weight: Tensor | None
    criterion_weight: Any


class Objective:
    """objective(theta, problem) -> values to minimise, and gradients; see Note [one batched evaluation].

    Keeps, for every problem, the best candidate, the number of evaluations and (for one problem) the history.
    `watch` is called with the new entries of the history after every chunk, and may end the search.
    """

    def __init__(
        self,
        space: Space,
        problems: ProblemBatch,
        score: Score,
        prior: HyperPrior,
        bar: "tqdm[Any]",
        watch: Callable[[list[Evaluation]], None] | None = None,
    ) -> None:
        self.space, self.problems = space, problems
        self.score, self.prior = score, prior
        self.bar, self.watch = bar, watch
        self.joined = (problems, *problems.joined)
        count = len(problems.X)
        self.best = [Best() for _ in range(count)]
        self.evaluations = [0] * count
        self.history: list[Evaluation] = []
        self.failures: dict[int, Exception] = {}

    def __call__(self, theta: Tensor, problem: Tensor, gradient: bool = False) -> tuple[Tensor, Tensor]:
        """Values (B,) and gradients (B, p), zeros unless `gradient`, of theta (B, p) in problem (B,)."""
        width = self._width()
        values, gradients = [], []
        for theta_part, problem_part in zip(theta.split(width), problem.split(width), strict=True):
            value, slope = self._chunk(theta_part, problem_part, gradient)
            values.append(value)
            gradients.append(slope)
        return torch.cat(values), torch.cat(gradients)

    def along_reg(self, theta: Tensor, problem: Tensor, regs: Tensor) -> Tensor:
        """Values (B, R) for regularisations (R,), or (R, c), instead of each candidate's own, by `path`."""
        width = self._width()
        columns = self.problems.y[0, 0].numel()
        outputs = self.problems.X.shape[1] * columns
        together = max(1, _PATH // (min(width, len(theta)) * outputs))
        chunks = [self._along_reg(theta, problem, some, width) for some in regs.split(together)]
        return torch.cat(chunks, 1)

    def _along_reg(self, theta: Tensor, problem: Tensor, regs: Tensor, width: int) -> Tensor:
        own = self.space.find("reg", "grid").part
        rows = []
        for part, of in zip(theta.split(width), problem.split(width), strict=True):
            with_regs = part.unsqueeze(1).repeat(1, len(regs), 1)  # (b, R, p)
            with_regs[..., own] = regs.log().reshape(len(regs), -1)
            each = with_regs.flatten(0, 1), of.repeat_interleave(len(regs))
            try:
                with torch.no_grad():
                    joined = [self._held_out_values(data, part, of, regs) for data in self.joined]
                values = torch.stack(joined).mean(0).T.cpu().double()
            except (ValueError, torch.linalg.LinAlgError):  # type: ignore[attr-defined]
                objective, _ = self(*each)
            else:
                objective = self._record(*each, values.flatten())
            rows.append(objective.view(len(part), -1))
        return torch.cat(rows)

    @property
    def rounding(self) -> float:
        """Relative rounding error of a value."""
        return 8 * torch.finfo(self.problems.y.dtype).eps

    def _width(self) -> int:
        if not self.space.batched:
            return 1
        n = max(data.X.shape[1] for data in self.joined)
        entries = ENTRIES.get(self.problems.X.device.type, ENTRIES["cuda"])
        return max(1, entries // n**2)

    def _chunk(self, theta: Tensor, problem: Tensor, gradient: bool) -> tuple[Tensor, Tensor]:
        """Values and gradients of a chunk, halved until failing candidates are alone."""
        try:
            values, gradients = self._evaluate(theta, problem, gradient)
        except (ValueError, torch.linalg.LinAlgError) as failure:  # type: ignore[attr-defined]
            if len(theta) > 1:
                half = len(theta) // 2
                first = self._chunk(theta[:half], problem[:half], gradient)
                second = self._chunk(theta[half:], problem[half:], gradient)
                objective, slopes = map(torch.cat, zip(first, second, strict=True))
                return objective, slopes
            self.failures[int(problem)] = failure
            values = torch.full((1,), torch.nan, dtype=torch.float64)
            gradients = torch.zeros_like(theta)
        penalty, slope = self.prior(theta, problem, gradient)
        objective = self._record(theta, problem, values, penalty)
        return objective, self.score.sign * gradients + slope

    def _evaluate(self, theta: Tensor, problem: Tensor, gradient: bool) -> tuple[Tensor, Tensor]:
        """Criterion values (B,) and their gradients (B, p): means over the data sets that are joined."""
        each = [self._evaluate_one(data, theta, problem, gradient) for data in self.joined]
        values, slopes = zip(*each, strict=True)
        return torch.stack(values).mean(0), torch.stack(slopes).mean(0)

    def _evaluate_one(
        self, data: ProblemBatch, theta: Tensor, problem: Tensor, gradient: bool
    ) -> tuple[Tensor, Tensor]:
        """Criterion values (B,) and their gradients (B, p) in one call."""
        with torch.set_grad_enabled(gradient):
            theta = theta.clone().requires_grad_(gradient)
            values = self._held_out_values(data, theta, problem).double()
            if not gradient:
                return values.cpu(), torch.zeros_like(theta)
            if not values.requires_grad:
                raise TypeError(
                    f"{self.space.function}: criterion {self.score.name} has no gradient with this machine; "
                    "use search='nelder-mead'"
                )
            (slopes,) = torch.autograd.grad(values.sum(), theta)
        return values.detach().cpu(), slopes

    def _held_out_values(
        self,
        data: ProblemBatch,
        theta: Tensor,
        problem: Tensor,
        regs: Tensor | None = None,
    ) -> Tensor:
        """Criterion values (B,), or (R, B) along a path."""
        theta = theta[0] if len(theta) == 1 else theta
        theta = theta.to(self.problems.X.device)
        shared = bool((problem == problem[0]).all())  # one problem, without a copy
        values = self._scored(data, theta, problem[0] if shared else problem, regs)
        return values.reshape(*values.shape[: regs is not None], -1)

    def _scored(self, data: ProblemBatch, theta: Tensor, problem: Tensor, regs: Tensor | None) -> Tensor:
        """Criterion values for problem () or (B,)."""
        *tensors, clusters, _ = data
        rows = _Rows(*(_of(values, problem) for values in tensors))
        if clusters is None or clusters.order is None:
            labels = None if clusters is None else clusters.shared
            held_out = self._held_out(theta, rows, regs, labels)
            return self.score(held_out, rows.criterion_weight)
        ordered = self._sorted(rows, clusters.order[problem])
        held_out = self._held_out(theta, ordered, regs, clusters.shared, among=rows[:3])
        if self.score.batched:
            return self.score(held_out, ordered.criterion_weight)
        return self.score(clusters.own_order(held_out, problem), rows.criterion_weight)

    def _held_out(
        self,
        theta: Tensor,
        rows: _Rows,
        regs: Tensor | None,
        labels: Tensor | None,
        among: Any = None,
    ) -> Any:
        """The argument of the criterion: a HeldOut, or a Fit."""
        call = functools.partial(self.space.call, theta, among=among)
        X, y, weight, _ = rows
        if isinstance(X, RowSource):  # includes targets and weights
            if regs is not None:
                return call("path", X, None, regs.to(theta), labels)
            return call("held_out", X, None, labels)
        if regs is not None:
            return call("path", X, y, regs.to(X), labels, weight)
        if self.score.takes_fit:
            return call("solve", X, y, weight)
        return call("held_out", X, y, labels, weight)

    def _sorted(self, rows: _Rows, order: Tensor) -> _Rows:
        """Rows in the given order (..., n); for a Precomputed kernel the columns too."""
        axis = order.ndim - 1
        fields: list[Any] = [
            in_order(value, order, axis) if isinstance(value, Tensor) else value for value in rows
        ]
        ordered = _Rows(*fields)
        if not takes_kernel_matrix(self.space.machine):
            return ordered
        return ordered._replace(X=in_order(ordered.X.mT, order, axis).mT)

    def _record(
        self,
        theta: Tensor,
        problem: Tensor,
        values: Tensor,
        penalty: Tensor | None = None,
    ) -> Tensor:
        """Record candidates and their values; returns the objective, infinite where it is undefined."""
        if penalty is None:
            penalty, _ = self.prior(theta, problem)
        objective = self.score.sign * values + penalty
        objective = torch.where(objective.isfinite(), objective, torch.inf)
        candidates = zip(problem.tolist(), objective.tolist(), values.tolist(), strict=True)
        for i, (number, total, value) in enumerate(candidates):
            self.evaluations[number] += 1
            if len(self.best) == 1:
                shown = value if total < float("inf") else self.score.sign * float("inf")
                named = self.space.named(theta[i])
                self.history.append(Evaluation(self.evaluations[0], shown, total, named))
            if total < self.best[number].objective:
                self.best[number] = Best(theta[i].clone(), total, value)
        self._show(len(values))
        if self.watch is not None:
            self.watch(self.history[-len(values) :])
        return objective

    def _show(self, count: int) -> None:
        known = [best.value for best in self.best if best.theta is not None]
        if known:
            name = "best" if len(self.best) == 1 else "mean best"
            self.bar.set_postfix_str(f"{name} {sum(known) / len(known):.6g}", refresh=False)
        self.bar.update(count)


def _of(values: Any, problem: Tensor) -> Any:
    """Entries of a tensor for problem () or (B,); other values are returned as they are."""
    if isinstance(values, StreamRows):
        return values.stream
    if not isinstance(values, Tensor):
        return values
    if problem.ndim:
        return values[problem.to(values.device)]
    return values[int(problem)]
