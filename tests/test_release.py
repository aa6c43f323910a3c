"""What is released: a wheel and a source archive, tried in an environment that has nothing else in it."""

import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import torchloo

ROOT = Path(__file__).parents[1]


def call(*words: object, cwd: Path) -> str:
    """The output of a command that does not see this environment."""
    own = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))
    }
    done = subprocess.run([str(word) for word in words], cwd=cwd, env=own, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def tracked(*folders: str) -> list[str]:
    """The files that git knows."""
    return call("git", "ls-files", *folders, cwd=ROOT).splitlines()


def environment(path: Path) -> Path:
    """A new, empty virtual environment; its folder of programs."""
    venv.create(path, with_pip=True)
    return path / ("Scripts" if sys.platform == "win32" else "bin")


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheel and the source archive of the files that git knows, as `python -m build` makes them."""
    folder = tmp_path_factory.mktemp("release")
    for name in tracked():
        target = folder / "source" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
    programs = environment(folder / "builder")
    call(programs / "python", "-m", "pip", "install", "--quiet", "build", cwd=folder)
    call(programs / "python", "-m", "build", folder / "source", "--outdir", folder / "dist", cwd=folder)
    wheel, source = sorted((folder / "dist").iterdir(), key=lambda path: path.suffix, reverse=True)
    return {"wheel": wheel, "source": source}


@pytest.mark.slow
def test_archives_hold_the_package_and_nothing_else(archives):
    name = f"torchloo-{torchloo.__version__}"
    assert archives["wheel"].name == f"{name}-py3-none-any.whl"
    assert archives["source"].name == f"{name}.tar.gz"
    inside = set(zipfile.ZipFile(archives["wheel"]).namelist())
    assert {each for each in inside if each.startswith("torchloo/")} == set(tracked("torchloo"))
    assert {each.split("/")[0] for each in inside} == {"torchloo", f"{name}.dist-info"}
    with tarfile.open(archives["source"]) as archive:
        sources = {each.name.partition("/")[2] for each in archive}
    wanted = ("README.md", "CHANGELOG.md", "LICENSE", "CITATION.cff", "constraints.txt", "scripts/test.sh")
    assert {*wanted, "tests/reference.py", "torchloo/data/motorcycle.csv"} <= sources


@pytest.mark.slow
def test_the_wheel_and_the_source_archive_work_in_an_empty_environment(archives, tmp_path):
    programs = environment(tmp_path / "environment")
    pip = (programs / "python", "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt")
    folder = tmp_path / "empty"
    folder.mkdir()
    call(*pip, archives["wheel"], cwd=folder)
    assert call(programs / "torchloo", "--version", cwd=folder) == f"torchloo {torchloo.__version__}\n"
    code = (
        "import torchloo as tl; X, y = tl.datasets.motorcycle(); print(tl.LSSVM(tl.kernels.RBF()).loo(X, y))"
    )
    assert "HeldOut" in call(programs / "python", "-c", code, cwd=folder)
    call(*pip, f"{archives['wheel']}[cli]", cwd=folder)
    assert "133 points" in call(programs / "torchloo", "demo", "--steps", "20", cwd=folder)
    assert [path.name for path in folder.iterdir()] == ["motorcycle.png"]
    call(*pip, "--no-deps", "--force-reinstall", archives["source"], cwd=folder)
    assert call(programs / "torchloo", "--version", cwd=folder) == f"torchloo {torchloo.__version__}\n"
    assert "133 points" in call(programs / "torchloo", "demo", "--steps", "20", cwd=folder)
