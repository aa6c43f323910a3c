"""The subcommands of torchloo, a module each: `add` describes its arguments, `run` does its work."""
