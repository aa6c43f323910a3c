"""Sequential minimal optimisation of many SVMs at once that share kernel matrices.

Note [working sets]
State of each problem: alpha and F = u - y, u = K (alpha * y). With I_up the variables whose
a = alpha * y can rise and I_low those whose a can fall, b_up = min F over I_up and
b_low = max F over I_low, the problem is solved to epsilon when b_low - b_up <= epsilon. A round
takes the q worst violators of each problem, solves among them, and brings F up to date by one
product with the kernel columns that changed.

Among the q a few second-order pairs find out which variables are free; a few Newton steps on the whole free
set, Note [free sets], then do what pairs take thousands of steps for. Each goes to the maximum on its line or
to the first bound. What has not come nearer for some rounds is solved among the q by the interior point of
Note [Newton step], as is everything where no Newton steps are wanted. That alone stalls where more variables
are free than the q: diabetis, RBF, C = 100, with 131 free variables took 42 s, and 0.3 s with Newton steps.
With working=2 a round is one step on the most violating pair, the SMO of Keerthi et al. 2001 that BOUND uses.
"""

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from torchloo.svm.smo.free_newton import FreeSets
from torchloo.svm.smo.options import SMOOptions
from torchloo.svm.smo.working_sets import improved, pair_step, worst_violators
from torchloo.svm.stacked import Tables
from torchloo.svm.tolerances import is_free

if TYPE_CHECKING:
    from torchloo.svm.smo.bound import DualBound

__all__ = ["SMOState", "smo"]

_STALLED = 4  # rounds that do not halve the violation, before the interior point comes to help


@dataclass
class SMOState:
    """B problems being solved, and those solved."""

    number: Tensor
    """The place of the problem in the batch as it came in, (B,)."""
    table: Tensor
    """Which kernel matrix it uses, (B,)."""
    box: Tensor
    """Upper bounds; 0 for what is left out, (B, n)."""
    y: Tensor
    """Labels, (B, n)."""
    alpha: Tensor
    """Coefficients, (B, n)."""
    F: Tensor
    """K (alpha * y) - y, also at rows left out, (B, n)."""
    bias: Tensor
    """Midpoint -(b_up + b_low) / 2, (B,)."""
    violation: Tensor
    """b_low - b_up, (B,)."""
    steps: Tensor
    """Pairs optimised, (B,)."""
    newton: Tensor
    """Newton steps on the free set, (B,)."""
    columns: Tensor
    """Kernel columns read, (B,)."""
    stopped_by: Tensor
    """0: epsilon-KKT (or out of rounds), of which the rule is not asked; other numbers are its own, (B,)."""
    sign: Tensor
    """Sign of the held-out value proved by the rule, 0 if none, (B,)."""
    mark: Tensor
    """The violation when it had last been halved, (B,)."""
    waited: Tensor
    """Rounds since then, (B,)."""

    def take(self, rows: Tensor) -> "SMOState":
        """The problems at `rows`."""
        return SMOState(*(getattr(self, f.name)[rows] for f in fields(self)))

    def movable(self) -> tuple[Tensor, Tensor]:
        """F where a can rise, else inf; F where a can fall, else -inf; (B, n) both."""
        full, empty, positive = self.alpha >= self.box, self.alpha <= 0, self.y > 0
        blocked_up, blocked_low = torch.where(positive, full, empty), torch.where(positive, empty, full)
        return self.F.masked_fill(blocked_up, torch.inf), self.F.masked_fill(blocked_low, -torch.inf)

    def update(self, F_up: Tensor, F_low: Tensor) -> None:
        """Set bias, violation and the progress from the movable F."""
        b_up, b_low = F_up.amin(1), F_low.amax(1)
        self.violation = (b_low - b_up).clamp_min(0).nan_to_num(0, 0, 0)
        halved = self.violation < self.mark / 2
        self.mark = torch.where(halved, self.violation, self.mark)
        self.waited = (self.waited + 1).masked_fill(halved, 0)
        # One class only: b has a half-line, and f is the remaining label at the nearer end.
        one_sided = torch.where(b_up.isinf(), -b_low, -b_up)
        self.bias = torch.where(b_up.isinf() | b_low.isinf(), one_sided, -(b_up + b_low) / 2)


def smo(
    K: Tensor,
    y: Tensor,
    box: Tensor,
    alpha: Tensor,
    epsilon: float = 1e-3,
    table: Tensor | None = None,
    options: SMOOptions = SMOOptions(),  # noqa: B008, immutable
    rule: "DualBound | None" = None,
) -> SMOState:
    """Solve B SVM duals to epsilon from feasible starting points, Note [working sets].

        max sum alpha - 1/2 sum alpha_i alpha_j y_i y_j k_ij,  y^T alpha = 0,  0 <= alpha <= box

    Args:
        K: kernel matrices, (T, n, n).
        y, box, alpha: labels, upper bounds and start of each problem, (B, n).
        epsilon: largest violation of the optimality conditions.
        table: which kernel matrix each problem uses, (B,); default the first.
        options: size of the working sets, Newton steps, and when to give a problem up: after so many rounds,
            when its violation has not been halved for long, or when rounding lets nothing move; `violation`
            tells.
        rule: another reason to stop, of the same problems (bound.py).

    Cost O(B n q) a round, and O(B n^2) a Newton step. Memory O(B (n + q^2)), and 4 n^2 for each kernel matrix
    for Newton steps. On an accelerator the host waits once a round.
    Reference: Keerthi et al. 2001; Fan et al. 2005.
    """
    n = y.shape[1]
    q = min(options.working, n)
    patience = -(-options.patience * n // q)
    sets = FreeSets(K) if options.newton and q > 2 else None
    state = _first_state(K, y, box, alpha, table)
    if rule is not None:
        rule.begin(state)
    tables = Tables(state.table, len(K))
    ended: list[SMOState] = []
    stuck = torch.zeros_like(state.number, dtype=torch.bool)
    for round_ in range(options.most_rounds):
        F_up, F_low = state.movable()
        state.update(F_up, F_low)
        done = stuck | (state.violation <= epsilon) | (state.waited >= patience)
        if round_ == options.most_rounds - 1:
            done = torch.ones_like(done)
        if rule is not None and rule.due(round_):
            done |= rule.advance(state, ~done)  # after epsilon-KKT: Step 4 of Algorithm 3 comes before 7
        plan = _look(state, done, tables, sets)
        if plan.ended:
            rest, gone = done.to(torch.uint8).argsort(stable=True).split([len(done) - plan.ended, plan.ended])
            ended.append(state.take(gone))
            if not len(rest):
                break
            state, F_up, F_low = state.take(rest), F_up[rest], F_low[rest]
            tables = Tables(state.table, len(K), plan.most)
            if rule is not None:
                rule.take(rest)
        if q == 2:
            stuck = ~pair_step(K, state, F_up, F_low)
            continue
        W = worst_violators(state.box, F_up, F_low, q)
        stalled = state.waited >= _STALLED if plan.stalled else None
        moved = improved(K, state, W, epsilon, sets is not None, stalled)
        if sets is not None:
            if plan.stale:
                sets.renew(plan.size)
            moved |= sets.steps(state, tables, options.newton)
        stuck = ~moved
    joined = SMOState(*(torch.cat([getattr(part, f.name) for part in ended]) for f in fields(SMOState)))
    return joined.take(joined.number.argsort())


def _first_state(K: Tensor, y: Tensor, box: Tensor, alpha: Tensor, table: Tensor | None) -> SMOState:
    """The problems at their start, in the order of their kernel matrices."""
    zero = torch.zeros(len(y), dtype=torch.long, device=y.device)
    table = zero if table is None else table
    order = table.argsort(stable=True)
    table, y, box, alpha = table[order], y[order], box[order], alpha[order]
    F = Tables(table, len(K)).product(alpha * y, K) - y
    none = alpha.new_zeros(len(y))
    counts = dict.fromkeys(("steps", "newton", "columns", "stopped_by", "waited"), zero)
    values = {"bias": none, "violation": none, "sign": none, "mark": none + torch.inf}
    return SMOState(order, table, box, y, alpha, F, **values, **counts)


class _Plan(NamedTuple):
    """What the host has to know of a round."""

    ended: int
    """Problems that end here."""
    most: int = 0
    """Those of one kernel matrix that go on, at most, if there are several."""
    stalled: int = 0
    """Problems that need the interior point."""
    stale: int = 0
    """Kernel matrices that need a new common set, Note [free sets]."""
    size: int = 0
    """The size of the largest common set then."""


def _look(s: SMOState, done: Tensor, tables: Tables, sets: FreeSets | None) -> _Plan:
    """All that is asked for in one reading, the only time that the host waits in a round."""
    numbers = [done.sum()]
    if tables.count > 1 or sets is not None:
        numbers.append(torch.zeros_like(tables.sizes).index_add_(0, s.table, (~done).long()).amax())
    if sets is not None:
        numbers.append(((s.waited >= _STALLED) & ~done).sum())
        numbers += sets.look(is_free(s.alpha, s.box), tables)
    return _Plan(*torch.stack(numbers).tolist()) if len(numbers) > 1 else _Plan(int(numbers[0]))
