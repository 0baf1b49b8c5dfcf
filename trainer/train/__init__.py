"""Training run: built from a recipe, trained, evaluated, stopped, resumed, and written to a run folder.

This folder has the files of each step (`loop`, `step`, `state`, `reduction`, `evaluate`, `anomaly`, `hooks`,
`saving`) and the output of a rank (`outputs`, `recording`, `summary`, `provenance`); `components` builds a
run, `start` starts it. A run that was stopped after any step and resumed ends with the same bits as one that
never stopped.
"""
