"""Classification problems for the tests of the SVM."""

import torch
from hypothesis import strategies as st
from torch import Tensor

from torchloo.svm import svm
from torchloo.svm.arguments import Caller
from torchloo.svm.fit import solve_problems
from torchloo.svm.records import Exact, RowOutcome, SVMProblem
from torchloo.svm.smo.loo_smo import leave_one_out_by_smo
from torchloo.svm.smo.options import SMOOptions


def rbf(X: Tensor, lengthscale: float | Tensor = 1.0) -> Tensor:
    return torch.exp(-(X[:, None] - X[None]).square().sum(-1) / (2 * lengthscale**2))


def toy(seed: int, n: int = 30, d: int = 2, noise: float = 0.8) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    X = torch.randn(n, d, generator=g, dtype=torch.float64)
    y = torch.where(X[:, 0] + noise * torch.randn(n, generator=g) > 0, 1.0, -1.0).double()
    y[0], y[1], y[2], y[3] = 1, 1, -1, -1
    return X, y


def solved(K: Tensor, y: Tensor, box: Tensor) -> tuple[SVMProblem, Exact]:
    """One problem K (n, n), y and box (n,), as a stack, merged, and its solution."""
    ((_, problem, full),) = solve_problems(Caller("test"), K[None], y[None], box[None])
    return problem, full


@st.composite
def problems(draw, most: int = 25) -> tuple[Tensor, Tensor, float]:
    """K, y and C from 1e-4 to 1e6: random, separable, one positive only, copies, constant features."""
    X, y = toy(draw(st.integers(0, 10**6)), draw(st.integers(5, most)), draw(st.integers(1, 3)))
    shape = draw(st.sampled_from(["plain", "lattice", "separable", "one positive", "copies", "constant"]))
    if shape == "lattice":
        X = X.round()
    elif shape == "separable":
        X[:, 0] += 5 * y
    elif shape == "one positive":
        y = -torch.ones_like(y)
        y[0] = 1
    elif shape == "copies":
        X[4], y[4] = X[0], y[0]  # the same row twice
        X[3] = X[1]  # and one with both labels
    elif shape == "constant":
        X[:] = 1
    K = X @ X.T if draw(st.booleans()) else rbf(X)
    return K, y, 10 ** draw(st.floats(-4, 6))


def loo_by_smo(
    K: Tensor, y: Tensor, C: float, values: bool, epsilon: float, options: SMOOptions | None = None
) -> RowOutcome:
    """Leave-one-out of one machine by the SMO."""
    fit = svm(K[None], y[None], C)
    box = torch.full_like(y[None], C)
    found = leave_one_out_by_smo(K[None], y[None], box, fit, values, epsilon, options or SMOOptions())
    return RowOutcome.of([field[0] for field in found[:6]], None)
