"""What a run tells: figures read late from the device, and the sinks that they go to."""
