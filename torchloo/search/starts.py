"""Where a search begins, without being asked.

Note [first start]
On up to 300 rows, evenly spread over the training rows:

* a shared lengthscale is the median distance between rows; with one lengthscale for each input (ARD) it is
  the median distance of the standardised rows times the input's standard deviation;
* the regularisation is q k, with k the mean diagonal of the centred kernel matrix and q the noise of the
  targets relative to their variance, where half the mean squared difference between each row's target and
  that of its nearest neighbour in the kernel's metric stands for the noise; q is kept within 0.01 and 10.
  A least-squares machine is linear in its targets, so their unit plays no part; that of the weights does,
  and q k is multiplied by their mean. Where every output has its own regularisation, each has its own q.
  C of an SVM is the inverse.

All other parameters begin at the machine's own values. Further starts are N(0, 1) away in every logarithm,
and half their size away in the weights of networks.
"""

import warnings
from collections.abc import Iterator

import torch
from torch import Tensor

from torchloo.fisher import KFD
from torchloo.kernels import RBF, Kernel, Matern, Precomputed, Product, Scaled, Sum
from torchloo.machine import KernelMachine
from torchloo.search.parameters import Space

__all__ = ["first_start", "further_starts", "given_matrix", "warn_of_scales"]

_ROWS = 300
_WILD = 100.0  # ratio of standard deviations that is worth a warning


def first_start(space: Space, X: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
    """The start (p,) of Note [first start] for X (n, d), y (n,) or (n, c) and weights (n,)."""
    theta = space.vector()
    machine = space.machine_at(theta)
    parameters = dict(machine.named_parameters())
    names = {id(parameters[entry.path]): entry for entry in space.entries}
    rows, n = _spread_rows(len(X), X.device), len(X)
    X, y = X[rows][:, rows] if given_matrix(machine) else X[rows], y[rows]
    with torch.no_grad():
        for kernel, Z in _embedded(machine.kernel, X):
            if isinstance(kernel, RBF | Matern) and id(kernel.log_lengthscale) in names:
                scale = _lengthscale(Z.double(), ard=kernel.log_lengthscale.numel() > 1)
                kernel.log_lengthscale.copy_(scale.log())
                theta[names[id(kernel.log_lengthscale)].part] = scale.log().cpu()
        K = machine.kernel(X).double()
        if isinstance(machine, KFD):
            K = K @ K.mT * (n / len(rows))  # what all n columns would give
        per_output = getattr(machine, "reg_per_output", False)
        columns = y.double().reshape(len(y), -1).split(1, -1) if per_output else (y.double(),)
        reg = torch.stack([_regularisation(K, targets) for targets in columns])  # (1,) or (c,)
        if weight is not None:
            reg = reg * weight.double().mean()
    for entry in space.entries:
        if entry.log and entry.name in ("reg", "C"):
            theta[entry.part] = torch.log(reg if entry.name == "reg" else 1 / reg).cpu()
    return theta


def further_starts(space: Space, first: Tensor, count: int, generator: torch.Generator | None) -> Tensor:
    """Starts (P, count, p) around the first ones (P, p), which come first; alike in all problems."""
    unit = space.units()
    for entry in space.entries:
        if not entry.log:
            unit[entry.part] *= 0.5
    device = generator.device if generator is not None else "cpu"
    away = torch.randn(count - 1, space.size, dtype=torch.float64, generator=generator, device=device).cpu()
    return first.unsqueeze(1) + torch.cat([away.new_zeros(1, space.size), away * unit])


def given_matrix(machine: KernelMachine) -> bool:
    """Whether X holds kernel values, so that its columns are rows too."""
    return any(isinstance(module, Precomputed) for module in machine.modules())


def warn_of_scales(space: Space, X: Tensor, stacklevel: int = 3) -> None:
    """Warn where columns of X on scales far apart meet a kernel that takes them all alike.

    Kernels that do not: those with one lengthscale for each input, with features of their own, and
    Precomputed.
    """
    for kernel in space.machine.modules():
        ard = isinstance(kernel, RBF | Matern) and kernel.log_lengthscale.numel() > 1
        if ard or isinstance(kernel, Precomputed) or getattr(kernel, "features", None) is not None:
            return
    deviation = X.double().flatten(1).std(0)  # (d,)
    deviation = deviation[deviation > 0]
    if len(deviation) and deviation.max() > _WILD * deviation.min():
        span = f"from {deviation.min().item():.3g} to {deviation.max().item():.3g}"
        warnings.warn(
            f"{space.function}: the columns of X have standard deviations {span}, and the largest rule this "
            "kernel; standardise them, (X - X.mean(0)) / X.std(0), or give the kernel one lengthscale for "
            "each column",
            UserWarning,
            stacklevel=stacklevel,
        )


def _spread_rows(n: int, device: torch.device) -> Tensor:
    """At most 300 of n row numbers, evenly spread."""
    return torch.linspace(0, n - 1, min(n, _ROWS), dtype=torch.float64, device=device).round().long()


def _embedded(kernel: Kernel, X: Tensor) -> Iterator[tuple[Kernel, Tensor]]:
    """Every kernel of a composition and the inputs that reach it."""
    Z = kernel.embed(X)
    yield kernel, Z
    parts = [kernel.kernel] if isinstance(kernel, Scaled) else []
    for part in kernel.kernels if isinstance(kernel, Sum | Product) else parts:
        yield from _embedded(part, Z)


def _lengthscale(Z: Tensor, ard: bool) -> Tensor:
    """Median distance between the rows of Z (m, d), shape (); or one for each column, (d,)."""
    spread = torch.ones_like(Z[0])
    if ard and len(Z) > 1:
        spread = Z.std(0)
        spread = torch.where(spread > 0, spread, 1.0)
    distance = torch.nn.functional.pdist(Z / spread)
    distance = distance[distance > 0]
    median = distance.median() if len(distance) else Z.new_ones(())
    return median * spread if ard else median


def _regularisation(K: Tensor, y: Tensor) -> Tensor:
    """q k of Note [first start] for a kernel matrix (m, m) and targets (m,) or (m, c)."""
    diagonal, Y = K.diagonal(), y.reshape(len(y), -1)
    size = (diagonal.mean() - K.mean()).clamp(min=1e-12 * diagonal.abs().mean() + 1e-300)
    square = diagonal.unsqueeze(0) + diagonal.unsqueeze(1) - 2 * K
    square.fill_diagonal_(torch.inf)
    nearest = square.argmin(1)
    noise = (Y - Y[nearest]).square().sum() / 2
    total = (Y - Y.mean(0)).square().sum()
    ratio = noise / (total - noise).clamp(min=0.05 * total)
    return size * ratio.nan_to_num(1.0).clamp(0.01, 10.0)
