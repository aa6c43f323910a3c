"""Machines with many regularisations: the choice of a form for each of them."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from torchloo.blocks import NOT_DEFINITE
from torchloo.clusters import Partition
from torchloo.dual import Dual, dual
from torchloo.guards import Guard, values_visible
from torchloo.leave_out_sets import LeaveOutSets, Parts
from torchloo.panels import inner_products
from torchloo.precision import full_precision
from torchloo.primal.front import solve_by_passes
from torchloo.primal.moments import shares
from torchloo.primal.solved import StreamFit
from torchloo.primal.whole import Normal, Primal, centred
from torchloo.problem import Problem, Regs, check_dual, check_features
from torchloo.representation import CentredFeatures, KernelRows
from torchloo.smoothers import Fit, solve_dual, solve_features
from torchloo.spectral.form import Spectral, Step, spectral

__all__ = ["from_features", "from_kernel_matrix"]

# Up to this number, factorisations are cheaper than one eigendecomposition, which costs 4 to 7 of them from
# n = 1000 on and in batches of small problems (scripts/bench/least_squares.py measures it).
_FEW = 5

# Where the rounding of Note [spectral accuracy] exceeds this, another form is used.
_LOST = {torch.float64: 3e-10, torch.float32: 3e-8}

# At least this many numbers are computed at once, however small a problem.
_TOGETHER = 2**20


@dataclass
class Path:
    """Solved machines with several regularisations, like `Dual` and `Primal` for one.

    All results have an axis R in front of all others, unless `axis` is False and R is 1. They are those of
    the forms that `along` comes to.
    """

    problem: Problem
    regs: Tensor
    """(R, ..., c'), c' = 1, or c where every output has its own."""
    axis: bool

    def _shaped(self, values: Tensor) -> Tensor:
        return values if self.axis else values[0]

    def _all_shaped(self, parts: Parts) -> Parts:
        r, variance, refitted = parts
        return self._shaped(r), self._shaped(variance), self._shaped(refitted)

    @property
    def noise(self) -> Tensor:
        """reg / weight, (..., n, c')."""
        return self._shaped(self.regs.unsqueeze(-2) / self.problem.weight.unsqueeze(-1))

    @property
    def dual(self) -> Tensor:
        """a = P Y, (..., n, c)."""
        return self._shaped(self.coefficients())

    @property
    def bias(self) -> Tensor:
        """b, (..., c); zeros without a bias."""
        return self._shaped(self.biases())

    def blocks(self, partition: Partition) -> tuple[Tensor, list[Tensor]]:
        """a = P Y, and diagonal blocks of P, (..., g, s, s) for each size; both differentiable.

        (..., c, g, s, s) where every output has its own regularisation.
        """
        blocks = [self._shaped(block) for block in self.blocks_of(partition)]
        own = self.regs.shape[-1] > 1
        return self.dual, blocks if own else [block.select(-4, 0) for block in blocks]

    def held_out(self, partition: Partition, guard: Guard) -> Parts:
        """Held-out residuals and variances (..., n, c), and which rows (..., n) were refitted."""
        return self._all_shaped(self.along_regs(partition, guard))

    def left_out(self, sets: LeaveOutSets, guard: Guard) -> Parts:
        """Held-out residuals and variances (..., m, c) of rows to predict, and the refitted ones (..., m)."""
        return self._all_shaped(self.parts(lambda form: form.left_out(sets, guard)))

    def along(self, of: Callable[..., tuple[Tensor, ...]]) -> list[Tensor]:
        """The results of a function for every form, tensors (..., c), as (R, ..., c) each."""
        raise NotImplementedError

    def coefficients(self) -> Tensor:
        """a (R, ..., n, c)."""
        return self.along(lambda form: (form.dual,))[0]

    def biases(self) -> Tensor:
        """b (R, ..., c)."""
        return self.along(lambda form: (form.bias,))[0]

    def blocks_of(self, partition: Partition) -> list[Tensor]:
        """Blocks of P, (R, ..., c', g, s, s) for each size."""

        def blocks_of_form(form: Dual | Primal) -> tuple[Tensor, ...]:
            _, blocks = form.blocks(partition)
            return tuple(block.unsqueeze(-1) for block in blocks)

        return [block.movedim(-1, -4) for block in self.along(blocks_of_form)]

    def along_regs(self, partition: Partition, guard: Guard) -> Parts:
        """Held-out parts of all R."""
        return self.parts(lambda form: form.held_out(partition, guard))

    def parts(self, of_form: Callable[..., Parts]) -> Parts:
        """Held-out parts of all R from those of each form."""

        def of(form: Dual | Primal) -> tuple[Tensor, ...]:
            r, variance, refitted = of_form(form)
            return r, variance.expand_as(r), refitted.unsqueeze(-1)

        r, variance, refitted = self.along(of)
        return r, variance, refitted.any(-1)


@dataclass
class Each(Path):
    """A dual form for each regularisation, and for each output that has its own."""

    form_of: Callable[[Tensor, Tensor], Dual]
    """The form for a regularisation (...) and targets (..., n, c)."""
    kept: list[list[Dual]] | None = None
    """All forms, if they are few; otherwise they are computed whenever they are needed."""

    def keep(self) -> "Each":
        """The same, with all forms computed and kept."""
        return replace(self, kept=list(self._made()))

    def _made(self) -> Iterator[list[Dual]]:
        own = self.regs.shape[-1] > 1
        targets = self.problem.Y.split(1, -1) if own else (self.problem.Y,)
        for row in self.regs:
            regs = (reg.expand(self.problem.reg.shape) for reg in row.unbind(-1))
            yield [self.form_of(reg, Y) for reg, Y in zip(regs, targets, strict=True)]

    def along(self, of: Callable[..., tuple[Tensor, ...]]) -> list[Tensor]:
        """The results of a function for every form, tensors (..., c), as (R, ..., c) each."""
        by_reg = []
        for forms in self._made() if self.kept is None else self.kept:
            by_output = [of(form) for form in forms]
            by_reg.append([torch.cat(parts, -1) for parts in zip(*by_output, strict=True)])
        return [torch.stack(parts) for parts in zip(*by_reg, strict=True)]


@dataclass
class Decomposed(Path):
    """Note [spectral form], and factorisations for regularisations for which it is not accurate enough."""

    form: Spectral
    order: list[int]
    """Numbers of the regularisations, those solved by the decomposition first."""
    served: int
    """How many are solved by the decomposition."""
    others: Each
    """Factorisations of all regularisations, used for the others."""

    @functools.cached_property
    def _step(self) -> Step:
        return self.form.step(self._split(self.regs)[0].detach())

    def _split(self, regs: Tensor) -> tuple[Tensor, Tensor]:
        served, others = regs[self.order].tensor_split([self.served])
        return served, others

    def _joined(
        self, parts: Sequence[tuple[Tensor, ...]], of: Callable[[Each], tuple[Tensor, ...]]
    ) -> list[Tensor]:
        """Parts of the served regularisations and the results of a function for the others, in order."""
        _, regs = self._split(self.regs)
        if len(regs):
            parts = [*parts, of(replace(self.others, regs=regs))]
        joined = [torch.cat(part) for part in zip(*parts, strict=True)]
        if not len(regs):
            return joined
        back = torch.tensor(self.order, device=self.regs.device).argsort()
        return [part[back] for part in joined]

    @functools.cached_property
    def _served(self) -> list[Tensor]:
        """Coefficients of the served regularisations, if there are any."""
        if not self.served:
            return []
        regs, _ = self._split(self.regs)
        return [self.form.solution(regs, self._step)]

    def coefficients(self) -> Tensor:
        found = [(a,) for a in self._served]
        return self._joined(found, lambda each: (each.coefficients(),))[0]

    def biases(self) -> Tensor:
        found = [(self.form.bias_of(a, self.problem.Y),) for a in self._served]
        return self._joined(found, lambda each: (each.biases(),))[0]

    def along(self, of: Callable[..., tuple[Tensor, ...]]) -> list[Tensor]:
        return self.others.along(of)

    def along_regs(self, partition: Partition, guard: Guard) -> Parts:
        served, _ = self._split(self.regs)
        parts = _by_outputs(self.form, served, self._step, partition, guard) if self.served else []
        r, variance, refitted = self._joined(parts, lambda each: each.along_regs(partition, guard))
        return r, variance, refitted


def _decomposed(each: Each, K: Tensor, Z: Tensor | None, bias: bool) -> Decomposed:
    """Decompose K (..., n, n), of features Z if there are any, and decide which regularisations it serves."""
    problem, guard = each.problem, each.problem.guard
    guard.check()  # before a decomposition, whose own error would be less clear
    regs = each.regs.double()
    weight, Y = problem.weight.double(), problem.Y.double()
    form = spectral(K.double(), weight, Y, bias, Z)
    lost = [False] * len(regs)
    if values_visible(form.size):
        lost = (form.rounding(regs.detach()) > _LOST[problem.Y.dtype]).tolist()
    if Z is not None and any(lost):
        form = form.by_singular_values()
        lost = [False] * len(regs)
    guard.require(form.least + regs.amin(-1) > 0, NOT_DEFINITE)
    order = sorted(range(len(regs)), key=lost.__getitem__)
    return Decomposed(problem, regs, each.axis, form, order, lost.count(False), each)


def _by_outputs(form: Spectral, regs: Tensor, step: Step, partition: Partition, guard: Guard) -> list[Parts]:
    """`_in_chunks`, for sets and outputs with their own regularisations only a few outputs at a time."""
    c = regs.shape[-1]
    several = partition.groups[-1].shape[-1] > 1
    at_once = max(1, _TOGETHER // form.B.numel())
    if c <= at_once or not several:
        return _in_chunks(form, regs, step, partition, guard)
    by_outputs = []
    for j in range(0, c, at_once):
        some = slice(j, j + at_once)
        of_some = form._replace(Y=form.Y[..., some])
        chunks = _in_chunks(of_some, regs[..., some], step.of_outputs(some), partition, guard)
        by_outputs.append([torch.cat(part) for part in zip(*chunks, strict=True)])
    r, variance, refitted = zip(*by_outputs, strict=True)
    any_refitted = torch.stack(refitted).any(0)
    return [(torch.cat(r, -1), torch.cat(variance, -1), any_refitted)]


def _in_chunks(form: Spectral, regs: Tensor, step: Step, partition: Partition, guard: Guard) -> list[Parts]:
    """Held-out parts of a few regularisations at a time; the graph keeps no blocks if there are many."""
    together = max(form.B.numel(), _TOGETHER)
    columns = form.w.numel() * regs.shape[-1]  # of P, for one regularisation
    largest = partition.groups[-1].shape[-1]
    numbers = columns if largest == 1 else columns * form.w.shape[-1]
    width = max(1, together // numbers)
    held_out: Callable[..., Parts] = form.held_out
    if columns * largest * len(regs) > together and torch.is_grad_enabled():
        held_out = partial(checkpoint, held_out, use_reentrant=False, preserve_rng_state=False)
    with torch.no_grad():
        gathered = form.gathered(partition)
    chunks = zip(regs.split(width), *(part.split(width) for part in step), strict=True)
    return [held_out(chunk, partition, guard, gathered, Step(*parts)) for chunk, *parts in chunks]


class _IllConditionedError(Exception):
    """Z Z^T is too badly conditioned to be factorised."""


def _refuse() -> Dual:
    raise _IllConditionedError


def _path(problem: Problem, K: Tensor, Z: Tensor | None, regs: Tensor, axis: bool, bias: bool) -> Path:
    """Machines from K (..., n, n): a few regularisations in the dtype of K, many in float64."""
    few = len(regs) * regs.shape[-1] <= _FEW
    if not few:
        K = K.double()
    inverse = 1 / problem.weight.to(K.dtype)
    # K = Z Z^T squares the condition of Z, which singular values avoid.
    otherwise = None if Z is None or not few else _refuse

    def form_of(reg: Tensor, Y: Tensor) -> Dual:
        ridge = reg.to(K.dtype).unsqueeze(-1) * inverse
        return dual(K, ridge, Y.to(K.dtype), bias, problem.guard, otherwise)

    each = Each(problem, regs, axis, form_of)
    if few:
        with contextlib.suppress(_IllConditionedError):
            return each.keep()
    return _decomposed(each, K, Z, bias)


def from_kernel_matrix(
    guard: Guard, K: Tensor, Y: Tensor, reg: Tensor | float | Regs, weight: Tensor | None, bias: bool
) -> Fit:
    """The machine of a kernel matrix for one regularisation, `solve_dual`, or for several of them.

    Args:
        K: (..., n, n), Y: (..., n, c), weight: (..., n) or None.
        reg: of batch shape; or Regs, those of a path or one for each output.

    Returns:
        Fit, for a path with an axis R in front of all others; the caller checks the guard.

    Several regularisations: differentiable once in K, Y, regs and weight (a few regularisations are
    factorised one by one, and then to every order), but neither in forward mode nor under vmap. Cost one
    eigendecomposition in float64; the backward n^3 for each regularisation. Memory 5 n^2 numbers, 10 n^2
    with the backward, more with few large clusters, and R n c for the result. Regularisations too small for
    the accuracy of eigenvalues are factorised: some 1e-7 of the scale of K, more where weights differ by
    many orders of magnitude; see Note [spectral accuracy].
    """
    if not isinstance(reg, Regs):
        return solve_dual(guard, K, Y, reg, weight, bias)
    problem = check_dual(guard, K, Y, reg, weight)
    regs = reg.checked(guard, Y.shape[-1], Y, problem.reg.ndim)
    with full_precision(K):
        form = _path(problem, problem.expand(K), None, regs, reg.path, bias)
    return Fit(form, problem, KernelRows(K.dtype))


def from_features(
    guard: Guard, Z: Tensor, Y: Tensor, reg: Tensor | float | Regs, weight: Tensor | None, bias: bool
) -> Fit:
    """`from_kernel_matrix` for the kernel K = Z Z^T, from the features Z (..., n, d), by the cheaper form.

    Several regularisations: with fewer features than rows, these are one more axis of the primal form, whose
    normal equations are computed once; see `ByFeatures`. Otherwise this is `from_kernel_matrix`, with
    singular values in place of eigenvalues if regularisations are too small for the latter.

    Differentiable to every order. Cost n d^2 + d^3, and n d for each regularisation (n d^2 with a graph);
    memory n d + d^2 numbers for each regularisation.
    """
    problem = check_features(guard, Z, Y, reg, weight)
    if not isinstance(reg, Regs):
        return solve_features(problem, Z, bias)
    n, d = Z.shape[-2:]
    regs = reg.checked(guard, Y.shape[-1], Y, problem.reg.ndim)
    zeta = problem.weight.double()
    with full_precision(Z):
        shifted, centre = centred(problem.expand(Z).double(), zeta, bias)
        if d + bias >= n:
            if bias:  # again, as the first mean was rounded: a row that outweighs all others equals the mean
                share = shares(zeta).detach().unsqueeze(-2)  # (..., 1, n)
                correction = share @ shifted.detach()
                shifted = shifted.sub_(correction) if values_visible(shifted) else shifted - correction
                centre = centre + correction
            form = _path(problem, inner_products(shifted), shifted, regs, reg.path, bias)
            return Fit(form, problem, CentredFeatures(shifted, centre, Z.dtype))
        rows = solve_by_passes(guard, shifted, problem.weight, problem.Y, reg, bias)
        form = ByFeatures(problem, regs.double(), reg.path, Normal.of(shifted, zeta, bias), rows)
    return Fit(form, problem, _OfFeatures(shifted, centre, Z.dtype), rows=rows)


@dataclass
class ByFeatures(Path):
    """Machines with fewer features than rows: the regularisations are one more axis of the primal form."""

    normal: Normal
    rows: StreamFit | None
    """The same solved by passes; None where values cannot be looked at."""

    def along(self, of: Callable[[Primal], tuple[Tensor, ...]]) -> list[Tensor]:
        """The results of a function for primal forms, tensors (R, ..., c), a few regularisations at once."""
        normal, rows, Y = self.normal, self.rows, self.problem.Y.double()
        R, own = len(self.regs), self.regs.shape[-1]
        regs = self.regs.expand(R, *self.problem.reg.shape, own)
        width = max(1, _TOGETHER // (normal.V.numel() * own))
        chunks = []
        for start in range(0, R, width):
            some = slice(start, start + width)
            known = None if rows is None else rows.known(some)
            chunks.append(normal.along(regs[some], Y, known, of))
        return [torch.cat(parts) for parts in zip(*chunks, strict=True)]

    def weighed(self) -> tuple[Tensor, Tensor]:
        """Coefficients of the features, (..., p, c), and the offset (..., c)."""
        coef, offset = self.along(lambda form: (form.coef, form.offset))
        return self._shaped(coef), self._shaped(offset)


@dataclass(frozen=True)
class _OfFeatures(CentredFeatures):
    """The coefficients of features come with the path."""

    def _weighed(self, form: ByFeatures) -> tuple[Tensor, Tensor]:
        return form.weighed()
