"""Data behind s3:// and https://: downloads with retries, and a cache for all processes of a machine."""
