"""Machines by their names on the command line, and the file model.pt.

The file is plain data, which torch.load reads with weights_only=True:

    {"format": "torchloo model", "version": 1, "torchloo": "0.1.0",
     "machine": Spec as a dictionary, "schema": Schema as a dictionary, "state": a state_dict}
"""

import io
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import torchloo as tl
from torchloo.commands.schema import Schema
from torchloo.commands.shell import UserError
from torchloo.kernels import Kernel
from torchloo.machine import KernelMachine

__all__ = ["KERNELS", "MACHINES", "TELL_CLASSES_APART", "Spec", "load", "save"]

_FORMAT, _VERSION = "torchloo model", 1

KERNELS: dict[str, Callable[[int], Kernel]] = {
    "rbf": lambda d: tl.kernels.RBF(lengthscale=d**0.5),
    "ard": lambda d: tl.kernels.RBF(lengthscale=torch.full((d,), d**0.5, dtype=torch.float64)),
    "linear": lambda d: tl.kernels.Linear(),
    "poly2": lambda d: tl.kernels.Polynomial(degree=2),
    "poly3": lambda d: tl.kernels.Polynomial(degree=3),
    "boolean": lambda d: tl.kernels.Boolean(rate=1.0 / d),
    "matern": lambda d: tl.kernels.Matern(lengthscale=d**0.5),
}
"""Kernels for d inputs, by name."""

MACHINES: dict[str, Callable[[Kernel, int], KernelMachine]] = {
    "lssvm": lambda kernel, basis: tl.LSSVM(kernel),
    "rls": lambda kernel, basis: tl.RLS(kernel),
    "sparse": lambda kernel, basis: tl.SparseLSSVM(kernel, basis=basis),
    "kfd": lambda kernel, basis: tl.KFD(kernel),
    "svc": lambda kernel, basis: tl.SVC(kernel),
}
"""Machines of a kernel (and, for the sparse one, of a number of basis vectors), by name."""

TELL_CLASSES_APART = ("kfd", "svc")
"""Machines for labels only, which must see rows of every class."""


@dataclass(frozen=True)
class Spec:
    """What a machine is made of, before it has seen any data."""

    machine: str
    kernel: str
    inputs: int
    basis: int = 0

    def build(self) -> KernelMachine:
        """A machine that has not been fitted."""
        return MACHINES[self.machine](KERNELS[self.kernel](self.inputs), self.basis)


def save(path: Path, spec: Spec, schema: Schema, machine: KernelMachine) -> None:
    """Write a fitted machine and all that `load` needs."""
    content = {
        "format": _FORMAT,
        "version": _VERSION,
        "torchloo": tl.__version__,
        "machine": asdict(spec),
        "schema": schema.as_dict(),
        "state": {name: _on_host(value) for name, value in machine.state_dict().items()},
    }
    buffer = io.BytesIO()  # torch's own writing to a path fails on a full disk without saying so
    torch.save(content, buffer)
    path.write_bytes(buffer.getvalue())


def _on_host(value: Any) -> Any:
    return value.cpu() if isinstance(value, torch.Tensor) else value


def load(path: Path, device: str) -> tuple[Schema, KernelMachine]:
    """The schema and the fitted machine of a file."""
    if not path.is_file():
        raise UserError(f"{str(path)!r} " + ("is a folder" if path.is_dir() else "does not exist"))
    not_ours = f"{str(path)!r} is not a model that torchloo select has written"
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever the unpickler makes of other bytes
        raise UserError(not_ours) from error
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise UserError(not_ours)
    if content.get("version") != _VERSION:
        written = content.get("torchloo")
        raise UserError(
            f"{str(path)!r} was written by torchloo {written}, this is {tl.__version__}; select anew"
        )
    try:
        machine = Spec(**content["machine"]).build()
        machine.load_state_dict(content["state"])
        return Schema.from_dict(content["schema"]), machine.to(device)
    except (KeyError, TypeError, RuntimeError) as error:
        raise UserError(not_ours) from error
