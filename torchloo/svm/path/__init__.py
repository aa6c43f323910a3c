"""The exact path from the full machine to the machines without a row.

In: a `merge.Problem`, its `exact.Exact`, the variables to be lowered and by how much (`unlearn.Task`).
Out: `unlearn.Unlearned`, held-out values and what is proved of them; `loo_path` returns a `rows.RowOutcome`.
All problems share one tableau (`tableau`), are followed as one batch (`follow`) and refreshed on the true K.
"""
