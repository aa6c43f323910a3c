"""`torchloo select`: from a table to a selected machine, an unbiased estimate of its error, and a report."""

import argparse
import math
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from torchloo.cli import report
from torchloo.cli.findings import Findings, choose, estimate, examine
from torchloo.cli.measures import measures
from torchloo.cli.model_file import Model, save
from torchloo.cli.predict import require_device
from torchloo.cli.prepare import PreparedTable, Roles, prepare
from torchloo.cli.reading import read_table
from torchloo.cli.report import pictures
from torchloo.cli.request import Request, Spec, TrainingData, outer_splits
from torchloo.cli.schema import CLASSIFICATION, REGRESSION
from torchloo.cli.shell import (
    UserError,
    add_device,
    add_progress,
    add_table,
    comma_separated,
    count,
    first_line,
    folder,
    new_folder,
    positive,
    whole,
)
from torchloo.cli.summary import described, held_out, summary
from torchloo.cli.uncertainty import MOST_ROWS
from torchloo.criteria import CRITERIA
from torchloo.kernels.kernel import KERNELS
from torchloo.machine import LeastSquares
from torchloo.machine.kernel_machine import MACHINES
from torchloo.search.run import SEARCHES

__all__ = ["add", "run"]

_LONG = 20.0  # seconds; a longer outer estimate is announced beforehand


def add(commands: Any) -> None:
    """Declare the arguments."""
    parser = commands.add_parser(
        "select",
        help="select a machine for a table and estimate how well it predicts",
        description="Select the hyper-parameters of a kernel machine by leave-one-out, estimate how well it "
        "predicts new rows by repeating the whole selection in outer splits, and write a folder with "
        "model.pt, held_out.csv and report.html. Text columns are one-hot encoded, constant columns are "
        "ignored, and inputs are standardised. Whether the target is numeric or a class is inferred from its "
        "values. Numbers in CSV files may have a decimal comma or thousands separators; a note lists the "
        "columns read that way. In held_out.csv, text that a spreadsheet would evaluate as a formula, such "
        "as =A1, is prefixed with a single quote.",
    )
    add_table(parser, "data.csv")
    parser.add_argument("--target", required=True, metavar="COLUMN", help="the column to predict")
    parser.add_argument(
        "--machine",
        choices=("auto", *sorted(MACHINES)),
        default="auto",
        help="auto: lssvm, or sparse if that would not fit into memory (default: %(default)s)",
    )
    parser.add_argument("--kernel", choices=KERNELS, default="rbf", help="(default: %(default)s)")
    parser.add_argument(
        "--criterion",
        choices=sorted(CRITERIA),
        metavar="NAME",
        help=f"selection criterion: {', '.join(sorted(CRITERIA))} (default: press; for svc smooth_error)",
    )
    parser.add_argument(
        "--search",
        choices=SEARCHES,
        help="(default: gradient, or nelder-mead if the criterion is not differentiable)",
    )
    parser.add_argument(
        "--prior",
        type=positive,
        metavar="S",
        help="strength, such as 1, of a prior on the kernel parameters around their start, against "
        "over-fitting of the criterion (default: none)",
    )
    parser.add_argument(
        "--time-budget",
        type=positive,
        metavar="S",
        help="seconds after which the searches stop with the best result so far; half of it is for the "
        "outer estimate, if there is one (default: none)",
    )
    parser.add_argument("--clusters", metavar="COLUMN", help="rows with the same value are left out together")
    parser.add_argument("--weights", metavar="COLUMN", help="a positive weight for each row")
    parser.add_argument(
        "--drop", metavar="COLUMN", action="append", default=[], help="ignore a column; may be repeated"
    )
    parser.add_argument(
        "--missing",
        choices=("error", "drop", "mean"),
        default="error",
        help="missing values: raise an error, drop their rows, or impute the mean of the column (for text, "
        "the most frequent value), in predict too (default: %(default)s)",
    )
    parser.add_argument(
        "--task", choices=(CLASSIFICATION, REGRESSION), help="(default: inferred from the target)"
    )
    parser.add_argument(
        "--outer",
        type=whole,
        default=100,
        metavar="N",
        help="number of outer splits, 0 for none (default: %(default)s)",
    )
    parser.add_argument(
        "--basis", type=count, metavar="M", help="number of basis vectors of --machine sparse (default: 200)"
    )
    parser.add_argument("--seed", type=whole, default=0, metavar="N", help="(default: %(default)s)")
    add_device(parser)
    output = parser.add_argument_group("output")
    output.add_argument("--out", type=folder, metavar="DIR", help="output folder (default: data-torchloo)")
    output.add_argument(
        "--no-report",
        dest="report",
        action="store_false",
        help="do not write report.html, which needs matplotlib",
    )
    add_progress(output)
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Read the table, select, estimate, and write the output folder."""
    if args.report:
        pictures.require()
    require_device(args.device)
    out = _folder(args)
    prepared, request = _prepared(args)
    print(described(args.data, prepared), flush=True)
    with _warnings_printed(), _interruptible() as check:
        findings = _find(prepared, request, check)
    page = None
    if args.report:
        source = report.Source(args.data.name, args.parser.command(args))
        page = report.page(findings, source)
    with new_folder(out) as part:
        model = Model(prepared.schema, findings.choice.machine, findings.uncertainty)
        save(part / "model.pt", request.spec, model)
        (part / "held_out.csv").write_bytes(comma_separated(held_out(findings)).encode())
        if page is not None:
            (part / "report.html").write_text(page, encoding="utf-8")
    written = f"written: {out}" if page is None else f"report: {out / 'report.html'}"
    print(f"\n{summary(findings)}\n\n{written}")
    return 0


def _prepared(args: argparse.Namespace) -> tuple[PreparedTable, Request]:
    """Read the table and resolve the options."""
    frame, notes = read_table(args.data)
    roles = Roles(args.target, args.clusters, args.weights, tuple(args.drop), args.task)
    prepared = prepare(frame, roles, not KERNELS[args.kernel].binary, args.missing)
    args.machine, machine_notes = _machine(args, len(prepared.y))
    request = _request(args, prepared)
    notes += [*prepared.notes, *machine_notes]
    if not prepared.schema.labels and not request.spec.rows:
        notes.append(f"no prediction intervals: the model would have to keep all {len(prepared.y)} rows")
    return prepared._replace(notes=tuple(notes)), request


def _folder(args: argparse.Namespace) -> Path:
    if args.out is not None:
        return args.out
    try:
        return folder(f"{args.data.stem}-torchloo")
    except argparse.ArgumentTypeError as error:
        raise UserError(f"{error} with --out") from None


def _request(args: argparse.Namespace, prepared: PreparedTable) -> Request:
    """Resolve the options; UserError if machine, criterion, task and table do not fit together."""
    classes = len(prepared.schema.labels)
    n, d = prepared.X.shape
    if MACHINES[args.machine].needs_classes and not classes:
        raise UserError(
            f"--machine {args.machine} is a classifier, but {args.target!r} is numeric; use lssvm"
        )
    least_squares = issubclass(MACHINES[args.machine], LeastSquares)
    criterion = args.criterion or ("press" if least_squares else "smooth_error")
    _require_criterion(args, criterion, classes)
    if args.outer and prepared.clusters is not None and len(set(prepared.clusters)) < 3:
        raise UserError("an outer estimate needs at least 3 clusters, got 2; use --outer 0")
    basis = _basis(args, prepared)
    if args.device == "cpu":
        _require_memory(args.machine, args.kernel, n)
    return Request(
        spec=Spec(args.machine, args.kernel, d, basis, 0 if classes else _rows_kept(args, n)),
        criterion=criterion,
        search=args.search or ("gradient" if CRITERIA[criterion].differentiable else "nelder-mead"),
        prior=args.prior,
        outer=args.outer,
        seed=args.seed,
        device=args.device,
        progress=args.progress,
        time_budget=args.time_budget,
        several_classes=classes > 2,
    )


def _require_criterion(args: argparse.Namespace, name: str, classes: int) -> None:
    """Raise if the criterion does not fit the targets, the machine, the clusters or the search."""
    criterion = CRITERIA[name]
    counterpart = criterion.counterpart or "another"
    smooth = criterion.smooth.split()[0] if criterion.smooth else "another"
    if not classes and criterion.targets != "numbers":
        numeric = sorted(each.__name__ for each in CRITERIA.values() if each.targets == "numbers")
        raise UserError(
            f"--criterion {name} needs classes; for numeric targets use one of {', '.join(numeric)}"
        )
    if classes > 2 and criterion.targets == "signs" and criterion.counterpart:
        raise UserError(f"--criterion {name} is for two classes; for {classes} use {counterpart}")
    if classes == 2 and criterion.targets == "one-vs-rest":
        raise UserError(f"--criterion {name} is for more than two classes; for two use {counterpart}")
    least_squares = issubclass(MACHINES[args.machine], LeastSquares)
    if (criterion.needs_variance or criterion.takes_fit) and not least_squares:
        raise UserError(f"--criterion {name} needs a least-squares machine, not {args.machine}")
    if criterion.takes_fit and args.clusters is not None:
        raise UserError(f"--criterion {name} leaves out pairs, not clusters; use {smooth}")
    if args.search == "gradient" and not criterion.differentiable:
        raise UserError(f"--criterion {name} has no gradient; use --search nelder-mead, or {smooth}")


def _rows_kept(args: argparse.Namespace, n: int) -> int:
    """Number of rows that a regression model keeps for intervals: all, or none if that is too costly."""
    explicit = args.machine == "sparse" or KERNELS[args.kernel].is_linear
    most = MOST_ROWS["explicit" if explicit else "dense"]
    return n if n <= most else 0


def _basis(args: argparse.Namespace, prepared: PreparedTable) -> int:
    if args.machine != "sparse":
        if args.basis is not None:
            raise UserError("--basis needs --machine sparse")
        return 0
    n = len(prepared.y)
    most = n // 2  # so that every outer split has enough rows
    if prepared.clusters is not None and args.outer:
        _, sizes = np.unique(prepared.clusters, return_counts=True)
        largest_first = np.sort(sizes)[::-1]
        held_out = 1 if len(sizes) <= args.outer else max(1, round(0.1 * len(sizes)))
        most = min(most, n - int(largest_first[:held_out].sum()))
    if args.basis is not None and args.basis > most:
        raise UserError(
            f"--basis must be at most {most}, so that every outer split has enough rows, got {args.basis}"
        )
    return args.basis or min(200, most)


def _machine(args: argparse.Namespace, n: int) -> tuple[str, list[str]]:
    """Resolve --machine auto; with a note unless it is the default machine."""
    if args.machine != "auto":
        return args.machine, []
    too_large = _too_large("lssvm", args.kernel, n) if args.device == "cpu" else ""
    if too_large:
        return "sparse", [f"the machine is sparse: {too_large}"]
    return "lssvm", []


def _require_memory(machine: str, kernel: str, n: int) -> None:
    """Raise if a machine would not fit into memory."""
    if too_large := _too_large(machine, kernel, n):
        raise UserError(f"{too_large}; use --machine sparse")


def _too_large(machine: str, kernel: str, n: int) -> str:
    """Why a machine does not fit into memory, or "": a dense one needs about six n x n matrices."""
    if machine == "sparse" or KERNELS[kernel].is_linear:
        return ""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        fields = dict(line.split(":") for line in lines)
        available = 1024 * int(fields["MemAvailable"].split()[0])
    except (OSError, KeyError, ValueError):
        return ""
    if 6 * 8 * n * n <= available:
        return ""
    needed = f"{n} rows need about {48e-9 * n * n:.0f} GB with --machine {machine}"
    return f"{needed}, and {available / 1e9:.0f} GB are free"


def _find(prepared: PreparedTable, request: Request, check: Any) -> Findings:
    """All numerical work; errors of the library become user errors."""
    try:
        data = TrainingData.of(prepared, request)
        splits = outer_splits(prepared, data, request)
        choice = choose(data, request)
        check()
        _announce(len(splits), choice.seconds, request.time_of_each)
        measured = measures(data.y, len(prepared.schema.labels))
        outer = estimate(data, request, splits, measured)
        check()
        return examine(prepared, request, data, choice, outer)
    except (ValueError, TypeError, RuntimeError, MemoryError) as error:
        raise UserError(first_line(error)) from error


def _announce(splits: int, seconds: float, most: float | None) -> None:
    """Print the expected time of a long outer estimate."""
    if (total := min(splits * seconds, most or math.inf)) > _LONG:
        shown = f"{total:.0f} s" if total < 100 else f"{total / 60:.0f} min"
        print(f"outer estimate: {splits} selections, about {shown} (--outer 0 to skip it)", flush=True)


@contextmanager
def _warnings_printed() -> Iterator[None]:
    """Print warnings of the library as lines of the command."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for text in dict.fromkeys(first_line(warning.message) for warning in caught):  # type: ignore[arg-type]
        print(f"torchloo select: warning: {text}", file=sys.stderr)


@contextmanager
def _interruptible() -> Iterator[Any]:
    """Yield a function that raises KeyboardInterrupt if a search has caught one and returned early."""
    interrupted = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True
        raise KeyboardInterrupt

    def check() -> None:
        if interrupted:
            raise KeyboardInterrupt

    try:
        previous = signal.signal(signal.SIGINT, handle)
    except ValueError:  # not in the main thread, where no interrupt arrives
        yield check
        return
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, previous)
