"""The tolerances of the SVM, all of them, by what they are relative to.

Absolute ones are for problems as `solve/merge.py` scales them: kernels of mean diagonal 1, or boxes of 1 if
that makes kernels larger. Sizes of blocks, numbers of steps and the like are beside their use.
"""

import torch
from torch import Tensor

__all__ = [
    "ASYMMETRY",
    "AT_BOUND",
    "BALANCED",
    "BEYOND",
    "CLEAR",
    "CLOSE",
    "DECIDES",
    "DEPENDENT",
    "EXACT",
    "FAR",
    "FEW_DIGITS",
    "FLAT",
    "INDEPENDENT",
    "IS_INVERSE",
    "JITTER",
    "LEAST",
    "LONGER",
    "MISSING",
    "NEAR_MARGIN",
    "NEGATIVE",
    "NOTHING",
    "PERTURBATION",
    "REFINED",
    "RIDGES",
    "ROUGH_RIDGE",
    "ROUNDING",
    "SAME",
    "SETTLED",
    "SHORT",
    "SHORT_OF_BOUND",
    "SINGLE",
    "SINGULAR",
    "SINGULAR_ENTRY",
    "SINGULAR_EXIT",
    "SMALL_BOX",
    "TINY",
    "UNIT",
    "UNITS",
    "UNITS_MISSING",
    "USEFUL",
    "WIDEST",
    "at_bound",
    "is_free",
    "size",
]

# Solutions: how far a coefficient or a margin lies past its bound, a gap relative to the sum of alpha.
EXACT = 1e-9  # what rounding may do to an exact solution, to its gap and to its decision values
CLOSE = 1e-6  # the same where rounding decides which set a variable is in: margins that hardly differ
USEFUL = 1e-3  # a gap with which certificates can still work, and large margins are known
CLEAR = 1e-7  # a gap at which the sets can be read off
LEAST = 1e-14  # a gap that rounding hardly ever allows
SINGLE = 1e-4  # a gap down to which float32 is enough
NEAR_MARGIN = 0.5  # margins above 0 that a better solution may well bring down
DECIDES = 1e-2  # of the gap: a complementarity below it needs no small residuals
SETTLED = 30.0  # a multiplier so many times the distance to its bound has won
SHORT_OF_BOUND = 0.995  # of the step of an interior point to the nearest bound

# Rounding, relative to the largest of the numbers that are compared.
ROUNDING = 1e-12  # what it may do to decision values
UNIT = 1e-15  # to a sum of boxes
REFINED = 1e-10  # to margins of free variables before they are refined
FLAT = 1e-11  # to rates
BALANCED = 1e-6  # to the sum of a direction d, of the sum of |d|
FEW_DIGITS = torch.finfo(torch.float64).tiny  # below, numbers have lost digits

# Coefficients, relative to their box.
TINY = 1e-12  # so near a bound they are there; and the least curvature along a pair
NOTHING = 1e-9  # what rounding may leave of a box once its rows are gone
AT_BOUND = 1e-7  # of the largest coefficient if that is less: where rounding has moved solutions off a bound
SMALL_BOX = 1e-6  # boxes for which all these are too coarse
WIDEST = 1e3  # boxes beyond which a perturbation grows no more

# Kernel matrices, relative to an entry of the diagonal.
SAME = 1e-13  # how far apart rows of one point are
SINGULAR = 1e-13  # a pivot that rounding alone may have made
DEPENDENT = 1e-8  # a pivot below which a point depends on the others
SINGULAR_ENTRY = 1e-9  # the same on a path
SINGULAR_EXIT = 1e-4  # of 1 / k: the last free variable of a path
INDEPENDENT = 1e-7  # of the largest eigenvalue of a block of columns
MISSING = 1e-10  # of the mean: what a factor of low rank may miss
ASYMMETRY = 1e-6  # rounding of k_ij and k_ji to float32
NEGATIVE = 1e-9  # eigenvalues below 0 that rounding may have made
FAR = 0.99  # the mean entry of rows far from the origin
UNITS_MISSING = 64  # of rounding to float32, that a factor of low rank may miss
UNITS = 8  # of rounding between K and what replaces it
SHORT = 1e-3  # the least that counts for a ridge
LONGER = 1.01  # roots of entries, before they are rounded to float32
IS_INVERSE = 0.5  # of the norm of I - R M

# What is added to a diagonal entry of a matrix, where it does not change what is solved or is refined away.
RIDGES = 1e-15, 1e-13  # where rounding has made K indefinite, in turn
ROUGH_RIDGE = 1e-8  # where directions are enough

# Moves off all ties.
PERTURBATION = 1e-8  # of margins and boxes, at the start of a path
JITTER = 1e-6  # of margins, at the start of a homotopy
BEYOND = 0.03  # how far past zero an early stop goes, so that its end proves the error


def size(alpha: Tensor, box: Tensor) -> Tensor:
    """What rounding of coefficients is relative to, (..., m): the box, or the largest one if that is less."""
    return torch.minimum(box, alpha.amax(-1, keepdim=True))


def at_bound(alpha: Tensor, box: Tensor) -> Tensor:
    """How near its bound a coefficient counts as at it, (..., m); for solutions that rounding has moved."""
    return AT_BOUND * size(alpha, box)


def is_free(alpha: Tensor, box: Tensor, width: Tensor | float = 0.0) -> Tensor:
    """Which variables lie between their bounds by more than the width, (..., m).

    None where those at a bound have been put there; `at_bound` where rounding may have moved them off it.
    """
    return (alpha > width) & (alpha < box - width)
