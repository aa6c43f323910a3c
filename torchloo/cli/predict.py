"""`torchloo predict`: predictions of a selected machine for new rows."""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchloo.cli.model_file import load
from torchloo.cli.reading import pandas, read_table
from torchloo.cli.schema import Schema
from torchloo.cli.shell import (
    UserError,
    add_device,
    add_out,
    add_table,
    comma_separated,
    first_line,
    positive,
    require_other_file,
    write,
)

__all__ = ["add", "require_device", "run"]

_ROWS = 4096  # rows predicted at once, which bounds the memory


def add(commands: Any) -> None:
    """Declare the arguments."""
    parser = commands.add_parser(
        "predict",
        help="predict new rows with a model of torchloo select",
        description="Predict the rows of a table with a model written by torchloo select. The table must "
        "have the input columns of the model; if it also has the target column, the predictions are compared "
        "with it. A predicted number comes with a jackknife+ prediction interval, a predicted class with the "
        "probabilities of all classes, calibrated on held-out predictions. Classes that a spreadsheet would "
        "evaluate as a formula, such as =A1, are prefixed with a single quote.",
    )
    parser.add_argument("model", type=Path, metavar="model.pt", help="the model")
    add_table(parser, "new.csv")
    add_out(parser, "predictions.csv")
    parser.add_argument(
        "--ignore-extra",
        action="store_true",
        help="ignore columns that are not inputs of the model",
    )
    parser.add_argument(
        "--level",
        type=_level,
        metavar="P",
        help="coverage of the prediction intervals (default: 0.9)",
    )
    add_device(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Predict and write the predictions."""
    require_other_file(args.out, args.model, args.data)
    require_device(args.device)
    pd = pandas()
    schema, machine, uncertainty = load(args.model, args.device)
    if args.level is not None and uncertainty.rows is None:
        reason = "it predicts classes" if schema.labels else "it was trained on too many rows to keep them"
        raise UserError(f"--level: the model has no prediction intervals, since {reason}")
    frame, notes = read_table(args.data, schema.text, schema.decimals)
    X = torch.tensor(schema.design(frame, args.ignore_extra), device=args.device)
    try:
        with torch.no_grad():
            parts = [machine(part) for part in X.split(_ROWS)]
            outputs = torch.cat(parts).cpu().numpy()
        _require_finite(outputs)
        intervals = uncertainty.columns(schema, machine, X, outputs, args.level or 0.9)
    except (ValueError, RuntimeError) as error:
        raise UserError(first_line(error)) from error
    rows = "1 row" if len(frame) == 1 else f"{len(frame)} rows"
    lines = [f"{rows} predicted: {args.out}", *(f"  note: {note}" for note in notes)]
    if schema.target in frame.columns and not frame[schema.target].isna().any():
        y = schema.codes(frame[schema.target])
        lines.append(_comparison(schema, y, outputs, intervals))
    numbers = np.arange(1, len(frame) + 1)
    columns = {"row": numbers, **_columns(schema, outputs), **intervals}
    write(args.out, comma_separated(pd.DataFrame(columns)).encode())
    print("\n".join(lines))
    return 0


def _level(text: str) -> float:
    """An argument between 0 and 1."""
    if (value := positive(text)) >= 1:
        raise argparse.ArgumentTypeError(f"must be below 1, such as 0.9, got {text!r}")
    return value


def require_device(device: str) -> None:
    """Raise if a device is not available."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {device}: {first_line(error)}") from error


def _require_finite(outputs: np.ndarray) -> None:
    """Raise if a prediction overflows, as for very large inputs."""
    finite = np.isfinite(outputs).reshape(len(outputs), -1).all(1)
    if not finite.all():
        row = int((~finite).argmax()) + 1
        raise UserError(
            f"the prediction of row {row} is not finite; its inputs are far outside the training data"
        )


def _columns(schema: Schema, outputs: np.ndarray) -> dict[str, np.ndarray]:
    prediction = {"prediction": schema.decoded(outputs)}
    if not schema.labels:
        return prediction
    if outputs.ndim == 1:
        return prediction | {"score": outputs}
    scores = {f"score {label}": outputs[:, k] for k, label in enumerate(schema.labels)}
    return prediction | scores


def _comparison(schema: Schema, y: np.ndarray, outputs: np.ndarray, intervals: dict[str, np.ndarray]) -> str:
    """A comparison of the predictions with the target column of the same table."""
    text = f"compared with column {schema.target!r}:"
    if not schema.labels:
        rmse = np.sqrt(np.mean((y - outputs) ** 2))
        text += f" RMSE {rmse:.4g}"
        if not intervals:
            return text
        inside = (intervals["lower"] <= y) & (y <= intervals["upper"])
        return f"{text}, {int(inside.sum())} of {len(y)} in their intervals ({inside.mean():.1%})"
    if y.ndim == 1:
        wrong = (y > 0) != (outputs >= 0)
    else:
        wrong = y.argmax(1) != outputs.argmax(1)
    return f"{text} {int(wrong.sum())} of {len(y)} wrong ({wrong.mean():.1%})"
