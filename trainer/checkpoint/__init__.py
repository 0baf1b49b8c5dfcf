"""Checkpoints: one folder, all of a run, written during training. Nothing in them is unpickled.

Staged, streamed as safetensors with a manifest of hashes, listed, and the newest good one found. Imports
`host`, and `observe` for its heartbeat; knows tensors by name, and nothing of what is trained. A checkpoint
is whole or absent, whatever is killed when; a damaged one is named and left out.
"""

CHECKPOINTS = "checkpoints"  # of a run folder
