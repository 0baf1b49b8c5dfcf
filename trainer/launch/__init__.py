"""Processes and signals: ranks under torchrun, on one host or several, and their exit records.

The launcher's side (`launcher`, `nodes`, `meeting`) and the rank's (`worker`, `signals`). Imports
`observe` and the rooms before it, and torch's elastic agent when ranks start, never before. However a rank or
its loader workers end: a signal reaches each rank once, no process is left behind, and the user sees the
cause once, with an exit code that says what to do.
"""
