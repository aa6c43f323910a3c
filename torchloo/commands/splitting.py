"""The outer splits of `torchloo select`, known before any search begins."""

import torch

from torchloo.catalogue import TELL_CLASSES_APART
from torchloo.commands.problem import Plan, Problem
from torchloo.commands.shell import UserError
from torchloo.commands.tables import Prepared
from torchloo.splits import Split, resolve

__all__ = ["outer_splits"]


def outer_splits(prepared: Prepared, problem: Problem, plan: Plan) -> list[Split]:
    """Hold-outs of 10 %, of whole clusters where there are some; none where none are asked for.

    Where there are no more clusters than splits asked for, each is left out once.
    """
    if not plan.outer:
        return []
    few = problem.clusters is not None and len(problem.clusters.unique()) <= plan.outer
    generator = torch.Generator().manual_seed(plan.seed)
    splits = resolve("leave-cluster-out" if few else plan.outer, len(problem.y), problem.clusters, generator)
    if plan.spec.machine in TELL_CLASSES_APART:
        _require_classes(prepared, problem, plan.spec.machine, splits)
    return splits


def _require_classes(prepared: Prepared, problem: Problem, machine: str, splits: list[Split]) -> None:
    """Refuse splits that leave no row of a class to a machine which must see all of them."""
    target = prepared.target[problem.order.numpy()]
    for label in prepared.schema.labels:
        member = target == label
        without = sum(not member[split.train.numpy()].any() for split in splits)
        if without:
            raise UserError(
                f"--machine {machine} must see every class, but {without} of {len(splits)} outer splits put "
                f"aside all {member.sum()} rows of {label!r}; take --machine lssvm, or --outer 0"
            )
