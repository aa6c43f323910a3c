"""Solved machines of one stream: features rotated so that every normal matrix is diagonal.

Note [rotated features]
With the moments of Note [moments] and A such that A^T (S + reg I) A is diagonal, diag(1/f), a row of
centred features z becomes u = A^T z, the coefficients q = A^{-1} p = f * A^T T, and

    z^T p = u^T q,    z^T (S + reg I)^{-1} z = sum_k f_k u_k^2.

For one regularisation A is the inverse transposed Cholesky factor and f = 1; for many of them, A holds
the eigenvectors of S and f_k = 1 / (w_k + reg). All leverages and outputs of a block are then two thin
products with u, and u is the only large one. A batch of problems is an axis in front of all others.

Note [folding]
The features of a sparse machine are z = L^{-1} k for a kernel column k, so u = (A^T L^{-1}) k - A^T mean:
one product in place of two. With F = A^T L^{-1}, rounding changes u_j by eps |F_j| |k|: much, where the
basis is nearly dependent. A block takes two products if that could change a leverage, or an output
measured by the spread of the targets, by more than `_FOLD`; rows with a large leverage, whose residual is
divided by a small 1 - h, always do.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from torchloo.blocks import NOT_DEFINITE
from torchloo.factors import (
    ILL_CONDITIONED,
    ILL_CONDITIONED_PATH,
    SINGLE,
    Eigen,
    inverse_factor,
    inverse_factor_of,
    root_of,
    trusted,
)
from torchloo.guards import Guard
from torchloo.panels import LowerInverse, matmul_into, room_like, times_lower
from torchloo.primal.block import Block
from torchloo.primal.moments import Moments
from torchloo.problem import Given

__all__ = [
    "LARGE",
    "Expansion",
    "ImpreciseError",
    "Machines",
    "ProblemsApartError",
    "one_machine",
    "path_machines",
    "together",
    "transposed",
]

_FOLD = 1e-11

# Up to this condition, times the square root of the number of rows, coefficients need no step of refinement:
# errors of the normal equations reach an output by its own small part of a feature.
_NO_STEP = 2e5

# Above this condition, singular values lose the least of their kind, and coefficients of a path with them.
_LARGEST_OF_PATH = 1e18

# The squared distance from the origin, in units of the variance, from which refinement is worth while.
_FAR = 1e6

# A leverage from which on residuals, soon divided by a small 1 - h, take no shortcut.
LARGE = 0.9


class ImpreciseError(Exception):
    """Products in float32 are not accurate enough; all is done again in float64."""


class ProblemsApartError(Exception):
    """Problems of a batch with rows or sets that are to be refitted; these are solved one by one."""

    def __init__(self, numbers: list[int]) -> None:
        super().__init__(numbers)
        self.numbers = numbers


def transposed(X: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    """Columns of rows that are features already."""
    return X.mT


@dataclass(eq=False)
class Expansion:
    """How features come from inputs: z = L^{-1} k(x), or k(x) itself."""

    evaluate: Callable[[Tensor, Sequence[Tensor]], Tensor]
    """Columns k (..., p, b) of inputs (..., b, d) and the tensors, differentiable in both."""
    count: int
    """p, or 0 where it is not known before rows are."""
    tensors: Sequence[Tensor] = ()
    """What k depends on beside the inputs."""
    gram: Callable[[Sequence[Tensor]], Tensor] | None = None
    """K_zz (p, p) from the tensors, differentiable, where there is a factor."""
    factor: Tensor | None = None
    """L (p, p), lower triangular, of K_zz over the entries in use; or None."""
    support: Tensor | None = None
    """What k is evaluated at, (p, d), or None."""
    kept: Tensor | None = None
    """Boolean (p,), which entries of k are in use, or None for all."""
    inverse: LowerInverse | None = None
    """That of the factor, where it is known; then all entries are in use."""
    single: bool = True
    """Whether columns of float32 rows may be float32."""
    penalty: Tensor | None = None
    """What the regularisation multiplies, (..., p, p) in float64; None for the identity. Only for single
    regularisations."""
    kind: torch.dtype = field(default=torch.float64, init=False)
    """The dtype of products."""
    origin: Tensor | None = field(default=None, init=False)
    """What is subtracted from columns, (..., p, 1); see `begin`."""
    mask: Tensor | None = field(default=None, init=False)
    """Ones and zeros (p, 1) for entries that are in use or not, or None where all are."""
    _room: Tensor | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._given = [Given.of(t) for t in self.tensors]
        self._held = [t.detach().clone() for t in self.tensors]  # passes find what was solved
        if self.factor is None or self.inverse is not None:
            return
        self.mask = None if self.kept is None else self.kept.double().unsqueeze(-1)
        self.inverse = LowerInverse(self.factor)
        self.inverse.decide(self.inverse.good.tolist())

    @property
    def size(self) -> int:
        """Rows in a block, unless the stream says otherwise: some MB of features, or a few thousand rows.

        Larger ones would be taken from the system, and given back to it, every time.
        """
        if self.factor is not None:
            return 256 * max(1, 2800 // len(self.factor))
        return min(max(2048, 256 * ((1 << 10) // max(1, self.count))), 8192)

    @torch.no_grad()
    def columns(self, X: Tensor, k: Tensor | None = None) -> Tensor:
        """k - origin (..., p, b) of inputs (..., b, d), of the dtype of products; may be overwritten.

        k is evaluated unless it is given. The memory is used again for the next columns.
        """
        k = self.evaluate(X.detach(), self._held) if k is None else k.detach()
        if self.factor is not None:
            k = k.contiguous()  # so that panels of features are contiguous
        if self.mask is not None:
            k = k * self.mask
        if self.origin is None:
            return k.to(self.kind, copy=True)
        return torch.sub(k.to(self.kind), self.origin.to(self.kind), out=self._room_for(k))

    def keep_columns(self) -> None:
        """Leave the last columns where they are."""
        self._room = None

    def _room_for(self, k: Tensor) -> Tensor:
        """Memory of the columns before these: new memory takes longer than what is done in it."""
        room = self._room
        if room is None or room.shape != k.shape or room.dtype != self.kind or room.is_inference():
            self._room = room = torch.empty_like(k, dtype=self.kind)
        return room

    def begin(self, mean: Tensor, dtype: torch.dtype) -> Tensor:
        """Take the mean (..., p, 1) of the first columns as origin, which a bias absorbs: it saves digits.

        It is a number of the dtype of the rows, so that nothing is rounded twice in the difference. The mean
        is that with the weights of the rows: heavy rows, whose differences to it matter most, are near it.
        """
        self.origin = mean.to(dtype)
        return self.origin

    def away(self, features: Tensor) -> Tensor:
        """Features (..., p, 1) about the origin as they are without it."""
        if self.origin is None:
            return features
        return features + self.features(self.origin.to(torch.float64, copy=True))

    def whole(self, X: Tensor, tensors: Sequence[Tensor]) -> Tensor:
        """Z (..., n, p) of all rows, differentiable, in float64."""
        k = self.evaluate(X, tensors).double()
        if self.gram is None:
            return k.mT
        Kzz = self.gram(tensors).double()
        if self.mask is not None:
            k = k * self.mask
            Kzz = Kzz * self.mask * self.mask.mT + torch.diag_embed(1 - self.mask[:, 0])
        return torch.linalg.solve_triangular(torch.linalg.cholesky(Kzz), k, upper=False).mT

    def penalised(self, coef: Tensor) -> Tensor:
        """Coefficients (..., R, c, p) times the penalty."""
        return coef if self.penalty is None else together(coef, self.penalty)

    def penalty_root(self, guard: Guard, moments: Moments) -> Tensor:
        """B (..., p, p) with B^T B the penalty, on the device of the moments of the rows."""
        if self.penalty is not None:
            return root_of(self.penalty, guard, moments.dtype)
        S = moments.S
        return torch.eye(S.shape[-1], dtype=S.dtype, device=S.device)

    @property
    def has_changed(self) -> bool:
        """Whether what the features depend on was changed in place: a gradient would be that of another."""
        return any(given.has_changed for given in self._given)

    def features(self, columns: Tensor) -> Tensor:
        """Z (..., p, b) of columns (..., p, b), which the caller may overwrite."""
        return columns if self.inverse is None else self.inverse(columns)


@dataclass
class Machines:
    """R machines that differ in their regularisation; see Note [rotated features]."""

    expansion: Expansion
    moments: Moments
    """Of all rows."""
    rotation: Tensor
    """A^T, (..., p, p)."""
    triangular: bool
    """Whether A^T is lower triangular."""
    f: Tensor
    """(..., R, c', p) with c' = 1, or c where every output has a regularisation of its own."""
    regs: Tensor
    """(..., R, c')."""
    q: Tensor
    """Coefficients, (..., R, c, p)."""
    shift: Tensor
    """What is added to every output beside the mean of the targets, (..., R, c), with digits of its own."""
    least: Tensor
    """Rows and sets whose 1 - h is below this are refitted, (..., R, c')."""
    refined: bool
    """Whether no step of refinement is needed, or it has been made."""
    rounding: Tensor
    """How far f^{1/2} u may differ between two evaluations of the same kernel columns, (...)."""
    by_folding: Tensor
    """What Note [folding] may change a leverage by, or an output in units of the spread, (...)."""
    folded: Tensor | None = None
    """F of Note [folding], (..., p, p), where there is a factor."""
    fold: bool = False
    """Whether it may be used."""
    moved: bool = False
    """Whether a step of refinement has been made."""
    unread: tuple[Tensor, ...] = ()
    """The largest condition, distance from the origin and rounding by folding, of products in float32."""
    _room: Tensor | None = None
    """Memory of rotated features that are no longer needed."""

    @property
    def offset(self) -> Tensor:
        """What is added to every output, (..., R, c)."""
        return self.moments.mean_y + self.shift

    @property
    def has_bias(self) -> bool:
        """Whether there is an unpenalised bias."""
        return self.moments.centre

    @cached_property
    def f_with_bias(self) -> Tensor:
        """f and, if there is a bias, what it adds to leverages, (..., R, c', p')."""
        if not self.has_bias:
            return self.f
        return torch.cat([self.f, self.moments.per_weight.unsqueeze(-1).expand_as(self.f[..., :1])], -1)

    @cached_property
    def narrow(self) -> Tensor:
        """A^T in the dtype of products."""
        return self.rotation.to(self.expansion.kind)

    @property
    def forth(self) -> Tensor:
        """The derivative of u in the columns, F or A^T."""
        return self.rotation if self.folded is None else self.folded

    @property
    def each(self) -> list[tuple[int, int, slice]]:
        """All regularisations: r, j, and the outputs that share it."""
        R, own = self.regs.shape[-2:]
        return [(r, j, self.outputs_of(j)) for r in range(R) for j in range(own)]

    def outputs_of(self, j: int) -> slice:
        """The outputs that have the regularisations (R,) of column j."""
        return slice(None) if self.regs.shape[-1] == 1 else slice(j, j + 1)

    def rotated(
        self,
        X: Tensor,
        fold: bool = True,
        ones: bool = False,
        k: Tensor | None = None,
        again: bool = False,
        centred: Tensor | None = None,
    ) -> Tensor:
        """u (..., p, b) of inputs (..., b, d), by two products unless `fold`.

        With `ones` there is one more row of ones for a bias. k are the columns of X, and `centred` its
        features about the mean, where they are known. With `again` they are in the memory of the last ones.
        """
        columns = self.expansion.columns(X, k) if centred is None else centred
        p, ones = self.rotation.shape[-1], ones and self.has_bias
        shape = (*columns.shape[:-2], p + ones, columns.shape[-1])
        out = self._room
        if not again or out is None or out.shape != shape or out.is_inference():
            out = room_like(columns, p + ones)
        self._room = out if again else None
        out[..., p:, :] = 1.0
        u = out[..., :p, :]
        if centred is None and fold and self.fold:
            assert self.folded is not None
            shift = (self.rotation @ self.moments.mean_z).to(columns.dtype)
            self.times(self.folded.to(columns.dtype), columns, u).sub_(shift)
            return out
        if centred is None:
            centred = self.expansion.features(columns).sub_(self.moments.mean_z.to(columns.dtype))
        self.times(self.narrow, centred, u)
        return out

    def times(self, matrix: Tensor, V: Tensor, out: Tensor) -> Tensor:
        """The product with a matrix that is triangular if A^T is."""
        return times_lower(matrix, V, out) if self.triangular else matmul_into(out, matrix, V)

    def outputs(self, u: Tensor, q: Tensor) -> Tensor:
        """q u, (..., R, c, b), for coefficients q (..., R, c, p), in float64."""
        return together(q.to(u.dtype), u).double()

    def residuals(self, u: Tensor, part: Block) -> Tensor:
        """Training residuals of a block, (..., R, c, b)."""
        R, c = self.shift.shape[-2:]
        centred = (part.Y - self.moments.mean_y).mT.unsqueeze(-3)  # (..., 1, c, b), in float64 like the mean
        if self.moved:
            centred = centred - self.shift.unsqueeze(-1)  # (..., R, c, b)
        if u.ndim == 2 and u.dtype == torch.float64 and (c == 1 or len(centred) == R):
            return torch.addmm(centred.flatten(0, 1), self.q.flatten(0, 1), u, alpha=-1).unflatten(0, (R, c))
        return centred - together(self.q.to(u.dtype), u)

    def sums(self, u: Tensor, e: Tensor) -> Tensor:
        """e u^T, (..., R, c, p), for rows with residuals or the like, (..., R, c, b)."""
        return together(e.to(u.dtype), u.mT)

    def norms(self, u: Tensor, overwrite: bool = False) -> Tensor:
        """sum_k f_k u_k^2, (..., R, c', b), in float64; u may be overwritten where it is not needed again."""
        squares = u.square_() if overwrite else u.square()
        if self.triangular:  # then f is 1
            return squares.sum(-2).double()[..., None, None, :]
        return together(self.f.to(u.dtype), squares).double()

    def add_gradient(self, gradient: tuple[Tensor, Tensor], u: Tensor, weighted: Tensor) -> None:
        """Add zeta e u^T and zeta e of a block to their sums, (..., R, c, p) and (..., R, c)."""
        gradient[0].add_(self.sums(u, weighted))
        gradient[1].add_(weighted.sum(-1))

    def step(self, gradient: Tensor) -> Tensor:
        """What a step of refinement adds to q, from sum zeta e u^T of the residuals e, (..., R, c, p)."""
        penalty = self.q
        if self.triangular:
            penalty = together(self.expansion.penalised(together(penalty, self.rotation)), self.rotation.mT)
        return self.f * (gradient - self.regs.unsqueeze(-1) * penalty)

    def move(self, step: Tensor, shift: Tensor) -> None:
        """Add to the coefficients, (..., R, c, p), and to the offset, (..., R, c)."""
        self.q, self.shift = self.q + step, self.shift + shift
        self.refined = self.moved = True

    def settle(self, read: Sequence[float]) -> bool:
        """Find, from the values of `unread`, whether products in float32 are accurate."""
        if read:
            condition, distance, folding = read
            if not (condition < SINGLE and distance < _FAR and self.decide_folding(folding)):
                return False
            self.unread = ()
        return True

    def decide_folding(self, rounding: float) -> bool:
        """Fold from now on if that rounds little and there is a factor; whether it rounds little."""
        narrow = self.expansion.kind != torch.float64
        fine = rounding <= (SINGLE * torch.finfo(self.expansion.kind).eps if narrow else _FOLD)
        self.fold = fine and self.folded is not None
        return fine

    def drop_shortcuts(self) -> bool:
        """Take no shortcut from now on, neither folding nor unrefined residuals; whether there was one."""
        shortcut = self.fold or (self.refined and not self.moved)
        self.fold, self.refined = False, self.moved
        return shortcut

    def whitening(self, some: slice = slice(None)) -> Tensor:
        """f^{1/2} A^T, (..., R, c', p, p): T of Note [primal form], of all or some regularisations."""
        rotation = self.rotation[..., None, None, :, :]
        return rotation if self.triangular else self.f[..., some, :, :, None].sqrt() * rotation

    def coefficients(self) -> Tensor:
        """p = A q, (..., R, p, c)."""
        return together(self.q, self.rotation).mT


def together(rows: Tensor, matrix: Tensor) -> Tensor:
    """The rows (..., R, c, p) of all machines times a matrix (..., p, b) that they share, by one product."""
    return (rows.flatten(-3, -2) @ matrix).unflatten(-2, rows.shape[-3:-1])


def _machines(
    expansion: Expansion,
    moments: Moments,
    rotation: Tensor,
    triangular: bool,
    f: Tensor,
    regs: Tensor,
    q: Tensor,
) -> Machines:
    """Machines from A^T, f (..., R, c', p) and q (..., R, c, p), not refined."""
    folded = None
    rounding = by_folding = moments.longest  # 0 where there is no factor
    if expansion.factor is not None:
        folded = torch.linalg.solve_triangular(expansion.factor, rotation, upper=False, left=False)
        rows = torch.linalg.vector_norm(folded, dim=-1)[..., None, None, :]  # (..., 1, 1, p), |F_j|
        leverage = (rows * f.sqrt()).amax((-3, -2, -1))
        outputs = (torch.linalg.vector_norm(rows * q, dim=-1) / moments.spread).amax((-2, -1))
        eps = torch.finfo(expansion.kind).eps
        rounding = eps * leverage * moments.longest
        by_folding = torch.maximum(rounding, eps * outputs * moments.longest)
    shift = torch.zeros_like(moments.mean_y).expand(*regs.shape[:-1], -1)
    given = (expansion, moments, rotation, triangular, f, regs, q, shift)
    return Machines(
        *given, least=regs, refined=False, rounding=rounding, by_folding=by_folding, folded=folded
    )


def _is_well_conditioned(guard: Guard, machines: Machines, estimate: Tensor, limit: float) -> bool:
    """Whether an estimate of the condition, (..., R, c'), is below a limit, in one look at the values.

    Decides also whether there is a step of refinement, and folding, by what it rounds. Products in float32
    go without any remedy: they are taken to be accurate, until what decides that is read at the end.
    """
    moments = machines.moments
    numbers = (estimate, moments.distance, machines.by_folding)
    if machines.expansion.kind != torch.float64:
        machines.unread = tuple(number.amax() for number in numbers)
        machines.least = torch.full_like(machines.regs, 1 / SINGLE)
        machines.refined, machines.fold = True, machines.folded is not None
        return True
    machines.least = trusted(estimate).expand_as(machines.regs)
    condition, distance, folding = guard.largest(*numbers)
    machines.refined = condition < _NO_STEP * moments.count**0.5 and distance < _FAR
    machines.decide_folding(folding)
    return condition < limit


def one_machine(
    guard: Guard,
    expansion: Expansion,
    moments: Moments,
    regs: Tensor,
    triangle: Callable[[], tuple[Tensor, Tensor]],
) -> Machines:
    """The machine of one regularisation.

    Args:
        guard: demands on the values.
        expansion: the features.
        moments: of all rows.
        regs: the regularisation, (..., 1, 1).
        triangle: R (..., p, p) and d (..., p, c) with R^T R = S and R^T d = T, from the rows themselves; for
            a badly conditioned S.
    """
    if expansion.penalty is None:
        C = moments.S.clone()
        C.diagonal(dim1=-2, dim2=-1).add_(regs[..., 0])
    else:
        C = moments.S + regs * expansion.penalty
    f = torch.ones_like(C[..., None, :1, :])
    rotation, estimate = inverse_factor(C)
    q = (rotation @ moments.T).mT.unsqueeze(-3)
    machines = _machines(expansion, moments, rotation, True, f, regs, q)
    if _is_well_conditioned(guard, machines, estimate[..., None, None], ILL_CONDITIONED):
        return machines
    R, d = triangle()
    rotation, least, coef = inverse_factor_of(
        R, d, regs.sqrt() * expansion.penalty_root(guard, moments), guard
    )
    q = torch.linalg.solve_triangular(rotation.mT, coef, upper=True).mT.unsqueeze(-3)
    machines = _machines(expansion, moments, rotation, True, f, regs, q)
    machines.refined = machines.moved = True  # the normal equations know the coefficients less well
    machines.decide_folding(*guard.largest(machines.by_folding))
    machines.least = least[..., None, None].expand_as(regs)
    return machines


def path_machines(
    guard: Guard,
    expansion: Expansion,
    moments: Moments,
    regs: Tensor,
    triangle: Callable[[], tuple[Tensor, Tensor]],
) -> Machines:
    """The machines of regularisations (..., R, 1), or (..., R, c), one for each output; see `one_machine`."""

    def with_eigen(eigen: Eigen) -> Machines:
        f = 1 / (eigen.w + regs.unsqueeze(-1))  # (..., R, c', p)
        q = f * (moments.T.mT @ eigen.Q).unsqueeze(-3)
        return _machines(expansion, moments, eigen.Q.mT.contiguous(), False, f, regs, q)

    well_conditioned, limit = False, ILL_CONDITIONED_PATH * moments.count**0.5
    try:
        eigen = Eigen.of(moments.S)
        machines = with_eigen(eigen)
        estimate = eigen.condition(regs)
        well_conditioned = _is_well_conditioned(guard, machines, estimate, limit)
    except torch.linalg.LinAlgError as failure:  # type: ignore[attr-defined]
        guard.check()  # values that are not finite have a name there
        if expansion.kind != torch.float64:
            raise ImpreciseError from failure
    if not well_conditioned:  # or the eigenvalues did not converge
        R, d = triangle()
        eigen = Eigen.of_rows(R)
        guard.require(eigen.w.isfinite(), NOT_DEFINITE)  # squares of huge numbers overflow
        machines = with_eigen(eigen)
        condition, folding = guard.largest(eigen.condition(regs), machines.by_folding)
        machines.decide_folding(folding)
        machines.least = eigen.least(regs)
        if not condition < _LARGEST_OF_PATH:
            _solve_one_by_one(guard, machines, R, d)
    return machines


def _solve_one_by_one(guard: Guard, machines: Machines, R: Tensor, d: Tensor) -> None:
    """Take the coefficients of a path from a factorisation for each regularisation, from R and d."""
    columns = []
    for r, j, outputs in machines.each:
        penalty = torch.diag_embed(machines.regs[..., r, j, None].sqrt().expand(R.shape[:-1]))
        columns.append(inverse_factor_of(R, d[..., outputs], penalty, guard)[2])
    coef = torch.cat(columns, -1).mT.unflatten(-2, machines.q.shape[-3:-1])  # (..., R, c, p)
    machines.q = together(coef, machines.rotation.mT)
    machines.refined = machines.moved = True  # the normal equations know the coefficients less well
