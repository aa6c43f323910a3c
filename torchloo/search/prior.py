"""The hyper-prior: a penalty on the logarithms of parameters, against over-fitting of the criterion.

Note [hyper-prior]
Cawley and Talbot (2007) add to the criterion Q a quadratic penalty on the kernel's hyper-parameters. Read
n/2 log Q as the negative logarithm of a likelihood, as for PRESS with Gaussian residuals of unknown size,
and give each logarithm t_j a Gaussian prior of precision s about its first start t0_j. To first order about
the first start, the negative logarithm of the posterior is n / (2 |Q(t0)|) times

    Q(t) + s |Q(t0)| / n * sum_j (t_j - t0_j)^2,

which is minimised. The regularisation has no prior, nor have the weights of networks.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from torchloo.search.parameters import Space

__all__ = ["HyperPrior", "Prior"]

Prior = float | Callable[[Mapping[str, Tensor]], Tensor] | None


class HyperPrior:
    """penalty(theta, problem) -> what is added to the objective, and its gradient; Note [hyper-prior]."""

    def __init__(self, prior: Prior, space: Space, rows: int) -> None:
        self.prior, self.space, self.rows = prior, space, rows
        self.centre: Tensor | None = None
        self.scale: Tensor | None = None

    @property
    def wants_centre(self) -> bool:
        """Whether the penalty is a strength, which needs a centre and a scale."""
        return self.prior is not None and not callable(self.prior)

    def anchor(self, centre: Tensor, values: Tensor) -> None:
        """First starts (P, p) of the problems and the objective there, (P,)."""
        self.centre = centre
        self.scale = torch.where(values.isfinite(), values.abs(), 1.0)

    def __call__(self, theta: Tensor, problem: Tensor, gradient: bool = False) -> tuple[Tensor, Tensor]:
        """Penalties (B,) of theta (B, p) and their gradients (B, p), zeros unless `gradient`."""
        no_slope = torch.zeros_like(theta)
        if self.prior is None or (self.wants_centre and self.centre is None):
            return no_slope[:, 0].clone(), no_slope
        with torch.set_grad_enabled(gradient):
            theta = theta.clone().requires_grad_(gradient)
            penalty = self._given(theta) if callable(self.prior) else self._gaussian(theta, problem)
            if not penalty.requires_grad:
                return penalty.double(), no_slope
            (slope,) = torch.autograd.grad(penalty.sum(), theta)
        return penalty.detach().double(), slope

    def _gaussian(self, theta: Tensor, problem: Tensor) -> Tensor:
        assert self.centre is not None
        assert self.scale is not None
        assert isinstance(self.prior, float | int)
        distance = theta - self.centre[problem]
        has_prior = torch.zeros_like(distance[0])
        for entry in self.space.entries:
            if entry.log and entry.kernel:
                has_prior[entry.part] = 1
        strength = self.prior * self.scale[problem] / self.rows
        return strength * (has_prior * distance.square()).sum(-1)

    def _given(self, theta: Tensor) -> Tensor:
        assert callable(self.prior)
        logs = {}
        for entry in self.space.entries:
            if entry.log:
                logs[entry.name] = theta[:, entry.part].reshape(-1, *entry.shape)
        penalty = self.prior(logs)
        if not isinstance(penalty, Tensor) or penalty.shape != (len(theta),):
            got = tuple(penalty.shape) if isinstance(penalty, Tensor) else type(penalty).__name__
            raise TypeError(
                f"{self.space.function}: prior must return one penalty for each of {len(theta)} candidates, "
                f"got {got}"
            )
        return penalty
