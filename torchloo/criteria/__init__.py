"""Criteria: functions of a HeldOut, as losses to minimise and scores to report.

Every criterion has the same signature, ``criterion(held_out, weight="own", per_output=False)``:

* ``held_out``: outputs f, targets, residuals r = targets - f, (..., n) or (..., n, c).
* ``weight``: "own" for the training weights of the HeldOut, None for equal weights, or a non-negative tensor
  (n,) or (..., n). Criteria documented as unweighted do not accept a tensor.
* ``per_output``: False averages over the c outputs and returns the batch shape; True returns
  batch + (c,). Without an output axis both return the batch shape.

Criteria of two classes (`error_rate`, `balanced_error_rate`, `smooth_error`, `hinge`, `squared_hinge`, `wmw`,
`smooth_wmw`, `auc`, `leave_pair_out_auc`) use t = sign(targets): a column holds one positive and one negative
value, -1 and +1 or the codes of KFD; other targets, such as labels 1, 2, 3, are rejected. An output f = 0
predicts +1.

Several classes are one-vs-rest columns, with one positive target in each row. The predicted class is that of
the largest output; `multiclass_error` is its error rate, `balanced_multiclass_error` gives every class the
same weight, and `cross_entropy` is differentiable. `class_accuracy` and `confusion` are tables by class, not
criteria for a search. The mean of a two-class criterion over one-vs-rest columns is a different quantity,
often much smaller, and has to be requested by ``average="outputs"``; ``per_output=True`` returns the columns
separately. Columns that are not one-vs-rest are averaged like any outputs.

Criteria have attributes such as ``press.lower_is_better``, ``press.differentiable`` and ``press.targets``,
see `Criterion`; the decorator `criterion` adds your own. `CRITERIA` has all by name. Criteria that are not
differentiable return values without a graph. Options of a criterion (average, gamma, noise, clusters) are
keyword arguments; use ``functools.partial`` to fix them. Memory is O(n) per batch entry and output, except
for the blocks of `smooth_wmw` and `leave_pair_out_auc`.
"""

from torchloo.criteria.classification import (
    balanced_error_rate,
    balanced_weight,
    error_rate,
    hinge,
    smooth_error,
    squared_hinge,
)
from torchloo.criteria.declared import CRITERIA, Criterion, criterion
from torchloo.criteria.ranking import auc, kendall_tau, leave_pair_out_auc, smooth_wmw, wmw
from torchloo.criteria.regression import log_density, mse, press
from torchloo.criteria.several_classes import (
    balanced_multiclass_error,
    class_accuracy,
    confusion,
    cross_entropy,
    multiclass_error,
)

__all__ = [
    "CRITERIA",
    "Criterion",
    "auc",
    "balanced_error_rate",
    "balanced_multiclass_error",
    "balanced_weight",
    "class_accuracy",
    "confusion",
    "criterion",
    "cross_entropy",
    "error_rate",
    "hinge",
    "kendall_tau",
    "leave_pair_out_auc",
    "log_density",
    "mse",
    "multiclass_error",
    "press",
    "smooth_error",
    "smooth_wmw",
    "squared_hinge",
    "wmw",
]
