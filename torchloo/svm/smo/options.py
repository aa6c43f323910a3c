"""Variants of the SMO, and their checks."""

from numbers import Real
from typing import NamedTuple

from torchloo.guards import whole_number

__all__ = ["SMOOptions", "check_options"]

_LEAST = {"working": 2, "trials": 0, "newton": 0, "most_rounds": 1, "patience": 1}


class SMOOptions(NamedTuple):
    """Variants of Algorithms 1 to 3 of BOUND for method "smo" of `svm_loo`.

    `SMOOptions(working=2, bound=True)` is the proposed algorithm of the paper, `SMOOptions(working=2)` the
    standard one that it is compared with. By default neither proof is looked for on the way: Newton steps
    solve a seeded problem in a few rounds, of which a proof saves too little. Over 47 problems of 12 IDA sets
    the gap ball takes 1.09 times the time (geometric mean), the bound 1.29 times; 6913, 6913 and 6917 of 7010
    rows are certified, as the gap ball judges every row at the end. `scripts/bench/svm_bound.py --solvers
    newton` compares the default with and without the bound.
    """

    working: int = 64
    """Size of the working sets; 2 is the SMO of the paper: each round is one step on the worst pair."""

    seed: bool = True
    """Start from the full machine, else from zero."""

    bound: bool = False
    """Stop when the dual bound proves the sign (only where no values are asked for), Note [dual bound]."""

    gap_ball: bool = False
    """Stop when the gap ball proves it (likewise), Note [gap ball]."""

    trials: int = 10
    """M of the paper: the first so many open points decide whether the proofs are worth their time."""

    useful: float = 0.5
    """The share of them that must be proved before they meet epsilon-KKT."""

    newton: int = 4
    """Newton steps on the free set in each round, at most, Note [free sets]; none with working=2."""

    most_rounds: int = 100_000
    """Problems that need more are left unsolved: "not solved: out of rounds"."""

    patience: int = 100
    """Sweeps, rounds whose working sets have n variables together, that may fail to halve the violation of
    a problem; then it is left unsolved too."""


def check_options(function: str, options: SMOOptions | None, method: str) -> SMOOptions:
    """The options, or the usual ones; an error names what is wrong."""
    if options is None:
        return SMOOptions()
    if not isinstance(options, SMOOptions):
        raise TypeError(f"{function}: smo must be an SMOOptions, got {type(options).__name__}")
    if method != "smo":
        raise ValueError(f'{function}: smo is for method "smo", got method {method!r}; leave it out')
    for name, least in _LEAST.items():
        whole_number(function, f"smo.{name}", getattr(options, name), least)
    for name in ("seed", "bound", "gap_ball"):
        if not isinstance(getattr(options, name), bool):
            raise TypeError(f"{function}: smo.{name} must be True or False, got {getattr(options, name)!r}")
    if not isinstance(options.useful, Real) or not 0 <= options.useful <= 1:
        raise ValueError(f"{function}: smo.useful must be a share from 0 to 1, got {options.useful!r}")
    return options
