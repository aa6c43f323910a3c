"""Selectors of the basis of a sparse machine, called as selector(kernel, X) -> Basis.

A selector stops at m vectors, at a mean relative reconstruction error of `tolerance`, or when the remainder
of every row is rounding error ("no longer invertible"). All use the same error; see Note [reconstruction
error] in pivots.py. The selection is not differentiated.

| selector | rule | time | memory |
|---|---|---|---|
| greedy | the vector that lowers the error most | n^2 m | n^2 |
| stochastic | the best of random candidates, judged on random rows | n m^2 | n m |
| pivoted | the row with the largest error | n m^2 | n m |
| rpcholesky | a row drawn with probability proportional to its error | n m^2 | n m |
| pruned | rows that remain when those of small coefficients are dropped repeatedly | n^3 | n^2 |
| random | rows drawn uniformly | n m^2 | n m |
| all | every row | n^3 | n^2 |

Random selectors draw a seed from `generator` once, when they are constructed: called again on the same data
they return the same basis, on every device, so that `fit` and `loo` of a machine use the same one. All
problems of a batch use the same random numbers: a batch equals its loop.

>>> import torch
>>> from torchloo.kernels import RBF
>>> X = torch.linspace(0, 1, 50, dtype=torch.float64).unsqueeze(-1)
>>> chosen = rpcholesky(40, tolerance=1e-6)(RBF(lengthscale=0.2), X)
>>> chosen.stopped, bool(chosen.errors[-1] <= 1e-6), len(chosen.indices) < 20
('tolerance', True, True)
"""

from torchloo.basis.adaptive import greedy, pivoted, rpcholesky, stochastic
from torchloo.basis.ordered import all, pruned, random
from torchloo.basis.pivots import Basis
from torchloo.basis.selector import Selector

__all__ = ["Basis", "Selector", "all", "greedy", "pivoted", "pruned", "random", "rpcholesky", "stochastic"]
