"""Interface and table of trackers, and their checks before the training."""

import http.client
import inspect
import os
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, Protocol

from trainer.config.registry import named
from trainer.config.sinks import FILE_SINKS, SINKS, TRACKERS, plugged_sinks
from trainer.errors import BadInputError
from trainer.observe.rows import tag

TRACKER_METHODS = ("open", "log", "close")
_REACH_S = 5.0  # for the answer of a server before the training


class Tracker(Protocol):
    """Sink that one thread of rank 0 calls, so that the training doesn't wait for it.

    An entry point of the group `trainer.sinks` names a class with these methods, which is called without
    arguments and needn't inherit from this one. All trackers share the thread. If a method raises or hangs,
    records may be lost; the training continues. A tracker may have `environment`: variables that are set for
    it unless they are set. One of `SINKS` may have a static method `check(environment)`, which raises
    BadInputError before a new run if the tracker can't work; a resumed run trains without it.
    """

    def open(self, about: dict[str, Any]) -> tuple[str, str]:
        """Begins a run at the tracker, or resumes it; called again after an error.

        Args:
            about: `name`, `recipe`, `run_id`, `commit`, `folder` and `config` (without secrets) of the run;
                `id`: id that an earlier attempt returned, or None; `rows`: number of records sent to that;
                `step`: steps that are done; `steps`: steps of the whole run.

        Returns:
            Id of the tracker's run, for the manifest; and its place, for the console.
        """

    def log(self, rows: list[dict[str, Any]]) -> None:
        """Logs records in their order, each with `kind`, `step` and `time` (Unix time in seconds).

        Records that an earlier attempt sent to the same id aren't sent again. After an error the same records
        are sent again, half a minute later and with the next ones.
        """

    def close(self, status: str) -> None:
        """Ends the run: "finished", "stopped" (to be resumed), "failed", "diverged" or "running"."""


def metrics_of(row: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numbers of a record by their names in TensorBoard: kind/name."""
    return {
        tag(row["kind"], name): value
        for name, value in row.items()
        if name not in ("step", "time") and isinstance(value, int | float)
    }


def tracker_class(name: str) -> Callable[[], Tracker]:
    """Returns the class of a tracker that `trackers_of` returned."""
    kind: Callable[[], Tracker] = named(SINKS[name].opens) if name in SINKS else plugged_sinks()[name].load()
    return kind


def plugged(name: str) -> Callable[..., object] | None:
    """Returns the sink function of an installed package by its name; None if it is a tracker.

    Raises:
        BadInputError: If it can't be loaded, or is neither a function nor a tracker.
    """
    entry = plugged_sinks().get(name)
    if entry is None:
        raise BadInputError(f"log.to: no installed package brings {name} (an entry point of trainer.sinks)")
    try:
        found = entry.load()
    except (Exception, SystemExit) as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise BadInputError(f"log.to: {name} ({entry.value}) can't be loaded ({why})") from error
    if inspect.isclass(found):
        if lacking := [method for method in TRACKER_METHODS if not callable(getattr(found, method, None))]:
            raise BadInputError(
                f"log.to: {name} ({entry.value}) has no {', '.join(lacking)}; a tracker has "
                f"{', '.join(TRACKER_METHODS)}"
            )
        return None
    if not callable(found):
        raise BadInputError(
            f"log.to: {name} ({entry.value}) is a {type(found).__name__}; a sink is a function of a record, "
            "or the class of a tracker"
        )
    function: Callable[..., object] = found
    return function


def trackers_of(names: Sequence[str]) -> list[str]:
    """Returns those entries of `log.to` that are trackers.

    Raises:
        BadInputError: If one of them isn't installed here.
    """
    for name in names:
        if name in TRACKERS and (needed := SINKS[name].module) and find_spec(needed) is None:
            package = SINKS[name].package
            raise BadInputError(
                f'log.to={name}: {package} is not installed; run make venv GROUPS="train {name}", or '
                f"pip install {package}"
            )
    brought = plugged_sinks() if {*names} - {*FILE_SINKS, *TRACKERS} else {}
    return [one for one in names if one in TRACKERS or (one in brought and plugged(one) is None)]


def check_reachable(names: Sequence[str], environment: Mapping[str, str] = os.environ) -> None:
    """Runs the trackers' own checks before a new run, such as whether a server answers.

    Raises:
        BadInputError: If a tracker can't work.
    """
    for name in names:
        if name in TRACKERS and (check := getattr(tracker_class(name), "check", None)) is not None:
            check(environment)


def silent(url: str) -> str:
    """Returns the reason why no server answers at a URL; "" if one does, with any status."""
    parts = urllib.parse.urlsplit(url)
    plain = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()  # without user and password
    try:
        with urllib.request.urlopen(plain, timeout=_REACH_S):
            return ""
    except urllib.error.HTTPError:
        return ""
    except urllib.error.URLError as error:
        return "" if isinstance(error.reason, ssl.SSLError) else str(error.reason)
    except http.client.HTTPException:
        return "it isn't a web server"
    except (OSError, ValueError) as error:
        return str(error)
