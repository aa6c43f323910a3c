"""The shell of every machine: parameters, buffers, and one call of a pure function each."""

from torchloo.machine.kernel_machine import KernelMachine
from torchloo.machine.least_squares import LeastSquares
from torchloo.machine.predictor import Predictor

__all__ = ["KernelMachine", "LeastSquares", "Predictor"]
