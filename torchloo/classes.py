"""Class labels: integers or bools, and the columns of -1 and +1 that machines are trained on.

Note [coding of classes]
Column k is +1 in the rows of class k and -1 elsewhere: one class against the rest. Two classes need one
column only, +1 for the second class, as the column of the first would be its negative. Classes are in the
order of `classes=`, or else the sorted labels of the call.
"""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchloo.guards import Guard, refuse_text, values_visible

__all__ = [
    "as_classes",
    "coded",
    "is_label",
    "is_member",
    "one_vs_rest",
    "require_few",
    "require_two",
    "sorted_labels",
]

_FEW = 20  # up to this number of distinct integers are classes, never counts


def one_vs_rest(labels: Any, classes: Any = None, *, dtype: torch.dtype | None = None) -> Tensor:
    """Columns of -1 and +1 for class labels, one class against the rest.

    The encoding that machines use for integer labels (Note [coding of classes]), except that they omit the
    output axis for two classes. The number of classes is not limited.

    Args:
        labels: integers or bools, (..., n); a tensor, an array or a list.
        classes: all labels, (c,), in the order of the columns; some may be missing from `labels`. None for
            the sorted labels, which reads their values.
        dtype: of the columns; None for torch's default. Machines need that of X.

    Returns:
        (..., n, c), or (..., n, 1) for two classes: +1 for the second class, the larger label if sorted.

    >>> one_vs_rest([2, 0, 5])
    tensor([[-1.,  1., -1.],
            [ 1., -1., -1.],
            [-1., -1.,  1.]])
    >>> one_vs_rest(torch.tensor([True, False])).T
    tensor([[ 1., -1.]])
    """
    labels = _as_tensor("one_vs_rest", labels=labels)
    if not is_label(labels):
        raise TypeError(
            f"one_vs_rest: labels must be integers or bools, got {labels.dtype}; convert them, e.g. "
            "labels.long()"
        )
    if labels.ndim == 0 or labels.numel() == 0:
        raise ValueError(
            f"one_vs_rest: labels must be (..., n) and not empty, got shape {tuple(labels.shape)}"
        )
    if classes is None:
        known = sorted_labels("one_vs_rest", "labels", labels)
        require_two("one_vs_rest", "labels", known)
    else:
        known = as_classes("one_vs_rest", classes)
    guard = Guard("one_vs_rest")
    dtype = torch.get_default_dtype() if dtype is None else dtype
    columns = coded(guard, "labels", labels, known, dtype)
    guard.check()
    return columns


def is_label(y: object) -> bool:
    """Whether targets are class labels: a tensor of integers or bools."""
    return isinstance(y, Tensor) and not (y.is_floating_point() or y.is_complex())


def _as_tensor(function: str, **labels: Any) -> Tensor:
    refuse_text(function, **labels)
    (values,) = labels.values()
    return values if isinstance(values, Tensor) else torch.as_tensor(values, device="cpu")


def as_classes(function: str, classes: Any) -> Tensor:
    """The argument `classes` as a tensor (c,): two or more different labels."""
    given = _as_tensor(function, classes=classes).detach().clone()
    if not is_label(given):
        raise TypeError(f"{function}: classes must be integers or bools, got {given.dtype}")
    repeated = given.ndim == 1 and values_visible(given) and len(given.unique()) < len(given)
    if given.ndim != 1 or len(given) < 2 or repeated:
        raise ValueError(f"{function}: classes must be two or more different labels, got {classes!r}")
    return given


def sorted_labels(function: str, name: str, labels: Tensor) -> Tensor:
    """The distinct labels, ascending, (c,); reads the values."""
    if not values_visible(labels):
        raise ValueError(
            f"{function}: classes must be given, e.g. classes=[0, 1, 2], if the values of {name} cannot be "
            "read: on meta tensors, inside torch.func transforms and under torch.compile"
        )
    return labels.detach().unique()


def require_two(function: str, name: str, classes: Tensor) -> None:
    """Raise if all labels are the same."""
    if len(classes) < 2:
        raise ValueError(
            f"{function}: {name} must hold at least two classes, got {classes.tolist()} only; give classes= "
            "if others are missing"
        )


def require_few(function: str, classes: Tensor, rows: int) -> None:
    """Raise if there are so many distinct integers that they are probably counts, not classes."""
    most = max(_FEW, math.isqrt(rows))
    if len(classes) > most:
        raise ValueError(
            f"{function}: integer y are class labels, at most {most} distinct ones for {rows} rows, got "
            f"{len(classes)}; for regression on numbers use y.double() (or .float(), like X); if they are "
            "classes, give classes= to the machine, or columns tl.one_vs_rest(y, dtype=X.dtype)"
        )


def is_member(guard: Guard, name: str, labels: Tensor, classes: Tensor) -> Tensor:
    """Membership of labels (..., n) in the classes (c,), boolean (..., n, c); other labels raise."""
    member = labels.unsqueeze(-1) == classes.to(labels.device)
    known = member.any(-1)
    guard.require(known, partial(_unknown, name, labels, known, classes))
    return member


def coded(guard: Guard, name: str, labels: Tensor, classes: Tensor, dtype: torch.dtype) -> Tensor:
    """Columns (..., n, c) of -1 and +1, or (..., n, 1) for two classes; other labels raise."""
    member = is_member(guard, name, labels, classes)
    columns = member if len(classes) > 2 else member[..., 1:]
    return 2 * columns.to(dtype) - 1


def _unknown(name: str, labels: Tensor, known: Tensor, classes: Tensor) -> str:
    found = labels[~known].unique().tolist()
    return f"{name} must hold labels of classes only, {classes.tolist()}, got {found}"


def predicted_labels(machine: str, outputs: Tensor, classes: Tensor | None, flat: bool) -> Tensor:
    """Labels (..., n) of the largest outputs (..., n, c), or by the sign of (..., n); no graph."""
    if classes is None:
        raise RuntimeError(
            f"{machine}: fitted to numbers, so it has no classes; fit it to labels, or give it classes="
        )
    columns = outputs.detach().unsqueeze(-1) if flat else outputs.detach()  # (..., n, c)
    expected = len(classes) if len(classes) > 2 else 1
    if columns.shape[-1] != expected:
        raise RuntimeError(
            f"{machine}: {len(classes)} classes need outputs of one column each, or one for two, but the "
            f"machine was fitted to {columns.shape[-1]} columns"
        )
    if columns.shape[-1] > 1:
        predicted = columns.argmax(-1)
    else:
        predicted = (columns[..., 0] >= 0).long()
    return classes.to(outputs.device)[predicted]
