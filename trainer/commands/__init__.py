"""The commands, a file or a folder each, which nobody imports but the command line, and no other command.

Each has `add_parser`, which says what it takes and what runs it, and imports nothing slow: torch alone takes
two seconds, and comes when a command runs. A command reads its options, asks the rooms, tells what came out
and returns the exit code; what two commands need belongs to a room. It may import every room.

- `train`, `tune`: train a recipe; find its micro-batch first
- `new`, `recipes`: begin a custom task; what there is to train
- `checkpoints`, `report`, `verify`: what a run left, what it did, whether it comes out the same again
- `evaluate`, `export`, `predict`: its model measured again, elsewhere, and what that says of files
- `data`: pack, index, verify, describe and tokenize data sets
- `doctor`, `bench`: what is wrong with the box, and what it can do
- `submit`: `trainer submit`, a run on an engine or a cluster
"""
