"""What happens to a job on more GPUs than there are here: computed from figures, and simulated."""
