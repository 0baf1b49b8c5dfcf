"""Promise: training starts from somebody's weights exactly, or says what doesn't fit."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from tests.helpers.refusals import refused
from tests.helpers.toys import build_alone, make_recipe
from tests.helpers.world import Ranks
from trainer.config.model import ModelConfig
from trainer.distributed.parallel import World
from trainer.errors import BadInputError
from trainer.models.images import build_model
from trainer.models.weights import load_initial
from trainer.train.components.run import build
from trainer.train.components.task import check_request, make_task
from trainer.train.recording import save_weights

State = dict[str, torch.Tensor]


def saved(folder: Path, classes: int = 10, **config: Any) -> Path:
    torch.manual_seed(5)
    save_weights(build_model(ModelConfig(width=8, **config), 1, classes), folder / "start.safetensors")
    return folder / "start.safetensors"


@pytest.mark.compat
def test_training_starts_from_the_file(tmp_path: Path) -> None:
    file = saved(tmp_path)
    model = {"width": 8, "pretrained": str(file), "channels_last": True}
    recipe = make_recipe(model=model, data={"micro_batch_size": 16}, ema={"decay": 0.9})
    run = build_alone(recipe, make_task(recipe))
    wanted = safetensors.torch.load_file(file)
    assert run.state.average is not None
    state, average = run.state.model.state_dict(), run.state.average.tensors
    assert state.keys() == wanted.keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in wanted.items())
    assert average.keys() == dict(run.state.model.named_parameters()).keys()
    assert all(torch.equal(wanted[name], tensor) for name, tensor in average.items())
    assert "starts from" in run.notes[0]


@pytest.mark.compat
def test_a_new_head_on_old_weights(tmp_path: Path) -> None:
    file = saved(tmp_path, classes=7)
    model = build_model(ModelConfig(width=8), 1, 10)
    head = model.get_parameter("head.weight").clone()
    assert load_initial(model, file, ["head.*"]) == f"{len(model.state_dict()) - 2} tensors"
    assert torch.equal(model.get_parameter("head.weight"), head)
    assert torch.equal(model.get_parameter("stem.weight"), safetensors.torch.load_file(file)["stem.weight"])


def differing(tmp_path: Path) -> Path:
    tensors = safetensors.torch.load_file(saved(tmp_path, classes=7))
    del tensors["stem.weight"]
    tensors["decoder.weight"] = torch.zeros(2)
    safetensors.torch.save_file(tensors, tmp_path / "other.safetensors")
    return tmp_path / "other.safetensors"


def test_every_difference_is_named_before_any_rank_starts(tmp_path: Path) -> None:
    recipe = make_recipe(model={"width": 8, "pretrained": str(differing(tmp_path))})
    with pytest.raises(BadInputError) as caught:
        check_request(recipe, make_task(recipe), 1)
    message = str(caught.value)
    assert "1 missing (stem.weight)" in message
    assert "1 unexpected (decoder.weight)" in message
    assert "2 of another shape (head.weight [7, 16] for [10, 16]" in message
    assert """'model.reinit=["decoder", "head", "stem"]'""" in message
    # Nothing is taken over in part.
    model = build_model(ModelConfig(width=8), 1, 10)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(BadInputError):
        load_initial(model, differing(tmp_path), ["head.*"])
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.compat
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_floating_formats_are_converted(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = safetensors.torch.load_file(saved(tmp_path))
    tensors = {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
    safetensors.torch.save_file(tensors, tmp_path / "other.safetensors")
    model = build_model(ModelConfig(width=8), 1, 10)
    load_initial(model, tmp_path / "other.safetensors", ())
    assert torch.equal(model.get_parameter("stem.weight"), tensors["stem.weight"].float())


def stem(value: float, dtype: torch.dtype) -> Callable[[State], State]:
    return lambda state: {**state, "stem.weight": torch.full_like(state["stem.weight"], value, dtype=dtype)}


REFUSED: dict[str, tuple[Callable[[State], State], str, str]] = {
    "a format that can't be meant": (stem(1.0, torch.float8_e4m3fn), "", "stem.weight torch.float32"),
    "a run that diverged": (stem(torch.nan, torch.float32), "", "stem.weight torch.float32"),
    "too large for float32": (stem(1e39, torch.float64), "", "stem.weight torch.float32"),
    "nothing at all": (dict, "*", "model.reinit start.safetensors"),
    "a pattern that matches nothing": (dict, "haed.*", "haed.*"),
    "a model twice": (
        lambda state: {f"{one}.{n}": t.clone() for one in ("student", "teacher") for n, t in state.items()},
        "",
        "student. teacher.",
    ),
    "a tensor twice": (
        lambda state: {**state, "_orig_mod.stem.weight": state["stem.weight"].clone()},
        "",
        "start.safetensors _orig_mod.",
    ),
}


@pytest.mark.parametrize("how", REFUSED)
def test_weights_that_cannot_be_meant_are_refused(tmp_path: Path, how: str) -> None:
    change, reinit, says = REFUSED[how]
    file = saved(tmp_path)
    safetensors.torch.save_file(change(safetensors.torch.load_file(file)), file)
    with refused(says):
        load_initial(build_model(ModelConfig(width=8), 1, 10), file, [reinit] * bool(reinit))


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda file: file.write_bytes(b"\xff" * 64), id="no safetensors"),
        pytest.param(lambda file: file.write_bytes(b"\x08\0\0\0\0\0\0\0{}      "), id="no tensors"),
        pytest.param(lambda _: None, id="nothing"),
        pytest.param(os.mkfifo, id="a pipe, which isn't waited for"),
        pytest.param(Path.mkdir, id="a folder"),
    ],
)
def test_any_other_file_is_one_clear_line(tmp_path: Path, make: Callable[[Path], Any]) -> None:
    make(file := tmp_path / "x.safetensors")
    with refused(file.name):
        load_initial(build_model(ModelConfig(width=8), 1, 10), file, ())


def test_what_begins_anew_needs_weights_to_start_from() -> None:
    with pytest.raises(ValueError, match=r"there is no model\.pretrained"):
        ModelConfig(reinit=("head.*",))


def start_from(world: World, folder: str) -> str:
    file = Path(folder, f"{world.rank}.safetensors")
    recipe = make_recipe(model={"width": 8, "pretrained": str(file)}, data={"micro_batch_size": 16})
    try:
        build(recipe, make_task(recipe), world, 0)
    except BadInputError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("alike", [True, False])
def test_ranks_that_start_from_other_weights_are_told(ranks: Ranks, tmp_path: Path, alike: bool) -> None:
    for rank in range(2):
        torch.manual_seed(0 if alike else rank)
        save_weights(build_model(ModelConfig(width=8), 1, 10), tmp_path / f"{rank}.safetensors")
    answers = ranks.run(2, start_from, str(tmp_path))
    assert all(("initial weights" in answer) != alike for answer in answers)


def wrapped(how: str, state: dict[str, torch.Tensor]) -> dict[str, Any]:
    """What people have: a state_dict behind a prefix, in a dict of other things."""
    ema = {f"module.{name}": tensor + 1 for name, tensor in state.items()}
    behind = {f"model.{name}": tensor for name, tensor in state.items()}
    inner = [name.split(".", 1) for name in state]
    blocks = [f"{one[0]}._orig_mod.{one[1]}" if one[1:] else one[0] for one in inner]
    told = {"epoch": 3, "optimizer_states": [{"state": {}}]}
    ways: dict[str, dict[str, Any]] = {
        "lightning": {**told, "state_dict": {**behind, "criterion.weight": torch.ones(3)}},
        "ddp": {f"module.{name}": tensor for name, tensor in state.items()},
        "compiled, then ddp": {"model": {f"module._orig_mod.{name}": t for name, t in state.items()}},
        "blocks compiled": dict(zip(blocks, state.values(), strict=True)),
        "torchvision's reference": {"model": state, "optimizer": {"state": {}}, "model_ema": ema},
    }
    return ways[how]


@pytest.mark.compat
@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("lightning", " behind 'model.'; 1 others of the file are left out"),
        ("ddp", " behind 'module.'"),
        ("compiled, then ddp", " behind 'module.'"),
        ("blocks compiled", ", without _orig_mod."),
        ("torchvision's reference", ""),
    ],
)
def test_the_remedy_works_for_what_people_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, told: str
) -> None:
    """The printed line is run as it stands; what it makes is taken over, whatever wrapped the model."""
    file = tmp_path / "theirs.ckpt"
    state = safetensors.torch.load_file(saved(tmp_path))
    torch.save(wrapped(how, state), file)
    model = build_model(ModelConfig(width=8), 1, 10)
    with pytest.raises(BadInputError) as refused:
        load_initial(model, file, ())
    monkeypatch.chdir(tmp_path)
    _, _, line = str(refused.value).partition('python -c "')
    exec(line.removesuffix('"'), {})
    assert load_initial(model, tmp_path / "theirs.safetensors", ()) == f"{len(state)} tensors{told}"
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in state.items())
