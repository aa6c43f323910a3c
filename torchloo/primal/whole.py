"""The primal closed form: ridge regression on explicit features, and blocks of its P.

Note [primal form]
min over p of sum_i zeta_i |y_i - z_i^T p|^2 + p^T R p. With Omega = diag(zeta):

    C = R + Z^T Omega Z,    p = C^{-1} Z^T Omega Y,    e = Y - Z p,
    P = Omega - Omega Z C^{-1} Z^T Omega,    a = P Y = Omega e.

This P plays the part of the dual one (Note [dual form]; it is reg times it where both exist), so
Note [held-out residual] holds unchanged. Here P_ii = zeta_i (1 - h_i) does cancel as h -> 1:
everything is computed in float64, and rows whose 1 - h is too small for that are refitted.

An unpenalised bias takes features and targets about their weighted means, Note [moments], and adds
Omega 1 1^T Omega / sum zeta to what P is less than Omega. With V = Omega^{1/2} Z this is plain ridge
regression of Omega^{1/2} Y on V, which is how it is computed.

Machines are solved, and rows left out, by passes over blocks (solved.py), with a gradient of order one
(backward.py). This file has operations on all rows at once that torch differentiates: for other results of
a Fit, derivatives of every order and torch's transforms. The values of a solution are those found by the
passes; it is computed here only inside transforms, where values cannot be looked at. A batch of problems is
a leading axis; regularisations of the same rows have more of them.

Note [thin backward]
For C p = B + V^T Y, the cotangent v = C^{-1} pbar solves the same problem, with pbar for B and no targets:

    Bbar = v,    Ybar = V v,    Vbar = (Y - V p) v^T - V v p^T,    Rbar = -(v p^T + p v^T) / 2:

no factor is differentiated, and no product is larger than V v. With a graph the same formulas, differentiable
themselves, give derivatives of every order.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import Function
from torch.nn.functional import pad

from torchloo.autograd import apply, in_forward_mode
from torchloo.clusters import Partition
from torchloo.factors import inverse_factor, root_of, trusted, with_derivatives
from torchloo.guards import Guard, values_visible
from torchloo.leave_out_sets import LeaveOutSets, Parts
from torchloo.panels import inner_products
from torchloo.precision import full_precision
from torchloo.primal.collective import Peers
from torchloo.primal.leaving_out import LeftOut, block_of_rest, leave_out
from torchloo.primal.machines import Machines
from torchloo.primal.moments import shares
from torchloo.primal.refit import Learning, machines_without

__all__ = ["Known", "Normal", "Primal", "centred", "ridge_penalty", "spread_of"]


def _columns(x: Tensor, like: Tensor) -> Tensor:
    """x (*, ..., p, c), with axes in front that a tensor (..., n, p) does not have, as (..., p, * c)."""
    extra = x.ndim - like.ndim
    if extra <= 0:
        return x
    x = x.reshape(-1, *x.shape[extra:]).movedim(0, -2)  # batches of cotangents know no flatten
    return x.reshape(*x.shape[:-2], -1)


def _times(V: Tensor, x: Tensor) -> Tensor:
    """V x, (*, ..., n, c), for V (..., n, p), which is not repeated for axes that only x has."""
    extra = x.ndim - V.ndim
    product = V @ _columns(x, V)
    if extra <= 0:
        return product
    product = product.reshape(*product.shape[:-1], -1, x.shape[-1]).movedim(-2, 0)
    return product.reshape(*x.shape[:extra], *product.shape[1:])


def _solve(T: Tensor, B: Tensor) -> Tensor:
    """C^{-1} B for T C T^T = I."""
    return T.mT @ (T @ B)


def _refined(V: Tensor, R: Tensor, Y: Tensor, right: Tensor, T: Tensor) -> Tensor:
    """p of Note [thin backward], with T C T^T = I.

    A step of refinement takes the squared condition of C out of p, for two thin products.
    """
    first = _solve(T, right + _times(V.mT, Y))
    return first + _solve(T, right + _times(V.mT, Y - _times(V, first)) - R @ first)


class _Coefficients(Function):
    """(V, R, Y, B) -> p with (R + V^T V) p = B + V^T Y, with T C T^T = I; Note [thin backward]."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        V: Tensor, R: Tensor, Y: Tensor, right: Tensor, T: Tensor, known: Tensor | None = None
    ) -> Tensor:
        return _refined(V, R, Y, right, T) if known is None else known.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        V, R, Y, _, T, _ = inputs
        ctx.save_for_backward(V, R, Y, T, output)

    @staticmethod
    def backward(ctx: Any, pbar: Tensor) -> tuple[Tensor | None, ...]:
        V, R, Y, T, p = ctx.saved_tensors
        with full_precision(V):
            v = apply(_Coefficients, V, R, torch.zeros_like(Y), pbar, T, None)
            Vv = _times(V, v)
            Vbar = Rbar = None
            if ctx.needs_input_grad[0]:
                left = torch.cat([_columns(Y - _times(V, p), V), _columns(-Vv, V)], -1)
                Vbar = left @ torch.cat([_columns(v, V), _columns(p, V)], -1).mT
            if ctx.needs_input_grad[1]:
                outer = v @ p.mT
                Rbar = -(outer + outer.mT) / 2
            return Vbar, Rbar, Vv.sum_to_size(Y.shape), v, None, None


class Known(NamedTuple):
    """Values of a solution that the passes of solved.py have found, without a graph."""

    T: Tensor
    """T C T^T = I, (..., p, p)."""
    least: Tensor
    """The smallest accurate 1 - h, (...)."""
    coef: Tensor
    """p, (..., p, c)."""

    @classmethod
    def of(cls, machines: Machines, batch: Sequence[int], some: slice) -> "Known":
        """Those of some regularisations, (R, *batch), or (R, c, *batch) of single outputs."""
        T, least = machines.whitening(some), machines.least[..., some, :]
        coef = machines.coefficients()[..., some, :, :]
        if least.shape[-1] > 1:
            coef = coef.movedim(-1, -2).unsqueeze(-1)  # (..., R, c, p, 1)
        else:
            T, least = T.squeeze(-3), least.squeeze(-1)
        return cls(_in_front(T, 2, batch), _in_front(least, 0, batch), _in_front(coef, 2, batch))


def _in_front(values: Tensor, own: int, batch: Sequence[int]) -> Tensor:
    """Values (B, *, ...) of a batch, with so many axes of their own, as (*, *batch, ...)."""
    if not batch:
        return values
    last = values.ndim - own - 1
    return values.movedim(0, last).unflatten(last, batch)


@dataclass(frozen=True)
class Normal:
    """Rows in memory with their graph, whatever the regularisation and the targets."""

    V: Tensor
    """Features about their mean times the square roots of the weights, (..., n, p)."""
    root: Tensor
    """Square roots of the weights, (..., n, 1)."""
    mean: Tensor | None
    """Weighted mean of the features, (..., 1, p); None without a bias."""
    Z: Tensor
    """The features themselves, (..., n, p)."""
    dtype: torch.dtype
    """That in which they came, and a penalty with them."""

    @classmethod
    def of(cls, Z: Tensor, weight: Tensor, bias: bool) -> "Normal":
        """Those of features (..., n, p) and weights (..., n), in float64."""
        dtype, Z, root = Z.dtype, Z.double(), weight.double().sqrt().unsqueeze(-1)
        mean = _mean(root, Z) if bias else None
        return cls(root * (Z if mean is None else Z - mean), root, mean, Z, dtype)

    @property
    def gram(self) -> Tensor:
        """V^T V, (..., p, p): S of Note [moments]."""
        return self.V.mT @ self.V if in_forward_mode() else inner_products(self.V.mT)

    @property
    def per_weight(self) -> Tensor:
        """What the bias adds to z^T C^{-1} z, (..., 1, 1): 1 / sum zeta."""
        return 1 / self.root.square().sum(-2, keepdim=True)

    def solve(self, R: Tensor, reg: Tensor, Y: Tensor, known: Known | None) -> "Primal":
        """The machine of a penalty R (..., p, p) and targets (..., n, c).

        Both may have more axes in front than the rows have. Differentiable in all of them, to every order.
        Coefficients and residuals have a backward of n p c operations; Note [thin backward].

        Args:
            R: penalty.
            reg: regularisation, (...), which only sets the units of `dual` and of the blocks.
            Y: targets.
            known: the solution; None where values cannot be looked at.
        """
        if known is None:
            T, estimate = inverse_factor(self.gram + R)
            least, coef = trusted(estimate), None
        else:
            T, least, coef = known
        solution = _solved(self, R, reg, T, Y, coef)
        return Primal(self, R, reg, T, known is not None, least, Y, *solution)

    def along(
        self, regs: Tensor, Y: Tensor, known: Known | None, of: Callable[["Primal"], tuple[Tensor, ...]]
    ) -> list[Tensor]:
        """The results of a function for machines of regularisations (R, ..., c'), tensors (R, ..., c) each.

        c' is 1, or c where every output has its own. The function takes a Primal with axes (R, ...), or
        (R, c, ...) of single outputs.
        """
        per_output = regs.shape[-1] > 1
        if per_output:
            reg, Y = regs.movedim(-1, 1), Y.movedim(-1, 0).unsqueeze(-1)  # (R, c, ...), (c, ..., n, 1)
        else:
            reg = regs[..., 0]  # (R, ...)
        parts = of(self.solve(ridge_penalty(reg, self.V), reg, Y, known))
        return [part.movedim(1, -1)[..., 0, :] if per_output else part for part in parts]


def _mean(root: Tensor, rows: Tensor) -> Tensor:
    """Weighted mean (..., 1, p) of rows (..., n, p), from square roots (..., n, 1) of the weights."""
    return shares(root.square().mT) @ rows


def _about_mean(Y: Tensor, normal: Normal) -> tuple[Tensor, Tensor]:
    """Targets about their weighted mean, and the mean (..., 1, c), which is zero without a bias."""
    mean = torch.zeros_like(Y[..., :1, :]) if normal.mean is None else _mean(normal.root, Y)
    return Y if normal.mean is None else Y - mean, mean


def _solved(
    normal: Normal, R: Tensor, reg: Tensor, T: Tensor, Y: Tensor, known: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Coefficients (..., p, c), offset (..., c), and a = P Y in the units of the dual form, (..., n, c).

    The coefficients may be known already.
    """
    V, root = normal.V, normal.root
    Y, offset = _about_mean(Y, normal)
    right = V.new_zeros((*R.shape[:-2], V.shape[-1], Y.shape[-1]))
    if in_forward_mode():
        p = _refined(V, R, root * Y, right, T)
    else:
        p = apply(_Coefficients, V, R, root * Y, right, T.detach(), known)
    e = root * Y - _times(V, p)
    if normal.mean is None:
        offset = torch.zeros_like(p[..., :1, :])
    else:  # what rounding has left of the mean of the residuals, which is zero
        rest = ((root * e).sum(-2, keepdim=True) * normal.per_weight).detach()
        e, offset = e - root * rest, offset + rest - normal.mean @ p
    return p, offset[..., 0, :], root * e / reg[..., None, None]


def _with_derivatives(
    V: Tensor, R: Tensor, Y: Tensor, V_L: Tensor, F: Tensor, p: Tensor
) -> tuple[Tensor, Tensor]:
    """p and the squares of F^{-T} V_L^T, (p', s), of a refit: their values, with derivatives of every order.

    By Note [thin backward] for p and for C^{-1} V_L^T, or C^{-1} F^T if the set has more rows than features.
    """
    unit = torch.eye(len(F), dtype=F.dtype, device=F.device)
    T, half = (torch.linalg.solve_triangular(F.mT, B, upper=False) for B in (unit, V_L.mT))
    c, large = p.shape[-1], len(V_L) > len(F)
    right = F.mT if large else V_L.mT
    known = torch.cat([p, _solve(T, right.detach())], -1)
    targets = pad(Y, (0, right.shape[-1]))
    found = apply(_Coefficients, V, R, targets, pad(right, (c, 0)), T, known)
    p, H = found[:, :c], found[:, c:]
    squares = half * (F @ (H @ half if large else H))
    return p, half.detach().square() + squares - squares.detach()


@dataclass(frozen=True)
class Primal:
    """A factorised primal problem: its solution, and P by blocks on demand.

    `dual` and the blocks are divided by `reg`, which makes them those of the dual form.
    """

    normal: Normal
    R: Tensor
    """Penalty, (..., p, p)."""
    reg: Tensor
    factor: Tensor
    """T with T C T^T = I, (..., p, p)."""
    is_value: bool
    """Whether the factor is a value without a graph."""
    least: Tensor
    """Sets whose 1 - h is below this are refitted, (...)."""
    Y: Tensor
    """Targets, (..., n, c)."""
    coef: Tensor
    """p, (..., p, c)."""
    offset: Tensor
    """Output where all features are zero, (..., c); zeros without a bias."""
    dual: Tensor
    """a = P Y, (..., n, c)."""
    _found: list[Tensor] = field(default_factory=list, init=False, repr=False, compare=False)
    """The factor with its derivatives, once computed."""

    @property
    def whitening(self) -> Tensor:
        """The factor with its derivatives, where there is a graph."""
        V, R = self.normal.V, self.R
        if not (self.is_value and torch.is_grad_enabled() and (V.requires_grad or R.requires_grad)):
            return self.factor
        if not self._found:
            self._found.append(with_derivatives(self.factor, self.normal.gram + R))
        return self._found[0]

    @property
    def has_bias(self) -> bool:
        """Whether there is an unpenalised bias."""
        return self.normal.mean is not None

    @property
    def noise(self) -> Tensor:
        """reg / weight, (..., n, 1)."""
        return self.reg[..., None, None] / self.normal.root.square()

    @property
    def _rows(self) -> tuple[Tensor, Tensor, Tensor]:
        """Whitened rows (..., n, p'), roots of weights (..., n, 1) and residuals; Note [leaving sets out].

        The bias is one more feature.
        """
        normal = self.normal
        B, root = self._whitened(normal.V), normal.root
        if self.has_bias:
            B = torch.cat([B, (root * normal.per_weight.sqrt()).expand_as(B[..., :1])], -1)
        return B, root.expand_as(B[..., :1]), self.dual * self.noise

    def _whitened(self, rows: Tensor) -> Tensor:
        """Rows (..., m, p) times T^T."""
        return rows @ self.whitening.mT

    def blocks(self, partition: Partition) -> tuple[Tensor, list[Tensor]]:
        """a = P Y, and diagonal blocks of P, (..., g, s, s) for each size; both differentiable."""
        B, scale, _ = self._rows
        blocks = []
        for B_L, scale_L in zip(partition.gather(B), partition.gather(scale), strict=True):
            block = scale_L * block_of_rest(B_L) * scale_L.mT
            blocks.append(block / self.reg[..., None, None, None])
        return self.dual, blocks

    def left_out(self, sets: LeaveOutSets, guard: Guard) -> Parts:
        """Held-out residuals (..., m, c), variances (..., m, 1) of rows to predict, and the refitted ones.

        Of sets that may overlap. Cost n p^2, and s p min(s, p) for each set; memory 4 n p numbers.
        """

        def one(rows: Tensor, B: Tensor, scale: Tensor, e: Tensor, total: Tensor | None) -> Parts:
            B_L, scale_L, e_L = (t[..., rows, :] for t in (B, scale, e))
            found = leave_out(B_L, scale_L, e_L, self.least.unsqueeze(-1), total)
            return self._refitted([rows], [found], guard)[0]

        B, scale, e = self._rows
        r, inverse, refitted = sets.leave_out(B, B.shape[-1], one, B, scale, e, self._total(B, sets.groups))
        return r, inverse * self.reg[..., None, None], refitted

    def held_out(self, partition: Partition, guard: Guard) -> Parts:
        """Held-out residuals (..., n, c), variances (..., n, 1), and which rows (..., n) were refitted."""
        B, scale, e = self._rows
        n = B.shape[-2]
        partition = partition.padded(n, B.numel() // n)  # rows of zeros, of which nothing is left out
        total = self._total(B, partition.groups)
        gathered = zip(*map(partition.gather, (B, scale, e), (0.0, 1.0, 0.0)), strict=True)
        least = self.least.unsqueeze(-1)
        found = [leave_out(B_L, scale_L, e_L, least, total) for B_L, scale_L, e_L in gathered]
        found = self._refitted(partition.groups, found, guard)
        residuals, inverses, lost = map(list, zip(*found, strict=True))
        marks = [flag[..., None, None].expand_as(t) for flag, t in zip(lost, inverses, strict=True)]
        r, inverse, refitted = (partition.scatter(part, n) for part in (residuals, inverses, marks))
        return r, inverse * self.reg[..., None, None], refitted[..., 0]

    def _total(self, B: Tensor, groups: Sequence[Tensor]) -> Tensor | None:
        """T C T^T as it is found; None if no set of groups (g, s), by size, is large; see `leave_out`."""
        if groups[-1].shape[-1] <= B.shape[-1]:
            return None
        penalty = self._whitened(self._whitened(self.R).mT)
        return pad(penalty, (0, self.has_bias, 0, self.has_bias)) + B.mT @ B

    def _refitted(self, groups: Sequence[Tensor], found: list[LeftOut], guard: Guard) -> list[LeftOut]:
        """What was found of sets (g, s) of each group, where 1 - h is lost by Note [refits by triangles].

        Row numbers from n on are padding.
        """
        n = self.normal.V.shape[-2]
        flags = [lost.any() for _, _, lost in found]
        if not values_visible(*flags) or not bool(torch.stack(flags).any()):
            return found
        refitted = []
        for rows, (r, inverse, lost) in zip(groups, found, strict=True):
            for problem in lost.any(-1).nonzero().tolist():
                number = lost[tuple(problem)].nonzero()[:, 0]
                inside = rows[number] < n
                of_set, place = inside.nonzero(as_tuple=True)
                index = (*(torch.tensor(k, device=r.device) for k in problem), number[of_set], place)
                sets = [own[real] for own, real in zip(rows[number], inside, strict=True)]
                r_L, inverse_L = self._refit(tuple(problem), sets, guard)
                r, inverse = r.index_put(index, r_L), inverse.index_put(index, inverse_L)
            refitted.append((r, inverse, lost))
        return refitted

    def _refit(self, problem: tuple[int, ...], sets: list[Tensor], guard: Guard) -> tuple[Tensor, Tensor]:
        """Held-out residuals (l, c) and diag(P_LL^{-1}), (l, 1), of sets of rows of one of the problems."""

        def own(t: Tensor) -> Tensor:
            return t[problem[len(problem) - (t.ndim - 2) :]]

        normal, bias = self.normal, self.has_bias
        Z, root, Y, R = (own(t) for t in (normal.Z, normal.root, self.Y, self.R))
        X, R = pad(Z, (0, bias), value=1.0), pad(R, (0, bias, 0, bias))
        Y = Y - _mean(root, Y) if bias else Y
        wanted = torch.is_grad_enabled() and any(t.requires_grad for t in (X, R, root, Y))
        with torch.no_grad():
            penalty = pad(root_of(R, guard, normal.dtype), (0, Y.shape[-1]))
        learning = Learning(lambda: [(0, X, root, Y)], len(X), penalty, bias, Peers(), guard)
        residuals, inverses = [], []
        for (rows, *_, (origin, mean), p), F in machines_without(learning, sets):
            V_L = X[rows] - origin - mean
            if wanted:
                V = root.index_fill(0, rows, 0.0) * (X - (origin + mean))
                p, squares = _with_derivatives(V, R, root * Y, V_L, F, p)
            else:
                squares = torch.linalg.solve_triangular(F.mT, V_L.mT, upper=False).square()
            residuals.append(Y[rows] - V_L @ p)
            inverses.append(1 / root[rows].square() + squares.sum(0).unsqueeze(-1))
        return torch.cat(residuals), torch.cat(inverses)

    def with_targets(self, Y: Tensor) -> "Primal":
        """The same factorisation with other targets (..., n, c')."""
        coef, offset, dual = _solved(self.normal, self.R, self.reg, self.factor, Y)
        return replace(self, Y=Y, coef=coef, offset=offset, dual=dual)

    def leave_out(self, sets: Tensor, guard: Guard) -> Tensor:
        """Held-out residuals (..., g, s, c) of disjoint sets (g, s) of rows; see `held_out`."""
        return self.held_out(Partition((sets,)), guard)[0][..., sets, :]

    def weights_at(self, z: Tensor) -> Tensor:
        """w (..., q, n) of Note [weights at a new point], for features z (..., q, p)."""
        normal = self.normal
        z, each = (z, 0.0) if normal.mean is None else (z - normal.mean, normal.root * normal.per_weight)
        return (normal.root * (normal.V @ _solve(self.whitening, z.mT) + each)).mT

    def variance_at(self, z: Tensor) -> Tensor:
        """Note [variance at a new point], (..., q), for features z (..., q, p)."""
        normal = self.normal
        if normal.mean is None:
            return self.reg.unsqueeze(-1) * self._whitened(z).square().sum(-1)
        norms = self._whitened(z - normal.mean).square().sum(-1)
        return self.reg.unsqueeze(-1) * (norms + normal.per_weight[..., 0])

    def spread(self) -> Tensor:
        """S (..., p', p + 1) with the variance |S (z, 1)|^2 at features z."""
        return spread_of(self.whitening, self.reg, self.normal.mean, self.normal.per_weight)


def spread_of(T: Tensor, reg: Tensor, mean: Tensor | None, per_weight: Tensor) -> Tensor:
    """What `Primal.spread` gives, from T (..., p, p), the mean (..., 1, p) and 1 / sum zeta, (..., 1, 1)."""
    last = torch.zeros_like(T[..., :1])
    if mean is not None:
        last = torch.cat([-T @ mean.mT, per_weight.sqrt().expand_as(last[..., :1, :])], -2)
        T = torch.cat([T, torch.zeros_like(T[..., :1, :])], -2)
    return reg.sqrt()[..., None, None] * torch.cat([T, last], -1)


def ridge_penalty(reg: Tensor, like: Tensor) -> Tensor:
    """R = reg I, (..., p, p), for reg (...) and features (..., n, p), in float64."""
    return torch.diag_embed(reg.double().unsqueeze(-1).expand(*reg.shape, like.shape[-1]))


def centred(Z: Tensor, weight: Tensor | None, bias: bool) -> tuple[Tensor, Tensor]:
    """Features (..., n, d) about their weighted mean (..., 1, d), which is held constant, both in float64.

    An unpenalised bias absorbs any shift of the features, so this changes no output and no
    gradient; it keeps features far from the origin from losing their digits. Without a bias the
    shift is zero.
    """
    if not bias:
        zero = torch.zeros((), dtype=torch.float64, device=Z.device)
        return Z.double(), zero.expand(*Z.shape[:-2], 1, Z.shape[-1])
    if weight is None:
        mean = Z.detach().mean(-2, keepdim=True, dtype=torch.float64)
    else:
        zeta = weight.detach().unsqueeze(-2)  # (..., 1, n)
        mean = zeta @ Z.detach().to(zeta.dtype) / zeta.sum(-1, keepdim=True)
    return Z - mean, mean
