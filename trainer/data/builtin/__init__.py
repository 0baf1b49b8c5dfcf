"""Real and made-up data that need no download: made from keyed numbers, or from what Python itself brings."""
