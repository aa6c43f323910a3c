"""Machines solved by passes over a stream of rows, and their exact held-out outputs.

Note [passes]
The first pass gathers the normal equations (Note [moments]). The second gives every row its residual e
and leverage h, and so its held-out residual e / (1 - h); see Note [primal form]. It also gathers what a
step of iterative refinement needs: if that step could move a held-out output by more than `_SETTLED` of
the spread of the targets, one more pass applies it, so the squared condition number of normal equations
does no harm. Rows whose 1 - h is lost to rounding are refitted (Note [refits by triangles]) in two more.

A batch of problems in memory goes through the same passes together, with one more axis in front. Problems
with rows that are to be refitted leave the batch and are solved one by one.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor, nn

from torchloo.clusters import Partition
from torchloo.factors import SINGLE, condition, triangle
from torchloo.guards import Guard, full_dtype, may_look, require_inputs
from torchloo.held_out import HeldOut, assemble
from torchloo.precision import in_full_precision
from torchloo.primal.backward import KEPT, HeldOutRows
from torchloo.primal.block import Block, Memory, Source
from torchloo.primal.collective import Peers, require_own, require_same
from torchloo.primal.machines import (
    LARGE,
    Expansion,
    ImpreciseError,
    Machines,
    ProblemsApartError,
    one_machine,
    path_machines,
    transposed,
)
from torchloo.primal.moments import Moments, shares
from torchloo.primal.refit import Lost, Refitted, refit
from torchloo.primal.sets import leave_out_sets
from torchloo.primal.sink import Sink, require_folders
from torchloo.primal.whole import Known, spread_of
from torchloo.problem import Regs

__all__ = ["MachineOfFeatures", "StreamFit"]

# Part of the spread of the targets by which no held-out output may be in doubt: by a bound for all rows,
# which is many times what happens, and by what would happen to the last rows. Float32 has fewer digits.
_SETTLED = {torch.float64: (1e-9, 1e-11), torch.float32: (1e-7, 1e-8)}


class MachineOfFeatures(Protocol):
    """What the engine asks of a machine: above all, what the features of its rows are."""

    _function: str
    has_bias: bool
    kernel: Any
    log_reg: nn.Parameter
    classes: Tensor | None

    @property
    def row_axis(self) -> int:
        """The axis of the rows of X, counted from behind."""

    @property
    def has_given_classes(self) -> bool:
        """Whether the classes were given beforehand."""

    def is_one(self, reg: Tensor | Regs) -> bool:
        """Whether there is no batch of regularisations."""

    def coded_targets(self, guard: Guard, X: Tensor, y: Any, classes: Tensor) -> tuple[Any, Any]:
        """Labels of known classes as targets, and the classes."""

    def checked_targets(self, X: Tensor, y: Any) -> tuple[Guard, Tensor, bool]:
        """Checks still to be made, targets (..., n, c), and whether they came without an output axis."""

    def features_of(
        self, guard: Guard, X: Tensor, Y: Tensor, weight: Tensor | None
    ) -> tuple[Tensor, Expansion] | None:
        """Rows in memory with their graph and features; None if there are no explicit features."""

    def features_of_rows(self, first: Callable[[int], Tensor]) -> Expansion:
        """The features of rows that come in blocks; `first(k)` returns the first k rows."""


class StreamFit:
    """A least-squares machine solved from a stream; `machine.fit(solved)` stores it.

    It does not change when the machine does. Held-out rows belong to the graph of the
    machine's parameters as they were then; coefficients to none. Memory, also in the backward: a few (m, m)
    matrices and a few blocks of m features, whatever the number n of rows, in float64; with a graph 200 MiB
    of features at most, so that they are not computed again; and what comes back, of order n c for each
    regularisation.

    Args:
        guard: demands on values that were not looked at yet, and the name that errors carry.
        stream: the rows.
        expansion: their features.
        reg: regularisation, a 0-dimensional tensor; or Regs, those of a path or one for each output.
        bias: whether there is an unpenalised bias.
        others: the processes that hold the other rows.
        owner: the machine that may be fitted by it; None where none may.
    """

    kept: list[Tensor | None]
    _solved: Machines | None

    @in_full_precision
    def __init__(
        self,
        guard: Guard,
        stream: Source,
        expansion: Expansion,
        reg: Tensor | Regs,
        bias: bool,
        others: Peers | None = None,
        owner: MachineOfFeatures | None = None,
    ) -> None:
        others = Peers() if others is None else others
        self.function, self.stream, self.expansion, self.others = guard.function, stream, expansion, others
        if isinstance(reg, Tensor) and reg.shape != stream.batch:
            raise ValueError(
                f"{self.function}: reg must be one number for a stream, got shape {tuple(reg.shape)}"
            )
        self._call = others.call if stream.lasting else ""  # no call of this object is public then
        self.wants_graph, self.kept, self._guard = False, [], guard
        self._owner = owner
        self._solved_with = {} if stream.lasting or owner is None else _settings(owner)
        # Float32 if the rows are, and that is accurate enough.
        expansion.kind = torch.float32 if expansion.single else torch.float64
        self._given_regs = torch.as_tensor(reg if isinstance(reg, Tensor) else reg.values)
        with torch.no_grad():
            if others.count > 1:
                self._agree(bias)
            self._sum_up(bias)
        self._regularise(reg)

    def _regularise(self, reg: Tensor | Regs) -> None:
        """Take one regularisation, those of a path, or one for each output."""
        self._path, self._solved = isinstance(reg, Regs) and reg.path, None
        batch = self.moments.S.shape[:-2]
        if isinstance(reg, Tensor):
            self.regs = reg.double().reshape(*batch, 1, 1)
            return
        guard, outputs, axes = self._guard, self.moments.T.shape[-1], len(self.stream.batch)
        regs = self.others.run(lambda: reg.checked(guard, outputs, self.moments.S, axes))
        self.regs = regs.movedim(0, -2)  # (..., R, c')
        if axes:
            self.regs = self.regs.expand(*self.stream.batch, -1, -1).flatten(0, axes - 1)
        if self.others.count > 1:
            self.others.run(guard.check)
            require_same(self.function, self.others, "regs", self.regs.tolist())

    def _sum_up(self, bias: bool) -> None:
        self.moments = self.others.run(lambda: self._gather(bias))
        self.moments.join(self.others)
        self._solved = None

    @property
    @in_full_precision
    def _machine(self) -> Machines:
        """The machine of its own regularisation, or several of them, solved when first asked for."""
        try:
            machines = self._solve()
            if machines.settle(self._guard.read(*machines.unread)):
                return machines
        except ImpreciseError:
            pass
        self._in_double()
        machines = self._solve()
        self._guard.check()
        return machines

    def _solve(self) -> Machines:
        """The same; whether products in float32 are accurate may be left open."""
        if self._solved is None:
            self._solved = self._solve_now()
        return self._solved

    @torch.no_grad()
    def _solve_now(self) -> Machines:
        regs, given = self.regs.detach(), (self._guard, self.expansion, self.moments)
        X, Y, _ = self.stream.graph
        if X is not None and self.expansion.evaluate is transposed:
            self._guard.implied(self.moments.S.diagonal(dim1=-2, dim2=-1), X)
        if Y is not None:
            self._guard.implied(self.moments.squares, Y)
        if self._path or regs.shape[-2:].numel() > 1:
            return path_machines(*given, regs, self._triangle)
        return one_machine(*given, regs, self._triangle)

    def _in_double(self) -> None:
        """Begin again, with products in float64."""
        self.expansion.kind = torch.float64
        with torch.no_grad():
            self._sum_up(self.moments.centre)

    def _gather(self, bias: bool) -> Moments:
        """The first pass of Note [passes]: n m^2 multiplications, half as many again for sparse features."""
        moments = None
        for part in self.stream.blocks(self.function, self.expansion.size, "normal equations"):
            columns, first = self._columns(part), moments is None
            if moments is None:
                if columns.ndim != part.Y.ndim:
                    raise ValueError(
                        f"{self.function}: X must be (n, d), or (n, *event) with as many axes as the "
                        f"event_dim of the kernel, got a block of shape {tuple(part.X.shape)}"
                    )
                if bias and self.expansion.origin is None:
                    columns.sub_(self.expansion.begin(_mean(columns, part), part.Y.dtype))
                p, c = columns.shape[-2], part.Y.shape[-1]
                moments = Moments(part.weight, p, c, part.Y.dtype, centre=bias)
            if self.expansion.factor is not None:
                longest = columns.square().sum(-2).amax(-1).sqrt()
                moments.longest = torch.maximum(moments.longest, longest)
            if not self.stream.lasting:
                moments.seen.note(part)
            all_rows = part.Y.shape[-2] == self.stream.n and self.others.count == 1
            moments.add(self.expansion.features(columns), part.Y.double(), part.weight.double(), all_rows)
            if first and self._is_imprecise(moments):
                self.expansion.kind = torch.float64
                return self._gather(bias)
        assert moments is not None
        if moments.rows is not None:
            self.expansion.keep_columns()
        return moments

    def _columns(self, part: Block) -> Tensor:
        """Columns (p, b) of the first block or others; rows that are not float32 have float64 products."""
        if part.Y.dtype != torch.float32:
            self.expansion.kind = torch.float64
        return self.expansion.columns(part.X)

    def _is_imprecise(self, moments: Moments) -> bool:
        """Whether the first of several blocks shows that float32 products will not do for all of them.

        Only where that can be read at no cost; elsewhere it is found out at the end.
        """
        n = self.stream.n or moments.count
        several = self.stream.n is None or n > moments.count
        if self.expansion.kind == torch.float64 or not several or self.others.count > 1:
            return False
        if not may_look(moments.S) or not self._given_regs.numel():  # an error for later
            return False
        C = moments.S * (n / moments.count)
        C.diagonal(dim1=-2, dim2=-1).add_(self._given_regs.detach().min().to(C))
        return not bool((condition(torch.linalg.cholesky_ex(C).L) < SINGLE).all())

    def _agree(self, bias: bool) -> None:
        """See that all processes have rows of one kind, and give their features one origin."""

        def first() -> tuple[Tensor, Block]:
            part = next(self.stream.blocks(self.function, self.expansion.size, "first rows"))
            return _mean(self._columns(part), part), part

        mean, part = self.others.run(first)
        kind = (len(mean), part.Y.shape[1], str(part.Y.dtype), bias)
        require_same(self.function, self.others, "features, outputs, dtype and bias", kind)
        if bias:
            self.expansion.begin(self.others.gather(mean.cpu())[0].to(mean), part.Y.dtype)

    def _triangle(self) -> tuple[Tensor, Tensor]:
        """R (p, p) and d (p, c), R^T R = S and R^T d = T, by QR factorisations of blocks of one more pass."""
        R, p = self.others.run(self._own_triangle), self.moments.S.shape[-1]
        if self.others.count > 1:
            R = triangle(torch.cat([part.to(R) for part in self.others.gather(R.cpu())]))
        return R[..., :p, :p], R[..., :p, p:]

    def _own_triangle(self) -> Tensor:
        moments = self.moments
        *batch, p, c = moments.T.shape
        R = moments.S.new_zeros(*batch, p + c, p + c)
        for part in self.blocks("orthogonal factor"):
            features, Y = self.about_means(part, moments.rows)
            rows = torch.cat([features.mT, Y], -1)
            R = triangle(torch.cat([R, rows * part.weight.double().sqrt().unsqueeze(-1)], -2))
        return R

    def about_means(self, part: Block, features: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Features (..., p, b) and targets (..., b, c) of a block about their means, in float64.

        What is small beside a mean keeps its digits for a tiny penalty. The features may be known already.
        """
        if features is None:
            features = self.expansion.features(self.expansion.columns(part.X)).sub_(self.moments.mean_z)
        return features, part.Y.double() - self.moments.mean_y

    def checked_for(self, machine: MachineOfFeatures) -> Self:
        """The same, if it is this machine that was solved, as it is now."""
        if machine is not self._owner:
            raise ValueError(f"{self.function}: fit takes only the result of solve of the same machine")
        if self._path:
            raise ValueError(f"{self.function}: fit takes one machine, got a path of {len(self.regs)}")
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
    @in_full_precision
    def coef(self) -> Tensor:
        """Coefficients (p, c) of the features about their mean, (R, p, c) of a path.

        They are refined by a pass if there was none yet.
        """
        coef = self._called("coef").refined(self._machine).coefficients()
        return self._shaped(coef, 2)

    @property
    def centre(self) -> Tensor:
        """The mean of the features, (..., 1, p)."""
        mean = self.expansion.away(self.moments.mean_z).mT
        return mean.unflatten(0, self.stream.batch) if self.stream.batch else mean

    @property
    @in_full_precision
    def offset(self) -> Tensor:
        """Output at the mean of the features, (c,), or (R, c) of a path."""
        offset = self._called("offset").refined(self._machine).offset
        return self._shaped(offset, 1)

    def _shaped(self, values: Tensor, axes: int) -> Tensor:
        """Values (..., R, *), with so many axes behind, as (R, *batch, *), without the R of a single one."""
        values = values.movedim(-axes - 1, 0)
        if self.stream.batch:
            values = values.unflatten(1, self.stream.batch)
        return values if self._path else values[0]

    @in_full_precision
    @torch.no_grad()
    def __call__(self, X_new: Tensor) -> Tensor:
        """Outputs (q,) or (q, c) at new inputs (q, d): values, without a graph.

        Of the machine as it was solved. Where new inputs are to be differentiated, solve from tensors.
        """
        function, dtype = self.function, self.dtype
        require_inputs(function, X_new=X_new)
        if full_dtype(X_new.dtype) != dtype:
            raise TypeError(
                f"{function}: X_new must have the dtype of the stream, {dtype}, got {X_new.dtype}"
            )
        guard = Guard(function)
        guard.finite(X_new=X_new)
        guard.check()
        machines = self._called("__call__").refined(self._machine)
        parts = []
        for X in X_new.split(self.size):
            u = machines.rotated(X, fold=False)  # (p, b)
            parts.append(machines.outputs(u, machines.q)[0].mT + machines.offset[0])
        outputs = torch.cat(parts).to(dtype)
        return outputs[:, 0] if self.stream.flat else outputs

    @property
    @in_full_precision
    def spread(self) -> Tensor | None:
        """S (p', p + 1) with the variance |S (z, 1)|^2 at features z about the centre.

        None where every output has its own regularisation.
        """
        if self.regs.shape[-2:].numel() > 1:
            return None
        T = self._machine.whitening()[..., 0, 0, :, :]
        mean = torch.zeros_like(T[..., :1, :]) if self.moments.centre else None
        spread = spread_of(T, self.regs[..., 0, 0].detach(), mean, self.moments.per_weight)
        return spread.unflatten(0, self.stream.batch) if self.stream.batch else spread

    def held_out(self, clusters: object | None = None, out: str | Path | None = None) -> HeldOut:
        """Held-out predictions of every row, by the machine trained without it or without its cluster.

        Args:
            clusters: integer labels (n,) on the host, in any order; None leaves every row out alone.
                Rows of a cluster are gathered wherever they are: those of arrays by indexing; batches
                are first spooled to a temporary file, of n (d + c + 1) numbers.
            out: folder for outputs.npy, residuals.npy, variance.npy, refitted.npy, targets.npy and
                weight.npy, whose memory the HeldOut then shares; None keeps everything in memory. One
                of its own for each process, where there are several. Their room is reserved first:
                OSError where the disk has too little, and then nothing is left behind.

        Returns:
            HeldOut in the order of the rows.

        Cost: a pass of n m^2 multiplications, and those of Note [passes] where rounding demands them.
        """
        return self._called("held_out").leave_out(clusters, out)

    def path(self, regs: Tensor, clusters: object | None = None, out: str | Path | None = None) -> HeldOut:
        """`held_out` for every regularisation, (R,) or (R, c), in front of all other axes.

        One eigendecomposition of an (m, m) matrix serves them all, and so does every pass. The
        machine's own reg is not used.
        """
        return self._called("path").solve_path(regs).leave_out(clusters, out)

    def solve_path(self, regs: Tensor) -> "StreamFit":
        """The machine solved from the same rows for every regularisation, (R,) or (R, c).

        `coef`, `offset` and what `held_out` gives have the axis R in front of all others.
        """
        twin = copy.copy(self)
        twin.expansion = copy.copy(self.expansion)  # which may go on in another precision
        twin._regularise(Regs(regs, path=True))
        return twin

    def _called(self, name: str) -> Self:
        """The same; what is asked of other processes from now on carries the name."""
        self.others = self.others.named(self._call or f"StreamFit.{name}")
        self.others.require_same_call()
        return self

    def blocks(self, what: str) -> Iterator[Block]:
        """The blocks of one pass, found to be those of the first, under a bar that says what it is for."""
        for part in self.stream.blocks(self.function, self.size, what):
            if not self.stream.lasting:
                self.moments.seen.require_same(self.function, part)
            yield part

    @in_full_precision
    def leave_out(
        self, clusters: object | None = None, out: str | Path | None = None, flat: bool | None = None
    ) -> HeldOut:
        """`held_out`; `flat` says whether there is no output axis, None: as the targets came."""
        flat = self.stream.flat if flat is None else flat
        try:
            return self._left_out(clusters, out, flat)
        except ImpreciseError:
            self._in_double()
            return self._left_out(clusters, out, flat)

    def _left_out(self, clusters: object | None, out: str | Path | None, flat: bool) -> HeldOut:
        require_same(self.function, self.others, "whether there are clusters", clusters is not None)
        require_folders(self.function, self.others, out)
        partition = None
        if clusters is not None:
            partition = self.others.run(lambda: self._partition(clusters))
            require_own(self.function, self.others, partition)
        (_, targets, weight), outputs = self.stream.graph, None
        try:
            parts, sink = self._fields(partition, out)
        except ProblemsApartError as apart:
            parts = self._one_by_one(partition, apart.numbers)
        else:
            outputs = sink.outputs
            if targets is None:
                targets, weight = sink.targets, sink.weight
        assert targets is not None
        assert weight is not None
        if self.stream.batch:
            targets, weight = (t.unflatten(0, self.stream.batch) for t in (targets, weight))
        residuals, variance, refitted = parts
        shaped = (self._shaped(residuals, 2), self._shaped(variance, 2), self._shaped(refitted, 1))
        labels = None if partition is None else partition.labels
        outputs = None if outputs is None else self._shaped(outputs, 2)
        return assemble(targets, weight, labels, shaped, flat, outputs)

    def _one_by_one(self, partition: Partition | None, apart: list[int]) -> list[Tensor]:
        """Residuals, variances and refitted rows of a batch, some problems of which are solved apart."""
        others = [k for k in range(len(self.regs)) if k not in set(apart)]
        parts = [self._of(k)._fields(partition)[0] for k in apart]
        found = [torch.stack(part) for part in zip(*parts, strict=True)]
        if others:
            rest = self._of(torch.tensor(others, device=self.regs.device))
            try:
                fields, _ = rest._fields(partition)
            except ProblemsApartError as more:  # without the worst of them, they are solved another way
                fields = rest._one_by_one(partition, more.numbers)
            found = [torch.cat(pair) for pair in zip(found, fields, strict=True)]
        back = torch.tensor(apart + others, device=self.regs.device).argsort()
        return [part[back] for part in found]

    def _of(self, problems: Tensor | int) -> Self:
        """The same for some problems of a batch, (B',), or for a single one."""
        twin = copy.copy(self)
        assert isinstance(self.stream, Memory)
        twin.stream, twin.regs = self.stream.problems(problems), self.regs[problems]
        twin.expansion = copy.copy(self.expansion)
        twin.expansion.origin = None
        with torch.no_grad():
            twin._sum_up(self.moments.centre)
        return twin

    def _fields(
        self, partition: Partition | None, out: str | Path | None = None
    ) -> tuple[list[Tensor], Sink]:
        """Residuals, variances and refitted rows, with a graph where there is one, and what was written."""
        machines = self._solve() if partition is None else self._machine
        inputs = (self.regs, *self.stream.graph, *self.expansion.tensors)
        wanted = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)
        if len(set(self.others.gather(wanted))) > 1:
            raise ValueError(f"{self.function}: either all processes or none must ask for gradients")
        self.wants_graph = out is None and wanted
        with torch.no_grad():
            sink, refitted = self._leave_all_out(machines, partition, out)
        parts = [sink.residuals, sink.variance, sink.refitted]
        if self.wants_graph:
            alive = [t.clone() if t is not None and t.is_inference() else t for t in inputs]
            parts[:2] = HeldOutRows.apply(self, machines, partition, sink, refitted, *alive)
        return parts, sink

    def _leave_all_out(
        self, machines: Machines, partition: Partition | None, out: str | Path | None
    ) -> tuple[Sink, list[Refitted]]:
        """All passes that leave rows or sets out: what they wrote, and what was refitted."""
        n = self.stream.n
        assert n is not None
        *several, c = machines.shift.shape
        # A backward divides by 1 - h, and takes differences of numbers that it has divided.
        dtype = torch.float64 if self.wants_graph and self.stream.lasting else self.dtype
        kind = (machines.regs.shape[-1], dtype, self.moments.S.device)
        with_outputs = not self.wants_graph  # with a graph they follow from the residuals
        with Sink(self.function, (*several, n, c), *kind, out, self.stream.known, with_outputs) as sink:
            self.others.run(sink.open)
            if partition is None:
                refitted = self._leave_one_out(machines, sink)
            else:
                refitted = leave_out_sets(self, machines, partition, sink)
        return sink, refitted

    @in_full_precision
    @torch.no_grad()
    def known(self, some: slice = slice(None), batch: Sequence[int] | None = None) -> Known:
        """The values of the solution, for operations on all rows at once; see `Known.of`."""
        return Known.of(self.refined(self._machine), self.stream.batch if batch is None else batch, some)

    def _partition(self, clusters: object) -> Partition:
        n = self.stream.n
        assert n is not None
        return Partition.of(self.function, clusters, n, torch.device("cpu"), self.others.count == 1)

    def _leave_one_out(self, machines: Machines, sink: Sink) -> list[Refitted]:
        n = sum(self.others.gather(self.stream.n))
        if n < 2:
            raise ValueError(f"{self.function}: leave-one-out needs at least 2 rows, got {n}")
        seen = self.others.run(lambda: self._visit(machines, sink))
        questions, step = [(seen.low > machines.least).all(), (seen.low > 1 - LARGE).all()], None
        if seen.gradient is not None:
            step = self._step(machines, seen.gradient)
            questions.append(self._is_settled(machines, *step, seen))
        numbers = self._guard.read(*questions, *machines.unread)  # one synchronisation
        own = [*numbers[: len(questions)], machines.settle(numbers[len(questions) :])]
        answers = zip(*self.others.gather(own), strict=True)
        lost, large, *matters, rough = (not all(column) for column in answers)
        if rough or (lost and self.expansion.kind != torch.float64):
            raise ImpreciseError
        if large and machines.drop_shortcuts():
            return self._leave_one_out(machines, sink)
        if lost and self.stream.batch:
            apart = ~(seen.low > machines.least).flatten(1).all(1)
            raise ProblemsApartError(apart.nonzero()[:, 0].tolist())
        if step is not None:
            if any(matters):
                self.others.run(lambda: self._correct(machines, sink, *step))
            machines.move(*step)
        return refit(self, machines, sink, self._lost(machines, sink)) if lost else []

    def _keep(self, U: Tensor) -> None:
        """Keep rotated features of a block for the backward, unless there are too many."""
        if self.wants_graph:
            room = KEPT - sum(block.numel() for block in self.kept if block is not None)
            self.kept.append(U if U.numel() <= room else None)

    def _lost(self, machines: Machines, sink: Sink) -> Lost:
        """The rows whose 1 - h is lost to rounding."""
        scale = machines.regs.unsqueeze(1) / sink.weight.to(machines.regs).unsqueeze(-1)  # (R, n, c')
        one = scale / sink.variance.to(scale)
        lost: Lost = {}
        for r, i, j in (~(one > machines.least.unsqueeze(1))).nonzero().tolist():
            lost.setdefault((r, j), []).append((torch.tensor([i], device="cpu"), True))
        return lost

    def _rotated(self, machines: Machines, part: Block, ones: bool = False, again: bool = False) -> Tensor:
        """Rotated features of a block of a pass."""
        return machines.rotated(part.X, ones=ones, again=again, centred=self.moments.rows)

    def _visit(self, machines: Machines, sink: Sink) -> "_Seen":
        """The second pass of Note [passes]."""
        gradient, worst = None, None
        if not machines.refined:
            gradient = (torch.zeros_like(machines.q), torch.zeros_like(machines.shift))
            worst = machines.regs.new_zeros(2, *machines.regs.shape)
        low = None
        per_weight, self.kept = self.moments.per_weight.unsqueeze(-1), []
        for part in self.blocks("leave-one-out"):
            zeta = part.zeta
            U = self._rotated(machines, part, ones=True, again=not self.wants_graph)
            u = U[..., : machines.rotation.shape[-1], :]
            self._keep(U)
            e = machines.residuals(u, part)
            norm = machines.norms(u, machines.refined and not self.wants_graph)  # (..., R, c', b)
            one = torch.addcmul(1 - zeta * per_weight, zeta, norm, value=-1)
            least = one.amin(-1)
            low = least if low is None else torch.minimum(low, least)
            inverse = one.reciprocal()  # 1 / (1 - h)
            if gradient is not None and worst is not None:
                worst = torch.maximum(
                    worst, torch.stack([(norm.sqrt_() * inverse).amax(-1), inverse.amax(-1)])
                )
                machines.add_gradient(gradient, u, e * zeta)
            r = e.mul_(inverse)
            sink.write(part, r, inverse.mul_(machines.regs.unsqueeze(-1) / zeta), part.rows)
        assert low is not None
        return _Seen(low, gradient, worst, u, one)

    def _correct(self, machines: Machines, sink: Sink, step: Tensor, shift: Tensor) -> None:
        """Apply a step to held-out residuals, by r = (e - u^T step - shift) / (1 - h)."""
        regs = machines.regs.unsqueeze(-1)
        for part in self.blocks("correction"):
            u = self._rotated(machines, part, again=True)
            change = machines.outputs(u, step) + shift.unsqueeze(-1)  # (..., R, c, b)
            r, variance = (t[..., part.rows, :].to(change).mT for t in (sink.residuals, sink.variance))
            sink.write(part, r - change * variance * part.zeta / regs, variance, part.rows)

    def refined(self, machines: Machines) -> Machines:
        """The machines, after a pass for a step of refinement if there was none yet."""
        if not machines.refined:
            with torch.no_grad():
                machines.move(*self._step(machines, self.others.run(lambda: self._gradient(machines))))
        return machines

    def _gradient(self, machines: Machines) -> tuple[Tensor, Tensor]:
        gradient = (torch.zeros_like(machines.q), torch.zeros_like(machines.shift))
        for part in self.blocks("refinement"):
            u = self._rotated(machines, part, again=True)
            machines.add_gradient(gradient, u, machines.residuals(u, part).mul_(part.zeta))
        return gradient

    def _step(self, machines: Machines, gradient: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """What refinement adds to the coefficients, (..., R, c, p), and to the offset, (..., R, c)."""
        by_feature, total = self.others.sums(*gradient)
        return machines.step(by_feature), total * self.moments.per_weight

    def _is_settled(self, machines: Machines, step: Tensor, shift: Tensor, seen: "_Seen") -> Tensor:
        """Whether a step could move no held-out output by more than `_SETTLED`.

        By Cauchy and Schwarz, |u^T step| <= (sum f u^2)^{1/2} (sum step^2 / f)^{1/2}.
        """
        length = (step.square() / machines.f).sum(-1).sqrt()  # (..., R, c)
        assert seen.worst is not None
        most = seen.worst[0] * length + seen.worst[1] * shift.abs()
        change = machines.outputs(seen.u, step) + shift.unsqueeze(-1)  # (..., R, c, b)
        (for_all, for_last), spread = _SETTLED[self.dtype], self.moments.spread
        settled = (most <= for_all * spread).all()
        return settled & ((change / seen.one).abs().amax(-1) <= for_last * spread).all()


def _mean(columns: Tensor, part: Block) -> Tensor:
    """The weighted mean (..., p, 1) of the columns (..., p, b) of a block."""
    return columns @ shares(part.weight.double()).unsqueeze(-1).to(columns.dtype)


def _settings(machine: MachineOfFeatures) -> dict[str, Tensor]:
    """A copy of what the coefficients of a machine depend on, by name."""
    state = machine.kernel.state_dict(prefix="kernel.") | {"log_reg": machine.log_reg.detach()}
    return {name: value.clone() for name, value in state.items() if isinstance(value, Tensor)}


class _Seen(NamedTuple):
    """What a pass for leave-one-out brings beside the rows."""

    low: Tensor
    """The least 1 - h of all rows, (..., R, c')."""
    gradient: tuple[Tensor, Tensor] | None
    """sum zeta e u^T, (..., R, c, p), and sum zeta e, (..., R, c); None if nothing is to be refined."""
    worst: Tensor | None
    """The largest (sum f u^2)^{1/2} / (1 - h) and 1 / (1 - h) of all rows, (2, ..., R, c'), likewise."""
    u: Tensor
    """Rotated features of the last block, (..., p, b)."""
    one: Tensor
    """Its 1 - h, (..., R, c', b)."""
