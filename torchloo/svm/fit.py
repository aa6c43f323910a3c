"""svm: the machine trained exactly on a kernel matrix."""

import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from torchloo.svm.arguments import Caller, checked, indefinite
from torchloo.svm.outcomes import in_stacks
from torchloo.svm.proof.certify import Held, held_out_bias
from torchloo.svm.records import Exact, Solved, SVMProblem, duality_gap
from torchloo.svm.solve.exact import relative_gap, solve_exactly
from torchloo.svm.solve.low_rank import InDouble, in_double
from torchloo.svm.solve.merge import merge_duplicates
from torchloo.svm.solve.systems import Lifted
from torchloo.svm.tolerances import CLOSE, FEW_DIGITS, NEGATIVE, USEFUL

__all__ = ["SVMFit", "solve_problems", "svm", "train", "trained"]

_SEEN = 512  # rows of K that show whether it is a kernel matrix


class SVMFit(NamedTuple):
    """A trained SVM, f(x) = sum_i coef_i k(x, x_i) + bias, or one for each of c outputs."""

    coef: Tensor
    """alpha * y, (..., n) or (..., n, c)."""

    bias: Tensor
    """Offset, the midpoint where it is not unique, (...) or (..., c)."""

    outputs: Tensor
    """Decision values at the training points, (..., n) or (..., n, c)."""

    gap: Tensor
    """Duality gap, (...) or (..., c)."""

    flat: bool = True
    """True where the labels came without an output axis."""

    predictor: Callable[[Tensor], Tensor] | None = None
    """Decision values at new inputs, where a machine with a kernel was trained."""

    @torch.no_grad()
    def __call__(self, X_new: Tensor) -> Tensor:
        """Decision values (..., q) or (..., q, c) at new inputs (..., q, d): values, without a graph.

        The coefficients of an SVM have no derivative where a row reaches or leaves its bound; held-out
        decision values of `svm_loo` are differentiable.
        """
        if self.predictor is None:
            raise TypeError(
                "svm: trained on a matrix, an SVMFit knows no kernel to evaluate at new inputs; use "
                "SVMFit.from_kernel(K_new) with their kernel rows, or solve of an SVC"
            )
        return self.predictor(X_new)

    def from_kernel(self, K_new: Tensor) -> Tensor:
        """Decision values at new points from K_new (..., t, n): (..., t) or (..., t, c)."""
        if not self.flat:
            return K_new @ self.coef + self.bias[..., None, :]
        return (K_new @ self.coef[..., None])[..., 0] + self.bias[..., None]

    def to(self, dtype: torch.dtype) -> "SVMFit":
        """In a dtype."""
        coef, bias, outputs, gap = (field.to(dtype) for field in self[:4])
        return SVMFit(coef, bias, outputs, gap, self.flat, self.predictor)

    def with_outputs(self, flat: bool) -> "SVMFit":
        """The last batch axis c as the output axis, which goes away where `flat` is set."""
        fields = (self.coef.mT, self.bias, self.outputs.mT, self.gap)  # (..., c) all
        coef, bias, outputs, gap = (field[..., 0] if flat else field for field in fields)
        return SVMFit(coef, bias, outputs, gap, flat)


def svm(K: Tensor, y: Tensor, C: float | Tensor, weight: Tensor | None = None) -> SVMFit:
    """Train support vector machines exactly.

        min 1/2 |w|^2 + sum_i C weight_i max(0, 1 - y_i f(x_i)),   f(x) = <w, phi(x)> + b

    An interior point gives the active set, linear equations the solution: the duality gap is at
    rounding. Works in float64 inside; a K of low rank that comes in float32, such as that of a linear kernel,
    is first cleaned of the directions that rounding has added (Note [rounded kernels] in low_rank.py).

    Args:
        K: kernel matrices, symmetric positive semi-definite, (..., n, n).
        y: labels -1 and +1, (..., n).
        C: box bound, a number or (...).
        weight: per-row factor of C, (..., n); default ones.

    Returns:
        SVMFit. Not differentiable; the leave-one-out outputs of `svm_loo` are.

    Cost about 15 Cholesky factorisations (of low-rank form where K has low rank). Memory 3 n^2.
    Reference: Fine and Scheinberg 2001 for the interior point.

    >>> K = torch.tensor([[1.0, -1.0], [-1.0, 1.0]], dtype=torch.float64)
    >>> svm(K, torch.tensor([1.0, -1.0], dtype=torch.float64), C=10.0).coef
    tensor([ 0.5000, -0.5000], dtype=torch.float64)
    """
    return train(Caller("svm"), K, y, C, weight)


def train(caller: Caller, K: Tensor, y: Tensor, C: float | Tensor, weight: Tensor | None) -> SVMFit:
    """`svm`, with errors in the words of the caller."""
    K, y, box, _ = checked(caller, K, y, C, weight)
    parts = in_stacks(lambda stack: trained(caller, *stack), K, y, box)
    with torch.no_grad():
        coef, bias, outputs, gap = (
            torch.cat(x).reshape(y.shape[:-1] + x[0].shape[1:]).to(K.dtype)
            for x in zip(*(part[:4] for part in parts), strict=True)
        )
    return SVMFit(coef, bias, outputs, gap)


def trained(caller: Caller, K: Tensor, y: Tensor, box: Tensor, kernel: Tensor | None = None) -> SVMFit:
    """The machines of B problems as `stacks` gives them; errors name the caller."""
    matrix = in_double(K)
    fits = y.new_empty(len(y), 2 * y.shape[1] + 2)
    for rows, problem, full in _solve_problems(caller, K, matrix, y, box, kernel):
        fits[rows] = torch.cat(_fields(problem, full), 1)
    coef, outputs, rest = fits.split([y.shape[1], y.shape[1], 2], 1)
    bias, gap = rest.unbind(1)
    if matrix.shift is not None:
        shift = matrix.shift if kernel is None else matrix.shift[kernel]
        bias = bias - (shift * coef).sum(1)
    return SVMFit(coef, bias, outputs, gap)


def _fields(problem: SVMProblem, full: Exact) -> tuple[Tensor, ...]:
    """Coefficients (B, n), outputs (B, n), bias and gap (B, 1) of machines by their rows."""
    v = problem.variable
    share = problem.row_box / problem.box.gather(1, v)
    coef = (full.alpha * problem.y).gather(1, v) * share / problem.scale[:, None]
    held = Held.full(problem, full)
    bias = held_out_bias(held)[0][:, None]
    gap = duality_gap(full.alpha, full.margin, problem.box) / problem.scale
    return coef, (held.u + bias).gather(1, v), bias, gap[:, None]


def solve_problems(
    caller: Caller, K: Tensor, y: Tensor, box: Tensor, kernel: Tensor | None = None
) -> list[Solved]:
    """Merge and solve exactly B problems as `stacks` gives them, if each K is a kernel matrix.

    Problems of one number of variables are solved as one.
    """
    return _solve_problems(caller, K, in_double(K), y, box, kernel)


def _solve_problems(
    caller: Caller, given: Tensor, matrix: InDouble, y: Tensor, box: Tensor, kernel: Tensor | None
) -> list[Solved]:
    """`solve_problems` for kernel matrices that were given as they are, and in float64."""
    groups = merge_duplicates(matrix.K, y, box, matrix.rounding, kernel)
    solved = []
    for rows, merged in groups:
        source = _Source(caller, given, matrix, rows if kernel is None else kernel[rows])
        parts = _solve_definite(source, _checked_definite(source, merged))
        solved += [(rows[own], problem, full) for own, problem, full in parts]
    return solved


class _Source(NamedTuple):
    """Where merged problems come from, to tell what is wrong with it."""

    caller: Caller
    given: Tensor
    """Kernel matrices as they came in, (G, n, n)."""
    matrix: InDouble
    rows: Tensor
    """Which of them each problem has, (B,)."""

    def take(self, rows: Tensor) -> "_Source":
        return self._replace(rows=self.rows[rows])

    def require_semidefinite(self) -> Tensor:
        """The smallest eigenvalues, (B,); an error names one if that K is not even a rounded kernel matrix.

        Rounded to float32 if all its entries are float32 numbers.
        """
        K, given = self.matrix.K[self.rows], self.given[self.rows]
        least = torch.linalg.eigvalsh(K)[:, 0]
        size = K.diagonal(dim1=1, dim2=2).abs().amax(1)
        single = (given.float() == given).all(2).all(1)  # rounded to float32
        largest = given.diagonal(dim1=1, dim2=2).amax(1).double()
        unit = (torch.finfo(torch.float32).eps * largest).masked_fill(~single, 0)
        rounding = self.matrix.rounding[self.rows].amax(1).square()
        of_entries = K.shape[-1] * torch.maximum(unit, rounding)
        allowed = torch.maximum(NEGATIVE * size, of_entries).clamp_min(FEW_DIGITS)
        worst = least + allowed
        if bool((worst < 0).any()):
            raise ValueError(
                f"{self.caller.function}: {indefinite(self.caller, float(least[worst.argmin()]))}"
            )
        return least


def _checked_definite(source: _Source, problem: SVMProblem) -> SVMProblem:
    """With more rounding where a K is not positive definite; an error if that is not rounding."""
    rows = (~_is_definite(problem)).nonzero()[:, 0]
    if not rows.numel():
        return problem
    least = source.take(rows).require_semidefinite()
    return problem._replace(rounding=problem.rounding.index_add(0, rows, _off_by(problem, rows, -least)))


def _solve_definite(source: _Source, problem: SVMProblem) -> list[Solved]:
    """The solutions; a K that rounding has made too indefinite for that leaves the batch and is lifted."""
    every = torch.arange(len(problem.y), device=problem.y.device)
    try:
        full = solve_exactly(problem)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        if len(every) > 1:
            halves = every.chunk(2)
            parts = [(half, _solve_definite(source.take(half), problem.take(half))) for half in halves]
            return [(half[own], problem, full) for half, part in parts for own, problem, full in part]
        problem = _made_definite(source, problem, -2 * source.require_semidefinite())
        full = _solve_again(source.caller, problem)
    open_ones = (~full.optimal).nonzero()[:, 0]
    if open_ones.numel():
        source.take(open_ones).require_semidefinite()
    _require_solved(source.caller, problem, relative_gap(problem, full))
    return [(every, problem, full)]


def _require_solved(caller: Caller, problem: SVMProblem, gaps: Tensor) -> None:
    """A warning where a relative duality gap (B,) is not small; an error where it is large."""
    worst = int(gaps.argmax())  # NaN counts as the largest
    gap = float(gaps[worst])
    if gap <= CLOSE:
        return
    largest = float(problem.row_box[worst].amax() / problem.scale[worst])
    found = f"the relative duality gap is {gap:.3g} at a box bound of {largest:.4g}"
    remedy = f"scale the inputs, use a smaller C or add to the diagonal of {caller.matrix}"
    if not gap <= USEFUL:  # nor NaN
        raise ValueError(f"{caller.function}: no solution found, {found}; {remedy}")
    warnings.warn(
        f"{caller.function}: rounding leaves decision values that may be off, {found}; {remedy}",
        RuntimeWarning,
        stacklevel=4,
    )


def _made_definite(source: _Source, problem: SVMProblem, ridge: Tensor) -> SVMProblem:
    """With a K that rounding has made indefinite lifted by the ridge (1,), after the copies were found."""
    function, matrix = source.caller
    warnings.warn(
        f"{function}: rounding has made {matrix} indefinite; {float(ridge):.1e} was added to its diagonal. "
        f"Compute {matrix} in float64 or scale the inputs to avoid this",
        RuntimeWarning,
        stacklevel=4,
    )
    K = problem.matrices().clone()
    K.diagonal(dim1=1, dim2=2).add_((ridge / problem.scale)[:, None])
    every = torch.zeros_like(problem.variable[:, 0])
    return problem._replace(K=K, kernel=None, rounding=problem.rounding + _off_by(problem, every, ridge))


def _off_by(problem: SVMProblem, rows: Tensor, much: Tensor) -> Tensor:
    """What is added to e of Note [rounding of K] for entries that are off by so much (B,) more, (B, m)."""
    more = (much / problem.scale[rows]).clamp_min(0).sqrt()
    return more[:, None].expand(-1, problem.y.shape[1])


def _solve_again(caller: Caller, problem: SVMProblem) -> Exact:
    """The solution, or an error for the user."""
    try:
        return solve_exactly(problem)
    except torch.linalg.LinAlgError as failure:  # type: ignore[attr-defined]
        raise ValueError(
            f"{caller.function}: {caller.matrix} is too ill-conditioned to solve; use float64 or a smaller C"
        ) from failure


def _is_definite(problem: SVMProblem) -> Tensor:
    """Whether each K is positive definite but for rounding, (B,), by one Cholesky.

    Nothing that is proved of an SVM would be true of another K: its dual has no single maximum. Of a large K
    some rows have to do; what they do not show comes to light where the solver fails.
    """
    m = problem.y.shape[1]
    some = slice(None, None, -(-m // _SEEN))
    seen, largest = problem.K[:, some, some], problem.K.diagonal(dim1=1, dim2=2).amax(1)
    definite = _definite(seen, NEGATIVE * largest)
    definite = definite if problem.kernel is None else definite[problem.kernel]
    rows = (~definite).nonzero()[:, 0]
    if rows.numel():
        which = problem.kernels(rows).table
        definite[rows] = _definite(seen[which], m * problem.rounding[rows].amax(1).square())
    return definite


def _definite(K: Tensor, ridge: Tensor) -> Tensor:
    """Whether each K is positive definite with the ridge (B,) on its diagonal, (B,)."""
    return Lifted(K).factor(ridge[:, None]) == 0
