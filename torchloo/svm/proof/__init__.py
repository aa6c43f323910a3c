"""Proofs of the signs of held-out decision values.

In: solutions without a row, near the optimum or at it (`certify.Held`), and the rounding of K.
Out: the sign that is proved, or 0, by the duality gap (`certify`) or by the active set (`active`).
`checks` needs the full machine only.
"""
