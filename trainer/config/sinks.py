"""Sinks of metrics records: one table, from which schema, code and documentation derive."""

from importlib.metadata import EntryPoint, entry_points
from typing import NamedTuple

GROUP = "trainer.sinks"


class SinkKind(NamedTuple):
    """Sink of metrics records, by its name in `log.to`.

    Attributes:
        opens: "module:name" of a function, called with the run folder and the steps done, which returns a
            function of a record and one that closes it; or of a class like `Tracker` in
            runs/tracking/tracker.py.
        about: Description for the configuration page; empty where the name suffices.
        tracker: True for a tracker, which a thread calls.
        folder: Folder below the run folder that it writes to, and that a new run empties.
        module: Module that it needs, of `package`, a dependency in the group of its name.
        package: Package to install for it.
    """

    opens: str
    about: str = ""
    tracker: bool = False
    folder: str = ""
    module: str = ""
    package: str = ""


SINKS = {
    "jsonl": SinkKind("trainer.observe.sinks:jsonl_sink", "a JSON object a line"),
    "tensorboard": SinkKind("trainer.observe.sinks:tensorboard_sink", folder="tensorboard"),
    "wandb": SinkKind(
        "trainer.runs.tracking.to_wandb:ToWandb",
        "Weights & Biases",
        tracker=True,
        module="wandb",
        package="wandb",
    ),
    "mlflow": SinkKind(
        "trainer.runs.tracking.to_mlflow:ToMlflow", tracker=True, module="mlflow", package="mlflow-skinny"
    ),
}
FILE_SINKS = tuple(name for name, one in SINKS.items() if not one.tracker)
TRACKERS = tuple(name for name, one in SINKS.items() if one.tracker)


def plugged_sinks() -> dict[str, EntryPoint]:
    """Returns the sinks of installed packages by name, as entry points that aren't imported."""
    return {one.name: one for one in entry_points(group=GROUP)}


def described_sinks() -> str:
    """Lists all sinks, for the configuration page."""
    words = {name: f"{name} ({one.about})" if one.about else name for name, one in SINKS.items()}
    in_folder, to_trackers = (", ".join(words[name] for name in names) for names in (FILE_SINKS, TRACKERS))
    return f"in the run folder {in_folder}; to trackers {to_trackers}"
