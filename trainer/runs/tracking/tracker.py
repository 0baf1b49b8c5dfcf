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
    """A sink that runs in a process of its own, so that the training neither waits for it nor ends with it.

    An entry point of the group `trainer.sinks` names such a class; it is called without arguments. What a
    method raises costs rows, as do its hanging and the end of its process. It needn't be of this class. A
    static method `check(environment)` of one that `SINKS` names may refuse, by a BadInputError, what can't
    work, before a run begins; one that is resumed trains without it instead.
    """

    def open(self, about: dict[str, Any]) -> tuple[str, str]:
        """Begins a run at the tracker, or goes on with it; called again after an error.

        Args:
            about: `name`, `recipe`, `run_id`, `commit`, `folder` and `config` (without secrets) of the run;
                `id`: what an earlier attempt returned, or None; `rows`: so many rows were sent to that;
                `step`: steps that are done; `steps`: those of the run in all; `left_out`: how many are left
                out, by rollbacks: where there are more than before, rows from `step` on come again.

        Returns:
            Its id, for the manifest; and where it is, for people.
        """

    def log(self, rows: list[dict[str, Any]]) -> None:
        """Takes rows in their order, each with `kind`, `step` and `time` (seconds since 1970).

        Rows that an earlier attempt sent to the same id don't come again, but after a rollback, by which they
        are others. After an error the same rows come
        again, a few times.
        """

    def close(self, status: str) -> None:
        """Ends it: "finished", "stopped" (to be resumed), "failed", "diverged", or "running": it goes on."""


def metrics_of(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a row, under the names that TensorBoard has: kind/name."""
    return {
        tag(row["kind"], name): value
        for name, value in row.items()
        if name not in ("step", "time") and isinstance(value, int | float)
    }


def tracker_class(name: str) -> Callable[[], Tracker]:
    """The class of a tracker that was checked."""
    kind: Callable[[], Tracker] = named(SINKS[name].opens) if name in SINKS else plugged_sinks()[name].load()
    return kind


def plugged(name: str) -> Callable[..., object] | None:
    """The function of a row that a package brings under this name; None if it is a tracker.

    Raises:
        BadInputError: If it can't be loaded, or is neither.
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
            f"log.to: {name} ({entry.value}) is a {type(found).__name__}; a sink is a function of a row, or "
            "the class of a tracker"
        )
    function: Callable[..., object] = found
    return function


def trackers_here(names: Sequence[str], environment: Mapping[str, str] = os.environ) -> list[str]:
    """`trackers_of`, and what the environment asks for besides."""
    return [*trackers_of(names), *(n for n, one in SINKS.items() if environment.get(one.variable))]


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
    """Lets trackers refuse what can't work, such as a server that doesn't answer; for a run that begins.

    Raises:
        BadInputError: In that case.
    """
    for name in names:
        if name in TRACKERS and (check := getattr(tracker_class(name), "check", None)) is not None:
            check(environment)


def silent(url: str) -> str:
    """Why nobody answers there, or an empty string: any answer will do."""
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
        return "what answers there is no web server"
    except (OSError, ValueError) as error:
        return str(error)
