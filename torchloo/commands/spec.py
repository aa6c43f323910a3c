"""Machines by their names on the command line."""

from dataclasses import dataclass, fields

from torchloo.catalogue import KERNELS, MACHINES, TELL_CLASSES_APART
from torchloo.commands.schema import Schema, require_fields
from torchloo.machine import KernelMachine

__all__ = ["Spec"]


@dataclass(frozen=True)
class Spec:
    """What a machine is made of, before it has seen any data."""

    machine: str
    kernel: str
    inputs: int
    basis: int = 0
    rows: int = 0
    """How many rows the model keeps for prediction intervals."""

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
        if type(spec.rows) is not int or spec.rows < 0 or (spec.rows and schema.labels):
            raise ValueError("machine: rows must be a number of rows, and 0 where there are labels")
        if spec.machine in TELL_CLASSES_APART and not schema.labels:
            raise ValueError(f"machine: {spec.machine} needs labels")
        return spec

    def build(self) -> KernelMachine:
        """A machine that has not been fitted."""
        options = {"basis": self.basis} if self.machine == "sparse" else {}
        return MACHINES[self.machine](KERNELS[self.kernel](self.inputs), **options)
