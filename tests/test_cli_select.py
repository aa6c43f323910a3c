"""torchloo select and predict: from a file to a folder, and all the ways to get it wrong."""

import contextlib
import io
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from command import require_one_line_error, run

import torchloo as tl
from torchloo.cli import findings as findings_module
from torchloo.cli import report
from torchloo.cli.model_file import load
from torchloo.cli.reading import read_table
from torchloo.cli.report import page, pictures
from torchloo.cli.shell import comma_separated

pd = pytest.importorskip("pandas")
pytest.importorskip("matplotlib")

QUICK = ["--no-progress", "--outer", "3"]
N = 48


def table(seed: int = 0, n: int = N) -> "pd.DataFrame":
    """Inputs of every kind, and a target of every kind that depends on them."""
    draw = np.random.default_rng(seed)
    x, z = draw.normal(size=(2, n))
    shop = draw.choice(["north", "south", "west"], n)
    signal_ = np.sin(x) + 0.5 * z + (shop == "west") + 0.1 * draw.normal(size=n)
    return pd.DataFrame(
        {
            "x": x,
            "z": z,
            "shop": shop,
            "always": 1,
            "price": 10 + signal_,
            "good": np.where(signal_ > 0.3, "yes", "no"),
            "grade": np.digitize(signal_, [-0.3, 0.7]),
            "day": np.arange(n) // 6,
            "w": draw.uniform(0.5, 2, n),
            "half": np.arange(n) % 2,
        }
    )


TARGETS = ("price", "good", "grade")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with a table in it; reports are empty, as test_report.py looks at them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(report, "page", lambda findings, source: "")
    table().to_csv("data.csv", index=False)
    return tmp_path


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model of each target."""
    root = tmp_path_factory.mktemp("models")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        patch.setattr(report, "page", lambda findings, source: "")
        table().to_csv("data.csv", index=False)
        for target in TARGETS:
            assert select(target, "--outer", "0", out=target) == 0
    return {target: root / target / "model.pt" for target in TARGETS}


def select(target: str, *options: object, out: str = "out") -> int:
    others = [word for name in TARGETS if name != target for word in ("--drop", name)]
    drop = others + [
        word for name in ("day", "w", "half") if name not in options for word in ("--drop", name)
    ]
    return run("select", "data.csv", "--target", target, "--out", out, *drop, *QUICK, *options)


@pytest.mark.parametrize(
    ("target", "options", "columns"),
    [
        ("price", [], ["loo_output", "loo_residual", "leverage"]),
        ("good", [], ["loo_output", "loo_class", "loo_residual", "leverage"]),
        (
            "grade",
            [],
            ["loo_output 0", "loo_output 1", "loo_output 2", "loo_class", "loo_residual", "leverage"],
        ),
        (
            "price",
            ["--clusters", "day"],
            ["loo_output", "loo_residual", "leverage", "cluster", "lco_output", "lco_residual"],
        ),
    ],
)
def test_select_writes_the_whole_folder(folder, capsys, target, options, columns):
    assert select(target, *options) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "ignored as constant: 'always'" in out
    assert "outer (3 splits)" in out
    assert "±" in out
    assert sorted(path.name for path in Path("out").iterdir()) == ["held_out.csv", "model.pt", "report.html"]
    assert sorted(path.name for path in folder.iterdir()) == ["data.csv", "out"]
    held_out = pd.read_csv("out/held_out.csv")
    assert held_out.columns.tolist() == ["row", "target", *columns]
    assert held_out["row"].tolist() == list(range(1, N + 1))
    assert held_out["target"].tolist() == table()[target].tolist()


@pytest.mark.parametrize("machine", ["lssvm", "sparse", "svc"])
def test_held_out_outputs_are_those_of_refits(folder, machine):
    """Read back the model, leave out a row by hand, refit, and compare."""
    assert select("good", "--machine", machine, "--outer", "0") == 0
    schema, fitted, _ = load(Path("out/model.pt"), "cpu")
    frame = read_table(Path("data.csv"))[0].drop(columns=["price", "grade", "day", "w", "half"])
    X = torch.tensor(schema.design(frame))
    y = torch.tensor(schema.codes(frame["good"]))
    held_out = pd.read_csv("out/held_out.csv")
    if machine == "sparse":
        fitted = tl.SparseLSSVM(fitted.kernel, reg=fitted.reg.detach(), basis=fitted.support)
    for i in (0, 7, 40):
        rest = torch.arange(N) != i
        output = fitted.fit(X[rest], y[rest])(X[i : i + 1]).item()
        assert output == pytest.approx(held_out["loo_output"][i], rel=1e-6, abs=1e-8)
        assert held_out["loo_class"][i] == schema.labels[int(output >= 0)]


@pytest.mark.parametrize("machine", ["lssvm", "rls", "kfd", "svc"])
def test_several_classes_are_told_apart_by_a_machine_for_each(folder, capsys, machine):
    """From the table to predictions, and every class's held-out output by a machine refitted by hand."""
    assert select("grade", "--machine", machine, "--outer", "2", "--search", "nelder-mead") == 0
    out, err = capsys.readouterr()
    assert "3 classes of 'grade': 0, 1, 2" in out
    assert "outer (2 splits)" in out
    assert err == ""
    schema, fitted, _ = load(Path("out/model.pt"), "cpu")
    frame = read_table(Path("data.csv"))[0].drop(columns=["price", "good", "day", "w", "half"])
    X = torch.tensor(schema.design(frame))
    Y = torch.tensor(schema.codes(frame["grade"]))
    held_out = pd.read_csv("out/held_out.csv")
    outputs = held_out[[f"loo_output {label}" for label in schema.labels]].to_numpy()
    assert (held_out["loo_class"] == outputs.argmax(1)).all()
    assert (held_out["loo_class"] == held_out["target"]).mean() > 0.7
    assert held_out["leverage"].isna().all() == (machine == "svc")

    assert run("predict", "out/model.pt", "data.csv") == 0
    assert "of 48 wrong" in capsys.readouterr().out
    predicted = pd.read_csv("predictions.csv")
    scores, chances = ([f"{kind} {label}" for label in range(3)] for kind in ("score", "probability"))
    assert predicted.columns.tolist() == ["row", "prediction", *scores, *chances]
    scores = predicted[scores].to_numpy()
    assert scores == pytest.approx(fitted(X).detach().numpy())
    assert (predicted["prediction"] == scores.argmax(1)).all()
    if machine == "kfd":  # whose targets, and columns of K, stay as they are when a row is left out
        return
    for i in (0, 7, 40):
        rest = torch.arange(N) != i
        refitted = fitted.fit(X[rest], Y[rest])(X[i : i + 1])[0]
        assert refitted.tolist() == pytest.approx(outputs[i], rel=1e-6, abs=1e-8)


@pytest.mark.parametrize(
    "criterion", ["multiclass_error", "cross_entropy", "smooth_error", "auc", "leave_pair_out_auc", "press"]
)
def test_every_number_of_several_classes_has_a_name_of_its_own(folder, capsys, criterion):
    assert select("grade", "--criterion", criterion, "--search", "grid", "--outer", "2") == 0
    out = capsys.readouterr().out
    held_out = pd.read_csv("out/held_out.csv")
    wrong = (held_out["loo_class"] != held_out["target"]).mean()
    (shown,) = [
        line for line in out.splitlines() if line.startswith("misclassification rate (largest output)")
    ]
    assert shown.split(" %")[1].strip() == f"{100 * wrong:.1f}"
    (chosen,) = [line for line in out.splitlines() if line.startswith(criterion)]
    if criterion == "multiclass_error":
        assert chosen.startswith(f"multiclass_error {wrong:.4g} after")
    elif criterion == "cross_entropy":
        outputs = held_out[[f"loo_output {label}" for label in range(3)]].to_numpy()
        chances = np.exp(outputs) / np.exp(outputs).sum(1, keepdims=True)
        loss = -np.log(chances[np.arange(N), held_out["target"]]).mean()
        assert chosen.startswith(f"cross_entropy {loss:.4g} after")
    else:
        assert chosen.startswith(f"{criterion} (mean over 3 classes) ")
    assert "error rate" not in out


@pytest.mark.parametrize("clusters", [False, True])
def test_several_classes_are_told_one_by_one(folder, capsys, clusters):
    options = ("--clusters", "day") if clusters else ()
    assert select("grade", *options, "--search", "grid", "--outer", "0") == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    held_out = pd.read_csv("out/held_out.csv")
    way = "lco" if clusters else "loo"
    right = (held_out[f"{way}_class"] == held_out["target"]).astype(float)
    cluster = held_out["cluster"] if clusters else held_out["row"]
    for label in range(3):
        own = held_out["target"] == label
        sums = ((right - right[own].mean()) * own / own.sum()).groupby(cluster[own]).sum()
        error = np.sqrt(len(sums) / (len(sums) - 1) * (sums**2).sum())
        said = [int((held_out[f"{way}_class"][own] == other).sum()) for other in range(3)]
        (line,) = [line for line in lines if line[:2] == [str(label), str(own.sum())]]
        assert line[2:6] == [f"{100 * right[own].mean():.1f}", "±", f"{100 * error:.1f}", "%"]
        assert line[6:] == [str(count or "·") for count in said]
    (last,) = [line for line in lines if line[:2] == ["all", str(N)]]
    assert last[2] == f"{100 * right.mean():.1f}"


@pytest.mark.parametrize("machine", ["kfd", "svc"])
def test_splits_without_a_class_are_refused_before_any_search(folder, capsys, monkeypatch, machine):
    monkeypatch.setattr(tl, "select", lambda *args, **options: pytest.fail("searched"))
    data = table()
    data["grade"] = np.where(np.arange(N) < 2, "rare", data["grade"].astype(str))
    data.to_csv("data.csv", index=False)
    assert select("grade", "--machine", machine, "--outer", "400") == 2
    err = capsys.readouterr().err
    assert "outer splits hold out all 2 rows of 'rare'; use --machine lssvm or --outer 0" in err
    assert len(err.splitlines()) == 1
    assert not Path("out").exists()


@pytest.mark.parametrize("kernel", ["rbf", "ard", "linear", "poly2", "poly3", "matern"])
def test_every_kernel_learns_the_target(folder, kernel):
    assert select("price", "--kernel", kernel, "--outer", "0") == 0
    held_out = pd.read_csv("out/held_out.csv")
    assert held_out["loo_residual"].std() < 0.7 * held_out["target"].std()
    assert run("predict", "out/model.pt", "data.csv") == 0
    predicted = pd.read_csv("predictions.csv")["prediction"]
    assert np.corrcoef(predicted, held_out["target"])[0, 1] > 0.8


def test_the_boolean_kernel_takes_text_and_flags(folder, capsys):
    assert select("price", "--kernel", "boolean", "--drop", "x", "--drop", "z", "--outer", "0") == 0
    assert select("price", "--kernel", "boolean", out="other") == 2
    assert "needs inputs 0 and 1 only; other values in 'x', 'z'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [
        ["--machine", "rls"],
        ["--machine", "kfd"],
        ["--criterion", "auc"],
        ["--criterion", "leave_pair_out_auc"],
        ["--criterion", "balanced_error_rate", "--search", "grid"],
        ["--criterion", "hinge", "--search", "nelder-mead"],
        ["--weights", "w", "--prior", "1"],
        ["--machine", "svc", "--clusters", "day", "--search", "grid", "--kernel", "linear", "--outer", "0"],
        ["--machine", "svc", "--clusters", "day", "--criterion", "squared_hinge", "--outer", "0"],
        ["--machine", "sparse", "--basis", "9", "--weights", "w", "--clusters", "day"],
    ],
)
def test_machines_criteria_searches_clusters_and_weights_go_together(folder, capsys, options):
    assert select("good", *options) == 0
    assert capsys.readouterr().err == ""
    held_out = pd.read_csv("out/held_out.csv")
    assert (held_out["loo_class"] == held_out["target"]).mean() > 0.7


def test_the_same_seed_gives_the_same_files(folder, monkeypatch):
    monkeypatch.setattr(report, "page", page)
    for out in ("one", "two"):
        assert select("price", "--machine", "sparse", "--seed", "3", out=out) == 0
    for name in ("held_out.csv", "report.html"):
        assert Path("one", name).read_bytes() == Path("two", name).read_bytes()


def test_the_folder_is_named_after_the_data(folder):
    assert run("select", "data.csv", "--target", "price", "--outer", "0", "--no-progress") == 0
    assert Path("data-torchloo/report.html").is_file()
    assert run("select", "data.csv", "--target", "price", "--outer", "0", "--no-progress") == 2


def test_an_archive_is_a_table_too(folder):
    data = table()
    np.savez("data.npz", X=data[["x", "z"]].to_numpy(), y=data["price"].to_numpy())
    assert run("select", "data.npz", "--target", "y", "--out", "out", *QUICK) == 0
    assert run("predict", "out/model.pt", "data.npz") == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--target", "cost"], "no column 'cost'"),
        (["--target", "price", "--clusters", "always"], "'always' has one value only"),
        (["--target", "price", "--weights", "shop"], "'shop' must hold numbers"),
        (["--target", "price", "--weights", "z"], "'z' must be positive"),
        (["--target", "price", "--criterion", "acuracy"], "invalid choice: 'acuracy'"),
        (["--target", "price", "--criterion", "auc"], "--criterion auc needs classes"),
        (["--target", "good", "--criterion", "auc", "--search", "gradient"], "auc has no gradient"),
        (["--target", "good", "--machine", "svc", "--criterion", "log_density"], "needs a least-squares"),
        (["--target", "good", "--criterion", "leave_pair_out_auc", "--clusters", "day"], "not clusters"),
        (
            ["--target", "grade", "--criterion", "error_rate"],
            "error_rate is for two classes; for 3 use multiclass_error",
        ),
        (
            ["--target", "grade", "--criterion", "balanced_error_rate"],
            "balanced_error_rate is for two classes; for 3 use balanced_multiclass_error",
        ),
        (
            ["--target", "good", "--criterion", "multiclass_error"],
            "multiclass_error is for more than two classes; for two use error_rate",
        ),
        (["--target", "price", "--criterion", "multiclass_error"], "multiclass_error needs classes"),
        (
            ["--target", "price", "--machine", "kfd"],
            "kfd is a classifier, but 'price' is numeric; use lssvm",
        ),
        (
            ["--target", "price", "--machine", "svc"],
            "svc is a classifier, but 'price' is numeric; use lssvm",
        ),
        (["--target", "price", "--basis", "5"], "--basis needs --machine sparse"),
        (["--target", "price", "--machine", "sparse", "--basis", "30"], "must be at most 24, so that"),
        (["--target", "price", "--outer", "-1"], "must be a non-negative integer"),
        (["--target", "price", "--clusters", "half"], "at least 3 clusters, got 2"),
        (["--target", "price", "--prior", "0"], "must be a positive number, got '0'"),
        (["--target", "price", "--device", "cuda:9"], "--device cuda:9"),
        (["--target", "price", "--device", "teapot"], "--device teapot"),
        (["--target", "price", "--out", "full"], "the folder 'full' is not empty"),
        (["--target", "price", "--out", "data.csv"], "must be a folder, got the file"),
        (["--target", "price", "--out", "nowhere/out"], "nowhere' does not exist"),
    ],
)
def test_wrong_use_ends_in_one_line_and_writes_nothing(folder, capsys, options, message):
    (folder / "full").mkdir()
    (folder / "full" / "file").touch()
    before = sorted(folder.rglob("*"))
    out = [] if "--out" in options else ["--out", "out"]
    assert run("select", "data.csv", *out, *options) == 2
    require_one_line_error(capsys, message)
    assert sorted(folder.rglob("*")) == before


def test_a_target_of_another_length_than_the_rows_of_an_archive_is_named(folder, capsys):
    np.savez("data.npz", X=np.eye(30, 2), y=np.arange(29.0))
    assert run("select", "data.npz", "--target", "y", "--out", "out", *QUICK) == 2
    assert "no column 'y'" in (error := capsys.readouterr().err)
    assert "arrays without 30 rows are ignored: 'y'" in error


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ("x,price\n1,2\n3,4\n", "the table has 2 rows"),
        ("x,price\n" + "1,2\n,4\n" * 10, "missing values: 10 in column 'x', the first in row 2"),
        ("x,price\n" + "".join(f"{i},name {i % 500}\n" for i in range(1000)), "500 distinct values"),
    ],
)
def test_unusable_files_end_in_one_line_and_write_nothing(folder, capsys, content, message):
    Path("data.csv").write_text(content)
    assert run("select", "data.csv", "--target", "price", "--out", "out") == 2
    require_one_line_error(capsys, message)
    assert [path.name for path in folder.iterdir()] == ["data.csv"]


def test_an_error_of_the_library_ends_in_one_line(folder, capsys, monkeypatch):
    def fail(*args, **options):
        raise ValueError("select: no candidate could be evaluated\nsecond line")

    monkeypatch.setattr(findings_module.tl, "select", fail)
    assert select("price") == 2
    assert capsys.readouterr().err == "torchloo select: error: select: no candidate could be evaluated\n"
    assert [path.name for path in folder.iterdir()] == ["data.csv"]


def test_a_failed_write_leaves_nothing_behind(folder, capsys, monkeypatch):
    def fail(self, *args, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", fail)
    assert select("price", "--outer", "0") == 2
    assert "No space left on device" in capsys.readouterr().err
    assert [path.name for path in folder.iterdir()] == ["data.csv"]


def test_warnings_of_the_library_are_lines_of_the_command(folder, capsys, monkeypatch):
    original = tl.select

    def warn(*args, **options):
        import warnings

        warnings.warn("select: beware\nof this", UserWarning, stacklevel=2)
        return original(*args, **options)

    monkeypatch.setattr(findings_module.tl, "select", warn)
    assert select("price", "--outer", "0") == 0
    assert capsys.readouterr().err == "torchloo select: warning: select: beware\n"


@pytest.mark.parametrize("name", ["select", "validate"])
def test_an_interrupt_that_a_search_obeys_still_ends_the_command(folder, capsys, monkeypatch, name):
    """Both functions return what they have when interrupted, which must not pass for the result."""
    original = getattr(tl, name)

    def interrupted(*args, **options):
        result = original(*args, **options)
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        return result

    monkeypatch.setattr(findings_module.tl, name, interrupted)
    handler = signal.getsignal(signal.SIGINT)
    assert select("price") == 130
    assert capsys.readouterr().err == "torchloo select: interrupted\n"
    assert [path.name for path in folder.iterdir()] == ["data.csv"]
    assert signal.getsignal(signal.SIGINT) is handler


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_an_interrupt_ends_without_a_traceback_and_writes_nothing(folder):
    """SIGINT in the middle of a long outer estimate, as Ctrl-C sends it."""
    table(n=100).to_csv("data.csv", index=False)
    words = ["select", "data.csv", "--target", "price", "--out", "out", "--outer", "5000"]
    command = [sys.executable, "-m", "torchloo", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert "rows" in process.stdout.readline()  # it has read the table and gets to work
        assert any("outer estimate: 5000 selections" in line for line in process.stdout)  # begins with these
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.splitlines()[-1].endswith("torchloo select: interrupted")
    assert "Traceback" not in err
    assert [path.name for path in folder.iterdir()] == ["data.csv"]


@pytest.mark.parametrize("target", TARGETS)
def test_predictions_are_close_to_the_truth_of_new_rows(folder, models, capsys, target):
    new = table(seed=1).drop(columns=["always", "day", "w", "half"])
    new.drop(columns=[name for name in TARGETS if name != target]).to_csv("new.csv", index=False)
    assert run("predict", models[target], "new.csv", "--out", "p.csv") == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert f"compared with column '{target}'" in out
    predicted = pd.read_csv("p.csv", dtype={"prediction": str})
    assert predicted["row"].tolist() == list(range(1, N + 1))
    truth = new[target].astype(str)
    if target == "price":
        assert np.corrcoef(predicted["prediction"].astype(float), new["price"])[0, 1] > 0.9
    else:
        assert (predicted["prediction"] == truth).mean() > 0.7
    scores = [name for name in predicted.columns if name.startswith("score")]
    assert scores == {"price": [], "good": ["score"], "grade": ["score 0", "score 1", "score 2"]}[target]


def test_decimal_commas_select_and_predict_as_decimal_points_do(folder, capsys):
    """In a file that also has points; the note says which columns have commas."""
    data = table().drop(columns=["always", "good", "grade", "day", "w", "half"]).round(6)
    words = ["--target", "price", "--outer", "0", "--no-progress"]
    commas = data.copy()
    for name in ("x", "price"):
        commas[name] = [f"{value:.6f}".replace(".", ",") for value in data[name]]
    data.to_csv("points.csv", index=False)
    commas.to_csv("commas.csv", index=False, sep=";")
    commas.to_csv("quoted.csv", index=False)
    tables = {}
    for name in ("points", "commas", "quoted"):
        assert run("select", f"{name}.csv", *words, "--out", name) == 0
        assert ("  note: read with a decimal comma: 'x', 'price'\n" in capsys.readouterr().out) == (
            name != "points"
        )
        tables[name] = pd.read_csv(f"{name}/held_out.csv")
    for name in ("commas", "quoted"):
        pd.testing.assert_frame_equal(tables[name], tables["points"], rtol=1e-6, atol=1e-8)
    for model in tables:
        for new in tables:
            assert run("predict", f"{model}/model.pt", f"{new}.csv", "--out", f"{model}-{new}.csv") == 0
            assert ("decimal comma: 'x', 'price'" in capsys.readouterr().out) == (new != "points")
            predicted = pd.read_csv(f"{model}-{new}.csv")["prediction"]
            assert predicted.to_numpy() == pytest.approx(
                pd.read_csv("points-points.csv")["prediction"].to_numpy(), rel=1e-6, abs=1e-8
            )


def test_a_new_file_is_read_as_the_table_of_the_model_was(folder):
    """1,234 alone could be either; the model's table had 1,5 there."""
    draw = np.random.default_rng(0).uniform(0.5, 9, 20).round(3)
    rows = "".join(f'"{value:.3f}",{2 * value:.4f}\n'.replace(".", ",", 1) for value in draw)
    Path("data.csv").write_text("x,y\n" + rows)
    words = ["--target", "y", "--kernel", "linear", "--outer", "0", "--no-progress", "--out", "out"]
    assert run("select", "data.csv", *words) == 0
    Path("new.csv").write_text('x,y\n"4,321",\n')
    assert run("predict", "out/model.pt", "new.csv") == 0
    (predicted,) = pd.read_csv("predictions.csv")["prediction"]
    assert predicted == pytest.approx(8.642, rel=0.01)


LABELS = ["=1+1", "+a", "-b", "@sum", "\tc", "-1.5", "+3e5", "'d", "e-f", "-.5", "-inf", "1,5"]
INERT = ["'=1+1", "'+a", "'-b", "'@sum", "'\tc", "-1.5", "+3e5", "'d", "e-f", "-.5", "'-inf", "1,5"]


def test_formulas_of_a_spreadsheet_are_written_as_text(folder):
    """As labels and as clusters, in the held-out rows and in predictions; numbers stay as they are."""
    rows = np.arange(8 * len(LABELS)) % len(LABELS)
    labels = np.array(LABELS)[rows]
    inert = np.array(INERT)[rows]
    data = pd.DataFrame({"x": np.cos(rows), "z": np.sin(rows), "label": labels, "place": labels})
    data.to_csv("data.csv", index=False)
    words = ["data.csv", "--target", "label", "--clusters", "place", "--outer", "0", "--kernel", "linear"]
    assert run("select", *words, "--search", "grid", "--out", "out", "--no-progress") == 0
    assert run("predict", "out/model.pt", "data.csv") == 0
    held_out = pd.read_csv("out/held_out.csv", dtype=str, keep_default_na=False)
    predicted = pd.read_csv("predictions.csv", dtype=str, keep_default_na=False)
    assert held_out["target"].tolist() == inert.tolist()
    assert held_out["cluster"].tolist() == inert.tolist()
    for column in (held_out["loo_class"], held_out["lco_class"], predicted["prediction"]):
        assert set(column) <= set(INERT)
        assert len(set(column)) > 3


def test_names_of_columns_are_no_formulas_either():
    frame = pd.DataFrame({"=A1": [-1.5], "-2": ["@b"], "+c": ["-2e5"]})
    assert comma_separated(frame) == "'=A1,-2,'+c\n-1.5,'@b,-2e5\n"


def test_a_carriage_return_does_not_begin_a_new_row():
    frame = pd.DataFrame({"x": [1, 2], "label": ["\ra", "b\r=A1"]})
    again = pd.read_csv(io.StringIO(comma_separated(frame), newline=""))
    assert again["label"].tolist() == ["'\ra", "b\r=A1"]
    assert again["x"].tolist() == [1, 2]
    assert comma_separated(pd.DataFrame({"score a\rb": [1.5]})) == '"score a\rb"\n1.5\n'
    assert frame["label"].tolist() == ["\ra", "b\r=A1"]


def test_a_single_row_can_be_predicted(folder, models, capsys):
    table()[["x", "z", "shop"]].head(1).to_csv("new.csv", index=False)
    assert run("predict", models["good"], "new.csv") == 0
    assert capsys.readouterr().out == "1 row predicted: predictions.csv\n"
    assert len(pd.read_csv("predictions.csv")) == 1


def test_predictions_of_the_training_rows_are_the_fit(folder, models):
    schema, machine, _ = load(models["price"], "cpu")
    table().drop(columns=["always", "good", "grade", "day", "w", "half", "price"]).to_csv(
        "new.csv", index=False
    )
    assert run("predict", models["price"], "new.csv") == 0
    predicted = torch.tensor(pd.read_csv("predictions.csv")["prediction"].to_numpy())
    X = torch.tensor(schema.design(table()[["x", "z", "shop"]]))
    y = torch.tensor(table()["price"].to_numpy())
    expected = machine.solve(X, y).outputs.detach()
    torch.testing.assert_close(predicted, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("model", "data", "message"),
    [
        ("none.pt", "data.csv", "'none.pt' does not exist"),
        ("data.csv", "data.csv", "is not a model written by torchloo select"),
        ("other.pt", "data.csv", "is not a model written by torchloo select"),
        ("later.pt", "data.csv", "was written by torchloo 9.9.9"),
        ("broken.pt", "data.csv", "is not a model written by torchloo select"),
        ("good.pt", "none.csv", "'none.csv' does not exist"),
        ("good.pt", "wrong.csv", "do not match those of the model: missing 'z'; unexpected 'y'"),
    ],
)
def test_predict_refuses_what_does_not_fit(folder, models, capsys, model, data, message):
    shutil.copy(models["price"], "good.pt")
    table()[["x", "shop"]].assign(y=1).to_csv("wrong.csv", index=False)
    torch.save({"weights": torch.ones(2)}, "other.pt")
    content = torch.load("good.pt", weights_only=True)
    torch.save({**content, "version": 99, "torchloo": "9.9.9"}, "later.pt")
    torch.save({**content, "state": {}}, "broken.pt")
    assert run("predict", model, data, "--out", "p.csv") == 2
    require_one_line_error(capsys, message)
    assert not Path("p.csv").exists()


def test_predict_with_its_arguments_swapped_ends_in_one_line(folder, models, capsys):
    shutil.copy(models["price"], "model.pt")
    pd.DataFrame({"a": [1.0, 2.0]}).to_csv("a.csv", index=False)
    assert run("predict", "a.csv", "model.pt", "--out", "p.csv") == 2
    require_one_line_error(capsys)


@pytest.mark.parametrize("name", ["new.csv", "../{folder}/new.csv", "link.csv", "twin.csv", "model.csv"])
def test_predict_does_not_write_over_what_it_reads(folder, models, capsys, name):
    """By the same path, by another, by links, or over the model."""
    table().to_csv("new.csv", index=False)
    shutil.copy(models["good"], "model.csv")
    Path("link.csv").symlink_to("new.csv")
    Path("twin.csv").hardlink_to("new.csv")
    before = {path: path.read_bytes() for path in folder.iterdir()}
    out = name.format(folder=folder.name)
    assert run("predict", "model.csv", folder / "new.csv", "--out", out) == 2
    require_one_line_error(capsys, f"--out '{out}' would overwrite the input")
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_predictions_touch_no_other_file_and_have_the_permissions_of_a_plain_one(folder, models):
    table().to_csv("new.csv", index=False)
    for name in ("p.csv.part", "plain.csv", "old.csv"):
        Path(name).write_text("mine")
    Path("old.csv").chmod(0o640)
    Path("link.csv").symlink_to("old.csv")
    for out in ("p.csv", "link.csv"):
        assert run("predict", models["good"], "new.csv", "--out", out) == 0
    assert Path("p.csv.part").read_text() == "mine"
    assert Path("p.csv").stat().st_mode == Path("plain.csv").stat().st_mode
    assert Path("link.csv").is_symlink()
    assert Path("old.csv").read_bytes() == Path("p.csv").read_bytes()
    assert Path("old.csv").stat().st_mode & 0o777 == 0o640
    names = ["data.csv", "link.csv", "new.csv", "old.csv", "p.csv", "p.csv.part", "plain.csv"]
    assert sorted(path.name for path in folder.iterdir()) == names


def test_an_empty_folder_keeps_its_permissions_and_a_link_to_it_stays(folder):
    Path("real").mkdir(mode=0o700)
    Path("out").symlink_to("real")
    assert select("price", "--outer", "0") == 0
    assert Path("out").is_symlink()
    assert Path("real").stat().st_mode & 0o777 == 0o700
    assert sorted(path.name for path in Path("real").iterdir()) == ["held_out.csv", "model.pt", "report.html"]
    assert sorted(path.name for path in folder.iterdir()) == ["data.csv", "out", "real"]


def test_predict_writes_nothing_where_a_target_is_unknown(folder, models, capsys):
    table().assign(good="perhaps").to_csv("new.csv", index=False)
    assert run("predict", models["good"], "new.csv", "--out", "p.csv") == 2
    assert "perhaps" in capsys.readouterr().err
    assert not Path("p.csv").exists()


def test_numbers_of_shuffled_rows_are_no_input(folder, models, capsys):
    """The index that pandas writes tells where a row stood: a leak where the file was sorted."""
    table().sample(frac=1, random_state=0).to_csv("data.csv")
    assert select("price", "--outer", "0") == 0
    assert "Unnamed" not in capsys.readouterr().out
    table().set_index(np.arange(1000, 1000 + N)).to_csv("new.csv")
    assert run("predict", "out/model.pt", "new.csv", "--out", "p.csv") == 0


def test_the_current_folder_is_no_place_for_the_results(folder, capsys):
    assert run("select", "data.csv", "--target", "price", "--out", ".") == 2
    require_one_line_error(capsys)


def test_bench_prints_its_ratios(capsys):
    assert run("bench", "--rows", "40", "--repeats", "1", "--no-progress") == 0
    out, err = capsys.readouterr()
    assert err == ""
    ratios = {line.split("   ")[0]: float(line.split()[-1]) for line in out.splitlines()[3:]}
    assert len(ratios) == 6
    assert all(ratio > 0 for ratio in ratios.values())


def test_a_table_too_large_for_a_dense_machine_takes_the_sparse_one_and_says_why(folder, monkeypatch, capsys):
    def too_large(machine, kernel, n):
        return (
            ""
            if machine == "sparse"
            else f"{n} rows need about 48 GB with --machine {machine}, and 9 GB are free"
        )

    monkeypatch.setattr("torchloo.cli.select._too_large", too_large)
    given = ("select", "data.csv", "--target", "price", "--drop", "good", "--out", "out", *QUICK)
    assert run(*given) == 0
    assert (
        "note: the machine is sparse: 48 rows need about 48 GB with --machine lssvm"
        in capsys.readouterr().out
    )
    assert isinstance(load(Path("out/model.pt"), "cpu")[1], tl.SparseLSSVM)
    assert run(*given[:6], "--machine", "lssvm", "--out", "other", *QUICK) == 2
    assert "48 rows need about 48 GB with --machine lssvm" in capsys.readouterr().err


def test_a_messy_table_goes_through_without_a_report(folder, capsys, monkeypatch):
    messy = table().assign(day=pd.date_range("2024-01-01", periods=N).astype(str))
    messy.loc[[2, 9], "x"] = np.nan
    messy.loc[4, "shop"] = None
    messy.to_csv("messy.csv", index=False)
    monkeypatch.setattr(pictures, "require", lambda: pytest.fail("no picture is asked for"))
    words = ("--target", "price", "--drop", "good", "--drop", "grade", "--outer", "0", "--out", "out")
    assert run("select", "messy.csv", *words, "--no-report") == 2
    assert "missing values: 2 in column 'x', the first in row 3" in capsys.readouterr().err
    assert run("select", "messy.csv", *words, "--missing", "mean", "--no-report") == 0
    out = capsys.readouterr().out
    assert "missing values imputed by the mean (text: the most frequent value) in 'x', 'shop'" in out
    assert "dates, converted to days since 1970: 'day'" in out
    assert sorted(path.name for path in Path("out").iterdir()) == ["held_out.csv", "model.pt"]
    messy.assign(more="?").drop(columns=["good", "grade"]).to_csv("new.csv", index=False)
    assert run("predict", "out/model.pt", "new.csv") == 2
    assert "unexpected 'more' (or --ignore-extra)" in capsys.readouterr().err
    assert run("predict", "out/model.pt", "new.csv", "--ignore-extra") == 0
    assert run("select", "messy.csv", *words[:-1], "other", "--missing", "drop", "--no-report") == 0
    assert run("predict", "other/model.pt", "new.csv", "--ignore-extra") == 2
    assert "fill them in, or select the model with --missing mean" in capsys.readouterr().err
    assert pd.read_csv("predictions.csv")["prediction"].notna().all()
