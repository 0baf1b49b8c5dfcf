"""Trains PyTorch models: the whole recipe, exact, explained, and small enough to read."""

__version__ = "0.1.0"
