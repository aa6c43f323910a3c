"""One set of hyper-parameters for several data sets, such as the training rows of several splits.

Note [several splits]
join "mean" is one search, of the mean of the criterion over the splits (Franc, Laskov and Mueller 2008).
join "median" searches every split separately and takes the median of each parameter, between two middle ones
their geometric mean (Raetsch, Onoda and Mueller 2001; Cawley and Talbot 2003); the criterion need not be
comparable between splits. In both cases the value of the result is the mean of its criterion over the
splits, by which machines are compared.
"""

import time
from collections.abc import Sequence

import torch
from tqdm import tqdm

from torchloo.criteria.score import Score
from torchloo.search.compared import Outcome, Rival, require_found, search_all
from torchloo.search.objective import Objective
from torchloo.search.prior import HyperPrior
from torchloo.search.problem_batch import ProblemBatch
from torchloo.search.run import CALLBACK, INTERRUPTED

__all__ = ["JOINS", "check_join", "search_joined"]

JOINS = ("mean", "median")


def check_join(function: str, join: str, several: bool, rivals: Sequence[Rival]) -> None:
    """Raise if the join is unknown or not applicable."""
    if join not in JOINS:
        raise ValueError(f"{function}: join must be one of {', '.join(JOINS)}, got {join!r}")
    if join == "median" and not several:
        raise ValueError(f"{function}: join='median' needs several splits, got splits=None")
    entries = [entry for rival in rivals for entry in rival.space.entries]
    for entry in entries:
        if join == "median" and not entry.log:
            raise ValueError(
                f"{function}: join='median' needs positive parameters, and {entry.name} is not one; use "
                "join='mean'"
            )


def search_joined(
    join: str,
    rivals: Sequence[Rival],
    splits: Sequence[Sequence[ProblemBatch]],
    score: Score,
    deadline: float,
) -> list[Outcome]:
    """The result of each machine over all splits, see Note [several splits].

    Args:
        splits: for every machine its data sets, each a single problem.
    """
    several = len(splits[0]) > 1
    for number, data in enumerate(splits[0]):
        score.require_targets(data.y[0], f" in split {number}" if several else "")
    joined_data = [data[0]._replace(joined=tuple(data[1:])) for data in splits]
    if join == "mean":
        return search_all(rivals, joined_data, score, deadline)
    searched = _each_split(rivals, splits, score, deadline)
    done = _evaluations(searched)
    joined = []
    for k in range(len(searched[0])):  # machines that were searched before an early stop
        of_machine = [outcomes[k] for outcomes in searched if k < len(outcomes)]
        joined.append(_at_medians(of_machine, joined_data[k], score, done + k + 1))
    require_found(joined, [""])
    return joined


def _evaluations(searched: list[list[Outcome]]) -> int:
    return sum(len(outcome.history) for outcomes in searched for outcome in outcomes)


def _each_split(
    rivals: Sequence[Rival],
    splits: Sequence[Sequence[ProblemBatch]],
    score: Score,
    deadline: float,
) -> list[list[Outcome]]:
    """A separate search of every split, up to an early stop; each has an equal share of the time."""
    searched: list[list[Outcome]] = []
    for number, data in enumerate(zip(*splits, strict=True)):
        now = time.monotonic()
        until = now + (deadline - now) / (len(splits[0]) - number)
        name = f" in split {number}"
        try:
            outcomes = search_all(rivals, data, score, until, [name], _evaluations(searched))
        except KeyboardInterrupt:
            if not searched:
                raise
            searched[-1] = [outcome._replace(stopped=INTERRUPTED) for outcome in searched[-1]]
            return searched
        searched.append(outcomes)
        if any(outcome.stopped in (INTERRUPTED, CALLBACK) for outcome in outcomes):
            return searched
    return searched


def _at_medians(searched: Sequence[Outcome], data: ProblemBatch, score: Score, number: int) -> Outcome:
    """Evaluate one machine at the medians of the parameters that its searches found."""
    rival = searched[0].rival
    history = [step for outcome in searched for step in outcome.history]
    best = [outcome.objective.best[0].theta for outcome in searched]
    found = [theta for theta in best if theta is not None]
    with tqdm(disable=True) as bar:
        objective = Objective(rival.space, data, score, HyperPrior(None, rival.space, 0), bar)
        if found:
            median = torch.stack(found).quantile(0.5, dim=0, keepdim=True)  # (1, p)
            objective(median, torch.zeros(1, dtype=torch.long, device="cpu"))
    history += [step._replace(number=number, machine=history[0].machine) for step in objective.history]
    objective.evaluations[0] = len(history)
    stopped = [outcome.stopped for outcome in searched if outcome.stopped]
    return Outcome(rival, objective, stopped[-1] if stopped else "", history)
