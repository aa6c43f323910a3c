"""Algorithms 1 to 3 of Franc, Laskov and Mueller (2008) on one machine, with the solver of pairs.c.

    library = compiled(folder)                    # needs a C compiler, cc
    full = trained(library, K, y, C, epsilon)     # the full machine
    full.open                                     # rows that no check of the paper's Table 1 resolves
    without(library, full, row, epsilon, proof=OWN)

The solver of torchloo, `SVC.loo(..., method="smo", smo=SMOOptions(working=2))`, takes the same steps for many
problems at once. Those of the paper's Table 3 need up to millions of them, one after the other, each of half
a microsecond: too little work for a tensor operation.
"""

import ctypes
import shutil
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

NO_PROOF, OWN, SHARED = 0, 1, 2  # how beta moves, pairs.c
OUT_OF_STEPS, EPSILON_KKT, PROVED = 0, 1, 2  # why a problem ended
MOST_STEPS = 100_000_000


def compiled(folder: Path) -> Path:
    """The shared library of pairs.c, in a folder."""
    if shutil.which("cc") is None:
        raise RuntimeError("bound.py needs a C compiler that is called cc: none was found")
    library = folder / "pairs.so"
    source = Path(__file__).with_suffix(".c")
    # Sums in any order, but not -ffast-math: a library that is linked with it takes subnormal numbers from
    # the whole process.
    sums = ["-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math", "-fno-math-errno"]
    flags = ["-O3", "-march=native", *sums, "-ffinite-math-only", "-shared", "-fPIC"]
    subprocess.run(["cc", *flags, "-o", str(library), str(source)], check=True)
    return library


class _Outcome(ctypes.Structure):
    """The struct `outcome` of pairs.c."""

    _fields_ = (
        ("columns", ctypes.c_long),
        ("beta_columns", ctypes.c_long),
        ("steps", ctypes.c_long),
        ("stopped", ctypes.c_int),
        ("sign", ctypes.c_int),
        ("bias", ctypes.c_double),
    )


class Solved(NamedTuple):
    """A problem that was solved, and what it took."""

    columns: int
    """Kernel columns, those of the start included."""
    beta_columns: int
    """Those of them that only beta of Algorithm 3 needed."""
    stopped: int
    """OUT_OF_STEPS, EPSILON_KKT or PROVED."""
    sign: int
    """Of the output at the row left out."""
    bias: float
    seconds: float
    """CPU seconds."""


class Full(NamedTuple):
    """A machine trained on all rows."""

    K: np.ndarray
    """(n, n)."""
    y: np.ndarray
    """-1 and +1, (n,)."""
    C: float
    alpha: np.ndarray
    """(n,)."""
    F: np.ndarray
    """K (alpha * y) - y, (n,)."""
    open: np.ndarray
    """Rows that no check resolves."""
    errors: np.ndarray
    """Which rows the checks call errors, (n,) bool."""
    columns: int
    seconds: float


def trained(
    library: Path,
    K: np.ndarray,
    y: np.ndarray,
    C: float,
    epsilon: float,
    alpha: np.ndarray | None = None,
) -> Full:
    """Steps 1 and 2 of Algorithm 1: the full machine from zero to epsilon, and the checks of Table 1.

    Args:
        alpha: the coefficients, if they are known: nothing is solved then.
    """
    start = time.process_time()
    if alpha is None:
        alpha = np.zeros(len(y))
        F = -y
        solved = _solve(library, K, y, C, -1, alpha, F, epsilon, NO_PROOF)
        bias, columns = solved.bias, solved.columns
    else:
        alpha = _snapped(alpha, C)
        F = K @ (alpha * y) - y
        columns = 0
        bias = _middle_bias(alpha, F, y, C)
    outputs = F + y + bias
    correct = y * outputs >= 0
    slack = np.clip(1 - y * outputs, 0, None)
    largest_distance = K.diagonal().max() - K.min()  # R^2 of the third check
    stable = bool(((alpha > 0) & (alpha < C)).any())
    third = stable & (2 * alpha * largest_distance + slack < 1)
    unresolved = (alpha > 0) & correct & ~third
    errors = (alpha > 0) & ~correct
    seconds = time.process_time() - start
    return Full(K, y, C, alpha, F, np.flatnonzero(unresolved), errors, columns, seconds)


def _middle_bias(alpha: np.ndarray, F: np.ndarray, y: np.ndarray, C: float) -> float:
    """-(b_up + b_low) / 2 of a solution."""
    can_grow, can_shrink = alpha < C, alpha > 0
    rises = np.where(y > 0, can_grow, can_shrink)
    falls = np.where(y > 0, can_shrink, can_grow)
    return -(F[rises].min() + F[falls].max()) / 2


def without(library: Path, full: Full, row: int, epsilon: float, proof: int = NO_PROOF) -> Solved:
    """Step 3 of Algorithm 1: the machine without a row, seeded by the full one."""
    start = time.process_time()
    alpha = seed(full, row)
    changed = np.flatnonzero(alpha != full.alpha)
    change = (alpha - full.alpha) * full.y
    F = full.F + full.K[changed].T @ change[changed]
    solved = _solve(library, full.K, full.y, full.C, row, alpha, F, epsilon, proof)
    seconds = time.process_time() - start
    return solved._replace(columns=solved.columns + len(changed), seconds=seconds)


def seed(full: Full, row: int) -> np.ndarray:
    """A feasible start without a row: what it held goes to the rows nearest in kernel that can take it.

    First by growing alpha of its own class, then by shrinking that of the other.
    """
    alpha = full.alpha.copy()
    C = full.C
    same = full.y == full.y[row]
    held, alpha[row] = alpha[row], 0.0
    same[row] = False
    given = _poured(held, np.where(same, C - alpha, 0.0), full.K[row])
    alpha += given
    others = np.where(full.y == full.y[row], 0.0, alpha)
    taken = _poured(held - given.sum(), others, full.K[row])
    return _snapped(alpha - taken, C)


def _snapped(alpha: np.ndarray, C: float) -> np.ndarray:
    """Coefficients that are at a bound up to rounding, put there."""
    alpha = np.where(alpha < 1e-12 * C, 0.0, alpha)
    return np.where(C - alpha < 1e-12 * C, C, alpha)


def _poured(amount: float, room: np.ndarray, near: np.ndarray) -> np.ndarray:
    """Fill rooms in the order of nearness until the amount is spent."""
    order = np.argsort(-np.where(room > 0, near, -np.inf), kind="stable")
    sorted_room = room[order]
    before = sorted_room.cumsum() - sorted_room
    given = np.zeros_like(room)
    given[order] = np.clip(amount - before, 0, sorted_room)
    return given


def _solve(
    library: Path,
    K: np.ndarray,
    y: np.ndarray,
    C: float,
    row: int,
    alpha: np.ndarray,
    F: np.ndarray,
    epsilon: float,
    proof: int,
) -> Solved:
    """`solve` of pairs.c, which changes alpha and F; epsilon as in the paper's conditions (8).

    These hold for some bias where the worst pair violates its conditions by at most 2 epsilon.
    """
    arrays = [np.ctypeslib.ndpointer(np.float64, flags="C_CONTIGUOUS")] * 2
    solve = ctypes.CDLL(str(library)).solve
    solve.restype = None
    solve.argtypes = [
        ctypes.c_int, *arrays, ctypes.c_double, ctypes.c_int, *arrays,
        ctypes.c_double, ctypes.c_long, ctypes.c_int, ctypes.POINTER(_Outcome),
    ]  # fmt: skip
    out = _Outcome()
    start = time.process_time()
    solve(len(y), K, y, C, row, alpha, F, 2 * epsilon, MOST_STEPS, proof, out)
    return Solved(out.columns, out.beta_columns, out.stopped, out.sign, out.bias, time.process_time() - start)
