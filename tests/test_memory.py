"""Training for long takes no more memory than training for a while."""

import gc
from pathlib import Path

import pytest
import torch

import torchloo as tl

STATM = Path("/proc/self/statm")
pytestmark = pytest.mark.skipif(not STATM.exists(), reason="the resident memory is read from /proc")


def resident_mib():
    gc.collect()
    return int(STATM.read_text().split()[1]) * 4096 / 2**20


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
    """One (n, n) matrix of float32 kept in each step would be 1 MiB; nothing kept is 0.02 at most."""
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
    before = resident_mib()
    train(1000)
    assert resident_mib() - before < 0.5
