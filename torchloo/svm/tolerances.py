"""Tolerances that several rooms of the SVM share; one that is used in one place is beside its use.

They are absolute, or relative to what is named, for problems as `solve/merge.py` scales them: kernels of mean
diagonal 1, or boxes of 1 if that makes kernels larger.
"""

import torch
from torch import Tensor

__all__ = [
    "AT_BOUND",
    "CLOSE",
    "EXACT",
    "FEW_DIGITS",
    "NOTHING",
    "SINGULAR",
    "at_bound",
    "between_bounds",
    "strictly_inside",
]

EXACT = 1e-9  # how far rounding may carry a coefficient or a margin past its bound in an exact solution
CLOSE = 1e-6  # the same where rounding decides which set a variable is in: margins that hardly differ
NOTHING = 1e-9  # of a box: what rounding may leave of it once its rows are gone
SINGULAR = 1e-13  # of a diagonal entry: a pivot that rounding alone may have made
FEW_DIGITS = torch.finfo(torch.float64).tiny  # below, numbers have lost digits
AT_BOUND = 1e-7  # of the box, or of the largest coefficient if that is less: how near a bound is at it


def at_bound(alpha: Tensor, box: Tensor) -> Tensor:
    """How near its bound a coefficient counts as at it, (..., m); for solutions that rounding has moved.

    Boxes may be far larger than any coefficient; rounding is relative to the coefficients then.
    """
    return AT_BOUND * torch.minimum(box, alpha.amax(-1, keepdim=True))


def strictly_inside(alpha: Tensor, box: Tensor, width: Tensor | None = None) -> Tensor:
    """Which variables are free, (..., m), where rounding may have moved coefficients off their bounds.

    By more than the `width` (..., m); default `at_bound`, for which alpha must hold all coefficients.
    """
    width = at_bound(alpha, box) if width is None else width
    return (alpha > width) & (alpha < box - width)


def between_bounds(alpha: Tensor, box: Tensor) -> Tensor:
    """Which variables are free, (..., m), where those at a bound have been put there: no tolerance."""
    return (alpha > 0) & (alpha < box)
