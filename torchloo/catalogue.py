"""Machines and kernels by name, for the command line and for scikit-learn."""

from collections.abc import Callable

import torch

from torchloo.fisher import KFD
from torchloo.kernels import RBF, Boolean, Kernel, Linear, Matern, Polynomial
from torchloo.lssvm import LSSVM
from torchloo.machine import KernelMachine
from torchloo.rls import RLS
from torchloo.sparse import SparseLSSVM
from torchloo.svm import SVC

__all__ = ["KERNELS", "MACHINES", "TELL_CLASSES_APART"]

KERNELS: dict[str, Callable[[int], Kernel]] = {
    "rbf": lambda d: RBF(lengthscale=d**0.5),
    "ard": lambda d: RBF(lengthscale=torch.full((d,), d**0.5, dtype=torch.float64)),
    "linear": lambda d: Linear(),
    "poly2": lambda d: Polynomial(degree=2),
    "poly3": lambda d: Polynomial(degree=3),
    "boolean": lambda d: Boolean(rate=1.0 / d),
    "matern": lambda d: Matern(lengthscale=d**0.5),
}
"""Kernels for d inputs, by name."""

MACHINES: dict[str, Callable[..., KernelMachine]] = {
    "lssvm": LSSVM,
    "rls": RLS,
    "sparse": SparseLSSVM,
    "kfd": KFD,
    "svc": SVC,
}
"""Machines of a kernel (and, for the sparse one, of a basis), by name."""

TELL_CLASSES_APART = ("kfd", "svc")
"""Machines for labels only, which must see rows of every class."""
