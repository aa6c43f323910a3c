"""What must be the same in all processes before they set to work: the machine."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchloo import csr
from torchloo.distributed.processes import Processes
from torchloo.machine import LeastSquares

__all__ = ["require_alike"]


class _Trait(NamedTuple):
    """What is compared of a tensor."""

    shape: tuple[int, ...]
    total: float
    """A sum in which no two entries count alike."""
    size: float
    """The sum of absolute values."""

    @classmethod
    def of(cls, tensor: Tensor) -> "_Trait":
        """That of a tensor."""
        flat = csr.dense(tensor.detach()).double().reshape(-1)
        waves = torch.arange(len(flat), dtype=flat.dtype, device=flat.device).cos()
        return cls(tuple(tensor.shape), (waves * flat).sum().item(), flat.abs().sum().item())

    def like(self, other: object) -> bool:
        """Whether the other is of the same tensor, but for rounding."""
        if not isinstance(other, _Trait) or self.shape != other.shape:
            return False
        near = abs(self.total - other.total) <= 1e-9 * (1 + self.size)
        return near or repr(self) == repr(other)  # NaN everywhere is told of elsewhere


def _traits(machine: LeastSquares) -> dict[str, Any]:
    """Tensors by name, and the kinds of all parts."""
    tensors = dict(machine.named_parameters()) | dict(machine.kernel.named_buffers("kernel"))
    if isinstance(basis := getattr(machine, "basis", None), Tensor):
        tensors["basis"] = basis
    if machine.has_given_classes and machine.classes is not None:
        tensors["classes"] = machine.classes
    kinds = ", ".join(f"{type(part).__name__}({part.extra_repr()})" for part in machine.modules())
    return {name: _Trait.of(value) for name, value in tensors.items()} | {"kind": kinds}


def require_alike(processes: Processes, machine: LeastSquares) -> None:
    """The same parameters, basis and kinds in all processes: one verdict in all, against process 0.

    Args:
        processes: all of them.
        machine: that of this process.
    """

    def own() -> tuple[bool, dict[str, Any]]:
        return getattr(machine, "basis", 0) is None, _traits(machine)

    everyone = processes.gather(processes.together(own))
    for rank, (chosen, _) in enumerate(everyone):
        if chosen:
            raise ValueError(
                f"{processes.function}: basis must be a tensor, the same in all processes, not a choice "
                f"among the rows of each, as in process {rank}; e.g. rows of process 0, sent by "
                "torch.distributed.broadcast"
            )
    first = everyone[0][1]
    for rank, (_, other) in enumerate(everyone):
        for name in first | other:
            a, b = first.get(name), other.get(name)
            if not (a.like(b) if isinstance(a, _Trait) else a == b):
                shown = f", {b} from {a}" if isinstance(a, str) else ""
                raise ValueError(
                    f"{processes.function}: machines must be alike in all processes, but {name} of "
                    f"process {rank} differs from that of process 0{shown}"
                )
