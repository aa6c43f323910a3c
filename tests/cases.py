"""The machines of the contract (CASES: of least squares), each with its delete-and-refit, and problems."""

from collections.abc import Callable
from dataclasses import dataclass

import reference
import reference_svm
import torch
from torch import Tensor

import torchloo as tl

KERNEL = {"rbf": lambda: tl.kernels.RBF(lengthscale=1.3), "linear": tl.kernels.Linear}
BASIS = 5


@dataclass(frozen=True)
class Case:
    """A machine of given kernel, and its reference on one problem without batch dimensions."""

    name: str
    make: Callable[..., torch.nn.Module]
    refit: Callable[[Tensor, Tensor, Tensor, Tensor, object], Tensor]
    refit_at: Callable[..., Tensor] | None = None
    """Outputs at X_new of the machine refitted to the kept rows: (X, Y, reg, weight, kept, X_new)."""
    labels: bool = False
    penalty: str = "reg"
    """The parameter that `make` sets: reg, or C to its inverse."""

    @property
    def least_squares(self) -> bool:
        """Has a linear smoother: leverages, variances, paths in reg, a solution with derivatives."""
        return self.penalty == "reg"

    @property
    def coded(self) -> bool:
        """What a row is coded as depends on all labels, and K has one feature for each row."""
        return self.name == "kfd"

    def targets(self, Y: Tensor) -> Tensor:
        """Targets that suit the machine."""
        if not self.labels:
            return Y
        signs = Y.sign()
        axis = -2
        first = signs.select(axis, 0)
        second = signs.select(axis, 1)
        first.fill_(1.0), second.fill_(-1.0)  # both classes
        third = signs.select(axis, 2)
        fourth = signs.select(axis, 3)
        third.fill_(1.0), fourth.fill_(-1.0)
        return signs

    def expected(self, X: Tensor, Y: Tensor, reg: object, weight: Tensor, clusters: object) -> Tensor:
        """Outputs of delete-and-refit for X (..., n, d) and Y (..., n, c), problem by problem."""
        batch = X.shape[:-2]
        reg = torch.as_tensor(reg, dtype=X.dtype)
        flat = zip(
            X.reshape(-1, *X.shape[-2:]),
            Y.reshape(-1, *Y.shape[-2:]),
            reg.expand(batch).reshape(-1),
            weight.expand(*batch, X.shape[-2]).reshape(-1, X.shape[-2]),
            strict=True,
        )
        outputs = [self.refit(x, y, r, w, clusters) for x, y, r, w in flat]
        return torch.stack(outputs).reshape(*batch, -1, Y.shape[-1])  # of overlapping sets not n


def gram(X: Tensor, Z: Tensor, kernel: str) -> Tensor:
    """The kernel matrix by loops over its entries."""
    K = torch.empty(len(X), len(Z), dtype=X.dtype)
    for i, x in enumerate(X):
        for j, z in enumerate(Z):
            if kernel == "linear":
                K[i, j] = x @ z
            else:
                K[i, j] = torch.exp(-((x - z) ** 2).sum() / (2 * 1.3**2))
    return K


def _dense_at(solve, kernel):
    def refit_at(X, Y, reg, weight, kept, X_new):
        predict = solve(gram(X[kept], X[kept], kernel), Y[kept], reg, weight[kept])
        return predict(gram(X_new, X[kept], kernel))

    return refit_at


def _kfd_at(X, Y, reg, weight, kept, X_new):
    T = reference.code(Y, weight)
    predict = reference.solve_kfd(gram(X, X, "rbf")[kept], T[kept], reg, weight[kept])
    return predict(gram(X_new, X, "rbf"))


def _sparse_at(X, Y, reg, weight, kept, X_new):
    Z = X[:BASIS]
    predict = reference.solve_sparse(gram(Z, Z, "rbf"), gram(X[kept], Z, "rbf"), Y[kept], reg, weight[kept])
    return predict(gram(X_new, Z, "rbf"))


def _dense(function, kernel):
    return lambda X, Y, reg, weight, clusters: function(gram(X, X, kernel), Y, reg, weight, clusters)


def _sparse(X, Y, reg, weight, clusters):
    Z = X[:BASIS]
    return reference.sparse_lssvm(gram(Z, Z, "rbf"), gram(X, Z, "rbf"), Y, reg, weight, clusters)


def _svc(X, Y, reg, weight, clusters):
    K = gram(X, X, "rbf")
    box = weight / reg
    return torch.from_numpy(reference_svm.held_out(K.numpy(), Y.numpy(), box.numpy(), clusters))


def _all_rows(X, Y, reg, weight, clusters):
    K = gram(X, X, "rbf")
    return reference.sparse_lssvm(K, K, Y, reg, weight, clusters)


def _case(name, kind, kernel, held_out, solve) -> Case:
    """A machine that is solved in its kernel matrix, with its references."""
    return Case(
        name,
        lambda reg=1.0: kind(KERNEL[kernel](), reg),
        _dense(held_out, kernel),
        _dense_at(solve, kernel),
    )


CASES = [
    _case("rls", tl.RLS, "rbf", reference.rls, reference.solve_rls),
    _case("lssvm", tl.LSSVM, "rbf", reference.lssvm, reference.solve_lssvm),
    Case(
        "kfd",
        lambda reg=1.0: tl.KFD(KERNEL["rbf"](), reg),
        _dense(reference.kfd, "rbf"),
        _kfd_at,
        labels=True,
    ),
    _case("rls-linear", tl.RLS, "linear", reference.rls, reference.solve_rls),
    _case("lssvm-linear", tl.LSSVM, "linear", reference.lssvm, reference.solve_lssvm),
    Case("sparse", lambda reg=1.0: tl.SparseLSSVM(KERNEL["rbf"](), reg, basis=BASIS), _sparse, _sparse_at),
]
IDS = [case.name for case in CASES]

MACHINES = [
    *CASES,
    Case("svc", lambda reg=1.0: tl.SVC(KERNEL["rbf"](), 1 / reg), _svc, labels=True, penalty="C"),
]


def problem(
    n: int = 12,
    d: int = 3,
    c: int = 2,
    batch: tuple[int, ...] = (),
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """X (..., n, d), Y (..., n, c) and weights (..., n), the basis apart from one another."""
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(*batch, n, d, dtype=torch.float64, generator=generator)
    Y = torch.randn(*batch, n, c, dtype=torch.float64, generator=generator)
    weight = 0.25 + 2 * torch.rand(*batch, n, dtype=torch.float64, generator=generator)
    return X, Y, weight


def relative(received: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest expected entry."""
    return ((received - expected).abs().max() / expected.abs().max()).item()
