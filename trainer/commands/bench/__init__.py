"""Benches: each prints what it measured; 1 means that a target was missed, 3 that nothing was measured."""
