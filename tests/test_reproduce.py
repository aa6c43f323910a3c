"""scripts/reproduce: work that is resumed, tables beside the paper's, and a quick run of every script."""

import argparse
import csv
import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmark_folder import DATA, needs_data

import torchloo as tl
from torchloo.svm.smo.rounds import smo

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "scripts" / "reproduce"


@pytest.fixture
def experiment(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    yield importlib.import_module("experiment")
    sys.modules.pop("experiment", None)


@pytest.fixture
def args(tmp_path):
    return argparse.Namespace(out=tmp_path, quick=True, jobs=1, script="squares")


def test_the_quick_form_takes_two_splits_unless_told(experiment, tmp_path, monkeypatch, capsys):
    at_exit = []
    monkeypatch.setattr(experiment.atexit, "register", lambda *call: at_exit.append(call))
    given = ["kfd.py", "--data", str(tmp_path), "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", given)
    assert experiment.options("Title.", splits=10).splits == 10
    monkeypatch.setattr(sys, "argv", [*given, "--quick"])
    args = experiment.options("Title.", splits=10)
    assert (args.splits, args.script, args.out.is_dir()) == (2, "kfd", True)
    assert "kfd: quick form, 2 splits, torchloo" in capsys.readouterr().out
    (report, *about), *_ = at_exit
    report(*about)
    assert "CPU minutes, --jobs 1" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", [*given, "--quick", "--splits", "7"])
    assert experiment.options("Title.", splits=10).splits == 7
    monkeypatch.setattr(sys, "argv", ["kfd.py", "--data", str(tmp_path / "nowhere")])
    with pytest.raises(SystemExit):
        experiment.options("Title.")
    assert "--data must be the folder of the benchmark data" in capsys.readouterr().err


def square(x, log=None):
    if log is not None:
        log.append(x)
    if x < 0:
        raise ValueError("negative")
    return {"value": x * x}


def test_results_are_kept_and_only_missing_pieces_are_done(experiment, args):
    done = []
    pieces = [experiment.Piece(f"{x}", square, (x, done)) for x in range(3)]
    assert experiment.run(pieces[:2], args) == {"0": {"value": 0}, "1": {"value": 1}}
    kept = args.out / "squares.quick.jsonl"
    with kept.open("a") as file:
        file.write('{"piece": "2", "resu')  # an interrupted run
    assert experiment.run(pieces, args)["2"] == {"value": 4}
    assert done == [0, 1, 2]
    assert [json.loads(line)["piece"] for line in kept.read_text().splitlines()] == ["0", "1", "2"]
    args.quick = False  # another form shares nothing
    experiment.run(pieces[:1], args)
    assert done == [0, 1, 2, 0]


def test_a_failure_is_raised_after_the_other_pieces_are_done(experiment, args):
    pieces = [experiment.Piece(f"{x}", square, (x,)) for x in (-1, 2)]
    with pytest.raises(RuntimeError, match="1 of 2 pieces failed, first '-1'"):
        experiment.run(pieces, args)
    assert json.loads((args.out / "squares.quick.jsonl").read_text())["result"] == {"value": 4}


def test_processes_give_the_results_of_one(experiment, args):
    args.jobs = 2
    pieces = [experiment.Piece(f"{x}", pow, (x, 2)) for x in range(4)]
    assert experiment.run(pieces, args) == {"0": 0, "1": 1, "2": 4, "3": 9}


def test_a_difference_is_in_standard_errors_of_both_sides(experiment):
    row = experiment.beside("banana", ours=11.0, paper=10.0, error=0.3, paper_error=0.4)
    assert row["difference / s.e."] == pytest.approx(2.0)
    assert experiment.beside("banana", ours=11.0, paper=10.0)["difference / s.e."] is None


def test_sides_are_timed_in_turns_after_one_to_warm_up(experiment):
    called = []
    times = experiment.in_turns({name: lambda name=name: called.append(name) for name in "ab"}, trials=2)
    assert "".join(called) == "ababab"
    assert [len(times[name]) for name in "ab"] == [2, 2]


def test_a_slope_is_the_power_of_growth(experiment):
    x = [10.0, 20.0, 50.0, 100.0]
    assert experiment.slope(x, [3 * v**2.5 for v in x]) == pytest.approx(2.5)


def test_a_table_is_printed_written_and_put_into_a_page(experiment, args, capsys):
    rows = [
        experiment.beside("a|b", ours=1.23456, paper=1.0, error=0.1, splits=5),
        experiment.beside("c", ours=2.0),
    ]
    experiment.write_table("errors", rows, args)
    assert "1.235" in capsys.readouterr().out
    with (args.out / "errors.csv").open() as file:
        first, second = csv.DictReader(file)
    assert first == {
        "": "a|b",
        "paper": "1",
        "ours": "1.235",
        "s.e.": "0.1",
        "difference / s.e.": "2.346",
    } | {"splits": "5"}
    assert second["paper"] == ""
    page = "before\n<!-- table errors -->\nold\n<!-- end -->\nafter\n"
    filled = experiment.with_tables(page, args.out)
    assert "| c |  | 2 |  |  |  |\n<!-- end -->\nafter" in filled
    assert "| a\\|b | 1 | 1.235 | 0.1 | 2.346 | 5 |" in filled
    assert experiment.with_tables(filled, args.out) == filled


def test_the_page_holds_the_tables_that_were_written(experiment):
    page = ROOT / "docs" / "reproduction.md"
    text = page.read_text(encoding="utf-8")
    assert experiment.with_tables(text, page.with_suffix("")) == text


@pytest.fixture
def script(experiment):
    """A script of the folder by its name."""
    names = []

    def load(name):
        names.append(name)
        return importlib.import_module(name)

    yield load
    for name in names:
        sys.modules.pop(name, None)


def test_normal_equations_and_the_library_agree_on_motorcycle(script):
    sparse = script("sparse_lssvm")
    _, machine, X, y = sparse.motorcycle_machines(tl.basis.greedy(8, progress=False))
    printed = sparse.Printed(sparse.gaussian(13.1), sparse.MOTORCYCLE[1], machine.basis.detach(), X, y)
    explicit = sparse.explicit(machine, X, y)
    for received in (sparse.fast(machine, X, y), printed.explicit(), printed.fast()):
        assert sparse.relative(explicit, received) < 1e-7


def test_parses_of_other_sentences_share_kinds_of_links_but_no_link(script):
    learn, test = script("rls").parses(seed=0, learned=4, kinds=7, own=0.5, noise=0.0)
    own = learn.X[:, 7:]
    shared = (own @ own.mT) > 0
    assert torch.equal(shared, learn.clusters.unsqueeze(-1) == learn.clusters)
    assert not test.X[:, 7:].any()
    torch.testing.assert_close(learn.y, (learn.y * 20).round() / 20)  # shares of 20 links
    assert not set(learn.clusters.tolist()) & set(test.clusters.tolist())


def test_halves_of_a_set_share_no_cluster(script):
    rls = script("rls")
    rows = rls.Rows(torch.randn(400, 2), torch.randn(400), torch.arange(400) % 10)
    learn, test = rls.halves(rows, seed=0, learned=3)
    assert [len(part.clusters.unique()) for part in (learn, test)] == [3, 3]
    assert len(torch.cat([learn.clusters, test.clusters]).unique()) == 6
    assert learn.clusters.bincount().max() == rls.MOST


def test_tau_of_outputs_in_the_order_of_their_targets_is_one(script):
    rls = script("rls")
    rows = rls.Rows(torch.zeros(6, 1), torch.tensor([1.0, 2, 3, 9, 8, 7]), torch.tensor([0, 0, 0, 1, 1, 1]))
    outputs = torch.stack([rows.y.exp(), torch.tensor([1.0, 2, 3, 1, 2, 3])])  # all in order; one cluster is
    assert rls.tau(outputs, rows) == pytest.approx([1.0, 0.0])
    rows = rows._replace(y=rows.y.double())
    tied = torch.tensor([[1.0, 1.0 + 1e-14, 2.0, 1.0, 1.0 - 1e-14, 0.0]], dtype=torch.float64)
    assert rls.tau(tied, rows) == rls.tau(tied.round(), rows)


def test_own_neighbours_of_clusters_far_apart_are_all(script):
    clusters = torch.arange(5).repeat_interleave(8)
    X = torch.randn(40, 2, generator=torch.Generator().manual_seed(0)) + 100 * clusters.unsqueeze(-1)
    assert script("rls").neighbours(X @ X.mT, clusters) == 1.0


PAIRS = tl.svm.SMOOptions(working=2)


@pytest.fixture
def solver(script, tmp_path):
    """pairs.py, its library compiled, and an SVM: X, y, machine."""
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    pairs = script("pairs")
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(80, 2, generator=generator, dtype=torch.float64)
    noise = torch.randn(80, generator=generator, dtype=torch.float64)
    y = (X[:, 0] * X[:, 1] + 0.5 * noise).sign()
    return pairs, pairs.compiled(tmp_path), X, y, tl.SVC(tl.kernels.RBF(1.0), 3.0)


def test_compiled_pairs_take_the_steps_of_the_library(solver):
    pairs, library, X, y, svc = solver
    K = svc.kernel(X).detach()
    C = 3.0
    alpha = torch.rand(len(y), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for label in (-1.0, 1.0):  # feasible, and no two variables equally bad: ties are broken by rounding
        alpha[y == label] *= 10 / alpha[y == label].sum()
    expected = smo(K[None], y[None], torch.full_like(y, C)[None], alpha[None], 2e-3, options=PAIRS)
    F = (K @ (alpha * y) - y).numpy()
    solved = pairs._solve(library, K.numpy(), y.numpy(), C, -1, alpha.numpy(), F, 1e-3, pairs.NO_PROOF)
    assert solved.columns == expected.columns.item()
    torch.testing.assert_close(alpha, expected.alpha[0])  # which the solver has changed


def test_compiled_pairs_find_the_errors_of_the_exact_path_with_and_without_a_proof(solver):
    pairs, library, X, y, svc = solver
    full = pairs.trained(library, svc.kernel(X).detach().numpy(), y.numpy(), 3.0, 1e-4)
    expected = svc.loo(X, y, values=False).errors
    stopped = set()
    for proof in (pairs.NO_PROOF, pairs.OWN, pairs.SHARED):
        errors = torch.from_numpy(full.errors.copy())
        for row in full.open.tolist():
            solved = pairs.without(library, full, row, 1e-4, proof)
            errors[row] = solved.sign != y[row]
            stopped.add((proof, solved.stopped))
        assert torch.equal(errors, expected)
    assert {
        (pairs.NO_PROOF, pairs.EPSILON_KKT),
        (pairs.OWN, pairs.PROVED),
        (pairs.SHARED, pairs.PROVED),
    } <= stopped
    assert (pairs.NO_PROOF, pairs.PROVED) not in stopped


def test_coefficients_a_rounding_off_their_bounds_cost_no_columns(solver):
    pairs, library, X, y, svc = solver
    K = svc.kernel(X).detach().numpy()
    C = 3.0
    alpha = pairs.trained(library, K, y.numpy(), C, 1e-6).alpha
    assert (alpha == C).any()
    off = alpha - 4e-16 * (alpha == C)
    exact, rounded = (pairs.trained(library, K, y.numpy(), C, 1e-4, start) for start in (alpha, off))
    assert exact.open.tolist() == rounded.open.tolist()
    for row in exact.open.tolist():
        costs = [pairs.without(library, full, row, 1e-4).columns for full in (exact, rounded)]
        assert costs[0] == costs[1]


@pytest.mark.slow
@needs_data
def test_every_script_runs_in_its_quick_form(experiment, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    papers = importlib.import_module("all").scripts()
    assert papers
    command = [sys.executable, FOLDER / "all.py", "--quick", "--jobs", "2", "--data", DATA, "--out", tmp_path]
    subprocess.run(command, check=True, timeout=600)  # under ten minutes on two cores
    for script in papers:
        assert list(tmp_path.glob(f"{script.stem}*.csv")), script.stem
        assert list(tmp_path.glob(f"{script.stem}*.png")), script.stem
