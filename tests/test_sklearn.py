"""The estimators are those of scikit-learn: its own checks, and what users put around them."""

import pickle

import numpy as np
import pandas as pd
import pytest
import torch

import torchloo as tl

pytest.importorskip("sklearn")

from sklearn.base import clone
from sklearn.model_selection import GridSearchCV, GroupKFold, LeaveOneOut, cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from torchloo.sklearn import LOOClassifier, LOORegressor

COPIES = (
    "a row of weight two is left out as one row, of two copies the other one stays, so that other "
    "hyper-parameters are chosen"
)


def expected_to_fail(estimator):
    return {
        "check_sample_weight_equivalence_on_dense_data": COPIES,
        "check_sample_weight_equivalence_on_sparse_data": COPIES,
    }


@parametrize_with_checks([LOORegressor(), LOOClassifier()], expected_failed_checks=expected_to_fail)
def test_checks_of_scikit_learn(estimator, check):
    check(estimator)


def rows(n=40, d=3, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, d))
    return X, np.sin(X[:, 0]) + 0.5 * X[:, 1] + 0.1 * rng.normal(size=n)


def table(n=60, seed=0):
    """A DataFrame with string classes, three of them."""
    rng = np.random.default_rng(seed)
    kind = np.array(["ash", "birch", "oak"])[np.arange(n) % 3]
    centre = {"ash": (0, 0), "birch": (3, 0), "oak": (0, 30)}
    points = np.array([centre[k] for k in kind]) + rng.normal(size=(n, 2)) * (1, 10)
    return pd.DataFrame(points, columns=["height", "girth"]), pd.Series(kind)


@pytest.mark.parametrize("estimator", [LOORegressor(search=None), LOOClassifier(search=None)])
def test_at_fixed_hyper_parameters_weights_are_numbers_of_copies(estimator):
    X, y = rows()
    y = y if isinstance(estimator, LOORegressor) else y > 0
    count = np.random.default_rng(1).integers(0, 4, len(X))
    weighted = clone(estimator).fit(X, y, sample_weight=count)
    repeated = clone(estimator).fit(np.repeat(X, count, 0), np.repeat(y, count))
    new = np.random.default_rng(2).normal(size=(10, 3))
    method = "predict" if isinstance(estimator, LOORegressor) else "decision_function"
    np.testing.assert_allclose(getattr(weighted, method)(new), getattr(repeated, method)(new), atol=1e-9)


@pytest.mark.parametrize("machine", ["lssvm", "rls", "sparse"])
@pytest.mark.parametrize("grouped", [False, True])
def test_loo_predictions_of_a_regressor_are_those_of_refits(machine, grouped):
    X, y = rows(25)
    groups = np.arange(25) // 3 if grouped else None
    model = LOORegressor(machine, max_evaluations=10, basis=8, random_state=0).fit(X, y, groups=groups)
    fixed = model.machine_
    for held in np.unique(groups) if grouped else range(25):
        out = (groups if grouped else np.arange(25)) == held
        refit = fixed.solve(*(torch.tensor(a[~out]) for a in (X, y)))
        expected = refit(torch.tensor(X[out])).detach().numpy()
        np.testing.assert_allclose(model.loo_predictions_[out], expected, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(model.loo_residuals_, y - model.loo_predictions_)
    assert model.criterion_ == pytest.approx((model.loo_residuals_**2).sum())


@pytest.mark.parametrize("machine", ["lssvm", "rls", "svc"])  # KFD keeps its coded targets
def test_loo_predictions_of_a_classifier_are_those_of_cross_validation(machine):
    X, y = rows(30)
    names = np.where(y > 0, "yes", "no")
    model = LOOClassifier(machine, search=None, criterion="error_rate").fit(X, names)
    refitted = cross_val_predict(model, X, names, cv=LeaveOneOut())
    assert (model.loo_predictions_ == refitted).all()
    assert model.criterion_ == pytest.approx((refitted != names).mean())


def test_rows_of_weight_zero_take_no_part():
    X, y = rows()
    weight = (np.arange(len(X)) % 4 > 0).astype(float)
    model = LOORegressor().fit(X, y, sample_weight=weight)
    alone = LOORegressor().fit(X[weight > 0], y[weight > 0])
    np.testing.assert_allclose(model.predict(X), alone.predict(X))
    np.testing.assert_allclose(model.loo_predictions_[weight > 0], alone.loo_predictions_)
    np.testing.assert_allclose(model.loo_predictions_[weight == 0], alone.predict(X[weight == 0]))


def test_several_outputs_are_several_columns():
    X, y = rows()
    model = LOORegressor(kernel="linear").fit(X, np.stack([y, -2 * y], 1))
    assert model.loo_predictions_.shape == (len(X), 2)
    np.testing.assert_allclose(model.predict(X)[:, 1], -2 * model.predict(X)[:, 0])


def test_a_pipeline_takes_a_data_frame_with_string_classes():
    frame, kind = table()
    model = make_pipeline(StandardScaler().set_output(transform="pandas"), LOOClassifier()).fit(frame, kind)
    assert model.score(frame, kind) > 0.9
    assert set(model.predict(frame)) <= {"ash", "birch", "oak"}
    assert list(model[-1].feature_names_in_) == ["height", "girth"]
    chance = model.predict_proba(frame)
    assert chance.shape == (60, 3)
    np.testing.assert_allclose(chance.sum(1), 1.0)
    assert (model.classes_[chance.argmax(1)] == kind).mean() > 0.9


def test_a_grid_search_goes_over_kernels_by_name():
    X, y = rows()
    search = GridSearchCV(LOORegressor(), {"kernel": ["linear", "rbf"]}, cv=3).fit(X, y)
    assert search.best_params_["kernel"] in ("linear", "rbf")
    assert search.best_estimator_.predict(X).shape == y.shape


def test_probabilities_order_rows_as_decisions_do():
    X, y = rows(60)
    model = LOOClassifier(class_weight="balanced").fit(X, y > 0.2)
    order = model.decision_function(X).argsort()
    assert (np.diff(model.predict_proba(X)[order, 1]) >= 0).all()


def test_intervals_hold_about_as_many_targets_as_they_promise():
    X, y = rows(150)
    new, truth = rows(300, seed=5)
    lower, upper = LOORegressor().fit(X, y).predict_interval(new, level=0.8)
    assert 0.7 <= ((lower <= truth) & (truth <= upper)).mean() <= 0.95


def test_groups_may_be_text_and_choose_the_machine():
    X, y = rows()
    X, y = (
        np.repeat(X, 3, 0),
        np.repeat(y, 3),
    )  # what leave-one-out takes for certain
    alone = LOORegressor().fit(X, y)
    grouped = LOORegressor().fit(X, y, groups=[f"row {i // 3}" for i in range(len(X))])
    assert grouped.best_params_["reg"] > 10 * alone.best_params_["reg"]
    predicted = cross_val_predict(grouped, X, y, cv=GroupKFold(5), groups=np.arange(len(X)) // 3)
    assert predicted.shape == y.shape


def test_a_copy_and_a_pickle_predict_the_same():
    X, y = rows()
    model = LOORegressor(kernel=tl.kernels.RBF(2.0) + tl.kernels.Linear(), random_state=0).fit(X, y)
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(again.predict(X), model.predict(X))
    assert clone(model).get_params().keys() == model.get_params().keys()
    np.testing.assert_allclose(clone(model).fit(X, y).predict(X), model.predict(X))


def test_best_params_have_the_names_that_a_search_takes():
    X, y = rows()
    best = LOORegressor().fit(X, y).best_params_
    assert set(best) == {"reg", "kernel.lengthscale"}
    kept = LOORegressor(kernel=tl.kernels.RBF(3.0), search=None, reg=0.5).fit(X, y).best_params_
    assert kept["reg"] == pytest.approx(0.5)
    assert kept["kernel.lengthscale"] == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("estimator", "message"),
    [
        (LOORegressor("svc"), "machine must be one of lssvm, rls, sparse.*, got 'svc'"),
        (LOOClassifier("tree"), "machine must be one of .* got 'tree'"),
        (LOORegressor(kernel="cubic"), "kernel must be one of .* got 'cubic'"),
        (LOORegressor(criterion="best"), "criterion must be one of"),
        (LOORegressor(search="luck"), "search must be one of"),
        (LOORegressor("sparse", basis=0), "basis must be a whole number, 1 or more, got 0"),
    ],
)
def test_what_is_not_known_by_name_is_refused(estimator, message):
    X, y = rows()
    with pytest.raises(ValueError, match=message):
        estimator.fit(X, y if isinstance(estimator, LOORegressor) else y > 0)


def test_groups_of_another_length_are_refused():
    X, y = rows()
    with pytest.raises(ValueError, match=r"groups must hold a label for each of 40 rows, got shape \(3,\)"):
        LOORegressor().fit(X, y, groups=[1, 2, 3])
