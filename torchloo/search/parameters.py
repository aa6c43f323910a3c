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

__all__ = ["Entry", "Space", "matching_names", "unique_name"]


@dataclass(frozen=True)
class Entry:
    """One parameter of the machine and its place in the vector."""

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
    """Shape without a batch dimension; None if the module takes no batch."""
    declared: Positive | None
    """Its declaration in the class of its module."""


class _Network(nn.Module):
    """Features whose parameters have a leading batch dimension: one network for each machine of the batch."""

    def __init__(self, network: nn.Module, names: set[str]) -> None:
        super().__init__()
        self.network, self.names = network, names

    def forward(self, X: Tensor) -> Tensor:
        """(n, d) or (B, n, d) -> (B, n, p)."""
        parameters = dict(self.network.named_parameters())
        stacked: dict[str, Tensor] = {name: parameters[name] for name in self.names}

        def evaluate(weights: dict[str, Tensor], rows: Tensor) -> Tensor:
            return functional_call(self.network, weights, (rows,))

        axis_of_rows = None if X.ndim == 2 else 0
        batched = torch.vmap(evaluate, in_dims=(0, axis_of_rows), randomness="different")
        return batched(stacked, X)


class _Method(nn.Module):
    """Any method of a machine as a forward, as functional_call needs it."""

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

    Positive ones (`log_...`) are logarithms; weights of networks and trainable basis vectors are used
    directly. The machine itself is never changed. Settings are values that a grid has chosen for it, by name.
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
        self.function = function
        self.machine = _unfitted(machine)
        self.settings = dict(settings or {})
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
        in_network = ".features." in f".{path}"
        log = leaf.startswith("log_") and isinstance(owner, Kernel | KernelMachine) and not in_network
        declared = Positive.of(owner, leaf)
        if owner is self.machine:
            may_be_vector = getattr(owner, "reg_per_output", False)
        else:
            may_be_vector = declared is None or declared.per_input
        if log and parameter.ndim > int(may_be_vector):
            raise ValueError(
                f"{self.function}: {name} must belong to one machine, got the batch shape "
                f"{tuple(parameter.shape)}"
            )
        return Entry(
            path=path,
            name=name,
            part=slice(self.size, self.size + parameter.numel()),
            shape=parameter.shape,
            dtype=parameter.dtype,
            log=log,
            kernel=path.startswith("kernel."),
            batch=_batch_shape(self.machine, path, declared, parameter),
            declared=declared,
        )

    def _stacking(self) -> KernelMachine:
        """A copy whose feature networks take a batch of weights."""
        machine = copy.deepcopy(self.machine)
        paths = [entry.path for entry in self.entries]
        for prefix, kernel in list(machine.named_modules()):
            if isinstance(kernel, Kernel) and kernel.features is not None:
                within = f"{prefix}.features."
                names = {path.removeprefix(within) for path in paths if path.startswith(within)}
                if names:
                    kernel.features = _Network(kernel.features, names)
        return machine

    def call(self, theta: Tensor, method: str, *args: Any, among: tuple[Any, ...] | None = None) -> Any:
        """machine.method(*args) for theta (B, p) as one batch, or for one theta (p,).

        If `among`, rows (X, y, weight), is given, a basis is chosen among these instead of those of the call.
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
        """The current values of the machine, (p,)."""
        parameters = dict(self.machine.named_parameters())
        values = [parameters[entry.path].detach().double() for entry in self.entries]
        return torch.cat([value.flatten().cpu() for value in values])

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
        """A natural step for every number, (p,): 1 for logarithms, the root mean square for weights."""
        theta = self.vector()
        units = torch.ones(self.size, dtype=torch.float64, device="cpu")
        for entry in self.entries:
            if not entry.log:
                mean_square = theta[entry.part].square().mean()
                units[entry.part] = mean_square.sqrt().clamp(min=0.01)
        return units

    def find(self, name: str, argument: str) -> Entry:
        """The positive parameter of a name, which may be shortened as long as it is unique."""
        positive = {entry.name: entry for entry in self.entries if entry.log}
        return positive[unique_name(self.function, argument, name, list(positive))]

    def bounds(
        self,
        first: Tensor,
        given: Mapping[str, tuple[float, float]] | None,
        decades: float,
    ) -> Tensor:
        """Lower and upper bounds (2, ..., p) for first starts (..., p): this many decades around them."""
        reach = torch.full((self.size,), torch.inf, dtype=torch.float64, device="cpu")
        for entry in self.entries:
            if entry.log:
                reach[entry.part] = decades * math.log(10.0)
        box = torch.stack([first - reach, first + reach])
        for name, pair in (given or {}).items():
            low, high = _pair(self.function, name, pair)
            part = self.find(name, "bounds").part
            box[0, ..., part] = low.log()
            box[1, ..., part] = high.log()
        return box


def matching_names(name: str, known: Iterable[str]) -> list[str]:
    """The full names that a shortened name may mean: itself, or all that end in it."""
    known = list(known)
    if name in known:
        return [name]
    return [each for each in known if each.endswith("." + name)]


def unique_name(function: str, argument: str, name: str, known: list[str]) -> str:
    """The full name of a shortened name; ValueError if it is unknown or ambiguous."""
    matching = matching_names(name, known)
    if len(matching) == 1:
        return matching[0]
    fault = "is ambiguous" if matching else "is unknown"
    raise ValueError(f"{function}: {argument} must name parameters ({', '.join(known)}), {name!r} {fault}")


def _unfitted(machine: KernelMachine) -> KernelMachine:
    """A copy without coefficients, which a search does not need."""
    buffers = [getattr(machine, name) for name in machine.fitted_buffers]
    replaced_by_none = {id(buffer): None for buffer in buffers if buffer is not None}
    return copy.deepcopy(machine, replaced_by_none)


def _batch_shape(
    machine: KernelMachine, path: str, declared: Positive | None, parameter: Tensor
) -> tuple[int, ...] | None:
    """The shape of a parameter without a batch dimension, or None if its module takes no batch."""
    before, in_network, _ = path.partition(".features.")
    if in_network:
        # Not for a network with buffers, such as running means, or one that gets all inputs as one batch.
        has_buffers = any(True for _ in machine.get_submodule(before + ".features").buffers())
        one_batch = machine.get_submodule(before).event_dim != 1
        return None if has_buffers or one_batch else tuple(parameter.shape)
    if "." not in path:
        return tuple(parameter.shape)
    if declared is None or not declared.batched:
        return None
    if declared.per_input and parameter.ndim == 0:
        return (1,)
    return tuple(parameter.shape)


def _pair(function: str, name: str, pair: Iterable[float]) -> Tensor:
    try:
        values = torch.as_tensor(tuple(pair), dtype=torch.float64, device="cpu")
        good = values.shape == (2,) and bool(0 < values[0] <= values[1] < torch.inf)
    except (TypeError, ValueError):
        good = False
    if not good:
        raise ValueError(f"{function}: bounds of {name} must be (low, high) with 0 < low <= high, got {pair}")
    return values
