"""The base class of least-squares machines: closed forms for rows in memory and for streams."""

from collections.abc import Callable
from typing import Any, Self, overload

import torch
from torch import Tensor, nn

from torchloo import csr
from torchloo.dual import Dual
from torchloo.guards import Guard, full_dtype, values_visible
from torchloo.held_out import HeldOut
from torchloo.kernels import Kernel
from torchloo.kernels.kernel import pure
from torchloo.machine.kernel_machine import KernelMachine
from torchloo.machine.predictor import Predictor, Remembered, SolvedWith
from torchloo.positive import Positive, log_of
from torchloo.precision import full_precision
from torchloo.primal.block import Rows
from torchloo.primal.front import explicit, solve_rows, solve_tensors
from torchloo.primal.machines import Expansion
from torchloo.primal.solved import StreamFit
from torchloo.primal.whole import Primal
from torchloo.problem import Regs
from torchloo.representation import CentredFeatures
from torchloo.smoothers import Fit, loo_features
from torchloo.spectral import from_features, from_kernel_matrix

__all__ = ["LeastSquares"]


class LeastSquares(KernelMachine):
    """A machine that is a linear smoother, with a regularisation, closed forms, and regularisation paths.

    Args:
        kernel: a kernel of torchloo.kernels.
        reg: regularisation, a positive number or tensor of batch shape; stored as `log_reg`.
        reg_per_output: whether the last axis of reg, (..., c), is one number for each of the c outputs.
        classes: all class labels, if some may be missing from a call; see Note [class labels].
    """

    has_bias: bool
    reg = Positive("regularisation: larger values follow single rows less closely", lambda reg: reg)
    reg_per_output = False
    extra_buffers = ("noise", "points", "spread")

    noise: Tensor | None
    """reg / weight of the rows of `fit`, (..., n), if a variance is computed by solving for them again."""
    points: Tensor | None
    """Centred features of these rows, (..., n, p), if they are not the support."""
    spread: Tensor | None
    """S (..., p', m + 1) with the variance |S (r, 1)|^2 at features or kernel rows r, if these are few."""

    def __init__(
        self,
        kernel: Kernel,
        reg: Tensor | float = 1.0,
        *,
        classes: Any = None,
        reg_per_output: bool = False,
    ) -> None:
        super().__init__(kernel, classes)
        self.log_reg = nn.Parameter(log_of(type(self).__name__, "reg", reg))
        for name in self.extra_buffers:
            self.register_buffer(name, None)
        self._refactorised = Remembered()
        if reg_per_output and not self.log_reg.ndim:
            raise ValueError(
                f"{type(self).__name__}: reg must be a tensor (..., c), one number for each output, for "
                f"reg_per_output=True, got {reg}; e.g. reg=torch.full((c,), {reg})"
            )
        self.reg_per_output = reg_per_output

    @property
    def _penalty(self) -> Tensor | Regs:
        """The regularisation, or one for each output."""
        return Regs(self.reg, path=False) if self.reg_per_output else self.reg

    @overload
    def solve(self, X: Tensor, y: Tensor, weight: Tensor | None = None) -> Fit: ...

    @overload
    def solve(self, X: Rows) -> StreamFit: ...

    def solve(
        self, X: Tensor | Rows, y: Tensor | None = None, weight: Tensor | None = None
    ) -> Fit | StreamFit:
        """The solved machine, differentiable in X, y, weight and all parameters.

        ``solved = machine.solve(X, y)`` and ``solved(X_new)`` are a differentiable head: outputs at new
        inputs, with the graph through both. For a `Stream`, which includes y and weight, a StreamFit.

        Later computations raise an error if X was changed in place by torch; a tensor that shares its memory
        with a NumPy array must not be changed through the array.
        """
        return self._solved(X, y, weight, self._penalty)

    def _solved(self, X: Tensor | Rows, y: Any, weight: Tensor | None, reg: Tensor | Regs) -> Fit | StreamFit:
        if isinstance(X, Rows):
            return solve_rows(self, X, y, weight, reg)
        guard, Y, flat = self.checked_targets(X, y)
        fit, support = self._solve_with_support(guard, X, Y, weight, reg)
        return fit.predicting(self._predictor(fit, support, flat), flat).checked()

    def loo(self, X: Tensor | Rows, y: Tensor | None = None, weight: Tensor | None = None) -> HeldOut:
        """Leave-one-out predictions of every row, by the machine trained without it; differentiable.

        For a `Stream`, not differentiable in its rows; see `StreamFit.held_out`.
        """
        return self._held_out(X, y, weight, None)

    def lco(
        self,
        X: Tensor | Rows,
        y: Tensor | None = None,
        clusters: object = None,
        weight: Tensor | None = None,
    ) -> HeldOut:
        """Leave-cluster-out predictions of every row, by the machine trained without its cluster."""
        if clusters is None:
            raise TypeError(f"{self._function}: clusters must be integer labels, got None; use loo")
        return self._held_out(X, y, weight, clusters)

    def lso(self, X: Tensor, y: Tensor, sets: Any, weight: Tensor | None = None) -> HeldOut:
        """Leave-set-out predictions of some rows, by machines trained without sets of rows that contain them.

        For sets that are not clusters: a buffer around each row of a time series or a map, such as
        ``tl.splits.h_block(times, buffer)``, or any other sets, which may overlap.

        Args:
            X: rows, (..., n, d), in memory.
            y: targets.
            sets: pairs (rows to predict, rows to leave out) of row numbers; the rows to predict must be
                among those left out. They are host data and shared by a batch of problems.
            weight: row weights.

        Returns:
            HeldOut with one entry for each row to predict, set after set: entry k is for row
            ``torch.cat([predict for predict, _ in sets])[k]``. A row that several sets predict has several
            entries, one that none predicts has none; sets that predict row 0, 1, ..., n - 1, like those of
            `h_block`, give one entry per row, in the order of the rows. All fields are (..., m) or
            (..., m, c) for m entries; `clusters` has the number of the set of each, or is None if every set
            predicts one row.

        Differentiable. Cost that of `solve`, n^3 once in the dual form (n p^2 with p features), and for a set
        of s rows s^3 + n s (s p min(s, p)); memory that of the problem. See Note [overlapping sets] in
        leave_out_sets.py.
        """
        if isinstance(X, Rows):
            raise TypeError(f"{self._function}: lso needs rows in memory, got a Stream; use lco")
        guard, Y, flat = self.checked_targets(X, y)
        return self._solve(guard, X, Y, weight, self._penalty).held_out(flat=flat, sets=sets)

    def _held_out(
        self,
        X: Tensor | Rows,
        y: Tensor | None,
        weight: Tensor | None,
        clusters: object | None,
        regs: Regs | None = None,
    ) -> HeldOut:
        """Held-out predictions; all checks of values are made together, at the end of the call."""
        reg = self._penalty if regs is None else regs
        if isinstance(X, Rows):
            return solve_rows(self, X, y, weight, reg).held_out(clusters)
        guard, Y, flat = self.checked_targets(X, y)
        Z = self._features(X)
        rows = solve_tensors(self, guard, X, Z, Y, weight, flat, reg)
        if rows is not None:
            return rows.held_out(clusters)
        if Z is None:
            return self._solve(guard, X, Y, weight, reg).held_out(clusters, flat)
        if clusters is None and isinstance(reg, Tensor):
            return loo_features(guard, Z, Y, reg, weight, self.has_bias, flat)
        return from_features(guard, Z, Y, reg, weight, self.has_bias).held_out(clusters, flat)

    def path(
        self,
        X: Tensor | Rows,
        y: Tensor | None = None,
        regs: Tensor | None = None,
        clusters: object | None = None,
        weight: Tensor | None = None,
    ) -> HeldOut:
        """Held-out outputs for every regularisation, (R,) or (R, c), in front of all other axes.

        The reg of the machine is not used. All come from one decomposition; if they are few, each is
        factorised. Differentiable, for the decomposition only once; see `solve_path`.
        """
        return self._held_out(X, y, weight, clusters, self._path_of(regs))

    def solve_path(
        self,
        X: Tensor | Rows,
        y: Tensor | None = None,
        regs: Tensor | None = None,
        weight: Tensor | None = None,
    ) -> Fit | StreamFit:
        """The machine solved for every regularisation; all results have the axis R in front of all others.

        Its `coef` (R, ..., n, c), its `bias` and the results of `held_out(clusters)` come from one
        decomposition, or from one factorisation each if they are few; see `from_kernel_matrix` and
        `from_features` in torchloo.spectral. The reg of the machine is not used.

        Args:
            X: rows, or a `Stream` of them, which includes y and weight.
            y: targets.
            regs: (R,), or (R, c) with one for each output.
            weight: row weights.

        Reference: Pahikkala, Boberg and Salakoski (2006), eq. 5.
        """
        return self._solved(X, y, weight, self._path_of(regs))

    def _path_of(self, regs: Tensor | None) -> Regs:
        if regs is None:
            raise TypeError(f"{self._function}: regs must be regularisations (R,) or (R, c), got None")
        return Regs(regs.clone() if isinstance(regs, Tensor) else regs, path=True)

    def is_one(self, reg: Tensor | Regs) -> bool:
        """Whether there is no batch of regularisations; that of the machine matters on a path too."""
        own = self.log_reg.ndim == self.reg_per_output
        return own if isinstance(reg, Tensor) or not reg.path else True

    def features_of(
        self, guard: Guard, X: Tensor, Y: Tensor, weight: Tensor | None
    ) -> tuple[Tensor, Expansion] | None:
        """Rows (n, d) with their graph and features, if the machine has explicit features and no batch."""
        Z = self._features(X)
        return None if Z is None else explicit(Z)

    def fit(
        self, X: Tensor | Rows | StreamFit, y: Tensor | None = None, weight: Tensor | None = None
    ) -> Self:
        """Store the coefficients of the solved machine; an error leaves the machine unchanged.

        No graph is kept, with a warning if inputs require a gradient; `solve` keeps one.

        Args:
            X: the rows, or a `Stream` of them, or the result of `solve` for a stream.
            y: targets; None for a stream, which includes them.
            weight: row weights; None for a stream, or for equal weights.
        """
        self._warn_of_cut_graph(X, y, weight)
        with torch.no_grad():
            if isinstance(X, Rows | StreamFit):
                solved = solve_rows(self, X, y, weight, self._penalty)
                self._keep(solved)
                classes = self.classes if self.has_given_classes else solved.stream.classes
            else:
                y, classes = self._fit_targets(X, y)
                self._fit(X, y, weight)
            self.classes = classes
        return self

    def _fit(self, X: Tensor, y: Any, weight: Tensor | None) -> None:
        guard, Y, flat = self.checked_targets(X, y)
        Z = self._features(X)
        rows = solve_tensors(self, guard, X, Z, Y, weight, flat, self._penalty)
        if rows is not None:
            self._keep(rows)
            return
        if Z is None:
            fit, support = self._solve_with_support(guard, X, Y, weight, self._penalty)
        else:
            fit, support = from_features(guard, Z, Y, self._penalty, weight, self.has_bias), X
        fit = fit.checked()
        self._store(self._predictor(fit, support, flat))
        self._store_uncertainty(fit)

    def _store_uncertainty(self, fit: Fit) -> None:
        """Store what `predictive` needs besides the coefficients."""
        given, form = fit.representation, fit.form
        noise = fit.problem.ridge if isinstance(form, Dual | Primal) else None  # one for all outputs
        points = spread = None
        if isinstance(given, CentredFeatures):
            if isinstance(form, Primal):
                noise, spread = None, given.spread(form)
            elif isinstance(form, Dual):
                points = given.shifted
        self._keep_uncertainty(noise, points, spread)

    def _keep_uncertainty(self, noise: Tensor | None, points: Tensor | None, spread: Tensor | None) -> None:
        """Store these buffers in the dtype of the coefficients."""
        assert self.coef is not None
        with torch.inference_mode(False):
            for name, value in (("noise", noise), ("points", points), ("spread", spread)):
                stored = None if value is None else value.to(self.coef.dtype, copy=True)
                setattr(self, name, stored)

    def predictive(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs of the fitted machine at new points (..., q, d), and their variances (..., q).

        The variance of a Gaussian process with the kernel of the machine, Note [variance at a new point], in
        the units of `HeldOut.variance`, without noise: the noise of a row is reg / weight. In the units of
        the targets it is multiplied by s^2, the mean of r^2 / variance over a HeldOut; so a new row of
        weight 1 has the variance s^2 (variance + reg). It is the same for all outputs. A variance of zero
        may be slightly negative by rounding.

        Differentiable in X. Cost n^2 q, and n^3/3 once after `fit`, memory n^2; for explicit features p^2 q.
        """
        predictor = self._fitted_predictor()
        rows, own = predictor.rows(X), predictor.own(X)
        if self.spread is not None:
            with full_precision(X):
                S, last = self.spread[..., :-1], self.spread[..., -1:]
                variance = (rows @ S.mT + last.mT).square().sum(-1)
            return predictor(X), variance.to(full_dtype(X.dtype))
        if self.noise is None and self.reg_per_output:
            raise RuntimeError(
                f"{type(self).__name__}: a machine with one regularisation for each output has no predictive "
                "variance that is the same for all of them; fit one machine for each output"
            )
        if self.noise is None:
            raise RuntimeError(
                f"{type(self).__name__}: the loaded state has coefficients only, from a version without "
                "predictive variances; call fit(X, y) again"
            )
        fit = self._solved_again()
        if fit.features is not None:  # the centre of features centred before is zero to rounding
            rows = rows - fit.features.centre
        return predictor(X), fit.variance_at(rows, own).to(full_dtype(X.dtype))

    def _solved_again(self) -> Fit:
        """The machine, factorised again from the buffers of `fit`; its targets are not used."""
        support, noise, points = self.support, self.noise, self.points
        assert support is not None
        assert noise is not None
        tensors = [noise, support if points is None else points, *self.kernel.parameters()]

        @torch.no_grad()
        def make() -> Fit:
            guard = Guard(self._function, wide=True)
            Y = torch.zeros_like(noise).unsqueeze(-1)
            weight = self.reg.to(noise).unsqueeze(-1) / noise
            if points is not None:
                return from_features(guard, points, Y, self.reg, weight, self.has_bias).checked()
            return self._smoother(guard, support, Y, weight).checked()

        return self._refactorised.get(tensors, make)

    def _smoother(self, guard: Guard, X: Tensor, Y: Tensor, weight: Tensor) -> Fit:
        """The machine solved for targets as they are, coded or not."""
        return self._solve(guard, X, Y, weight, self.reg)

    def _predictor(self, fit: Fit, support: Tensor, flat: bool) -> Predictor:
        """The predictor of a solved machine, which detects later changes of the support or the kernel."""
        parts = (support, fit.columns, fit.offset)
        linear = fit.features is not None
        if fit.features is not None:
            parts = (fit.features.centre, fit.features.coef, fit.features.offset)
        solved_with = SolvedWith.now(self.kernel, parts[0])
        return Predictor(self._function, self.kernel, *parts, flat, linear, solved_with)

    def _keep(self, solved: StreamFit) -> None:
        """Store the machine solved by passes over the rows."""
        solved.checked_for(self)
        parts = (solved.centre, solved.coef, solved.offset)
        centre, coef, offset = (t.to(solved.dtype) for t in parts)
        spread = solved.spread
        self._store(Predictor(self._function, self.kernel, centre, coef, offset, solved.stream.flat, True))
        self._keep_uncertainty(None, None, spread)

    def features_of_rows(self, first: Callable[[int], Tensor]) -> Expansion:
        """The features of rows that come in blocks; `first(k)` returns the first k rows."""
        if not self.kernel.is_linear:
            raise TypeError(
                f"{self._function}: a stream needs a machine with few features: a linear kernel, or "
                f"SparseLSSVM(kernel, reg, basis=...); got the kernel {self.kernel}"
            )
        evaluate, tensors = pure(self.kernel, "feature_map")
        return Expansion(lambda X, given: evaluate(given, X).mT, 0, tensors)

    def extra_repr(self) -> str:
        """Current regularisation."""
        reg = self.reg.detach()
        if reg.ndim == self.reg_per_output and values_visible(reg):
            numbers = ", ".join(f"{number:.4g}" for number in reg.reshape(-1).tolist())
            return f"reg=[{numbers}] per output" if reg.ndim else f"reg={numbers}"
        return f"reg={tuple(reg.shape)}"

    def _features(self, X: Tensor) -> Tensor | None:
        """Explicit features (..., n, p), if the kernel has such: not of sparse rows with too many of them."""
        many = X.shape[-1] + self.has_bias >= X.shape[-2]
        if not self.kernel.is_linear or (csr.is_csr(X) and many):
            return None
        return self.kernel.feature_map(X)

    def _solve_with_support(
        self, guard: Guard, X: Tensor, Y: Tensor, weight: Tensor | None, reg: Tensor | Regs
    ) -> tuple[Fit, Tensor]:
        """`_solve`, and the points (..., m, d) that the machine expands its function over."""
        return self._solve(guard, X, Y, weight, reg), X

    def _solve(self, guard: Guard, X: Tensor, Y: Tensor, weight: Tensor | None, reg: Tensor | Regs) -> Fit:
        Z = self._features(X)
        if Z is not None:
            return from_features(guard, Z, Y, reg, weight, self.has_bias)
        return from_kernel_matrix(guard, self._matrix(X), Y, reg, weight, self.has_bias)

    def _matrix(self, X: Tensor, Z: Tensor | None = None) -> Tensor:
        """The kernel matrix (..., n, m) of rows X and Z, evaluated in `_matrix_dtype`."""
        return self.kernel(X, Z, self._matrix_dtype(X))
