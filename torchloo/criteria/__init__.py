"""Criteria: numbers from a HeldOut, losses to descend and scores to report.

Every criterion is called alike, ``criterion(held_out, weight="own", per_output=False)``:

* ``held_out``: outputs f, targets, residuals r = targets - f, (..., n) or (..., n, c).
* ``weight``: "own" takes the training weights of the HeldOut, None counts every row once, and a tensor
  (n,) or (..., n), not negative, weighs the rows by itself. A criterion that is said to be unweighted
  takes no tensor.
* ``per_output``: False averages over the c outputs and returns the batch shape; True returns
  batch + (c,). Without an output axis both return the batch shape.

Criteria of two classes (`error_rate`, `balanced_error_rate`, `smooth_error`, `hinge`, `squared_hinge`, `wmw`,
`smooth_wmw`, `auc`, `leave_pair_out_auc`) see t = sign(targets): a column holds one positive and one negative
value, -1 and +1 or the codes of KFD, and other targets, such as labels 1, 2, 3, are refused. An output f = 0
predicts +1.

Several classes are columns with one positive target in each row, one class against the rest. The predicted
class is that of the largest output, and `multiclass_error` the rate of its errors, of which
`balanced_multiclass_error` counts every class alike; `cross_entropy` is differentiable. `class_accuracy` and
`confusion` tell the classes apart: they are tables, not criteria of a search. The mean over the columns of a
criterion of two classes is another number, often a far smaller one, so it has to be asked for, by
``average="outputs"``; ``per_output=True`` gives the columns one by one. Columns that are no such classes, as
rows have several or none of them, are averaged as any outputs are.

Code asks ``press.lower_is_better``, ``press.differentiable``, ``press.targets`` and whatever else `Criterion`
lists; the decorator `criterion` makes a function of your own one of them. `CRITERIA` has all by name. Those
that are not differentiable return values without a graph. Options of a criterion (average, gamma, noise,
clusters) are keyword arguments; ``functools.partial`` fixes them. Memory is O(n) a batch entry and output,
but for the blocks of `smooth_wmw` and `leave_pair_out_auc`.
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
