"""Order of samples as a pure function of seed, epoch and position, without torch or state."""
