"""Where held-out rows are written as they come: in memory, or in memory-mapped files."""

import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from torchloo.held_out import HeldOut
from torchloo.streaming.collective import Alone
from torchloo.streaming.sources import open_array
from torchloo.streaming.stream import Block

__all__ = ["Sink", "require_folders"]


def require_folders(function: str, others: Alone, out: str | Path | None) -> None:
    """Raise, in all processes, if two of them would write to one folder."""
    own = others.together(lambda: None if out is None else str(Path(out).resolve()))
    folders = [folder for folder in others.gather(own) if folder is not None]
    if len(set(folders)) < len(folders):
        raise ValueError(
            f"{function}: out must be a folder of its own for each process, e.g. with its rank in the name, "
            f"got {folders}"
        )


class Sink:
    """Fields of a HeldOut of n rows, R regularisations and c outputs, filled block by block.

    Files appear under their names when all is well at the end of the `with`, and not otherwise.

    Args:
        shape: (R, n, c).
        own: c' = 1, or c where every output has a regularisation of its own and so a variance.
        dtype: of the targets.
        device: where tensors are made; files are on the host.
        folder: where files are made, or None.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        own: int,
        dtype: torch.dtype,
        device: torch.device,
        folder: str | Path | None,
    ) -> None:
        R, n, c = shape
        self._folder = None if folder is None else Path(folder)
        self._partial: tempfile.TemporaryDirectory[str] | None = None
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._partial = tempfile.TemporaryDirectory(prefix=".partial-", dir=self._folder)
        self._device = device
        self.outputs, self.residuals = (self._new(name, shape, dtype) for name in ("outputs", "residuals"))
        self.variance = self._new("variance", (R, n, own), dtype)
        self.refitted = self._new("refitted", (R, n), torch.bool)
        self.targets, self.weight = self._new("targets", (n, c), dtype), self._new("weight", (n,), dtype)

    def _new(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if self._partial is None:
            return torch.zeros(shape, dtype=dtype, device=self._device)
        return torch.from_numpy(open_array(Path(self._partial.name) / f"{name}.npy", shape, dtype))

    def write(self, part: Block, residuals: Tensor, variance: Tensor, rows: slice | Tensor) -> None:
        """Held-out residuals (R, c, b) and variances (R, c', b) of a block of rows with their numbers."""
        to = self.outputs.device
        r = residuals.mT.to(to, self.outputs.dtype)
        Y = part.Y.to(to)
        self.residuals[:, rows] = r
        self.outputs[:, rows] = Y - r
        self.variance[:, rows] = variance.mT.to(to, self.variance.dtype)
        self.targets[rows] = Y
        self.weight[rows] = part.weight.to(to)

    def overwrite(
        self, rows: Tensor, r: int, j: int, outputs: slice, residuals: Tensor, variance: Tensor
    ) -> None:
        """Residuals (s, c) and variances (s, 1) of refitted rows, for one regularisation, j its variance."""
        to, dtype = self.outputs.device, self.outputs.dtype
        rows, e = rows.to(to), residuals.to(to, dtype)
        columns = torch.arange(self.outputs.shape[-1], device=to)[outputs]
        index = (r, rows.unsqueeze(-1), columns)
        self.residuals[index] = e
        self.outputs[index] = self.targets[index[1:]] - e
        self.variance[r, rows, j] = variance[:, 0].to(to, dtype)
        self.refitted[r, rows] = True

    def held_out(self, labels: Tensor | None, flat: bool, path: bool) -> HeldOut:
        """What was written, without the output axis where `flat`, and the axis R only for a path."""
        R, n, _ = self.outputs.shape
        targets, variance = self.targets.expand_as(self.outputs), self.variance.expand_as(self.outputs)
        fields = (self.outputs, self.residuals, targets, variance)
        outputs, residuals, targets, variance = (t[..., 0] if flat else t for t in fields)
        held_out = (outputs, residuals, targets, self.weight.expand(R, n), variance, self.refitted)
        outputs, residuals, targets, weight, variance, refitted = (t if path else t[0] for t in held_out)
        return HeldOut(outputs, residuals, targets, weight, labels, variance, refitted)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._partial is None or self._folder is None:
            return
        if kind is None:
            for file in Path(self._partial.name).iterdir():
                file.replace(self._folder / file.name)
        self._partial.cleanup()
