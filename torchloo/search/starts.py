"""The default start of a search, computed from the data.

Note [first start]
On up to 300 rows, evenly spread over the training rows:

* a parameter of a kernel is computed by its declaration (`Positive`) from the rows that reach the kernel. A
  shared lengthscale is the median distance between rows; with one lengthscale for each input (ARD) it is
  the median distance of the standardised rows times the input's standard deviation;
* the regularisation is q k, with k the mean diagonal of the centred kernel matrix and q the noise of the
  targets relative to their variance, where half the mean squared difference between each row's target and
  that of its nearest neighbour in the kernel's metric estimates the noise; q is clipped to 0.01 and 10.
  A least-squares machine is linear in its targets, so their unit does not matter; that of the weights does,
  and q k is multiplied by their mean. Where every output has its own regularisation, each has its own q.
  C of an SVM is the inverse.

All other parameters start at the values of the machine. Further starts are drawn around the first one, from
N(0, 1) in every logarithm, and with half their size in the weights of networks.
"""

import warnings
from collections.abc import Iterator

import torch
from torch import Tensor

from torchloo.fisher import KFD
from torchloo.kernels import Kernel, Precomputed
from torchloo.machine import KernelMachine
from torchloo.positive import Positive, log_of
from torchloo.search.parameters import Entry, Space

__all__ = ["first_start", "further_starts", "takes_kernel_matrix", "warn_of_scales"]

_ROWS = 300
_WILD = 100.0  # ratio of standard deviations that is worth a warning


def first_start(space: Space, X: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
    """The start (p,) of Note [first start] for X (n, d), y (n,) or (n, c) and weights (n,)."""
    theta = space.vector()
    machine = space.machine_at(theta)
    entries = {entry.path: entry for entry in space.entries}
    n = len(X)
    rows = _spread_rows(n, X.device)
    X, y = X[rows], y[rows]
    if takes_kernel_matrix(machine):
        X = X[:, rows]
    with torch.no_grad():
        for path, kernel, Z in _embedded("kernel", machine.kernel, X):
            for name, log in kernel.named_parameters(recurse=False):
                entry = entries.get(f"{path}.{name}")
                if entry is None or entry.declared is None or entry.declared.start is None:
                    continue
                start = _start_of(space.function, entry, log, Z)
                log.copy_(start)
                theta[entry.part] = start.cpu()
        K = machine.kernel(X).double()
        if isinstance(machine, KFD):
            K = K @ K.mT * (n / len(rows))  # an estimate for all n columns
        targets = (y.double(),)
        if getattr(machine, "reg_per_output", False):
            targets = y.double().reshape(len(y), -1).split(1, -1)
        reg = torch.stack([_regularisation(K, each) for each in targets])  # (1,) or (c,)
        if weight is not None:
            reg = reg * weight.double().mean()
    for path, entry in entries.items():
        if "." not in path and entry.declared is not None and entry.declared.start is not None:
            theta[entry.part] = torch.log(entry.declared.start(reg)).cpu()
    return theta


def _start_of(function: str, entry: Entry, log: Tensor, Z: Tensor) -> Tensor:
    """The logarithm at which a parameter of a kernel starts, from the rows (m, d) that reach the kernel."""
    assert entry.declared is not None
    assert entry.declared.start is not None
    per_input = log.numel() > 1
    value = entry.declared.start(Z.double(), per_input)
    start = log_of(function, f"start of {entry.name}", value)
    if start.ndim and start.shape != log.shape:
        raise ValueError(
            f"{function}: start of {entry.name} must have shape {tuple(log.shape)}, got {tuple(start.shape)}"
        )
    return start


def further_starts(space: Space, first: Tensor, count: int, generator: torch.Generator | None) -> Tensor:
    """Starts (P, count, p) around the first ones (P, p), which come first; the same in all problems."""
    unit = space.units()
    for entry in space.entries:
        if not entry.log:
            unit[entry.part] *= 0.5
    device = generator.device if generator is not None else "cpu"
    shape = (count - 1, space.size)
    normal = torch.randn(shape, dtype=torch.float64, generator=generator, device=device).cpu()
    steps = torch.cat([normal.new_zeros(1, space.size), normal * unit])
    return first.unsqueeze(1) + steps


def takes_kernel_matrix(machine: KernelMachine) -> bool:
    """Whether X holds kernel values, so that its columns are rows too."""
    return any(isinstance(module, Precomputed) for module in machine.modules())


def warn_of_scales(space: Space, X: Tensor, stacklevel: int = 3) -> None:
    """Warn if columns of X have very different scales and the kernel does not scale them separately.

    Kernels that do, and are not warned about: those with one lengthscale for each input, with features of
    their own, and Precomputed.
    """
    for kernel in space.machine.modules():
        if isinstance(kernel, Precomputed) or getattr(kernel, "features", None) is not None:
            return
        for name, value in kernel.named_parameters(recurse=False):
            declared = Positive.of(kernel, name)
            if value.numel() > 1 and declared is not None and declared.per_input:
                return
    deviation = X.double().flatten(1).std(0)  # (d,)
    deviation = deviation[deviation > 0]
    if len(deviation) and deviation.max() > _WILD * deviation.min():
        span = f"from {deviation.min().item():.3g} to {deviation.max().item():.3g}"
        warnings.warn(
            f"{space.function}: the columns of X have standard deviations {span}, and the largest dominate "
            "this kernel; standardise them, (X - X.mean(0)) / X.std(0), or give the kernel one lengthscale "
            "for each column",
            UserWarning,
            stacklevel=stacklevel,
        )


def _spread_rows(n: int, device: torch.device) -> Tensor:
    """At most 300 of n row numbers, evenly spread."""
    count = min(n, _ROWS)
    positions = torch.linspace(0, n - 1, count, dtype=torch.float64, device=device)
    return positions.round().long()


def _embedded(path: str, kernel: Kernel, X: Tensor) -> Iterator[tuple[str, Kernel, Tensor]]:
    """Every kernel of a composition with its path in the machine, and the inputs that reach it."""
    Z = kernel.embed(X)
    yield path, kernel, Z
    names = {id(part): name for name, part in kernel.named_modules()}
    for operand in kernel.operands:
        yield from _embedded(f"{path}.{names[id(operand)]}", operand, Z)


def _regularisation(K: Tensor, y: Tensor) -> Tensor:
    """q k of Note [first start] for a kernel matrix (m, m) and targets (m,) or (m, c)."""
    diagonal = K.diagonal()
    Y = y.reshape(len(y), -1)
    rounding = 1e-12 * diagonal.abs().mean() + 1e-300
    size = (diagonal.mean() - K.mean()).clamp(min=rounding)
    square = diagonal.unsqueeze(0) + diagonal.unsqueeze(1) - 2 * K
    square.fill_diagonal_(torch.inf)
    nearest = square.argmin(1)
    noise = (Y - Y[nearest]).square().sum() / 2
    total = (Y - Y.mean(0)).square().sum()
    ratio = noise / (total - noise).clamp(min=0.05 * total)
    return size * ratio.nan_to_num(1.0).clamp(0.01, 10.0)
