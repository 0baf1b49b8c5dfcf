"""Output of a run: metrics read late from the device, the sinks that they go to, and the one console.

Rows and their sinks, time by phase, memory, the profiler, the verdict on what holds a run up, and values as
people read them. Imports `host` and `config`; what it tells of a run's order or model is handed to it.
Measuring doesn't stop the device: what is on it is read some steps later.
"""
