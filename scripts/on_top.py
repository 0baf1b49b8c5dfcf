#!/opt/env/bin/python -I
"""The Python by which pip puts packages on top of the image's, and takes them away again.

pip.conf of the image's environment names this program as pip's `python`. It becomes the Python of a virtual
environment below /workspace, and makes that first: there pip removes and replaces what it has installed, and
leaves the image's packages, which it sees, as they are. The standard library is enough.
"""

import contextlib
import os
import sys
import sysconfig
from configparser import ConfigParser
from pathlib import Path

CHANGES = {"install", "uninstall"}
# The image's packages come first here, too. This line is run when its folder was added to sys.path: by the
# Python of this folder, or by the image's own, which has them already.
_IMAGE_FIRST = (
    "import site, sys; own = [sys.path.pop()] if sys.prefix == {folder!r} else []; "
    "own and site.addsitedir({site!r}); sys.path.extend(own)\n"
)


def files(folder: Path, site: str, held: str) -> dict[str, str]:
    """The texts of a virtual environment over that of this Python, by path.

    Args:
        folder: Where it is.
        site: Where the environment below has its packages.
        held: The file of constraints that hold these.
    """
    home = Path(getattr(sys, "_base_executable", sys.executable)).parent
    settings = f"[global]\ndisable-pip-version-check = true\n\n[install]\nconstraint = {held}\n"
    return {
        "pyvenv.cfg": f"home = {home}\ninclude-system-site-packages = false\n",
        "pip.conf": settings,
        f"lib/python{sysconfig.get_python_version()}/site-packages/image.pth": _IMAGE_FIRST.format(
            folder=str(folder), site=site
        ),
    }


def make(folder: Path, texts: dict[str, str]) -> None:
    """Makes the virtual environment, or what it lacks.

    Raises:
        OSError: If it can't be written.
    """
    for name, text in texts.items():
        path = folder / name
        if not path.is_file() or path.read_text() != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    python = folder / "bin/python"  # programs that pip installs begin with it
    if not python.is_symlink() or str(python.readlink()) != sys.executable:
        python.parent.mkdir(exist_ok=True)
        python.unlink(missing_ok=True)
        with contextlib.suppress(FileExistsError):
            python.symlink_to(sys.executable)


def main() -> None:
    """Becomes the Python, with the words that pip gave."""
    words = sys.argv[1:]
    settings = ConfigParser(interpolation=None)
    settings.read(Path(sys.prefix) / "pip.conf")
    folder = Path(settings["on-top"]["folder"])
    name = folder / "bin/python"
    try:
        make(folder, files(folder, sysconfig.get_path("purelib"), settings["install"]["constraint"]))
    except OSError as error:
        if CHANGES & set(words):
            why = f"{folder}, where packages on top lie, can't be written ({error.strerror})"
            sys.exit(f"pip: {why}: mount a folder at /workspace, or make a virtual environment of your own")
        name = Path(sys.executable)
    if any(word.partition("=")[0] == "--prefix" for word in words):
        name = Path(sys.executable)  # which then finds the image's packages, and names itself in programs
    # The image's own program, whatever lies in that folder: by its name Python finds the virtual environment.
    os.execv(sys.executable, [str(name), *words])


if __name__ == "__main__":
    main()
