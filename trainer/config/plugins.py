"""Sinks of other packages, by name: entry points of the group `trainer.sinks`."""

from importlib.metadata import EntryPoint, entry_points

GROUP = "trainer.sinks"


def plugged_sinks() -> dict[str, EntryPoint]:
    """What the installed packages bring; nothing of it is imported."""
    return {one.name: one for one in entry_points(group=GROUP)}
