"""`python -m benchmarks scoreboard`: the benches against other libraries, on one page."""
