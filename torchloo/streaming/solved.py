"""Machines solved by passes over a stream of rows, and their exact held-out outputs.

Note [passes]
The first pass gathers the normal equations (Note [moments]). The second gives every row its residual e
and leverage h, and so its held-out residual e / (1 - h); see Note [primal form]. It also gathers what a
step of iterative refinement needs: if that step could move a held-out output by more than `_SETTLED` of
the spread of the targets, one more pass applies it, so the squared condition number of normal equations
does no harm. Rows whose 1 - h is lost to rounding are refitted (Note [leaving out by sums]) in two more.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

import torch
from torch import Tensor

from torchloo.guards import Guard
from torchloo.held_out import HeldOut
from torchloo.problem import check_regs
from torchloo.streaming.collective import Alone, require_same
from torchloo.streaming.machines import Expansion, Machines, one_machine, path_machines
from torchloo.streaming.moments import Moments
from torchloo.streaming.refit import Lost, refit
from torchloo.streaming.sets import leave_out_sets
from torchloo.streaming.sink import Sink, require_folders
from torchloo.streaming.stream import Block, Stream
from torchloo.sums import REFIT_BELOW

if TYPE_CHECKING:
    from torchloo.machine import LeastSquares

__all__ = ["StreamFit", "gather_moments"]

# Part of the spread of the targets by which no held-out output may be in doubt: by a bound for all rows,
# which is many times what happens, and by what would happen to the last rows. Float32 has fewer digits.
_SETTLED = {torch.float64: (1e-9, 1e-11), torch.float32: (1e-7, 1e-8)}

# A leverage from which on residuals, soon divided by a small 1 - h, take no shortcut.
_LARGE = 0.9


class StreamFit:
    """A least-squares machine solved from a stream; `machine.fit(solved)` stores it.

    It stays as it was solved, whatever becomes of the machine, and keeps no graph. Memory: a few (m, m)
    matrices and a few blocks of m features, whatever the number n of rows, in float64; and what comes
    back, of order n c for each regularisation.

    Args:
        machine: whose it is.
        function: name that errors carry.
        stream: the rows.
        expansion: their features.
        moments: what the first pass gathered of them.
        reg: regularisation, a 0-dimensional tensor.
        others: the processes that hold the other rows.
    """

    def __init__(
        self,
        machine: "LeastSquares",
        function: str,
        stream: Stream,
        expansion: Expansion,
        moments: Moments,
        reg: Tensor,
        others: Alone,
    ) -> None:
        if reg.ndim:
            raise ValueError(f"{function}: reg must be one number for a stream, got shape {tuple(reg.shape)}")
        moments.join(others)
        self.function, self.stream, self.expansion, self.moments = function, stream, expansion, moments
        self.others, self._owner, self._solved_with = others, machine, _settings(machine)
        self._machine = others.together(
            lambda: one_machine(Guard(function), expansion, moments, reg.to(moments.S))
        )

    def checked_for(self, machine: "LeastSquares") -> Self:
        """The same, if it is this machine that was solved, as it is now."""
        if machine is not self._owner:
            raise ValueError(f"{self.function}: fit takes only what solve of the same machine gave")
        now = _settings(machine)
        for name, before in self._solved_with.items():
            if name not in now or not torch.equal(now[name].to(before), before):
                raise ValueError(
                    f"{self.function}: {name} of the machine has changed since solve; solve the stream again"
                )
        return self

    @property
    def dtype(self) -> torch.dtype:
        """Of inputs and targets."""
        return self.moments.dtype

    @property
    def size(self) -> int:
        """Rows in a block."""
        return self.stream.block or self.expansion.size

    @property
    def coef(self) -> Tensor:
        """Coefficients (p, c) of the features about their mean; refined by a pass if there was none yet."""
        return self._called("coef").refined(self._machine).coefficients()[0]

    @property
    def offset(self) -> Tensor:
        """Output at the mean of the features, (c,)."""
        return self._called("offset").refined(self._machine).offset[0]

    def held_out(self, clusters: object | None = None, out: str | Path | None = None) -> HeldOut:
        """What the machine would have said of every row, had it not seen it or its cluster.

        Args:
            clusters: integer labels (n,) on the host, in any order; None leaves every row out alone.
                Rows of a cluster are gathered wherever they stand: those of arrays by indexing; batches
                are first spooled to a temporary file, of n (d + c + 1) numbers.
            out: folder for outputs.npy, residuals.npy, variance.npy, refitted.npy, targets.npy and
                weight.npy, whose memory the HeldOut then shares; None keeps everything in memory. One
                of its own for each process, where there are several. Their room is reserved first:
                OSError where the disk has too little, and then nothing is left behind.

        Returns:
            HeldOut in the order of the rows.

        Cost: a pass of n m^2 multiplications, and those of Note [passes] where rounding demands them.
        """
        return self._called("held_out")._held_out(self._machine, clusters, out, path=False)

    def path(self, regs: Tensor, clusters: object | None = None, out: str | Path | None = None) -> HeldOut:
        """`held_out` for every regularisation, (R,) or (R, c), in front of all other axes.

        One eigendecomposition of an (m, m) matrix serves them all, and so does every pass. The
        machine's own reg is not used.
        """
        self._called("path")
        checked = self.others.together(lambda: self._checked_regs(regs))
        require_same(self.function, self.others, "regs", checked.tolist())
        machines = path_machines(self.expansion, self.moments, checked)
        return self._held_out(machines, clusters, out, path=True)

    def _called(self, name: str) -> Self:
        """The same; what is asked of other processes from now on carries the name."""
        self.others = self.others.named(f"StreamFit.{name}")
        return self

    def _checked_regs(self, regs: Tensor) -> Tensor:
        """Regularisations (R, 1) or (R, c)."""
        guard = Guard(self.function)
        checked = check_regs(guard, regs, self.moments.T.shape[1], like=self.moments.S)
        guard.check()
        return checked.detach()

    def blocks(self, what: str) -> Iterator[Block]:
        """The blocks of one pass, found to be those of the first, under a bar that says what it is for."""
        for part in self.stream.blocks(self.function, self.size, what):
            self.moments.seen.require_same(self.function, part)
            yield part

    @property
    def per_weight(self) -> Tensor:
        """What the bias adds to z^T C^{-1} z: 1 / w, or 0 without one."""
        return self.moments.centre / self.moments.weight

    @torch.no_grad()
    def _held_out(
        self, machines: Machines, clusters: object | None, out: str | Path | None, path: bool
    ) -> HeldOut:
        n = self.stream.n
        assert n is not None
        R, c = machines.offset.shape
        require_same(self.function, self.others, "whether there are clusters", clusters is not None)
        require_folders(self.function, self.others, out)
        kind = (machines.regs.shape[1], self.dtype, self.moments.S.device)
        with Sink(self.function, (R, n, c), *kind, out) as sink:
            self.others.together(sink.open)
            labels = None
            if clusters is None:
                self._leave_one_out(machines, sink)
            else:
                labels = leave_out_sets(self, machines, clusters, sink)
        return sink.held_out(labels, self.stream.flat, path)

    def _leave_one_out(self, machines: Machines, sink: Sink) -> None:
        n = sum(self.others.gather(self.stream.n))
        if n < 2:
            raise ValueError(f"{self.function}: leave-one-out needs at least 2 rows, got {n}")
        seen = self.others.together(lambda: self._visit(machines, sink))
        step = self._step(machines, seen.gradient)
        if not machines.refined and self._matters(machines, *step, seen):
            self.others.together(lambda: self._correct(machines, sink, *step))
        machines.move(*step)
        refit(self, machines, sink, seen.lost)

    def _visit(self, machines: Machines, sink: Sink) -> "_Seen":
        """The second pass of Note [passes]."""
        gradient = _Gradient(machines)
        worst = machines.regs.new_zeros(2, *machines.regs.shape)
        lost: Lost = {}
        for part in self.blocks("leave-one-out"):
            zeta = part.weight.double()
            u = machines.rotated(part.X)
            norm = machines.norms(u).add_(self.per_weight)  # (R, c', b)
            if bool((zeta * norm).max() > _LARGE):  # Note [folding]
                u = machines.rotated(part.X, fold=False)
                norm = machines.norms(u).add_(self.per_weight)
            e, one = machines.residuals(u, part), 1 - zeta * norm
            cancelled = ~(one > REFIT_BELOW)
            one.masked_fill_(cancelled, 1.0)
            sink.write(part, e / one, machines.regs.unsqueeze(-1) / (zeta * one), part.rows)
            for r, j, i in cancelled.nonzero().tolist():
                row = torch.tensor([part.start + i], device="cpu")
                lost.setdefault((r, j), []).append((row, True))
            factors = torch.stack([(norm.sqrt_() / one).amax(-1), 1 / one.amin(-1)])
            worst = torch.maximum(worst, factors)
            gradient.add(u, e.mul_(zeta))
        return _Seen(gradient, lost, worst, u, one)

    def _correct(self, machines: Machines, sink: Sink, step: Tensor, shift: Tensor) -> None:
        """Apply a step to held-out residuals, by r = (e - u^T step - shift) / (1 - h)."""
        regs = machines.regs.unsqueeze(-1)
        for part in self.blocks("correction"):
            change = machines.outputs(machines.rotated(part.X), step) + shift.unsqueeze(-1)  # (R, c, b)
            r, variance = (t[:, part.rows].to(change).mT for t in (sink.residuals, sink.variance))
            sink.write(part, r - change * variance * part.weight.double() / regs, variance, part.rows)

    def refined(self, machines: Machines) -> Machines:
        """The machines, after a pass for a step of refinement if there was none yet."""
        if not machines.refined:
            with torch.no_grad():
                machines.move(*self._step(machines, self.others.together(lambda: self._gradient(machines))))
        return machines

    def _gradient(self, machines: Machines) -> "_Gradient":
        gradient = _Gradient(machines)
        for part in self.blocks("refinement"):
            u = machines.rotated(part.X)
            gradient.add(u, machines.residuals(u, part).mul_(part.weight.double()))
        return gradient

    def _step(self, machines: Machines, gradient: "_Gradient") -> tuple[Tensor, Tensor]:
        """What refinement adds to the coefficients, (R, c, p), and to the offset, (R, c)."""
        by_feature, total = self.others.sums(gradient.by_feature, gradient.total)
        return machines.step(by_feature), total * self.per_weight

    def _matters(self, machines: Machines, step: Tensor, shift: Tensor, seen: "_Seen") -> bool:
        """Whether a step could move a held-out output by more than `_SETTLED`.

        By Cauchy and Schwarz, |u^T step| <= (sum f u^2)^{1/2} (sum step^2 / f)^{1/2}.
        """
        length = (step.square() / machines.f).sum(-1).sqrt()  # (R, c)
        most = seen.worst[0] * length + seen.worst[1] * shift.abs()
        change = machines.outputs(seen.u, step) + shift.unsqueeze(-1)  # (R, c, b)
        for_all, for_last = _SETTLED[self.dtype]
        matters = (most > for_all * machines.spread).any()
        matters |= ((change / seen.one).abs().amax(-1) > for_last * machines.spread).any()
        return any(self.others.gather(bool(matters)))


def _settings(machine: "LeastSquares") -> dict[str, Tensor]:
    """A copy of what the coefficients of a machine depend on, by name."""
    state = machine.kernel.state_dict(prefix="kernel.") | {"log_reg": machine.log_reg.detach()}
    return {name: value.clone() for name, value in state.items() if isinstance(value, Tensor)}


class _Seen(NamedTuple):
    """What a pass for leave-one-out brings beside the rows."""

    gradient: "_Gradient"
    lost: Lost
    """Rows to be refitted."""
    worst: Tensor
    """The largest (sum f u^2)^{1/2} / (1 - h) and 1 / (1 - h) of all rows, (2, R, c')."""
    u: Tensor
    """Rotated features of the last block, (p, b)."""
    one: Tensor
    """Its 1 - h, (R, c', b)."""


class _Gradient:
    """sum zeta e u^T, (R, c, p), and sum zeta e, (R, c), over blocks."""

    def __init__(self, machines: Machines) -> None:
        self.by_feature, self.total = torch.zeros_like(machines.q), torch.zeros_like(machines.offset)

    def add(self, u: Tensor, weighted: Tensor) -> None:
        """Add rows with rotated features (p, b) and weighted residuals (R, c, b)."""
        self.by_feature += (weighted.flatten(0, 1) @ u.mT).unflatten(0, weighted.shape[:2])
        self.total += weighted.sum(-1)


def gather_moments(function: str, stream: Stream, expansion: Expansion, bias: bool) -> Moments:
    """The first pass of Note [passes]: n m^2 multiplications, half as many again for sparse features."""
    moments = None
    for part in stream.blocks(function, expansion.size, "normal equations"):
        Z = expansion.features(expansion.columns(part.X))
        if moments is None:
            moments = Moments(Z, len(Z), part.Y.shape[1], part.X.dtype, centre=bias)
        moments.seen.note(part)
        moments.add(Z, part.Y.double(), part.weight.double())
    assert moments is not None
    return moments
