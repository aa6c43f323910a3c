"""What the README says runs, prints what it says it prints, and points at files that exist."""

import contextlib
import io
import re
import shlex
from pathlib import Path

import pytest

import torchloo as tl
from torchloo import cli

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
def test_code_runs_and_prints_what_its_comments_say(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where it may leave files
    blocks = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    assert blocks
    namespace: dict[str, object] = {}
    for block in blocks:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(block, "README.md", "exec"), namespace)
        expected = re.findall(r"^print\(.*\)  # (.*)$", block, re.MULTILINE)
        assert printed.getvalue().splitlines() == expected


@pytest.mark.parametrize("line", re.findall(r"^    torchloo (.*)$", README, re.MULTILINE))
def test_commands_have_the_arguments_that_they_are_shown_with(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cli._parser().parse_args(shlex.split(line, comments=True))


@pytest.mark.parametrize("target", re.findall(r"\]\((?!http)([^)#]+)\)", README))
def test_links_lead_to_files(target):
    assert (ROOT / target).is_file()


def test_changelog_begins_with_this_version():
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (\S+)", changelog, re.MULTILINE)[0] == tl.__version__
