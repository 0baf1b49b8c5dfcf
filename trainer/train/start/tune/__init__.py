"""Chooses for the box: the loader's workers and prefetch, and the micro-batch."""
