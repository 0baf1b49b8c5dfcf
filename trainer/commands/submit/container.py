"""Parts that all places with containers have in common: command, mounts, environment variables."""

import re
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from trainer.commands.submit.spec import NO_USER, JobSpec
from trainer.errors import BadInputError
from trainer.host.environment import IMAGE_DIGEST

DATA = "/data"
RUNS_MOUNT = "/workspace/runs"
CACHE = "/cache"
# A recipe that is a file where the job was launched.
RECIPE_MOUNT = "/recipe"
# What the image writes to besides, as its root is read-only; torch.compile runs code from these.
SCRATCH = {"tmp": "/tmp", "home": "/home/trainer"}


# A reference as engines and the kubelet read it (distribution/reference): host and port, path, tag, digest.
_WORD = "[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?"
_HOST = rf"(?:{_WORD}(?:\.{_WORD})*|\[[0-9a-fA-F:]+\])(?::[0-9]+)?"
_PART = "[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
_DIGEST = "sha256:[0-9a-f]{64}|sha512:[0-9a-f]{128}"
_REFERENCE = re.compile(
    rf"(?P<path>(?:{_HOST}/)?{_PART}(?:/{_PART})*)(?::\w[\w.-]{{0,127}})?(?:@(?:{_DIGEST}))?", re.A
)


class ReadableDumper(yaml.SafeDumper):
    """YAML dumper for people: no `*id001` for repeated values, multi-line texts as blocks."""

    def ignore_aliases(self, _data: Any) -> bool:
        """Returns False: aliases are never written."""
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


ReadableDumper.add_representer(str, _text)


def to_yaml(*documents: dict[str, Any]) -> str:
    """Formats one or several documents as YAML."""
    return yaml.dump_all(documents, Dumper=ReadableDumper, sort_keys=False, width=110, allow_unicode=True)


def check_image(spec: JobSpec) -> str:
    """Returns the image's reference.

    Raises:
        BadInputError: If there is none.
    """
    if not spec.image:
        raise BadInputError("--image is missing: give a reference with its digest, which make push prints")
    if spec.image.endswith((".sqsh", ".sif")):
        raise BadInputError(f"--image {spec.image}: a file for Slurm; give an image in a registry")
    found = _REFERENCE.fullmatch(spec.image)
    if found is None or len(found["path"]) > 255:
        raise BadInputError(
            f"--image {spec.image}: no reference: HOST/NAME in lower case, then :TAG, or "
            "@sha256: and 64 hex digits"
        )
    return spec.image


def fixed_user(spec: JobSpec) -> str:
    """Returns UID and GID of the container.

    Raises:
        BadInputError: For --user none, which only Kubernetes supports.
    """
    if spec.user == NO_USER:
        raise BadInputError(f"--user {NO_USER}: only Kubernetes gives a container a user; leave --user out")
    return spec.user


def scratch(spec: JobSpec) -> list[str]:
    """Returns the folders that the container writes to and that are lost with it."""
    return [*SCRATCH.values(), *([] if spec.cache else [CACHE])]


def recipe_file(spec: JobSpec) -> str:
    """Returns the path of a local recipe inside the container, or ""."""
    return f"{RECIPE_MOUNT}/{PurePosixPath(spec.recipe).name}" if spec.recipe_text is not None else ""


def files(spec: JobSpec) -> list[tuple[Path, str]]:
    """Returns local files to mount, and the path of each inside the container."""
    target = recipe_file(spec)
    recipe = [(Path(spec.recipe).absolute(), target)] if target else []
    return recipe + [(Path(file), f"{RECIPE_MOUNT}/{name}") for name, file in spec.files.items()]


def words(spec: JobSpec) -> list[str]:
    """Returns the command of each node's container, after the image's entrypoint."""
    target = recipe_file(spec)
    return (spec.model_copy(update={"recipe": target}) if target else spec).command()


def timed(spec: JobSpec) -> list[str]:
    """Wraps `words` in a time limit, for engines, which have none.

    Coreutils' timeout passes SIGTERM and SIGUSR1 on, and says with which code the launcher ended (75, after a
    checkpoint). It sends USR1 because it would die of a USR1 that isn't its own.
    """
    limit = ["timeout", "--foreground", "--preserve-status", "--signal=USR1"]
    return [*limit, f"--kill-after={spec.stop_seconds}", str(spec.minutes * 60), *words(spec)]


def variables(spec: JobSpec) -> dict[str, str]:
    """Returns the environment variables of every container, the same on all nodes."""
    digest = spec.image.partition("@")[2]
    return {
        **({IMAGE_DIGEST: digest} if digest else {}),
        # The image asks for every GPU: where NVIDIA's runtime is the default one, a container gets them all.
        **({} if spec.gpus_per_node else {"NVIDIA_VISIBLE_DEVICES": "void"}),
        **spec.environment,
    }


def doubled(text: str) -> str:
    """Doubles the dollars of a text, so that Kubernetes expands no variables in it."""
    return text.replace("$", "$$")
