"""Promise: the search's workers and prefetch lie within the measured spread of the whole grid's best."""

import time
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.few_pictures import write_pictures
from trainer.cli import main
from trainer.commands.bench import workers as bench
from trainer.data.formats.images import ImageDataset
from trainer.errors import EXIT_DONE, EXIT_FAILED

RECIPE = """
epochs: 1000000
data: {{name: folder, path: {path}, image_size: 16, global_batch_size: 4, micro_batch_size: 4,
eval_batch_size: 4}}
model: {{width: 4}}
parallel: {{threads: 1}}
"""


def test_nothing_to_choose_is_not_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "workers", "digits"]) == 3
    assert "nothing measured" in capsys.readouterr().out


@pytest.mark.slow
def test_the_choice_for_data_that_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read = ImageDataset.read

    def slowly(self: ImageDataset, *arguments: Any) -> Any:
        time.sleep(0.03)  # as a request over a network
        return read(self, *arguments)

    monkeypatch.setattr(ImageDataset, "read", slowly)
    monkeypatch.setattr(bench, "_SECONDS", 1.0)
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")  # so that the probe is forked, and reads slowly, too
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    recipe = tmp_path / "slow.yaml"
    recipe.write_text(RECIPE.format(path=write_pictures(tmp_path / "pictures")))
    code = main(["bench", "workers", str(recipe)])
    out = capsys.readouterr().out
    print(out)
    # Whether it lies within that spread is for `make bench` to say; the code says the same as the line.
    (said,) = (line for line in out.splitlines() if line.startswith("within the spread of the best: "))
    assert code == (EXIT_DONE if ": yes (" in said else EXIT_FAILED)
    assert (": yes (" in said) != (": NO (" in said)
    (chosen,) = (line for line in out.splitlines() if line.startswith("|") and "chosen" in line)
    assert "no workers" not in chosen
