#!/usr/bin/env bash
# Sets everything up in .venv, then runs the demonstration; arguments go to `torchloo demo`.
# The picture goes to motorcycle.png in the root of the repository unless --out says otherwise.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"

prepare cli
say "torchloo demo"
"$venv/bin/torchloo" demo --out "$root/motorcycle.png" "$@" </dev/null
