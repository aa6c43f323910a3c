"""Machines of many regularisations from one decomposition: paths, and one regularisation per output."""

from torchloo.spectral.path import from_features, from_kernel_matrix

__all__ = ["from_features", "from_kernel_matrix"]
