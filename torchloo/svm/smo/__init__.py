"""Retraining by sequential minimal optimisation, many problems at once.

In: kernel matrices, labels, boxes and feasible starts (`rounds.smo`), or a trained machine (`loo_smo`).
Out: `rounds.SMOState` with the solutions to epsilon; `loo_smo` makes an `outcomes.RowOutcome` of them.
`free_newton` has the Newton steps on free sets, `box_qp` solves working sets, `bound` stops at a proof.
"""
