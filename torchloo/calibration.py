"""Class probabilities calibrated on held-out predictions: no validation set is needed.

Note [calibration]
Held-out outputs f_i are predictions for rows that were not trained on, so probabilities fitted to them hold
for new rows. Two classes: p(+1 | f) = 1 / (1 + exp(-(scale f + shift))), Platt's; several: softmax(scale f),
scale the inverse temperature. Both minimise the cross-entropy, which is convex, to convergence by Newton's
method. A row of a class of N rows has the target (N + 1) / (N + c) for that class and 1 / (N + c) for each of
the other c - 1, in place of 1 and 0, so that the minimum is finite also where outputs separate the classes.

Reference: Platt (1999), "Probabilistic outputs for support vector machines"; Guo, Pleiss, Sun and Weinberger
(2017), "On calibration of modern neural networks".
"""

from typing import Any

import torch
from torch import Tensor, nn

from torchloo.criteria.scored_rows import Classes, ScoredRows, Weight
from torchloo.guards import require_floating
from torchloo.held_out import HeldOut, require_held_out

__all__ = ["Platt", "Temperature", "calibrate"]

_STEPS = 100
_HALVINGS = 40
_ROUNDING = 1e-14  # of the cross-entropy: near its minimum a good step may seem to raise it
_CONVERGED = 1e-20  # of the squared Newton decrement, per unit of weight


class _Calibration(nn.Module):
    """Numbers of batch shape (...), stored in buffers that take the shape of what is loaded."""

    scale: Tensor

    def __init__(self, **numbers: Tensor | float) -> None:
        super().__init__()
        for name, number in numbers.items():
            value = number.detach() if isinstance(number, Tensor) else torch.tensor(number)
            self.register_buffer(name, value.to(torch.float64, copy=True))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name, buffer in self.named_buffers():
            if prefix + name in state_dict:
                setattr(self, name, torch.empty_like(state_dict[prefix + name], device=buffer.device))
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        """The numbers."""
        shown = []
        for name, buffer in self.named_buffers():
            value = tuple(buffer.shape) if buffer.ndim else buffer.item()
            shown.append(f"{name}={value}")
        return ", ".join(shown)


class Platt(_Calibration):
    """Probabilities of the positive one of two classes; see `calibrate`.

    Args:
        scale, shift: numbers of batch shape (...).
    """

    shift: Tensor

    def __init__(self, scale: Tensor | float = 1.0, shift: Tensor | float = 0.0) -> None:
        super().__init__(scale=scale, shift=shift)

    def forward(self, outputs: Tensor) -> Tensor:
        """Probabilities of the shape of the outputs (..., n), or (..., n, 1) with an output axis."""
        require_floating("Platt", outputs=outputs)
        more_axes = (1,) * (outputs.ndim - self.scale.ndim)
        shape = (*self.scale.shape, *more_axes)
        scale = self.scale.to(outputs).reshape(shape)
        shift = self.shift.to(outputs).reshape(shape)
        return (scale * outputs + shift).sigmoid()


class Temperature(_Calibration):
    """Probabilities of several classes; see `calibrate`.

    Args:
        scale: inverse temperature, of batch shape (...).
    """

    def __init__(self, scale: Tensor | float = 1.0) -> None:
        super().__init__(scale=scale)

    def forward(self, outputs: Tensor) -> Tensor:
        """Probabilities (..., n, c) from outputs (..., n, c), one column for each class."""
        require_floating("Temperature", outputs=outputs)
        if outputs.ndim < 2 + self.scale.ndim:
            raise ValueError(
                "Temperature: outputs must be (..., n, c), a column for each class, got shape "
                f"{tuple(outputs.shape)}"
            )
        scale = self.scale.to(outputs)[..., None, None]
        return (scale * outputs).softmax(-1)


def calibrate(held_out: HeldOut, weight: Weight = None) -> Platt | Temperature:
    """A module that turns the outputs of a machine into probabilities, fitted to its held-out outputs.

    Args:
        held_out: of leave-one-out or leave-cluster-out, with targets of two classes, a positive and a
            negative value, or of several classes, one positive column in each row.
        weight: as in criteria; None for equal weights, so that the probabilities follow the class
            frequencies in the data, regardless of the training weights.

    Returns:
        `Platt` for two classes: ``calibrate(machine.loo(X, y))(machine(X_new))`` are the probabilities of
        the positive class, (..., q). `Temperature` for several: (..., q, c). Each problem of a batch has its
        own numbers, which are in the state_dict.

    Note [calibration]. The fit is not differentiable; the module is differentiable in the outputs. Cost
    O(n c) for each of some ten Newton steps.

    >>> f, one = torch.tensor([-1.0, -0.2, 0.3, 1.0]), torch.ones(4)
    >>> y = torch.tensor([-1.0, 1.0, -1.0, 1.0])
    >>> calibrate(HeldOut(f, y - f, y, one, None, one, one > 1))(torch.tensor([-1.0, 0.0, 1.0]))
    tensor([0.3199, 0.4951, 0.6716])
    """
    require_held_out("calibrate", held_out)
    has_output_axis = held_out.outputs.ndim > held_out.weight.ndim
    several = has_output_axis and held_out.outputs.shape[-1] > 1
    kind: Classes = "column" if several else "both signs"
    rows = ScoredRows("calibrate", held_out, weight, False, classes=kind, steps=True)
    with torch.no_grad():
        f = rows.outputs.double()  # (..., k, n)
        members = rows.members.double()
        zeta = rows.weight.double()  # (..., 1, n)
        counts = (zeta * members).sum(-1, keepdim=True)  # (..., k, 1)
        size_of_class = (counts * members).sum(-2, keepdim=True)  # (..., 1, n)
        k = members.shape[-2]
        targets = (members * size_of_class + 1) / (size_of_class + k)
        if several:
            return Temperature(_newton(f.unsqueeze(-3), targets, zeta)[..., 0])
        # Standardised, as Newton's method would be inaccurate for outputs that hardly differ.
        centre = f.mean(-1, keepdim=True)
        spread = (f - centre).square().mean(-1, keepdim=True).sqrt()
        spread = torch.where(spread > 0, spread, 1.0)
        z = (f - centre) / spread
        zeros, ones = torch.zeros_like(z), torch.ones_like(z)
        basis_of_scale = torch.cat([zeros, z], -2)  # (..., 2, n)
        basis_of_shift = torch.cat([zeros, ones], -2)
        basis = torch.stack([basis_of_scale, basis_of_shift], -3)
        scale, shift = _newton(basis, targets, zeta).unbind(-1)
        centre = centre[..., 0, 0]
        spread = spread[..., 0, 0]
        return Platt(scale / spread, shift - scale * centre / spread)


def _newton(basis: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
    """Coefficients (..., j) of softmax(sum_j theta_j B_j) with the least cross-entropy; Note [calibration].

    Args:
        basis: B (..., j, k, n) for k classes, targets: (..., k, n), weight: (..., 1, n).
    """
    theta = torch.zeros_like(basis[..., 0, 0])
    loss, step, decrement = _entropy(theta, basis, targets, weight)
    limit = _CONVERGED * weight.sum((-2, -1))
    for _ in range(_STEPS):
        converged = decrement <= limit
        if bool(converged.all()):
            return theta
        length = torch.ones_like(loss)
        for _ in range(_HALVINGS):  # of a step that is too long for some problem of the batch
            trial = _entropy(theta - length.unsqueeze(-1) * step, basis, targets, weight)
            sufficient = loss * (1 + _ROUNDING) - 1e-4 * length * decrement
            too_long = trial[0] > sufficient
            if not bool((too_long & ~converged).any()):
                break
            length = torch.where(too_long, length / 2, length)
        else:
            return theta  # converged to rounding
        theta = theta - length.unsqueeze(-1) * step
        loss, step, decrement = trial
    raise RuntimeError(f"calibrate: no convergence in {_STEPS} Newton steps; are the outputs finite?")


def _entropy(theta: Tensor, basis: Tensor, targets: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The cross-entropy (...), Newton's step (..., j) and the squared Newton decrement (...)."""
    logits = (theta[..., None, None] * basis).sum(-3)  # (..., k, n)
    log_p = logits.log_softmax(-2)
    p = log_p.exp()
    loss = -(weight * targets * log_p).sum((-2, -1))
    slope = weight * (p - targets)  # in the logits, (..., k, n)
    gradient = (slope.unsqueeze(-3) * basis).sum((-2, -1))
    mean = (p.unsqueeze(-3) * basis).sum(-2)  # (..., j, n)
    root = (weight * p).sqrt()
    deviation = (basis - mean.unsqueeze(-2)) * root.unsqueeze(-3)  # (..., j, k, n)
    flat = deviation.flatten(-2)
    H = flat @ flat.mT
    unit = H.diagonal(dim1=-2, dim2=-1).rsqrt()
    unit = unit.nan_to_num(posinf=0.0)  # constant columns keep coefficient 0
    scaled = unit.unsqueeze(-1) * H * unit.unsqueeze(-2)
    inverse = torch.linalg.pinv(scaled, hermitian=True)
    scaled_gradient = (unit * gradient).unsqueeze(-1)
    step = unit * (inverse @ scaled_gradient)[..., 0]
    return loss, step, (gradient * step).sum(-1)
