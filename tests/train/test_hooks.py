"""Promise: somebody's own code in a run is told all of it, late, changes nothing, and fails by its name."""

import json
import math
import shutil
import sys
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import yaml
from torch.nn.functional import mse_loss

from tests.helpers import preloaded
from tests.helpers.forked import attempt, small
from tests.helpers.refusals import named, refused
from tests.helpers.rows import read_rows
from tests.helpers.run_folders import manifest, same
from tests.helpers.small_task import SETTINGS, Small
from trainer import fit
from trainer.checkpoint.folder import folder_name
from trainer.cli import main
from trainer.config.recipe import Recipe
from trainer.config.section import validated
from trainer.config.training import HooksConfig
from trainer.observe.rows import pictures_of
from trainer.runs.report.page import page
from trainer.runs.report.read import read_recorded_run
from trainer.train.components.task import check_request, make_task
from trainer.train.hooks import HookRows, hook_sink

# Each tells in a file beside it what it was called with, and in which rank.
OWN = dedent("""
    import json, math, os, random
    from pathlib import Path

    import numpy, torch
    from trainer import Finish, StopRun

    TOLD = Path(__file__).with_name("told.jsonl")

    def tell(*what):
        with TOLD.open("a") as file:
            file.write(json.dumps([int(os.environ.get("RANK", 0)), *what]) + "\\n")

    class Watch:
        def after_step(self, row):
            tell("step", row["step"], sorted({type(value).__name__ for value in row.values()}), row["loss"])

        def after_evaluation(self, step, metrics):
            tell("evaluation", step, metrics)

        def after_checkpoint(self, step, folder):
            sums = (folder / "SHA256SUMS").read_text().split()[1::2]
            whole = bool(sums) and all((folder / name).exists() for name in sums)
            tell("checkpoint", step, folder.name, whole)

    class Everywhere(Watch):
        ranks = "all"

    class Drawing:
        def __init__(self):
            self.draw()

        def draw(self, *_):
            torch.rand(3), random.random(), numpy.random.rand()

        after_step = after_evaluation = after_checkpoint = draw

    class Grasping:
        def grasp(self, *what):
            what[-1].clear()

        after_step = after_evaluation = grasp

    class Broken:
        def after_step(self, row):
            raise ValueError(f"no such\\nhost s3://me:hunter2hunter2@host at {row['step']}")

    class Leaving:
        def after_evaluation(self, step, metrics):
            raise SystemExit(0)

    class Nothing:
        pass

    class Enough:
        def after_evaluation(self, step, metrics):
            if step == 8:
                raise StopRun("well enough, for now")

    class Misspelled(Watch):
        after_evalution = Watch.after_evaluation

    class Demanding(Watch):
        def __init__(self, host, port=1):
            pass

    class Some(Watch):
        ranks = "some"

    class Done(Everywhere):
        def after_step(self, row):
            super().after_step(row)
            if row["step"] >= 4 and int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
                raise Finish("good")

    class Shows:
        def after_step(self, row):
            more = {"odd": math.nan, "a/b": numpy.float32(1)}
            return {"twice": 2 * row["loss"], "tensor": torch.tensor([3.0]), **more}

        def after_evaluation(self, step, metrics):
            picture = numpy.zeros((4, 6, 3), numpy.uint8)
            picture[:, :, 0] = step
            return {"confusion <b>/1": picture, "gray": torch.ones(5, 2, dtype=torch.uint8), "seen": step}

    class Late:
        def after_checkpoint(self, step, folder):
            if step == 8:
                raise RuntimeError("no room")

    made = Watch()
    number = 3

    def send(row):
        tell("row", row.pop("kind"), row.pop("step"))

    def throw(row):
        raise ConnectionError("no network")
""")


@pytest.fixture
def own(here: Path) -> Path:
    file = here / "own.py"
    file.write_text(OWN)
    return file


WARN = {"on_error": "warn"}


def with_hooks(file: Path, *names: str, **sections: Any) -> Recipe:
    hooks = {"use": [f"{file}:{name}" for name in names], **sections.pop("hooks", {})}
    return small(model={"dropout": 0.5}, hooks=hooks, **sections)


def told(file: Path, *kinds: str) -> list[list[Any]]:
    lines = file.with_name("told.jsonl")
    events = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
    return [event for event in events if not kinds or event[1] in kinds]


def test_they_are_told_all_in_order(own: Path, tmp_path: Path) -> None:
    """And a sink gets every row; a run that is verified calls neither."""
    run = tmp_path / "run"
    attempt(run, with_hooks(own, "Watch", "made", log={"to": ["jsonl", f"{own}:send"]}), code=0)
    rows = [[row["kind"], row["step"]] for row in read_rows(run, ())]
    assert sorted(event[2:] for event in told(own, "row")) == sorted(rows)
    twice = told(own, "step", "evaluation", "checkpoint")
    assert twice[::2] == twice[1::2], "each hook in turn, in the order that they are named in"
    events = [event[1:] for event in twice[::2]]
    steps, measured, saved = (
        [e[1] for e in events if e[0] == k] for k in ("step", "evaluation", "checkpoint")
    )
    assert (steps, measured) == ([*range(2, 17, 2)], [8, 16])
    assert saved == [5, 10, 15, 16], "also the last"
    order = [(kind, step) for kind, step, *_ in events]
    assert all(order.index(("step", at)) < order.index(("evaluation", at)) for at in measured)
    losses = {(row["kind"], row["step"]): row.get("loss") for row in read_rows(run)}
    for kind, step, *what in events:
        if kind == "step":
            assert set(what[0]) <= {"float", "int", "str"}, "plain numbers: nothing of the device"
            assert what[1] == losses["train", step]
        elif kind == "evaluation":
            assert "accuracy" in what[0] and what[0]["loss"] == losses["eval", step]
        else:
            assert what == [folder_name(step), True], "whole, on the disk"
    before = told(own)
    assert main(["verify", str(run)]) == 0
    assert told(own) == before


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run without any."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    attempt(folder, small(model={"dropout": 0.5}), code=0)
    return folder


def test_they_change_no_bit(own: Path, tmp_path: Path, alone: Path) -> None:
    """Also those that draw random numbers, or change what they are given."""
    recipe = with_hooks(own, "Drawing", "Grasping", "Watch", log={"to": ["jsonl", f"{own}:send"]})
    attempt(tmp_path / "run", recipe, code=0)
    assert same(tmp_path / "run", alone)
    assert [event[2] for event in told(own, "step")] == list(range(2, 17, 2))


@pytest.mark.parametrize(
    ("name", "where"), [("Broken", "after_step: ValueError"), ("Leaving", "after_evaluation: SystemExit")]
)
def test_an_error_in_one_ends_the_run(own: Path, tmp_path: Path, name: str, where: str) -> None:
    """And tells no secret."""
    done = attempt(tmp_path / "run", with_hooks(own, name), code=1)
    assert f"{name}.{where}: " in done.line
    assert done.line.endswith("hooks.on_error=warn goes on without it")
    assert f'{own}", line' in done.said, "where in the hook"
    assert manifest(tmp_path / "run")["status"] == "failed"
    files = [path.read_text(errors="replace") for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert "hunter2" not in "".join([done.said, done.line, *files])


def test_or_is_only_told(own: Path, tmp_path: Path, alone: Path) -> None:
    to = {"to": ["jsonl", f"{own}:throw"]}
    done = attempt(tmp_path / "run", with_hooks(own, "Broken", "Watch", hooks=WARN, log=to), code=0)
    warned = [line for line in done.said.splitlines() if line.startswith("trainer: ")]
    broken = [line for line in warned if "Broken.after_step: ValueError: no such host" in line]
    assert [line.rpartition(" ")[2] for line in broken] == [str(step) for step in range(2, 17, 2)]
    thrown = [line for line in warned if f"{own}:throw: ConnectionError: no network" in line]
    assert len(thrown) == len(read_rows(tmp_path / "run", ()))
    assert same(tmp_path / "run", alone)
    assert len(told(own, "step")) == 8


def test_one_may_stop_the_run(own: Path, tmp_path: Path) -> None:
    """A wish, and no error: also where an error would be told only."""
    done = attempt(tmp_path / "run", with_hooks(own, "Enough", hooks=WARN))
    assert (done.code, done.line) == (1, "well enough, for now")
    assert "Traceback" not in done.said
    facts = manifest(tmp_path / "run")
    assert (facts["status"], facts["reason"]) == ("stopped", "StopRun: well enough, for now")


def test_one_may_finish_the_run(own: Path, tmp_path: Path) -> None:
    """It is evaluated there, and has final weights."""
    run = tmp_path / "run"
    attempt(run, with_hooks(own, "Done", evaluation={"every": "end"}), code=0)
    facts, evaluated = manifest(run), read_rows(run, ("eval",))
    assert (facts["status"], facts["steps_done"]) == ("finished", 6), "the row of 4 is late"
    assert [row["step"] for row in evaluated] == [6] == [e[2] for e in told(own, "evaluation")]
    assert facts["summary"]["loss"] == evaluated[-1]["loss"]
    assert len([*run.glob("*.safetensors")]) == 2


def test_on_two_ranks(own: Path, tmp_path: Path) -> None:
    """Paths are relative to where the command is typed, modules there can be imported; one rank ends both."""
    hooks = {"use": [f"{own.name}:Watch", "own:Done"]}
    recipe = small(epochs=400, hooks=hooks, data={"micro_batch_size": 4}, ema={"decay": 0})
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(recipe.model_dump(mode="json", exclude_none=True)))
    words = [sys.executable, "-m", "trainer", "train", "mine.yaml", "--nproc-per-node", "2", "--out", "run"]
    done = preloaded.run(words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    facts, steps = manifest(tmp_path / "run"), [r["step"] for r in read_rows(tmp_path / "run", ("train",))]
    ended = facts["steps_done"]
    assert facts["status"] == "finished" and 4 < ended < 3200
    assert read_rows(tmp_path / "run", ("eval",))[-1]["step"] == ended
    for kind, due in (("step", steps), ("evaluation", [ended])):
        events = [(event[0], event[2]) for event in told(own, kind) if event[2] in due]
        assert [step for rank, step in events if rank == 0] == [step for step in due for _ in range(2)]
        assert [step for rank, step in events if rank == 1] == due, "that of all ranks"
    losses = {(event[2], event[-1]) for event in told(own, "step")}
    assert len(losses) == len(steps), "of all samples, on both ranks"
    assert {event[0] for event in told(own, "checkpoint")} == {0}, "who writes them"


@pytest.mark.parametrize(
    ("place", "line"),
    [
        ("none.py:Watch", "hooks.use none.py"),
        ("trainer.no_such:Watch", "hooks.use trainer.no_such ModuleNotFoundError"),
        ("own.py:Wacth", "hooks.use own.py Watch"),
        ("own.py:Nothing", "own.py:Nothing after_step after_evaluation"),
        ("own.py:Misspelled", "after_evalution after_evaluation"),
        ("own.py:Some", "own.py:Some some first all"),
        ("own.py:Demanding", "own.py:Demanding"),
        ("ending.py:Watch", "hooks.use ending.py 1 SystemExit 0"),
    ],
)
@pytest.mark.usefixtures("own")
def test_what_is_no_hook_is_found_before_there_are_ranks(place: str, line: str) -> None:
    Path("ending.py").write_text("raise SystemExit(0)\n")
    with refused(line):
        checked(hooks={"use": [place]})
    checked(hooks={"use": [place], "enabled": False})


def checked(**sections: Any) -> None:
    recipe = small(**sections)
    check_request(recipe, make_task(recipe), 1)


@pytest.mark.usefixtures("own")
def test_what_is_no_sink() -> None:
    for place in ("own.py:sned", "own.py:number", "own.py:Watch"):
        with refused(f"log.to {place.replace('sned', ' send').replace(': ', ' ')}"):
            checked(log={"to": [place]})
    with refused("jsnol module:NAME"):
        validated(Recipe, {"epochs": 1, "log": {"to": ["jsnol"]}}, "mine")
    with refused("own.py file.py:NAME module:NAME"):
        validated(Recipe, {"epochs": 1, "hooks": {"use": ["own.py"]}}, "mine")


class Looking:
    """It computes a metric itself, by the model that it asks for."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.seen: list[tuple[float, float]] = []

    def after_step(self, row: dict[str, Any]) -> None:
        self.steps.append(row["step"])

    def after_evaluation(self, step: int, metrics: dict[str, float], model: Any) -> None:
        assert step == self.steps[-1]
        assert not any(one.training for one in model.modules())
        x = torch.arange(10.0).view(5, 2) / 10
        loss = mse_loss(model[1](x), x[:, :1])
        assert not loss.requires_grad
        model[0](x)  # in evaluation mode nothing moves
        self.seen.append((float(loss), metrics["loss"]))


class Normed(Small):
    def model(self) -> Any:
        return torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 1))

    def loss(self, model: Any, batch: Any) -> Any:
        model[0](batch["x"])
        return mse_loss(model[1](batch["x"]), batch["y"], reduction="none")


def test_one_of_a_notebook_may_ask_for_the_model(tmp_path: Path) -> None:
    """As it was evaluated: with the averaged weights; no bit changes."""
    settings = {**SETTINGS, "epochs": 4, "ema.decay": 0.9}
    looking = Looking()
    kinds = type("Looked", (Normed,), {"hooks": [looking]}), Normed
    runs = [fit(kind, settings, out=tmp_path / f"{n}") for n, kind in enumerate(kinds)]
    assert looking.steps == list(range(1, 9)) and len(looking.seen) > 1
    for own, told in looking.seen:
        assert own == pytest.approx(told, rel=1e-6)
    assert same(*(run.folder for run in runs))
    fit(Normed, {**settings, "epochs": 5}, out=tmp_path / "0")  # hooks may change
    wrong: Any
    for wrong, name in ((Looking, "hooks"), ([3], "hook int")):
        with refused(name):
            fit(Normed, settings, out=tmp_path / "other", hooks=wrong)
    assert not (tmp_path / "other").exists()


def test_an_error_after_the_last_checkpoint_changes_no_ending(own: Path, tmp_path: Path) -> None:
    """How the run ends is decided then: an orchestrator must hear that it can be resumed."""
    ended = attempt(tmp_path / "run", with_hooks(own, "Late"), stop_at=8, code=75)
    assert "Late.after_checkpoint: RuntimeError: no room" in ended.said
    assert manifest(tmp_path / "run")["status"] == "stopped"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stopped between two rows and resumed."""
    root = tmp_path_factory.mktemp("hooks")
    (root / "own.py").write_text(OWN)
    recipe = with_hooks(root / "own.py", "Shows", log={"every": 2, "to": ["jsonl", "tensorboard"]})
    attempt(root / "run", recipe, stop_at=9, code=75)
    attempt(root / "run", recipe, code=0)
    return root / "run"


def test_what_one_returns_is_there_once_also_after_a_resume(run: Path) -> None:
    rows, losses = read_rows(run, ("hook",)), {row["step"]: row["loss"] for row in read_rows(run, ("train",))}
    shown = [row for row in rows if "twice" in row]
    assert [row["step"] for row in shown] == [*losses] == [*range(2, 17, 2)]
    for row in shown:
        assert row["twice"] == 2 * losses[row["step"]] and row["tensor"] == 3.0 and row["a/b"] == 1.0
        assert row["odd"] is None, "seen: not a finite number"
    measured = [row for row in rows if "seen" in row]
    assert [row["step"] for row in measured] == [row["step"] for row in read_rows(run, ("eval",))]
    for row in measured:
        assert all(file.read_bytes().startswith(b"\x89PNG") for _, file in pictures_of(row, run))


def test_a_stranger_s_pictures_lead_nowhere(run: Path, tmp_path: Path) -> None:
    pictures, secret = tmp_path / "run" / "pictures", tmp_path / "secret.png"
    pictures.mkdir(parents=True)
    shutil.copy(run / "manifest.json", pictures.parent)
    secret.write_bytes(b"\x89PNG\r\n\x1a\nhunter2")
    (pictures / "link.png").symlink_to(secret)
    (pictures / "text.png").write_bytes(b"<script>alert(1)</script>")
    names = ("link.png", "text.png", "../../secret.png", "no.png")
    places = [*(f"pictures/{name}" for name in names), str(secret)]
    row = {"kind": "hook", "step": 2, **{f"<p{n}>": place for n, place in enumerate(places)}}
    (pictures.parent / "hooks.jsonl").write_text(json.dumps(row) + "\n")
    assert "data:image/png" not in page([read_recorded_run(pictures.parent)])


def show(folder: Path, given: Any, logger: Any = None, **config: Any) -> None:
    """What a hook gives after step 4 on its way into the records."""
    hook = SimpleNamespace(after_step=lambda _: given)
    hook_sink([hook], HooksConfig(**config), HookRows(folder, logger))({"kind": "train", "step": 4})


def test_a_tensor_elsewhere_is_not_waited_for(tmp_path: Path) -> None:
    """A tensor of the meta device can't be read: it is handed on as it is."""
    logger = mock.Mock()
    far: dict[str, Any] = {"far": torch.zeros((), device="meta"), "wide": torch.zeros(1, 1, device="meta")}
    show(tmp_path, {**far, "near": 1, "array": np.full((1, 1), 2.5), "pixel": np.array([True])}, logger)
    ((step, kind, values, metrics), _) = logger.stage_later.call_args
    assert (step, kind, values.device.type, values.shape) == (4, "hook", "meta", (2,))
    wanted = {"near": 1.0, "array": 2.5, "pixel": 1.0, "far": 7.0, "wide": math.inf}
    assert metrics([7.0, math.inf]) == wanted


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
    with refused(line):
        show(tmp_path, given)
    show(tmp_path, given, on_error="warn")
    assert named(capfd.readouterr().err, line)
