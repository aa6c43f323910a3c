"""Independent problems shared out over threads: small operations leave all cores but one idle."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

__all__ = ["on_threads", "share_out"]

Item = TypeVar("Item")
Part = TypeVar("Part")
Result = TypeVar("Result")

_PARTS = 2  # for each thread, so that one with easy problems takes more of them


def share_out(items: Sequence[Item], most: int, device: torch.device) -> list[Sequence[Item]]:
    """Consecutive items in parts of at most `most`; on a CPU enough parts for all threads."""
    shares = _PARTS * torch.get_num_threads() if device.type == "cpu" else 1
    size = max(1, min(most, -(-len(items) // shares)))
    return [items[i : i + size] for i in range(0, len(items), size)]


def on_threads(function: Callable[[Part], Result], parts: list[Part]) -> list[Result]:
    """The function of every part, without a graph, on as many threads as torch may use.

    Each thread runs its operations alone; torch's own threads rest meanwhile, also for threads that
    others start during the call.
    """
    threads = torch.get_num_threads()
    if threads == 1 or len(parts) == 1:
        return [function(part) for part in parts]

    def alone(part: Part) -> Result:
        torch.set_num_threads(1)
        with torch.no_grad():
            return function(part)

    try:
        with ThreadPoolExecutor(min(threads, len(parts))) as pool:
            return list(pool.map(alone, parts))
    finally:
        torch.set_num_threads(threads)
