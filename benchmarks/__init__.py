"""Benchmarks that prove the claims of the README, against other libraries too; not in the wheel."""
