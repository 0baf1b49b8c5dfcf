"""Promise: a checkpoint holds the state at its step, not later results, and one copy is in memory."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.cuda_stub import Cuda, stubbed_cuda
from tests.helpers.toys import TokenTask, build_alone, make_recipe
from trainer.checkpoint import background
from trainer.checkpoint.background import BackgroundWriter, make_room, stage
from trainer.train import saving
from trainer.train.saving import Checkpoints
from trainer.train.state import tensors_of


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    """Each tensor but those of the room is the device's."""
    with stubbed_cuda() as stub:
        monkeypatch.setattr(background, "_on_gpu", lambda tensor: tensor.data_ptr() in stub._held)
        yield stub


def of_all_kinds(cuda: Cuda) -> dict[str, dict[str, torch.Tensor]]:
    tensors = {
        "last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "turned": torch.randn(3, 4).t(),
        "one": torch.tensor(2.5, dtype=torch.float64),
        "odd": torch.randn(7).bfloat16(),
        "flags": torch.tensor([True, False, True]),
        "count": torch.arange(3, dtype=torch.int64),
        "learned": torch.nn.Parameter(torch.randn(5)),
    }
    return {"model": {name: cuda.put(tensor) for name, tensor in tensors.items()}}


def test_every_kind_of_tensor_is_staged_in_one_piece_of_memory(cuda: Cuda) -> None:
    tensors = of_all_kinds(cuda)
    room = make_room(tensors)
    assert list(cuda.locked.items()) == [(room.data_ptr(), room.nbytes)]
    assert room.nbytes <= sum(t.nbytes + 64 for t in tensors["model"].values()), "no powers of two"
    for _ in range(2):
        staged = stage(tensors, room)["model"]
        for name, tensor in tensors["model"].items():
            cuda.host_reads(staged[name])
            assert torch.equal(staged[name], tensor) and staged[name].stride() == tensor.stride()
            assert staged[name].dtype == tensor.dtype and not staged[name].requires_grad
            assert staged[name].untyped_storage().data_ptr() == room.data_ptr()
        ends = sorted((one.data_ptr(), one.data_ptr() + one.nbytes) for one in staged.values())
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ends))
    assert cuda.problems == []


def test_what_is_still_written_is_never_overwritten(
    cuda: Cuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save waits for the one before, before it copies: the room is its own."""
    run = build_alone(make_recipe(data={"global_batch_size": 4, "micro_batch_size": 4}), TokenTask(8))
    for group in tensors_of(run.state).values():
        for tensor in group.values():
            cuda.put(tensor)
    order, writer = list[str](), BackgroundWriter(tmp_path, 1, pytest.fail)
    for owner, name in ((writer, "finish"), (writer, "submit"), (saving, "stage")):
        real = getattr(owner, name)

        def noted(*given: Any, name: str = name, real: Any = real) -> Any:
            order.append(name)
            return real(*given)

        monkeypatch.setattr(owner, name, noted)
    checkpoints = Checkpoints(run, writer)
    assert len(cuda.locked) == 1, "made at the start"
    for _ in range(2):
        checkpoints.save()
    assert order[:6] == ["finish", "stage", "submit", "finish", "finish", "stage"]
    assert len(cuda.locked) == 1
    checkpoints.close()
