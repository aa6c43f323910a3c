"""Base classes of machines: modules with parameters and buffers, around pure functions."""

from torchloo.machine.kernel_machine import KernelMachine
from torchloo.machine.least_squares import LeastSquares
from torchloo.machine.predictor import Predictor

__all__ = ["KernelMachine", "LeastSquares", "Predictor"]
