"""Training for long takes no more memory than training for a while."""

import ctypes
import gc
import subprocess
import sys

import pytest
import torch

import torchloo as tl

LIBC = ctypes.CDLL(None)
pytestmark = pytest.mark.skipif(not hasattr(LIBC, "mallinfo2"), reason="glibc counts the memory in use")


class Mallinfo(ctypes.Structure):
    """What mallinfo2 of glibc returns."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def mib_in_use():
    """Memory that was asked for and not given back; resident pages depend on the system, too."""
    gc.collect()
    LIBC.mallinfo2.restype = Mallinfo
    info = LIBC.mallinfo2()
    return (info.uordblks + info.hblkhd) / 2**20


N = 16
MACHINES = {
    "RLS": lambda X: tl.RLS(tl.kernels.RBF(2.0)),
    "LSSVM": lambda X: tl.LSSVM(tl.kernels.Matern(2.5)),
    "LSSVM, few rows": lambda X: tl.LSSVM(tl.kernels.Linear(features=torch.nn.Linear(4, 2 * N))),
    "LSSVM, many rows": lambda X: tl.LSSVM(tl.kernels.Linear(features=torch.nn.Linear(4, 3))),
    "KFD": lambda X: tl.KFD(tl.kernels.RBF(2.0)),
    "SparseLSSVM": lambda X: tl.SparseLSSVM(tl.kernels.RBF(2.0), basis=torch.nn.Parameter(X[:5].clone())),
    "SVC": lambda X: tl.SVC(tl.kernels.RBF(2.0)),
}


@pytest.mark.parametrize("name", MACHINES)
def test_nothing_grows_over_1000_training_steps(name):
    """One (n, n) matrix of float32 kept in each step would be 1 MiB."""
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(N, 4, generator=generator)
    y = torch.randn(N, generator=generator).sign()
    machine = MACHINES[name](X)
    criterion = tl.criteria.smooth_error if name == "SVC" else tl.criteria.press
    optimiser = torch.optim.Adam(machine.parameters(), lr=1e-4)

    def train(steps):
        for _ in range(steps):
            optimiser.zero_grad()
            criterion(machine.loo(X, y)).backward()
            optimiser.step()

    train(100)
    before = mib_in_use()
    train(1000)
    assert mib_in_use() - before < 0.5


LARGE_RESULTS = """
import resource, torch, torchloo as tl
torch.set_num_threads(1)
X = torch.randn(20_000, 20, dtype=torch.float64)
regs = torch.logspace(0, 4, 30, dtype=X.dtype)
machine = tl.LSSVM(tl.kernels.Linear())
faults = []
for _ in range(12):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    machine.path(X, X[:, 0], regs)
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(sum(faults[6:]) // 6)
"""


def test_calls_with_large_results_do_not_ask_for_the_same_memory_again():
    """Three results of 4.8 MB are 3500 pages; in a process of its own, as others may have freed more."""
    command = [sys.executable, "-c", LARGE_RESULTS]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 500
