"""Machines by their names on the command line, and the file model.pt.

The file is plain data, which torch.load reads with weights_only=True:

    {"format": "torchloo model", "version": 2, "torchloo": "0.1.0",
     "machine": Spec as a dictionary, "schema": Schema as a dictionary, "state": a state_dict,
     "sha256": the checksum of all the others}

Whatever `load` takes out of it has been checked: that it is there, its type, its shape, that numbers are
finite, that the parts fit together, and, by the checksum, that no value has changed since.
"""

import hashlib
import io
import re
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

import torchloo as tl
from torchloo.catalogue import KERNELS, MACHINES, TELL_CLASSES_APART
from torchloo.commands.schema import Schema, require_fields
from torchloo.commands.shell import UserError, first_line
from torchloo.machine import KernelMachine

__all__ = ["Spec", "checksum", "load", "save"]

_FORMAT, _VERSION = "torchloo model", 2
_FIELDS = ("format", "version", "torchloo", "machine", "schema", "state", "sha256")


@dataclass(frozen=True)
class Spec:
    """What a machine is made of, before it has seen any data."""

    machine: str
    kernel: str
    inputs: int
    basis: int = 0

    @classmethod
    def from_dict(cls, plain: object, schema: Schema) -> "Spec":
        """What was saved beside a schema; ValueError says what is wrong with anything else."""
        spec = cls(**require_fields("machine", plain, [each.name for each in fields(cls)]))
        for name, value, known in (("machine", spec.machine, MACHINES), ("kernel", spec.kernel, KERNELS)):
            if not isinstance(value, str) or value not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}")
        if type(spec.inputs) is not int or spec.inputs != len(schema.inputs):
            raise ValueError(f"machine: inputs must be {len(schema.inputs)}, as the schema has")
        if type(spec.basis) is not int or (spec.basis > 0) != (spec.machine == "sparse"):
            raise ValueError("machine: basis must be positive for a sparse machine, and 0 for others")
        if spec.machine in TELL_CLASSES_APART and not schema.labels:
            raise ValueError(f"machine: {spec.machine} needs labels")
        return spec

    def build(self) -> KernelMachine:
        """A machine that has not been fitted."""
        options = {"basis": self.basis} if self.machine == "sparse" else {}
        return MACHINES[self.machine](KERNELS[self.kernel](self.inputs), **options)


def save(path: Path, spec: Spec, schema: Schema, machine: KernelMachine) -> None:
    """Write a fitted machine and all that `load` needs."""
    content = {
        "format": _FORMAT,
        "version": _VERSION,
        "torchloo": tl.__version__,
        "machine": asdict(spec),
        "schema": schema.as_dict(),
        "state": {
            name: _on_host(value) for name, value in machine.state_dict().items() if name not in machine.spare
        },
    }
    content["sha256"] = checksum(content)
    buffer = io.BytesIO()  # torch's own writing to a path fails on a full disk without saying so
    torch.save(content, buffer)
    path.write_bytes(buffer.getvalue())


def _on_host(value: Any) -> Any:
    return value.cpu() if isinstance(value, torch.Tensor) else value


def checksum(content: dict[str, Any]) -> str:
    """SHA-256 of all that a model holds, but for the field `sha256` itself."""
    digest = hashlib.sha256()
    for part in _bytes_of({name: value for name, value in content.items() if name != "sha256"}):
        digest.update(part)
    return digest.hexdigest()


def _bytes_of(value: Any) -> Iterator[bytes]:
    """Plain data piece by piece, the same for lists and tuples, and in whatever order fields are."""
    if isinstance(value, dict):
        value = [part for name in sorted(value) for part in (name, value[name])]
    if isinstance(value, list | tuple):
        yield f"{len(value)} parts ".encode()
        for part in value:
            yield from _bytes_of(part)
    elif isinstance(value, torch.Tensor):
        yield f"{value.dtype} {tuple(value.shape)} ".encode()
        yield value.contiguous().numpy().tobytes()
    else:
        yield f"{value!r} ".encode()


def load(path: Path, device: str) -> tuple[Schema, KernelMachine]:
    """The schema and the fitted machine of a file; UserError for whatever `save` cannot have written."""
    content = _content(path)
    try:
        require_fields("the model", content, _FIELDS)
        if not isinstance(content["torchloo"], str):
            raise ValueError("torchloo must be the version that has written it")
        schema = Schema.from_dict(content["schema"])
        spec = Spec.from_dict(content["machine"], schema)
        machine = spec.build()
        _require_state(spec, schema, machine, content["state"])
        if checksum(content) != content["sha256"]:
            raise ValueError("its checksum does not match")
    except ValueError as error:
        raise UserError(f"{_not_ours(path)}, or it is damaged: {first_line(error)}") from error
    machine.load_state_dict(content["state"])
    return schema, machine.to(device)


def _not_ours(path: Path) -> str:
    return f"{str(path)!r} is not a model that torchloo select has written"


def _content(path: Path) -> dict[str, Any]:
    """What a file of this format and version holds."""
    if not path.is_file():
        raise UserError(f"{str(path)!r} " + ("is a folder" if path.is_dir() else "does not exist"))
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {str(path)!r}: {error.strerror or error}") from error
    try:
        with warnings.catch_warnings(action="ignore"):
            plain = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # whatever the unpickler makes of other bytes
        raise UserError(_not_ours(path)) from error
    if not isinstance(plain, dict) or plain.get("format") != _FORMAT:
        raise UserError(_not_ours(path))
    version = plain.get("version")
    if type(version) is not int or version != _VERSION:
        written = str(plain.get("torchloo"))
        by = f"torchloo {written}" if re.fullmatch(r"[\w.+]{1,30}", written) else "another torchloo"
        of = str(version) if type(version) is int and abs(version) < 1000 else "unknown"
        raise UserError(
            f"{str(path)!r} was written by {by}, its format has the version {of}; torchloo {tl.__version__} "
            f"reads version {_VERSION}: select anew"
        )
    return plain


def _require_state(spec: Spec, schema: Schema, machine: KernelMachine, state: object) -> None:
    """Refuse a state that is not the one of such a machine, fitted; ValueError says why."""
    logarithms = dict(machine.named_parameters())
    values = require_fields("state", state, [*logarithms, *machine._fitted, "_extra_state"])
    for name, parameter in logarithms.items():
        _require_tensor(name, values[name], tuple(parameter.shape))
        positive = values[name].exp()
        if not (positive.isfinite() & (positive > 0)).all():
            raise ValueError(f"state: {name} must be the logarithm of a positive number")
    outputs = len(schema.labels) if len(schema.labels) > 2 else 1
    linear = machine.kernel.is_linear and spec.machine in ("lssvm", "rls")  # which weigh features themselves
    flags = require_fields("state: _extra_state", values["_extra_state"], ("flat", "linear"))
    if flags["flat"] is not (outputs == 1) or flags["linear"] is not linear:
        raise ValueError("state: flat and linear must be those of the machine and its targets")
    rows = 1 if linear else spec.basis or _rows_of(values["support"])
    shapes = {
        "support": (rows, spec.inputs),
        "coef": (spec.inputs if linear else rows, outputs),
        "bias": (outputs,),
        "kept": (rows,),
    }
    for name in machine._fitted:
        _require_tensor(name, values[name], shapes[name], torch.bool if name == "kept" else torch.float64)


def _rows_of(support: object) -> int:
    """How many rows a machine is built on; only of one neither sparse nor linear is it free."""
    return max(1, support.shape[0]) if isinstance(support, torch.Tensor) and support.ndim else 1


def _require_tensor(
    name: str, value: object, shape: tuple[int, ...], dtype: torch.dtype = torch.float64
) -> None:
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.device.type != "cpu":
        raise ValueError(f"state: {name} must be a dense tensor")
    if value.dtype != dtype or value.shape != shape:
        raise ValueError(
            f"state: {name} must be {dtype} of shape {shape}, got {value.dtype} of shape {tuple(value.shape)}"
        )
    if not value.isfinite().all():
        raise ValueError(f"state: {name} must be finite")
