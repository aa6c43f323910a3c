"""First solutions of the SVM dual by an interior point, good enough to read the active sets off."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchloo.guards import may_look
from torchloo.svm.solve.low_rank import low_rank_factors
from torchloo.svm.solve.newton import Interior, Iterate, Number
from torchloo.svm.solve.systems import Dense, LowRank, Rough
from torchloo.svm.tolerances import CLEAR, CLOSE, LEAST, NEAR_MARGIN, SINGLE, USEFUL

__all__ = ["first_solutions", "interior_point", "solve_to_rounding"]

_WORTH_FACTORING = 255  # variables: below, nothing is gained
_WORTH_SAMPLING = 1100  # variables: below, the plain interior point is as fast
_WORTH_SHRINKING = 300  # live variables
_WORTH_LEAVING = 100  # the same of several machines
_STEPS = 60  # of Newton at most
_UNSEEN_STEPS = 20  # as many as nearly all machines need, where all must go on
_ROUGH_STEPS = 10  # beyond which float32 is what holds a machine up
_PATIENCE = 8  # steps that may fail to lower the gap before rounding is known to hold it up


def first_solutions(K: Tensor, y: Tensor, box: Tensor, kernel: Tensor | None = None) -> Interior:
    """Interior points of B machines with K (B, m, m), or `kernel` (B,) of several K, y and box (B, m).

    Those whose K has low rank by its factor. On a CPU large K one after another, on the variables that a
    third of them finds interesting; on an accelerator all at once, so that it is waited for less often.
    """
    B, m = box.shape
    which = list(range(B)) if kernel is None else kernel.tolist()
    factors: list[Tensor | None] = [None] * len(K)
    if m > _WORTH_FACTORING:
        factors = low_rank_factors(K)
    if may_look(K) and (B == 1 or m > _WORTH_SAMPLING):
        parts = zip(which, y, box, strict=True)
        return _stack([_one_solution(K[g], labels, own, factors[g]) for g, labels, own in parts])
    systems = _systems(K, factors, which)
    found = [(rows, interior_point(system, y[rows], box[rows])) for rows, system in systems]
    order = torch.cat([rows for rows, _ in found]).argsort()
    fields = zip(*(point for _, point in found), strict=True)
    return Interior(*(torch.cat(field)[order] for field in fields))


def _systems(
    K: Tensor, factors: list[Tensor | None], which: list[int]
) -> list[tuple[Tensor, Dense | LowRank]]:
    """Machines of K[which[b]] with factors of like ranks, padded to the largest, and those without one."""
    groups: dict[int, list[int]] = {}
    for b, g in enumerate(which):
        factor = factors[g]
        groups.setdefault(0 if factor is None else factor.shape[1].bit_length(), []).append(b)
    systems: list[tuple[Tensor, Dense | LowRank]] = []
    for machines in groups.values():
        rows, matrices = torch.tensor(machines, device=K.device), [which[b] for b in machines]
        own = [factor for g in matrices if (factor := factors[g]) is not None]
        if not own:
            systems.append((rows, Dense(K if matrices == list(range(len(K))) else K[matrices])))
            continue
        rank = max(factor.shape[1] for factor in own)
        F = torch.stack([pad(factor, (0, rank - factor.shape[1])) for factor in own])
        systems.append((rows, LowRank(F)))
    return systems


def _stack(points: list[Interior]) -> Interior:
    """Points of single machines as one record."""
    if len(points) == 1:
        return Interior(*(field[None] for field in points[0]))
    return Interior(*(torch.stack(field) for field in zip(*points, strict=True)))


def _one_solution(K: Tensor, y: Tensor, box: Tensor, factor: Tensor | None) -> Interior:
    """One machine, by the factor of low rank if there is one."""
    if factor is not None:
        return interior_point(LowRank(factor), y, box)
    return _by_sample(K, y, box) if len(y) > _WORTH_SAMPLING else interior_point(Dense(K), y, box)


def _by_sample(K: Tensor, y: Tensor, box: Tensor) -> Interior:
    """One machine on the variables of interest.

    The SVM of a third of them, its boxes three times as large, shows which margins are far above 0;
    the rest is solved, and whatever violates its margin then comes in.
    """
    generator = torch.Generator("cpu").manual_seed(1)  # rows may come in an order that means something
    shuffled = torch.randperm(len(y), generator=generator, device="cpu")
    sample = shuffled[: len(y) // 3].sort().values.to(y.device)
    if bool((y[sample] == y[sample[0]]).all()):
        return interior_point(Dense(K), y, box)

    def solved(index: Tensor, boxes: Tensor, gap: float) -> tuple[Interior, Tensor]:
        """The machine of some variables, and y f - 1 of all."""
        rows = K.index_select(0, index)
        part = interior_point(Dense(rows.index_select(1, index)), y[index], boxes, gap)
        return part, y * ((part.alpha * y[index]) @ rows + part.bias) - 1

    live = solved(sample, 3 * box[sample], USEFUL)[1] < NEAR_MARGIN
    none = torch.zeros_like(box)
    while True:
        index = live.nonzero()[:, 0]
        part, margin = solved(index, box[index], CLEAR)
        missed = ~live & (margin < CLOSE)
        if not bool(missed.any()):
            alpha, upper = (none.index_copy(0, index, x) for x in (part.alpha, part.upper))
            return Interior(alpha, (none + 1).index_copy(0, index, part.lower), upper, part.bias)
        live |= margin < NEAR_MARGIN / 3


def interior_point(
    system: Dense | LowRank,
    y: Tensor,
    box: Tensor,
    gap: float = CLEAR,
    pull: Tensor | None = None,
    total: Tensor | None = None,
    look: bool = True,
) -> Interior:
    """Solve one SVM dual, or several, to a relative gap by Mehrotra's predictor and corrector.

        max sum alpha - 1/2 |sum alpha_i y_i phi_i|^2,  y^T alpha = 0,  0 <= alpha <= box

    Works on a = alpha * y, so that the Newton matrix is K + diag(theta) and K is never copied with
    signs. The number of steps (about 15) hardly depends on the box, unlike that of an SMO. Variables
    that are plainly on their way to a bound are put there, and the rest goes on without them: what is
    more than the sets holds only once the margins of all have been checked, as exact.py does.

    Several machines take their steps together; those that are solved rest, and leave once they are half
    of all. The first steps, of which large machines gain, are rough: the sets come from the last ones.

    Args:
        system: K with mean diagonal 1, (m, m) or (B, m, m), or its factor.
        y: labels, (m,) or (B, m).
        box: upper bounds, (m,) or (B, m).
        gap: relative duality gap to stop at.
        pull, total: what variables that are held add to u = K (alpha * y), (B, m), and to y^T alpha, (B, 1).
        look: whether values may be read; else all machines take the same number of steps.

    Cost m^3 / 3 a step, or m p^2 for K of rank p; less once variables have settled. Memory: one
    copy of K, or of the factor for each machine. Reference: Fine and Scheinberg 2001.
    """
    point, whole = Iterate.start(y, box, held=pull is not None), None
    live = _Live.every(point, pull, total)
    rough = Rough(system) if look and box.ndim > 1 and box.shape[1] > _WORTH_FACTORING else None
    for number in range(_STEPS if look else _UNSEEN_STEPS):
        point.look(system, live.pull, live.total)
        point.stuck = point.solved(gap)
        left = live.machine if point.single or not look else (~point.stuck[:, 0]).nonzero()[:, 0]
        if point.stuck is True or not left.numel():
            break
        if 2 * left.numel() <= live.machine.numel():
            whole = live.entered(whole, point)
            system, point, live, rough = system.machines(left), point.take(left), live.take(left), None
            point.look(system, live.pull, live.total)
        if rough is not None and (number >= _ROUGH_STEPS or not point.far_from(SINGLE)):
            rough = None
        point.step(rough or system)
        if not look or live.variable.shape[-1] <= (_WORTH_SHRINKING if point.single else _WORTH_LEAVING):
            continue
        gone, at_bound = point.settled(live.total)
        most = int((~gone).sum(-1).max())
        if 3 * most < 2 * gone.shape[-1]:
            whole = live.entered(whole, point)
            live, system, point = live.without(system, point, gone, at_bound, most)
            rough = None if rough is None else Rough(system)
    return live.entered(whole, point)


def solve_to_rounding(K: Tensor, y: Tensor, box: Tensor, steps: int = 100) -> Interior:
    """The points of B machines with the least duality gaps: near the end rounding drives them about."""
    system, point = Dense(K), Iterate.start(y, box)
    best, least = point.interior(), torch.full_like(point.bias, torch.inf)
    waited = torch.zeros_like(least)
    for _ in range(steps):
        point.look(system)
        now = point.relative_gap()
        better = now < least
        pairs = zip(best, point.interior(), strict=True)
        best = Interior(*(torch.where(better, new, old) for old, new in pairs))
        least, waited = torch.where(better, now, least), (waited + 1).masked_fill_(better, 0)
        point.stuck = point.stuck | (least <= LEAST) | (waited > _PATIENCE)
        if bool(point.stuck.all()):
            break
        point.step(system)
    return best


class _Live(NamedTuple):
    """The variables of one machine, or of several, that have not settled; and what the others add."""

    machine: Tensor
    """Which machines are left, (B,); 0 if there is one, (1,)."""
    variable: Tensor
    """(v,) or (B, v)."""
    pull: Tensor | None
    """To u, (v,) or (B, v); None: nothing."""
    total: Number
    """To y^T alpha."""

    @classmethod
    def every(cls, point: Iterate, pull: Tensor | None, total: Number | None) -> "_Live":
        """All; some that are held may add to u and to y^T alpha."""
        sizes = len(point.box) if point.box.ndim > 1 else 1, point.box.shape[-1]
        machine, variable = (torch.arange(size, device=point.box.device) for size in sizes)
        if total is None:
            total = 0.0 if point.single else torch.zeros_like(point.bias)
        return cls(machine, variable.expand_as(point.box), pull, total)

    def take(self, rows: Tensor) -> "_Live":
        """Those of the machines at `rows`."""
        pull = None if self.pull is None else self.pull[rows]
        return _Live(self.machine[rows], self.variable[rows], pull, self.total[rows])

    def without(
        self, system: Dense | LowRank, point: Iterate, gone: Tensor, at_bound: Tensor, most: int
    ) -> tuple["_Live", Dense | LowRank, Iterate]:
        """What is left when those of a mask go to bounds, where they have alpha * y as in `at_bound`.

        Machines of which fewer than `most` are left keep some of the others.
        """
        keep = gone.to(torch.uint8).argsort(dim=-1, stable=True)[..., :most]
        a = at_bound.scatter(-1, keep, 0.0)
        u = system.product(a) if self.pull is None else system.product(a) + self.pull
        total = self.total + point.total(a)
        live = _Live(self.machine, self.variable.gather(-1, keep), u.gather(-1, keep), total)
        return live, system.take(keep), point.without(keep)

    def entered(self, whole: Interior | None, point: Iterate) -> Interior:
        """The point entered into the whole solution; None: it is the whole, nothing has been entered yet."""
        new = point.interior()
        if whole is None:
            return new
        places = (self.variable,) if point.single else (self.machine[:, None], self.variable)
        alpha, lower, upper = (old.index_put(places, x) for old, x in zip(whole[:3], new[:3], strict=True))
        return Interior(alpha, lower, upper, whole.bias.index_copy(0, self.machine, new.bias))
