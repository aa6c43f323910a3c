"""README.md, CONTRIBUTING.md and docs/: the code runs, and files, commands and notes that they name exist."""

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


def notes_of_the_code() -> set[str]:
    found = set()
    for path in (ROOT / "torchloo").rglob("*.py"):
        found |= set(re.findall(r"^\s*(?:# )?Note \[([^\]]+)\]$", path.read_text(), re.MULTILINE))
    return found


def test_the_mathematics_names_every_note_of_the_code_and_no_other() -> None:
    text = (ROOT / "docs" / "mathematics.md").read_text().replace("\n", " ")
    named = set(re.findall(r"\[([a-zA-Z][^\];]*)\]", text))
    assert named == notes_of_the_code()


def test_every_file_that_the_guides_name_is_there() -> None:
    folders = ("torchloo", "tests", "scripts", "docs")
    there = [f"/{path.name}" for path in ROOT.iterdir()]
    there += [path.as_posix() for folder in folders for path in (ROOT / folder).rglob("*")]
    for page in ("docs/architecture.md", "CONTRIBUTING.md"):
        text = (ROOT / page).read_text()
        named = re.findall(r"[\w/]+\.(?:py|md|sh)\b", text) + re.findall(r"`([\w/]+)/`", text)
        assert len(named) > 10
        missing = [name for name in named if not any(path.endswith(f"/{name}") for path in there)]
        assert missing == [], page


def test_the_architecture_names_every_package_and_every_file_beside_them() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    rooms = [path for path in (ROOT / "torchloo").iterdir() if path.suffix == ".py" or path.is_dir()]
    names = [f"{path.name}/" if path.is_dir() else path.name for path in rooms]
    hidden = ("__init__.py", "__pycache__/", "data/")
    assert [name for name in names if name not in hidden and f"`{name}`" not in text] == []
