"""Promise: what a hook returns is in the records, once, and where people look; and costs no wait."""

import json
import math
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.forked import attempt, small
from tests.helpers.refusals import named, refused
from tests.helpers.rows import read_rows
from trainer.config.training import HooksConfig
from trainer.observe.rows import pictures_of
from trainer.runs.report.page import page
from trainer.runs.report.read import read_recorded_run
from trainer.train.hooks import HookRows, hook_sink

OWN = dedent("""
    import math
    import numpy as np, torch

    class Shows:
        def after_step(self, row):
            more = {"odd": math.nan, "a/b": np.float32(1)}
            return {"twice": 2 * row["loss"], "tensor": torch.tensor([3.0]), **more}

        def after_evaluation(self, step, metrics):
            picture = np.zeros((4, 6, 3), np.uint8)
            picture[:, :, 0] = step
            return {"confusion <b>/1": picture, "gray": torch.ones(5, 2, dtype=torch.uint8), "seen": step}
""")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stopped between two rows and resumed."""
    root = tmp_path_factory.mktemp("hooks")
    (root / "own.py").write_text(OWN)
    recipe = small(
        hooks={"use": [f"{root / 'own.py'}:Shows"]}, log={"every": 2, "to": ["jsonl", "tensorboard"]}
    )
    for how in ({"stop_at": 9}, {}):
        done = attempt(root / "run", recipe, **how)  # type: ignore[arg-type]
        assert done.code == (75 if how else 0), done.said
    return root / "run"


def test_each_row_is_there_once_also_after_a_resume(run: Path) -> None:
    rows = list(read_rows(run, ("hook",)))
    steps = [row["step"] for row in rows if "twice" in row]
    assert steps == [row["step"] for row in read_rows(run, ("train",))] and len(steps) == len(set(steps))
    losses = {row["step"]: row["loss"] for row in read_rows(run, ("train",))}
    for row in rows:
        if "twice" in row:
            assert row["twice"] == 2 * losses[row["step"]] and row["tensor"] == 3.0 and row["a/b"] == 1.0
            assert row["odd"] is None, "seen: not a finite number"
    measured = [row for row in rows if "seen" in row]
    assert [row["step"] for row in measured] == [row["step"] for row in read_rows(run, ("eval",))]
    for row in measured:
        assert all(file.read_bytes().startswith(b"\x89PNG") for _, file in pictures_of(row, run))


def test_a_stranger_s_pictures_lead_nowhere(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (folder / "pictures").mkdir(parents=True)
    (folder / "manifest.json").write_bytes((run / "manifest.json").read_bytes())
    secret = tmp_path / "secret.png"
    secret.write_bytes(b"\x89PNG\r\n\x1a\nhunter2")
    (folder / "pictures" / "link.png").symlink_to(secret)
    (folder / "pictures" / "text.png").write_bytes(b"<script>alert(1)</script>")
    places = [
        "pictures/link.png",
        "pictures/text.png",
        "pictures/../../secret.png",
        str(secret),
        "pictures/no.png",
    ]
    row = {"kind": "hook", "step": 2, **{f"<p{n}>": place for n, place in enumerate(places)}}
    (folder / "hooks.jsonl").write_text(json.dumps(row) + "\n")
    assert "data:image/png" not in page([read_recorded_run(folder)])


def test_a_tensor_elsewhere_is_not_waited_for(tmp_path: Path) -> None:
    """A tensor of the meta device can't be read: it is handed on as it is."""
    staged: list[Any] = []

    class Logger:
        def stage_later(self, *arguments: Any) -> None:
            staged.append(arguments)

    class Far:
        def after_step(self, _row: dict[str, Any]) -> Any:
            return {
                "far": torch.zeros((), device="meta"),
                "wide": torch.zeros(1, 1, device="meta"),
                "near": 1,
                "array": np.full((1, 1), 2.5),
                "pixel": np.array([True]),
            }

    rows = HookRows(tmp_path, Logger())  # type: ignore[arg-type]
    hook_sink([Far()], HooksConfig(), rows)({"kind": "train", "step": 4})
    ((step, kind, values, metrics),) = staged
    assert (step, kind, values.device.type, values.shape) == (4, "hook", "meta", (2,))
    assert metrics([7.0, math.inf]) == {
        **{"near": 1.0, "array": 2.5, "pixel": 1.0},
        **{"far": 7.0, "wide": math.inf},
    }


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"time/x": 1}, "time/x"),
        ({"x\n": 1}, "after_step"),
        ({"x": "text"}, "x str"),
        ({"x": torch.zeros(2)}, "x Tensor torch.float32 (2,)"),
        ({"x": np.zeros((2, 2, 5), np.uint8)}, "x ndarray uint8 (2, 2, 5)"),
        (("x", 1), "tuple"),
    ],
    ids=["rows' own", "no name", "text", "two numbers", "no picture", "no dict"],
)
def test_what_is_no_figure_is_one_line(tmp_path: Path, given: Any, line: str, capfd: Any) -> None:
    class Odd:
        def after_step(self, _row: dict[str, Any]) -> Any:
            return given

    rows = HookRows(tmp_path, None)  # type: ignore[arg-type]
    with refused(line):
        hook_sink([Odd()], HooksConfig(), rows)({"kind": "train", "step": 4})
    hook_sink([Odd()], HooksConfig(on_error="warn"), rows)({"kind": "train", "step": 4})
    assert named(capfd.readouterr().err, line)
