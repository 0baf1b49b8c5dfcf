"""The start of a run: one decision for launcher, ranks and `fit`; its checks; a rank's whole part."""
