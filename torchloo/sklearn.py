"""Estimators for scikit-learn whose hyper-parameters are chosen inside `fit` by exact leave-one-out.

They need the extra `sklearn`. Data are converted to float64; rows of weight zero are ignored. Held-out
predictions of the training rows are attributes, computed without refitting; they use hyper-parameters chosen
on all rows, so a score computed from them is optimistic (see `torchloo.validate`).
"""

import copy
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, MultiOutputMixin, RegressorMixin, is_classifier
from sklearn.utils import check_random_state
from sklearn.utils.class_weight import compute_sample_weight
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import Tensor

from torchloo.calibration import calibrate
from torchloo.criteria.score import Score
from torchloo.guards import whole_number
from torchloo.held_out import HeldOut
from torchloo.intervals import jackknife_plus
from torchloo.kernels import Kernel, Precomputed
from torchloo.kernels.kernel import KERNELS
from torchloo.machine import KernelMachine, LeastSquares
from torchloo.machine.kernel_machine import MACHINES
from torchloo.search.parameters import Space
from torchloo.selection import select

__all__ = ["LOOClassifier", "LOORegressor"]


class _TrainingRows(NamedTuple):
    """Rows of positive weight, on the device of the machine."""

    X: Tensor
    """(n, d)."""
    y: Tensor
    """Numbers (n,) or (n, c), or class numbers (n,)."""
    weight: Tensor | None
    """(n,)."""
    clusters: Tensor | None
    """Labels (n,) on the host of what is left out together."""


class _LOOEstimator(BaseEstimator):
    """Base class of the estimators; see `LOORegressor`."""

    def __init__(
        self,
        machine: str = "lssvm",
        kernel: str | Kernel = "rbf",
        criterion: Any = "press",
        search: str | None = "gradient",
        *,
        reg: float = 1.0,
        basis: int = 100,
        starts: int = 1,
        max_evaluations: int | None = None,
        random_state: Any = None,
        device: str = "cpu",
    ) -> None:
        self.machine = machine
        self.kernel = kernel
        self.criterion = criterion
        self.search = search
        self.reg = reg
        self.basis = basis
        self.starts = starts
        self.max_evaluations = max_evaluations
        self.random_state = random_state
        self.device = device

    def _fit_rows(
        self,
        X: np.ndarray,
        y: np.ndarray,
        weight: np.ndarray | None,
        groups: Any,
        **options: Any,
    ) -> HeldOut:
        """Select and fit `machine_`; returns the held-out predictions of the rows of positive weight.

        Args:
            X: (n, d), y: (n,) or (n, c), weight: (n,) or None, groups: n labels or None.
            options: of the machine, besides its kernel and regularisation.
        """
        name = type(self).__name__
        taking_part = np.ones(len(X), bool) if weight is None else weight > 0
        if taking_part.sum() < 2:
            raise ValueError(
                f"{name}: leave-one-out needs two rows of positive weight, got n_samples={taking_part.sum()}"
            )
        clusters = None
        if groups is not None:
            labels = _column(name, "groups", groups, len(X))
            _, numbers = np.unique(labels, return_inverse=True)
            clusters = torch.from_numpy(numbers[taking_part])

        def on_device(array: np.ndarray) -> Tensor:
            return torch.tensor(array[taking_part], device=self.device)

        weights = None if weight is None else on_device(weight)
        rows = _TrainingRows(on_device(X), on_device(y), weights, clusters)
        machine, generator = self._build(rows.X, options)
        if self.search is None:
            self.machine_ = machine.fit(rows.X, rows.y, rows.weight)  # type: ignore[operator]
        else:
            self.machine_ = select(
                machine,
                rows.X,
                rows.y,
                self.criterion,
                self.search,
                clusters=clusters,
                weight=rows.weight,
                starts=self.starts,
                max_evaluations=self.max_evaluations,
                generator=generator,
                progress=False,
            ).machine
        with torch.no_grad():
            held_out = self.machine_.held_out(rows.X, rows.y, rows.clusters, rows.weight)
            self.criterion_ = float(Score(name, "criterion", self.criterion)(held_out))
        space = Space(name, self.machine_)
        self.best_params_ = space.named(space.vector())
        self._rows, self._taking_part = rows, taking_part
        return held_out

    def _build(self, X: Tensor, options: dict[str, Any]) -> tuple[KernelMachine, torch.Generator]:
        """The unfitted machine, and the random number generator."""
        name = type(self).__name__
        any_machine = is_classifier(self)
        suitable = [each for each, kind in MACHINES.items() if any_machine or not kind.needs_classes]
        _require_one_of(name, "machine", self.machine, tuple(sorted(suitable)))
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        generator = torch.Generator().manual_seed(seed)
        if isinstance(self.kernel, Kernel):
            kernel = copy.deepcopy(self.kernel)
        else:
            _require_one_of(name, "kernel", self.kernel, tuple(KERNELS))
            with X.device:  # whatever torch's default device is
                kernel = KERNELS[self.kernel](X.shape[1])
        if isinstance(kernel, Precomputed):
            raise TypeError(f"{name}: kernel must be evaluated at new rows, got Precomputed")
        if self.machine == "sparse":
            count = whole_number(name, "basis", self.basis)
            chosen = torch.randperm(len(X), generator=generator, device="cpu")[:count]
            options = {**options, "basis": X[chosen.to(X.device)]}
        kind = MACHINES[self.machine]
        if issubclass(kind, LeastSquares):
            strength = {"reg": self.reg}
        else:
            strength = {"C": 1 / self.reg}
        with X.device:
            return kind(kernel, **strength, **options).to(X.device), generator

    def _outputs(self, X: Any) -> np.ndarray:
        """Outputs of the fitted machine at new rows, (q,) or (q, c)."""
        check_is_fitted(self, "machine_")
        return self._outputs_at(validate_data(self, X, dtype=np.float64, reset=False))

    def _outputs_at(self, X: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            inputs = torch.tensor(X, device=self.device)
            return self.machine_(inputs).cpu().numpy()

    def _outputs_of_others(self, X: np.ndarray) -> Any:
        """Outputs of the fitted machine at the rows of weight zero."""
        others = ~self._taking_part
        return self._outputs_at(X[others]) if others.any() else 0.0

    def _in_all_rows(self, held_out: Tensor, others: Any) -> np.ndarray:
        """Values of the rows of positive weight, and `others` (a number, or one each) for the other rows."""
        values = held_out.cpu().numpy()
        full = np.empty((len(self._taking_part), *values.shape[1:]))
        full[~self._taking_part] = others
        full[self._taking_part] = values
        return full


class LOORegressor(MultiOutputMixin, RegressorMixin, _LOOEstimator):
    """Regression by a kernel machine whose hyper-parameters minimise a leave-one-out criterion.

    Args:
        machine: "lssvm", "rls" or "sparse".
        kernel: "rbf", "ard", "linear", "poly2", "poly3", "boolean", "matern", or a kernel of
            torchloo.kernels, which is copied. Use a StandardScaler before kernels with one lengthscale.
        criterion: name of a criterion of torchloo.criteria, or a callable of a HeldOut.
        search: "gradient", "nelder-mead" or "grid" over all parameters of kernel and machine, as in
            `torchloo.select`; None uses `reg` and the parameters of the kernel as given.
        reg: regularisation if there is no search (for "svc", C = 1 / reg).
        basis: number of basis vectors of the sparse machine, drawn from the training rows.
        starts: number of runs of the search.
        max_evaluations: limit for each run; None for the default of `torchloo.select`.
        random_state: seed for the basis and further starts.
        device: device of the machine.

    Attributes:
        loo_predictions_: held-out predictions of the training rows, (n,) or (n, c); with groups, each without
            its group. For rows of weight zero, the predictions of the fitted machine.
        loo_residuals_: y minus loo_predictions_.
        criterion_: the criterion of the selected machine.
        best_params_: its hyper-parameters by name.
        machine_: the fitted torchloo machine.

    Example:
        >>> import torchloo as tl
        >>> X, y = (t.numpy() for t in tl.datasets.motorcycle())
        >>> model = LOORegressor().fit(X, y)
        >>> float(round((model.loo_residuals_**2).mean() ** 0.5, 1))
        23.0
    """

    def fit(self, X: Any, y: Any, sample_weight: Any = None, groups: Any = None) -> Self:
        """Choose hyper-parameters and fit.

        Args:
            X: rows, (n, d).
            y: targets, (n,) or (n, c).
            sample_weight: (n,), for the loss and the criterion; rows of weight zero are ignored.
            groups: n labels; rows of one group are left out together.
        """
        X, y = validate_data(self, X, y, dtype=np.float64, multi_output=True, y_numeric=True)
        weight = _weights(sample_weight, X)
        held_out = self._fit_rows(X, y.astype(np.float64), weight, groups)
        self.loo_predictions_ = self._in_all_rows(held_out.outputs, self._outputs_of_others(X))
        self.loo_residuals_ = y - self.loo_predictions_
        return self

    def predict(self, X: Any) -> np.ndarray:
        """Outputs at new rows, (q,) or (q, c)."""
        return self._outputs(X)

    def predict_interval(self, X: Any, level: float = 0.9) -> tuple[np.ndarray, np.ndarray]:
        """Prediction intervals with coverage `level`; see `intervals.jackknife_plus`."""
        check_is_fitted(self, "machine_")
        X = validate_data(self, X, dtype=np.float64, reset=False)
        X_new = torch.tensor(X, device=self.device)
        rows = self._rows
        with torch.no_grad():
            ends = jackknife_plus(
                self.machine_, rows.X, rows.y, X_new, level, clusters=rows.clusters, weight=rows.weight
            )
        lower, upper = (end.cpu().numpy() for end in ends)
        return lower, upper


class LOOClassifier(ClassifierMixin, _LOOEstimator):
    """Classification by a kernel machine whose hyper-parameters minimise a leave-one-out criterion.

    Args:
        machine: "lssvm", "rls", "sparse", "kfd" or "svc"; several classes are encoded one-vs-rest.
        class_weight: None, "balanced", or a dict of weights, as elsewhere in scikit-learn.

    All other parameters, and attributes, are those of `LOORegressor`, except for these.

    Attributes:
        classes_: the class labels.
        loo_predictions_: held-out labels of the training rows, (n,).
        loo_decision_: held-out outputs, (n,), or (n, k) for k > 2 classes.
        loo_residuals_: encoded targets (-1 and +1, or the codes of KFD) minus loo_decision_; NaN for rows of
            weight zero.
        calibration_: the torchloo calibration that `predict_proba` uses, fitted to `loo_decision_`.

    Example:
        >>> import numpy as np
        >>> X = np.array([[0.0], [1.0], [2.0], [5.0], [6.0], [7.0]])
        >>> LOOClassifier(kernel="linear").fit(X, ["low"] * 3 + ["high"] * 3).predict([[1.5]])
        array(['low'], dtype='<U4')
    """

    def __init__(
        self,
        machine: str = "lssvm",
        kernel: str | Kernel = "rbf",
        criterion: Any = "press",
        search: str | None = "gradient",
        *,
        reg: float = 1.0,
        basis: int = 100,
        starts: int = 1,
        max_evaluations: int | None = None,
        random_state: Any = None,
        device: str = "cpu",
        class_weight: Any = None,
    ) -> None:
        super().__init__(
            machine,
            kernel,
            criterion,
            search,
            reg=reg,
            basis=basis,
            starts=starts,
            max_evaluations=max_evaluations,
            random_state=random_state,
            device=device,
        )
        self.class_weight = class_weight

    def fit(self, X: Any, y: Any, sample_weight: Any = None, groups: Any = None) -> Self:
        """Choose hyper-parameters, fit and calibrate; y holds n labels of any kind; see `LOORegressor`."""
        X, y = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(y)
        self.classes_, number = np.unique(y, return_inverse=True)
        given = weight = _weights(sample_weight, X)
        if self.class_weight is not None:
            by_class = compute_sample_weight(self.class_weight, y)
            weight = by_class if given is None else given * by_class
        present = number if weight is None else number[weight > 0]
        if len(np.unique(present)) < 2:
            raise ValueError("LOOClassifier: y must hold rows of two classes or more, got one class only")
        held_out = self._fit_rows(X, number, weight, groups, classes=range(len(self.classes_)))
        self.loo_decision_ = self._in_all_rows(held_out.outputs, self._outputs_of_others(X))
        self.loo_residuals_ = self._in_all_rows(held_out.residuals, np.nan)
        self.loo_predictions_ = self._labels(self.loo_decision_)
        counted = None
        if given is not None:
            counted = torch.tensor(given[self._taking_part], device=self.device)
        self.calibration_ = calibrate(held_out, counted).cpu()
        return self

    def _labels(self, outputs: np.ndarray) -> np.ndarray:
        """Labels (q,) of outputs (q,), or (q, k) for k > 2 classes."""
        if outputs.ndim == 2:
            return self.classes_[outputs.argmax(1)]
        return self.classes_[(outputs >= 0).astype(int)]

    def decision_function(self, X: Any) -> np.ndarray:
        """Outputs at new rows: (q,), positive for the second of two classes, or (q, k)."""
        return self._outputs(X)

    def predict(self, X: Any) -> np.ndarray:
        """Labels at new rows, (q,)."""
        return self._labels(self._outputs(X))

    def predict_proba(self, X: Any) -> np.ndarray:
        """Probabilities of the classes at new rows, (q, k), calibrated on held-out outputs."""
        outputs = torch.from_numpy(self._outputs(X))
        with torch.no_grad():
            probability = self.calibration_(outputs).numpy()
        if probability.ndim == 2:
            return probability
        return np.stack([1 - probability, probability], 1)


def _weights(sample_weight: Any, X: np.ndarray) -> np.ndarray | None:
    """Weights (n,) that are not negative, or None."""
    if sample_weight is None:
        return None
    return _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)


def _column(name: str, argument: str, values: Any, n: int) -> np.ndarray:
    """Labels of n rows."""
    array = np.asarray(values)
    if array.shape != (n,):
        raise ValueError(
            f"{name}: {argument} must hold a label for each of {n} rows, got shape {array.shape}"
        )
    return array


def _require_one_of(name: str, argument: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name}: {argument} must be one of {', '.join(known)}, got {value!r}")
