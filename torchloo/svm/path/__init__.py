"""The exact path from the full machine to the machines without a row.

In: stacked problems (`records.SVMProblem`), their `records.Exact`, and what is to go (`records.Targets`).
Out: `records.Unlearned`, held-out values and what is proved of them; `loo_path` makes
a `records.RowOutcome` of them.
Rows of a machine share its tableau (`tableau`); all are followed as one (`follow`), then refreshed on K.
"""
