"""Batches of SVMs shared out over processes."""

import multiprocessing
import os
import select
import signal
import struct
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
from svm_problems import rbf, toy
from torch.testing import assert_close

import torchloo as tl
from torchloo.svm import SVC, loo, parallel, svm_lco, svm_loo
from torchloo.svm.crew import Crew, _received, crew_of

pytestmark = pytest.mark.skipif(
    "fork" not in multiprocessing.get_all_start_methods(), reason="this system cannot fork"
)


@pytest.fixture(autouse=True)
def no_crew_before(monkeypatch):
    """Functions that a test replaces are replaced in workers only if these are forked afterwards."""
    monkeypatch.setattr(parallel, "_cores", lambda: 4)  # whatever the machine has
    crew_of(0)
    assert not multiprocessing.active_children()


def _many_problems():
    X, y = toy(33, n=40)
    K = torch.stack([rbf(X, s) for s in (0.5, 2.0)])[:, None]
    return K, y, torch.tensor([0.5, 5.0, 50.0], dtype=torch.float64)


def _names():
    return sorted(child.pid for child in multiprocessing.active_children())


def test_workers_give_what_one_process_gives():
    K, y, C = _many_problems()
    alone, shared = svm_loo(K, y, C), svm_loo(K, y, C, workers=2)
    for field in ("outputs", "certified", "resolved_by", "iterations", "kernel_columns"):
        assert_close(getattr(shared, field), getattr(alone, field))
    clusters = torch.arange(40) // 4
    together = svm_lco(K, y, C, clusters, workers=3).outputs
    assert_close(together, svm_lco(K, y, C, clusters).outputs)
    machine = SVC(tl.kernels.RBF(1.0), C=C)
    X, y = toy(33, n=40)
    with torch.no_grad():
        assert_close(machine.loo(X, y, workers=2).outputs, machine.loo(X, y).outputs)
        assert_close(machine.lco(X, y, clusters, workers=2).outputs, machine.lco(X, y, clusters).outputs)


@pytest.mark.parametrize("options", [{"method": "smo"}, {"values": False}, {"rows": torch.arange(40) < 9}])
def test_workers_take_every_option(options):
    K, y, C = _many_problems()
    alone, shared = svm_loo(K, y, C, **options), svm_loo(K, y, C, workers=2, **options)
    assert_close(shared.outputs, alone.outputs)


def test_workers_stay_for_the_next_call():
    K, y, C = _many_problems()
    svm_loo(K, y, C, workers=3)
    first = _names()
    assert len(first) == 2
    svm_lco(K, y, C, torch.arange(40) // 4, workers=3)
    assert _names() == first
    svm_loo(K, y, C, workers=2)
    assert len(_names()) == 1


def _clusters_out(*given, **options):
    return svm_lco(*given, torch.arange(40) // 4, **options)


@pytest.mark.parametrize("function", [svm_loo, _clusters_out])
@pytest.mark.parametrize(
    ("problems", "cores", "forked"), [(2, 64, 1), (3, 64, 2), (6, 4, 3), (6, 1, 0), (1, 8, 0)]
)
def test_no_more_processes_than_problems_or_cores(function, problems, cores, forked, monkeypatch):
    monkeypatch.setattr(parallel, "_cores", lambda: cores)
    K, y, _ = _many_problems()
    C = torch.arange(1, 1 + problems, dtype=torch.float64)
    received = function(K[0, 0], y, C, workers=10**6).outputs
    assert len(_names()) == forked
    assert_close(received, function(K[0, 0], y, C).outputs)


def test_a_worker_that_was_killed_between_calls_is_replaced():
    K, y, C = _many_problems()
    alone = svm_loo(K, y, C, workers=2).outputs
    (child,) = multiprocessing.active_children()
    child.kill()
    child.join()
    assert_close(svm_loo(K, y, C, workers=2).outputs, alone)
    assert _names() not in ([], [child.pid])


def test_an_error_of_a_worker_is_raised_and_leaves_no_process(monkeypatch):
    def broken(*_):
        raise ValueError("no luck")

    monkeypatch.setattr(loo, "solve_problems", broken)
    K, y, C = _many_problems()
    with pytest.raises(ValueError, match="no luck"):
        svm_loo(K, y, C, workers=2)
    assert not _names()


def _in_workers_only(monkeypatch, harm):
    """Solve as ever in this process, slowly, and do harm in the others."""

    def solve(*arguments, solve=loo.solve_problems):
        if multiprocessing.parent_process():
            harm()
        time.sleep(0.3)  # the others shall have their part
        return solve(*arguments)

    monkeypatch.setattr(loo, "solve_problems", solve)


def _fail():
    raise ArithmeticError("in a worker")


@pytest.mark.parametrize(
    ("harm", "workers", "error", "match"),
    [
        (lambda: os._exit(1), 3, RuntimeError, "a worker process died; use fewer workers"),
        (_fail, 2, ArithmeticError, "in a worker"),
    ],
    ids=["a death", "an error"],
)
def test_what_happens_in_workers_alone_is_told_of(monkeypatch, harm, workers, error, match):
    _in_workers_only(monkeypatch, harm)
    K, y, C = _many_problems()
    with pytest.raises(error, match=match):
        svm_loo(K, y, C, workers=workers)
    assert not _names()


def test_a_worker_that_died_before_its_job_arrives_is_told_of(monkeypatch):
    K, y, C = _many_problems()
    svm_loo(K, y, C, workers=2)
    (child,) = multiprocessing.active_children()
    child.kill()
    child.join()
    with monkeypatch.context() as patch:
        patch.setattr(Crew, "serves", lambda *_: True)  # as if it had died a moment later
        with pytest.raises(RuntimeError, match="a worker process died; use fewer workers"):
            svm_loo(K, y, C, workers=2)
    assert_close(svm_loo(K, y, C, workers=2).outputs, svm_loo(K, y, C).outputs)


def test_a_worker_that_dies_in_the_middle_of_its_answer_is_told_of():
    here, there = multiprocessing.Pipe()
    os.write(there.fileno(), struct.pack("!i", 100) + b"only a part")
    there.close()
    with pytest.raises(RuntimeError, match="a worker process died; use fewer workers"):
        _received(here)


class _PeculiarError(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


@pytest.mark.parametrize("kind", ["does not come back", "cannot be sent"])
def test_an_error_that_pickle_does_not_know_is_told_of(kind, monkeypatch):
    def harm():
        error = _PeculiarError("this", "that")
        if kind == "cannot be sent":
            error.lock = threading.Lock()
        raise error

    _in_workers_only(monkeypatch, harm)
    K, y, C = _many_problems()
    with pytest.raises(RuntimeError, match="_PeculiarError in a worker process: this and that"):
        svm_loo(K, y, C, workers=2)
    assert not _names()


def test_warnings_of_workers_are_given_here(monkeypatch):
    _in_workers_only(monkeypatch, lambda: warnings.warn("from a worker", RuntimeWarning, stacklevel=1))
    K, y, C = _many_problems()
    with pytest.warns(RuntimeWarning, match="from a worker"):
        svm_loo(K, y, C, workers=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="from a worker"):
            svm_loo(K, y, C, workers=2)


def test_an_interrupted_call_leaves_no_process_and_the_next_one_works(monkeypatch):
    K, y, C = _many_problems()

    def interrupt(*_):
        if not multiprocessing.parent_process():
            raise KeyboardInterrupt
        time.sleep(60)

    with monkeypatch.context() as patch:
        patch.setattr(loo, "solve_problems", interrupt)
        threads = torch.get_num_threads()
        with pytest.raises(KeyboardInterrupt):
            svm_loo(K, y, C, workers=2)
        assert torch.get_num_threads() == threads
        assert not _names()
    assert_close(svm_loo(K, y, C, workers=2).outputs, svm_loo(K, y, C).outputs)


def test_a_crew_that_could_not_be_ended_after_an_interrupt_serves_no_more(monkeypatch):
    K, y, C = _many_problems()

    def interrupt(*_):
        if not multiprocessing.parent_process():
            raise KeyboardInterrupt
        time.sleep(2)
        raise ArithmeticError("of another call")

    with monkeypatch.context() as patch:
        patch.setattr(loo, "solve_problems", interrupt)
        patch.setattr(Crew, "dismiss", lambda *_: None)  # as a second interrupt would do
        with pytest.raises(KeyboardInterrupt):
            svm_loo(K, y, C, workers=2)
    assert_close(svm_loo(K, y, C, workers=2).outputs, svm_loo(K, y, C).outputs)
    assert len(_names()) == 1


def test_a_forked_copy_of_the_process_has_a_crew_of_its_own():
    K, y, C = _many_problems()
    expected = svm_loo(K, y, C, workers=2).outputs
    here, there = multiprocessing.Pipe()

    def elsewhere():
        torch.set_num_threads(1)
        there.send(svm_loo(K, y, C, workers=2).outputs.numpy())

    copy = multiprocessing.get_context("fork").Process(target=elsewhere)
    copy.start()
    assert here.poll(60), "no answer"
    assert_close(torch.from_numpy(here.recv()), expected)
    copy.join(60)
    assert_close(svm_loo(K, y, C, workers=2).outputs, expected)


def test_threads_that_call_at_once_get_each_its_own():
    K, y, C = _many_problems()
    calls = [(K * scale, y, C) for scale in (1.0, 2.0, 4.0)]
    expected = [svm_loo(*call).outputs for call in calls]
    received = {}

    def work(number):
        received[number] = [svm_loo(*calls[number], workers=2).outputs for _ in range(3)]

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for number, outputs in enumerate(expected):
        assert_close(torch.stack(received[number]), outputs.expand(3, *outputs.shape))


def test_workers_are_refused_where_processes_may_have_no_children():
    K, y, C = _many_problems()
    here, there = multiprocessing.Pipe()

    def elsewhere():
        torch.set_num_threads(1)
        try:
            svm_loo(K, y, C, workers=2)
        except ValueError as error:
            there.send(str(error))

    copy = multiprocessing.get_context("fork").Process(target=elsewhere, daemon=True)
    copy.start()
    assert here.poll(60), "no answer"
    assert "svm_loo: workers must be 0 in a process that may have no children" in here.recv()
    copy.join(60)


@pytest.mark.skipif(not Path("/dev/fd").exists(), reason="needs a list of open files")
def test_a_pipe_that_the_caller_closes_is_closed():
    read, write = os.pipe()
    svm_loo(*_many_problems(), workers=2)
    os.close(write)
    assert select.select([read], [], [], 10)[0], "a worker holds the pipe open"
    assert os.read(read, 1) == b""
    os.close(read)


_PROGRAM = """
import os, signal, multiprocessing, torch
from torchloo.svm import parallel, svm_loo
parallel._cores = lambda: 4
{begin}
K, y = torch.eye(6, dtype=torch.float64), torch.tensor([1.0, -1.0] * 3, dtype=torch.float64)
svm_loo(K, y, torch.ones(4, dtype=torch.float64), workers=3)
print(*(child.pid for child in multiprocessing.active_children()), flush=True)
{end}
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc to look for processes")
@pytest.mark.parametrize(
    ("begin", "end"),
    [
        pytest.param("", "", id="ends"),
        pytest.param("", "os.kill(os.getpid(), signal.SIGKILL)", id="is killed"),
        pytest.param("signal.signal(signal.SIGTERM, lambda *_: None)", "", id="does not end when asked to"),
    ],
)
def test_workers_end_with_a_program_that(begin, end):
    program = _PROGRAM.format(begin=begin, end=end)
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert run.returncode in (0, -signal.SIGKILL), run.stderr
    names = [int(name) for name in run.stdout.split()]
    assert len(names) == 2
    deadline = time.monotonic() + 30
    while any(_runs(name) for name in names):
        assert time.monotonic() < deadline, "a worker has outlived its program"
        time.sleep(0.05)


def _runs(name):
    try:
        os.kill(name, 0)
        state = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[0]
    except (ProcessLookupError, FileNotFoundError):
        return False
    return state != "Z"  # where nobody collects orphans they stay in the table


@pytest.mark.parametrize("workers", [-1, 1.5, True, "two"])
def test_workers_must_be_a_number_of_processes(workers):
    K, y, C = _many_problems()
    with pytest.raises(ValueError, match="svm_loo: workers must be a number of processes"):
        svm_loo(K, y, C, workers=workers)


def test_workers_refuse_gradients():
    K, y, C = _many_problems()
    with pytest.raises(ValueError, match="svm_lco: workers must be 0 where gradients are asked for"):
        svm_lco(K.requires_grad_(), y, C, torch.arange(40) // 4, workers=2)
    with torch.no_grad():
        assert_close(svm_loo(K, y, C, workers=2).outputs, svm_loo(K.detach(), y, C).outputs)
