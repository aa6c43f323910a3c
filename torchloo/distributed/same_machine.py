"""A check that all processes have the same machine."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchloo import csr
from torchloo.distributed.processes import Processes
from torchloo.machine import LeastSquares

__all__ = ["require_same_machine"]


class _Checksum(NamedTuple):
    """A summary of a tensor, to compare it between processes without sending it."""

    shape: tuple[int, ...]
    total: float
    """A weighted sum in which every entry has another weight."""
    size: float
    """The sum of absolute values."""

    @classmethod
    def of(cls, tensor: Tensor) -> "_Checksum":
        """The summary of a tensor."""
        flat = csr.dense(tensor.detach()).double().reshape(-1)
        weights = torch.arange(len(flat), dtype=flat.dtype, device=flat.device).cos()
        total = (weights * flat).sum()
        return cls(tuple(tensor.shape), total.item(), flat.abs().sum().item())

    def matches(self, other: object) -> bool:
        """Whether both are of the same tensor, up to rounding."""
        if not isinstance(other, _Checksum) or self.shape != other.shape:
            return False
        close = abs(self.total - other.total) <= 1e-9 * (1 + self.size)
        return close or repr(self) == repr(other)  # NaN in both, which other checks report


def _summary(machine: LeastSquares) -> dict[str, Any]:
    """Checksums of the tensors of a machine by name, and the types of all its parts."""
    tensors = dict(machine.named_parameters()) | dict(machine.kernel.named_buffers("kernel"))
    if isinstance(basis := getattr(machine, "basis", None), Tensor):
        tensors["basis"] = basis
    if machine.has_given_classes and machine.classes is not None:
        tensors["classes"] = machine.classes
    checksums = {name: _Checksum.of(value) for name, value in tensors.items()}
    kinds = ", ".join(f"{type(part).__name__}({part.extra_repr()})" for part in machine.modules())
    return {**checksums, "kind": kinds}


def require_same_machine(processes: Processes, machine: LeastSquares) -> None:
    """Raise, in all processes, unless all have the parameters, basis and types of process 0.

    Args:
        processes: all processes.
        machine: the machine of this process.
    """

    def own() -> tuple[bool, dict[str, Any]]:
        chooses_basis = getattr(machine, "basis", 0) is None
        return chooses_basis, _summary(machine)

    summaries = processes.gather(processes.run(own))
    for rank, (chooses_basis, _) in enumerate(summaries):
        if chooses_basis:
            raise ValueError(
                f"{processes.function}: basis must be a tensor, the same in all processes, not a choice "
                f"among the rows of each, as in process {rank}; e.g. rows of process 0, sent by "
                "torch.distributed.broadcast"
            )
    first = summaries[0][1]
    for rank, (_, other) in enumerate(summaries):
        for name in first | other:
            a, b = first.get(name), other.get(name)
            same = a.matches(b) if isinstance(a, _Checksum) else a == b
            if not same:
                shown = f", {b} from {a}" if isinstance(a, str) else ""
                raise ValueError(
                    f"{processes.function}: machines must be equal in all processes, but {name} of "
                    f"process {rank} differs from that of process 0{shown}"
                )
