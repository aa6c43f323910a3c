"""The 13 IDA benchmark sets (Raetsch, Onoda and Mueller 2001) with their splits."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

SETS = (
    "banana", "breast_cancer", "diabetis", "german", "heart", "image", "ringnorm", "flare_solar", "splice",
    "thyroid", "titanic", "twonorm", "waveform",
)  # fmt: skip
LARGE = ("image", "splice")  # those that take most of the time
SMALL = ("heart", "thyroid", "titanic")  # for quick forms


class Set(NamedTuple):
    """One benchmark set."""

    X: Tensor
    """(n, d), as the archive has it: nothing is scaled here."""
    y: Tensor
    """-1 and +1, (n,)."""
    splits: list[tuple[Tensor, Tensor]]
    """Rows to train on and to test on: the predefined splits that are available, then random ones."""
    predefined: int
    """How many of the splits are predefined ones."""

    def rows(self, split: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """X and y to train on, X and y to test on."""
        train, test = self.splits[split]
        return self.X[train], self.y[train], self.X[test], self.y[test]


def load(folder: Path, name: str, most: int = 100) -> Set:
    """A set with at most `most` splits, and never more than the papers have: 100, of image and splice 20."""
    file = np.load(folder / "ida" / f"{name}.npz", allow_pickle=False)
    rows = np.arange(len(file["y"]))
    most = min(most, len(file["train_own"]))
    pairs = list(zip(file["train"], file["test"], strict=True))
    pairs += [(train, np.setdiff1d(rows, train)) for train in file["train_own"]]
    splits = [tuple(torch.from_numpy(part).long() for part in pair) for pair in pairs[:most]]
    X = torch.from_numpy(file["X"])
    y = torch.from_numpy(file["y"]).double()
    return Set(X, y, splits, min(most, len(file["train"])))
