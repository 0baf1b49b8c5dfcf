"""Use of gradients: optimizers, schedules, clipping, and the moving average of the weights.

Imports `models` for the names and blocks that parameter groups go by, `checkpoint` for what a user's own
optimizer keeps, and `config`. All of it is computed
where the weights are: in a step nothing here makes the host wait for the device.
"""
