"""Bad input to an SVC: every method names what is wrong, and nothing has changed after it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from svm_problems import rbf, toy
from torch import Tensor

import torchloo as tl
from torchloo.svm import svm_lco, svm_loo
from torchloo.svm.path.unlearn import unlearn
from torchloo.svm.solve.exact import solve_exactly

N = 12
CLUSTERS = [0, 1, 2] * 4


def placed(tensor: Tensor, value: float, *place: int) -> Tensor:
    tensor = tensor.clone()
    tensor[place] = value
    return tensor


def good() -> dict[str, Any]:
    X, y = toy(3, n=N)
    return {"X": X, "y": y, "weight": torch.ones_like(y)}


def state(machine: tl.SVC) -> dict[str, Any]:
    extra = {"flat": machine.get_extra_state()["flat"], "training": machine.training}
    return {name: t.clone() for name, t in machine.state_dict().items() if isinstance(t, Tensor)} | extra


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(a, other[name]) if isinstance(a, Tensor) else a == other[name] for name, a in one.items()
    )


def called(machine: tl.SVC, method: str, arguments: dict[str, Any]) -> None:
    """The method refuses the arguments: neither they nor the machine have changed."""
    before, inputs = state(machine), {k: v.clone() for k, v in arguments.items() if isinstance(v, Tensor)}
    try:
        getattr(machine, method)(**arguments)
    finally:
        assert same(state(machine), before)
        assert all(torch.equal(arguments[k].nan_to_num(9), v.nan_to_num(9)) for k, v in inputs.items())


WRONG: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], type[Exception], str]] = {
    "NaN": (lambda a: {"X": placed(a["X"], torch.nan, 3, 0)}, ValueError, "svc: X must be finite"),
    "infinity": (lambda a: {"X": placed(a["X"], torch.inf, 3, 0)}, ValueError, "svc: X must be finite"),
    "no matrix": (lambda a: {"X": a["X"][0]}, ValueError, r"svc: X must be \(..., n, d\)"),
    "no tensor": (lambda a: {"X": a["X"].tolist()}, TypeError, "svc: X must be a torch tensor, got list"),
    "integers": (
        lambda a: {"X": a["X"].long()},
        TypeError,
        "svc: X must be float32 or float64, got torch.int64",
    ),
    "label 0": (lambda a: {"y": placed(a["y"], 0.0, 2)}, ValueError, r"svc: y must hold labels -1 and \+1"),
    "one class": (lambda a: {"y": a["y"].abs()}, ValueError, "svc: y must hold both classes"),
    "too few": (lambda a: {"y": a["y"][:5]}, ValueError, "svc: y must have 12 rows to match X"),
    "dtype": (lambda a: {"y": a["y"].float()}, TypeError, "svc: y must have the dtype of X"),
    "weight 0": (
        lambda a: {"weight": placed(a["weight"], 0.0, 1)},
        ValueError,
        "svc: weight must be positive",
    ),
    "weight NaN": (
        lambda a: {"weight": placed(a["weight"], torch.nan, 1)},
        ValueError,
        "svc: weight must be positive",
    ),
    "weight (5,)": (lambda a: {"weight": a["weight"][:5]}, ValueError, "svc: weight must have 12 entries"),
}


@pytest.mark.parametrize("method", ["fit", "solve", "loo", "lco"])
@pytest.mark.parametrize("case", WRONG)
def test_bad_input_is_named_and_changes_nothing(method, case):
    change, error, match = WRONG[case]
    arguments = good()
    machine = tl.SVC(tl.kernels.RBF(1.0), C=2.0).fit(**arguments)
    arguments |= change(arguments) | ({"clusters": CLUSTERS} if method == "lco" else {})
    with pytest.raises(error, match=match):
        called(machine, method, arguments)


@pytest.mark.parametrize(
    ("method", "options", "error", "match"),
    [
        ("loo", {"method": "fast"}, ValueError, 'svc: method must be "auto", "path" or "smo", got \'fast\''),
        ("lco", {"method": "path"}, ValueError, 'svc: method must be "auto" or "smo", got \'path\''),
        ("loo", {"epsilon": 0.0}, ValueError, "svc: epsilon must be positive"),
        ("lco", {"epsilon": -1.0}, ValueError, "svc: epsilon must be positive"),
        ("lco", {"clusters": [0] * N}, ValueError, "svc: clusters must leave some rows in"),
        (
            "lco",
            {"clusters": [0, 1]},
            ValueError,
            "svc: clusters must hold one label for each of the 12 rows",
        ),
        ("lco", {"clusters": [0.5] * N}, TypeError, "svc: clusters must be integer labels, got float64"),
    ],
)
def test_bad_options_are_named_by_the_module(method, options, error, match):
    machine = tl.SVC(tl.kernels.RBF(1.0), C=2.0).fit(**good())
    clusters = {"clusters": CLUSTERS} if method == "lco" else {}
    with pytest.raises(error, match=match):
        called(machine, method, good() | clusters | options)


@pytest.mark.parametrize("method", ["fit", "solve", "loo", "lco"])
@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda K: placed(K, 0.3, 0, 1), r"svc: kernel\(X\) must be symmetric"),
        (lambda K: K - 2 * torch.eye(N), r"svc: kernel\(X\) must be positive semi-definite"),
    ],
    ids=["asymmetric", "indefinite"],
)
def test_a_given_matrix_that_is_no_kernel_is_blamed_on_the_kernel(method, change, match):
    X, y = toy(3, n=N)
    machine = tl.SVC(tl.kernels.Precomputed(), C=2.0).fit(rbf(X), y)
    clusters = {"clusters": CLUSTERS} if method == "lco" else {}
    with pytest.raises(ValueError, match=match):
        called(machine, method, {"X": change(rbf(X)), "y": y} | clusters)


@pytest.mark.parametrize("C", [0.0, -1.0, torch.nan, torch.inf])
def test_a_machine_without_a_box_is_not_made(C):
    with pytest.raises(ValueError, match="SVC: C must be positive"):
        tl.SVC(tl.kernels.RBF(1.0), C=C)


def test_a_weight_for_each_class_is_a_box_for_each_class():
    X, y = toy(3, n=40)
    machine = tl.SVC(tl.kernels.RBF(1.0), C=0.5)
    coef = machine.solve(X, y, weight=torch.where(y > 0, 3.0, 1.0).to(X)).coef
    assert coef.max().item() == pytest.approx(1.5)
    assert coef.min().item() == pytest.approx(-0.5)


EYE = torch.eye(4, dtype=torch.float64)
LABELS = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"epsilon": "x"}, ValueError, "svm_loo: epsilon must be positive and finite, got x"),
        ({"epsilon": None}, ValueError, "svm_loo: epsilon must be positive and finite, got None"),
        ({"values": None}, TypeError, "svm_loo: values must be True or False, got None"),
        ({"rows": [True] * 4}, TypeError, r"svm_loo: rows must be a boolean tensor \(4,\), got list"),
        (
            {"K": -EYE},
            ValueError,
            "svm_loo: K must be positive semi-definite, its smallest eigenvalue is -1;",
        ),
        ({"C": torch.tensor([1.0, -2.0])}, ValueError, r"C must be positive and finite, got -2 at \(1,\)"),
        ({"weight": placed(LABELS.abs(), 0.0, 3)}, ValueError, r"weight must be .*, got 0 at \(3,\)"),
    ],
)
def test_bad_arguments_of_svm_loo_are_named_with_what_was_received(change, error, match):
    with pytest.raises(error, match=match):
        svm_loo(**({"K": EYE, "y": LABELS, "C": 1.0} | change))


@pytest.mark.parametrize("function", [svm_loo, svm_lco])
def test_errors_of_method_smo_name_the_function_that_was_called(function, monkeypatch):
    def unsolved(problem):
        full = solve_exactly(problem)
        return full._replace(slip=torch.ones_like(full.slip), margin=torch.full_like(full.margin, -1.0))

    monkeypatch.setattr("torchloo.svm.fit.solve_exactly", unsolved)
    clusters = [range(4)] if function is svm_lco else []
    with pytest.raises(ValueError, match=f"^{function.__name__}: no solution found"):
        function(EYE, LABELS, 10.0, *clusters, method="smo")


def test_what_is_solved_anew_counts_its_pairs_and_columns(monkeypatch):
    X, y = toy(6, n=20)
    held = svm_lco(rbf(X), y, 3.0, torch.arange(20) % 5)
    assert bool((held.iterations > 0).all())
    assert bool((held.kernel_columns > 0).all())

    def nothing_solved(*arguments):
        ends = unlearn(*arguments)
        no = torch.zeros_like(ends.proved)
        return ends._replace(proved=no, solved=no)

    monkeypatch.setattr("torchloo.svm.path.loo_path.unlearn", nothing_solved)
    held = svm_loo(rbf(X), y, 3.0)
    assert bool(held.refitted.any())
    assert not bool(held.kernel_columns.any())  # the exact solver is no SMO
