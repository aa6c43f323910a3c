"""What a user does in the middle of a search."""

from collections.abc import Callable
from itertools import count

from torch import Tensor

import torchloo as tl


def interrupted_press(calls: int) -> Callable[[tl.HeldOut], Tensor]:
    """PRESS that is interrupted, as by Ctrl-C, after a number of calls."""
    asked = count(1)

    def criterion(held_out: tl.HeldOut) -> Tensor:
        if next(asked) > calls:
            raise KeyboardInterrupt
        return held_out.residuals.square().sum()

    return criterion
