"""Output of a run: metrics read late from the device, the sinks that they go to, and the one console.

Metrics records and their sinks, time by phase, memory, the profiler, the verdict on a run's bottleneck, and
formatted values. Imports `host` and `config`; facts about a run's sample order or model are passed to it.
Measuring doesn't synchronize the device: its values are read some steps later.
"""
