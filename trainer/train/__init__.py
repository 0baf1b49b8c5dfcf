"""A run: built from its recipe, trained step by step, evaluated, stopped, resumed, and written to its folder.

The loop and what is around it: anomalies, the run folder, its manifest and its report, what is tuned for the
box. Imports every room but `commands`. A run that was stopped at any step and goes on ends with the same bits
as one that never stopped.
"""
