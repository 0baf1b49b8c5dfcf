"""Ranks that train one model: process group, sharding, reductions, consensus, watchdog.

DDP's sums, and those of the tree reduction, whose bits don't depend on the number of ranks. Imports
`launch`, `observe`, `host` and `config`. All ranks leave the loop at the same step, or the job ends with the
name of the rank that hangs.
"""
