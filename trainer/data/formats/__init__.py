"""Data sets on disk or in memory: images, boxes, sound, text; folders, shards, packs."""
