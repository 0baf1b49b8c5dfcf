"""What a rank's run is made of: task, model, optimizer, loaders, checkpoint, and the memory for these."""
