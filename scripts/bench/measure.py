"""Ratios on a noisy machine: both sides in one run, in turns, best of several; peak memory; operations."""

import argparse
import gc
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from torchloo.cli.bench import best_times

__all__ = ["Table", "add_data", "best_times", "operations", "peak_bytes"]


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


def operations(call: Callable[[], object]) -> tuple[int, int]:
    """Operations that a call dispatches, views left out, and how often it waits for values of a tensor.

    What waits: scalars that are read, data-dependent shapes (nonzero, boolean masks as an index), `equal`,
    checks of a factorisation, and `tolist` and `numpy`, which are not dispatched at all.
    """
    with _Conversions() as conversions, _Dispatched() as dispatched:
        call()
    return dispatched.operations, dispatched.waits + conversions.waits


class _Conversions(TorchFunctionMode):
    """Counts conversions to lists and arrays."""

    waits = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.waits += func in (torch.Tensor.tolist, torch.Tensor.numpy)
        return func(*args, **(kwargs or {}))


class _Dispatched(TorchDispatchMode):
    """Counts dispatched operations, and those among them that wait."""

    operations = 0
    waits = 0
    waiting = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "_linalg_check_errors")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += not func.is_view
        name = func.overloadpacket.__name__
        masked = name.startswith("index") and any(_is_mask(index) for index in _indices(args))
        self.waits += masked or name in self.waiting
        return func(*args, **(kwargs or {}))


def _indices(args: tuple[Any, ...]) -> list[Any]:
    return args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else []


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype == torch.bool


class Table:
    """A table of measured ratios and their limits, printed row by row."""

    def __init__(self, case: str = "") -> None:
        self.failed, self._case = 0, case
        print(f"{'what':<64}{'seconds':>10}{'ratio':>9}{'limit':>10}  met")

    def wants(self, what: str) -> bool:
        """Whether rows of this name are selected."""
        return self._case in what

    def row(
        self,
        what: str,
        seconds: float | None,
        ratio: float,
        limit: float,
        at_least: bool = False,
    ) -> None:
        met = ratio >= limit if at_least else ratio <= limit
        self.failed += not met
        shown = "" if seconds is None else f"{seconds:.3f}"
        bound = f"{'>=' if at_least else '<='} {limit:g}"
        print(f"{what:<64}{shown:>10}{ratio:>9.2f}{bound:>10}  {'yes' if met else 'NO'}", flush=True)

    def info(self, what: str, seconds: float, ratio: float) -> None:
        """A row for information, without a limit."""
        print(f"{what:<64}{seconds:>10.3f}{ratio:>9.2f}", flush=True)

    def agreement(
        self,
        what: str,
        received: Iterable[torch.Tensor],
        expected: Iterable[torch.Tensor],
        limit: float,
    ) -> None:
        """The largest difference of two sides, each tensor relative to its largest entry."""
        errors = []
        for ours, theirs in zip(received, expected, strict=True):
            assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
            error = (ours - theirs).abs().max().double()
            errors.append(error / theirs.abs().max())
        error = torch.stack(errors).max().item()
        met = error <= limit  # NaN is not
        self.failed += not met
        print(f"  {what:<71}{error:>10.1e}{f'<= {limit:.0e}':>10}  {'yes' if met else 'NO'}", flush=True)

    def missing(self, what: str) -> None:
        """A row that cannot be measured; it counts as missed."""
        self.failed += 1
        print(f"{what:<64}{'not there yet':>29}  NO", flush=True)
