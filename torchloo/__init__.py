"""Kernel machines with exact, differentiable leave-one-out and leave-cluster-out predictions."""

from torchloo import basis, criteria, datasets, distributed, functional, intervals, kernels, splits
from torchloo.calibration import Platt, Temperature, calibrate
from torchloo.classes import one_vs_rest
from torchloo.clusters import folds
from torchloo.criteria import balanced_weight
from torchloo.diagnosis import Diagnosis, diagnose
from torchloo.fisher import KFD
from torchloo.held_out import HeldOut
from torchloo.lssvm import LSSVM
from torchloo.primal.solved import StreamFit
from torchloo.probing import Probe, probe
from torchloo.rls import RLS
from torchloo.sampling_error import standard_error
from torchloo.search.run import Search
from torchloo.selection import Selection, select
from torchloo.smoothers import Fit
from torchloo.sparse import SparseLSSVM
from torchloo.streaming.stream import Stream
from torchloo.svm import SVC, SVMFit, SVMHeldOut
from torchloo.thresholds import threshold
from torchloo.validation import Validation, validate

__version__ = "0.1.0"

__all__ = [
    "KFD",
    "LSSVM",
    "RLS",
    "SVC",
    "Diagnosis",
    "Fit",
    "HeldOut",
    "Platt",
    "Probe",
    "SVMFit",
    "SVMHeldOut",
    "Search",
    "Selection",
    "SparseLSSVM",
    "Stream",
    "StreamFit",
    "Temperature",
    "Validation",
    "balanced_weight",
    "basis",
    "calibrate",
    "criteria",
    "datasets",
    "diagnose",
    "distributed",
    "folds",
    "functional",
    "intervals",
    "kernels",
    "one_vs_rest",
    "probe",
    "select",
    "splits",
    "standard_error",
    "threshold",
    "validate",
]
