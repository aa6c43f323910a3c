"""How hyper-parameters are searched: a space, an objective over it, and the search methods.

parameters.py turns the parameters of a machine into one vector, and many vectors into many machines;
problem_batch.py holds the data sets that are searched together, prior.py the hyper-prior; objective.py turns
vectors into values and gradients, all in one batched evaluation. starts.py says where to begin; lbfgs.py,
nelder_mead.py, grid.py and along_reg.py search. run.py puts them together for one machine, compared.py for
several, as `select` does; outer_loop.py does so in every split, for `validate`.
"""
