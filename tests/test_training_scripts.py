"""The scripts that train networks: a quick run of each, and what their numbers mean."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.fixture
def module(monkeypatch):
    """Loads a script by its name."""
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module


@pytest.mark.parametrize(
    ("script", "rows"),
    [
        ("train_features", ["cross-entropy", "early stopping", "leave-one-out"]),
        ("train_episodes", ["R2D2", "query", "leave-one-out", "LOO of 11"]),
    ],
)
def test_a_quick_run_prints_a_table_and_draws_a_picture(tmp_path, script, rows):
    picture = tmp_path / "picture.png"
    command = [sys.executable, SCRIPTS / f"{script}.py", "--quick", "--seed", "3", "--out", picture]
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    for name in rows:
        (line,) = (line for line in run.stdout.splitlines() if f"| {name} |" in line)
        numbers = re.findall(r"\d+\.\d+", line)
        assert len(numbers) >= 4
        assert "nan" not in line
        assert "inf" not in line
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_scores_of_known_probabilities(module):
    script = module("train_features")
    right = torch.tensor([True, True, True, False])  # three of four right, at a confidence of 0.75
    logits = torch.zeros(4, 10)
    logits[:, 0] = torch.tensor(0.75 / (0.25 / 9)).log()
    test = script.Rows(torch.zeros(4, 1, 8, 8), torch.where(right, 0, 1))
    accuracy, log_loss, gap = script.scores(lambda X: logits, test)
    expected = -(3 * torch.tensor(0.75).log() + torch.tensor(0.25 / 9).log()) / 4
    assert accuracy == pytest.approx(0.75)
    assert log_loss == pytest.approx(expected.item())
    assert gap == pytest.approx(0.0, abs=1e-6)
    assert script.scores(lambda X: 100 * logits, test)[2] == pytest.approx(0.25, abs=1e-6)


def test_tasks_are_sinusoids_with_noise(module):
    script = module("train_episodes")
    tasks = script.draw_tasks(50, 200, torch.Generator().manual_seed(0), "cpu")
    x = tasks.x[..., 0]
    y = tasks.y
    clean = tasks.clean
    design = torch.stack([x.sin(), x.cos()], -1)
    fitted = design @ torch.linalg.lstsq(design, clean.unsqueeze(-1)).solution
    torch.testing.assert_close(fitted[..., 0], clean, rtol=1e-3, atol=1e-3)
    assert (y - clean).std().item() == pytest.approx(script.NOISE, rel=0.05)


def test_the_plain_head_is_regularised_least_squares(module):
    script = module("train_episodes")
    torch.manual_seed(0)
    head = script.R2D2()
    tasks = script.draw_tasks(3, 20, torch.Generator().manual_seed(0), "cpu")
    support = tasks.x[:, :10]
    query = tasks.x[:, 10:]
    machine = script.tl.RLS(script.tl.kernels.Linear(features=head.features), reg=1.0)
    expected = machine.solve(support, tasks.y[:, :10])(query)
    received = head(support, tasks.y[:, :10], query)
    torch.testing.assert_close(received, expected, rtol=1e-3, atol=1e-3)
