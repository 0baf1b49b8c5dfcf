"""What data there is, by name. Imports no torch."""

from typing import Literal

Kind = Literal[
    "digits",
    "synthetic",
    "folder",
    "table",
    "shards",
    "pack",
    "cifar10",
    "stdlib",
    "tokens",
    "text",
    "dtmf",
    "digits-canvas",
    "coco",
    "own",
]

# Nothing is read from data.path.
EMBEDDED = ("digits", "synthetic", "stdlib", "dtmf", "digits-canvas", "own")
# Held in memory, or read where it is used: without workers.
WITHOUT_WORKERS = (*EMBEDDED, "cifar10", "text", "tokens")
