"""Promise: a sharded checkpoint is read on any number of ranks, whole, or named and skipped."""

import errno
import os
import shutil
import uuid
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch.distributed import PrefixStore, distributed_c10d  # type: ignore[attr-defined]
from torch.testing import assert_close

from tests.chaos import chaos
from tests.helpers.forked import attempt, small
from tests.helpers.marked import flip
from tests.helpers.refusals import named
from tests.helpers.rows import read_rows
from tests.helpers.run_folders import same, weights
from tests.helpers.world import Ranks
from trainer.checkpoint import CHECKPOINTS, store
from trainer.checkpoint.store import listing
from trainer.distributed.parallel import World, words_of_ranks
from trainer.host import files
from trainer.train.components.checkpoint_choice import newest_checkpoint
from trainer.train.components.run import build
from trainer.train.components.task import make_task
from trainer.train.model_of_run import open_run
from trainer.train.request import Request
from trainer.train.start import rank as trainer
from trainer.train.state import load_state, tensors_of

FSDP: dict[str, Any] = {"strategy": "fsdp"}
HSDP: dict[str, Any] = {"strategy": "hsdp", "shard": 2}
LAST = 10  # steps: in the second epoch, with checkpoints of 5 and 10


def whole_run(
    world: World, folder: Path, parallel: dict[str, Any], stop_after: int | None = None
) -> tuple[int, str]:
    """A rank's whole part of a run; its exit code, and what it said."""
    parallel = {"threads": 1, "hang_s": 0, **parallel}
    recipe = small(data={"micro_batch_size": 2}, parallel=parallel, log={"every": 4}, max_steps=LAST)
    said = StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(said), redirect_stderr(said):
        for name, value in (("RANK", world.rank), ("WORLD_SIZE", world.size)):
            patch.setenv(name, str(value))
            patch.setenv(f"LOCAL_{name}", str(value))
        patch.setattr(trainer, "joined_world", lambda *_: nullcontext(world))
        patch.setattr(trainer, "open_store", lambda _: _store(world))
        code = trainer.train_rank(Request(recipe, "small", folder, stop_after=stop_after)).code
    return code, said.getvalue()


def _store(world: World) -> Any:
    """A part of the store in which these ranks have met, for this attempt."""
    if world.size == 1:
        return None
    attempt = words_of_ranks(uuid.uuid4().hex, world)[0]
    return PrefixStore(attempt, distributed_c10d._get_default_store())


def run_on(
    ranks: Ranks, size: int, folder: Path, parallel: dict[str, Any], stop_after: int | None = None
) -> str:
    """Trains on so many ranks; returns what the first one said."""
    folder.mkdir(exist_ok=True)
    answers = ranks.run(size, whole_run, folder, parallel, stop_after)
    assert [code for code, _ in answers] == [75 if stop_after else 0] * size
    return str(answers[0][1])


def assert_same(one: Path, other: Path) -> None:
    rows = ("kind", "step", "loss", "grad_norm", "lr", "updates", "accuracy")
    here, there = ([[row.get(key) for key in rows] for row in read_rows(folder)] for folder in (one, other))
    assert here == there
    assert same(one, other)


def assert_near(one: Path, other: Path) -> None:
    assert_close(weights(one), weights(other), rtol=1e-3, atol=1e-5)


@pytest.fixture(scope="module")
def uncut(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sharded run on two ranks that nothing stopped."""
    folder = tmp_path_factory.mktemp("sharded") / "run"
    run_on(ranks, 2, folder, FSDP)
    return folder


@pytest.fixture(scope="module")
def cut(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, stopped after step 7: checkpoints of 5 and 7."""
    folder = tmp_path_factory.mktemp("sharded") / "run"
    run_on(ranks, 2, folder, FSDP, stop_after=7)
    return folder


def test_weights_are_whole_and_open_and_those_that_ddp_learns(
    ranks: Ranks, uncut: Path, tmp_path: Path
) -> None:
    assert [entry.problem for entry in listing(uncut / CHECKPOINTS, verify=True)] == [None, None]
    opened = open_run(uncut, checkpoint="last")
    ema = {name: tensor for name, tensor in weights(uncut).items() if name.startswith("ema/")}
    assert ema and all(torch.equal(opened.model.state_dict()[name[4:]], ema[name]) for name in ema)
    run_on(ranks, 2, tmp_path / "run", {})
    assert_near(tmp_path / "run", uncut)


@pytest.mark.slow  # the other tests here cut at known places
def test_sharded_chaos_in_small() -> None:
    for sort in ("sharded", "strategies"):
        assert not chaos(sort, 2, seed=5).failures


def test_another_number_of_ranks_goes_on(ranks: Ranks, uncut: Path, cut: Path, tmp_path: Path) -> None:
    """On more; then from a job of HSDP to one of DDP."""
    more, other = Path(shutil.copytree(cut, tmp_path / "more")), tmp_path / "other"
    run_on(ranks, 4, other, HSDP, stop_after=7)
    for folder, size, parallel in ((more, 4, FSDP), (other, 2, {})):
        assert named(run_on(ranks, size, folder, parallel), "7")
        assert_near(folder, uncut)


def test_each_rank_writes_its_rows(uncut: Path) -> None:
    parts = (uncut / CHECKPOINTS / "step-00000010").glob("model_*_of_00002.safetensors")
    sizes = [sum(one.numel() for one in safetensors.torch.load_file(part).values()) for part in parts]
    whole = sum(one.numel() for name, one in weights(uncut).items() if name.startswith("model/"))
    assert sum(sizes) == whole and len(sizes) == 2 and max(sizes) < 0.7 * whole
    assert not list((uncut / CHECKPOINTS).glob(".*")), "what is hidden is half a checkpoint"


def test_a_resumed_run_has_the_same_bits(ranks: Ranks, uncut: Path, cut: Path, tmp_path: Path) -> None:
    """Also by the checkpoint before one that is damaged."""
    whole, damaged = (Path(shutil.copytree(cut, tmp_path / name)) for name in ("whole", "damaged"))
    file = damaged / CHECKPOINTS / "step-00000007" / "optimizer_00001_of_00002.safetensors"
    flip(file, -1, 0)
    assert named(run_on(ranks, 2, damaged, FSDP), file.parent.name, file.name)
    run_on(ranks, 2, whole, FSDP)
    assert_same(whole, uncut)
    assert_same(damaged, uncut)


def read_bytes(world: World, folder: Path) -> tuple[int, list[int], int]:
    """Resumes; bytes of files that were hashed, of each piece that was read, and of this rank's tensors."""
    hashed, pieces, read_hashed, read_into = list[int](), list[int](), files.read_hashed, files.read_into

    def noted_hash(file: int, size: int, into: Any, advance: Any) -> str:
        assert into is None or len(into) < 4000, "state.json alone is kept"
        hashed.append(size if into is None else 0)
        return read_hashed(file, size, into, advance)

    def noted_piece(file: int, start: int, into: memoryview) -> None:
        pieces.append(len(into))
        read_into(file, start, into)

    recipe = small(data={"micro_batch_size": 2}, parallel={"threads": 1, **FSDP})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "read_hashed", noted_hash)
        patch.setattr(files, "read_into", noted_piece)
        found, skipped = newest_checkpoint(folder, "auto", world, sharded=True)
        assert found is not None and not skipped and not pieces
        run = build(recipe, make_task(recipe), world, workers=0, fresh=False)
        load_state(run, found.step, found.tensors, found.state)
    run.close()
    tensors = [one for group in tensors_of(run.state).values() for one in group.values()]
    return sum(hashed), pieces, sum(one.nbytes for one in tensors)


def test_each_rank_reads_its_rows_and_no_more(ranks: Ranks, uncut: Path) -> None:
    folder = uncut / CHECKPOINTS / "step-00000010"
    written = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    answers = ranks.run(4, read_bytes, uncut)
    assert sum(hashed for hashed, _, _ in answers) == written, "together, and each file once"
    for _, pieces, own in answers:
        assert sum(pieces) == own


def failing_part(world: World, folder: Path) -> tuple[int, str]:
    """A run whose last rank can't write its rows at step 5."""
    commit = store.commit_part

    def faulty(beside: Path, *rest: Any) -> dict[str, str]:
        if world.rank and "step-00000005" in beside.name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return commit(beside, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "commit_part", faulty)
        return whole_run(world, folder, FSDP)


def test_a_part_that_cannot_be_written_is_told_and_leaves_nothing(ranks: Ranks, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (code, said), _ = ranks.run(2, failing_part, folder)
    assert code == 0 and f"rank 1: {os.strerror(errno.ENOSPC)}" in said
    assert sorted(path.name for path in (folder / CHECKPOINTS).iterdir()) == ["step-00000010"]


def test_a_new_run_begins_from_it(uncut: Path, tmp_path: Path) -> None:
    attempt(tmp_path / "new", small(), source=str(uncut), code=0)
