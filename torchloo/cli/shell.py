"""Shared by the subcommands: one-line errors, argument types, atomic writing of files, text tables."""

import argparse
import csv
import math
import os
import re
import secrets
import shlex
import shutil
import signal
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from torchloo.text_table import aligned

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "Parser",
    "UserError",
    "add_device",
    "add_out",
    "add_progress",
    "add_table",
    "comma_separated",
    "count",
    "first_line",
    "folder",
    "listed",
    "new_folder",
    "positive",
    "require_other_file",
    "table",
    "whole",
    "writable",
    "write",
]


class UserError(Exception):
    """An error that the user can correct; the message is one line."""


class Parser(argparse.ArgumentParser):
    """A parser with one-line errors that can reconstruct the command line of parsed options."""

    def __init__(self, **options: Any) -> None:
        self._ungrouped: list[argparse.Action] = []
        super().__init__(**options)

    def add_argument(self, *names: Any, **options: Any) -> argparse.Action:
        """As in argparse; options of a group (`add_argument_group`) are not part of `command`."""
        action = super().add_argument(*names, **options)
        self._ungrouped.append(action)
        return action

    def error(self, message: str) -> NoReturn:
        """Exit with a one-line message."""
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")

    def command(self, args: argparse.Namespace) -> str:
        """The command line of parsed options: all that are not in groups, defaults included.

        A path is reduced to its name, since the command is shown to others.
        """
        words = self.prog.split()
        for action in self._ungrouped:
            value = getattr(args, action.dest, None)
            option = action.option_strings[-1:]  # empty for a positional argument
            if value is None:
                continue
            if action.nargs == 0:  # a flag, which has no value
                words += option if value != action.default else []
                continue
            for each in value if isinstance(value, list) else [value]:
                text = each.name if isinstance(each, Path) else str(each)
                if option and text.startswith("-"):
                    words.append(f"{option[0]}={text}")
                else:
                    words += [*option, text]
        return shlex.join(words)


def add_table(parser: argparse.ArgumentParser, metavar: str) -> None:
    """Declare the argument `data`, a table."""
    parser.add_argument("data", type=Path, metavar=metavar, help="the table: .csv, .parquet or .npz")


def add_out(parser: argparse.ArgumentParser, default: str) -> None:
    """Declare --out, an output file with the suffix of its default."""
    parser.add_argument(
        "--out",
        type=writable(Path(default).suffix),
        default=default,
        metavar="FILE",
        help="output file (default: %(default)s)",
    )


def add_device(parser: argparse.ArgumentParser) -> None:
    """Declare --device."""
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")


def add_progress(parser: Any) -> None:
    """Declare --no-progress, of a parser or of a group."""
    parser.add_argument("--no-progress", dest="progress", action="store_false", help="show no progress bars")


def whole(text: str) -> int:
    """A non-negative integer argument that fits into 64 bits, as a seed has to."""
    if not text.isascii() or not text.isdecimal() or int(text) >= 2**63:
        raise argparse.ArgumentTypeError(f"must be a non-negative integer below 2^63, got {text!r}")
    return int(text)


def count(text: str) -> int:
    """A positive integer argument."""
    if not text.isascii() or not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"must be a positive integer, got {text!r}")
    return int(text)


def positive(text: str) -> float:
    """A positive, finite argument."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a positive number, got {text!r}")
    return value


def writable(suffix: str) -> Callable[[str], Path]:
    """The type of an output file argument, checked to be writable before any work is done."""

    def check(text: str) -> Path:
        path = Path(text)
        if path.suffix.lower() != suffix:
            raise argparse.ArgumentTypeError(f"must end in {suffix}, got {text!r}")
        if path.is_dir():
            raise argparse.ArgumentTypeError(f"must be a file, got the folder {text!r}")
        if path.exists() and not (path.is_file() and os.access(path, os.W_OK)):
            raise argparse.ArgumentTypeError(f"must be a file that can be written to, got {text!r}")
        _require_folder(_behind_link(path).parent)
        return path

    return check


def require_other_file(out: Path, *inputs: Path) -> None:
    """Raise if the output file is one of the inputs, by any path or link."""
    for path in inputs:
        if out.exists() and path.exists() and out.samefile(path):
            raise UserError(
                f"--out {str(out)!r} would overwrite the input {str(path)!r}; choose another name"
            )


def folder(text: str) -> Path:
    """An output folder argument: it must not exist yet, or be empty."""
    path = Path(text)
    real = Path(os.path.realpath(path))
    if real == Path.cwd() or os.path.ismount(real):
        raise argparse.ArgumentTypeError(f"must be a new folder, got {text!r}; choose another name")
    if path.is_dir():
        if any(path.iterdir()):
            raise argparse.ArgumentTypeError(
                f"the folder {text!r} is not empty; remove it, or choose another name"
            )
        _require_folder(path)
    elif path.exists():
        raise argparse.ArgumentTypeError(f"must be a folder, got the file {text!r}")
    _require_folder(_behind_link(path).absolute().parent)
    return path


def _require_folder(path: Path) -> None:
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"the folder {str(path)!r} does not exist")
    if not os.access(path, os.W_OK):
        raise argparse.ArgumentTypeError(f"the folder {str(path)!r} cannot be written to")


def _behind_link(path: Path) -> Path:
    """The target of a symbolic link; any other path is returned as it is."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def write(path: Path, content: bytes) -> None:
    """Write a file atomically: after a failure the previous content is still there."""
    with _part_of(path) as part, part.open("xb") as file:
        _take_permissions(part, path)
        file.write(content)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `path` at the end, or removed on failure."""
    with _part_of(path) as part:
        part.mkdir()
        _take_permissions(part, path)
        yield part


@contextmanager
def _part_of(path: Path) -> Iterator[Path]:
    """Yield a temporary name next to `path`; what is written there is renamed to `path`, or removed."""
    final = _behind_link(path.absolute())
    part = final.with_name(f".torchloo-{secrets.token_hex(8)}")
    try:
        with _removed_on_termination(part):
            yield part
            part.replace(final)  # takes the place of an empty folder too
    except OSError as error:
        raise UserError(f"cannot write {str(path)!r}: {error.strerror or error}") from error


@contextmanager
def _removed_on_termination(part: Path) -> Iterator[None]:
    """Remove a temporary path however writing ends, also when a signal would end the process.

    Signals that are ignored, or have another handler, are left alone.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        _remove(part)
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)

    handled = []
    if threading.current_thread() is threading.main_thread():  # the only one that may set handlers
        known = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
        handled = [number for number in known if signal.getsignal(number) is signal.SIG_DFL]
    try:
        for number in handled:
            signal.signal(number, handle)
        yield
    finally:
        _remove(part)
        for number in handled:
            signal.signal(number, signal.SIG_DFL)


def _remove(part: Path) -> None:
    if part.is_dir():
        shutil.rmtree(part, ignore_errors=True)
    else:
        part.unlink(missing_ok=True)


def _take_permissions(part: Path, path: Path) -> None:
    """Copy the permissions of an existing path; otherwise keep the default ones."""
    if path.exists():
        part.chmod(stat.S_IMODE(path.stat().st_mode))


def comma_separated(frame: "pd.DataFrame") -> str:
    """A table as CSV; text that a spreadsheet would evaluate is prefixed with a single quote."""
    frame = frame.rename(columns=_inert)
    texts = list(frame.columns)
    for name in frame:
        if frame[name].dtype.kind == "O":
            frame[name] = frame[name].map(_inert)
            texts += list(frame[name].unique())
    # Python before 3.13 does not quote a carriage return by itself.
    has_return = any("\r" in str(text) for text in texts)
    quoting = csv.QUOTE_NONNUMERIC if has_return else csv.QUOTE_MINIMAL
    return frame.to_csv(index=False, quoting=quoting)


def _inert(cell: object) -> object:
    """Escape text that a spreadsheet would evaluate; numbers such as -1.5 and +3e5 are left alone."""
    if not isinstance(cell, str) or not cell.startswith(("=", "+", "-", "@", "\t", "\r")):
        return cell
    number = re.fullmatch(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?", cell)
    return cell if number else f"'{cell}"


def first_line(error: BaseException) -> str:
    """The first line of an error message."""
    text = str(error).strip() or type(error).__name__
    return re.sub(r"\s+", " ", text.splitlines()[0])


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows as aligned text: the first column to the left, the others to the right."""
    return "\n".join(aligned(rows))


def listed(names: list[str], most: int = 5) -> str:
    """The first few names, quoted."""
    shown = ", ".join(repr(name) for name in names[:most])
    if len(names) > most:
        shown += f" and {len(names) - most} more"
    return shown
