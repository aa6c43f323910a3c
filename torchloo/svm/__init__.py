"""Support vector machines with an exact, certified leave-one-out.

In: kernel matrices, labels and C (`svm`, `svm_loo`, `svm_lco`), or rows (`SVC`). Out: `SVMFit`, `SVMHeldOut`.
`solve/` trains the full machine, `path/` follows it to the machines without a row, `proof/` certifies their
signs, and `smo/` retrains instead. `records` has what goes between them, `tolerances` how exact it is.
"""

from torchloo.svm.fit import SVMFit, svm
from torchloo.svm.lco import svm_lco
from torchloo.svm.loo import svm_loo
from torchloo.svm.result import RESOLVED_BY, SVMHeldOut
from torchloo.svm.smo.options import SMOOptions
from torchloo.svm.svc import SVC

__all__ = ["RESOLVED_BY", "SVC", "SMOOptions", "SVMFit", "SVMHeldOut", "svm", "svm_lco", "svm_loo"]
