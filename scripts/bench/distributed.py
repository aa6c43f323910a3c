"""Rows shared out over processes: agreement with one process, gradients, and time, printed by process 0.

    torchrun --nproc-per-node 2 scripts/bench/distributed.py [--backend nccl] [--rows 200000] [--basis 500]

Every process has its part of the rows as a stream: one all-reduce of the normal equations, then exact
leave-one-out of its own rows. The time of one process with all rows is measured in the same run, with as
many threads as each of the processes has; with a core for every thread, the ratio tends to their number. The
exit status is the number of differences that are too large.
"""

import argparse
import os
import sys
import time

import torch
import torch.distributed as dist
from scale import rows, sparse
from torch import Tensor

import torchloo as tl


def part(n: int) -> slice:
    """The rows of this process."""
    rank, count = dist.get_rank(), dist.get_world_size()
    return slice(rank * n // count, (rank + 1) * n // count)


def largest(value: float, device: torch.device) -> float:
    """The largest value of all processes."""
    tensor = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.item()


def agreement(n: int, m: int, device: torch.device) -> dict[str, float]:
    """Largest relative differences from one process: streamed and sharded outputs, and gradients."""
    X, y = (t.to(device) for t in rows(n))
    own = part(n)
    alone, many = (sparse(X, m).to(device) for _ in range(2))
    held_out = alone.loo(X, y)
    tl.criteria.press(held_out).backward()
    sharded = tl.distributed.loo(many, X[own], y[own])
    tl.criteria.press(sharded).backward()
    tl.distributed.sum_gradients(many)
    streamed = tl.distributed.loo(many, tl.Stream(X[own], y[own], progress=False))
    expected = held_out.outputs[own].detach()

    def gap(received: Tensor, expected: Tensor) -> float:
        error = (received.detach() - expected).abs().max()
        return (error / expected.abs().max()).item()

    scale = many.kernel.log_lengthscale.grad, alone.kernel.log_lengthscale.grad
    reg = many.log_reg.grad, alone.log_reg.grad
    values = {
        "streamed": gap(streamed.outputs, expected),
        "sharded": gap(sharded.outputs, expected),
        "gradient of the lengthscale": gap(*scale),
        "gradient of reg": gap(*reg),
    }
    return {name: largest(value, device) for name, value in values.items()}


def speed(n: int, m: int, device: torch.device) -> tuple[float, float]:
    """Seconds of leave-one-out of all rows by all processes together, and by one of them alone."""
    X, y = (t.to(device) for t in rows(n))
    own = part(n)
    machine = sparse(X, m).to(device)
    tl.distributed.loo(machine, tl.Stream(X[own][:4096], y[own][:4096], progress=False))
    dist.barrier()
    start = time.perf_counter()
    tl.distributed.loo(machine, tl.Stream(X[own], y[own], progress=False))
    together = largest(time.perf_counter() - start, device)
    alone = 0.0
    if dist.get_rank() == 0:
        start = time.perf_counter()
        machine.loo(tl.Stream(X, y, progress=False))
        alone = time.perf_counter() - start
    return together, largest(alone, device)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--backend", default="gloo", help="gloo (CPU) or nccl (a GPU for each process)")
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--basis", type=int, default=500)
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    device = torch.device("cpu")
    if arguments.backend == "nccl":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    dist.init_process_group(arguments.backend)
    gaps = agreement(min(5000, arguments.rows), min(200, arguments.basis), device)
    together, alone = speed(arguments.rows, arguments.basis, device)
    failed = sum(gap > 1e-10 for name, gap in gaps.items() if "gradient" not in name)
    failed += sum(gap > 1e-8 for name, gap in gaps.items() if "gradient" in name)
    if dist.get_rank() == 0:
        print(f"torch {torch.__version__}, {dist.get_world_size()} processes, {arguments.backend}")
        for name, gap in gaps.items():
            print(f"{name}: largest relative difference from one process {gap:.1e}")
        print(f"leave-one-out of {arguments.rows:,} rows, m = {arguments.basis}: {together:.2f} s together, "
              f"{alone:.2f} s by one process alone, {alone / together:.2f} times as fast")  # fmt: skip
    dist.destroy_process_group()
    return failed


if __name__ == "__main__":
    sys.exit(main())
