"""`python -m benchmarks claims`: what guides say that settings bring, each measured on this machine."""
