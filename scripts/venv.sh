# Sourced by demo.sh and test.sh, never run by itself: makes the virtual environment .venv in the
# root of the repository, or reuses it, and installs the package into it (editable, with constraints.txt).
#
# Afterwards $root is the repository, $python the interpreter of the environment.
# PYTHON=... chooses the interpreter that the environment is made from.

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="$root/.venv"
python="$venv/bin/python"

say() { printf '==> %s\n' "$*"; }
fail() { printf 'error: %s\n' "$*" >&2; exit 1; }

is_recent() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' </dev/null >/dev/null 2>&1; }

find_python() {
    local candidate candidates=(python3 python3.13 python3.12 python3.11)
    if [ -n "${PYTHON:-}" ]; then candidates=("$PYTHON"); fi
    for candidate in "${candidates[@]}"; do
        if is_recent "$candidate"; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    fail "no Python 3.11 or later (tried: ${candidates[*]}); name one with PYTHON=/path/to/python"
}

# prepare EXTRA: an environment with torchloo[EXTRA] in it. What was installed is remembered in a
# stamp, so that a second run does nothing, and a changed setup or a moved folder installs anew.
prepare() {
    local extra="$1" base stamp wanted
    if ! is_recent "$python"; then
        base="$(find_python)"
        say "making the virtual environment $venv ($("$base" --version))"
        "$base" -m venv --clear "$venv" \
            || fail "$base -m venv failed; its venv module may be a package of its own (python3-venv)"
    fi
    stamp="$venv/installed-$extra"
    wanted="$root $(cat "$root/setup.cfg" "$root/setup.py" "$root/constraints.txt" | cksum)"
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
        say "using the virtual environment $venv (torchloo[$extra] is installed)"
        return
    fi
    say "installing torchloo[$extra] into $venv (the first time, torch takes a while)"
    "$python" -m pip install --quiet --no-input --disable-pip-version-check \
        --constraint "$root/constraints.txt" --editable "$root[$extra]" </dev/null
    printf '%s\n' "$wanted" >"$stamp"
}
