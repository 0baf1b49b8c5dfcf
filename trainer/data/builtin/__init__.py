"""Data sets that need no download: synthesized from keyed random numbers, or part of Python itself."""
