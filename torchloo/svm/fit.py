"""svm: the machine trained exactly on a kernel matrix."""

import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from torchloo.guards import Guard, broadcast_shapes, require_floating, values_visible
from torchloo.svm.proof.certify import Held, held_out_bias
from torchloo.svm.rows import taken_apart
from torchloo.svm.solve.exact import Exact, duality_gap, relative_gap, solve_exactly
from torchloo.svm.solve.low_rank import InDouble, in_double
from torchloo.svm.solve.merge import Problem, merge_duplicates

__all__ = ["SVMFit", "checked", "solve_problems", "svm", "trained"]

_SOLVED = 1e-6  # relative gap of a solution that rounding has not harmed
_USEFUL = 1e-3  # of one that certificates can still work with
_DOUBLE = 1e-9  # of the largest diagonal entry: eigenvalues that rounding may have made negative
_TINY = torch.finfo(torch.float64).tiny  # below, numbers have too few digits
_SEEN = 512  # rows of K that show whether it is a kernel matrix
_BLOCK = 512  # rows of K compared at once with its columns


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
    K, y, C, weight = checked("svm", K, y, C, weight)
    box = C[..., None] * weight
    with torch.no_grad():
        fits = [trained("svm", *problem)[:4] for problem in taken_apart(K, y, box)]
        coef, bias, outputs, gap = (
            torch.stack(x).reshape(y.shape[:-1] + x[0].shape).to(K.dtype) for x in zip(*fits, strict=True)
        )
    return SVMFit(coef, bias, outputs, gap)


def trained(function: str, K: Tensor, y: Tensor, box: Tensor) -> SVMFit:
    """The machine of a problem K (n, n), y (n,), box (n,), checked, in float64; errors name the function."""
    matrix = in_double(K)
    ((problem, full),) = _solve_problems(function, K, matrix, y.double(), box.double()[None])
    share = problem.row_box / problem.box[problem.variable]
    coef = (full.alpha * problem.y)[problem.variable] * share / problem.scale
    u = problem.K @ (full.alpha * problem.y)
    nothing = torch.zeros(1, dtype=torch.long, device=K.device)
    whole = Held(full.alpha[None], u[None], problem.box, nothing, problem.rounding)
    bias = held_out_bias(problem.y, whole)[0]
    gap = duality_gap(full.alpha, full.margin, problem.box) / problem.scale
    outputs = (u + bias)[problem.variable]
    return SVMFit(coef, bias if matrix.shift is None else bias - matrix.shift @ coef, outputs, gap)


def solve_problems(function: str, K: Tensor, y: Tensor, boxes: Tensor) -> list[tuple[Problem, Exact]]:
    """Merge and solve exactly for each of the boxes (B, n), if K, as it came in, is a kernel matrix."""
    return _solve_problems(function, K, in_double(K), y, boxes)


def _solve_problems(
    function: str, given: Tensor, matrix: InDouble, y: Tensor, boxes: Tensor
) -> list[tuple[Problem, Exact]]:
    """`solve_problems` for a K that was given as it is, and in float64."""
    problems = merge_duplicates(matrix.K, y, boxes, matrix.rounding)
    if not _is_definite(problems[0]):
        problems = _off_by(problems, -_require_semidefinite(function, given, matrix))
    try:
        solutions = solve_exactly(problems)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        problems = _made_definite(function, problems, -2 * _require_semidefinite(function, given, matrix))
        solutions = _solve_again(function, problems)
    if not all(full.optimal for full in solutions):
        _require_semidefinite(function, given, matrix)
    gap = max(relative_gap(problem, full) for problem, full in zip(problems, solutions, strict=True))
    _require_solved(function, gap)
    return list(zip(problems, solutions, strict=True))


def _require_solved(function: str, gap: float) -> None:
    """A warning where the relative duality gap is not small; an error where it is large."""
    if gap <= _SOLVED:
        return
    found = f"the relative duality gap is {gap:.3g}"
    remedy = "scale the inputs, use a smaller C or add to the diagonal of K"
    if not gap <= _USEFUL:  # nor NaN
        raise ValueError(f"{function}: no solution found, {found}; {remedy}")
    warnings.warn(
        f"{function}: rounding leaves decision values that may be off, {found}; {remedy}",
        RuntimeWarning,
        stacklevel=4,
    )


def _made_definite(function: str, problems: list[Problem], ridge: float) -> list[Problem]:
    """With a K that rounding has made indefinite lifted by the ridge, after the copies were found."""
    if not ridge > 0:
        return problems
    warnings.warn(
        f"{function}: rounding has made K indefinite; {ridge:.1e} was added to its diagonal. "
        "Compute K in float64 or scale the inputs to avoid this",
        RuntimeWarning,
        stacklevel=4,
    )
    K = problems[0].K.clone()
    K.diagonal().add_(ridge / problems[0].scale)
    return _off_by([problem._replace(K=K) for problem in problems], ridge)


def _off_by(problems: list[Problem], much: float) -> list[Problem]:
    """With so much more rounding of the entries of K."""
    rounding = problems[0].rounding + (much / problems[0].scale).clamp_min(0).sqrt()
    return [problem._replace(rounding=rounding) for problem in problems]


def _solve_again(function: str, problems: list[Problem]) -> list[Exact]:
    """The solutions, or an error for the user."""
    try:
        return solve_exactly(problems)
    except torch.linalg.LinAlgError as failure:  # type: ignore[attr-defined]
        raise ValueError(
            f"{function}: K is too ill-conditioned to solve; use float64 or a smaller C"
        ) from failure


def _is_definite(problem: Problem) -> bool:
    """Whether K, whose different rows `problem` has, is positive definite but for rounding, by one Cholesky.

    Nothing that is proved of an SVM would be true of another K: its dual has no single maximum. Of a large K
    some rows have to do; what they do not show comes to light where the solver fails.
    """
    m = len(problem.y)
    some = slice(None, None, -(-m // _SEEN))
    seen, largest = problem.K[some, some], problem.K.diagonal().amax()
    return _definite(seen, _DOUBLE * largest) or _definite(seen, m * problem.rounding.amax().square())


def _definite(K: Tensor, ridge: Tensor) -> bool:
    """Whether K is positive definite with the ridge on its diagonal."""
    lifted = K.clone()
    lifted.diagonal().add_(ridge)
    return not bool(torch.linalg.cholesky_ex(lifted).info)


def _require_semidefinite(function: str, given: Tensor, matrix: InDouble) -> float:
    """The smallest eigenvalue; an error names it if K is no kernel matrix, nor one that was rounded.

    To float32, if that is what its entries say.
    """
    K = matrix.K
    least, size = float(torch.linalg.eigvalsh(K)[0]), float(K.diagonal().abs().amax())
    single = bool((given.float() == given).all())
    unit = torch.finfo(torch.float32).eps * float(given.diagonal().amax()) if single else 0.0
    allowed = max(_DOUBLE * size, len(K) * max(unit, float(matrix.rounding.amax()) ** 2), _TINY)
    if least < -allowed:
        raise ValueError(f"{function}: {_indefinite(least)}")
    return least


def _indefinite(least: float) -> str:
    """What is wrong with a K of this smallest eigenvalue."""
    return (
        f"K must be positive semi-definite, its smallest eigenvalue is {least:.3g}; "
        "use a valid kernel or add to its diagonal"
    )


def _check_weight(guard: Guard, K: Tensor, weight: Tensor) -> None:
    """One for each row of K."""
    require_floating(guard.function, K=K, weight=weight)
    n = K.shape[-1]
    if weight.shape[-1:] != (n,):
        raise ValueError(
            f"{guard.function}: weight must have {n} entries to match K, got shape {tuple(weight.shape)}"
        )
    guard.positive(weight=weight)


def _is_symmetric(K: Tensor) -> Tensor:
    """Whether K (n, n) is symmetric but for rounding, (); block by block, as large temporaries are slow."""
    low, high = torch.aminmax(K)
    apart = torch.zeros_like(low)
    for i in range(0, len(K), _BLOCK):
        block = K[i : i + _BLOCK, i:] - K[i:, i : i + _BLOCK].mT
        apart = apart.maximum(block.abs_().amax())
    return apart <= 1e-6 * torch.maximum(high, -low)


def checked(
    function: str, K: Tensor, y: Tensor, C: float | Tensor, weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Arguments of one batch shape, to which K only broadcasts, or an error that names what is wrong."""
    require_floating(function, K=K, y=y)
    if not values_visible(K, y):
        raise RuntimeError(
            f"{function}: needs to see the values of K and y, which meta and fake tensors, torch.func "
            "transforms and torch.compile do not show"
        )
    if K.ndim < 2 or K.shape[-1] != K.shape[-2] or not K.shape[-1]:
        raise ValueError(
            f"{function}: K must be square and not empty, (..., n, n), got shape {tuple(K.shape)}"
        )
    n = K.shape[-1]
    if y.ndim < 1 or y.shape[-1] != n:
        raise ValueError(f"{function}: y must have {n} entries to match K, got shape {tuple(y.shape)}")
    guard = Guard(function)
    guard.positive(C=C)
    C = C.to(K) if isinstance(C, Tensor) else torch.as_tensor(C, dtype=K.dtype, device=K.device)
    if weight is not None:
        _check_weight(guard, K, weight)
    guard.positive(C=C)  # again: a number may be too large or too small for the dtype of K
    guard.finite(K=K)
    guard.two_classes(y=y.unsqueeze(-1))
    if not K.numel():
        raise ValueError(f"{function}: K must not be an empty batch, got shape {tuple(K.shape)}")
    matrices = K.detach().reshape(-1, n, n)
    guard.require(torch.stack([_is_symmetric(k) for k in matrices]), "K must be symmetric")
    guard.require(
        K.diagonal(dim1=-2, dim2=-1) >= 0, lambda: _indefinite(float(torch.linalg.eigvalsh(matrices).min()))
    )
    given, weight = weight is not None, torch.ones_like(y) if weight is None else weight
    try:
        batch = broadcast_shapes(K.shape[:-2], y.shape[:-1], weight.shape[:-1], C.shape)
    except RuntimeError:
        raise ValueError(
            f"{function}: batch dimensions must broadcast, got K {tuple(K.shape)}, y {tuple(y.shape)}, "
            f"weight {tuple(weight.shape)}, C {tuple(C.shape)}"
        ) from None
    box = C[..., None] * weight
    if given:
        guard.positive(**{"C * weight": box})
    name = "C * weight" if given else "C"
    guard.require(box.amax(-1) >= _TINY, f"{name} must be at least {_TINY:.1e} in some row; use a larger C")
    guard.check()
    return K, y.expand(*batch, n), C.expand(batch), weight.expand(*batch, n)
