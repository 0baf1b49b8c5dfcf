"""Promise: training starts from somebody's weights exactly, or says what doesn't fit."""

import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from tests.helpers.refusals import refused
from tests.helpers.steps import assert_same_bits
from tests.helpers.toys import build_alone, make_recipe
from tests.helpers.world import Ranks
from trainer.config.model import ModelConfig
from trainer.distributed.parallel import World
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
    assert_same_bits({**run.state.model.state_dict()}, wanted)
    assert run.state.average is not None and "starts from" in run.notes[0]
    trained = {name: wanted[name] for name, _ in run.state.model.named_parameters()}
    assert_same_bits({**run.state.average.tensors}, trained)


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
    told = ("1 missing (stem.weight)", "1 unexpected (decoder.weight)", "2 (head.weight [7, 16] for [10, 16]")
    with refused(*told, """'model.reinit=["decoder", "head", "stem"]'"""):
        check_request(recipe, make_task(recipe), 1)
    # Nothing is taken over in part.
    model = build_model(ModelConfig(width=8), 1, 10)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with refused():
        load_initial(model, differing(tmp_path), ["head.*"])
    assert_same_bits({**model.state_dict()}, before)


@pytest.mark.compat
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_floating_formats_are_converted(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = safetensors.torch.load_file(saved(tmp_path))
    tensors = {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
    safetensors.torch.save_file(tensors, tmp_path / "other.safetensors")
    model = build_model(ModelConfig(width=8), 1, 10)
    load_initial(model, tmp_path / "other.safetensors", ())
    assert torch.equal(model.get_parameter("stem.weight"), tensors["stem.weight"].float())


def test_buffers_may_be_masks(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    model.register_buffer("seen", torch.tensor([True, False]))
    model.register_buffer("added", torch.tensor([0.0, -torch.inf]))
    safetensors.torch.save_file(model.state_dict(), tmp_path / "start.safetensors")
    load_initial(model, tmp_path / "start.safetensors", ())


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


OTHERS: dict[str, Callable[[Path], Any]] = {
    "no safetensors": lambda file: file.write_bytes(b"\xff" * 64),
    "no tensors": lambda file: file.write_bytes(b"\x08\0\0\0\0\0\0\0{}      "),
    "nothing": lambda _: None,
    "a pipe, which isn't waited for": os.mkfifo,
    "a folder": Path.mkdir,
}


@pytest.mark.parametrize("what", OTHERS)
def test_any_other_file_is_one_clear_line(tmp_path: Path, what: str) -> None:
    OTHERS[what](file := tmp_path / "x.safetensors")
    with refused(file.name):
        load_initial(build_model(ModelConfig(width=8), 1, 10), file, ())


def test_what_begins_anew_needs_weights_to_start_from() -> None:
    with refused("model.pretrained", by=ValueError):
        ModelConfig(reinit=("head.*",))


def start_from(world: World, folder: str, alike: bool) -> None:
    file = Path(folder, f"{world.rank}.safetensors")
    recipe = make_recipe(model={"width": 8, "pretrained": str(file)}, data={"micro_batch_size": 16})
    with nullcontext() if alike else refused("initial weights"):
        build(recipe, make_task(recipe), world, 0)


@pytest.mark.parametrize("alike", [True, False])
def test_ranks_that_start_from_other_weights_are_told(ranks: Ranks, tmp_path: Path, alike: bool) -> None:
    for rank in range(2):
        torch.manual_seed(0 if alike else rank)
        save_weights(build_model(ModelConfig(width=8), 1, 10), tmp_path / f"{rank}.safetensors")
    ranks.run(2, start_from, str(tmp_path), alike)


def behind(prefix: str, state: State) -> dict[str, Any]:
    return {f"{prefix}{name}": tensor for name, tensor in state.items()}


def reference(state: State) -> dict[str, Any]:
    average = {name: tensor + 1 for name, tensor in state.items()}
    return {"model": state, "optimizer": {"state": {}}, "model_ema": behind("module.", average)}


# What people have: a state_dict behind a prefix, in a dict of other things; and what is said of it.
WRAPPED: dict[str, tuple[Callable[[State], dict[str, Any]], str]] = {
    "lightning": (
        lambda state: (
            {"epoch": 3, "optimizer_states": [{"state": {}}]}
            | {"state_dict": {**behind("model.", state), "criterion.weight": torch.ones(3)}}
        ),
        " behind 'model.'; 1 others of the file are left out",
    ),
    "ddp": (lambda state: behind("module.", state), " behind 'module.'"),
    "compiled, then ddp": (lambda state: {"model": behind("module._orig_mod.", state)}, " behind 'module.'"),
    "blocks compiled": (
        lambda state: {name.replace(".", "._orig_mod.", 1): tensor for name, tensor in state.items()},
        ", without _orig_mod.",
    ),
    "torchvision's reference": (reference, ""),
}


@pytest.mark.compat
@pytest.mark.parametrize("how", WRAPPED)
def test_the_remedy_works_for_what_people_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """The printed line is run as it stands; what it makes is taken over, whatever wrapped the model."""
    file, (wrap, told) = tmp_path / "theirs.ckpt", WRAPPED[how]
    state = safetensors.torch.load_file(saved(tmp_path))
    torch.save(wrap(state), file)
    model = build_model(ModelConfig(width=8), 1, 10)
    with refused("theirs.ckpt") as raised:
        load_initial(model, file, ())
    monkeypatch.chdir(tmp_path)
    _, _, line = str(raised.value).partition('python -c "')
    exec(line.removesuffix('"'), {})
    assert load_initial(model, tmp_path / "theirs.safetensors", ()) == f"{len(state)} tensors{told}"
    assert_same_bits({**model.state_dict()}, state)
