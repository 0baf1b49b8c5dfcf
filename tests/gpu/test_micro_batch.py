"""Promise, on a GPU: the micro-batch that is found fits beside what others hold, with the headroom."""

from collections.abc import Iterator

import pytest
import torch

from tests.gpu import MARKS
from tests.helpers.forked import small
from trainer.config.recipe import Recipe
from trainer.host.memory_room import HEADROOM
from trainer.launch.launcher import LocalRanks
from trainer.launch.signals import SignalReceiver
from trainer.train.start.micro_batch import fitting_size, run_trial

pytestmark = MARKS

GIB = 1 << 30
ONE = LocalRanks(1, 1, {"CUDA_VISIBLE_DEVICES": "0"})


@pytest.fixture
def little_is_left() -> Iterator[None]:
    """All but 4 GiB and the headroom of the first GPU is somebody else's."""
    free, whole = torch.cuda.mem_get_info(0)
    left = 4 * GIB + int(HEADROOM * whole)
    if free < left + 2 * GIB:
        pytest.skip(f"only {free / GIB:.1f} GiB of the GPU are free")
    block = torch.empty(free - left, dtype=torch.uint8, device="cuda:0")
    yield
    del block
    torch.cuda.empty_cache()


def recipe(**sections: object) -> Recipe:
    sizes = {"image_size": 256, "samples": 256, "global_batch_size": 4096, "micro_batch_size": 4096}
    data = {**sizes, "workers": 1, "eval_batch_size": 8}
    return small(data=data, model={"width": 16}, device="cuda", **sections)


@pytest.mark.usefixtures("little_is_left")
@pytest.mark.parametrize(
    "sections", [{}, {"precision": {"mode": "bf16"}, "memory": {"checkpointing": "blocks"}}]
)
def test_what_is_found_fits_and_twice_as_much_does_not(sections: dict[str, object]) -> None:
    asked = recipe(**sections)
    found = fitting_size(asked, ONE)
    assert found < 4096
    with SignalReceiver() as receiver:
        assert run_trial(asked, ONE, found, receiver).fits
        assert not run_trial(asked, ONE, 2 * found, receiver).fits
