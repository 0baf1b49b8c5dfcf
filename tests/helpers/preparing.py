"""`trainer train` in this process, up to the moment where its ranks would train."""

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from trainer.errors import EXIT_BAD_INPUT, BadInputError, paths_explained
from trainer.launch.launcher import Launched, LocalRanks, say_on_stderr
from trainer.train.request import Request, from_json
from trainer.train.start.prepare import prepare


def prepare_only(_: str, request: Mapping[str, Any], local: LocalRanks, **__: Any) -> Launched:
    """In place of `launch`: prepares as rank 0 does, and says why the run is refused, as it must be."""
    with ExitStack() as stack:
        try:
            with paths_explained():
                prepare(from_json(Request, request), local.ranks, stack)
        except BadInputError as error:
            say_on_stderr(f"trainer: error: {' '.join(str(error).split())}\n", "error")
            return Launched(EXIT_BAD_INPUT, request)
    raise AssertionError("the ranks would train")
