"""Worker processes that stay: forked at the first call, warm for all later ones.

Note [crew]
A process that has just been forked shares its memory with its parent, and for some time each of the
two pays for every page that it writes to; that is as long as many a batch takes. So the workers are
kept. They wait for jobs, a function and its parts, which arrive pickled; every process, the caller's
among them, takes the next part that nobody else has taken until none is left. Any error ends the crew,
and the next call forks a new one. Threads that call at once wait for each other. Workers end with the
process that has forked them, and keep none of its files, pipes and sockets open.
"""

import contextlib
import io
import multiprocessing
import os
import pickle
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

__all__ = ["Crew", "by_crew", "crew_of"]

Part = TypeVar("Part")
Outcome = TypeVar("Outcome")

_DEATH = "a worker process died; use fewer workers, or 0"

_crews: list["Crew"] = []  # the one in service
_turns: dict[int, threading.Lock] = {}  # by process: a copy of this one must not wait for threads of it
_warned: dict[str | tuple[str, type[Warning], int], int] = {}  # so that none is repeated


class _Warned(NamedTuple):
    """A warning and where it was given, as `warnings.warn_explicit` wants it."""

    message: str
    category: type[Warning]
    filename: str
    lineno: int


class Crew:
    """Processes that share out the parts of a job, the caller's and `size` others."""

    def __init__(self, size: int) -> None:
        fork, files = multiprocessing.get_context("fork"), _open_files()
        self.owner, self.taken, self.idle = os.getpid(), fork.Value("q", 0), True
        self.pipes: list[Connection] = []
        self.children: list[Any] = []
        for _ in range(size):
            here, there = fork.Pipe()
            self.pipes.append(here)
            # A child that held the other ends of pipes would never learn that the caller is gone.
            child = fork.Process(target=_serve, args=(there, self.pipes, files, self.taken), daemon=True)
            with warnings.catch_warnings():
                # Python 3.12 and later warn of any fork beside threads; a child has one thread, and uses
                # none of the caller's.
                warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
                child.start()
            there.close()
            self.children.append(child)

    def serves(self, size: int) -> bool:
        """Whether it is the caller's, complete, as large as asked, and done with its last job."""
        mine = self.owner == os.getpid() and len(self.children) == size
        return mine and self.idle and all(child.is_alive() for child in self.children)

    def run(self, function: Callable[[Part], Outcome], parts: list[Part]) -> list[Outcome]:
        """The function of every part; it and the parts must be such as can be pickled."""
        threads = torch.get_num_threads()
        self.taken.value, self.idle = 0, False
        try:
            self._send(_pickled((function, parts)))
            torch.set_num_threads(1)
            done = dict(_done(function, parts, self.taken))
            answers = [_received(pipe) for pipe in self.pipes]
            self.idle = True
        except BaseException:
            self.dismiss()
            raise
        finally:
            torch.set_num_threads(threads)
        for more, warned in answers:
            done.update(more)
            for x in warned:
                warnings.warn_explicit(x.message, x.category, x.filename, x.lineno, registry=_warned)
        return [done[number] for number in range(len(parts))]

    def _send(self, job: memoryview) -> None:
        try:
            for pipe in self.pipes:
                pipe.send_bytes(job)
        except OSError:
            raise RuntimeError(_DEATH) from None

    def dismiss(self) -> None:
        """End the processes, whatever they do."""
        for child, pipe in zip(self.children, self.pipes, strict=True):
            child.kill()
            child.join()
            pipe.close()


def by_crew(function: Callable[[Part], Outcome], parts: list[Part], size: int) -> list[Outcome]:
    """The function of every part, by this process and `size` others."""
    with _turns.setdefault(os.getpid(), threading.Lock()):
        return crew_of(size).run(function, parts)


def crew_of(size: int) -> Crew:
    """The crew of so many processes beside the caller's: the one in service, or a new one."""
    if not _crews or not _crews[0].serves(size):
        while _crews:
            old = _crews.pop()
            if old.owner == os.getpid():  # a copy that a fork has made of a crew is not ours to end
                old.dismiss()
        _crews.append(Crew(size))
    return _crews[0]


def _serve(pipe: Connection, others: list[Connection], files: list[int], taken: Any) -> None:
    """The life of a worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller is told, and ends its workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a handler of the caller might not end the process
    torch.set_num_threads(1)  # the threads of the caller are not here
    for end in others:
        end.close()
    _let_go(files)
    with contextlib.suppress(EOFError, OSError):  # the caller is gone
        while True:
            pipe.send_bytes(_answer(pipe.recv_bytes(), taken))


def _open_files() -> list[int]:
    """The numbers of files, pipes and sockets that this process has open, but for the standard ones."""
    found: list[int] = []
    with contextlib.suppress(OSError):  # there may be no such list
        for number in map(int, os.listdir("/dev/fd")):
            with contextlib.suppress(OSError):  # that of the list itself is closed by now
                os.fstat(number)
                found.append(number)
    return [number for number in found if number > 2]


def _let_go(files: list[int]) -> None:
    """Leave the files of the caller: nobody would learn that it has closed a pipe which is open here.

    Their numbers stay in use, so that objects which will close them close nothing else.
    """
    with open(os.devnull, "r+b", buffering=0) as nothing:
        for number in files:
            os.dup2(nothing.fileno(), number)


def _answer(job: bytes, taken: Any) -> memoryview:
    """What a worker has done of a job, and its warnings; or its error."""
    try:
        function, parts = pickle.loads(job)
        del job  # as large as its parts
        with torch.inference_mode(), warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")  # the caller knows what is to be told
            done = list(_done(function, parts, taken))
        return _pickled((done, [_Warned(str(x.message), x.category, x.filename, x.lineno) for x in warned]))
    except Exception as error:
        return _pickled_error(error)


def _pickled_error(error: Exception) -> memoryview:
    """The error, or one that says the same where this cannot be sent."""
    try:
        pickled = _pickled(error)
        pickle.loads(pickled)
        return pickled
    except Exception:
        return _pickled(RuntimeError(f"{type(error).__name__} in a worker process: {error}"))


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


def _received(pipe: Connection) -> tuple[list[tuple[int, Any]], list[_Warned]]:
    """What a worker has done, and its warnings; its error is raised here."""
    try:
        answer = pickle.loads(pipe.recv_bytes())
    except (EOFError, OSError):
        raise RuntimeError(_DEATH) from None
    if isinstance(answer, Exception):
        raise answer
    return answer


class _ByValue(pickle.Pickler):
    """Tensors go as arrays: torch's own way leaves files behind where a process is killed."""

    def reducer_override(self, x: Any) -> Any:
        return (torch.from_numpy, (x.detach().numpy(),)) if isinstance(x, Tensor) else NotImplemented


def _pickled(x: object) -> memoryview:
    """What is one tensor stays one."""
    buffer = io.BytesIO()
    _ByValue(buffer, pickle.HIGHEST_PROTOCOL).dump(x)
    return buffer.getbuffer()
