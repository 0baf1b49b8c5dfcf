"""Several nodes: which they are, and how their launchers meet at node 0."""

# What launchers have in the run folder. By this one those of several nodes see that they mean the same.
MEETING = ".meeting"
# The job's exit code: written by node 0's launcher when it ends.
EXIT_CODE = ".exit-code"
# What ranks on other nodes write to the terminal.
LOGS = "logs"
