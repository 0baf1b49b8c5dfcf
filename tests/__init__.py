"""Tests, named for what they prove."""
