#!/usr/bin/env python3
"""`make doctor`: looks at this machine from .venv, and then at what a container of the image sees of it."""

from __future__ import annotations

import argparse
import subprocess
import sys

from container_words import container_words, gpus_here, say, show
from engine_checks import check_engine, check_stack, container_gpus, has_image

from trainer.errors import BadInputError


def container(image: str, data: str) -> tuple[list[str], str]:
    """Returns the command for a container of the image with the visible GPUs, or why there is none."""
    try:
        check_engine()
    except BadInputError as error:
        return [], str(error)
    if not has_image(image):
        return (
            [],
            f"no image {image}; make image STACK={image.partition(':')[2].removesuffix('-train')} builds it",
        )
    gpus, visible = gpus_here()
    seen = visible and container_gpus(image)[0]
    return container_words(image, gpus, visible if seen else [], data), ""


def main() -> int:
    """Reads the arguments; returns the larger exit code of the two."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--stack", default="torch2.9-cu128", metavar="NAME", help="folder of stacks/ (%(default)s)")
    add("--image", default="", metavar="TAG", help="an image instead of the stack's")
    add("--data", default="", metavar="DIR", help="a folder to show to the container, read-only")
    add("--venv", default=".venv", metavar="DIR", help="where .venv is (%(default)s)")
    add("words", nargs="*", metavar="WORD", help="after --: of `trainer doctor`")
    options = parser.parse_args()
    try:
        image = options.image or f"trainer:{check_stack(options.stack).name}-train"
    except BadInputError as error:
        print(f"doctor: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    here = [f"{options.venv}/bin/trainer", "doctor", *options.words]
    show(here)
    code = subprocess.call(here)
    if code == 2:  # bad input: a container would say the same once more
        return code
    words, lacking = container(image, options.data)
    if lacking:
        say(f"not looked at from a container: {lacking}")
        return code
    say(f"from a container of {image}")
    show([*words, "trainer", "doctor", *options.words])
    return max(code, subprocess.call([*words, "trainer", "doctor", *options.words]))


if __name__ == "__main__":
    sys.exit(main())
