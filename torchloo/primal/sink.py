"""Where held-out rows are written as they come: in memory, or in memory-mapped files."""

import contextlib
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from torchloo.memory import keep_freed_memory
from torchloo.primal.block import Block
from torchloo.primal.collective import Peers
from torchloo.primal.files import Field, mapped_files

__all__ = ["Sink", "require_folders"]


def require_folders(function: str, others: Peers, out: str | Path | None) -> None:
    """Raise, in all processes, if two of them would write to one folder."""
    own = others.run(lambda: None if out is None else str(Path(out).resolve()))
    folders = [folder for folder in others.gather(own) if folder is not None]
    if len(set(folders)) < len(folders):
        raise ValueError(
            f"{function}: out must be a folder of its own for each process, e.g. with its rank in the name, "
            f"got {folders}"
        )


class Sink:
    """Fields of a HeldOut of n rows, R regularisations and c outputs, filled block by block.

    A batch of problems is an axis in front of all others.

    Files appear under their names when all is well at the end of the `with`. Otherwise nothing is left of
    them, nor of the folders made for them.

    Args:
        function: name that errors carry.
        shape: (..., R, n, c).
        own: c' = 1, or c where every output has a regularisation of its own and so a variance.
        dtype: of the targets.
        device: where tensors are made; files are on the host.
        folder: where files are made, or None.
        known: targets (..., n, c) and weights (..., n), where they are in memory.
        with_outputs: whether outputs are written too: where they need no graph, it costs least with the rest.
    """

    outputs: Tensor | None
    residuals: Tensor
    variance: Tensor
    refitted: Tensor
    targets: Tensor
    weight: Tensor

    def __init__(
        self,
        function: str,
        shape: tuple[int, ...],
        own: int,
        dtype: torch.dtype,
        device: torch.device,
        folder: str | Path | None,
        known: tuple[Tensor, Tensor] | None,
        with_outputs: bool,
    ) -> None:
        *several, n, c = shape
        self._function, self._device = function, device
        self._fields = [
            Field("residuals", shape, dtype),
            Field("variance", (*several, n, own), dtype),
            Field("refitted", (*several, n), torch.bool),
        ]
        self.outputs, self._known = None, known
        if with_outputs:
            self._fields.append(Field("outputs", shape, dtype))
        if known is None:
            self._fields += [Field("targets", (n, c), dtype), Field("weight", (n,), dtype)]
        else:
            self.targets, self.weight = known
        self._folder = None if folder is None else Path(folder)
        self._made: list[Path] = []
        self._partial: tempfile.TemporaryDirectory[str] | None = None

    def open(self) -> None:
        """Make the fields, in files that do not have their names yet."""
        for field, tensor in zip(self._fields, self._blank(), strict=True):
            setattr(self, field.name, tensor)

    def _blank(self) -> list[Tensor]:
        if self._folder is None:
            keep_freed_memory()
            # Only flags are not written for every row.
            kinds = {torch.bool: torch.zeros}
            return [
                kinds.get(f.dtype, torch.empty)(f.shape, dtype=f.dtype, device=self._device)
                for f in self._fields
            ]
        self._made = [path for path in (self._folder, *self._folder.parents) if not path.exists()]
        self._folder.mkdir(parents=True, exist_ok=True)
        self._partial = tempfile.TemporaryDirectory(prefix=".partial-", dir=self._folder)
        what = f"out={str(self._folder)!r}"
        arrays = mapped_files(self._function, what, Path(self._partial.name), self._fields)
        return [torch.from_numpy(array) for array in arrays]

    def write(self, part: Block, residuals: Tensor, variance: Tensor, rows: slice | Tensor) -> None:
        """Held-out residuals (..., R, c, b) and variances (..., R, c', b) of rows with these numbers."""
        for field, values in ((self.residuals, residuals.mT), (self.variance, variance.mT)):
            field[..., rows, :] = values if isinstance(rows, slice) else values.to(field)  # a copy converts
        to, dtype = self.residuals.device, self.residuals.dtype
        if self.outputs is not None:
            self.outputs[..., rows, :] = part.Y.unsqueeze(-3).to(to) - residuals.mT.to(to, dtype)
        if self._known is None:  # of a stream, which has no batches
            self.targets[rows] = part.Y.to(to)
            self.weight[rows] = part.weight.to(to)

    def overwrite(
        self, rows: Tensor, r: int, j: int, outputs: slice, residuals: Tensor, variance: Tensor
    ) -> None:
        """Residuals (s, c) and variances (s, 1) of refitted rows, for one regularisation, j its variance."""
        to, dtype = self.residuals.device, self.residuals.dtype
        rows, e = rows.to(to), residuals.to(to, dtype)
        self.residuals[r, rows, outputs] = e
        if self.outputs is not None:
            self.outputs[r, rows, outputs] = self.targets[rows, outputs] - e
        self.variance[r, rows, j] = variance[:, 0].to(to, dtype)
        self.refitted[r, rows] = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self._partial is not None and self._folder is not None:
            for file in Path(self._partial.name).iterdir():
                file.replace(self._folder / file.name)
        if self._partial is not None:
            self._partial.cleanup()
        for path in self._made if kind is not None else []:
            with contextlib.suppress(OSError):  # as others may have put something there
                path.rmdir()
