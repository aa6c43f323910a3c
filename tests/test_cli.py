"""The torchloo command: what it prints and writes, and how it fails."""

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from command import require_one_line_error, run

import torchloo as tl
from torchloo.cli import bench, demo
from torchloo.cli.shell import new_folder, write

PNG = b"\x89PNG\r\n\x1a\n"
QUICK = ["demo", "--steps", "2", "--no-progress"]


def number_after(name: str, text: str) -> list[float]:
    line = next(line for line in text.splitlines() if line.startswith(name))
    return [float(number) for number in re.findall(r"\d+(?:\.\d+)?(?:e-?\d+)?", line[len(name) :])]


def test_demo_prints_its_table_and_writes_a_picture(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "picture.png"
    assert run("demo", "--out", str(picture)) == 0
    out, err = capsys.readouterr()
    press_before, press_after = number_after("PRESS (g^2)", out)
    rmse_before, rmse_after = number_after("LOO RMSE (g)", out)
    assert press_after < press_before
    assert rmse_after < rmse_before
    assert 23.0 <= rmse_after < 23.1  # the minimum is 23.03
    (difference,) = number_after("largest difference of the outputs:", out)
    assert difference < 1e-8
    assert "optimising" in err
    assert picture.read_bytes().startswith(PNG)
    assert list(tmp_path.iterdir()) == [picture]


def test_demo_writes_into_the_current_folder_and_shows_no_bar_when_told(tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    assert run(*QUICK) == 0
    assert capsys.readouterr().err == ""
    assert (tmp_path / "motorcycle.png").read_bytes().startswith(PNG)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "required: command"),
        (["dance"], "invalid choice: 'dance'"),
        (["demo", "--steps", "0"], "must be a positive integer, got '0'"),
        (["demo", "--steps", "many"], "must be a positive integer, got 'many'"),
        (
            ["select", "t.csv", "--target", "y", "--seed", str(2**64)],
            "--seed: must be a non-negative integer below",
        ),
        (["demo", "--out", "nowhere/picture.png"], "folder 'nowhere' does not exist"),
        (["demo", "--out", "picture.txt"], "must end in .png"),
        (["demo", "--out", "folder.png"], "must be a file, got the folder"),
    ],
)
def test_wrong_use_ends_in_one_line_and_exit_code_2(argv, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.png").mkdir()
    assert run(*argv) == 2
    require_one_line_error(capsys, message)
    assert [path.name for path in tmp_path.iterdir()] == ["folder.png"]


def test_without_matplotlib_the_remedy_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert run(*QUICK, "--out", str(tmp_path / "picture.png")) == 2
    require_one_line_error(capsys, "pip install torchloo[cli]")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_the_old_picture(tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "picture.png"
    picture.write_bytes(b"old")

    def fail(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    assert run(*QUICK, "--out", str(picture)) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert picture.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [picture]


def test_an_interrupt_ends_without_a_traceback(tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")

    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "_descend", interrupt)
    assert run(*QUICK, "--out", str(tmp_path / "picture.png")) == 130
    assert capsys.readouterr().err.splitlines() == ["torchloo demo: interrupted"]
    assert list(tmp_path.iterdir()) == []


def test_a_benchmark_that_does_not_fit_into_memory_ends_in_one_line(capsys, monkeypatch):
    def fail(n, seed=0, device="cpu"):
        raise RuntimeError(f"can't allocate memory: you tried to allocate {8 * n * n} bytes\n(details)")

    monkeypatch.setattr(bench, "kernel_matrix", fail)
    assert run("bench", "--rows", "1000000", "--no-progress") == 2
    expected = "can't allocate memory: you tried to allocate 8000000000000 bytes"
    assert capsys.readouterr().err == f"torchloo bench: error: --rows 1000000: {expected}\n"


def test_output_that_is_not_read_to_its_end_leaves_no_traceback():
    """As of `torchloo bench | head -0`."""
    command = [sys.executable, "-m", "torchloo", "bench", "--rows", "9", "--repeats", "1", "--no-progress"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141


# Signals that the tests' own parent ignores, as nohup does, are ignored by a child unless it says otherwise.
PREPARED = (
    "import signal, time; from pathlib import Path; from torchloo.cli import shell\n"
    "signal.signal(signal.SIGHUP, signal.SIG_DFL); signal.signal(signal.SIGINT, signal.default_int_handler)\n"
)
WRITERS = {
    "file": (
        "def replace(part, path): print('writing', flush=True); time.sleep(60)\n"
        "Path.replace = replace\n"
        "shell.write(Path('out.csv'), b'new')\n"
    ),
    "folder": (
        "with shell.new_folder(Path('out')) as part:\n"
        "    (part / 'file').touch(); print('writing', flush=True); time.sleep(60)\n"
    ),
}


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_in_the_middle_of_writing_leaves_nothing_behind(tmp_path, kind, number):
    Path(tmp_path, "out.csv").write_text("old")
    command = [sys.executable, "-c", PREPARED + WRITERS[kind]]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=tmp_path, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout.readline() == "writing\n"
        assert len(list(tmp_path.iterdir())) == 2
        process.send_signal(number)
        process.communicate(timeout=60)
    assert process.returncode == -number  # as it would have ended without a handler
    assert [path.name for path in tmp_path.iterdir()] == ["out.csv"]
    assert Path(tmp_path, "out.csv").read_text() == "old"


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_an_ignored_signal_stays_ignored_while_writing(tmp_path):
    """As under nohup."""
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with new_folder(tmp_path / "out") as part:
            signal.raise_signal(signal.SIGHUP)
            (part / "file").touch()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, previous)
    assert list(tmp_path.rglob("*")) == [tmp_path / "out", tmp_path / "out" / "file"]


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_handlers_of_signals_are_as_they_were_after_writing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    write(Path("file.csv"), b"")
    with new_folder(Path("out")):
        pass
    with pytest.raises(RuntimeError, match="in the middle"), new_folder(Path("other")):
        raise RuntimeError("in the middle")
    assert [signal.getsignal(number) for number in numbers] == before

    def leave(number, frame):
        raise SystemExit(7)

    previous = signal.signal(signal.SIGTERM, leave)
    try:
        with pytest.raises(SystemExit, match="7"), new_folder(Path("other")):
            signal.raise_signal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is leave
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file.csv", "out"]


def test_files_are_written_in_other_threads_too(tmp_path):
    thread = threading.Thread(target=write, args=(tmp_path / "file.csv", b"content"))
    thread.start()
    thread.join()
    assert Path(tmp_path, "file.csv").read_bytes() == b"content"


def test_python_m_torchloo_is_the_command():
    command = [sys.executable, "-m", "torchloo", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"torchloo {tl.__version__}\n"


def test_importing_the_command_does_not_import_matplotlib():
    code = "import sys, torchloo.cli; sys.exit('matplotlib' in sys.modules or 'pandas' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
