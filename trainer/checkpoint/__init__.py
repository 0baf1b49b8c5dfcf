"""Checkpoints: one folder, all of a run, written while training goes on. Nothing in them is unpickled."""

FOLDER = "checkpoints"  # of a run folder
