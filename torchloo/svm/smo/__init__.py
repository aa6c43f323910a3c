"""Retraining by sequential minimal optimisation, many problems at once.

In: kernel matrices, labels, boxes and feasible starts (`rounds.smo`), or a trained machine (`loo_smo`).
Out: `rounds.SMOState` with the solutions to epsilon; `loo_smo` makes a `records.RowOutcome` of them.
Each round improves `working_sets` and takes the steps of `free_newton`; `bound` stops a problem at a
proof; `options` names the variants.
"""
