"""Environment variables of a job that may be secrets: rendered files name their source, never their value."""

import re
from pathlib import Path

from trainer.commands.submit.spec import OBJECT, ODD_NAME, JobPlace, Site, text_of_option
from trainer.config.redact import is_secret, redact_text
from trainer.errors import BadInputError

CLUSTERS = ("kubernetes", "kubeflow")
# A line that docker and the shell of a batch script read alike.
_LINE = re.compile(r"(?P<name>[A-Za-z_][A-Za-z0-9_]*)=[^\s\"'\\$#`]*")


def refuse_secret(name: str, value: str, place: JobPlace, option: str = "") -> None:
    """Refuses a secret in plain text.

    Raises:
        BadInputError: For a name that looks like one's, or a URL with a password.
    """
    if not value or not (is_secret(name) or redact_text(value) != value):
        return
    if place in CLUSTERS:
        way = (
            "put NAME=VALUE into a file, 'kubectl create secret generic mine --from-env-file=FILE', and give "
            "--env-from secret:mine"
        )
    else:
        way = "put NAME=VALUE into a file that only you may read (chmod 600), and give --env-from file:PATH"
    what = option or f"--env {name}"
    raise BadInputError(f"{what} looks like a secret, which isn't written down in plain text: {way}")


def from_secrets(site: Site) -> list[str]:
    """Returns the names of the secrets whose keys become variables of the pods.

    Raises:
        BadInputError: If a source is no secret.
    """
    found = []
    for word in site.env_from:
        kind, _, name = word.partition(":")
        if kind != "secret" or not OBJECT.fullmatch(name):
            raise BadInputError(
                f"--env-from {word} names no Secret; give --env-from secret:NAME, one of the job's "
                f"namespace: {ODD_NAME}"
            )
        found.append(name)
    return found


def from_files(site: Site) -> dict[Path, list[str]]:
    """Returns the files that hold variables, with the names in each.

    Raises:
        BadInputError: If one can't be read, others may read it, or a line isn't read alike everywhere.
    """
    return {path: _names(path, word) for word in site.env_from for path in [_file(word)]}


def _file(word: str) -> Path:
    kind, _, path = word.partition(":")
    if kind != "file" or not path:
        raise BadInputError(
            f"--env-from {word} names no file: give --env-from file:PATH, of lines NAME=VALUE"
        )
    return Path(path).expanduser().absolute()


def _names(path: Path, word: str) -> list[str]:
    lines = text_of_option(f"--env-from {word}", path).split("\n")
    if path.stat().st_mode & 0o077:
        raise BadInputError(f"--env-from {word}: others may read it: chmod 600 {path}")
    found = []
    for number, line in enumerate(lines, 1):
        if line and not line.startswith("#"):
            if not (parts := _LINE.fullmatch(line)):
                raise BadInputError(
                    f"--env-from {word}: line {number}: give NAME=VALUE, no blanks, quotes, $, #, ` or \\ "
                    "(not every place reads them alike)"
                )
            found.append(parts["name"])
    return found
