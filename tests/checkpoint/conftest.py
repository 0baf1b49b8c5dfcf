"""What tests of checkpoints share."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.helpers.faulty_disk import Disk
from trainer.host import files


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Disk]:
    def replace(*args: Any, **kwargs: Any) -> Disk:
        made = Disk(*args, **kwargs)
        monkeypatch.setattr(files, "os", made)
        return made

    return replace
