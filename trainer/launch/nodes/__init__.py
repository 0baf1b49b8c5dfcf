"""Several nodes: finding them, and the rendezvous of their launchers in the run folder."""

# What launchers have in the run folder: a file of each, by which they see each other.
FOLDER = "nodes"
# The job's exit code: written by node 0's launcher when it ends.
EXIT_CODE = ".exit-code"
# What ranks on other nodes write to the terminal.
LOGS = "logs"
