"""Plugin of pytest: coverage's context is the test that runs, also in the processes that it starts."""

import os

from coverage import Coverage

TEST = "TRAINER_TEST"  # its name, for processes that are forks of a server


def pytest_runtest_logstart(nodeid: str) -> None:
    """Begins the context of a test."""
    os.environ[TEST] = nodeid
    if (measured := Coverage.current()) is not None:
        measured.switch_context(nodeid)
        # A process that this one starts begins with these settings.
        measured.config.context = nodeid
        os.environ["COVERAGE_PROCESS_CONFIG"] = measured.config.serialize()


def take_context() -> None:
    """Gives a fork of a server the context of the test that it is for."""
    if (measured := Coverage.current()) is not None and TEST in os.environ:
        measured.switch_context(os.environ[TEST])
