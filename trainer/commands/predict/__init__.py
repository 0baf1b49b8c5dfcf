"""What a run's model says of files, or of its evaluation data: for people."""
