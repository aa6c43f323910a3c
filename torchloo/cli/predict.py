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
    comma_separated,
    first_line,
    positive,
    require_other_file,
    writable,
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
    parser.add_argument("data", type=Path, metavar="new.csv", help="the table: .csv, .parquet or .npz")
    parser.add_argument(
        "--out",
        type=writable(".csv"),
        default="predictions.csv",
        metavar="FILE",
        help="output file (default: %(default)s)",
    )
    parser.add_argument(
        "--ignore-extra", action="store_true", help="ignore columns that are not inputs of the model"
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
            outputs = torch.cat([machine(part) for part in X.split(_ROWS)]).cpu().numpy()
        _require_finite(outputs)
        beside = uncertainty.columns(schema, machine, X, outputs, args.level or 0.9)
    except (ValueError, RuntimeError) as error:
        raise UserError(first_line(error)) from error
    compared = []
    if schema.target in frame.columns and not frame[schema.target].isna().any():
        compared.append(_comparison(schema, schema.codes(frame[schema.target]), outputs, beside))
    columns = {"row": np.arange(1, len(frame) + 1), **_columns(schema, outputs), **beside}
    write(args.out, comma_separated(pd.DataFrame(columns)).encode())
    rows = "1 row" if len(frame) == 1 else f"{len(frame)} rows"
    print("\n".join([f"{rows} predicted: {args.out}", *(f"  note: {note}" for note in notes), *compared]))
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
    return prediction | {f"score {label}": outputs[:, k] for k, label in enumerate(schema.labels)}


def _comparison(schema: Schema, y: np.ndarray, outputs: np.ndarray, beside: dict[str, np.ndarray]) -> str:
    """A comparison of the predictions with the target column of the same table."""
    if not schema.labels:
        rmse = np.sqrt(np.mean((y - outputs) ** 2))
        text = f"compared with column {schema.target!r}: RMSE {rmse:.4g}"
        if not beside:
            return text
        inside = (beside["lower"] <= y) & (y <= beside["upper"])
        return f"{text}, {int(inside.sum())} of {len(y)} in their intervals ({inside.mean():.1%})"
    wrong = (y > 0) != (outputs >= 0) if y.ndim == 1 else y.argmax(1) != outputs.argmax(1)
    return (
        f"compared with column {schema.target!r}: {int(wrong.sum())} of {len(y)} wrong ({wrong.mean():.1%})"
    )
