"""Standard output, whatever the locale."""

import io
import sys


def print_anything() -> None:
    """Lets standard output take any character, as standard error does: LC_ALL=C may be set."""
    if isinstance(sys.stdout, io.TextIOWrapper) and not sys.stdout.encoding.lower().startswith("utf"):
        sys.stdout.reconfigure(errors="backslashreplace")
