"""What README.md and docs/ say runs, prints what they say it prints, and points at files that exist."""

import contextlib
import io
import re
import shlex
from pathlib import Path

import pytest

import torchloo as tl
from torchloo import cli

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXT = {str(page.relative_to(ROOT)): page.read_text(encoding="utf-8") for page in PAGES}


def found(pattern: str) -> list[tuple[str, str]]:
    """Pages and what each matches of a pattern."""
    return [(page, match) for page, text in TEXT.items() for match in re.findall(pattern, text, re.MULTILINE)]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
@pytest.mark.parametrize("page", ["README.md", "docs/guide.md"])
def test_code_runs_and_prints_what_its_comments_say(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where it may leave files
    blocks = re.findall(r"^```python\n(.*?)^```$", TEXT[page], re.MULTILINE | re.DOTALL)
    assert blocks
    namespace: dict[str, object] = {}
    for block in blocks:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(block, page, "exec"), namespace)
        expected = re.findall(r"^print\(.*\)  # (.*)$", block, re.MULTILINE)
        assert printed.getvalue().splitlines() == expected


@pytest.mark.parametrize(("page", "line"), found(r"^    torchloo (.*)$"))
def test_commands_have_the_arguments_that_they_are_shown_with(page, line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cli._parser().parse_args(shlex.split(line, comments=True))


@pytest.mark.parametrize(("page", "target"), found(r"\]\((?!http)([^)#]+)\)"))
def test_links_lead_to_files(page, target):
    assert (ROOT / page).parent.joinpath(target).is_file()


def test_changelog_begins_with_this_version():
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (\S+)", changelog, re.MULTILINE)[0] == tl.__version__
