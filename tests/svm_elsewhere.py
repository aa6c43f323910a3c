"""Every way through the SVM on a device of its own, compared with the CPU: a script, see test_devices.py.

python tests/svm_elsewhere.py rbf linear precomputed batch
"""

import copy
import os
import sys
from collections.abc import Iterator

import pytest
import torch
from another_device import DEVICE, Elsewhere
from svm_problems import rbf, toy
from torch import Tensor
from torch.testing import assert_close

import torchloo as tl

N = 24
CLUSTERS = torch.arange(N) % 7  # labels of clusters stay on the host


def data() -> dict[str, Tensor]:
    X, y = toy(3, n=N, d=3)
    X[20], X[21], y[20] = X[4], X[5], y[4]  # copies, one with the label of its original
    weight = torch.rand(N, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.5
    return {"X": X, "y": y, "weight": weight, "both": torch.stack([y, y.roll(3)], 1)}


def results(
    machine: tl.SVC, X: Tensor, y: Tensor, weight: Tensor, both: Tensor
) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of every public way through a machine."""
    for method in ("auto", "path", "smo"):
        values = machine.loo(X, y, weight, method=method, epsilon=1e-7)
        yield f"loo {method}", values.outputs
        yield f"loo {method} certified", values.certified
        yield f"errors {method}", machine.loo(X, y, weight, method=method, values=False).errors
    for name, options in {
        "pairs": tl.svm.SMOOptions(working=2, bound=True),
        "sets": tl.svm.SMOOptions(working=16, bound=True, gap_ball=True, newton=0),
        "unseeded": tl.svm.SMOOptions(seed=False),
    }.items():
        yield f"smo {name}", machine.loo(X, y, method="smo", values=False, smo=options).errors
    for method in ("auto", "smo"):
        yield f"lco {method}", machine.lco(X, y, CLUSTERS, weight, method=method, epsilon=1e-7).outputs
    yield "loo columns", machine.loo(X, both, weight).outputs
    yield "loo rows", machine.loo(X, y, rows=y > 0).outputs[..., y > 0]
    yield "solve", machine.solve(X, y, weight).outputs
    yield "solve new", machine.solve(X, y, weight)(X[:5])
    machine.fit(X, y, weight)
    yield "predict", machine(X)
    for name in ("loo", "lco"):
        machine.zero_grad()
        points, weights = X.clone().requires_grad_(), weight.clone().requires_grad_()
        given = (points, y, weights) if name == "loo" else (points, y, CLUSTERS, weights)
        tl.criteria.smooth_error(getattr(machine, name)(*given)).sum().backward()
        yield f"{name} gradient in X", points.grad
        yield f"{name} gradient in weight", weights.grad
        yield f"{name} gradient in C", machine.log_C.grad


def machines() -> Iterator[tuple[str, tl.SVC, dict[str, Tensor]]]:
    """Kernels, and a batch of values of C."""
    yield "rbf", tl.SVC(tl.kernels.RBF(1.2), C=3.0), data()
    yield "linear", tl.SVC(tl.kernels.Linear(), C=3.0), data()
    yield "precomputed", tl.SVC(tl.kernels.Precomputed(), C=3.0), data() | {"X": rbf(data()["X"])}
    yield "batch", tl.SVC(tl.kernels.RBF(1.2), C=torch.tensor([0.1, 1.0, 10.0])), data()


def compare(name: str, machine: tl.SVC, given: dict[str, Tensor]) -> int:
    """Compare all results of a machine there and here, and count them."""
    there = copy.deepcopy(machine).to(DEVICE)
    moved = {key: x.to(DEVICE) for key, x in given.items()}
    count = 0
    for (what, expected), (_, received) in zip(
        results(machine, **given), results(there, **moved), strict=True
    ):
        assert isinstance(received, Elsewhere), f"{name}, {what}: on {received.device}"
        # Rounds of the SMO stop elsewhere where the host may not look; epsilon is 1e-7.
        assert_close(
            received.values.detach(),
            expected.detach(),
            rtol=1e-5,
            atol=1e-5,
            msg=lambda m, what=what: f"{name}, {what}: {m}",
        )
        count += 1
    return count


def refuse_strays() -> None:
    """The device would notice a tensor of the CPU."""
    with pytest.raises(RuntimeError, match="tensors of elsewhere:0 and of cpu"):
        torch.ones(3, device=DEVICE) + torch.ones(3)


if __name__ == "__main__":
    refuse_strays()
    compared = [compare(*machine) for machine in machines() if machine[0] in sys.argv[1:]]
    sys.stdout.write(f"{compared}")
    sys.stdout.flush()
    os._exit(
        0
    )  # torch's thread for the backward of this device now and then aborts a process that ends as usual
