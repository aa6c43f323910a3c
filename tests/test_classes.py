"""Class labels: integers and bools, how they are coded, and machines that are given them."""

import pytest
import torch
from torch.testing import assert_close

import torchloo as tl


def columns_by_loops(labels: list, classes: list) -> torch.Tensor:
    """-1 and +1, row by row and class by class; one column for the second of two classes."""
    kept = classes if len(classes) > 2 else classes[1:]
    return torch.tensor([[1.0 if label == c else -1.0 for c in kept] for label in labels])


@pytest.mark.parametrize(
    ("labels", "classes", "order"),
    [
        ([3, -1, 7, 3], None, [-1, 3, 7]),
        ([3, -1, 7, 3], [7, 3, -1], [7, 3, -1]),
        ([0, 1, 1], [2, 1, 0], [2, 1, 0]),  # one is missing
        ([5, 2, 2], None, [2, 5]),
        ([5, 2, 2], [5, 2], [5, 2]),
        ([True, False, False], None, [False, True]),
        ([1, 1, 1], [0, 1], [0, 1]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_vs_rest_equals_loops(labels, classes, order, dtype):
    expected = columns_by_loops(labels, order).to(dtype)
    for given in (torch.tensor(labels), labels, torch.tensor(labels).numpy()):
        assert_close(tl.one_vs_rest(given, classes, dtype=dtype), expected, rtol=0, atol=0)
    batch = torch.tensor([labels, labels[::-1]])
    received = tl.one_vs_rest(batch, classes, dtype=dtype)
    assert torch.equal(received, torch.stack([expected, expected.flip(0)]))


@pytest.mark.parametrize(
    ("labels", "classes", "match"),
    [
        (torch.tensor([1.0, 2.0]), None, "labels must be integers or bools, got torch.float32; convert"),
        (torch.tensor(3), None, r"labels must be \(..., n\) and not empty, got shape \(\)"),
        (torch.zeros(0, dtype=torch.long), None, r"not empty, got shape \(0,\)"),
        ([4, 4], None, r"labels must hold two classes at least, got \[4\] only"),
        ([0, 1, 5, 9], [0, 1], r"labels must hold labels of classes only, \[0, 1\], got \[5, 9\]"),
        ([0, 1], [0], r"classes must be two or more different labels, got \[0\]"),
        ([0, 1], [0, 1, 1], "classes must be two or more different labels"),
        ([0, 1], [[0, 1]], "classes must be two or more different labels"),
        ([0, 1], [0.0, 1.0], "classes must be integers or bools, got torch.float32"),
    ],
)
def test_one_vs_rest_refuses(labels, classes, match):
    with pytest.raises((TypeError, ValueError), match="one_vs_rest: .*" + match):
        tl.one_vs_rest(labels, classes)


def test_one_vs_rest_without_values_needs_classes():
    labels = torch.zeros(2, 5, dtype=torch.long, device="meta")
    assert tl.one_vs_rest(labels, [0, 1, 2]).shape == (2, 5, 3)
    with pytest.raises(ValueError, match="classes must be given"):
        tl.one_vs_rest(labels)
    batch = torch.tensor([[0, 2], [1, 1]])
    each = torch.func.vmap(lambda y: tl.one_vs_rest(y, [0, 1, 2]))(batch)
    assert torch.equal(each, tl.one_vs_rest(batch))
