"""A run: built from its recipe, trained step by step, evaluated, stopped, resumed, and written to its folder.

Here stand the files of each step (`loop`, `step`, `state`, `reduction`, `evaluate`, `anomaly`, `hooks`,
`saving`), and what a rank says and writes meanwhile (`outputs`, `recording`, `summary`, `provenance`); in
`components` what a run is made of, in `start` how it is started. A run that was stopped at any step and goes
on ends with the same bits as one that never stopped.
"""
