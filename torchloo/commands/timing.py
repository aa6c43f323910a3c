"""Times on a noisy machine: all sides in one run, in turns, the best of several."""

import time
from collections.abc import Callable

import torch

__all__ = ["best_times"]


def best_times(
    sides: dict[str, Callable[[], object]], repeats: int, on_turn: Callable[[], object] | None = None
) -> dict[str, float]:
    """Seconds of every side, the best of `repeats` turns, after one turn that does not count.

    Args:
        sides: what to time, by name; each is called once in every turn.
        repeats: number of turns that count.
        on_turn: called after every turn, the first included.
    """
    times = dict.fromkeys(sides, float("inf"))
    for turn in range(repeats + 1):
        for name, call in sides.items():
            _wait()
            start = time.perf_counter()
            result = call()
            _wait()
            elapsed = time.perf_counter() - start
            del result
            if turn:
                times[name] = min(times[name], elapsed)
        if on_turn is not None:
            on_turn()
    return times


def _wait() -> None:
    """A GPU works on after its calls have returned."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
