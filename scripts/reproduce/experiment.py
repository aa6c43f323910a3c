"""What the scripts of this folder share: options, work that resumes, tables beside the paper's, pictures.

A script is made of pieces, small calls whose results are kept as they finish:

    from experiment import Piece, beside, options, run, write_picture, write_table

    def one_split(data, name, split): ...         # at the top of the module: another process must find it

    def main():
        args = options(__doc__, splits=10)        # --data --quick --jobs --out --splits
        pieces = [Piece(f"{name} {k}", one_split, (args.data, name, k)) for ...]
        results = run(pieces, args)               # {name of the piece: its result}
        rows = [beside("banana", ours=..., error=..., paper=10.4, paper_error=0.04)]
        write_table("kfd_table1", rows, args)     # printed, and args.out / kfd_table1.csv
        write_picture("kfd_figure1", figure, args)

    if __name__ == "__main__":                    # the processes of the pool import the script
        main()

Names of tables and pictures begin with that of the script (kfd.py: kfd_table1). The tables in
docs/reproduction.md are those of docs/reproduction/*.csv: `python scripts/reproduce/all.py --document`.
"""

import argparse
import atexit
import csv
import json
import math
import multiprocessing
import os
import platform
import re
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

import torchloo as tl
from torchloo.text_table import rendered

ROOT = Path(__file__).resolve().parents[2]


def options(
    description: str,
    splits: int | None = None,
    quick_splits: int = 2,
    flags: dict[str, str] | None = None,
) -> argparse.Namespace:
    """The options of the command line, and .script, the name of the script; prints what is run.

    Args:
        description: the docstring of the script.
        splits: default of --splits in the full form; None where a paper has no splits.
        quick_splits: the same in the quick form.
        flags: switches of this script alone, off by default, and what they do.
    """
    parser = argparse.ArgumentParser(
        description=description.strip(), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    for flag, meaning in (flags or {}).items():
        parser.add_argument(flag, action="store_true", help=meaning)
    args = parser.parse_args()
    if args.data is None or not args.data.is_dir():
        parser.error(
            f"--data must be the folder of the benchmark data (docs/reproduction.md), got {args.data}"
        )
    args.script = Path(sys.argv[0]).stem
    if args.splits is None and splits is not None:
        args.splits = min(quick_splits, splits) if args.quick else splits
    args.out.mkdir(parents=True, exist_ok=True)
    form = "quick form" if args.quick else "full form"
    several = "" if splits is None else f", {args.splits} splits"
    print(f"{args.script}: {form}{several}, {version()}", flush=True)
    atexit.register(_print_cpu_minutes, args)
    return args


def _print_cpu_minutes(args: argparse.Namespace) -> None:
    """What this run took, without results that were there before."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    minutes = sum(one.ru_utime + one.ru_stime for one in used) / 60
    print(f"{args.script}: {minutes:.1f} CPU minutes, --jobs {args.jobs}", flush=True)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Describe the options that every script takes."""
    beside_repository = ROOT.parent / "shared" / "data"
    found = beside_repository if beside_repository.is_dir() else None
    parser.add_argument("--data", type=Path, default=found, help="folder of the benchmark data")
    parser.add_argument("--quick", action="store_true", help="a reduced form, a minute or two")
    parser.add_argument("--jobs", type=_positive, default=1, help="processes, one thread each (default: 1)")
    parser.add_argument(
        "--out", type=Path, default=Path("reproduction"), help="where results go (default: ./reproduction)"
    )
    parser.add_argument(
        "--splits", type=_positive, default=None, help="how many splits, where there are some"
    )


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def version() -> str:
    """What computes: the versions that a result depends on."""
    return f"torchloo {tl.__version__}, torch {torch.__version__}, Python {platform.python_version()}"


class Piece(NamedTuple):
    """A call whose result is kept."""

    name: str
    """Unique, and says everything that the result depends on but --data and --quick."""

    call: Callable[..., Any]
    """A function at the top of its module; returns what JSON holds: numbers, text, lists, dictionaries."""

    arguments: tuple[Any, ...] = ()


def run(pieces: Sequence[Piece], args: argparse.Namespace, jobs: int | None = None) -> dict[str, Any]:
    """The results of all pieces by name, in the order of the pieces.

    Each is appended to args.out / <script>.full.jsonl (or .quick.jsonl) as it finishes, and read back by a
    later run, which does only what is missing: delete the file to begin again. A piece that fails does not
    keep the others from finishing; the first failure is raised afterwards.

    Args:
        jobs: in place of --jobs; 1 for pieces that measure times.
    """
    kept = args.out / f"{args.script}.{'quick' if args.quick else 'full'}.jsonl"
    results = _read(kept)
    missing = [piece for piece in pieces if piece.name not in results]
    if len(missing) < len(pieces):
        print(
            f"{len(pieces) - len(missing)} of {len(pieces)} results were in {kept}; delete it to begin again"
        )
    failed: list[tuple[str, Exception]] = []
    bar = tqdm(total=len(pieces), initial=len(pieces) - len(missing), desc=args.script, unit="piece")
    with bar, kept.open("a", encoding="utf-8") as file, _calls(missing, jobs or args.jobs) as finished:
        for piece, call in finished:
            try:
                seconds, result = call()
            except Exception as failure:
                failed.append((piece.name, failure))
            else:
                line = json.dumps({"piece": piece.name, "seconds": round(seconds, 3), "result": result})
                file.write(line + "\n")
                file.flush()
                results[piece.name] = json.loads(line)["result"]
            bar.update()
    if failed:
        name, failure = failed[0]
        raise RuntimeError(f"{len(failed)} of {len(missing)} pieces failed, first {name!r}") from failure
    return {piece.name: results[piece.name] for piece in pieces}


def _read(kept: Path) -> dict[str, Any]:
    """Results of an earlier run; a line that was cut off counts as missing, and is ended."""
    results: dict[str, Any] = {}
    if not kept.exists():
        return results
    text = kept.read_text(encoding="utf-8")
    if not text.endswith("\n"):
        whole = text[: text.rfind("\n") + 1]
        kept.write_text(whole, encoding="utf-8")
        text = whole
    for line in text.splitlines():
        entry = json.loads(line)
        results[entry["piece"]] = entry["result"]
    return results


Finished = Iterator[tuple[Piece, Callable[[], tuple[float, Any]]]]


@contextmanager
def _calls(pieces: list[Piece], jobs: int) -> Iterator[Finished]:
    """Pieces as they finish, each with a function that gives seconds and result, or raises."""
    if jobs == 1 or len(pieces) < 2:
        torch.set_num_threads(1)
        yield ((piece, lambda piece=piece: _timed(piece)) for piece in pieces)
        return
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")  # read by the processes when they start
    pool = ProcessPoolExecutor(min(jobs, len(pieces)), multiprocessing.get_context("spawn"))
    try:
        futures = {pool.submit(_timed, piece): piece for piece in pieces}
        yield ((futures[future], future.result) for future in as_completed(futures))
    finally:
        pool.shutdown(cancel_futures=True)


def _timed(piece: Piece) -> tuple[float, Any]:
    start = time.perf_counter()
    result = piece.call(*piece.arguments)
    return time.perf_counter() - start, result


def in_turns(sides: dict[str, Callable[[], object]], trials: int) -> dict[str, list[float]]:
    """CPU seconds of every trial by side: sides take turns, so that other work slows all of them alike.

    A first turn, which warms up, is not counted.
    """
    measured: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(trials + 1):
        for name, call in sides.items():
            start = time.process_time()
            call()
            measured[name].append(time.process_time() - start)
    return {name: values[1:] for name, values in measured.items()}


def beside(
    what: str,
    ours: float,
    paper: float | None = None,
    error: float | None = None,
    paper_error: float | None = None,
    **more: Any,
) -> dict[str, Any]:
    """A row of a table: our figure beside the paper's, and their difference in standard errors.

    Args:
        error, paper_error: standard errors; the difference is in units of both together, blank without any.
        more: further columns.
    """
    together = math.hypot(error or 0.0, paper_error or 0.0)
    difference = (ours - paper) / together if paper is not None and together > 0 else None
    return {
        "": what,
        "paper": paper,
        "paper's s.e.": paper_error,
        "ours": ours,
        "s.e.": error,
        "difference / s.e.": difference,
        **more,
    }


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean and its standard error, not a number for a single value."""
    numbers = torch.tensor(values, dtype=torch.float64)
    error = torch.tensor(math.nan)
    if len(numbers) > 1:
        error = numbers.std() / math.sqrt(len(numbers))
    return numbers.mean().item(), error.item()


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Of the line through (log x, log y): the power with which y grows."""
    log_x, log_y = (torch.tensor(values, dtype=torch.float64).log() for values in (x, y))
    centred = log_x - log_x.mean()
    return ((centred * log_y).sum() / centred.square().sum()).item()


def write_table(name: str, rows: Sequence[dict[str, Any]], args: argparse.Namespace) -> None:
    """Print a table and write it to args.out / <name>.csv, in four significant digits."""
    cells = [{column: _cell(value) for column, value in row.items()} for row in rows]
    columns = list(dict.fromkeys(column for row in cells for column in row))
    columns = [column for column in columns if any(row.get(column) for row in cells)]
    cells = [{column: row.get(column, "") for column in columns} for row in cells]
    print(f"\n{name}")
    print("\n".join(rendered(cells, most=len(cells))), flush=True)
    with (args.out / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(cells)


def _cell(value: Any) -> str:
    if value is None or value != value:  # not a number: a single value has no standard error
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def pictures(rows: int = 1, columns: int = 1, size: tuple[float, float] = (6.0, 4.0)) -> tuple[Any, Any]:
    """A figure and its axes, (rows, columns) of them unless there is one."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        rows, columns, figsize=(size[0] * columns, size[1] * rows), layout="constrained"
    )
    for one in figure.axes:
        one.spines[["top", "right"]].set_visible(False)
        one.grid(alpha=0.25)
    return figure, axes


def write_picture(name: str, figure: Any, args: argparse.Namespace) -> None:
    """Write args.out / <name>.png."""
    figure.savefig(args.out / f"{name}.png", dpi=110)
    print(f"drawn: {args.out / f'{name}.png'}", flush=True)


def with_tables(text: str, folder: Path) -> str:
    """A page with the tables of a folder filled in.

    <!-- table NAME --> ... <!-- end --> holds the table of NAME.csv.
    """

    def filled(found: re.Match[str]) -> str:
        with (folder / f"{found[1]}.csv").open(newline="", encoding="utf-8") as file:
            head, *rows = csv.reader(file)
        lines = [head, ["---"] * len(head), *rows]
        table = "\n".join(
            "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
        )
        return f"<!-- table {found[1]} -->\n{table}\n<!-- end -->"

    return re.sub(r"<!-- table (\S+) -->\n.*?<!-- end -->", filled, text, flags=re.DOTALL)
