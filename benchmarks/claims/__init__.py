"""`python -m benchmarks claims`: effects of settings that guides claim, each measured on this machine."""
