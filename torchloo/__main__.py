"""`python -m torchloo` is the torchloo command."""

import sys

from torchloo.cli import main

if __name__ == "__main__":
    sys.exit(main())
