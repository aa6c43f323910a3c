"""Ratios on a noisy machine: both sides in one run, in turns, best of several; and peak memory."""

import argparse
import gc
from collections.abc import Callable
from pathlib import Path

from torchloo.commands.timing import best_times

__all__ = ["Table", "add_data", "best_times", "peak_bytes"]


def add_data(parser: argparse.ArgumentParser) -> None:
    """The option --data, by default shared/data beside the repository where that is."""
    beside = Path(__file__).resolve().parents[3] / "shared" / "data"
    found = beside if beside.is_dir() else None
    parser.add_argument(
        "--data", type=Path, default=found, required=found is None, help="folder of the benchmark data"
    )


def peak_bytes(call: Callable[[], object]) -> int:
    """How far the resident memory of the process rises during a call (Linux)."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts at what is resident now
    before = _status("VmRSS")
    result = call()
    peak = _status("VmHWM")
    del result
    return peak - before


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


class Table:
    """Rows of what was asked and what was measured, printed as they come."""

    def __init__(self) -> None:
        self.failed = 0
        print(f"{'what':<64}{'seconds':>10}{'ratio':>9}{'asked':>10}  met")

    def row(
        self, what: str, seconds: float | None, ratio: float, limit: float, at_least: bool = False
    ) -> None:
        met = ratio >= limit if at_least else ratio <= limit
        self.failed += not met
        shown = "" if seconds is None else f"{seconds:.3f}"
        asked = f"{'>=' if at_least else '<='} {limit:g}"
        print(f"{what:<64}{shown:>10}{ratio:>9.2f}{asked:>10}  {'yes' if met else 'NO'}", flush=True)
