"""The parameters of a machine as one vector, and many vectors as one machine with a batch of parameters."""

import copy
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from torchloo.kernels import Kernel
from torchloo.machine import KernelMachine
from torchloo.positive import Positive
from torchloo.sparse import SparseLSSVM

__all__ = ["Entry", "Space", "named_so", "the_one"]


@dataclass(frozen=True)
class Entry:
    """Where one parameter of the machine lies in the vector."""

    path: str
    """Name in named_parameters()."""
    name: str
    """Name for users: the path without log_."""
    part: slice
    """Its numbers in the vector."""
    shape: torch.Size
    dtype: torch.dtype
    log: bool
    """Whether the vector holds logarithms of positive values."""
    kernel: bool
    """Whether it belongs to the kernel."""
    batch: tuple[int, ...] | None
    """Shape beside a batch dimension; None where the module takes no batch."""
    declared: Positive | None
    """What its module declares of it."""


class _Network(nn.Module):
    """Features whose parameters have a leading batch dimension: one network for each machine of the batch."""

    def __init__(self, network: nn.Module, names: set[str]) -> None:
        super().__init__()
        self.network, self.names = network, names

    def forward(self, X: Tensor) -> Tensor:
        """(n, d) or (B, n, d) -> (B, n, p)."""
        stacked: dict[str, Tensor] = {
            name: p for name, p in self.network.named_parameters() if name in self.names
        }

        def one(weights: dict[str, Tensor], rows: Tensor) -> Tensor:
            return functional_call(self.network, weights, (rows,))

        return torch.vmap(one, in_dims=(0, None if X.ndim == 2 else 0), randomness="different")(stacked, X)


class _Method(nn.Module):
    """Any method of a machine as a forward, which is what functional_call calls."""

    def __init__(self, machine: KernelMachine) -> None:
        super().__init__()
        self.machine = machine

    def forward(self, method: str, *args: Any, among: tuple[Any, ...] | None = None) -> Any:
        machine = self.machine
        if among is not None and isinstance(machine, SparseLSSVM):
            machine = machine.with_basis_among(*among)
        return getattr(machine, method)(*args)


class Space:
    """All trainable parameters of a machine as vectors of p numbers in float64.

    Positive ones (`log_...`) are logarithms; weights of networks and trainable basis vectors are taken as
    they are. The machine itself is never changed. Settings are what a grid has chosen for it, by name.
    """

    def __init__(
        self,
        function: str,
        machine: KernelMachine,
        batched: bool = True,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(machine, KernelMachine):
            raise TypeError(f"{function}: machine must be a torchloo machine, got {type(machine).__name__}")
        self.function, self.machine, self.settings = function, _unfitted(machine), dict(settings or {})
        self.entries: list[Entry] = []
        self.size = 0
        for path, parameter in self.machine.named_parameters():
            if parameter.requires_grad:
                self.entries.append(self._entry(path, parameter))
                self.size += parameter.numel()
        if not self.entries:
            raise ValueError(f"{function}: machine must have a parameter that requires grad, got none")
        self.batched = batched and all(entry.batch is not None for entry in self.entries)
        self._one = _Method(self.machine)
        self._many = _Method(self._stacking()) if self.batched else self._one

    def _entry(self, path: str, parameter: Tensor) -> Entry:
        parent, _, leaf = path.rpartition(".")
        owner = self.machine.get_submodule(parent)
        name = (parent + "." if parent else "") + leaf.removeprefix("log_")
        network = ".features." in f".{path}"
        log = leaf.startswith("log_") and isinstance(owner, Kernel | KernelMachine) and not network
        declared = Positive.of(owner, leaf)
        vectors = declared is None or declared.per_input
        if owner is self.machine:
            vectors = getattr(owner, "reg_per_output", False)
        if log and parameter.ndim > vectors:
            raise ValueError(
                f"{self.function}: {name} must belong to one machine, got the batch shape "
                f"{tuple(parameter.shape)}"
            )
        part = slice(self.size, self.size + parameter.numel())
        batch = _batch_shape(self.machine, path, declared, parameter)
        kernel = path.startswith("kernel.")
        return Entry(path, name, part, parameter.shape, parameter.dtype, log, kernel, batch, declared)

    def _stacking(self) -> KernelMachine:
        """A copy whose feature networks take a batch of weights."""
        machine = copy.deepcopy(self.machine)
        for prefix, kernel in list(machine.named_modules()):
            if isinstance(kernel, Kernel) and kernel.features is not None:
                within = f"{prefix}.features."
                names = {e.path.removeprefix(within) for e in self.entries if e.path.startswith(within)}
                if names:
                    kernel.features = _Network(kernel.features, names)
        return machine

    def call(self, theta: Tensor, method: str, *args: Any, among: tuple[Any, ...] | None = None) -> Any:
        """machine.method(*args) for theta (B, p) as one batch, or for one theta (p,).

        Where `among` is given, rows (X, y, weight), a basis is chosen among these and not those of the call.
        """
        parameters = {}
        for entry in self.entries:
            values = theta[..., entry.part].to(entry.dtype)
            if theta.ndim == 1:
                parameters["machine." + entry.path] = values.reshape(entry.shape)
                continue
            path = entry.path.replace(".features.", ".features.network.", 1)  # as `_stacking` names it
            parameters["machine." + path] = values.reshape(-1, *(entry.batch or ()))
        machine = self._one if theta.ndim == 1 else self._many
        return functional_call(machine, parameters, (method, *args), {"among": among})

    def vector(self) -> Tensor:
        """The machine's own values, (p,)."""
        parameters = dict(self.machine.named_parameters())
        own = [parameters[e.path].detach().double().flatten().cpu() for e in self.entries]
        return torch.cat(own)

    def machine_at(self, theta: Tensor) -> KernelMachine:
        """A new machine with the parameters theta (p,), not fitted."""
        machine = copy.deepcopy(self.machine)
        parameters = dict(machine.named_parameters())
        with torch.no_grad():
            for entry in self.entries:
                parameters[entry.path].copy_(theta[entry.part].reshape(entry.shape))
        return machine

    def named(self, theta: Tensor) -> dict[str, Any]:
        """Settings and positive parameters by name, from theta (p,); networks are left out."""
        values = dict(self.settings)
        for entry in self.entries:
            if entry.log:
                positive = theta[entry.part].exp().tolist()
                values[entry.name] = positive if entry.shape else positive[0]
        return values

    def units(self) -> Tensor:
        """A natural step for every number, (p,): 1 for logarithms, the size of its tensor for weights."""
        theta, units = self.vector(), torch.ones(self.size, dtype=torch.float64, device="cpu")
        for entry in self.entries:
            if not entry.log:
                units[entry.part] = theta[entry.part].square().mean().sqrt().clamp(min=0.01)
        return units

    def find(self, name: str, argument: str) -> Entry:
        """The positive parameter of a name, which may be shortened as long as it is the only one."""
        positive = {e.name: e for e in self.entries if e.log}
        return positive[the_one(self.function, argument, name, list(positive))]

    def bounds(
        self, first: Tensor, given: Mapping[str, tuple[float, float]] | None, decades: float
    ) -> Tensor:
        """Lower and upper bounds (2, ..., p) for first starts (..., p): so many decades around them."""
        reach = torch.full((self.size,), torch.inf, dtype=torch.float64, device="cpu")
        for entry in self.entries:
            if entry.log:
                reach[entry.part] = decades * math.log(10.0)
        box = torch.stack([first - reach, first + reach])
        for name, pair in (given or {}).items():
            low, high = _pair(self.function, name, pair)
            part = self.find(name, "bounds").part
            box[0, ..., part], box[1, ..., part] = low.log(), high.log()
        return box


def named_so(name: str, known: Iterable[str]) -> list[str]:
    """Which of these names are meant by one that may be shortened: itself, or all that end in it."""
    known = list(known)
    return [name] if name in known else [each for each in known if each.endswith("." + name)]


def the_one(function: str, argument: str, name: str, known: list[str]) -> str:
    """The only name that is meant by one that may be shortened; ValueError where there is no such name."""
    meant = named_so(name, known)
    if len(meant) == 1:
        return meant[0]
    fault = "is ambiguous" if meant else "is unknown"
    raise ValueError(f"{function}: {argument} must name parameters ({', '.join(known)}), {name!r} {fault}")


def _unfitted(machine: KernelMachine) -> KernelMachine:
    """A copy without coefficients, which would only be carried about."""
    kept = {id(t): None for name in machine.fitted_buffers if (t := getattr(machine, name)) is not None}
    return copy.deepcopy(machine, kept)


def _batch_shape(
    machine: KernelMachine, path: str, declared: Positive | None, parameter: Tensor
) -> tuple[int, ...] | None:
    """The shape of a parameter beside a batch dimension, or None where its module takes none."""
    before, network, _ = path.partition(".features.")
    if network:  # one with a state, such as running means, cannot be run for many weights at once
        state = machine.get_submodule(before + ".features").buffers()
        rows = machine.get_submodule(before).event_dim == 1  # nor one that gets all inputs as one batch
        return tuple(parameter.shape) if rows and next(state, None) is None else None
    if "." not in path:
        return tuple(parameter.shape)
    if declared is None or not declared.batched:
        return None
    return (1,) if declared.per_input and parameter.ndim == 0 else tuple(parameter.shape)


def _pair(function: str, name: str, pair: Iterable[float]) -> Tensor:
    try:
        values = torch.as_tensor(tuple(pair), dtype=torch.float64, device="cpu")
        good = values.shape == (2,) and bool(0 < values[0] <= values[1] < torch.inf)
    except (TypeError, ValueError):
        good = False
    if not good:
        raise ValueError(f"{function}: bounds of {name} must be (low, high) with 0 < low <= high, got {pair}")
    return values
