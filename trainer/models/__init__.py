"""Architectures, and what is done to a module: weights, precision, checkpointing, compiling, BatchNorm.

Imports `data` to fetch weights, `distributed` for statistics over ranks, `observe`, `host` and `config`;
knows modules and tensors, but no task, no loss and no loop. What is done to a module leaves the names of its
parameters as they were, so that a checkpoint fits with it and without.
"""
