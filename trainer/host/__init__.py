"""Resources that the machine and the container grant, and files that last.

CPUs and memory by cgroup, affinity, NVML, mounts, processes in /proc; files that are whole or
absent, JSON that is read strictly. Imports no torch, and no room but `config`. An unknown figure is
absent or 0, and looking at it neither raises nor hangs. This file imports nothing: scripts/runtime.py reads
`host.gpus` with a Python that has no packages.
"""
