"""A hook that ends its run once, at the step and in the way that a file names."""

import os
import signal
from pathlib import Path

NAME = "CUT"  # the variable with the path of that file: "kill 5"


class Cut:
    """Ends the run, once; gives a figure with each row."""

    def after_step(self, row):
        asked = Path(os.environ[NAME])
        how, step = asked.read_text().split() if asked.exists() else ("", "0")
        if how and row["step"] >= int(step):
            asked.unlink()
            if how == "raise":
                raise RuntimeError("asked to")
            if how == "term":
                os.kill(os.getppid(), signal.SIGTERM)
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        return {"figure": row["step"] * 0.5}

    def after_evaluation(self, step, metrics):  # noqa: ARG002
        return {"measured": step + 0.25}
