#!/usr/bin/env python3
"""TensorBoard that shows each run once.

TensorBoard follows links, so that it shows the newest run a second time as runs/latest, and mixes into that
what it read there of an older one. A link to a folder that lies below --logdir anyway is left out here; links
that lead elsewhere, to another disk say, are followed. TensorBoard's fast loader walks by itself: it is off.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

from tensorboard import main as tensorboard
from tensorboard.backend.event_processing import io_wrapper


def walk(top: str) -> Iterator[tuple[str, list[str]]]:
    """Folders below a folder and the files in each, each folder once."""
    seen = [Path(top).resolve()]
    for folder, below, files in os.walk(top, followlinks=True):
        kept = []
        for name in sorted(below):
            path = Path(folder, name)
            target = path.resolve()
            # A link to where the walk comes anyway, or back to where it came from.
            if path.is_symlink():
                if any(target.is_relative_to(one) or one.is_relative_to(target) for one in seen):
                    continue
                seen.append(target)
            kept.append(name)
        below[:] = kept
        yield folder, [str(Path(folder, name)) for name in files]


def main() -> None:
    """TensorBoard's own, with its options."""
    io_wrapper.ListRecursivelyViaWalking = walk
    sys.argv[0] = "tensorboard"
    if not any(word.startswith("--load_fast") for word in sys.argv):
        sys.argv.append("--load_fast=false")
    tensorboard.run_main()


if __name__ == "__main__":
    main()
