"""docs/: what it says of the code is there."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


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
    there = {path.name for path in (ROOT / "torchloo").rglob("*")}
    there |= {path.name for folder in ("tests", "scripts", "docs") for path in (ROOT / folder).rglob("*")}
    there |= {path.name for path in ROOT.iterdir()}
    for page in ("docs/architecture.md", "CONTRIBUTING.md"):
        named = re.findall(r"`([\w/.]+(?:/|\.py|\.md|\.sh))`", (ROOT / page).read_text())
        assert len(named) > 10
        assert [name for name in named if Path(name).name not in there] == [], page
