"""Coefficients of machines without a row or a set of rows: closed form and delete-and-refit."""

import pytest
import torch
from cases import CASES, IDS, problem, relative
from torch.testing import assert_close

import torchloo as tl

every_smoother = pytest.mark.parametrize("case", CASES, ids=IDS)
N = 12
SETS = [3, [4], [2, 9, 5], list(range(1, N)), [[0, 1], [7, 4], [11, 3]]]
SET_IDS = ["row", "one", "cluster", "all-but-one", "sets"]


def columns_of(case, X):
    """The points that the coefficients of a machine belong to."""
    return X[..., :5, :] if case.name == "sparse" else X


def outputs_at(case, X, coef, bias, X_new):
    """What a machine says at new points, by its coefficients, (m, c)."""
    return case.make().kernel(X_new, columns_of(case, X)) @ coef + bias


def expected_at(case, X, Y, reg, weight, rows, X_new):
    left = {rows} if isinstance(rows, int) else set(rows)
    kept = [i for i in range(len(X)) if i not in left]
    return case.refit_at(X, Y, torch.as_tensor(reg, dtype=X.dtype), weight, kept, X_new)


@every_smoother
@pytest.mark.parametrize("rows", SETS, ids=SET_IDS)
@pytest.mark.parametrize("reg", [1e-4, 0.1, 1e2])
@pytest.mark.parametrize("weighted", [False, True])
def test_held_out_coef_equals_delete_and_refit(case, rows, reg, weighted):
    X, Y, weight = problem(N, c=2)
    X[8] = X[2]  # a copy, also of a basis row
    X_new, _, _ = problem(20, seed=7)
    Y = case.targets(Y)
    weight = weight if weighted else torch.ones_like(weight)
    fit = case.make(reg).solve(X, Y, weight if weighted else None)
    coef, bias = fit.held_out_coef(rows)
    sets = rows if isinstance(rows, list) and isinstance(rows[0], list) else [rows]
    if len(sets) == 1:
        assert coef.shape == fit.coef.shape
        assert bias.shape == fit.bias.shape
        coef, bias = coef.unsqueeze(0), bias.unsqueeze(0)
    for k, some in enumerate(sets):
        expected = expected_at(case, X, Y, reg, weight, some, X_new)
        received = outputs_at(case, X, coef[k], bias[k], X_new)
        assert relative(received, expected) <= 1e-8


@every_smoother
@pytest.mark.parametrize("flat", [False, True])
def test_held_out_coef_of_a_batch_equals_its_loop(case, flat):
    X, Y, weight = problem(N, c=1 if flat else 2, batch=(2, 3))
    Y = case.targets(Y)
    Y = Y[..., 0] if flat else Y
    coef, bias = case.make(0.1).solve(X, Y, weight).held_out_coef([[2, 9], [5, 0]])
    for i in range(2):
        for j in range(3):
            alone = case.make(0.1).solve(X[i, j], Y[i, j], weight[i, j])
            for k, rows in enumerate([[2, 9], [5, 0]]):
                one, offset = alone.held_out_coef(rows)
                assert_close(coef[i, j, k], one, rtol=1e-8, atol=1e-9)
                assert_close(bias[i, j, k], offset, rtol=1e-8, atol=1e-9)


@every_smoother
@pytest.mark.parametrize("rows", [3, [1, 4, 5]], ids=["row", "cluster"])
def test_held_out_coef_says_of_its_rows_what_held_out_does(case, rows):
    X, Y, weight = problem(N, c=2)
    Y = case.targets(Y)
    fit = case.make(0.1).solve(X, Y, weight)
    labels = torch.arange(N)
    labels[torch.as_tensor(rows)] = N
    left = torch.as_tensor(rows).reshape(-1)
    expected = fit.held_out(labels).outputs[left]
    received = outputs_at(case, X, *fit.held_out_coef(rows), X[left])
    assert_close(received, expected, rtol=1e-9, atol=1e-9)
    if case.name in ("rls", "lssvm"):
        assert fit.held_out_coef(rows)[0][left].abs().max() <= 1e-12


@every_smoother
def test_gradcheck_of_held_out_coef(case):
    X, Y, weight = problem(7, d=2, c=2, seed=1)
    Y = case.targets(Y)
    without = _Without(case.make())

    def call(X, y, weight, log_reg):
        given = (X, Y if case.labels else y, weight)
        return torch.func.functional_call(without, {"machine.log_reg": log_reg}, given)

    inputs = [t.requires_grad_() for t in (X, Y.clone(), weight)]
    log_reg = torch.tensor(-1.2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(call, (*inputs, log_reg), atol=1e-6)


class _Without(torch.nn.Module):
    """The coefficients without rows as a module, so that functional_call can replace the parameters."""

    def __init__(self, machine):
        super().__init__()
        self.machine = machine

    def forward(self, X, y, weight):
        return self.machine.solve(X, y, weight).held_out_coef([1, 4])


def test_held_out_coef_where_a_row_is_all_that_tells_a_feature():
    """1 - h of row 0 is 1e-14: the closed form would cancel, so it is refitted."""
    Z = torch.tensor([[1e7, 0.0], [0.0, 1.0], [0.0, 2.0], [0.0, -1.0]], dtype=torch.float64)
    Y = torch.tensor([[1.0], [2.0], [3.0], [1.0]], dtype=torch.float64)
    fit = tl.functional.ridge(Z, Y, torch.eye(2, dtype=torch.float64))
    assert bool(fit.held_out().refitted[0])
    coef, _ = fit.held_out_coef(0)
    expected = tl.functional.ridge(Z[1:], Y[1:], torch.eye(2, dtype=torch.float64)).coef
    assert_close(coef, expected)


@pytest.mark.parametrize(
    ("rows", "exception", "message"),
    [
        (1.5, TypeError, "rows must be integers"),
        ([[0], [1, 2]], TypeError, "ragged"),
        (N, ValueError, "from 0 to 11"),
        (-1, ValueError, "from 0 to 11"),
        ([3, 3], ValueError, "distinct"),
        ([[3], [3]], ValueError, "distinct"),
        (list(range(N)), ValueError, "1 to 11 of the 12 rows"),
        ([[[1]]], ValueError, "one row"),
        (torch.empty(0, dtype=torch.int64), ValueError, "1 to 11"),
    ],
)
def test_bad_rows_raise(rows, exception, message):
    X, Y, _ = problem(N)
    with pytest.raises(exception, match=message):
        CASES[0].make().solve(X, Y).held_out_coef(rows)
