"""Start of a run: the decision how it starts, checks, the launch of ranks, and the course of each rank."""
