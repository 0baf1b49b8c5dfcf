"""Data on its way to the device: what a data set is, the ring that batches travel in, the loaders."""
