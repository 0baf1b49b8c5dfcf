"""Choice of the micro-batch for this machine, by measurement."""
