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
