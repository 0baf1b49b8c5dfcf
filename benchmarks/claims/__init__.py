"""`trainer bench claims`: what guides say that settings bring, each measured on this machine."""
