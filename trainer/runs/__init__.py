"""Files of a run: folder, manifest, report, location of the checkpoints; and the trackers that log it.

Reads, writes and compares these files, and decides whether code that a run names may run (`trust`). It
depends neither on the models nor on the training.
"""
