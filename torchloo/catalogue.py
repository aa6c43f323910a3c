"""Machines and kernels by name, for the command line and for scikit-learn."""

from typing import Any

from torchloo.fisher import KFD
from torchloo.kernels.kernel import CHOICES, Choice
from torchloo.lssvm import LSSVM
from torchloo.rls import RLS
from torchloo.sparse import SparseLSSVM
from torchloo.svm import SVC

__all__ = ["KERNELS", "MACHINES", "TELL_CLASSES_APART"]

KERNELS: dict[str, Choice] = CHOICES
"""Kernels for d inputs, by name, as their classes declare them; also those of your own."""

MACHINES: dict[str, Any] = {
    "lssvm": LSSVM,
    "rls": RLS,
    "sparse": SparseLSSVM,
    "kfd": KFD,
    "svc": SVC,
}
"""Machines of a kernel (and, for the sparse one, of a basis), by name."""

TELL_CLASSES_APART = tuple(name for name, kind in MACHINES.items() if kind.needs_classes)
"""Machines for labels only, which must see rows of every class."""
