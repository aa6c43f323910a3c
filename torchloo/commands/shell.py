"""What the subcommands share: errors of one line, arguments, files written whole, tables of text."""

import argparse
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

__all__ = [
    "UserError",
    "count",
    "first_line",
    "folder",
    "new_folder",
    "positive",
    "table",
    "whole",
    "writable",
    "write",
]


class UserError(Exception):
    """Something that the user can put right; its text is one line."""


def whole(text: str) -> int:
    """An argument that is a whole number, zero included."""
    if not text.isascii() or not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number from 0 on, got {text!r}")
    return int(text)


def count(text: str) -> int:
    """An argument that is a whole number, one at least."""
    if not text.isascii() or not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 on, got {text!r}")
    return int(text)


def positive(text: str) -> float:
    """An argument that is a positive number."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a positive number, got {text!r}")
    return value


def writable(suffix: str) -> "type[Path] | object":
    """The type of an argument that a file can be written to, found out before any work is done."""

    def check(text: str) -> Path:
        path = Path(text)
        if path.suffix.lower() != suffix:
            raise argparse.ArgumentTypeError(f"must end in {suffix}, got {text!r}")
        if path.is_dir():
            raise argparse.ArgumentTypeError(f"must be a file, got the folder {text!r}")
        _require_folder(path.parent)
        return path

    return check


def folder(text: str) -> Path:
    """An argument that is a folder to be made: it is not there yet, or is empty."""
    path = Path(text)
    if path.resolve() == Path.cwd() or os.path.ismount(path):
        raise argparse.ArgumentTypeError(f"must be a folder to be made, got {text!r}; name a new one")
    if path.is_dir():
        if any(path.iterdir()):
            raise argparse.ArgumentTypeError(f"the folder {text!r} is not empty; remove it, or name another")
    elif path.exists():
        raise argparse.ArgumentTypeError(f"must be a folder, got the file {text!r}")
    _require_folder(path.absolute().parent)
    return path


def _require_folder(path: Path) -> None:
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"the folder {str(path)!r} does not exist")
    if not os.access(path, os.W_OK):
        raise argparse.ArgumentTypeError(f"the folder {str(path)!r} cannot be written to")


def write(path: Path, content: bytes) -> None:
    """Write all of a file or nothing: a failure leaves what was there before."""
    part = path.with_name(path.name + ".part")
    try:
        part.write_bytes(content)
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise UserError(f"cannot write {str(path)!r}: {error.strerror}") from error


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to fill that becomes `path` once all of it is written, and vanishes if that fails."""
    parent = path.absolute().parent
    try:
        part = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=parent))
        part.chmod(0o777 & ~_umask())
    except OSError as error:
        raise UserError(f"cannot write into {str(parent)!r}: {error.strerror}") from error
    try:
        yield part
        part.replace(path)  # takes the place of an empty folder too
    except OSError as error:
        raise UserError(f"cannot write {str(path)!r}: {error.strerror}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def first_line(error: BaseException) -> str:
    """The text of an error in one line, as short as it can be told."""
    text = str(error).strip() or type(error).__name__
    return re.sub(r"\s+", " ", text.splitlines()[0])


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of text under each other: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for name, *cells in rows:
        padded = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        lines.append("   ".join([name.ljust(widths[0]), *padded]).rstrip())
    return "\n".join(lines)
