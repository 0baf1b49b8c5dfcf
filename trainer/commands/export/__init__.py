"""A run's model for use elsewhere: written in another format, read again in a fresh process, compared."""
