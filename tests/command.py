"""The torchloo command, as the tests call it."""

from typing import Any

from torchloo import cli

__all__ = ["require_one_line_error", "run"]


def run(*argv: object) -> Any:
    """The exit code of `torchloo argv`."""
    try:
        return cli.main([str(word) for word in argv])
    except SystemExit as stop:
        return stop.code


def require_one_line_error(capsys: Any, message: str = "") -> None:
    """Nothing was printed but one line of error with the message."""
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert len(err.splitlines()) == 1
