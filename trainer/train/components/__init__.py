"""Components of a rank's run: task, model, optimizer, loaders, checkpoint, and their memory."""
