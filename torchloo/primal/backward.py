"""Held-out rows of the primal form as one differentiable function, whose backward goes over blocks too.

Note [blockwise backward]
By the envelope theorem applied to Y^T P Y (Note [primal form]), with N = Omega Z C^{-1},

    dP = (I - N Z^T) dOmega (I - Z N^T) - P dZ N^T - N dZ^T P + N dR N^T.

In the coordinates of Note [rotated features], rows u are extended by a 1 for the bias, f by 1/w and
coefficients q by the offset; C^{-1} x is f u there. A cotangent rbar of the
held-out residuals and vbar of the variances reg diag(P_LL^{-1}) become, for a set L with a_L = P_LL r_L,

    abar = P_LL^{-1} rbar,    D = -(abar r^T + r abar^T) / 2 - P_LL^{-1} diag(reg vbar) P_LL^{-1}.

With N = Omega U f, one pass over the rows gathers Q = sum N^T D N and t = sum U^T Omega abar; then v = -f t.
The next pass gives, with s = abar + U v,

    ubar = -2 Omega (D N - U Q) + a v^T - Omega s q^T,    Ybar = Omega s,
    zetabar = diag(D) - 2 rowsum(U * D N) + rowsum(U * U Q) + rowsum(s * e),

which goes on through A and the kernel, evaluated once more with a graph, to the inputs and to whatever else
the features depend on. The penalty is reg K_zz on the columns k themselves, so that no factor is
differentiated: with F = A^T L^{-1} its cotangent is F^T (Q - (v q^T + q v^T) / 2) F. For a row alone, D is a
number.

A set that was refitted has no part in these sums, in which all that matters would cancel: see
Note [derivatives of refits] in refit.py.

A batch of problems is an axis in front of all others. Single problems alone have refitted sets.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import Function

from torchloo.clusters import PaddedSets, Partition
from torchloo.guards import Guard, values_visible
from torchloo.panels import add_matmul, add_symmetric, matmul_into, mirrored, room_like, times_upper
from torchloo.precision import in_full_precision
from torchloo.primal.block import Block
from torchloo.primal.leaving_out import block_of_rest, root_of_rest
from torchloo.primal.machines import together, transposed
from torchloo.primal.refit import Effect, Refitted
from torchloo.primal.sink import Sink
from torchloo.primal.whole import Normal, centred

if TYPE_CHECKING:
    from torchloo.primal.machines import Machines
    from torchloo.primal.solved import StreamFit

__all__ = ["KEPT", "HeldOutRows"]

# Numbers of rotated features, 200 MiB in float64, that may be kept for the backward.
KEPT = 25 << 20


class HeldOutRows(Function):
    """(regs, X, Y, weight, tensors) -> held-out residuals (..., R, n, c) and variances (..., R, n, c').

    The passes have written both to a sink. Derivatives of order one; see Note [blockwise backward].
    """

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any,
        solved: "StreamFit",
        machines: "Machines",
        partition: Partition | None,
        sink: Sink,
        refitted: list[Refitted],
        *inputs: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        ctx.given = (solved, machines, partition, refitted)
        ctx.kept, solved.kept = solved.kept, []
        ctx.has_changed = solved.expansion.has_changed
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(sink.residuals, sink.variance, sink.targets, *inputs)
        return sink.residuals.to(solved.dtype), sink.variance.to(solved.dtype)

    @staticmethod
    @in_full_precision
    def backward(ctx: Any, rbar: Tensor | None, vbar: Tensor | None) -> tuple[Any, ...]:  # noqa: D102
        residuals, variance, targets, *inputs = ctx.saved_tensors
        _, X, _, _, *tensors = inputs
        no_inputs = (None,) * 5  # the arguments of forward that have no cotangents
        needs = ctx.needs_input_grad[len(no_inputs) :]
        solved, machines, partition, refitted = ctx.given
        if ctx.has_changed:
            raise RuntimeError(
                f"{solved.function}: parameters of the machine were changed in place between solve and "
                "held_out, so that there is no gradient in them; solve again"
            )
        given = [bar for bar in (rbar, vbar) if bar is not None]
        if torch.is_grad_enabled() or not values_visible(*given):  # or a batch of cotangents
            return *no_inputs, *_by_autograd(solved, partition, inputs, needs, rbar, vbar)
        rbar = torch.zeros_like(residuals) if rbar is None else rbar
        work = _Backward(solved, machines, partition, refitted, (residuals, variance, rbar, vbar), ctx.kept)
        work.gather()
        sent = _Sent(work, X if needs[1] else None, targets, needs[3], needs[4:], tensors)
        if any(needs[1:]):
            work.send(sent)
        bars = [work.regbar, sent.X, sent.Y, sent.weight, *sent.collected()]
        return *no_inputs, *(bar if need else None for bar, need in zip(bars, needs, strict=True))


def _by_autograd(
    solved: "StreamFit",
    partition: Partition | None,
    inputs: Sequence[Tensor | None],
    needs: Sequence[bool],
    rbar: Tensor | None,
    vbar: Tensor | None,
) -> list[Tensor | None]:
    """The same by differentiable operations on all rows at once, for derivatives of higher order."""
    # Views: no path leads from one to another, as from a basis to the rows that it was taken from.
    with torch.enable_grad():
        inputs = [t if t is None or not t.requires_grad else t.view_as(t) for t in inputs]
    regs, X, Y, weight, *tensors = inputs
    if solved.others.count > 1:  # each of which has some of the rows
        raise RuntimeError(
            f"{solved.function}: held-out rows that processes share have derivatives of order one only; take "
            "the gradient without create_graph=True"
        )
    if X is None or Y is None or weight is None:
        raise RuntimeError(
            f"{solved.function}: held-out rows of a stream have derivatives of order one only; give the "
            "rows as tensors for more"
        )
    assert regs is not None
    again, guard, bias = torch.is_grad_enabled(), Guard(solved.function), solved.moments.centre
    sets = partition or Partition.single(Y.shape[-2], X.device)
    groups = Partition(tuple(rows.to(X.device) for rows in sets.groups))
    with torch.enable_grad():
        Z = solved.expansion.whole(X, [t for t in tensors if t is not None])
        normal = Normal.of(centred(Z, weight.double(), bias)[0], weight, bias)
        known = solved.known(batch=weight.shape[:-1])
        regs = regs.double().movedim(-2, 0)  # (R, ..., c')
        of = normal.along(regs, Y.double(), known, lambda form: form.held_out(groups, guard)[:2])
        guard.check()
        residuals, variance = (part.to(Y.dtype).movedim(0, -3) for part in of)
    outputs = [(a, b) for a, b in ((residuals, rbar), (variance, vbar)) if b is not None]
    wanted = [t for t, need in zip(inputs, needs, strict=True) if need and t is not None]
    grads = iter(
        torch.autograd.grad(
            [a for a, _ in outputs], wanted, [b for _, b in outputs], create_graph=again, allow_unused=True
        )
    )
    return [next(grads) if need else None for need in needs]


class _Visit(NamedTuple):
    """Rows on their way back."""

    rows: slice | Tensor
    """Numbers of the rows."""
    part: Block
    U: Tensor
    """Rotated features, and ones for the bias, (..., p', b)."""
    zeta: Tensor
    """Weights, (..., 1, 1, b)."""
    a: Tensor
    """a = P Y, (..., R, c, b)."""
    abar: Tensor
    """Its cotangent, (..., R, c, b)."""
    D: Tensor
    """The diagonal of D, added up over the machines, (..., b), of sets; (..., R, c', b) of rows alone."""
    DN: Tensor | None
    """D N, added up over the machines, (..., p', b); None for rows alone, computed when needed."""


def _on(like: Tensor, rows: slice | Tensor) -> slice | Tensor:
    """Numbers of rows, on the device of a tensor."""
    return rows.to(like.device) if isinstance(rows, Tensor) else rows


class _Refit:
    """A set that was refitted.

    Attributes:
        effect: on the other rows.
        a: (s, c), of the machine of all rows.
        rbar: (s, c).
    """

    def __init__(self, work: "_Backward", one: Refitted) -> None:
        machines, p = work.machines, len(work.machines.rotation)
        self.r, self.j, (self.rows, X, root, Y, centre, coef) = one.r, one.j, one.machine
        self.outputs, self.zeta = machines.outputs_of(one.j), root[:, 0].square()
        z = (X + centre[0]).mT  # (p', s)
        U = torch.cat([machines.rotation @ z[:p], z[p:]])
        e = Y - U.mT @ work.q[one.r, self.outputs].mT  # (s, c)
        self.a = root.square() * e
        _, rbar, inverse, by_variance = work.cotangents(self.rows)
        g = torch.zeros_like(inverse) if by_variance is None else by_variance
        self.rbar, g = rbar[one.r, self.outputs].mT, g[one.r, one.j]  # (s, c), (s,)
        self.effect = Effect(one.j, centre, coef, one.spread @ self.rbar, one.spread, g)


def _inverse_blocks(
    X: Tensor, zeta: Tensor, f: Tensor, least: Tensor
) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """P_LL^{-1} of sets of rows X (..., g, s, p') as functions: of x, and diag(W diag(g) W), (..., g, s, 1).

    By Note [leaving sets out]; f (..., 1, 1, p'), least (..., 1). Lost sets get some harmless W.
    """
    B = X * zeta.sqrt() * f.sqrt()
    if X.shape[-2] <= X.shape[-1]:
        T, _ = root_of_rest(block_of_rest(B), least)
        W = T.mT @ T / zeta.sqrt() / zeta.sqrt().mT
        return (lambda x: W @ x), (lambda g: W.square() @ g)
    T, _ = root_of_rest(block_of_rest(B.mT), least)
    half = X * f.sqrt() @ (T.mT @ T) * f.sqrt()  # X C_L^{-1}

    def squares(g: Tensor) -> Tensor:
        quadratic = (half @ ((g * X).mT @ X) * half).sum(-1, keepdim=True)
        return g * (1 / zeta.square() + 2 * (X * half).sum(-1, keepdim=True) / zeta) + quadratic

    return (lambda x: x / zeta + half @ (X.mT @ x)), squares


class _Backward:
    """The passes of Note [blockwise backward]."""

    def __init__(
        self,
        solved: "StreamFit",
        machines: "Machines",
        partition: Partition | None,
        refitted: list[Refitted],
        fields: tuple[Tensor, Tensor, Tensor, Tensor | None],
        kept: list[Tensor | None],
    ) -> None:
        self.solved, self.machines, self.partition, self.kept = solved, machines, partition, kept
        self.others, self.visited = solved.others.backward(), dict[int, _Visit]()
        self.residuals, self.variance, self.rbar, self.vbar = fields
        self.f, self.q, self.each = machines.f_with_bias, machines.q, machines.each
        if machines.has_bias:  # for targets about their mean
            self.q = torch.cat([self.q, machines.shift.unsqueeze(-1)], -1)
        self.Q = self.f.new_zeros(*self.f.shape, self.f.shape[-1])
        self.sent: _Sent | None = None
        n, width = self.residuals.shape[-2], self.f.shape[:-3].numel() * self.f.shape[-1]
        self.keeps_sets = solved.stream.lasting and 2 * n * width <= KEPT  # features, and D N
        self.t, self.regbar = torch.zeros_like(self.q), torch.zeros_like(machines.regs)
        self.v = self.t  # until it is known
        self.refits = [_Refit(self, one) for one in refitted]
        if self.refits:
            self.lost = torch.zeros_like(self.variance, dtype=torch.bool)  # (R, n, c')
        for one in self.refits:
            self.lost[one.r, one.rows.to(self.lost.device), one.j] = True

    def cotangents(self, rows: slice | Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """r, rbar (..., R, c, b), diag(P_LL^{-1}) and reg vbar (..., R, c', b) of some rows, in float64."""
        regs = self.machines.regs.unsqueeze(-1)
        rows = _on(self.residuals, rows)

        def of(field: Tensor) -> Tensor:
            return field[..., rows, :].mT.to(regs)

        g = None if self.vbar is None else of(self.vbar) * regs
        return of(self.residuals), of(self.rbar), of(self.variance) / regs, g

    def gather(self) -> None:
        """The first of the two passes, and what follows from its sums."""
        self.others.run(self._own_sums)
        self._penalty()
        self.Q, self.v = self.others.sums(self.Q, self.v)
        self.total = self.Q.sum((-4, -3)) if len(self.each) > 1 else self.Q[..., 0, 0, :, :]
        host = torch.zeros((), dtype=torch.float64, device="cpu")
        everyone = self.others.gather([one.effect.to(host) for one in self.refits])
        self.effects = [effect.to(self.f) for effects in everyone for effect in effects]
        self.first = sum(map(len, everyone[: self.others.rank]))

    def _own_sums(self) -> None:
        for visit in self.visits("gradient: sums", gather=True):
            self.t += self.machines.sums(visit.U, visit.zeta * visit.abar)
        if self.partition is None:
            mirrored(self.Q)
            if not self.machines.triangular:
                self.Q *= self.f.unsqueeze(-1) * self.f.unsqueeze(-2)
            elif self.machines.has_bias:  # then f is 1 but for the bias
                self.Q[..., -1, :] *= self.f[..., -1:]
                self.Q[..., -1] *= self.f[..., -1:]

    def _penalty(self) -> None:
        """Cotangents of regs and of the penalty (p, p) without reg: the share of this process."""
        machines, rotation = self.machines, self.machines.rotation
        narrow, p = machines.narrow, rotation.shape[-1]
        gram = machines.times(narrow, narrow.mT, torch.empty_like(narrow)).to(rotation)
        has_gram = machines.expansion.gram is not None
        self.penalty = torch.zeros_like(rotation) if has_gram else None
        self.v = -self.f * self.t
        room = gram if len(self.each) == 1 else torch.empty_like(gram)
        for r, j, outputs in self.each:
            M = self.Q[..., r, j, :p, :p]
            left, right = (t[..., r, outputs, :p] for t in (self.v, self.q))
            by_solution = ((left @ gram) * right).sum((-2, -1))
            by_leverage = torch.mul(gram, M, out=room).sum((-2, -1))
            self.regbar[..., r, j] += by_leverage - by_solution
            if self.penalty is not None:
                outer = left.mT @ right
                self.penalty += machines.regs[..., r, j, None, None] * (M - (outer + outer.mT) / 2)
        self.penalty_without: Tensor | None = None
        if self.refits:
            self.penalty_without = torch.zeros_like(rotation)
            for one in self.refits:
                own = one.effect.penalty()[:p, :p]
                self.regbar[one.r, one.j] += own.diagonal().sum()
                self.penalty_without += machines.regs[one.r, one.j] * own

    def visits(self, what: str, gather: bool) -> Iterator[_Visit]:
        """All rows; Q and regbar are added to where it is these that are gathered."""
        if self.partition is None:
            for number, part in enumerate(self.solved.blocks(what)):
                visit, kept = self.visited.get(number), self.kept[number]
                if visit is None:
                    visit = self._single(part, self._rotated(part) if kept is None else kept, gather)
                    if kept is not None and self.solved.stream.lasting:  # else its rows take memory
                        self.visited[number] = visit
                yield visit
            return
        n = self.solved.stream.n
        assert n is not None
        partition = self.partition.padded(n, self.f.numel())
        for number, sets in enumerate(partition.chunks(self.solved.size)):
            visit = self.visited.get(number)
            if visit is None:
                visit = self._together(PaddedSets(sets, n), gather)
                if self.keeps_sets:
                    self.visited[number] = visit
            yield visit

    def _rotated(self, part: Block) -> Tensor:
        """U (p', b); in the second pass, columns with a graph are evaluated first and serve for both."""
        k = None if self.sent is None else self.sent.evaluated(part)
        return self.machines.rotated(part.X, ones=True, k=k)

    def _flags(self, rows: slice | Tensor) -> Tensor | None:
        """Whether rows were refitted, (..., R, c', b), if any were."""
        if not self.refits:
            return None
        return self.lost[..., _on(self.lost, rows), :].mT.to(self.f.device)

    def _single(self, part: Block, U: Tensor, gather: bool) -> _Visit:
        """Rows that are left out alone."""
        zeta = part.zeta
        r, rbar, inverse, g = self.cotangents(part.rows)
        product = rbar * r
        D = (product if inverse.shape[-2] == r.shape[-2] else product.sum(-2, keepdim=True)) * -inverse
        if g is not None:
            D = D - inverse.square() * g  # (..., R, c', b)
        if (flags := self._flags(part.rows)) is not None:
            D = D.masked_fill(flags, 0.0)
            rbar = rbar.masked_fill(flags, 0.0)
        abar = rbar * inverse
        weighted = zeta * D
        if gather:
            if g is not None:
                self.regbar += (g * inverse).sum(-1) / self.machines.regs
            twice = zeta * weighted
            for k, j, _ in self.each:
                add_symmetric(self.Q[..., k, j, :, :], U, twice[..., k, j, :])
        return _Visit(part.rows, part, U, zeta, r / inverse, abar, D, None)

    def _times_rows(self, visit: _Visit) -> Tensor:
        """D N (..., p', b), added up over the machines."""
        if visit.DN is not None:
            return visit.DN
        U, p = visit.U, self.machines.rotation.shape[-1]
        f, scale = (t.flatten(-3, -2).to(U.dtype) for t in (self.f, visit.zeta * visit.D))
        if not self.machines.triangular:
            return matmul_into(room_like(U, U.shape[-2]), f.mT, scale).mul_(U)
        DN = U * scale
        DN[..., p:, :] *= f[..., p:].mT  # f is 1 but for the bias
        return DN

    def _together(self, sets: PaddedSets, gather: bool) -> _Visit:
        """Sets (g, s) of one group."""
        rows = sets.rows
        part = self.solved.stream.take(self.solved.function, rows)
        U, zeta = self._rotated(part).double(), part.weight.double()
        r, rbar, inverse, g = self.cotangents(rows)
        flags = self._flags(rows)
        X = sets.laid_out(U).movedim(-3, -1)  # (..., g, s, p')
        z = sets.laid_out(zeta, zeta.min()).unsqueeze(-1)  # (..., g, s, 1)
        r_sets, rbar_sets = sets.laid_out(r), sets.laid_out(rbar)  # (..., R, c, g, s)
        g_sets = None if g is None else sets.laid_out(g)
        lost_sets = None if flags is None else sets.laid_out(flags)
        abar, a = torch.empty_like(r), torch.empty_like(r)
        diagonal, DN = torch.zeros_like(z), None
        for k, j, outputs in self.each:
            lost = None if lost_sets is None else lost_sets[..., k, j, :, :1, None]
            f = self.f[..., k, j, None, None, :]
            times, squares = _inverse_blocks(X, z, f, self.machines.least[..., k, j, None])
            r_L, rbar_L = (t[..., k, outputs, :, :].movedim(-3, -1) for t in (r_sets, rbar_sets))
            N, abar_L = z * X * f, times(rbar_L)  # (..., g, s, p') and (..., g, s, c)
            both = torch.cat([abar_L, r_L], -1)  # (..., g, s, 2 c)
            swapped = torch.cat([r_L, abar_L], -1) * -0.5
            DN_L = both @ (swapped.mT @ N)
            diagonal_L = -(abar_L * r_L).sum(-1, keepdim=True)
            if g_sets is not None:
                g_L = g_sets[..., k, j, :, :, None]
                DN_L, diagonal_L = DN_L - times(g_L * times(N)), diagonal_L - squares(g_L)
            if lost is not None:  # those have a share of their own
                DN_L, diagonal_L = DN_L.masked_fill(lost, 0.0), diagonal_L.masked_fill(lost, 0.0)
            DN = DN_L if DN is None else DN + DN_L
            diagonal = diagonal + diagonal_L
            a_L = z * r_L - N @ (X.mT @ (z * r_L))  # P_LL = Omega - N X^T Omega
            for found, of_sets in ((abar, abar_L), (a, a_L)):
                found[..., k, outputs, :] = sets.taken(of_sets.movedim(-1, -3))
            if gather:
                self.Q[..., k, j, :, :] += N.flatten(-3, -2).mT @ DN_L.flatten(-3, -2)
        assert DN is not None
        if gather and g is not None:
            self.regbar += (g * inverse).sum(-1) / self.machines.regs
        D, DN_rows = sets.taken(diagonal[..., 0]), sets.taken(DN.movedim(-1, -3))
        return self._with_refits(_Visit(rows, part, U, part.zeta, a, abar, D, DN_rows))

    def _with_refits(self, visit: _Visit) -> _Visit:
        """A visit with a of refitted sets among its rows put in place; its cotangent is elsewhere."""
        for one, at in self._refits_among(visit):
            visit.abar[one.r, one.outputs][..., at] = 0.0
            visit.a[one.r, one.outputs][..., at] = one.a.mT
        return visit

    def _refits_among(self, visit: _Visit) -> Iterator[tuple[_Refit, Tensor]]:
        """Refitted sets that a visit comes to, and where their rows are in it."""
        if not self.refits:
            return
        if isinstance(visit.rows, slice):
            start, stop = visit.rows.start, visit.rows.stop
            for one in self.refits:
                if start <= int(one.rows[0]) < stop:
                    yield one, (one.rows - start).to(visit.U.device)
            return
        place = {row: k for k, row in enumerate(visit.rows.tolist())}
        for one in self.refits:
            if int(one.rows[0]) in place:
                at = [place[row] for row in one.rows.tolist()]
                yield one, torch.tensor(at, device=visit.U.device)

    def _without_sets(self, visit: _Visit) -> tuple[Tensor, Tensor, Tensor] | None:
        """What refitted sets add to cotangents of features (p, b), targets (b, c) and weights (b,)."""
        if not self.effects:
            return None
        z, Y = self.solved.about_means(visit.part)
        p, zeta = len(z), visit.part.weight.double()
        if self.machines.has_bias:
            z = torch.cat([z, torch.ones_like(z[:1])])
        zbar, Ybar, zetabar = torch.zeros_like(z), torch.zeros_like(Y), torch.zeros_like(zeta)
        among = {self.first + self.refits.index(one): (one, at) for one, at in self._refits_among(visit)}
        for number, effect in enumerate(self.effects):
            outputs = self.machines.outputs_of(effect.j)
            by_z, by_Y, by_zeta = effect.on(z, Y[:, outputs], zeta)
            if number in among:
                one, at = among[number]
                by_z[:, at] = 2 * effect.H * effect.g - effect.coef @ one.rbar.mT
                by_Y[at], by_zeta[at] = one.rbar, -effect.g / one.zeta.square()
            zbar += by_z
            Ybar[:, outputs] += by_Y
            zetabar += by_zeta
        return zbar[:p], Ybar, zetabar

    def send(self, sent: "_Sent") -> None:
        """The second pass."""
        v, self.sent = None, sent
        for visit in self.visits("gradient", gather=False):
            U, zeta, a = visit.U, visit.zeta, visit.a
            if v is None:  # the products have the dtype of the features
                kind = U.dtype
                v, total = self.v.to(kind), self.total.to(kind)
                vq = torch.cat([v, self.q.to(kind)], -2).flatten(-3, -2).mT  # (..., p', 2 R c)
            s = visit.abar + together(v, U)  # (..., R, c, b)
            weighted = zeta * s
            UQ, DN = matmul_into(room_like(U, U.shape[-2]), total, U), self._times_rows(visit)
            zbar, by_Y, by_weight = self._without_sets(visit) or (None, None, None)
            if sent.weight is not None:
                own = torch.sub(UQ, DN, alpha=2).mul_(U).sum(-2)
                diagonal = visit.D if visit.DN is not None else visit.D.sum((-3, -2))
                zetabar = diagonal + own + (s * a / zeta).sum((-3, -2))
                zetabar = zetabar if by_weight is None else zetabar + by_weight
                sent.weight[..., _on(sent.weight, visit.rows)] = zetabar.to(sent.weight)
            ubar = UQ.sub_(DN).mul_(2 * zeta[..., 0, :].to(kind))
            add_matmul(ubar, vq, torch.cat([a, -weighted], -2).flatten(-3, -2).to(kind))
            Ybar = weighted.sum(-3).mT
            sent.add(visit, ubar, Ybar if by_Y is None else Ybar + by_Y, zbar)


class _Sent:
    """Where the cotangents of the second pass go: rows in memory, and what the features depend on."""

    def __init__(
        self,
        work: _Backward,
        X: Tensor | None,
        Y: Tensor,
        needs_weight: bool,
        needs: Sequence[bool],
        tensors: Sequence[Tensor],
    ) -> None:
        machines = work.machines
        self.expansion = machines.expansion
        self.machines, self.penalty, self.penalty_without = machines, work.penalty, work.penalty_without
        self.X = None if X is None else torch.empty_like(X)  # every row of which is written
        self.Y, self.weight = torch.empty_like(Y), torch.empty_like(Y[..., 0]) if needs_weight else None
        self.tensors = [t.detach().requires_grad_(need) for t, need in zip(tensors, needs, strict=True)]
        self.wanted = [t for t in self.tensors if t.requires_grad]
        self.found: list[Tensor | None] = [None for _ in self.wanted]
        self._evaluated: tuple[Block, Tensor, Tensor] | None = None

    def evaluated(self, part: Block) -> Tensor | None:
        """Columns k (..., p, b) of a block with their graph, for `add`.

        None if nothing depends on them, or if they are rows.
        """
        if (self.X is None and not self.wanted) or self.expansion.evaluate is transposed:
            return None
        with torch.enable_grad():
            x = part.X.detach().requires_grad_(self.X is not None)
            k = self.expansion.evaluate(x, self.tensors)
        self._evaluated = part, x, k
        return k

    def add(self, visit: _Visit, ubar: Tensor, Ybar: Tensor, zbar: Tensor | None) -> None:
        """Cotangents (..., p', b) and (..., b, c) of the rows of a visit; zbar (p, b) is that of features."""
        rows = _on(self.Y, visit.rows)
        self.Y[..., rows, :] = Ybar.to(self.Y)
        if self.X is None and not self.wanted:
            return
        if self._evaluated is None or self._evaluated[0] is not visit.part:
            self.evaluated(visit.part)
        evaluated, self._evaluated = self._evaluated, None
        forth = self.machines.forth.to(ubar.dtype)
        ubar = ubar[..., : forth.shape[-1], :]
        columns = times_upper(forth, ubar) if self.machines.triangular else forth.mT @ ubar  # (..., p, b)
        if zbar is not None:
            columns = columns + self._of_columns(zbar)
        if self.expansion.mask is not None:
            columns = columns * self.expansion.mask
        if evaluated is None:  # the rows are columns
            if self.X is not None:
                self.X[..., rows, :] = columns.mT.to(self.X)
            return
        _, x, k = evaluated
        inputs = [x, *self.wanted] if self.X is not None else self.wanted
        grads = torch.autograd.grad(k, inputs, columns.to(k.dtype), allow_unused=True)
        if self.X is not None:
            self.X[rows] = grads[0]
            grads = grads[1:]
        self._keep(grads)

    def _of_columns(self, zbar: Tensor) -> Tensor:
        """L^{-T} zbar: the cotangent of kernel columns from that of features (p, b)."""
        factor = self.expansion.factor
        return zbar if factor is None else torch.linalg.solve_triangular(factor.mT, zbar, upper=True)

    def _keep(self, grads: Sequence[Tensor | None]) -> None:
        pairs = zip(self.found, grads, strict=True)
        self.found = [b if a is None else a if b is None else a + b for a, b in pairs]

    def collected(self) -> list[Tensor | None]:
        """Cotangents of the tensors, once all rows were added."""
        if self.expansion.gram is not None and self.wanted:
            with torch.enable_grad():
                Kzz = self.expansion.gram(self.tensors)
                F = self.machines.forth
                assert self.penalty is not None
                bar = F.mT @ self.penalty @ F
                if self.penalty_without is not None:
                    bar = bar + self._of_columns(self._of_columns(self.penalty_without).mT)
                if self.expansion.mask is not None:
                    bar = bar * self.expansion.mask * self.expansion.mask.mT
                self._keep(torch.autograd.grad(Kzz, self.wanted, bar.to(Kzz.dtype), allow_unused=True))
        found = iter(self.found)
        return [next(found) if t.requires_grad else None for t in self.tensors]
