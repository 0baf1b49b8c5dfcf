"""Data on its way to the device: what a data set is, the ring that batches travel in, the loaders.

`sampling` says which samples are in which batch, `formats` reads what lies on disk, `builtin` holds what
needs no download, `remote` fetches. Imports `checkpoint` for its tensor files, `observe`, `host` and
`config`; no model and no task. A batch depends on the plan and its number alone: neither on the number of
workers nor on where a run began.
"""
