"""What a run leaves: folder, manifest, report, the place of its checkpoints; the trackers that hear of it.

Reads, writes and compares a run's files; knows nothing of models, or of how a run is trained. Here is
decided, too, whether code that a run names may run (`trust`).
"""
