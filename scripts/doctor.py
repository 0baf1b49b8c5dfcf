#!/usr/bin/env python3
"""`make doctor`: looks at this machine from .venv, and then at what a container of the image sees of it."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from engine_checks import (
    check_engine,
    check_stack,
    container_gpus,
    has_image,
    host_gpus,
    image_digest,
    is_rootless,
    read_stacks,
)
from runtime import docker_words, gpu_words, say, show, visible_gpus

from trainer.errors import BadInputError


def container(image: str, data: str) -> tuple[list[str], str]:
    """What starts a container of the image, with the GPUs that it can see; or why there is none."""
    try:
        check_engine()
    except BadInputError as error:
        return [], str(error)
    if not has_image(image):
        return (
            [],
            f"no image {image}; make image STACK={image.partition(':')[2].removesuffix('-train')} builds it",
        )
    gpus = host_gpus()
    visible = visible_gpus(gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))
    seen = container_gpus(image)[0] if visible else []
    words = gpu_words(gpus, visible, os.environ.get("CUDA_DEVICE_ORDER", "")) if seen else []
    return docker_words(image, words, data, rootless=is_rootless(), digest=image_digest(image)), ""


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
        image = options.image or f"trainer:{check_stack(options.stack, read_stacks()).name}-train"
    except BadInputError as error:
        print(f"doctor: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    here = [f"{options.venv}/bin/trainer", "doctor", *options.words]
    show(here)
    code = subprocess.call(here)
    if code == 2:  # bad input: a container would say the same once more
        return code
    words, lacking = container(image, options.data and str(Path(options.data).resolve()))
    if lacking:
        say(f"not looked at from a container: {lacking}")
        return code
    say(f"from a container of {image}")
    show([*words, "trainer", "doctor", *options.words])
    return max(code, subprocess.call([*words, "trainer", "doctor", *options.words]))


if __name__ == "__main__":
    sys.exit(main())
