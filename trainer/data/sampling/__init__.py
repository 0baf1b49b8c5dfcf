"""Which samples are in which batch: arithmetic on seed, epoch and position, without torch or state."""
