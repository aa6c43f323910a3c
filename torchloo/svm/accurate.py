"""Products summed as if in twice the precision: what is left where large coefficients cancel."""

import math

import torch
from torch import Tensor

__all__ = ["accurate_product", "leading"]


def leading(x: Tensor) -> Tensor:
    """Rows (..., m) to so many bits of their largest number that products of two rows are summed exactly."""
    bits = (53 - math.ceil(math.log2(x.shape[-1]))) // 2
    _, exponent = torch.frexp(x.abs().amax(-1, keepdim=True))
    step = torch.ldexp(torch.ones_like(x[..., :1]), exponent - bits)
    return (x / step).round() * step


def accurate_product(K: Tensor, a: Tensor) -> Tensor:
    """K a for K (n, m) and a (m,): the sum over the leading bits is exact, the rest is small."""
    K_lead, a_lead = leading(K), leading(a)
    return K_lead @ a_lead + ((K - K_lead) @ a_lead + K @ (a - a_lead))
