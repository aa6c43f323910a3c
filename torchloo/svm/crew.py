"""Worker processes that stay: forked at the first call, warm for all later ones.

Note [crew]
A process that has just been forked shares its memory with its parent, and for some time each of the
two pays for every page that it writes to; that is as long as many a batch takes. So the workers are
kept. They wait for jobs, a function and its parts, which arrive pickled; every process, the caller's
among them, takes the next part that nobody else has taken until none is left. Any error ends the crew,
and the next call forks a new one. Workers end with the process that has forked them.
"""

import io
import multiprocessing
import os
import pickle
import signal
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch
from torch import Tensor

__all__ = ["Crew", "crew_of"]

Part = TypeVar("Part")
Outcome = TypeVar("Outcome")

_crews: list["Crew"] = []  # the one in service


class Crew:
    """Processes that share out the parts of a job, the caller's and `size` others."""

    def __init__(self, size: int) -> None:
        fork = multiprocessing.get_context("fork")
        self.owner, self.taken = os.getpid(), fork.Value("q", 0)
        self.pipes: list[Connection] = []
        self.children: list[Any] = []
        for _ in range(size):
            here, there = fork.Pipe()
            self.pipes.append(here)
            # A child that held the other ends of pipes would never learn that the caller is gone.
            child = fork.Process(target=_serve, args=(there, self.pipes, self.taken), daemon=True)
            child.start()
            there.close()
            self.children.append(child)

    def serves(self, size: int) -> bool:
        """Whether it is the caller's, complete, and as large as asked."""
        mine = self.owner == os.getpid() and len(self.children) == size
        return mine and all(child.is_alive() for child in self.children)

    def run(self, function: Callable[[Part], Outcome], parts: list[Part]) -> list[Outcome]:
        """The function of every part; it and the parts must be such as can be pickled."""
        threads = torch.get_num_threads()
        self.taken.value = 0
        job = _pickled((function, parts))
        try:
            for pipe in self.pipes:
                pipe.send_bytes(job)
            torch.set_num_threads(1)
            done = dict(_done(function, parts, self.taken))
            for pipe in self.pipes:
                done.update(_received(pipe))
        except BaseException:
            self.dismiss()
            raise
        finally:
            torch.set_num_threads(threads)
        return [done[number] for number in range(len(parts))]

    def dismiss(self) -> None:
        """End the processes, whatever they do."""
        for child in self.children:
            child.terminate()
            child.join()


def crew_of(size: int) -> Crew:
    """The crew of so many processes beside the caller's: the one in service, or a new one."""
    if not _crews or not _crews[0].serves(size):
        while _crews:
            old = _crews.pop()
            if old.owner == os.getpid():  # a copy that a fork has made of a crew is not ours to end
                old.dismiss()
        _crews.append(Crew(size))
    return _crews[0]


def _serve(pipe: Connection, others: list[Connection], taken: Any) -> None:
    """The life of a worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller is told, and ends its workers
    torch.set_num_threads(1)  # the threads of the caller are not here
    for end in others:
        end.close()
    while True:
        try:
            job = pipe.recv_bytes()
        except EOFError:
            return
        pipe.send_bytes(_answer(job, taken))
        del job


def _answer(job: bytes, taken: Any) -> memoryview:
    """What a worker has done of a job, or its error."""
    try:
        function, parts = pickle.loads(job)
        with torch.inference_mode():
            return _pickled(list(_done(function, parts, taken)))
    except Exception as error:
        return _pickled(error)


def _done(
    function: Callable[[Part], Outcome], parts: list[Part], taken: Any
) -> Iterator[tuple[int, Outcome]]:
    """Numbers and outcomes of parts that nobody else has taken."""
    while True:
        with taken.get_lock():
            number, taken.value = taken.value, taken.value + 1
        if number >= len(parts):
            return
        yield number, function(parts[number])


def _received(pipe: Connection) -> list[tuple[int, Any]]:
    """What a worker has done; its error is raised here."""
    try:
        done = pickle.loads(pipe.recv_bytes())
    except (EOFError, ConnectionError):
        raise RuntimeError("a worker process died; use fewer workers, or 0") from None
    if isinstance(done, Exception):
        raise done
    return done


class _ByValue(pickle.Pickler):
    """Tensors go as arrays: torch's own way leaves files behind where a process is killed."""

    def reducer_override(self, x: Any) -> Any:
        return (torch.from_numpy, (x.detach().numpy(),)) if isinstance(x, Tensor) else NotImplemented


def _pickled(x: object) -> memoryview:
    """What is one tensor stays one."""
    buffer = io.BytesIO()
    _ByValue(buffer, pickle.HIGHEST_PROTOCOL).dump(x)
    return buffer.getbuffer()
