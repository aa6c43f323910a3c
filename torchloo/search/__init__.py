"""How hyper-parameters are searched: a space, an objective over it, and the ways through it.

parameters.py makes one vector of a machine's parameters and many machines of many vectors; problems.py holds
the data sets that are searched together, score.py the criterion, prior.py the hyper-prior; objective.py turns
vectors into values and gradients, all in one batched evaluation. starts.py says where to begin; gradient.py,
nelder_mead.py, grid.py and along_reg.py search. run.py puts them together for one machine, compared.py for
several, as `select` does; outer.py does so in every split, for `validate`.
"""
