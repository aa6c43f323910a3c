"""Criteria: numbers from a HeldOut, losses to descend and scores to report.

Every criterion is called alike, ``criterion(held_out, weight="own", per_output=False)``:

* ``held_out``: outputs f, targets, residuals r = targets - f, (..., n) or (..., n, c).
* ``weight``: "own" takes the training weights of the HeldOut, None counts every row once, and a tensor
  (n,) or (..., n), not negative, weighs the rows by itself. A criterion that is said to be unweighted
  takes no tensor.
* ``per_output``: False averages over the c outputs and returns the batch shape; True returns
  batch + (c,). Without an output axis both return the batch shape.

Classification criteria see t = sign(targets), so that coded targets fit too; an output f = 0 predicts +1.

Code asks ``criterion.lower_is_better`` and ``criterion.differentiable``. Those that are not
differentiable return values without a graph. Options of a criterion (gamma, noise, clusters) are
keyword arguments; ``functools.partial`` fixes them. Memory is O(n) a batch entry and output, but for
the blocks of `smooth_wmw` and `leave_pair_out_auc`.
"""

from torchloo.criteria.classification import (
    balanced_error_rate,
    balanced_weight,
    error_rate,
    hinge,
    smooth_error,
    squared_hinge,
)
from torchloo.criteria.criterion import Criterion
from torchloo.criteria.ranking import auc, kendall_tau, leave_pair_out_auc, smooth_wmw, wmw
from torchloo.criteria.regression import log_density, mse, press

__all__ = [
    "Criterion",
    "auc",
    "balanced_error_rate",
    "balanced_weight",
    "error_rate",
    "hinge",
    "kendall_tau",
    "leave_pair_out_auc",
    "log_density",
    "mse",
    "press",
    "smooth_error",
    "smooth_wmw",
    "squared_hinge",
    "wmw",
]
