"""Run every script of this folder with the options given here; or put their tables into docs/reproduction.md.

    python scripts/reproduce/all.py --quick --jobs 2    # all papers in a reduced form
    python scripts/reproduce/all.py --jobs 2            # all papers in full: hours
    python scripts/reproduce/all.py --document          # docs/reproduction/*.csv -> docs/reproduction.md

Exits with 1 if a script fails; the others are run in any case.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

from experiment import ROOT, add_options, with_tables

HERE = Path(__file__).resolve().parent


def scripts() -> list[Path]:
    """Every script of a paper."""
    return sorted(
        path for path in HERE.glob("*.py") if path.stem not in ("all", "experiment", "ida", "pairs")
    )


def fill_document() -> None:
    """The tables of docs/reproduction.md from the CSV files beside it."""
    page = ROOT / "docs" / "reproduction.md"
    page.write_text(with_tables(page.read_text(encoding="utf-8"), page.with_suffix("")), encoding="utf-8")


def run_all(given: list[str]) -> list[str]:
    """Run every script; names of those that failed."""
    failed = []
    for script in scripts():
        start = time.perf_counter()
        code = subprocess.run([sys.executable, script, *given]).returncode
        outcome = "done" if code == 0 else f"FAILED with {code}"
        print(f"{script.stem}: {outcome} after {time.perf_counter() - start:.0f} s\n", flush=True)
        if code:
            failed.append(script.stem)
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    parser.add_argument("--document", action="store_true", help="only fill in docs/reproduction.md")
    args = parser.parse_args()
    if args.document:
        fill_document()
        return
    failed = run_all(sys.argv[1:])
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
