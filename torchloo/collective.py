"""What passes over rows ask of the other processes, and the answers where there are none."""

from typing import Any

from torch import Tensor

__all__ = ["Alone"]


class Alone:
    """One process, which holds all rows; torchloo.distributed has the same for several."""

    rank = 0

    def sums(self, *tensors: Tensor) -> list[Tensor]:
        """Each tensor added up over the processes."""
        return list(tensors)

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes, in their order."""
        return [value]
