"""The commands, a file or a folder each. Only the command line imports them; none imports another.

Each has `add_parser`, which defines the options and the function that runs them, and imports nothing slow:
torch alone takes two seconds and is imported when a command runs. A command reads its options, calls other
rooms, prints the result and returns the exit code. Code that two commands need belongs to another room.

- `train`: trains a recipe
- `new`, `recipes`: write the template of a custom task; list the recipes, or print one
- `runs`, `report`, `verify`: list runs and a run's checkpoints, write its report, replay it and compare bits
- `evaluate`, `export`, `predict`: measure a run's model, write it in another format, apply it to files
- `data`: pack, index, verify, describe and tokenize data sets
- `doctor`: find faults of the machine
- `job`: print a job file for a container engine or a cluster
"""
