"""docs/: what it says of the code is there."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def notes_of_the_code() -> set[str]:
    found = set()
    for path in (ROOT / "torchloo").rglob("*.py"):
        found |= set(re.findall(r"^\s*Note \[([^\]]+)\]$", path.read_text(), re.MULTILINE))
    return found


def test_the_mathematics_names_every_note_of_the_code_and_no_other() -> None:
    text = (ROOT / "docs" / "mathematics.md").read_text().replace("\n", " ")
    named = set(re.findall(r"\[([a-zA-Z][^\];]*)\]", text))
    assert named == notes_of_the_code()
