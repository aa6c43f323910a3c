"""Rows that need not fit in memory: stream.py is what a user makes, sources.py where rows come from."""
