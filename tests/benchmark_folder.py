"""The folder of the benchmark data, which are not part of the repository."""

import os
from pathlib import Path

import pytest

__all__ = ["DATA", "needs_data"]

DATA = Path(os.environ.get("TORCHLOO_DATA", Path(__file__).parents[2] / "shared" / "data"))
needs_data = pytest.mark.skipif(
    not (DATA / "ida").is_dir(), reason="needs the benchmark data: set TORCHLOO_DATA to their folder"
)
