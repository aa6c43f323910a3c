"""What a round of the SMO does within the working sets: the choice, pairs, and the rest exactly."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from torchloo.guards import may_look
from torchloo.svm.solve.interior import interior_point
from torchloo.svm.solve.newton import Sets
from torchloo.svm.solve.systems import Bordered, Dense
from torchloo.svm.stacked import block_of, entries, subset, times_vector
from torchloo.svm.tolerances import CLEAR, RIDGES, ROUGH_RIDGE, SHORT, TINY, is_free

if TYPE_CHECKING:
    from torchloo.svm.smo.rounds import SMOState

__all__ = ["improved", "pair_step", "snapped", "solve_within", "worst_violators"]

_PAIRS = 32  # steps on pairs before the interior point
_FEW_PAIRS = 8  # steps on pairs before Newton steps
_PAIRS_A_LOOK = 4  # steps on pairs between two tests for the end
_POLISHES = 2  # the second goes on where a bound has blocked the first


def worst_violators(box: Tensor, F_up: Tensor, F_low: Tensor, q: int) -> Tensor:
    """Working sets (B, q); both directions have a share, so that the equality lets them move."""
    share = max(q // 4, 1)
    rising = F_up.topk(share, 1, largest=False, sorted=False).indices
    falling = F_low.topk(share, 1, sorted=False).indices
    score = torch.maximum(F_low.amax(1, keepdim=True) - F_up, F_low - F_up.amin(1, keepdim=True))
    score = score.scatter(1, torch.cat([rising, falling], 1), torch.inf)
    return score.masked_fill(box <= 0, -torch.inf).topk(q, 1).indices


def improved(
    K: Tensor, s: "SMOState", W: Tensor, epsilon: float, newton: bool, stalled: Tensor | None
) -> Tensor:
    """Optimise over working sets W (B, q), update F by one product; whether alpha moved, (B,).

    Where Newton steps follow only roughly, but for the `stalled` problems (B,), if there are any.
    """
    y, box, before, F = (x.gather(1, W) for x in (s.y, s.box, s.alpha, s.F))
    most = _FEW_PAIRS if newton else _PAIRS
    alpha, steps, unsolved = _pairs(K, s.table, W, y, box, before, F, epsilon, most)
    if stalled is not None or not newton:
        hard = subset(unsolved if stalled is None else unsolved & stalled)
        if len(hard):
            parts = (x[hard] for x in (y, box, before, F, alpha))
            exact = _better(block_of(K, W[hard], which=s.table[hard]), *parts)
            alpha = alpha.index_copy(0, hard, exact)
    s.steps = s.steps + steps
    return _enter(K, s, W, before, alpha)


def pair_step(K: Tensor, s: "SMOState", F_up: Tensor, F_low: Tensor) -> Tensor:
    """One step on the most violating pair, Keerthi et al. 2001; whether alpha moved, (B,)."""
    W = torch.stack([F_up.argmin(1), F_low.argmax(1)], 1)  # (B, 2)
    k_ii, k_ij, _, k_jj = block_of(K, W, which=s.table).flatten(1).unbind(1)
    y, box, before = (x.gather(1, W) for x in (s.y, s.box, s.alpha))
    a, lowest, highest = _signed(before, box, y)
    room = torch.minimum(highest[:, 0] - a[:, 0], a[:, 1] - lowest[:, 1])
    t = torch.minimum(s.violation / (k_ii + k_jj - 2 * k_ij).clamp_min(TINY), room)
    a = snapped(a + torch.stack([t, -t], 1), lowest, highest)
    s.steps = s.steps + 1
    return _enter(K, s, W, before, a * y)


def _enter(K: Tensor, s: "SMOState", W: Tensor, before: Tensor, alpha: Tensor) -> Tensor:
    """Change the coefficients at W (B, q), and F by one product; whether any has changed, (B,)."""
    change, moved = (alpha - before) * s.y.gather(1, W), alpha != before
    s.alpha = s.alpha.scatter(1, W, alpha)
    rows = W + (s.table * K.shape[1])[:, None]
    s.F = s.F + embedding_bag(rows, K.flatten(0, 1), per_sample_weights=change, mode="sum")
    count = moved.sum(1)
    s.columns = s.columns + count
    return count > 0


def _better(K: Tensor, y: Tensor, box: Tensor, before: Tensor, F: Tensor, paired: Tensor) -> Tensor:
    """`solve_within` on working sets (B, q); where it gains no more, what the pairs reached."""
    candidates = torch.stack([paired, solve_within(K, y, box, before, F)])  # (2, B, q)
    change = (candidates - before) * y
    cost = (change * (F + (K @ change[..., None])[..., 0] / 2)).sum(2)
    return torch.where((cost[1] < cost[0])[:, None], candidates[1], candidates[0])


def solve_within(K: Tensor, y: Tensor, box: Tensor, before: Tensor, F: Tensor) -> Tensor:
    """Optimal alpha (B, q) of working sets, the others held; all but K (B, q, q) are (B, q).

    Their SVM dual by Note [Newton step]: to u the others add F + y - K (before * y), to y^T alpha minus that
    of `before`. As this is known, a number added to K only moves the bias; so more variables may be free than
    the rank of K. To put variables at their bounds may move the others too much where C is large; so the
    equations of the free ones are solved once more. `before` itself where the sets that are found cannot
    keep y^T alpha.

    Cost about 10 Cholesky factorisations of size q.
    """
    own, most = before * y, box.amax(1, keepdim=True)
    size = K.diagonal(dim1=1, dim2=2).mean(1, keepdim=True)
    scale = torch.maximum(size, 1 / most)
    boxes = torch.maximum(box, TINY * most) * scale  # rounding, for what is left out
    definite = (K + size[:, :, None]) / scale[:, :, None]
    definite.diagonal(dim1=1, dim2=2).add_(RIDGES[-1])
    pull, total = F + y - times_vector(K, own), -own.sum(1, keepdim=True) * scale
    point = interior_point(Dense(definite, ()), y, boxes, CLEAR, pull, total, may_look(K))
    sets = Sets.read_off(point, boxes)
    alpha = torch.where(sets.upper, box, torch.where(sets.free, point.alpha / scale, 0.0).minimum(box))
    for _ in range(_POLISHES):
        alpha = _polished(K, y, box, before, F, alpha)
    # What rounding has left of the equality goes to the variable with most room; wrong sets leave too much.
    i = torch.minimum(alpha, box - alpha).argmax(1, keepdim=True)
    lack = (y * (before - alpha)).sum(1, keepdim=True)
    needed = alpha.gather(1, i) + y.gather(1, i) * lack
    value = needed.clamp_min(0).minimum(box.gather(1, i))
    return torch.where((needed - value).abs() <= TINY * most, alpha.scatter(1, i, value), before)


def _polished(K: Tensor, y: Tensor, box: Tensor, before: Tensor, F: Tensor, alpha: Tensor) -> Tensor:
    """The equations of the free variables solved, as far as the bounds allow."""
    free, change = is_free(alpha, box), (alpha - before) * y
    k = K.diagonal(dim1=1, dim2=2)
    ridge = ROUGH_RIDGE * torch.maximum(k, SHORT * k.mean(1, keepdim=True))
    system = Bordered(K + torch.diag_embed(ridge), free)
    _, a = system.solve(-change.sum(1, keepdim=True), -(F + times_vector(K, change))[:, None])
    step = a[:, 0] * y
    ratios = torch.maximum(-step / alpha, step / (box - alpha)).masked_fill(~free, 0.0)
    moved = alpha + step / ratios.amax(1, keepdim=True).clamp_min(1)
    moved = snapped(moved, torch.zeros_like(box), box)  # what blocks lies at its bound
    return torch.where(free & (system.info == 0)[:, None], moved, alpha)


def _pairs(
    K: Tensor,
    table: Tensor,
    W: Tensor,
    y: Tensor,
    box: Tensor,
    alpha: Tensor,
    F: Tensor,
    epsilon: float,
    most: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Second-order SMO on working sets W (B, q) of the K (T, n, n) that `table` (B,) says, of some steps.

    New alpha (B, q), the number of pairs, and what is not solved, (B,).
    """
    a, lowest, highest = _signed(alpha, box, y)
    margin = TINY * box
    first = (W + (table * K.shape[1])[:, None]) * K.shape[1]  # where the rows W of K begin
    diagonal = entries(K, first + W)
    steps = torch.zeros(len(y), dtype=torch.long, device=y.device)
    for count in range(most + 1):
        up, down = highest - a, a - lowest  # rooms
        F_i, i = F.masked_fill(up <= margin, torch.inf).min(1, keepdim=True)
        gain = F.masked_fill(down <= margin, -torch.inf).sub_(F_i).clamp_min_(0)  # (B, q)
        # Not the slope of j, whose gain may lie in a tiny eta.
        moving = gain.amax(1, keepdim=True) > epsilon / 2
        if count == most or (count % _PAIRS_A_LOOK == 0 and may_look(moving) and not bool(moving.any())):
            break
        K_i = entries(K, first.gather(1, i) + W)
        eta = (diagonal.gather(1, i) + diagonal).sub_(K_i, alpha=2).clamp_min_(TINY)
        newton = gain / eta
        j = gain.mul_(newton).argmax(1, keepdim=True)
        room = torch.minimum(up.gather(1, i), down.gather(1, j))
        t = torch.minimum(newton.gather(1, j), room) * moving
        a = a.scatter_add(1, i, t).scatter_add_(1, j, -t)
        F = torch.addcmul(F, K_i.sub_(entries(K, first.gather(1, j) + W)), t)
        steps += moving[:, 0]
    return snapped(a, lowest, highest) * y, steps, moving[:, 0]


def _signed(alpha: Tensor, box: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """a = alpha * y and its lower and upper bounds."""
    far = box * y
    return alpha * y, far.clamp_max(0), far.clamp_min(0)


def snapped(a: Tensor, lowest: Tensor, highest: Tensor) -> Tensor:
    """Rounding must neither pass a bound nor miss it: what misses it looks free."""
    margin = TINY * (highest - lowest)
    a = torch.where(highest - a < margin, highest, a)
    return torch.where(a - lowest < margin, lowest, a)
