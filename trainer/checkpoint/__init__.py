"""Checkpoints: one folder, all of a run, written during training. Nothing in them is unpickled.

They are staged in host memory, streamed as safetensors with a manifest of hashes, and verified when read.
Imports `host`, and `observe` for its heartbeat; knows tensors by name, and neither model nor task. A
checkpoint is complete or absent after a crash at any time; a damaged one is named and skipped.
"""

CHECKPOINTS = "checkpoints"  # of a run folder
