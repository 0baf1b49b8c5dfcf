"""Data behind s3:// and https://: fetched with patience, kept in a cache that all processes here share."""
