"""`trainer bench scoreboard`: the benches against other libraries, on one page."""
