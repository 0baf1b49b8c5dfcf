"""Choice of micro-batch, loader workers and prefetch for this machine, by measurement."""
