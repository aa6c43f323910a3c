"""Independent problems shared out over threads or processes: small operations leave other cores idle."""

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import TypeVar

import torch
from torch import Tensor

from torchloo.svm.crew import by_crew

__all__ = ["check_workers", "in_parallel", "share_of", "without_graph"]

Part = TypeVar("Part")
Outcome = TypeVar("Outcome")

_PARTS = 2  # for each worker, so that one with easy problems takes more of them


def check_workers(function: str, workers: int, *tensors: Tensor) -> None:
    """Refuse a number of worker processes that cannot be had, or tensors that they cannot serve."""
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 0:
        raise ValueError(f"{function}: workers must be a number of processes, 0 or more, got {workers!r}")
    if not workers:
        return
    if "fork" not in multiprocessing.get_all_start_methods():
        raise ValueError(f"{function}: workers must be 0 on a system that cannot fork, got {workers}")
    if workers > 1 and multiprocessing.current_process().daemon:
        raise ValueError(
            f"{function}: workers must be 0 in a process that may have no children, such as a worker of a "
            f"DataLoader, got {workers}"
        )
    if any(x.device.type != "cpu" for x in tensors):
        raise ValueError(f"{function}: workers must be 0 for tensors that are not on a CPU, got {workers}")
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise ValueError(
            f"{function}: workers must be 0 where gradients are asked for, got {workers}; "
            "use torch.no_grad() if they are not"
        )


def without_graph(normal: bool) -> AbstractContextManager[object]:
    """No gradients; where `normal` tensors are not needed, less work for each operation, too.

    The outcomes then are of use for gradients only once copied, as `torch.stack` does.
    """
    return torch.no_grad() if normal else torch.inference_mode()


def share_of(count: int, workers: int) -> int:
    """How many of so many problems one part may have, so that all workers have some; without workers all."""
    return -(-count // (_PARTS * min(workers, _cores()))) if workers else count


def in_parallel(function: Callable[[Part], Outcome], parts: list[Part], workers: int = 0) -> list[Outcome]:
    """The function of every part in the grad mode of the caller, by worker processes or on torch's threads.

    Threads wait for the interpreter as often as they compute; processes do not, but serve only functions
    and parts that can be pickled.
    """
    if len(parts) == 1:
        return [function(parts[0])]
    if workers:
        return by_crew(function, parts, min(workers, len(parts), _cores()) - 1)
    return _on_threads(function, parts)


def _cores() -> int:
    """How many processes can run at once: more of them would only wait for each other."""
    if hasattr(os, "sched_getaffinity"):  # not on every system
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _on_threads(function: Callable[[Part], Outcome], parts: list[Part]) -> list[Outcome]:
    """Each thread runs its operations alone; torch's own threads rest meanwhile, for others too."""
    threads = torch.get_num_threads()
    if threads == 1:
        return [function(part) for part in parts]

    normal = not torch.is_inference_mode_enabled()

    def alone(part: Part) -> Outcome:
        torch.set_num_threads(1)
        with without_graph(normal):
            return function(part)

    try:
        with ThreadPoolExecutor(min(threads, len(parts))) as pool:
            return list(pool.map(alone, parts))
    finally:
        torch.set_num_threads(threads)
