"""The file model.pt: plain data that torch.load reads with weights_only=True.

    {"format": "torchloo model", "version": 3, "torchloo": "0.1.0",
     "machine": Spec as a dictionary, "schema": Schema as a dictionary, "state": a state_dict,
     "uncertainty": Uncertainty as a dictionary, "sha256": the checksum of all the others}

`load` checks everything it reads: presence, types, shapes, finite numbers, consistency of the parts, and the
checksum.
"""

import hashlib
import io
import re
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

import torchloo as tl
from torchloo.cli.request import Spec
from torchloo.cli.schema import Schema, require_fields
from torchloo.cli.shell import UserError, first_line
from torchloo.cli.uncertainty import TrainingRows, Uncertainty, require_tensor
from torchloo.machine import KernelMachine

__all__ = ["Model", "checksum", "load", "save"]

_FORMAT, _VERSION = "torchloo model", 3
_FIELDS = ("format", "version", "torchloo", "machine", "schema", "state", "uncertainty", "sha256")


class Model(NamedTuple):
    """A fitted machine with the encoding of its inputs and its uncertainty."""

    schema: Schema
    machine: KernelMachine
    uncertainty: Uncertainty


def save(path: Path, spec: Spec, model: Model) -> None:
    """Write a fitted machine and everything that `load` needs."""
    schema, machine, uncertainty = model
    content: dict[str, Any] = {
        "format": _FORMAT,
        "version": _VERSION,
        "torchloo": tl.__version__,
        "machine": asdict(spec),
        "schema": schema.as_dict(),
        "state": {
            name: _on_host(value)
            for name, value in machine.state_dict().items()
            if name not in machine.extra_buffers
        },
        "uncertainty": uncertainty.as_dict(),
    }
    kept = content["uncertainty"]["rows"]
    support = content["state"]["support"]
    if kept and torch.equal(kept["X"], support):
        kept["X"] = support  # torch.save writes shared storage once
    content["sha256"] = checksum(content)
    buffer = io.BytesIO()  # torch.save to a path does not raise on a full disk
    torch.save(content, buffer)
    path.write_bytes(buffer.getvalue())


def _on_host(value: Any) -> Any:
    return value.cpu() if isinstance(value, torch.Tensor) else value


def checksum(content: dict[str, Any]) -> str:
    """SHA-256 of the content of a model, except for the field `sha256` itself."""
    digest = hashlib.sha256()
    hashed = {name: value for name, value in content.items() if name != "sha256"}
    for part in _bytes_of(hashed):
        digest.update(part)
    return digest.hexdigest()


def _bytes_of(value: Any) -> Iterator[bytes]:
    """Plain data as bytes, independent of the order of fields and of list or tuple."""
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


def load(path: Path, device: str) -> Model:
    """Load a model; UserError if the file was not written by `save`."""
    content = _content(path)
    try:
        require_fields("the model", content, _FIELDS)
        if not isinstance(content["torchloo"], str):
            raise ValueError("torchloo must be the version that wrote the file")
        schema = Schema.from_dict(content["schema"])
        spec = Spec.from_dict(content["machine"], schema)
        machine = spec.build()
        uncertainty = Uncertainty.from_dict(content["uncertainty"], schema, spec.rows)
        _require_state(spec, schema, machine, content["state"], uncertainty.rows)
        if checksum(content) != content["sha256"]:
            raise ValueError("its checksum does not match")
    except ValueError as error:
        raise UserError(f"{_not_ours(path)}, or it is damaged: {first_line(error)}") from error
    machine.load_state_dict(content["state"])
    return Model(schema, machine.to(device), uncertainty)


def _not_ours(path: Path) -> str:
    return f"{str(path)!r} is not a model written by torchloo select"


def _content(path: Path) -> dict[str, Any]:
    """The content of a file of this format and version."""
    if not path.is_file():
        raise UserError(f"{str(path)!r} " + ("is a folder" if path.is_dir() else "does not exist"))
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {str(path)!r}: {error.strerror or error}") from error
    try:
        with warnings.catch_warnings(action="ignore"):
            plain = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # the unpickler raises many kinds of errors for other files
        raise UserError(_not_ours(path)) from error
    if not isinstance(plain, dict) or plain.get("format") != _FORMAT:
        raise UserError(_not_ours(path))
    version = plain.get("version")
    if type(version) is not int or version != _VERSION:
        written = str(plain.get("torchloo"))
        by = f"torchloo {written}" if re.fullmatch(r"[\w.+]{1,30}", written) else "another torchloo"
        of = str(version) if type(version) is int and abs(version) < 1000 else "unknown"
        raise UserError(
            f"{str(path)!r} was written by {by} and has format version {of}; torchloo {tl.__version__} "
            f"reads version {_VERSION}: run torchloo select again"
        )
    return plain


def _require_state(
    spec: Spec,
    schema: Schema,
    machine: KernelMachine,
    state: object,
    rows_kept: TrainingRows | None,
) -> None:
    """Raise ValueError if a state does not belong to such a machine."""
    logarithms = dict(machine.named_parameters())
    values = require_fields("state", state, [*logarithms, *machine.fitted_buffers, "_extra_state"])
    for name, parameter in logarithms.items():
        require_tensor(f"state: {name}", values[name], tuple(parameter.shape), torch.float64)
        positive = values[name].exp()
        if not (positive.isfinite() & (positive > 0)).all():
            raise ValueError(f"state: {name} must be the logarithm of a positive number")
    outputs = len(schema.labels) if len(schema.labels) > 2 else 1
    flags = require_fields("state: _extra_state", values["_extra_state"], ("flat", "linear"))
    linear = flags["linear"]  # whether coef weighs features, not support points
    if type(linear) is not bool or (linear and not machine.kernel.is_linear):
        raise ValueError("state: linear must be False, or the kernel linear")
    if flags["flat"] is not (outputs == 1):
        raise ValueError("state: flat must be True for one output and False for several")
    rows = 1 if linear else spec.basis or _rows_of(values["support"])
    shapes = {
        "support": (rows, spec.inputs),
        "coef": (spec.inputs if linear else rows, outputs),
        "bias": (outputs,),
        "kept": (rows,),
    }
    for name in machine.fitted_buffers:
        dtype = torch.bool if name == "kept" else torch.float64
        require_tensor(f"state: {name}", values[name], shapes[name], dtype)
    if rows_kept and not linear and not spec.basis and not torch.equal(rows_kept[0], values["support"]):
        raise ValueError("rows: X must be the support of the machine")


def _rows_of(support: object) -> int:
    """Number of support points of a machine that is neither sparse nor linear."""
    if isinstance(support, torch.Tensor) and support.ndim:
        return max(1, support.shape[0])
    return 1
