"""What lies on disk or in memory, as data sets: images, boxes, sound, text; folders, shards, packs."""
