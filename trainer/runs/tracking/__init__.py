"""Trackers (wandb, mlflow, those of other packages): each in a process of its own beside rank 0.

A thread would do its Python under the interpreter's lock, which the training needs, and a tracker that hangs
or crashes would take the training along. The rank writes rows to a pipe and never waits for it (`feed`); the
process reads them and calls the tracker (`process`).
"""
