"""What the command measures, against numbers worked out by hand."""

import math

import numpy as np
import pytest
import torch

from torchloo.cli.measures import Measure, baseline, measures
from torchloo.held_out import HeldOut


def held_out(outputs: torch.Tensor, y: torch.Tensor) -> HeldOut:
    weight = torch.linspace(1, 5, len(y), dtype=y.dtype)  # measures count every row once
    return HeldOut(outputs, y - outputs, y, weight, None, torch.ones_like(y), weight > 9)


def by_name(y: torch.Tensor, classes: int) -> dict[str, Measure]:
    return {measure.name: measure for measure in measures(y, classes)}


def test_measures_of_numbers():
    y = torch.tensor([1.0, 2.0, 6.0]).double()
    f = torch.tensor([1.0, 4.0, 5.0]).double()
    of = by_name(y, 0)
    answers = held_out(f, y)
    assert of["RMSE"].value(answers) == pytest.approx(math.sqrt(5 / 3))
    assert of["mean absolute error"].value(answers) == pytest.approx(1.0)
    assert of["R²"].value(answers) == pytest.approx(1 - 5 / 14)
    assert of["R²"].value(baseline(y)) == pytest.approx(0.0)
    assert of["RMSE"].value(baseline(y)) == pytest.approx(y.std(correction=0).item())


def test_measures_of_two_classes():
    y = torch.tensor([1.0, 1.0, 1.0, -1.0]).double()
    answers = held_out(torch.tensor([2.0, 0.0, -1.0, 0.5]).double(), y)
    of = by_name(y, 2)
    assert of["error rate"].value(answers) == 0.5
    assert of["balanced error rate"].value(answers) == pytest.approx((1 / 3 + 1) / 2)
    assert of["area under the ROC curve"].value(answers) == pytest.approx(1 / 3)
    assert of["error rate"].value(baseline(y)) == 0.25
    assert of["area under the ROC curve"].value(baseline(y)) == 0.5


def test_measures_of_several_classes():
    y = 2 * torch.eye(3).double()[[0, 0, 0, 1, 2]] - 1
    outputs = torch.eye(3).double()[[0, 0, 1, 1, 0]]
    of = by_name(y, 3)
    rate = of["misclassification rate (largest output)"]
    assert rate.value(held_out(outputs, y)) == pytest.approx(2 / 5)
    balanced = of["balanced misclassification rate"]
    assert balanced.value(held_out(outputs, y)) == pytest.approx((1 / 3 + 0 + 1) / 3)
    assert rate.value(baseline(y)) == pytest.approx(2 / 5)


def test_squares_are_averaged_before_the_root_is_taken():
    y = torch.zeros(1).double()
    parts = [held_out(torch.tensor([value]).double(), y) for value in (1.0, 3.0, 5.0)]
    outer = by_name(torch.tensor([0.0, 1.0]).double(), 0)["RMSE"].over_splits(parts)
    assert outer.scores.tolist() == [1.0, 3.0, 5.0]
    assert outer.mean == pytest.approx(math.sqrt(35 / 3))
    stderr = np.std([1, 9, 25], ddof=1) / math.sqrt(3)
    assert outer.stderr == pytest.approx(stderr / (2 * outer.mean))


def test_splits_with_one_class_have_no_roc_curve_and_are_left_out():
    both = torch.tensor([1.0, -1.0]).double()
    one = torch.tensor([1.0, 1.0]).double()
    right = torch.tensor([1.0, -1.0]).double()
    outer = by_name(both, 2)["area under the ROC curve"].over_splits(
        [held_out(right, both), held_out(right, one)]
    )
    assert outer.scores.tolist() == [1.0]
    assert outer.mean == 1.0
    assert math.isnan(outer.stderr)


@pytest.mark.parametrize(
    ("measure", "mean", "stderr", "shown"),
    [
        (Measure("a", len, percent=True), 0.1234, 0.0056, "12.3 ± 0.6 %"),
        (Measure("a", len), 96.31, 1.64, "96.3 ± 1.6"),
        (Measure("a", len), 12345.6, 250.0, "12346 ± 250"),
        (Measure("a", len), 0.01234, 0.00056, "0.01234 ± 0.00056"),
        (Measure("a", len, places=3), 0.9087, 0.0034, "0.909 ± 0.003"),
        (Measure("a", len), 3.03e-14, 6.2e-15, "3.03e-14 ± 6.2e-15"),
        (Measure("a", len), 2.5, math.nan, "2.5"),
        (Measure("a", len), math.nan, math.nan, "-"),
    ],
)
def test_means_are_shown_with_the_digits_that_their_errors_leave(measure, mean, stderr, shown):
    assert measure.show_mean(mean, stderr) == shown


def test_a_rounded_zero_has_no_sign():
    assert Measure("a", len, places=3).show(-1e-16) == "0.000"
