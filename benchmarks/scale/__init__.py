"""Jobs on more GPUs than this machine has: computed from figures."""
