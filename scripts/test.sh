#!/usr/bin/env bash
# Sets everything up in .venv, then checks lint, format and types and runs the tests, README and
# docstrings among them; arguments go to pytest. Slow tests: bash scripts/test.sh -m slow
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"

prepare test
cd "$root"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # the tests' matrices are small: threads only get in each other's way

step() {
    say "$*"
    "$python" -m "$@" </dev/null
}

step ruff check .
step ruff format --check .
step mypy torchloo
step pytest "$@"
say "all passed"
