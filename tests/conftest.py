"""Settings of every test."""

import os

import torch
from hypothesis import settings

# These register a device for as long as the process lives; test_devices.py runs them in one of their own.
collect_ignore = ["another_device.py", "svm_elsewhere.py"]

# The problems are small: more threads only wait for one another.
torch.set_num_threads(1)

# A build draws the same examples every time; at a desk they are new in every run.
settings.register_profile("build", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("build")
