"""Promise: what a sharded run leaves is read on any number of ranks, whole, or named and left out."""

from contextlib import nullcontext, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from tests.helpers.forked import small
from tests.helpers.rows import read_rows
from tests.helpers.world import Ranks
from trainer.checkpoint import FOLDER
from trainer.checkpoint.store import listing
from trainer.distributed.parallel import World
from trainer.train import trainer
from trainer.train.model_of_run import open_run
from trainer.train.request import Request

FSDP: dict[str, Any] = {"strategy": "fsdp"}
HSDP: dict[str, Any] = {"strategy": "hsdp", "shard": 2}


def whole_run(
    world: World, folder: Path, parallel: dict[str, Any], stop_after: int | None = None
) -> tuple[int, str]:
    """A rank's whole part of a run; its exit code, and what it said."""
    names = {"RANK": world.rank, "LOCAL_RANK": world.rank}
    names |= {"WORLD_SIZE": world.size, "LOCAL_WORLD_SIZE": world.size}
    recipe = small(
        data={"micro_batch_size": 2}, parallel={"threads": 1, "hang_s": 0, **parallel}, log={"every": 4}
    )
    said = StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(said), redirect_stderr(said):
        for name, value in names.items():
            patch.setenv(name, str(value))
        patch.setattr(trainer, "joined_world", lambda *_: nullcontext(world))
        code = trainer.train_rank(Request(recipe, "small", folder, stop_after=stop_after))
    return code, said.getvalue()


def run_on(
    ranks: Ranks, size: int, folder: Path, parallel: dict[str, Any], stop_after: int | None = None
) -> str:
    """Trains on so many ranks; returns what the first one said."""
    folder.mkdir(exist_ok=True)
    answers = ranks.run(size, whole_run, folder, parallel, stop_after)
    assert [code for code, _ in answers] == [75 if stop_after else 0] * size
    return str(answers[0][1])


def weights_of(folder: Path, name: str = "model") -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(folder / f"{name}.safetensors")


def same_bits(one: Path, other: Path) -> bool:
    rows = ("kind", "step", "loss", "grad_norm", "lr", "updates", "accuracy")
    here, there = ([[row.get(key) for key in rows] for row in read_rows(folder)] for folder in (one, other))
    return here == there and all(
        torch.equal(tensor, weights_of(other, name)[key])
        for name in ("model", "ema")
        for key, tensor in weights_of(one, name).items()
    )


def close(one: Path, other: Path) -> bool:
    theirs = weights_of(other)
    return all(
        torch.allclose(tensor, theirs[name], rtol=1e-3, atol=1e-5) for name, tensor in weights_of(one).items()
    )


@pytest.fixture(scope="module")
def uncut(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sharded run on two ranks that nothing stopped."""
    folder = tmp_path_factory.mktemp("sharded") / "run"
    run_on(ranks, 2, folder, FSDP)
    return folder


def test_final_weights_are_whole_and_open(uncut: Path) -> None:
    opened = open_run(uncut)
    assert opened.weights == "ema.safetensors"
    for name, tensor in weights_of(uncut, "ema").items():
        assert torch.equal(opened.model.state_dict()[name], tensor)


@pytest.mark.parametrize("parallel", [{}, HSDP], ids=["ddp", "hsdp"])
def test_it_learns_the_same(ranks: Ranks, uncut: Path, tmp_path: Path, parallel: dict[str, Any]) -> None:
    run_on(ranks, 4 if parallel else 2, tmp_path / "run", parallel)
    assert close(tmp_path / "run", uncut)


def test_a_resumed_run_has_the_same_bits(ranks: Ranks, uncut: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    said = run_on(ranks, 2, folder, FSDP, stop_after=7)
    assert "stopped after step 7" in said
    assert "goes on after step 7" in run_on(ranks, 2, folder, FSDP)
    assert same_bits(folder, uncut)


@pytest.mark.parametrize(
    ("size", "parallel", "then_size", "then"),
    [
        (2, FSDP, 4, FSDP),
        (4, FSDP, 2, FSDP),
        (2, FSDP, 2, {}),
        (2, {}, 2, FSDP),
        (4, HSDP, 2, FSDP),
        (2, FSDP, 1, FSDP),
    ],
    ids=["to more", "to fewer", "to ddp", "from ddp", "from hsdp", "to one"],
)
def test_another_number_of_ranks_goes_on(
    ranks: Ranks,
    uncut: Path,
    tmp_path: Path,
    size: int,
    parallel: dict[str, Any],
    then_size: int,
    then: dict[str, Any],
) -> None:
    folder = tmp_path / "run"
    run_on(ranks, size, folder, parallel, stop_after=7)
    said = run_on(ranks, then_size, folder, then)
    assert "goes on after step 7" in said and "sums in another order" in said
    assert close(folder, uncut)


def test_checkpoints_open_and_verify(uncut: Path) -> None:
    entries = listing(uncut / FOLDER, verify=True)
    assert [entry.problem for entry in entries] == [None, None]
    opened = open_run(uncut, checkpoint="last")
    for name, tensor in weights_of(uncut, "ema").items():
        assert torch.equal(opened.model.state_dict()[name], tensor)
