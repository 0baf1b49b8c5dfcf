"""Use of gradients: optimizers, schedules, clipping, and the moving average of the weights.

Imports `models` for the names and blocks of parameter groups, `checkpoint` for the state of the user's
optimizer, and `config`. It runs on the weights' device: in a step nothing here synchronizes with it.
"""
