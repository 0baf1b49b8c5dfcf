"""Trackers (wandb, mlflow, those of other packages): each in a process of its own beside rank 0.

A thread would compete for the interpreter's lock, and a tracker that hangs or crashes would stop the
training. The rank writes records to a pipe without waiting (`feed`); the process reads them and calls the
tracker (`process`).
"""
