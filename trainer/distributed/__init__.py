"""Ranks that train one model: process group, reductions, what they decide together, and who hangs.

DDP's sums and the tree's, whose bits don't depend on the number of ranks; the stop on which all agree; the
watchdog. Imports `launch`, `observe`, `host` and `config`. Ranks leave the loop at the same step, or the job
ends with the name of the one that hangs.
"""
