"""Sets of rows refitted where their closed form would cancel.

Note [refits by triangles]
Where 1 - h is lost, little is left to learn from without the set L, so that the normal matrix C_L of the
other rows is badly conditioned. It is never formed. A QR factorisation of the weighted rows
[sqrt(zeta) (z, y)] and of a root of the penalty leaves a triangle [F d; 0 .], with F^T F = C_L and
coefficients F^{-1} d, and squares no condition. The triangle of the rows in no set is found block by block,
once for all sets; each of these adds the rows of the others to it. Then
P_LL^{-1} = Omega_L^{-1} + Z_L C_L^{-1} Z_L^T. Rows in memory are a single block; whole.py adds derivatives of
every order to what is found of them.

A bias is one more feature, which is 1. Features are taken about the mean of the rows that are left to learn
from: about another point, such as the mean of all rows where L outweighs the others, a feature that these
share would be like a second bias, and all that tells the two apart would be a tiny penalty. The differences
come before the weights, so that rows that are equal stay so; rows in no set are taken about their own mean.
A mean is that of the differences to the heaviest row, and so exact where rows are equal or one is left: an
ulp of rounding, divided by a tiny penalty, would be a coefficient.

Note [derivatives of refits]
The residuals of a refitted set are Y_L - Z_L p for the coefficients p without it, of the other rows alone,
and its variances reg (1 / zeta + diag(Z_L H)) with H = C_L^{-1} Z_L^T. With cotangents rbar and vbar of the
two, v = H rbar, G = diag(reg vbar), and the residuals e of that machine, for features z about the mean of the
other rows,

    zbar = -p rbar^T + 2 H G,                      Ybar = rbar,         zetabar = -G / zeta^2,
    zbar = zeta (p v^T z - v e^T - 2 H G H^T z),   Ybar = -zeta v^T z,  zetabar = -(v^T z) e - z^T H G H^T z

in the set and outside of it, and the cotangent of the penalty is (v p^T + p v^T) / 2 - H G H^T.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchloo.factors import least_squares, triangle
from torchloo.guards import Guard
from torchloo.primal.block import Block
from torchloo.primal.collective import Peers
from torchloo.primal.machines import Machines
from torchloo.primal.sink import Sink

if TYPE_CHECKING:
    from torchloo.primal.solved import StreamFit

__all__ = ["Effect", "Learning", "Lost", "Refitted", "machines_without", "refit"]

# So many rows in sets that are refitted together: each set is refitted with those of the others.
_CHUNK = 1 << 8

Lost = dict[tuple[int, int], list[tuple[Tensor, bool]]]
"""Sets of rows, ascending, and whether they have no more rows than features, by regularisation and output."""

Part = tuple[int, Tensor, Tensor, Tensor]
"""First number of rows, features (b, p') with a 1 for the bias, roots of weights (b, 1), targets (b, c)."""


class Learning(NamedTuple):
    """What machines of one regularisation learn from."""

    parts: Callable[[], Iterable[Part]]
    """All rows of this process, as often as there are passes."""
    n: int
    """Number of rows of this process."""
    penalty: Tensor
    """[B 0], (p', p' + c), with B^T B the penalty."""
    bias: bool
    others: Peers
    guard: Guard


class Without(NamedTuple):
    """A machine without a set of rows, and these rows."""

    rows: Tensor
    """Their numbers, (s,)."""
    X: Tensor
    """Features about the first mean, (s, p'); these are ascending, whatever the order of the numbers."""
    root: Tensor
    """Square roots of the weights, (s, 1)."""
    Y: Tensor
    """(s, c)."""
    centre: tuple[Tensor, Tensor]
    """Means (1, p') of the rows in no set, and of those outside this one about it; taken off one by one."""
    coef: Tensor
    """(p', c), for features about these means."""


class Refitted(NamedTuple):
    """A set that was refitted, for one regularisation r and output j (0 if outputs share theirs)."""

    r: int
    j: int
    machine: Without
    spread: Tensor
    """C_L^{-1} X_L^T, (p', s), for features about the means of the machine."""


class Effect(NamedTuple):
    """How the machine without a refitted set depends on the other rows; Note [derivatives of refits]."""

    j: int
    """The output, or 0 if outputs share a regularisation."""
    centre: tuple[Tensor, Tensor]
    """Means (1, p') of the features, taken off one after the other."""
    coef: Tensor
    """p, (p', c)."""
    v: Tensor
    """(p', c)."""
    H: Tensor
    """(p', s)."""
    g: Tensor
    """The diagonal of G, (s,)."""

    def to(self, like: Tensor) -> "Effect":
        """The same on the device of a tensor."""
        origin, mean = self.centre
        return Effect(self.j, (origin.to(like), mean.to(like)), *(t.to(like) for t in self[2:]))

    def penalty(self) -> Tensor:
        """Cotangent of the penalty, (p', p')."""
        outer = self.v @ self.coef.mT
        return (outer + outer.mT) / 2 - self.H * self.g @ self.H.mT

    def on(self, features: Tensor, Y: Tensor, zeta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Cotangents of features (p', b), targets (b, c) and weights (b,) of rows outside the set."""
        z = features
        for part in self.centre:
            z = z - part.mT
        e, vz, Hz = Y - z.mT @ self.coef, self.v.mT @ z, self.H.mT @ z  # (b, c), (c, b), (s, b)
        GHz = self.g.unsqueeze(-1) * Hz
        zbar = zeta * (self.coef @ vz - self.v @ e.mT - 2 * self.H @ GHz)
        return zbar, -(zeta * vz).mT, -(vz.mT * e).sum(-1) - (Hz * GHz).sum(0)


def _heaviest(X: Tensor, zeta: Tensor) -> Tensor:
    """The features (1, p') of the row with the largest weight, of (k, p') and (k, 1); 0 for the bias."""
    row = X[zeta[:, 0].argmax()].unsqueeze(0).clone()
    row[:, -1] = 0
    return row


def _mean(sums: Tensor) -> Tensor:
    """Mean (1, p') of features from their weighted sums, whose last is the weight; 0 where there is none."""
    mean = torch.zeros_like(sums)
    mean[:, :-1] = sums[:, :-1] / torch.where(sums[:, -1:] > 0, sums[:, -1:], 1.0)
    return mean


@torch.no_grad()
def machines_without(learning: Learning, sets: list[Tensor]) -> Iterator[tuple[Without, Tensor]]:
    """Machines without sets (s,) of rows in memory, and their F: a pass for each few of them."""
    for some in _together(sets, _CHUNK):
        yield from _Round(learning, some).machines()


def _together(sets: list[Tensor], limit: int) -> list[list[Tensor]]:
    """The sets in lists, each of at most so many rows, or of one set."""
    together: list[list[Tensor]] = []
    for rows in sets:
        if not together or sum(map(len, together[-1])) + len(rows) > limit:
            together.append([])
        together[-1].append(rows)
    return together


def refit(solved: "StreamFit", machines: Machines, sink: Sink, lost: Lost) -> list[Refitted]:
    """Write the rows of lost sets: a pass for as many small sets as a block has rows, or for one large."""
    others, refitted = solved.others, []
    for r, j in sorted({key for keys in others.gather(list(lost)) for key in keys}):
        learning, outputs = _learning(solved, machines, r, j), machines.outputs_of(j)
        limit = max(solved.size, len(solved.moments.S) + 1)
        for some, large in _rounds(lost.get((r, j), []), limit, others):
            for one, F in _Round(learning, some, large).machines():
                if large:
                    _, X, root, Y = _read(solved, solved.stream.take(solved.function, one.rows), outputs)
                    one = one._replace(X=X - one.centre[0], root=root, Y=Y)
                V = one.X - one.centre[1]
                half = torch.linalg.solve_triangular(F.mT, V.mT, upper=False)
                variance = machines.regs[r, j] * (1 / one.root.square() + half.square().sum(0).unsqueeze(-1))
                sink.overwrite(one.rows, r, j, outputs, one.Y - V @ one.coef, variance)
                spread = torch.linalg.solve_triangular(F, half, upper=True)
                refitted.append(Refitted(r, j, one, spread))
            others.run(learning.guard.check)
    return refitted


def _learning(solved: "StreamFit", machines: Machines, r: int, j: int) -> Learning:
    """What one of the machines of a stream learns from."""
    n, moments, guard = solved.stream.n, solved.moments, Guard(solved.function)
    outputs, bias = machines.outputs_of(j), moments.centre
    assert n is not None
    root = machines.regs[r, j].sqrt() * solved.expansion.penalty_root(guard, moments)
    penalty = pad(root, (0, bias + moments.T[:, outputs].shape[1], 0, bias))
    given = (n, penalty, bias, solved.others, guard)
    return Learning(lambda: (_read(solved, part, outputs) for part in solved.blocks("refits")), *given)


def _read(solved: "StreamFit", part: Block, outputs: slice) -> Part:
    """Rows of a block for `Learning`, about the means of all rows."""
    features, Y = solved.about_means(part)
    X = pad(features.mT, (0, solved.moments.centre), value=1.0)
    return part.start, X, part.weight.double().sqrt().unsqueeze(-1), Y[:, outputs]


def _rounds(
    sets: list[tuple[Tensor, bool]], limit: int, others: Peers
) -> Iterator[tuple[list[Tensor], bool]]:
    """Small sets, together of at most so many rows; then, process after process, one large set at a time."""
    together = _together([rows for rows, small in sets if small], limit)
    for k in range(max(others.gather(len(together)))):
        yield (together[k] if k < len(together) else []), False
    large = [rows for rows, small in sets if not small]
    for rank, count in enumerate(others.gather(len(large))):
        for k in range(count):
            yield ([large[k]] if rank == others.rank else []), True


class _Round:
    """Machines without a few sets of this process, beside those of the others, by one pass.

    Sets may overlap. A large one is the only one of all processes, and its rows are not kept.

    Attributes:
        origin: mean (1, p') of the features of the rows in no set.
        outside: triangle (m, p' + c) of these rows, about it.
        number: of the rows in sets, (k,).
        inside: their features about the origin (k, p'), roots of weights (k, 1) and targets (k, c).
    """

    number: Tensor
    inside: list[Tensor]

    def __init__(self, learning: Learning, sets: list[Tensor], large: bool = False) -> None:
        self.learning, self.sets, self.large, others = learning, sets, large, learning.others
        self.first = sum(others.gather(learning.n)[: others.rank])  # so many rows have the processes before
        self.marks = torch.zeros(learning.n, dtype=torch.bool, device="cpu")  # which rows are in sets
        for rows in sets:
            self.marks[rows.cpu()] = True
        # The penalty counts once, whatever the number of processes.
        self.outside = learning.penalty if others.rank == 0 else torch.zeros_like(learning.penalty)
        self.origin = torch.zeros_like(self.outside[:1, : len(self.outside)])

    def _move_origin(self) -> None:
        """Find the mean of the rows in no set."""
        sums, near = torch.zeros_like(self.origin), None
        for start, X, root, _ in self.learning.parts():
            outside = ~self.marks[start : start + len(X)]
            zeta = root.square() * outside.unsqueeze(-1).to(root.device)
            if near is None and bool(outside.any()):
                near = _heaviest(X, zeta)
            if near is not None:
                sums += zeta.mT @ (X - near)
        self.origin = _mean(sums) if near is None else near + _mean(sums)

    def _pass(self) -> list[Tensor]:
        """The triangle of the rows in no set; the others with their numbers."""
        found = []
        for start, X, root, Y in self.learning.parts():
            X, inside = X - self.origin, self.marks[start : start + len(X)].to(X.device)
            weighted = root * torch.cat([X, Y], -1) * ~inside.unsqueeze(-1)
            self.outside = triangle(torch.cat([self.outside, weighted]))
            kept = (inside & (not self.large)).nonzero()[:, 0]
            found.append((self.first + start + kept, X[kept], root[kept], Y[kept]))
        return [self.outside, *(torch.cat(parts) for parts in zip(*found, strict=True))]

    def _gather(self) -> None:
        """Gather what all processes have."""
        others, device = self.learning.others, self.origin.device
        host = device if others.count == 1 else torch.device("cpu")
        if self.learning.bias:
            others.run(self._move_origin)
            self.origin = others.gather(self.origin.to(host))[0].to(device)  # any will do, if it is the same
        own = [t.to(host) for t in others.run(self._pass)]
        everyone = (torch.cat(t).to(device) for t in zip(*others.gather(own), strict=True))
        outside, self.number, *self.inside = everyone
        self.outside = triangle(outside) if others.count > 1 else outside

    def machines(self) -> Iterator[tuple[Without, Tensor]]:
        """Those without the sets of this process, and F (p', p') of each."""
        self._gather()
        for rows in self.sets:
            among = torch.isin(self.number, self.first + rows.to(self.number))
            mean, F, coef = self._solve(*(t[~among] for t in self.inside))
            X, root, Y = (t[among] for t in self.inside)
            yield Without(rows, X, root, Y, (self.origin, mean), coef), F

    def _solve(self, X: Tensor, root: Tensor, Y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The mean (1, p') of the rows in no set and of others (k, ...), F (p', p'), coefficients (p', c)."""
        p, outside = X.shape[-1], self.outside.clone()
        mean = torch.zeros_like(self.origin)
        if self.learning.bias:
            zeta, ones = root.square(), outside[:, p - 1 : p]
            if len(X):
                mean = _heaviest(X, zeta)
            inner, outer = zeta.mT @ (X - mean), ones.mT @ (outside[:, :p] - ones * mean)
            mean = mean + _mean(inner + outer)
            outside[:, : p - 1] -= ones * mean[:, :-1]
        rows = torch.cat([outside, root * torch.cat([X - mean, Y], -1)])
        return mean, *least_squares(rows, p, self.learning.guard)
