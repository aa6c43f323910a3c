"""Rows that need not fit in memory, and machines solved by passes over them.

stream.py is what a user makes of rows, sources.py where they come from; moments.py gathers normal equations,
seen.py knows the rows they came from, machines.py solves them, solved.py makes the passes and leaves single
rows out, sets.py clusters, refit.py what would cancel; sink.py takes the held-out rows, files.py makes files
for them; collective.py is what passes ask of other processes.
"""
