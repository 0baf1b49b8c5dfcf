"""A package with sinks, as somebody would install it: a module and its entry points on the search path."""

from pathlib import Path
from textwrap import dedent

from tests.helpers.forked import replace
from tests.helpers.waiting import SECONDS
from trainer.runs.tracking import feed

MODULE = dedent('''
    """Sinks; each tells in a file what it was called with."""

    import json
    import os
    from pathlib import Path

    TOLD = Path(__file__).with_name("told.jsonl")

    def tell(*what):
        with TOLD.open("a") as file:
            file.write(json.dumps([os.getpid(), *what]) + "\\n")

    def send(row):
        tell("sent", row["kind"], row["step"])

    class Watching:
        def open(self, about):
            tell("open", about)
            return about["id"] or f"id-{os.getpid()}", "somewhere"
        def log(self, rows):
            for row in rows:
                tell("row", row["kind"], row["step"], row)
        def close(self, status):
            tell("close", status)

    class Closed(Watching):
        def open(self, about):
            raise ConnectionError("nobody is\\nat http://me:hunter2hunter2@host")

    class Lacking:
        def log(self, rows):
            pass

    number = 3
''')

POINTS = """\
[trainer.sinks]
teller = plugged_sinks:send
watching = plugged_sinks:Watching
closed = plugged_sinks:Closed
lacking = plugged_sinks:Lacking
number = plugged_sinks:number
gone = plugged_nowhere:send
"""


def install(folder: Path) -> Path:
    """Puts it into a folder, which is to be on the search path; returns the file that the sinks write to."""
    about = folder / "plugged_sinks-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: plugged-sinks\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(POINTS)
    (folder / "plugged_sinks.py").write_text(MODULE)
    return folder / "told.jsonl"


def waiting(seconds: float) -> None:
    """Sets, in a fork, the longest wait for trackers at its end; a busy machine is slow."""
    replace(feed, "_FINISH_S", seconds)
    replace(feed, "_LEAVE_S", seconds)


def patiently() -> None:
    waiting(SECONDS)
