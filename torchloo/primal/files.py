"""New memory-mapped files, with their room reserved: what a full disk cannot take is told before any work."""

import errno
import math
import os
import shutil
import tempfile
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
import torch

__all__ = ["Field", "mapped_files"]

_NUMPY = {
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.float16: np.float16,
    torch.bfloat16: np.int16,  # its bits, as NumPy has no such numbers
    torch.bool: np.bool_,
    torch.int64: np.int64,
}

# What posix_fallocate says where the file system, or the C library for it, cannot reserve room.
_CANNOT_RESERVE = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)

_CHUNK = 1 << 20  # bytes written at once


class Field(NamedTuple):
    """An array to be made."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Size of the array."""
        return math.prod(self.shape) * self.dtype.itemsize


def mapped_files(function: str, what: str, folder: Path | None, fields: list[Field]) -> list[np.ndarray]:
    """Arrays of zeros mapped to files, or OSError if there is no room for all of them.

    Args:
        function: name that errors carry.
        what: what the room is needed for.
        folder: of new files <name>.npy; None takes files without a name, which are gone when the arrays are.
        fields: what to make.
    """
    place = Path(tempfile.gettempdir()) if folder is None else folder
    needed, free = sum(field.bytes for field in fields), shutil.disk_usage(place).free
    try:
        return [_unnamed(field) if folder is None else _named(folder, field) for field in fields]
    except OSError as error:
        remedy = f"set TMPDIR, now {place}, to a folder" if folder is None else "take a folder"
        raise OSError(
            error.errno,
            f"{function}: {what} needs {needed} bytes, where {free} are free ({error.strerror}); "
            f"{remedy} with more room",
        ) from error


def _named(folder: Path, field: Field) -> np.ndarray:
    path = folder / f"{field.name}.npy"
    descr = np.lib.format.dtype_to_descr(np.dtype(_NUMPY[field.dtype]))
    with path.open("xb") as file:
        header = {"descr": descr, "fortran_order": False, "shape": field.shape}
        np.lib.format.write_array_header_1_0(file, header)
        _reserve(file, field.bytes)
    return np.lib.format.open_memmap(path, mode="r+")


def _unnamed(field: Field) -> np.ndarray:
    with tempfile.TemporaryFile() as file:
        _reserve(file, field.bytes)
        return np.memmap(file, mode="r+", dtype=_NUMPY[field.dtype], shape=field.shape)


def _reserve(file: IO[bytes], size: int) -> None:
    """Room on the disk for so many zeros at the end of a file, or OSError.

    A file that is merely made long takes its room when its memory is written to: on a full disk, that
    ends the process.
    """
    file.flush()
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(file.fileno(), file.tell(), size)
        except OSError as error:
            if error.errno not in _CANNOT_RESERVE:
                raise
        else:
            return
    for start in range(0, size, _CHUNK):
        file.write(bytes(min(_CHUNK, size - start)))
    file.flush()
    os.fsync(file.fileno())
