"""The torchloo command: `main` runs a subcommand and reports user errors in one line.

Each subcommand is a module: `add` declares its arguments, `run` does its work.
"""

import os
import sys
from collections.abc import Sequence

import torchloo as tl
from torchloo.cli import bench, demo, predict, select
from torchloo.cli.reading import TableError
from torchloo.cli.shell import Parser, UserError

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; its exit code: 0 done, 2 wrong use, 130 interrupted, 141 output closed."""
    args = _parser().parse_args(argv)
    try:
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except (UserError, TableError) as error:
        print(f"torchloo {args.command}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"torchloo {args.command}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `torchloo select ... | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        return 141


def _parser() -> Parser:
    parser = Parser(prog="torchloo", description="Kernel machines with exact leave-one-out.")
    parser.add_argument("--version", action="version", version=f"torchloo {tl.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    for command in (demo, select, predict, bench):
        command.add(commands)
    return parser
