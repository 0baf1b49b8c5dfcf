"""Promise, on a GPU: the micro-batch that is chosen fits beside what others hold, with the headroom."""

from collections.abc import Iterator

import pytest
import torch

from tests.helpers.forked import small
from trainer.host.memory_room import HEADROOM
from trainer.launch.launcher import LocalRanks
from trainer.launch.signals import SignalReceiver
from trainer.train.start.tune.job import Job, choose, run_probe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]

GIB = 1 << 30


@pytest.fixture
def little_is_left() -> Iterator[int]:
    """All but 4 GiB and the headroom of the first GPU is somebody else's."""
    free, whole = torch.cuda.mem_get_info(0)
    left = 4 * GIB + int(HEADROOM * whole)
    if free < left + 2 * GIB:
        pytest.skip(f"only {free / GIB:.1f} GiB of the GPU are free")
    block = torch.empty(free - left, dtype=torch.uint8, device="cuda:0")
    yield block.nbytes
    del block
    torch.cuda.empty_cache()


def job(**sections: object) -> Job:
    data = {
        "image_size": 256,
        "samples": 256,
        "global_batch_size": 4096,
        "micro_batch_size": 4096,
        "workers": 1,
    }
    recipe = small(data={**data, "eval_batch_size": 8}, model={"width": 16}, device="cuda", **sections)
    return Job(recipe, LocalRanks(1, 1, {"CUDA_VISIBLE_DEVICES": "0"}))


@pytest.mark.parametrize(
    "sections", [{}, {"precision": {"mode": "bf16"}, "memory": {"checkpointing": "blocks"}}]
)
def test_the_choice_leaves_the_headroom(little_is_left: int, sections: dict[str, object]) -> None:
    found = choose(job(**sections), lambda _: None)
    assert found.chosen is not None
    assert found.chosen.where == "GPU of rank 0"
    assert little_is_left < found.chosen.peak_bytes <= (1 - HEADROOM) * found.chosen.limit_bytes
    too_large = [one for one in found.probes if not one.fits]
    assert too_large
    assert min(one.micro_batch_size for one in too_large) == 2 * found.chosen.micro_batch_size


def test_out_of_memory_names_the_holder(little_is_left: int) -> None:
    with SignalReceiver() as receiver:
        one = run_probe(job(), 4096, receiver)
    assert not one.fits
    assert "out of memory on cuda:0" in one.note
    assert little_is_left > 0
