"""Processes and signals: ranks under torchrun, on this host or with others, and how each of them ended.

The launcher's side (`launcher`, `rounds`, `nodes`) and the rank's (`worker`, `signals`). Imports
`observe` and what is before it, and torch's elastic agent when ranks start, never before. Whatever a rank or
its loader's workers come to, a signal reaches each rank once, no process is left behind, and the user hears
the cause once, with an exit code that says what to do.
"""
