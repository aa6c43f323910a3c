"""Products summed as if in twice the precision: what is left where large coefficients cancel."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from torchloo.svm.stacked import times_vector

__all__ = ["Parts", "accurate_product", "in_parts"]


class Parts(NamedTuple):
    """Rows (..., m) as a sum of two parts; sums of products of two leading ones are exact."""

    lead: Tensor
    """The leading bits, (..., m)."""

    rest: Tensor
    """The others, (..., m)."""

    largest: Tensor
    """The largest size of an entry of each row, (..., 1)."""

    most: Tensor
    """What no entry of `rest` exceeds in size, (..., 1)."""


def in_parts(x: Tensor) -> Parts:
    """Rows (..., m) in two parts: so many leading bits that products of two rows are summed exactly."""
    bits = (53 - math.ceil(math.log2(x.shape[-1]))) // 2
    largest = torch.maximum(x.amax(-1, keepdim=True), -x.amin(-1, keepdim=True))
    _, exponent = torch.frexp(largest)
    step = torch.ldexp(torch.ones_like(largest), exponent - bits)
    lead = (x / step).round_().mul_(step)
    return Parts(lead, x - lead, largest, step / 2)


def accurate_product(K: Tensor, a: Tensor) -> Tensor:
    """K a for K (..., n, m) and a (..., m): the sum over the leading bits is exact, the rest is small."""
    K_parts, a_parts = in_parts(K), in_parts(a)
    small = times_vector(K_parts.rest, a_parts.lead) + times_vector(K, a_parts.rest)
    return times_vector(K_parts.lead, a_parts.lead) + small
