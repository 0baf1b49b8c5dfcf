"""Order of samples: arithmetic on seed, epoch and position, without torch or state."""
