"""Held-out outputs for many regularisations at once: the path of a machine."""

from torchloo.spectral.path import path_dual, path_features

__all__ = ["path_dual", "path_features"]
