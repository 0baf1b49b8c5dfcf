"""Start of a run: the decision how it starts, its checks, the launch of its ranks, and what each rank does."""
