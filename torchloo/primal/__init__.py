"""Machines with explicit features: one engine of passes over blocks of rows, from any source.

front.py is where machines hand over their rows, which come in the blocks of block.py. moments.py gathers the
normal equations, machines.py solves them for one regularisation or many, solved.py leaves single rows out,
sets.py clusters, by the formulas of leaving_out.py; refit.py refits what would cancel; backward.py has their
gradients. sink.py takes the held-out rows and files.py makes files for them, seen.py notices rows that have
changed, collective.py is what passes ask of other processes. whole.py has operations on all rows at once that
torch differentiates: for what else a Fit is asked, derivatives of every order and torch's transforms.
"""

from torchloo.primal.whole import Primal

__all__ = ["Primal"]
