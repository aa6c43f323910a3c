"""Independent problems shared out over threads or processes: small operations leave other cores idle."""

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch
from torch import Tensor

__all__ = ["check_workers", "in_parallel", "share_out", "without_graph"]

Item = TypeVar("Item")
Part = TypeVar("Part")
Outcome = TypeVar("Outcome", bound=tuple[Any, ...])

_PARTS = 2  # for each thread, so that one with easy problems takes more of them


def check_workers(function: str, workers: int, *tensors: Tensor) -> None:
    """Refuse a number of worker processes that cannot be had, or tensors that they cannot serve."""
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 0:
        raise ValueError(f"{function}: workers must be a number of processes, 0 or more, got {workers!r}")
    if not workers:
        return
    if "fork" not in multiprocessing.get_all_start_methods():
        raise ValueError(f"{function}: workers must be 0 on a system that cannot fork, got {workers}")
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


def share_out(
    items: Sequence[Item], most: int, device: torch.device, workers: int = 0
) -> list[Sequence[Item]]:
    """Consecutive items in parts of at most `most`; on a CPU enough parts for all threads or workers."""
    shares = _PARTS * (workers or torch.get_num_threads()) if device.type == "cpu" else 1
    size = max(1, min(most, -(-len(items) // shares)))
    return [items[i : i + size] for i in range(0, len(items), size)]


def in_parallel(
    function: Callable[[Part], list[Outcome]], parts: list[Part], workers: int = 0
) -> list[list[Outcome]]:
    """The function of every part in the grad mode of the caller, by worker processes or on torch's threads.

    Outcomes are tuples of tensors and None. Threads wait for the interpreter as often as they compute;
    processes do not, but have to be forked.
    """
    if len(parts) == 1:
        return [function(parts[0])]
    if workers:
        return _on_processes(function, parts, min(workers, len(parts)))
    return _on_threads(function, parts)


def _on_threads(function: Callable[[Part], list[Outcome]], parts: list[Part]) -> list[list[Outcome]]:
    """Each thread runs its operations alone; torch's own threads rest meanwhile, for others too."""
    threads = torch.get_num_threads()
    if threads == 1:
        return [function(part) for part in parts]

    normal = not torch.is_inference_mode_enabled()

    def alone(part: Part) -> list[Outcome]:
        torch.set_num_threads(1)
        with without_graph(normal):
            return function(part)

    try:
        with ThreadPoolExecutor(min(threads, len(parts))) as pool:
            return list(pool.map(alone, parts))
    finally:
        torch.set_num_threads(threads)


def _on_processes(
    function: Callable[[Part], list[Outcome]], parts: list[Part], workers: int
) -> list[list[Outcome]]:
    """This process and forked children take one part after another; nothing is copied to a child."""
    fork = multiprocessing.get_context("fork")
    taken = fork.Value("q", 0)
    pipes, children = [], []
    threads = torch.get_num_threads()
    try:
        for _ in range(workers - 1):
            here, there = fork.Pipe(duplex=False)
            child = fork.Process(target=_work, args=(function, parts, taken, there), daemon=True)
            child.start()
            there.close()
            pipes.append(here)
            children.append(child)
        torch.set_num_threads(1)
        done = dict(_done(function, parts, taken))
        for pipe in pipes:
            done.update(_received(pipe))
    finally:
        torch.set_num_threads(threads)
        for child in children:
            child.terminate()  # of no effect on one that has ended
            child.join()
    return [done[number] for number in range(len(parts))]


def _work(function: Callable[[Any], list[Any]], parts: list[Any], taken: Any, pipe: Connection) -> None:
    """The life of a child: parts that nobody else has taken; what it sends is a list, or an error."""
    torch.set_num_threads(1)  # the threads of the parent are not here
    try:
        # Arrays are sent by value; tensors would go through files that outlive an interrupted child.
        done = _done(function, parts, taken)
        pipe.send([(number, [_mapped(Tensor.numpy, x) for x in outcomes]) for number, outcomes in done])
    except Exception as error:
        pipe.send(error)


def _done(
    function: Callable[[Part], list[Outcome]], parts: list[Part], taken: Any
) -> Iterator[tuple[int, list[Outcome]]]:
    """Numbers and outcomes of parts that nobody else has taken."""
    while True:
        with taken.get_lock():
            number, taken.value = taken.value, taken.value + 1
        if number >= len(parts):
            return
        yield number, function(parts[number])


def _received(pipe: Connection) -> list[tuple[int, Any]]:
    """What a child has done; its error is raised here."""
    try:
        done = pipe.recv()
    except EOFError:
        raise RuntimeError("a worker process died; use fewer workers, or 0") from None
    if isinstance(done, Exception):
        raise done
    return [
        (number, [_mapped(torch.from_numpy, outcome) for outcome in outcomes]) for number, outcomes in done
    ]


def _mapped(function: Callable[[Any], Any], outcome: Any) -> Any:
    """The outcome with all but None replaced by the function of it."""
    return type(outcome)(*(None if x is None else function(x) for x in outcome))
