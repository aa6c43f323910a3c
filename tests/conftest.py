"""Settings of every test."""

import torch

# The problems are small: more threads only wait for one another.
torch.set_num_threads(1)
