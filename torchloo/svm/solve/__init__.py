"""The exact full machines of stacked problems.

In: kernel matrices K (B, n, n), labels, boxes (`merge.merge_duplicates` makes them a `records.SVMProblem`).
Out: `records.Exact`, coefficients, bias, margins and the optimal active set (`exact.solve_exactly`).
An interior point finds the sets, linear equations of the free set the solution, and a homotopy what is left.
"""
