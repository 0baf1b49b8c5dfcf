"""Files of a run: folder, manifest, report; and the trackers that log it.

Reads, writes and compares these files. It depends neither on the models nor on the training.
"""
