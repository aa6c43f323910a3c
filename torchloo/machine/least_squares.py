"""What every machine of least squares has: closed forms of rows in memory, and of streams."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Self, overload

import torch
from torch import Tensor

from torchloo import csr
from torchloo.guards import Guard, values_visible
from torchloo.held_out import HeldOut
from torchloo.kernels import Kernel
from torchloo.machine.kernel_machine import KernelMachine, log_parameter
from torchloo.smoothers import Fit, solve_dual, solve_features
from torchloo.spectral import path_dual, path_features
from torchloo.streaming.collective import Alone, require_same
from torchloo.streaming.machines import Expansion
from torchloo.streaming.moments import Moments
from torchloo.streaming.solved import StreamFit, gather_moments
from torchloo.streaming.stream import Stream

__all__ = ["LeastSquares"]


class LeastSquares(KernelMachine):
    """A machine that is a linear smoother: regularisation, closed forms, and a path of them.

    Args:
        kernel: a kernel of torchloo.kernels.
        reg: regularisation, a positive number or tensor of batch shape; kept as `log_reg`.
    """

    _has_bias: bool

    def __init__(self, kernel: Kernel, reg: Tensor | float = 1.0) -> None:
        super().__init__(kernel)
        self.log_reg = log_parameter(type(self).__name__, reg=reg)

    @property
    def reg(self) -> Tensor:
        """Regularisation, exp(log_reg)."""
        return self.log_reg.exp()

    @overload
    def solve(self, X: Tensor, y: Tensor, weight: Tensor | None = None) -> Fit: ...

    @overload
    def solve(self, X: Stream) -> StreamFit: ...

    def solve(
        self, X: Tensor | Stream, y: Tensor | None = None, weight: Tensor | None = None
    ) -> Fit | StreamFit:
        """The solved machine, differentiable in X, y, weight and all parameters.

        From a `Stream`, which brings y and weight, a StreamFit, without a graph.
        """
        if isinstance(X, Stream):
            self._only_stream(y, weight)
            return self._solve_stream(X)
        guard, Y, flat = self._checked(X, y)
        return replace(self._solve(guard, X, Y, weight), flat=flat).checked()

    def loo(self, X: Tensor | Stream, y: Tensor | None = None, weight: Tensor | None = None) -> HeldOut:
        """What the machine would have said of every row, had it not seen it; differentiable.

        From a `Stream` without a graph; see `StreamFit.held_out`.
        """
        return self._held_out(X, y, weight, None)

    def lco(
        self,
        X: Tensor | Stream,
        y: Tensor | None = None,
        clusters: object = None,
        weight: Tensor | None = None,
    ) -> HeldOut:
        """What the machine would have said of every row, had it not seen the row's cluster."""
        if clusters is None:
            raise TypeError(f"{self._function}: clusters must be integer labels, got None; use loo")
        return self._held_out(X, y, weight, clusters)

    def _held_out(
        self, X: Tensor | Stream, y: Tensor | None, weight: Tensor | None, clusters: object | None
    ) -> HeldOut:
        """All values of one call are looked at together, at its end."""
        if isinstance(X, Stream):
            self._only_stream(y, weight)
            return self.solve(X).held_out(clusters)
        guard, Y, flat = self._checked(X, y)
        return self._solve(guard, X, Y, weight).held_out(clusters, flat)

    def path(
        self,
        X: Tensor | Stream,
        y: Tensor | None = None,
        regs: Tensor | None = None,
        clusters: object | None = None,
        weight: Tensor | None = None,
    ) -> HeldOut:
        """Held-out outputs for every regularisation, (R,) or (R, c), in front of all other axes.

        The machine's own reg is not used. One decomposition serves them all, and a few are factorised
        one by one. Differentiable, but on the decomposition only once; see `path_dual`. From a `Stream`
        without a graph.
        """
        if regs is None:
            raise TypeError(f"{self._function}: regs must be regularisations (R,) or (R, c), got None")
        if isinstance(X, Stream):
            self._only_stream(y, weight)
            return self.solve(X).path(regs, clusters)
        guard, Y, flat = self._checked(X, y)
        path, matrix, targets = self._route(guard, X, Y, weight)
        return path(guard, matrix, targets, regs, weight, self._has_bias, clusters, flat)

    def fit(
        self, X: Tensor | Stream | StreamFit, y: Tensor | None = None, weight: Tensor | None = None
    ) -> Self:
        """Store the coefficients of the solved machine; an error leaves it as it was.

        No graph is kept, which inputs that require a gradient are warned of; `solve` keeps one.

        Args:
            X: the rows, or a `Stream` of them, or what `solve` of this machine made of a stream.
            y: targets; None for a stream, which brings them.
            weight: row weights; None for a stream, or to weigh all alike.
        """
        self._warn_of_cut_graph(X, y, weight)
        with torch.no_grad():
            if isinstance(X, Stream | StreamFit):
                self._only_stream(y, weight)
                self._keep(self.solve(X) if isinstance(X, Stream) else X)
            else:
                self._fit(X, y, weight)
        return self

    def _fit(self, X: Tensor, y: Any, weight: Tensor | None) -> None:
        fit = self.solve(X, y, weight)
        if fit.features is None:
            self._store(X, fit.columns, fit.offset, fit.flat)
        else:
            self._store(fit.features.centre, fit.features.coef, fit.features.offset, fit.flat, linear=True)

    def _keep(self, solved: StreamFit) -> None:
        """Store what was solved from a stream."""
        solved.checked_for(self)
        parts = (solved.moments.mean_z.mT, solved.coef, solved.offset)
        centre, coef, offset = (t.to(solved.dtype) for t in parts)
        self._store(centre, coef, offset, solved.stream.flat, linear=True)

    @torch.no_grad()
    def _solve_stream(self, stream: Stream, others: Alone | None = None) -> StreamFit:
        """The machine solved from its own rows, and those that the other processes have."""
        others = others or Alone()

        def first_pass() -> tuple[Expansion, Moments]:
            expansion = self._expansion(stream)
            return expansion, gather_moments(self._function, stream, expansion, self._has_bias)

        expansion, moments = others.together(first_pass)
        kind = (*moments.T.shape, str(moments.dtype), moments.centre)
        require_same(self._function, others, "features, outputs, dtype and bias", kind)
        return StreamFit(self, self._function, stream, expansion, moments, self.reg, others)

    def _only_stream(self, y: object, weight: object) -> None:
        if y is not None or weight is not None:
            raise TypeError(f"{self._function}: a stream brings its own y and weight; leave them None")

    def _expansion(self, stream: Stream) -> Expansion:
        """The features of the rows of a stream."""
        if not self.kernel.is_linear:
            raise TypeError(
                f"{self._function}: a stream needs a machine with few features: a linear kernel, or "
                f"SparseLSSVM(kernel, reg, basis=...); got the kernel {self.kernel}"
            )
        kernel = copy.deepcopy(self.kernel)  # later passes must find the one that was solved
        return Expansion(lambda X: kernel.feature_map(X).to(torch.float64, copy=True).mT)

    def extra_repr(self) -> str:
        """Current regularisation."""
        reg = self.reg.detach()
        return f"reg={reg.item():.4g}" if reg.ndim == 0 and values_visible(reg) else f"reg={tuple(reg.shape)}"

    def _by_features(self, X: Tensor) -> bool:
        """Whether to work with explicit features: not with sparse rows of which they would be too many."""
        fewer = X.shape[-1] + self._has_bias < X.shape[-2]
        return self.kernel.is_linear and (fewer or not csr.is_csr(X))

    def _solve(self, guard: Guard, X: Tensor, Y: Tensor, weight: Tensor | None) -> Fit:
        if self._by_features(X):
            Z = self.kernel.feature_map(X)
            return solve_features(guard, Z, Y, self.reg, weight, self._has_bias)
        return solve_dual(guard, self.kernel(X), Y, self.reg, weight, self._has_bias)

    def _route(
        self, guard: Guard, X: Tensor, Y: Tensor, weight: Tensor | None
    ) -> tuple[Callable[..., HeldOut], Tensor, Tensor]:
        """How a path is computed, from which matrix, and for which targets."""
        if self._by_features(X):
            return path_features, self.kernel.feature_map(X), Y
        return path_dual, self.kernel(X), Y
