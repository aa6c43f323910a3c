"""Two processes give what one gives, gradients too; an error in one is told by both."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import distributed_worker as worker
import pytest
import torch
from test_streaming import assert_same

import torchloo as tl

HERE = Path(__file__).parent
PARTS = (slice(0, worker.FIRST), slice(worker.FIRST, worker.ROWS))
ENVIRONMENT = os.environ | {
    "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE)]),
    "OMP_NUM_THREADS": "1",
}


def run(*commands):
    """Exit status and output of commands that run side by side; all they started is ended with them."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    jobs = [subprocess.Popen(c, env=ENVIRONMENT, start_new_session=True, **pipes) for c in commands]
    try:
        outputs = [job.communicate(timeout=150)[0] for job in jobs]
    except subprocess.TimeoutExpired:
        for job in jobs:
            os.killpg(job.pid, signal.SIGKILL)
        raise
    return [job.returncode for job in jobs], "\n".join(outputs)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What both processes report."""
    folder = tmp_path_factory.mktemp("processes")
    command = [sys.executable, str(HERE / "distributed_worker.py"), str(folder)]
    status, output = run([*command, "0"], [*command, "1"])
    assert status == [0, 0], output
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


def of_rows(held_out, part):
    """The rows of one process, of a HeldOut without an axis of regularisations."""
    fields = [t[part] if isinstance(t, torch.Tensor) else t for t in held_out]
    return tl.HeldOut(*(t.detach() if isinstance(t, torch.Tensor) else t for t in fields))


def digits(name):
    """Where 1 - h is 1e-8, the problem itself leaves no more than 8 digits."""
    return 1e-7 if "refitted" in name else 1e-10


def assert_gradients(received, expected, part):
    for name, gradient in expected.items():
        b = gradient[part] if name == "X" else gradient
        torch.testing.assert_close(
            received[name], b, rtol=0, atol=1e-7 * gradient.abs().max().item(), msg=name
        )


@pytest.mark.parametrize("single", [True, False], ids=["loo", "lco"])
@pytest.mark.parametrize("name", worker.MACHINES)
def test_sharded_rows_and_gradients_equal_those_of_one_process(results, name, single):
    machine, (X, Y, weight) = worker.MACHINES[name](), worker.rows()
    X.requires_grad_()
    expected = machine.loo(X, Y, weight) if single else machine.lco(X, Y, worker.clusters(), weight)
    tl.criteria.press(expected).backward()
    if "refitted" in name and single:
        assert expected.refitted[PARTS[0]].any()
        assert expected.refitted[PARTS[1]].any()
    for rank, part in enumerate(PARTS):
        received, gradients = results[rank]["sharded"][name, single]
        assert_same(received, of_rows(expected, part), digits(name))
        assert_gradients(gradients, worker.gradients(machine, X), part)


@pytest.mark.parametrize("name", worker.MACHINES)
def test_sharded_streams_equal_the_whole(results, name):
    machine = worker.MACHINES[name]()
    rows = worker.rows()
    whole = machine.loo(*rows)
    by_cluster = machine.lco(*rows[:2], worker.clusters(), rows[2])
    path = machine.path(*rows[:2], worker.REGS, weight=rows[2])
    outputs = machine.fit(*rows)(rows[0]).detach()
    for rank, part in enumerate(PARTS):
        received = results[rank]["streamed"][name]
        assert_same(received["loo"], of_rows(whole, part), digits(name))
        assert_same(received["lco"], of_rows(by_cluster, part), digits(name))
        for k in range(len(worker.REGS)):
            one = tl.HeldOut(*(t[k] if isinstance(t, torch.Tensor) else t for t in path))
            mine = tl.HeldOut(*(t[k] if isinstance(t, torch.Tensor) else t for t in received["path"]))
            assert_same(mine, of_rows(one, part), digits(name))
        torch.testing.assert_close(received["fit"], outputs, rtol=0, atol=1e-10)


def test_shards_stay_on_the_device_of_their_rows(results):
    """Whatever the default device."""
    for rank in range(2):
        received = results[rank]["meta"]
        for name in ("sharded", "streamed", "gathered"):
            torch.testing.assert_close(received[name], results[rank][name], msg=name)
        assert received["share"] == results[rank]["shared_out"]["share"]


def test_one_loss_of_gathered_rows_has_the_gradient_of_one_process(results):
    machine, (X, Y, weight) = worker.MACHINES["sparse"](), worker.rows()
    X.requires_grad_()
    loss = tl.criteria.mse(machine.lco(X, Y, worker.clusters(), weight)) ** 2
    loss.backward()
    for rank, part in enumerate(PARTS):
        received, gradients, clusters, refitted = results[rank]["gathered"]
        torch.testing.assert_close(received, loss.detach())
        assert_gradients(gradients, worker.gradients(machine, X), part)
        assert torch.equal(clusters, worker.clusters())
        assert not refitted.any()


def test_gradients_are_added_in_the_dtype_of_each_parameter(results):
    for rank in range(2):
        for received, total, dtype in zip(
            results[rank]["added"], (3.0, 5.0, 4.0), worker.DTYPES, strict=True
        ):
            assert torch.equal(received, torch.full((2,), total, dtype=dtype))


def test_shared_items_come_back_in_order(results):
    for rank in range(2):
        assert results[rank]["shared_out"]["share"] == [(k, k % 2) for k in range(5)]


def test_shared_points_of_an_svm_equal_those_of_one_process(results):
    X, y = worker.labels()
    svc = tl.SVC(tl.kernels.RBF(3.0), C=2.0)
    expected = svc.loo(X, y)
    tl.criteria.hinge(expected).backward()
    signs = svc.loo(X, y, method="smo", values=False)
    columns = svc.loo(X, torch.stack([y, y.roll(7)], -1))
    for rank in range(2):
        received = results[rank]["shared_out"]
        outputs, certified, resolved_by, gradient = received["svc"]
        torch.testing.assert_close(outputs, expected.outputs.detach())
        assert torch.equal(certified, expected.certified)
        assert torch.equal(resolved_by, expected.resolved_by)
        torch.testing.assert_close(gradient, svc.log_C.grad)
        torch.testing.assert_close(received["svc gradient"], svc.kernel.log_lengthscale.grad)
        assert torch.equal(received["signs"][0], signs.outputs)
        assert torch.equal(received["signs"][1], signs.errors)
        outputs, errors, refitted = received["columns"]
        torch.testing.assert_close(outputs, columns.outputs.detach())
        assert torch.equal(errors, columns.errors)
        assert torch.equal(refitted, columns.refitted)


def test_shared_grids_and_splits_choose_what_one_process_chooses(results):
    X, y = worker.labels()
    grid = {"reg": [0.1, 1.0, 10.0], "lengthscale": [1.0, 2.0, 4.0, 8.0]}
    machine = tl.LSSVM(tl.kernels.RBF())
    chosen = tl.select(machine, X, y, "press", "grid", grid=grid, progress=False)
    splits = tl.splits.k_fold(40, 5, generator=torch.Generator().manual_seed(0))
    estimate = tl.validate(machine, X, y, splits, search="grid", grid=grid, progress=False)
    for rank in range(2):
        value, evaluations, outputs = results[rank]["shared_out"]["select"]
        assert value == pytest.approx(chosen.value)
        assert evaluations == chosen.evaluations
        torch.testing.assert_close(outputs, chosen.machine(X).detach())
        scores, table = results[rank]["shared_out"]["validate"]
        torch.testing.assert_close(scores, estimate.scores)
        assert [row["split"] for row in table] == [row["split"] for row in estimate.table]
        assert [row["reg"] for row in table] == pytest.approx([row["reg"] for row in estimate.table])


def test_an_interrupted_process_gives_the_splits_it_came_to(results):
    X, y = worker.labels()
    splits = tl.splits.k_fold(40, 5, generator=torch.Generator().manual_seed(0))
    options = {"search": "grid", "grid": {"reg": [0.1, 1.0]}, "metric": "mse", "progress": False}
    estimate = tl.validate(tl.LSSVM(tl.kernels.RBF(3.0)), X, y, splits, **options)
    for rank in range(2):
        table = results[rank]["interrupted"]
        assert [row["split"] for row in table] == [0, 1, 2, 4]
        expected = [estimate.table[k]["score"] for k in (0, 1, 2, 4)]
        assert [row["score"] for row in table] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("rows", "process 1 failed with ValueError: lssvm: X must be finite", "ValueError: lssvm: X"),
        ("stream", "process 1 failed with ValueError: .* at row 3", "ValueError: .* at row 3"),
        ("clusters", "ValueError: .*cluster 0 has some in process 0 and in process 1", None),
        ("streamed clusters", "ValueError: .*cluster 0 has some in process 0 and in process 1", None),
        ("machine", "ValueError: .*log_reg of process 1 differs from that of process 0", None),
        ("machine's name", "ValueError: .*kind of process 1 differs .* RLS.* from LSSVM", None),
        ("kernel's name", "ValueError: .*kind of process 1 differs .* Matern.* from .* RBF", None),
        ("permuted basis", "ValueError: .*basis of process 1 differs from that of process 0", None),
        ("basis", "ValueError: .*basis must be a tensor, the same in all processes", None),
        ("one basis", "ValueError: .*basis must be a tensor, .* as in process 1", None),
        ("kernel", "TypeError: .*SparseLSSVM", None),
        ("columns", "ValueError: .*features, outputs, dtype and bias must be the same", None),
        ("stream's outputs", "ValueError: .*features, outputs, dtype and bias must be the same", None),
        ("empty shard", "process 1 failed with ValueError: lssvm: X must be .*one row", "lssvm: X"),
        ("call", r"process 0 called distributed\.loo of tensors and process 1 .*\.lco of tensors$", None),
        ("stream and tensors", "process 0 called .*loo of a Stream and process 1 .*loo of tensors$", None),
        ("loo and gather", r"process 0 called .*loo of tensors and process 1 .*distributed\.gather$", None),
        ("share and select", r"process 0 called distributed\.share and process 1 .*\.select$", None),
        ("backward and sum", r"process 0 called backward of .*loo .* and process 1 .*sum_gradients$", None),
        ("held_out and path", r"process 0 called StreamFit\.held_out and .* called StreamFit\.path$", None),
        ("held_out and fit", r"process 0 called StreamFit\.held_out and .* called StreamFit\.coef$", None),
        ("gathered clusters", r"ValueError: .*whether there are clusters, .*\(True.*\(False", None),
        ("gathered nothing", "process 1 failed with TypeError: .*got NoneType", "TypeError: .*got NoneType"),
        ("no grid", "process 1 failed with ValueError: .*grid must be a dict", "ValueError: .*grid must"),
        ("no items", "process 1 failed with TypeError: .*NoneType", "TypeError: .*NoneType"),
        ("no parameters", "process 1 failed with TypeError: .*NoneType", "TypeError: .*NoneType"),
        ("no clusters", "process 1 failed with TypeError: .*clusters must be integer labels", "TypeError"),
        ("streamed call", "ValueError: .*whether there are clusters must be the same .*False, True", None),
        ("regs", r"ValueError: .*regs must be the same .*\[1.0\].*\[2.0\]", None),
        ("one folder", "ValueError: .*out must be a folder of its own for each process", None),
        ("no folder", "process 1 failed with .*Error: .*/dev/null", "Error: .*/dev/null"),
        ("no regs", "process 1 failed with TypeError: distributed.path: regs must be", "TypeError: dist"),
        ("negative regs", "process 1 failed with ValueError: .*regs must be positive", "ValueError: .*regs"),
        ("fit with targets", "TypeError: .*a stream includes y and weight", None),
        ("path with weights", "TypeError: .*a stream includes y and weight", None),
        ("parameters", "ValueError: .*shapes and dtypes of parameters must be the same", None),
        ("share", "RuntimeError: .*process 1 failed with KeyError: 'item 3'", "KeyError: 'item 3'"),
        ("twice", "RuntimeError: .*that processes share have derivatives of order one only", None),
        ("graph", "ValueError: .*either all processes or none must ask for gradients", None),
    ],
)  # fmt: skip
def test_an_error_in_one_process_is_raised_in_both(results, name, first, second):
    for rank, pattern in enumerate((first, second or first)):
        received = results[rank]["errors"][name]
        with pytest.raises(RuntimeError, match=pattern):
            raise RuntimeError(received)


def test_processes_must_have_been_started():
    X, Y, _ = worker.rows()
    with pytest.raises(
        RuntimeError, match=r"distributed\.loo: torch\.distributed is not initialised.*torchrun"
    ):
        tl.distributed.loo(worker.MACHINES["lssvm"](), X, Y)


def test_a_process_that_dies_brings_the_job_down_with_its_message(tmp_path):
    script = tmp_path / "job.py"
    script.write_text(
        textwrap.dedent("""
        import torch, torch.distributed as dist, torchloo as tl
        dist.init_process_group("gloo")
        if dist.get_rank() == 1:
            raise OSError("no rows on this disk")
        X = torch.randn(9, 2)
        tl.distributed.loo(tl.LSSVM(tl.kernels.Linear()), X, X[:, 0])
        """)
    )
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    (status,), output = run([*launch, str(script)])
    assert status != 0
    assert "no rows on this disk" in output


@pytest.mark.parametrize("name", ["sparse", "lssvm"])
def test_classes_are_those_of_all_processes(results, name):
    machine = worker.MACHINES[name]()
    X = worker.rows()[0]
    labels = worker.class_labels()
    expected = machine.loo(X, labels)
    machine.fit(X, labels)
    for rank, part in enumerate(PARTS):
        for result in (results[rank]["classes"][name], results[rank]["meta"]["classes"][name]):
            for way in ("tensors", "stream", "batches"):
                assert_same(tl.HeldOut(*result[way]), of_rows(expected, part), 1e-9)
            classes, said = result["fit"]
            assert classes.tolist() == [0, 10, 20]
            assert torch.equal(said, machine.predict_class(X))
