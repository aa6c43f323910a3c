"""What the first pass has seen of the rows, so that later ones notice what has changed since.

Note [checksums]
Every entry is multiplied by a factor of its column and sign, and the bits of the product are taken as an
integer. These are added up over each row, mixed with the number of the row, and added up over the rows, all
modulo 2^64. As integers give the same sum in any order, the checksum depends on no layout in memory,
number of threads or order in which rows are visited; and a block is as good as the rows of a cluster.
Time: a few operations for each entry, in the passes that are made anyway. Memory: three numbers a block.
"""

import torch
from torch import Tensor
from torch.nn.functional import leaky_relu_

from torchloo.primal.block import Block

__all__ = ["Seen", "checksum"]

_MULTIPLIER = -7046029254386353131  # 2^64 divided by the golden ratio, an odd number
_NAMES = ("X", "y", "weight")


def checksum(part: Block, numbers: slice | Tensor) -> Tensor:
    """Checksums of X, y and weight of rows with their numbers (b,), int64 (3,) on the host."""
    if isinstance(numbers, slice):
        numbers = torch.arange(numbers.start, numbers.stop, device=part.X.device)
    by_row = [_sums_of_bits(t) for t in (part.X.flatten(1), part.Y, part.weight.unsqueeze(-1))]
    mixed = torch.stack(by_row) + numbers.to(part.X.device)  # (3, b)
    for _ in range(2):
        mixed *= _MULTIPLIER
        mixed ^= mixed >> 32
    return mixed.sum(1).cpu()


def _sums_of_bits(values: Tensor) -> Tensor:
    """Of the entries (b, d) of each row, (b,)."""
    factors = torch.arange(1, values.shape[1] + 1, dtype=torch.float64, device=values.device).cos()
    products = values.double() * factors
    # A change of sign is a change of one bit, of which two would cancel, unless it brings another factor.
    return leaky_relu_(products, 0.7).view(torch.int64).sum(1)


class Seen:
    """Checksums of the blocks of the first pass, and of all rows together."""

    def __init__(self) -> None:
        self._blocks: dict[tuple[int, int], Tensor] = {}

    def note(self, part: Block) -> None:
        """Keep the checksum of a block of the first pass."""
        self._blocks[part.rows.start, part.rows.stop] = checksum(part, part.rows)

    def require_same(self, function: str, part: Block) -> None:
        """Raise unless a block of a later pass is as it was in the first."""
        start, stop = part.rows.start, part.rows.stop
        before = self._blocks.get((start, stop))
        found = checksum(part, part.rows)
        if before is None or not torch.equal(before, found):
            changed = [True] * 3 if before is None else (before != found).tolist()
            _raise(function, changed, f" of rows {start} to {stop - 1}")

    def require_all(self, function: str, found: Tensor) -> None:
        """Raise unless the checksums of all rows, added up in any order, are those of the first pass."""
        total = torch.stack(list(self._blocks.values())).sum(0)
        if not torch.equal(total, found):
            _raise(function, (total != found).tolist(), "")


def _raise(function: str, changed: list[bool], where: str) -> None:
    names = " and ".join(name for name, flag in zip(_NAMES, changed, strict=True) if flag)
    raise ValueError(
        f"{function}: every pass over the stream must give the same rows in the same order, but "
        f"{names}{where} changed after the first; do not shuffle or augment rows, nor overwrite them between "
        "solve and held_out; solve the stream again for new rows"
    )
