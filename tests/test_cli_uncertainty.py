"""Intervals and probabilities beside predictions, time budgets, and row numbers, of the command."""

from pathlib import Path

import numpy as np
import pytest
import torch
from command import run

import torchloo as tl
from torchloo.cli import report, uncertainty
from torchloo.cli.model_file import load

pd = pytest.importorskip("pandas")

N = 40


def table(n=N, seed=0):
    draw = np.random.default_rng(seed)
    x, z = draw.normal(size=(2, n))
    place = draw.choice(["north", "south", "west"], n)
    price = np.sin(2 * x) + 0.3 * z + (place == "west") + 0.2 * draw.normal(size=n)
    grade = np.array(["low", "middle", "high"])[np.digitize(price, [-0.3, 0.7])]
    weight = draw.uniform(0.5, 2, n).round(3)
    site = draw.integers(0, 8, n)
    sold = np.where(price > 0.2, "yes", "no")
    return pd.DataFrame(
        {
            "x": x,
            "z": z,
            "place": place,
            "price": price,
            "sold": sold,
            "grade": grade,
            "w": weight,
            "site": site,
        }
    )


def select(target, *options, data="data.csv", out="out"):
    others = {"price", "sold", "grade", "w", "site"} - {target, *options}
    drop = [word for name in sorted(others) for word in ("--drop", name)]
    words = ["--target", target, *drop, *options, "--no-report", "--no-progress", "--out", out]
    return run("select", data, *words, *([] if "--outer" in options else ["--outer", "0"]))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    table().to_csv("data.csv", index=False)
    table(7, seed=1)[["x", "z", "place"]].to_csv("new.csv", index=False)
    return tmp_path


def refitted(model, new, level, basis=None):
    """Jackknife+ ends by fitting a machine without every row, or its cluster."""
    machine, (X, y, weight, clusters) = model.machine, model.uncertainty.rows
    errors, outputs = [], []
    for i in range(len(y)):
        keep = clusters != clusters[i]
        options = {"basis": basis} if basis is not None else {}
        one = type(machine)(machine.kernel, machine.reg.detach(), **options)
        one.fit(X[keep], y[keep], weight[keep])
        errors.append((y[i] - one(X[i : i + 1])).abs().item())
        outputs.append(one(new).detach().numpy())
    k = int(np.ceil(level * (len(y) + 1)))
    lower = np.sort(np.array(outputs) - np.array(errors)[:, None], 0)[len(y) - k]
    return lower, np.sort(np.array(outputs) + np.array(errors)[:, None], 0)[k - 1]


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--clusters", "site", "--weights", "w"],
        ["--machine", "rls", "--kernel", "linear"],
        ["--machine", "sparse", "--basis", "9", "--weights", "w"],
    ],
    ids=["dense", "clusters", "linear", "sparse"],
)
def test_intervals_are_those_of_refits(folder, options):
    assert select("price", *options) == 0
    model = load(Path("out/model.pt"), "cpu")
    new = torch.tensor(model.schema.design(pd.read_csv("new.csv")))
    basis = model.machine.support if "sparse" in options else None
    for level, words in ((0.9, []), (0.6, ["--level", "0.6"])):
        assert run("predict", "out/model.pt", "new.csv", *words) == 0
        predicted = pd.read_csv("predictions.csv")
        assert predicted.columns.tolist() == ["row", "prediction", "lower", "upper"]
        ends = refitted(model, new, level, basis)
        np.testing.assert_allclose(predicted[["lower", "upper"]].to_numpy().T, ends, rtol=1e-7, atol=1e-9)


def test_intervals_cover_new_targets(folder, capsys):
    table(200).to_csv("many.csv", index=False)
    assert select("price", data="many.csv") == 0
    table(300, seed=5).drop(columns=["sold", "grade", "w", "site"]).to_csv("new.csv", index=False)
    capsys.readouterr()
    assert run("predict", "out/model.pt", "new.csv") == 0
    inside = int(capsys.readouterr().out.split(" of 300 in their intervals")[0].split()[-1])
    predicted = pd.read_csv("predictions.csv")
    truth = pd.read_csv("new.csv")["price"]
    assert inside == ((predicted["lower"] <= truth) & (truth <= predicted["upper"])).sum()
    assert 0.82 < inside / 300 < 0.97


def test_rows_that_a_machine_has_anyway_are_stored_once(folder):
    table(400).to_csv("many.csv", index=False)
    assert select("price", data="many.csv") == 0
    inputs = torch.load("out/model.pt", weights_only=True)["state"]["support"].numel()
    with_intervals = Path("out/model.pt").stat().st_size
    assert with_intervals < 8 * (inputs + 400 * 4) + 8000  # inputs, coefficients, targets, weights, clusters


def test_too_many_rows_leave_intervals_out(folder, capsys, monkeypatch):
    monkeypatch.setitem(uncertainty.MOST_ROWS, "dense", N - 1)
    assert select("price") == 0
    assert (
        f"note: no prediction intervals: the model would have to keep all {N} rows" in capsys.readouterr().out
    )
    assert run("predict", "out/model.pt", "new.csv") == 0
    assert pd.read_csv("predictions.csv").columns.tolist() == ["row", "prediction"]
    assert run("predict", "out/model.pt", "new.csv", "--level", "0.8") == 2
    assert "it was trained on too many rows to keep them" in capsys.readouterr().err
    assert select("price", "--kernel", "linear", out="linear") == 0
    assert "no prediction intervals" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("target", "options"),
    [
        ("sold", []),
        ("sold", ["--machine", "svc"]),
        ("grade", ["--clusters", "site"]),
        ("grade", ["--machine", "kfd"]),
    ],
    ids=["two", "svc", "clusters", "kfd"],
)
def test_probabilities_are_calibrated_on_held_out_rows(folder, target, options):
    assert select(target, *options) == 0
    assert run("predict", "out/model.pt", "new.csv") == 0
    predicted = pd.read_csv("predictions.csv")
    model = load(Path("out/model.pt"), "cpu")
    labels = model.schema.labels
    names = [f"probability {label}" for label in labels]
    assert predicted.columns.tolist()[-len(labels) :] == names
    chances = predicted[names].to_numpy()
    np.testing.assert_allclose(chances.sum(1), 1.0)
    held_out = pd.read_csv("out/held_out.csv")
    way = "lco" if "--clusters" in options else "loo"
    scores = [name for name in held_out.columns if name.startswith(f"{way}_output")]
    outputs = torch.tensor(held_out[scores].to_numpy())
    Y = torch.tensor(model.schema.codes(held_out["target"]))
    outputs = outputs[:, 0] if len(labels) == 2 else outputs
    ones = torch.ones(N, dtype=torch.float64)
    mine = tl.calibrate(tl.HeldOut(outputs, Y - outputs, Y, ones, None, outputs, ones > 1))
    score = torch.tensor(
        predicted[[name for name in predicted.columns if name.startswith("score")]].to_numpy()
    )
    if len(labels) == 2:
        expected = mine(score[:, 0])
        expected = torch.stack([1 - expected, expected], 1)
    else:
        expected = mine(score)
    np.testing.assert_allclose(chances, expected.numpy(), rtol=1e-6, atol=1e-9)


def test_a_level_needs_numbers_and_sense(folder, capsys):
    assert select("sold") == 0
    assert run("predict", "out/model.pt", "new.csv", "--level", "0.8") == 2
    assert (
        "--level: the model has no prediction intervals, since it predicts classes" in capsys.readouterr().err
    )
    for level in ("0", "1", "90", "x"):
        assert run("predict", "out/model.pt", "new.csv", "--level", level) == 2
        assert "argument --level: must be" in capsys.readouterr().err


def test_a_time_budget_ends_the_search_and_the_outer_estimate(folder, capsys, monkeypatch):
    seen = []
    monkeypatch.setattr(report, "page", lambda findings, source: seen.append(source.command) or "")
    drop = [word for name in ("sold", "grade", "w", "site") for word in ("--drop", name)]
    words = ["--target", "price", *drop, "--out", "out", "--no-progress"]
    assert run("select", "data.csv", *words, "--outer", "20", "--time-budget", "1e-6") == 0
    out, err = capsys.readouterr()
    assert "evaluations, stopped by the time budget" in out
    lines = err.splitlines()
    assert lines[0] == (
        "torchloo select: warning: select: the time budget of 5e-07 s is used up; this is the best so far"
    )
    assert lines[1].startswith(
        "torchloo select: warning: validate: the time budget of 5e-07 s is used up; these"
    )
    assert len(lines) == 2
    assert "--time-budget 1e-06" in seen[0]
    assert run("predict", "out/model.pt", "new.csv") == 0
    for wrong in ("0", "-1", "soon"):
        assert run("select", "data.csv", *words[:-3], "--time-budget", wrong) == 2
        assert "argument --time-budget: must be a positive number" in capsys.readouterr().err


def test_enough_time_changes_nothing(folder, capsys):
    assert select("price", "--outer", "3") == 0
    plain = capsys.readouterr().out.replace("out", "")
    assert select("price", "--outer", "3", "--time-budget", "600", out="out2") == 0
    assert capsys.readouterr().out.replace("out2", "").replace("out", "") == plain
    assert Path("out/held_out.csv").read_bytes() == Path("out2/held_out.csv").read_bytes()


@pytest.mark.parametrize(
    ("column", "value", "options", "message"),
    [
        ("x", "inf", [], "column 'x' is infinite in row 31"),
        ("x", "a lot", [], "column 'x' mixes numbers with text, 'a lot' in row 31"),
        ("w", "-1", ["--weights", "w"], "weights 'w' must be positive, got -1 in row 31"),
    ],
)
def test_row_numbers_are_those_of_the_file_although_rows_were_dropped(
    folder, capsys, column, value, options, message
):
    messy = table().astype({"x": object, "w": object})
    messy.loc[[2, 9, 20], "z"] = np.nan
    messy.loc[30, column] = value
    messy.to_csv("messy.csv", index=False)
    assert select("price", *options, "--missing", "drop", data="messy.csv") == 2
    assert message in capsys.readouterr().err


def test_held_out_rows_have_the_numbers_of_the_file_although_rows_were_dropped(folder):
    messy = table()
    messy.loc[[2, 9, 20], "z"] = np.nan
    messy.to_csv("messy.csv", index=False)
    assert select("price", "--missing", "drop", data="messy.csv") == 0
    rows = pd.read_csv("out/held_out.csv")["row"].tolist()
    assert rows == [row for row in range(1, N + 1) if row not in (3, 10, 21)]
